"""The client of SD-FEEL and its baselines: tau1 iterations of mini-batch SGD, eq. (2).

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data", Algorithm 1. A client keeps nothing between rounds: the mini-batch of
iteration k is a function of (seed, client, k) alone, so that runs with other periods, graphs or baselines
see the same batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from hedgerow.clients.app import Answer, BatchClientApp, each, together, whoami
from hedgerow.clients.evaluation import known_sizes, num_examples, task_handlers
from hedgerow.clients.instructions import (
    local_steps,
    only_arrays,
    only_config,
    positive,
    sent_state,
    state_rows,
    whole,
)
from hedgerow.clients.local_task import LocalTask, LocalTaskFn, local_task
from hedgerow.clients.local_training import LocalTraining
from hedgerow.clients.masking import masked_sum_handlers
from hedgerow.clients.own_share import told_of_own
from hedgerow.clients.probes import local_gradient, probe_as_told
from hedgerow.clients.sd_feel.edge_server import edge_server_handlers, role_of
from hedgerow.clients.training.batches import step_batches
from hedgerow.clients.training.sgd import LocalWork, Trained, TrainingMode
from hedgerow.wire.calls import BatchHandler, Call, InColumns, Told
from hedgerow.wire.edge_servers import EDGE
from hedgerow.wire.message_types import GRADIENT, WHOAMI
from hedgerow.wire.records import to_record

__all__ = ["sd_feel_client"]


def sd_feel_client(
    task: LocalTaskFn = local_task, training_mode: TrainingMode | None = None
) -> BatchClientApp:
    """Return the ClientApp of SD-FEEL, HierFAVG, FEEL and FedAvg.

    It answers ``train`` (the config names ``first-step``, ``local-steps``, ``learning-rate``,
    ``batch-size`` and ``seed``), ``evaluate`` and ``query.whoami``; and ``train.gradient`` (``server-round``,
    ``batch-size`` and ``seed``) with its gradient, ``curvature`` and ``gradient-variance`` at the model that
    is sent. A node that is an edge server (see ``edge_server.role_of``) has no data and answers
    ``train.intra`` and ``train.gossip``.

    Parameters
    ----------
    task : Callable[[Context], LocalTask] (default: local_task)
        Finds a node's model and data; the default reads the run config.
    training_mode : {"auto", "loop", "stack"} or None (default: None)
        How nodes train; None is what the run config says, see ``LocalTraining.of``.
    """

    handlers: dict[str, BatchHandler] = {
        **masked_sum_handlers(
            together(
                lambda call: _Round.of(call, task(call.context)),
                lambda calls, rounds: _answers(rounds, LocalTraining.of(calls[0].context, training_mode)),
            ),
            beside=lambda call: {"num-steps": whole(only_config(call), "local-steps", 1)},
        ),
        **task_handlers(task),
        WHOAMI: whoami(
            lambda context: 0 if role_of(context) == EDGE else num_examples(context, task),
            lambda context: {} if role_of(context) == EDGE else told_of_own(context),
            known_sizes(task),
        ),
        GRADIENT: each(lambda call: _gradient(call, task(call.context))),
        **edge_server_handlers(),
    }
    return BatchClientApp(handlers, {"train": partial(_in_columns, task, training_mode)})


def _in_columns(task: LocalTaskFn, mode: TrainingMode | None, told: Sequence[Told]) -> InColumns:
    """Answer ``train`` for all nodes at once."""
    rounds: list[_Round] = []
    for group in told:
        asked: _Asked | None = None
        for context in group.contexts:
            call = Call(group.content, context, "train")
            own = task(context)
            if asked is None or own.model is not rounds[-1].task.model:
                asked = _Asked.of(call, own)
            rounds.append(_Round.asked(asked, call.partition_id, own))
    how = LocalTraining.of(told[0].contexts[0], mode)
    outcomes = how.sgd(rounds[0].task.model, [one.work for one in rounds])
    keys = list(only_arrays(told[0].content))
    return InColumns(
        state_rows([outcome.state for outcome in outcomes], keys),
        {
            "num-examples": np.array([len(one.task.part) for one in rounds]),
            "num-steps": np.array([len(one.work.batches) for one in rounds]),
            "train-loss": np.array([outcome.mean_loss for outcome in outcomes]),
        },
    )


def _gradient(call: Call, task: LocalTask) -> RecordDict:
    """Return the gradient of all of a node's samples at the model that was sent, and the estimates there."""
    found = probe_as_told(call, task, "server-round")
    return RecordDict(
        {
            "arrays": to_record(local_gradient(task.model, task.x, task.y, task.part)),
            "metrics": MetricRecord({"num-examples": len(task.part), **found.estimates()}),
        }
    )


@dataclass(frozen=True)
class _Asked:
    """What nodes are asked in one round."""

    config: ConfigRecord
    start: Mapping[str, Tensor]
    seed: int
    batch_size: int
    done: int
    lr: float

    @classmethod
    def of(cls, call: Call, task: LocalTask) -> "_Asked":
        config = only_config(call)
        return cls(
            config,
            sent_state(call, task),
            whole(config, "seed", 0),
            whole(config, "batch-size", 1),
            whole(config, "first-step", 0),
            positive(config, "learning-rate"),
        )


@dataclass(frozen=True)
class _Round:
    """What one node does in one round."""

    task: LocalTask
    work: LocalWork

    @classmethod
    def of(cls, call: Call, task: LocalTask) -> "_Round":
        return cls.asked(_Asked.of(call, task), call.partition_id, task)

    @classmethod
    def asked(cls, asked: _Asked, partition_id: int, task: LocalTask) -> "_Round":
        batches = step_batches(
            task.part,
            seed=asked.seed,
            partition_id=partition_id,
            done=asked.done,
            steps=local_steps(asked.config, "local-steps", min(asked.batch_size, len(task.part))),
            batch_size=asked.batch_size,
        )
        return cls(task, LocalWork(asked.start, task.x, task.y, batches, asked.lr))

    def reply(self, outcome: Trained) -> RecordDict:
        told = {"num-examples": len(self.task.part), "num-steps": len(self.work.batches)}
        metrics = MetricRecord({**told, "train-loss": outcome.mean_loss})
        return RecordDict({"arrays": to_record(outcome.state), "metrics": metrics})


def _answers(rounds: Mapping[int, _Round], how: LocalTraining) -> dict[int, Answer]:
    model = next(iter(rounds.values())).task.model
    outcomes = how.sgd(model, [one.work for one in rounds.values()])
    return {at: one.reply(outcome) for (at, one), outcome in zip(rounds.items(), outcomes, strict=True)}
