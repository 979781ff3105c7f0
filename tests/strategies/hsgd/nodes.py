"""HSGD's parties on the oracle's models: the suite's own nodes, what they were asked and what they tell."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict
from tests.clients.hsgd.federation import half_square, scalar_model, tanh_model
from tests.clients.hsgd.federation import parties as parties_of
from tests.oracles.hsgd import Group, Theta
from tests.oracles.test_hsgd_oracle import ScalarModel, TanhModel
from tests.strategies.recording_grid import RecordingGrid

from hedgerow.clients import hsgd_client
from hedgerow.sim import FaultModel, flower_identity
from hedgerow.strategies import HSGD, RoundEnd
from hedgerow.tasks import split_loss
from hedgerow.wire import lazy_array

__all__ = ["Parties", "Spy", "record_of", "run", "theta_of"]

Vector = np.ndarray
Sabotage = Callable[[str, int, int, RecordDict], RecordDict]


@dataclass
class Parties:
    """All parties of some groups: hospitals first, then an edge each, or device after device.

    ``sabotage(kind, partition, t, reply)`` may change a reply or raise; ``ids`` are what partitions claim in
    place of their own people; what was asked stands in ``trace``: kind, role, partition, t, ids.
    """

    model: ScalarModel | TanhModel
    groups: Sequence[Group]
    edges: bool = False
    dtype: str = "float64"
    sabotage: Sabotage | None = None
    ids: dict[int, list[str]] = field(default_factory=dict)
    trace: list[tuple[str, str, int, int, list[str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        columns = [[part.astype(self.dtype) for part in group[1:]] for group in self.groups]
        if isinstance(self.model, TanhModel):
            split, loss = tanh_model(*(x.shape[1] for x in columns[0][:2]), *self.lengths), split_loss
        else:
            split, loss = scalar_model(), half_square
            columns = [[x1[:, None], x2[:, None], y] for x1, x2, y in columns]
        if self.dtype == "float32":
            split = split.float()
        layout = "edges" if self.edges else "devices"
        self.parties = parties_of(split, columns, layout, loss)  # type: ignore[arg-type]
        self._nodes = hsgd_client(lambda own: self.parties[int(own.node_config["partition-id"])])

    @property
    def lengths(self) -> tuple[int, int]:
        """The lengths of both sides' encodings."""
        return (self.model.e1, self.model.e2) if isinstance(self.model, TanhModel) else (1, 1)

    def app(self, message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        kind = message.metadata.message_type.rpartition(".")[2]
        config = message.content.config_records.get("config", {})
        reply, t = self._nodes(message, context).content, int(config.get("t", -1))
        self.trace.append((kind, self.parties[partition].role, partition, t, list(config.get("ids", []))))
        if kind == "pair" and partition in self.ids:
            reply["pair"]["ids"] = self.ids[partition]
        if self.sabotage is not None:
            reply = self.sabotage(kind, partition, t, reply)
        return Message(reply, reply_to=message)


class Spy(RecordingGrid):
    """A grid that keeps what was sent and told: message type, partition id, content."""

    def __init__(self, parties: Parties, **options: Any) -> None:
        super().__init__(parties.app, len(parties.parties), **options)


def record_of(theta: Theta, dtype: str = "float64") -> ArrayRecord:
    names = ("head.weight", "hospital.weight", "device.weight")
    return ArrayRecord({name: lazy_array(b.astype(dtype)) for name, b in zip(names, theta, strict=True)})


def theta_of(record: ArrayRecord) -> Vector:
    return np.concatenate([array.numpy().ravel() for array in record.values()])


def run(
    strategy: HSGD,
    parties: Parties,
    start: Theta,
    num_rounds: int,
    *,
    faults: FaultModel | dict[int, FaultModel] | None = None,
    grid: Spy | None = None,
) -> tuple[Vector, list[RoundEnd], Spy]:
    """Run and return the final model, what callbacks were told, and the grid."""
    ends: list[RoundEnd] = []
    strategy.on_round_end = [*strategy.on_round_end, ends.append]
    grid = grid or Spy(parties, faults=faults)
    with flower_identity(1):
        result = strategy.start(grid, record_of(start, parties.dtype), num_rounds=num_rounds, timeout=60.0)
    return theta_of(result.arrays), ends, grid
