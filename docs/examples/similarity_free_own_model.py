"""SimilarityFree with your own model and data: EF-FedAvg with a diminishing step size.

Six nodes, each with one dominant class, learn a small network and send a tenth of each update. You pass the
suite's ClientApp only a function from a node's context to its model and data. ``sd_feel_client`` takes the
same function.
"""

from functools import cache

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from torch import nn

from hedgerow.clients import LocalTask, similarity_free_client
from hedgerow.sim import simulate
from hedgerow.strategies import Diminishing, SimilarityFree

NODES, FEATURES, CLASSES = 6, 8, 3


@cache
def network() -> nn.Module:
    """Return the architecture; nodes in one process share it, because messages have the parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def samples(partition_id: int, count: int = 90) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one node's data: points of three clusters, half of them from one cluster."""
    stream = torch.Generator().manual_seed(partition_id)
    y = torch.randint(CLASSES, (count,), generator=stream)
    y[: count // 2] = partition_id % CLASSES
    centres = 2 * torch.eye(CLASSES, FEATURES)
    return centres[y] + torch.randn(count, FEATURES, generator=stream), y


@cache
def task_of(partition_id: int) -> LocalTask:
    """Return a node's model and data; ``part`` are its own rows of x and y, here all of them."""
    x, y = samples(partition_id)
    return LocalTask(network(), x, y, part=np.arange(len(y)))


def task(context: Context) -> LocalTask:
    """Return a node's task; on a device ``context.node_config`` would also name its data."""
    return task_of(int(context.node_config["partition-id"]))


client_app = similarity_free_client(task)
server_app = ServerApp()


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Return the global model's loss on data that no node has."""
    model = network()
    model.load_state_dict(arrays.to_torch_state_dict())
    x, y = samples(NODES)
    with torch.no_grad():
        return MetricRecord({"loss": float(nn.functional.cross_entropy(model(x), y))})


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run 30 rounds, and print the loss and the uplink traffic."""
    strategy = SimilarityFree(
        schedule=Diminishing(c=0.3, nu=0.51),
        compressor="topk(0.1)",
        local_iters=5,
        batch_size=15,
        min_available_nodes=NODES,
        fraction_evaluate=0.0,
    )
    initial = ArrayRecord(network().state_dict())
    result = strategy.start(grid, initial, num_rounds=30, evaluate_fn=evaluate)
    losses = [float(metrics["loss"]) for _, metrics in sorted(result.evaluate_metrics_serverapp.items())]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"uplinks: {strategy.ledger.total('worker->server').nominal_bits} bits")


if __name__ == "__main__":
    simulate(server_app, client_app, NODES, quiet=True)
