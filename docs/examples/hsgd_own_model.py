"""HSGD with your own model and data: hospitals have half of their patients' features, devices the rest.

There are two groups, each with a hospital and an edge that hosts the devices of the hospital's patients. The
model has three pieces: the hospital's encoder, the devices' encoder, and a head over both encodings. You pass
the suite's ClientApp a function from a node's context to its data.
"""

from functools import cache

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from hedgerow.clients import Party, hsgd_client
from hedgerow.sim import simulate
from hedgerow.strategies import HSGD
from hedgerow.tasks import SplitModel

GROUPS, PATIENTS, LAB, SENSORS = 2, 60, 6, 4
NODES = 2 * GROUPS


class Head(nn.Module):
    """Two layers over the encodings of hospital and device."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8 + 4, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        """Return the logits of encodings (batch, 8) and (batch, 4)."""
        logits: Tensor = self.layers(torch.cat([z1, z2], -1))
        return logits


@cache
def model() -> SplitModel:
    """Return the architecture; nodes in one process share it, because messages have the parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hospital = nn.Sequential(nn.Linear(LAB, 8), nn.Tanh())
        device = nn.Sequential(nn.Linear(SENSORS, 4), nn.Tanh())
        return SplitModel(Head(), hospital, device, hospital_encoding=8, device_encoding=4)


def patients(group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the measurements of the laboratory and of the sensors, and the labels, which need both."""
    stream = torch.Generator().manual_seed(group)
    x1, x2 = (torch.randn(PATIENTS, width, generator=stream) for width in (LAB, SENSORS))
    return x1, x2, (x1[:, 0] + 2 * x2[:, 0] > 0).long()


@cache
def party_of(node: int) -> Party:
    """Return a node's data; the nodes of a group are its hospital and its edge."""
    group, (x1, x2, y) = node // 2, patients(node // 2)
    role, x = ("hospital", x1) if node % 2 == 0 else ("edge", x2)
    return Party(role, group, [f"{group}-{i}" for i in range(PATIENTS)], x, y, model())


def party(context: Context) -> Party:
    """Return a node's party; on a device ``context.node_config`` would also name its data."""
    return party_of(int(context.node_config["partition-id"]))


client_app = hsgd_client(party)
server_app = ServerApp()


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Return the loss of the whole model on patients of none of the hospitals."""
    whole = model()
    whole.load_state_dict(arrays.to_torch_state_dict())
    x1, x2, y = patients(GROUPS)
    with torch.no_grad():
        return MetricRecord({"loss": float(nn.functional.cross_entropy(whole(x1, x2), y))})


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run 25 global intervals of four iterations, with half of the patients in a batch."""
    strategy = HSGD(
        global_interval=4, local_interval=2, participation=0.5, learning_rate=0.2, min_available_nodes=NODES
    )
    initial = ArrayRecord(model().state_dict())
    result = strategy.start(grid, initial, num_rounds=25, evaluate_fn=evaluate)
    losses = [float(metrics["loss"]) for _, metrics in sorted(result.evaluate_metrics_serverapp.items())]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"{strategy.iterations} iterations; encodings, heads and models travelled, data and labels did not")


if __name__ == "__main__":
    simulate(server_app, client_app, NODES, quiet=True)
