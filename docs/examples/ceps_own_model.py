"""CEPS with a model and data of one's own: no server learns anything, nodes send each other signs.

Eight nodes look for the few features of sixty that matter. Each keeps its own sparse model, and tells its
neighbours one bit for each of 120 random projections of it. The project gives the suite's ClientApp a
function from a node's context to its objective: ``TorchProblem`` makes one of any PyTorch model and loss.
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
    """Return one node's data: 80 records, whose targets depend on the first three features."""
    stream = torch.Generator().manual_seed(partition_id)
    x = torch.randn(80, FEATURES, generator=stream, dtype=torch.float64)
    return x, x[:, :RELEVANT].sum(dim=1) + 0.1 * torch.randn(80, generator=stream, dtype=torch.float64)


def squared_error(predictions: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each record."""
    return (predictions.squeeze(-1) - targets) ** 2 / 2


@cache
def problem_of(partition_id: int) -> TorchProblem:
    """Return what a node minimises. The iteration starts at zero, wherever the model's own weights are."""
    model = nn.Linear(FEATURES, 1, bias=False, dtype=torch.float64)
    return TorchProblem(model, *samples(partition_id), loss=squared_error)


def problem(context: Context) -> TorchProblem:
    """Return a node's objective; on a device its data would be found by ``context.node_config`` too."""
    return problem_of(int(context.node_config["partition-id"]))


client_app = ceps_client(problem)
server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run 60 iterations on a ring and say what the nodes' models came to, and what they sent."""
    # It looks at all models, as only a simulation may; on devices leave it out.
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
    # Models live on the nodes: what is started with, and what comes back, are empty arrays.
    strategy.start(grid, ArrayRecord(), num_rounds=60)
    print(f"loss {monitor.history[0].local_loss:.3f} -> {monitor.history[-1].local_loss:.3f}")
    sent = strategy.ledger.total("node->node")
    print(f"{sent.messages} messages of {sent.nominal_bits // sent.messages} bits")


if __name__ == "__main__":
    simulate(server_app, client_app, NODES, quiet=True)
