"""FedMUD with your own model and data: updates are sent as low-rank factors in both directions.

Five nodes learn a network whose hidden layer of 1,024 weights is sent in an eighth of the size. You pass the
suite's ClientApp a function from a node's context to its model and data. ``FedMUD.for_model`` finds the
layers to factor.
"""

from functools import cache

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from torch import nn

from hedgerow.clients import LocalTask, fedmud_client
from hedgerow.sim import simulate
from hedgerow.strategies import FedMUD

NODES, FEATURES, CLASSES = 5, 10, 3


@cache
def network() -> nn.Module:
    """Return the architecture; nodes in one process share it, because messages have the parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hidden = [nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()]
        return nn.Sequential(*hidden, nn.Linear(32, CLASSES))


def samples(partition_id: int, count: int = 120) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one node's data: points, with the ring around the origin that they are in as class."""
    x = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(partition_id))
    radius = x[:, :2].norm(dim=1)
    return x, (radius > 0.8).long() + (radius > 1.6).long()


@cache
def task_of(partition_id: int) -> LocalTask:
    """Return a node's model and data; ``part`` are its own rows of x and y, here all of them."""
    x, y = samples(partition_id)
    return LocalTask(network(), x, y, part=np.arange(len(y)))


def task(context: Context) -> LocalTask:
    """Return a node's task; on a device ``context.node_config`` would also name its data."""
    return task_of(int(context.node_config["partition-id"]))


client_app = fedmud_client(task)
server_app = ServerApp()


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Return the loss of the global model, base and factors merged, on data that no node has."""
    model = network()
    model.load_state_dict(arrays.to_torch_state_dict())
    x, y = samples(NODES, 400)
    with torch.no_grad():
        return MetricRecord({"loss": float(nn.functional.cross_entropy(model(x), y))})


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run 25 rounds, and print the loss and the uplink traffic."""
    strategy = FedMUD.for_model(
        network(),
        ratio=1 / 8,
        budget="layer",
        learning_rate=0.2,
        local_epochs=2,
        batch_size=20,
        min_available_nodes=NODES,
        fraction_evaluate=0.0,
    )
    initial = ArrayRecord(network().state_dict())
    result = strategy.start(grid, initial, num_rounds=25, evaluate_fn=evaluate)
    losses = [float(metrics["loss"]) for _, metrics in sorted(result.evaluate_metrics_serverapp.items())]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    weights = sum(parameter.numel() for parameter in network().parameters())
    sent = strategy.ledger.total("client->server").nominal_bits
    print(f"uplinks: {sent} of {32 * weights * NODES * 25} bits")


if __name__ == "__main__":
    simulate(server_app, client_app, NODES, quiet=True)
