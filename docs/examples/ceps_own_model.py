"""CEPS with your own model and data: nodes send signs to their neighbours, and there is no server model.

Eight nodes look for the few relevant features of sixty. Each keeps its own sparse model and sends its
neighbours one bit for each of 120 random projections of it. You pass the suite's ClientApp a function from a
node's context to its objective; ``TorchProblem`` makes one from any PyTorch model and loss.
"""

from functools import cache

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from hedgerow.clients import TorchProblem, ceps_client
from hedgerow.sim import simulate
from hedgerow.strategies import CEPS, Monitor

NODES, FEATURES, RELEVANT = 8, 60, 3


def samples(partition_id: int) -> tuple[Tensor, Tensor]:
    """Return one node's data: 80 records whose targets depend on the first three features."""
    stream = torch.Generator().manual_seed(partition_id)
    x = torch.randn(80, FEATURES, generator=stream, dtype=torch.float64)
    return x, x[:, :RELEVANT].sum(dim=1) + 0.1 * torch.randn(80, generator=stream, dtype=torch.float64)


def squared_error(predictions: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each record."""
    return (predictions.squeeze(-1) - targets) ** 2 / 2


@cache
def problem_of(partition_id: int) -> TorchProblem:
    """Return a node's objective. The iteration starts at zero, whatever the model's own weights."""
    model = nn.Linear(FEATURES, 1, bias=False, dtype=torch.float64)
    return TorchProblem(model, *samples(partition_id), loss=squared_error)


def problem(context: Context) -> TorchProblem:
    """Return a node's objective; on a device ``context.node_config`` would also name its data."""
    return problem_of(int(context.node_config["partition-id"]))


client_app = ceps_client(problem)
server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run 60 iterations on a ring, and print the loss of the nodes' models and the traffic."""
    # It reads all models, which is only acceptable in a simulation; omit it on devices.
    monitor = Monitor(sparsity=RELEVANT)
    strategy = CEPS(
        dim=FEATURES,
        sparsity=RELEVANT,
        measurements=120,
        topology="ring",
        participation=1.0,
        interval=2,
        sigma_rule="fixed_c",
        c=1.5,
        min_available_nodes=NODES,
        num_iterations=60,
        monitor=monitor,
    )
    # Models stay on the nodes, so the initial and the final arrays are empty.
    strategy.start(grid, ArrayRecord(), num_rounds=60)
    print(f"loss {monitor.history[0].local_loss:.3f} -> {monitor.history[-1].local_loss:.3f}")
    sent = strategy.ledger.total("node->node")
    print(f"{sent.messages} messages of {sent.nominal_bits // sent.messages} bits")


if __name__ == "__main__":
    simulate(server_app, client_app, NODES, quiet=True)
