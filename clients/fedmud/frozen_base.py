"""The base that a node keeps between rounds, and how it follows the server's: update by update, in order.

Paper: S. Li et al., "The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient Federated
Learning" (FedMUD), eq. (5): the base is a sum of merged updates. The paper has every node hear every update;
here a node that was away is sent those that it missed, and says so if it has nothing to add them to; one that
comes for the first time may draw the initial base itself. Adding their sum at once would round otherwise than
the server did.
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

__all__ = ["Bases", "Evolution", "held_base"]

Made = TypeVar("Made")

_RECORD = "base"  # in context.state


@dataclass(frozen=True)
class Evolution:
    """How a method's base moves on."""

    shapes: Mapping[str, tuple[int, ...]]  # The shapes of the base's weights, by key.
    updates: str  # The ArrayRecord of a message that holds updates, under ``"<version>/<key>"``.
    # From a base, its version and that version's update to the next base: new tensors, float32 on the CPU, of
    # the server's bits.
    step: Callable[[State, int, Mapping[str, Tensor]], State]


class Bases:
    """The bases of the nodes of one batched call: what several of them hold is computed and stored once."""

    def __init__(self) -> None:
        # By what it is of, with the objects whose ids are in the key: they must not make room for others.
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
        """Return the base of the message's ``version``, or None if the node must be sent it whole.

        A base in the message is taken as it is; else the node's own is moved on by the updates that it lacks:
        those that it has already are skipped. A node without one draws version 0, where the message has its
        ``base-checksum`` and all updates since. With ``keep-base`` it is kept in the node's context.

        - ``config``: The message's: ``version``, ``from-version`` (where its updates start) and
          ``keep-base``.
        - ``initial``: Draws the run's initial model, as a state dict; None where nobody can.

        Returns
        -------
        dict of str to Tensor, or None
            Float32 on the CPU, shared between nodes: read it, never change it.

        Raises
        ------
        ValueError
            If a key of the config is missing or out of range, or base or updates are not the method's, or
            not finite.
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
        self,
        config: ConfigRecord,
        evolution: Evolution,
        initial: Callable[[], Mapping[str, Tensor]] | None,
    ) -> "_Held | None":
        """Return the initial base, or None unless it is drawn here as the server has it."""
        told = string(config, "base-checksum") if "base-checksum" in config else ""
        if not told or initial is None:
            return None

        def draw() -> _Held | None:
            state = initial()
            shapes = {key: tuple(state[key].shape) for key in evolution.shapes if key in state}
            if shapes != dict(evolution.shapes):
                return None
            record = to_record({key: state[key].detach().to("cpu", torch.float32) for key in shapes})
            return _Held(record, 0, told, drawn=True) if checksum(record) == told else None

        return self._once(("initial", told), draw)

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


def held_base(call: Call) -> ArrayRecord:
    """Return the base from which a node has just trained: the message's, or what its context holds."""
    sent = call.content.array_records.get("base")
    return call.context.state.array_records[_RECORD] if sent is None else sent


@dataclass(frozen=True)
class _Held:
    """What a node's context holds, and is still what was put there; or what it has drawn."""

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
    """Return one version's update.

    Raises
    ------
    ValueError
        If the record holds none, or one that is not finite.
    """
    prefix = f"{version}/"
    update = ArrayRecord()
    for key, array in record.items():
        if key.startswith(prefix):
            update[key.removeprefix(prefix)] = array
    if not update:
        sent = sorted({key.partition("/")[0] for key in record})
        raise ValueError(f"the message's {name} must have version {version}, got {sent}")
    return {key: torch.tensor(values) for key, values in finite_views(update).items()}
