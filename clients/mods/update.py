"""The result of a node's training, and mods around it, before compression and masks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from torch import Tensor

from hedgerow.clients.handlers import Answer, outcome
from hedgerow.wire.calls import Call
from hedgerow.wire.records import to_record

# A Flower mod, which sees messages.
Mod = Callable[[Message, Context, Callable[[Message, Context], Message]], Message]


@dataclass(frozen=True)
class TrainResult:
    """The result of a node's training in a round, before mods and encoding.

    Parameters
    ----------
    state : Mapping[str, Tensor]
        The arrays of its reply, by key, on any device.
    metrics : Mapping[str, int or float]
        The metrics of its reply.
    start : Mapping[str, Tensor] or None (default: None)
        The arrays that training started from, with the same keys and shapes. None if ``state`` is not a
        model, for example signs or selected entries; such a reply is neither compressed nor changed by mods.
    """

    state: Mapping[str, Tensor]
    metrics: Mapping[str, int | float]
    start: Mapping[str, Tensor] | None = None

    def without(self, keys: Collection[str]) -> "TrainResult":
        """Return it without some keys."""
        state = {key: value for key, value in self.state.items() if key not in keys}
        start = self.start and {key: value for key, value in self.start.items() if key not in keys}
        return replace(self, state=state, start=start)

    def reply(self) -> RecordDict:
        """Return the uncompressed reply."""
        return RecordDict({"arrays": to_record(self.state), "metrics": MetricRecord({**self.metrics})})


# Trains the nodes of one exchange. A RecordDict is a finished answer of a node that had nothing to train.
Trainer = Callable[[Sequence[Call]], Sequence[TrainResult | Answer]]


class TrainingMod:
    """A mod around a node's training: what the node starts from, and what it replies.

    It runs before and after training, ahead of the compression and masks that a message asks for. One that
    keeps state at its node (``call.context.state``) cannot be used with secure sums: masks bind all that a
    node stores, and cancel only if members store the same.
    """

    def received(self, call: Call) -> Call:
        """Return the call that the node trains on, or evaluates, in place of the given one."""
        return call

    def learnt(self, learnt: TrainResult, call: Call) -> TrainResult:
        """Return the result to reply with in place of the given one; ``call`` is as ``received`` got it."""
        return learnt


class UpdateMod(TrainingMod, ABC):
    """A mod that changes a node's update, for example by clipping or noise.

    It runs between training and the compression or masks that a message asks for, which are post-processing
    and cost a noised update no further privacy. Clipping alone does not bound a message that is compressed
    with error feedback, which adds earlier errors. The metrics of a reply describe the model before any mod.
    """

    @abstractmethod
    def changed(self, update: Tensor, call: Call) -> Tensor:
        """Return the update to send in place of the given one.

        Parameters
        ----------
        update : Tensor
            Trained minus received model (d,), the floating-point arrays in the order of their keys; float32,
            or float64 if the model is. It may be changed in place.
        call : Call
            The instruction, the node's context and its ``partition_id``. Draw noise from a generator of
            (seed, round, node): ``hedgerow.wire.generator``.
        """


def changed(mods: Sequence[TrainingMod], learn: Trainer) -> Trainer:
    """Return a ``Trainer`` that applies the mods, in order, to what ``learn`` gets and returns."""
    if not mods:
        return learn

    def handle(calls: Sequence[Call]) -> list[TrainResult | Answer]:
        return [
            outcome(_learnt, mods, one, call) if isinstance(one, TrainResult) else one
            for call, one in zip(calls, received_by(mods, learn)(calls), strict=True)
        ]

    return handle


def received_by(
    mods: Sequence[TrainingMod], handler: Callable[[Sequence[Call]], Sequence[Any]]
) -> Callable[[Sequence[Call]], list[Any]]:
    """Return a handler of calls as the mods, in order, change them; a mod's error is its call's answer."""

    def handle(calls: Sequence[Call]) -> list[Any]:
        found = [outcome(_received, mods, call) for call in calls]
        valid = [one for one in found if not isinstance(one, Exception)]
        answers = iter(handler(valid) if valid else [])
        return [one if isinstance(one, Exception) else next(answers) for one in found]

    return handle


def _received(mods: Sequence[TrainingMod], call: Call) -> Call:
    for mod in mods:
        call = mod.received(call)
    return call


def _learnt(mods: Sequence[TrainingMod], learnt: TrainResult, call: Call) -> TrainResult:
    # Neighbouring update mods change one update, which is added to the start once.
    for changes, group in groupby(mods, lambda mod: isinstance(mod, UpdateMod)):
        if changes:
            learnt = _changed([mod for mod in group if isinstance(mod, UpdateMod)], learnt, call)
        else:
            for mod in group:
                learnt = mod.learnt(learnt, call)
    return learnt


def _changed(mods: Sequence[UpdateMod], learnt: TrainResult, call: Call) -> TrainResult:
    if learnt.start is None:
        raise ValueError(
            f"{type(mods[0]).__name__} changes updates, so the method must be one whose nodes send models "
            "or factors: this message asks for signs or selected entries"
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
