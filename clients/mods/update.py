"""What a node learnt, and mods that change its update before it is compressed, masked and sent."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from torch import Tensor

from hedgerow.clients.handlers import Answer, outcome
from hedgerow.wire.calls import Call
from hedgerow.wire.records import to_record

__all__ = ["Learn", "Learnt", "Mod", "UpdateMod", "changed"]

# A mod of Flower's, which sees messages.
Mod = Callable[[Message, Context, Callable[[Message, Context], Message]], Message]


@dataclass(frozen=True)
class Learnt:
    """What a node learnt in a round, before anything is made of it for the network.

    Parameters
    ----------
    state : Mapping[str, Tensor]
        The arrays of its reply, by key, on any device.
    metrics : Mapping[str, int or float]
        What it tells beside them.
    start : Mapping[str, Tensor] or None (default: None)
        From what ``state`` is a change: the same keys and shapes. None where that has no meaning, as for
        signs or chosen entries: such a reply is neither compressed nor changed by mods.
    """

    state: Mapping[str, Tensor]
    metrics: Mapping[str, int | float]
    start: Mapping[str, Tensor] | None = None

    def reply(self) -> RecordDict:
        """Return the reply as it is sent where nothing compresses it."""
        return RecordDict({"arrays": to_record(self.state), "metrics": MetricRecord({**self.metrics})})


# Trains the nodes of one exchange. A RecordDict is an answer as it is, of a node that had nothing to learn.
Learn = Callable[[Sequence[Call]], Sequence[Learnt | Answer]]


class UpdateMod(ABC):
    """A mod that changes a node's update: clips it, adds noise to it, drops a part of it.

    It stands between training and whatever a message asks for besides: compression with error feedback, masks
    of secure sums. What is done to an update that a mod has noised costs no more of its privacy. A clip alone
    bounds nothing that is compressed with error feedback, which adds what was left of updates before. The
    metrics of a reply stay as they are: they are of the model before any mod.
    """

    @abstractmethod
    def changed(self, update: Tensor, call: Call) -> Tensor:
        """Return what the node tells in place of its update.

        Parameters
        ----------
        update : Tensor
            Trained minus sent (d,), of the floating-point arrays in the order of their keys; float32, or
            float64 where the model is. It is the mod's own, to change in place.
        call : Call
            The instruction, the node's context and its ``partition_id``. Draw noise from a generator of
            (seed, round, node): ``hedgerow.wire.generator``.
        """


def changed(mods: Sequence[UpdateMod], learn: Learn) -> Learn:
    """Return what trains nodes and puts their updates through the mods, in order."""
    if not mods:
        return learn

    def handle(calls: Sequence[Call]) -> list[Learnt | Answer]:
        return [
            outcome(_changed, mods, one, call) if isinstance(one, Learnt) else one
            for call, one in zip(calls, learn(calls), strict=True)
        ]

    return handle


def _changed(mods: Sequence[UpdateMod], learnt: Learnt, call: Call) -> Learnt:
    if learnt.start is None:
        raise ValueError(
            f"{type(mods[0]).__name__} changes updates, so the method must be one whose nodes send models "
            "or factors: this message asks for signs or chosen entries"
        )
    start = {key: value for key, value in learnt.start.items() if value.is_floating_point()}
    update = torch.cat([(learnt.state[key] - value).flatten() for key, value in start.items()])
    for mod in mods:
        size = update.numel()
        update = mod.changed(update, call)
        if update.shape != (size,) or not torch.isfinite(update).all():
            raise ValueError(
                f"{type(mod).__name__} must give {size} finite values, got an update of shape "
                f"{tuple(update.shape)} or with NaN"
            )
    parts = torch.split(update, [value.numel() for value in start.values()])
    moved = {
        key: value + part.reshape(value.shape)
        for (key, value), part in zip(start.items(), parts, strict=True)
    }
    return replace(learnt, state={key: moved.get(key, value) for key, value in learnt.state.items()})
