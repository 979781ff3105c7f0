"""The client of FedAvg, FedProx and their error-feedback forms: one local operator, then the uplink.

Paper: A. Beikmohammadi, S. Khirirat, S. Magnússon, "On the Convergence of Federated Learning Algorithms
without Data Similarity", the worker's lines of Algorithms 1 to 4. ``proximal.py`` approximates the proximal
point, which the paper takes as given; ``mods/compress.py`` keeps the error memory. A mini-batch depends only
on (seed, client, step of the whole run).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor, nn

from hedgerow.clients.app import BatchClientApp
from hedgerow.clients.evaluation import task_handlers
from hedgerow.clients.handlers import Answer, each, outcome, together
from hedgerow.clients.instructions import (
    choice,
    flag,
    local_steps,
    nonnegative,
    only_config,
    positive,
    step_size,
    string,
    whole,
)
from hedgerow.clients.local_task import LocalTask, LocalTaskFn, local_task
from hedgerow.clients.mods.learning import TrainHandler
from hedgerow.clients.mods.update import Mod, TrainingMod, TrainResult
from hedgerow.clients.probes import probe_as_told
from hedgerow.clients.sent_models import at_home_of, sent_state
from hedgerow.clients.similarity_free.proximal import Proximal, ProximalWork, parse_inner_lr, proximal_steps
from hedgerow.clients.training.batches import augmented_work, step_batches
from hedgerow.clients.training.own import OwnTraining, TrainingLoop
from hedgerow.clients.training.sgd import Training, TrainingMode, training_of
from hedgerow.clients.training.work import Asked, LocalWork, Loss, Trained, cross_entropy
from hedgerow.wire.calls import Call
from hedgerow.wire.compress import parse_compressor, summed_arrays
from hedgerow.wire.message_types import PROBE
from hedgerow.wire.records import finite_views, only_record

Work = LocalWork | ProximalWork
Outcome = Trained | Proximal | ValueError


def similarity_free_client(
    task: LocalTaskFn = local_task,
    training_mode: TrainingMode | None = None,
    loss: Loss = cross_entropy,
    train: TrainingLoop | None = None,
    mods: Sequence[TrainingMod | Mod] = (),
) -> BatchClientApp:
    """Return the ClientApp of FedAvg, FedProx, EF-FedAvg, EF-FedProx and FedPAQ.

    It answers ``train``, ``evaluate``, ``query.whoami`` and ``query.probe``. The config of ``train`` has

    - ``operator``: ``gradient`` (``local-iters`` steps of SGD) or ``prox`` (``local-iters`` is 1);
    - ``local-step``: gamma^k, the factor of a gradient, or the proximal parameter;
    - ``round-index`` k, ``local-iters`` T, ``batch-size`` and ``seed``;
    - for ``prox``: ``inner-lr``, ``inner-steps``, ``inner-tol`` and ``inner-batch``: ``fixed`` is one
      mini-batch per round, as in the paper; ``fresh`` is one per inner step, which never stops early and
      reports the residual of the last batch;
    - ``compressor``, ``error-feedback`` and ``acknowledged``: as ``mods/compress.py`` reads them;
    - ``probe`` (absent: false): also estimate ``curvature`` and ``gradient-variance`` at x^k.

    The reply holds the model as ``arrays``, or its compressed change as ``update``, and ``metrics``.
    A secure sum's instruction is answered with a masked update, see ``masked_sum_handlers``.
    ``query.probe`` takes a model, ``round-index``, ``batch-size`` and ``seed``, and returns the estimates.

    Parameters
    ----------
    task : Callable[[Context], LocalTask] (default: local_task)
        Finds a node's model and data; the default reads the run config.
    training_mode : {"auto", "loop", "stack"} or None (default: None)
        How nodes train; None follows the run config, see ``LocalTraining.of``.
    loss : Loss (default: cross_entropy)
        Loss per sample in training and probes; ``evaluate`` reports cross-entropy and accuracy.
    train : TrainingLoop or None (default: None)
        Your own training loop in place of the operator ``gradient`` (docs/how-to/own-training.md); nodes then
        train one after the other, and ``prox`` is refused.
    mods : Sequence[TrainingMod or Mod] (default: none)
        As in ``BatchClientApp``.
    """

    def learn(calls: Sequence[Call]) -> Sequence[TrainResult | Answer]:
        how = training_of(calls[0].context, training_mode, loss, train)
        return together(
            lambda call: _Round.of(call, task(call.context), loss), lambda _, rounds: _learnt(rounds, how)
        )(calls)

    def answer_probe(call: Call) -> RecordDict:
        own = task(call.context)
        found = probe_as_told(call, own, "round-index", loss)
        metrics = {"num-examples": len(own.part), "loss": found.loss, **found.estimates()}
        return RecordDict({"metrics": MetricRecord({**metrics})})

    return BatchClientApp(
        {
            "train": TrainHandler(
                learn,
                start_of=_summed,
                home_of=lambda call: at_home_of(call, task(call.context)),
                at_once=train is None,
            ),
            **task_handlers(task),
            PROBE: each(answer_probe),
        },
        mods,
    )


def _summed(call: Call) -> Mapping[str, NDArray[Any]]:
    """Return the arrays whose changes a secure sum adds up."""
    sent = finite_views(only_record(call.content, ArrayRecord, "bad arrays"))
    return summed_arrays(parse_compressor(string(only_config(call), "compressor")), sent)


@dataclass(frozen=True)
class _Round:
    """One node's work in a round, read and checked before any computation."""

    task: LocalTask
    work: Work
    estimates: Mapping[str, float]

    @classmethod
    def of(cls, call: Call, task: LocalTask, loss: Loss) -> "_Round":
        config = only_config(call)
        prox = choice(config, "operator", ("gradient", "prox")) == "prox"
        work: Work = (_proximal_work if prox else _gradient_work)(call, config, task)
        work = augmented_work(
            work,
            task.augmentation,
            seed=whole(config, "seed", 0),
            round=whole(config, "round-index", 0),
            partition_id=call.partition_id,
        )
        asked = flag(config, "probe", default=False)
        estimates = probe_as_told(call, task, "round-index", loss).estimates() if asked else {}
        return cls(task, work, estimates)

    def learnt(self, outcome: Outcome) -> TrainResult:
        """Return x_i^k and the reply's metrics; ValueError if the model is not finite."""
        if isinstance(outcome, ValueError):
            raise outcome
        drift = _distance(self.task.model, outcome.state, self.work.start)
        if not isfinite(drift):
            step = self.work.lr if isinstance(self.work, LocalWork) else self.work.gamma
            raise ValueError(f"local-step must be smaller, got {step:g}: it makes the model not finite")
        metrics = {
            "num-examples": len(self.task.part),
            **outcome.metrics,
            "drift-norm": drift,
            **self.estimates,
        }
        if isinstance(outcome, Proximal):
            metrics["prox-residual"] = outcome.relative_residual
            metrics["inner-steps-taken"] = outcome.steps_taken
        return TrainResult(outcome.state, metrics, self.work.start)


def _learnt(rounds: Mapping[int, _Round], how: Training) -> dict[int, TrainResult | Exception]:
    """Return x_i^k of every node; nodes with the same operator are computed together."""
    model = next(iter(rounds.values())).task.model
    works = {position: one.work for position, one in rounds.items()}
    gradient = {i: work for i, work in works.items() if isinstance(work, LocalWork)}
    prox = {i: work for i, work in works.items() if isinstance(work, ProximalWork)}
    sgd = how.sgd(model, list(gradient.values()))
    points: Sequence[Outcome]
    if isinstance(how, OwnTraining):
        error = "operator must be 'gradient' with a training loop of one's own, got 'prox'"
        points = [ValueError(f"{error} in the message's config") for _ in prox]
    else:
        points = proximal_steps(model, list(prox.values()), how)
    outcomes = zip([*gradient, *prox], [*sgd, *points], strict=True)
    return {at: outcome(rounds[at].learnt, found) for at, found in outcomes}


def _gradient_work(call: Call, config: ConfigRecord, task: LocalTask) -> LocalWork:
    batches, asked = _batches(call, config, task, "local-iters"), _asked(call, config, task)
    return LocalWork(sent_state(call, task), task.x, task.y, batches, step_size(config, "local-step"), asked)


def _asked(call: Call, config: ConfigRecord, task: LocalTask) -> Asked:
    return Asked(
        task.part,
        whole(config, "batch-size", 1),
        whole(config, "seed", 0),
        whole(config, "round-index", 0) + 1,
        call.partition_id,
        augmentation=task.augmentation,
    )


def _proximal_work(call: Call, config: ConfigRecord, task: LocalTask) -> ProximalWork:
    if (T := whole(config, "local-iters", 1)) != 1:
        raise ValueError(f"local-iters must be 1 with operator 'prox', got {T} in the message's config")
    gamma, steps = positive(config, "local-step"), local_steps(config, "inner-steps")
    fresh = choice(config, "inner-batch", ("fixed", "fresh")) == "fresh"
    return ProximalWork(
        sent_state(call, task),
        task.x,
        task.y,
        _batches(call, config, task, "inner-steps" if fresh else "local-iters"),
        gamma,
        parse_inner_lr(string(config, "inner-lr")).at(gamma),
        steps,
        nonnegative(config, "inner-tol", below=1.0),
        _asked(call, config, task),
    )


def _batches(call: Call, config: ConfigRecord, task: LocalTask, key: str) -> list[NDArray[np.int64]]:
    """Return the mini-batches of the steps k T + 1, ..., (k + 1) T; the config's ``key`` holds T."""
    seed, batch_size = whole(config, "seed", 0), whole(config, "batch-size", 1)
    count = local_steps(config, key, min(batch_size, len(task.part)))
    done = whole(config, "round-index", 0) * count
    (batches,) = step_batches(
        [task.part],
        seed=seed,
        partition_ids=[call.partition_id],
        done=done,
        steps=[count],
        batch_size=batch_size,
    )
    return batches


def _distance(model: nn.Module, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return ||a - b|| over the trainable parameters, in float64."""
    norms = [
        torch.linalg.vector_norm(a[name].double() - b[name].double())
        for name, p in model.named_parameters()
        if p.requires_grad
    ]
    return float(torch.stack(norms).norm()) if norms else 0.0
