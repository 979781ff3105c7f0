"""The base that a node stores between rounds; it follows the server's base update by update, in order.

Paper: S. Li et al., "The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient Federated
Learning" (FedMUD), eq. (5): the base is a sum of merged updates. In the paper every node receives every
update. Here a node that was away is sent those it missed, and requests the base if it has none to add them
to; a new node may draw the initial base itself. Updates are added one by one, because adding their sum would
round differently from the server.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from torch import Tensor

from hedgerow.clients.instructions import flag, string, whole
from hedgerow.clients.node_state import keep, kept
from hedgerow.clients.training.work import State
from hedgerow.wire.calls import Call
from hedgerow.wire.records import checksum, finite_views, received_state, to_record, to_state_dict

Made = TypeVar("Made")

_RECORD = "base"  # in context.state


@dataclass(frozen=True)
class Evolution:
    """How a method updates its base."""

    shapes: Mapping[str, tuple[int, ...]]  # The shapes of the base's weights, by key.
    updates: str  # The ArrayRecord of a message's updates, with keys ``"<version>/<key>"``.
    # (base, version, that version's update) -> next base: new float32 tensors on the CPU, equal to the
    # server's bit for bit.
    step: Callable[[State, int, Mapping[str, Tensor]], State]


class Bases:
    """The bases of the nodes in one batched call; equal bases are computed and stored once."""

    def __init__(self) -> None:
        # Values by key, with the objects that the key identifies by id: kept alive, so that no id is reused.
        self._made: dict[Hashable, tuple[Any, object]] = {}

    def _once(self, key: Hashable, make: Callable[[], Made], alive: object = None) -> Made:
        if key not in self._made:
            self._made[key] = make(), alive
        made: Made = self._made[key][0]
        return made

    def current(
        self,
        call: Call,
        config: ConfigRecord,
        evolution: Evolution,
        initial: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> State | None:
        """Return the base of the message's ``version``, or None if the whole base must be sent.

        A base in the message is used as it is; else the node's own base is updated, skipping the updates that
        it has already. A node without one draws version 0 with ``initial`` (None if it cannot), if the
        message has its ``base-checksum`` and all updates since. With ``keep-base`` in the config the base is
        stored in the node's context. The result is float32 on the CPU and shared between nodes: never change
        it. A config, base or update that is missing or invalid is a ValueError.
        """
        version, first = whole(config, "version", 0), whole(config, "from-version", 0)
        keeps = flag(config, "keep-base")
        base = self._from_message(call, evolution)
        if base is None:
            held = _Held.of(call.context, evolution)
            if held is None or not first <= held.version <= version:
                held = self._drawn(config, evolution, initial) if first == 0 else None
            if held is None:
                return None
            same = held.version == version
            base = self._shared(held) if same else self._moved_on(held, version, call, evolution)
            if same and not held.drawn:
                return base
        if keeps:
            found = self._once(("checksum", id(base)), lambda: checksum(to_record(base)), base)
            keep(call.context, _RECORD, to_record(base), {"version": version, "checksum": found})
        return base

    def _from_message(self, call: Call, evolution: Evolution) -> State | None:
        record = call.content.array_records.get("base")
        if record is None:
            return None

        def read() -> State:
            state = received_state(record, evolution.shapes, subject="the message's base")
            return {key: value.to(torch.float32) for key, value in state.items()}

        return self._once(("sent", id(record)), read, record)

    def _drawn(
        self, config: ConfigRecord, evolution: Evolution, initial: Callable[[], Mapping[str, Tensor]] | None
    ) -> "_Held | None":
        """Return the initial base if it can be drawn here with the server's checksum, else None."""
        expected = string(config, "base-checksum") if "base-checksum" in config else ""
        if not expected or initial is None:
            return None

        def draw() -> _Held | None:
            state = initial()
            shapes = {key: tuple(state[key].shape) for key in evolution.shapes if key in state}
            if shapes != dict(evolution.shapes):
                return None
            record = to_record({key: state[key].detach().to("cpu", torch.float32) for key in shapes})
            return _Held(record, 0, expected, drawn=True) if checksum(record) == expected else None

        return self._once(("initial", expected), draw)

    def _shared(self, held: "_Held") -> State:
        return self._once(("stored", held.checksum), lambda: to_state_dict(held.record))

    def _moved_on(self, held: "_Held", version: int, call: Call, evolution: Evolution) -> State:
        record = call.content.array_records.get(evolution.updates, ArrayRecord())

        def move() -> State:
            base = self._shared(held)
            for step in range(held.version, version):
                base = evolution.step(base, step, _update(record, evolution.updates, step))
            return base

        return self._once(("moved", held.checksum, held.version, id(record)), move, record)


@dataclass(frozen=True)
class _Held:
    """An intact base from a node's context, or one that it drew."""

    record: ArrayRecord
    version: int
    checksum: str
    drawn: bool = False

    @classmethod
    def of(cls, context: Context, evolution: Evolution) -> "_Held | None":
        arrays, status = kept(context, _RECORD)
        version, shapes = status.get("version"), {key: values.shape for key, values in arrays.items()}
        if not isinstance(version, int) or shapes != dict(evolution.shapes):
            return None
        record = context.state.array_records[_RECORD]
        if (found := checksum(record)) != status.get("checksum"):
            return None
        return cls(record, version, found)


def _update(record: ArrayRecord, name: str, version: int) -> State:
    """Return one version's update; ValueError if it is missing or not finite."""
    prefix = f"{version}/"
    update = ArrayRecord()
    for key, array in record.items():
        if key.startswith(prefix):
            update[key.removeprefix(prefix)] = array
    if not update:
        sent = sorted({key.partition("/")[0] for key in record})
        raise ValueError(f"the message's {name} must have version {version}, got {sent}")
    return {key: torch.tensor(values) for key, values in finite_views(update).items()}
