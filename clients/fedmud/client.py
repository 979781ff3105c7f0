"""The client of FedMUD and its baselines: some layers compressed, the rest as in FedAvg.

Paper: S. Li et al., "The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient Federated
Learning", eqs. (3) to (9) and the set-up of Section 5: local SGD without momentum on the factors of the
compressed layers and on all that is not compressed. Differs: the server merges, and the node replays its
merges (``frozen_base.py``); in the authors' code nodes merge, yet receive the dense model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import nn

from hedgerow.clients.app import BatchClientApp
from hedgerow.clients.evaluation import task_handlers
from hedgerow.clients.fedmud.fedbat import BinarisedWork, train_binarised
from hedgerow.clients.fedmud.frozen_base import Bases
from hedgerow.clients.fedmud.methods import Instruction, NodeMethod, Work
from hedgerow.clients.handlers import Answer, each, outcome, together
from hedgerow.clients.instructions import only_config, whole
from hedgerow.clients.local_task import LocalTask, LocalTaskFn, local_task
from hedgerow.clients.mods.guard import Reveals, reveals
from hedgerow.clients.mods.learning import TrainHandler
from hedgerow.clients.mods.update import Mod, TrainingMod, TrainResult
from hedgerow.clients.training.draws import NodeDraws
from hedgerow.clients.training.own import OwnTraining, TrainingLoop
from hedgerow.clients.training.sgd import Training, TrainingMode, training_of
from hedgerow.clients.training.work import LocalWork, Loss, State, Trained, cross_entropy
from hedgerow.wire.calls import Call
from hedgerow.wire.message_types import MERGE
from hedgerow.wire.records import finite_views


def fedmud_client(
    task: LocalTaskFn = local_task,
    training_mode: TrainingMode | None = None,
    loss: Loss = cross_entropy,
    train: TrainingLoop | None = None,
    mods: Sequence[TrainingMod | Mod] = (),
) -> BatchClientApp:
    """Return the ClientApp of FedMUD, LoRA, FedLMT, FedHM, FedPara, EF21-P, FedBAT and their FedAvg.

    It answers ``train``, ``query.merge``, ``evaluate`` and ``query.whoami``. A ``train`` message holds

    - ``arrays``: uncompressed parameters and buffers, under their plain keys;
    - ``factors`` for the method ``factored``, under ``"<layer key>:<name>"``; absent right after a reset of
      an update, as the node then draws them;
    - ``base``, or ``merges`` (``factored``) or ``updates`` (``ef21p``, ``fedbat``) from ``from-version``
      on, or neither if the node holds the current version;
    - ``config``: ``method`` is ``factored``, ``fedex``, ``dense``, ``ef21p`` or ``fedbat``; ``variant``,
      ``ratio``, ``budget``, ``init-a``, ``layout``, ``tight`` and ``view`` (absent: ``buffer``) plan the
      factors of ``layers``, the keys of the compressed weights; they must have the same ``fingerprint``;
      ``version``, ``from-version``, ``keep-base`` and, if nodes draw version 0 themselves, its
      ``base-checksum`` describe the base;
      ``run-seed`` draws the factors, ``seed`` and ``server-round`` all else; ``learning-rate``,
      ``local-epochs``, ``batch-size``; ``keep`` for ``ef21p``, the K of Rand-K; ``signs`` for ``fedbat``,
      the number of signs sent.

    The reply's ``arrays`` are the trained ones: the factors, ``values`` (``ef21p``), or ``"<key>:bits"`` and
    ``"<key>:alpha"`` (``fedbat``), and the uncompressed ones. Base and frozen factors are never sent. Its
    ``metrics`` are ``num-examples``, ``num-batches`` (of one epoch), ``train-loss``, ``base-version`` and
    ``need-base``: 1, with no arrays and no examples, if the node cannot construct the base. A secure sum's
    instruction is answered with a masked update of the factors and the uncompressed arrays, see
    ``masked_sum_handlers``. ``query.merge`` takes only updates and config, and returns only metrics.

    Parameters
    ----------
    task : Callable[[Context], LocalTask] (default: local_task)
        Finds a node's model and data; the default reads the run config.
    training_mode : {"auto", "loop", "stack"} or None (default: None)
        How nodes train; None follows the run config, see ``LocalTraining.of``. ``fedbat`` always trains node
        by node.
    loss : Loss (default: cross_entropy)
        Loss per sample in training; ``evaluate`` reports cross-entropy and accuracy.
    train : TrainingLoop or None (default: None)
        Your own training loop in place of local SGD (docs/how-to/own-training.md); nodes then train one after
        the other. Its model's trainable parameters are the factors (``factored``) and the uncompressed ones;
        changes to others are not sent. ``fedbat``, which is a training method, is refused.
    mods : Sequence[TrainingMod or Mod] (default: none)
        As in ``BatchClientApp``. Mods of updates need a method that sends factors or models, not ``ef21p`` or
        ``fedbat``.
    """

    def learn(calls: Sequence[Call]) -> Sequence[TrainResult | Answer]:
        bases = Bases()
        how = training_of(calls[0].context, training_mode, loss, train)
        return together(
            lambda call: _Round.of(call, task(call.context), bases) or _needs_base(call),
            lambda _, rounds: _learnt(rounds, how),
        )(calls)

    def listen(calls: Sequence[Call]) -> Sequence[Answer]:
        bases = Bases()
        return each(lambda call: _listen(call, task(call.context), bases))(calls)

    training = TrainHandler(
        learn,
        start_of=lambda call: _summed(call, task(call.context)),
        plain_metrics=lambda call: {"base-version": whole(only_config(call), "version", 0), "need-base": 0},
        home_of=lambda call: _home(call, task(call.context)),
        at_once=train is None,
    )
    return BatchClientApp(
        {"train": training, MERGE: reveals(Reveals.NOTHING, listen), **task_handlers(task)}, mods
    )


def _home(call: Call, task: LocalTask) -> State:
    """Return the frozen arrays."""
    instruction = Instruction.of(call, task)
    return instruction.home(instruction.method().compressed)


def _summed(call: Call, task: LocalTask) -> Mapping[str, NDArray[Any]]:
    """Return the arrays whose changes a secure sum adds up."""
    rest = finite_views(call.content.array_records["arrays"])
    return Instruction.of(call, task).method().summed_arrays(rest)


@dataclass(frozen=True)
class _Round:
    """One node's work in a round, read and checked before any computation."""

    instruction: Instruction
    method: NodeMethod
    base: State
    work: Work

    @classmethod
    def of(cls, call: Call, task: LocalTask, bases: Bases) -> "_Round | None":
        """Return the round, or None if the node must be sent the base first."""
        instruction = Instruction.of(call, task)
        method = instruction.method()
        if (base := _base(instruction, method, bases)) is None:
            return None
        work = method.work(instruction.rest(method.compressed), base)
        return cls(instruction, method, base, work)

    def learnt(self, outcome: Trained | Exception) -> TrainResult:
        """Return the update to send; raises the outcome's error, or ValueError if it is not finite."""
        if isinstance(outcome, Exception):
            raise outcome
        arrays = self.method.sent(outcome.state, self.base)
        home = self.instruction.home(self.method.compressed)
        if not all(torch.isfinite(value).all() for key, value in arrays.items() if key not in home):
            rate = self.instruction.learning_rate
            raise ValueError(f"learning-rate must be smaller, got {rate:g}: it makes the model not finite")
        samples = len(self.instruction.task.part)
        learnt = {"num-batches": self.instruction.batches_per_epoch(), **outcome.metrics}
        metrics = _metrics(self.instruction.version, samples, learnt)
        start = None
        if self.method.sends_state and isinstance(self.work, LocalWork):
            start = self.method.sent(self.work.start, self.base)
        return TrainResult(arrays, metrics, start)


def _base(instruction: Instruction, method: NodeMethod, bases: Bases) -> State | None:
    """Return the node's base, {} for a method without one, or None if it must be sent."""
    if method.evolution is None:
        return {}
    initial = instruction.task.initial
    draw = None if initial is None else lambda: initial().state_dict()
    return bases.current(instruction.call, instruction.config, method.evolution, draw)


def _learnt(rounds: Mapping[int, _Round], how: Training) -> dict[int, TrainResult | Exception]:
    """Train every node; nodes with the same model train together."""
    groups: dict[nn.Module, list[int]] = {}
    for position, one in rounds.items():
        groups.setdefault(one.method.model, []).append(position)

    def train(model: nn.Module, positions: list[int]) -> dict[int, Trained | Exception]:
        works = [rounds[position].work for position in positions]
        try:
            return dict(zip(positions, _trained(model, works, how), strict=True))
        except Exception as error:  # One node's data may not fit the model: try each node on its own.
            if len(positions) == 1:
                return {positions[0]: error}
            return {key: found for p in positions for key, found in train(model, [p]).items()}

    outcomes = {key: found for group in groups.items() for key, found in train(*group).items()}
    return {at: outcome(rounds[at].learnt, one) for at, one in outcomes.items()}


def _trained(model: nn.Module, works: Sequence[Work], how: Training) -> list[Trained | Exception]:
    """Train nodes with the same model."""
    trained = iter(how.sgd(model, [work for work in works if isinstance(work, LocalWork)]))
    return [
        _binarised(model, work, how) if isinstance(work, BinarisedWork) else next(trained) for work in works
    ]


def _binarised(model: nn.Module, work: BinarisedWork, how: Training) -> Trained | Exception:
    if isinstance(how, OwnTraining):
        return ValueError(
            "method must be 'factored', 'dense' or 'ef21p' with a training loop of one's own, got 'fedbat' "
            "in the message's config"
        )
    with NodeDraws.of(model, work.sgd.stream):
        return train_binarised(model, work, how.loss, how.arithmetic)


def _listen(call: Call, task: LocalTask, bases: Bases) -> RecordDict:
    """Update the base without training."""
    instruction = Instruction.of(call, task)
    lost = _base(instruction, instruction.method(), bases) is None
    samples = 0 if lost else len(task.part)
    return RecordDict({"metrics": MetricRecord({**_metrics(instruction.version, samples, lost=lost)})})


def _needs_base(call: Call) -> RecordDict:
    """Return the reply of a node that cannot train: it requests the base."""
    nothing = {"num-batches": 0, "train-loss": 0.0}
    metrics = _metrics(whole(only_config(call), "version", 0), 0, nothing, lost=True)
    return RecordDict({"arrays": ArrayRecord(), "metrics": MetricRecord({**metrics})})


def _metrics(
    version: int, samples: int, learnt: Mapping[str, float] | None = None, *, lost: bool = False
) -> dict[str, int | float]:
    """Return a reply's metrics; ``lost`` if the node has no base."""
    about = {"base-version": version, "need-base": int(lost)}
    return {"num-examples": samples, **(learnt or {}), **about}
