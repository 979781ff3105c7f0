"""The client of SD-FEEL and its baselines: tau1 iterations of mini-batch SGD, eq. (2).

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data", Algorithm 1. A client is stateless between rounds: the mini-batch of iteration k
depends only on (seed, client, k), so that runs with other periods, graphs or baselines use the same batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor, nn

from hedgerow.clients.app import BatchClientApp, whoami
from hedgerow.clients.evaluation import are_dealt, introduction_of, known_sizes, num_examples, task_handlers
from hedgerow.clients.handlers import Answer, each, together
from hedgerow.clients.instructions import local_steps, only_config, step_size, whole
from hedgerow.clients.local_task import LocalTask, LocalTaskFn, local_task
from hedgerow.clients.mods.learning import TrainHandler
from hedgerow.clients.mods.update import Mod, TrainingMod, TrainResult
from hedgerow.clients.probes import local_gradient, probe_as_told, stream_as_told
from hedgerow.clients.sd_feel.edge_server import edge_server_handlers, node_role
from hedgerow.clients.sent_models import at_home_of, sent_state
from hedgerow.clients.training.batches import step_batches
from hedgerow.clients.training.draws import NodeDraws
from hedgerow.clients.training.own import TrainingLoop
from hedgerow.clients.training.sgd import Training, TrainingMode, training_of
from hedgerow.clients.training.work import Asked, LocalWork
from hedgerow.wire.calls import Call
from hedgerow.wire.edge_servers import EDGE
from hedgerow.wire.message_types import GRADIENT, WHOAMI
from hedgerow.wire.records import to_record


def sd_feel_client(
    task: LocalTaskFn = local_task,
    training_mode: TrainingMode | None = None,
    train: TrainingLoop | None = None,
    mods: Sequence[TrainingMod | Mod] = (),
) -> BatchClientApp:
    """Return the ClientApp of SD-FEEL, HierFAVG, FEEL and FedAvg.

    It answers ``train`` (config: ``first-step``, ``local-steps``, ``learning-rate``, ``batch-size`` and
    ``seed``), ``evaluate``, ``query.whoami`` and ``train.gradient`` (config: ``server-round``, ``batch-size``
    and ``seed``), with its gradient, ``curvature`` and ``gradient-variance`` at the model sent. An edge
    server (see ``edge_server.node_role``) has no data and answers ``train.intra`` and ``train.gossip``.

    Parameters
    ----------
    task : Callable[[Context], LocalTask] (default: local_task)
        Finds a node's model and data; the default reads the run config.
    training_mode : {"auto", "loop", "stack"} or None (default: None)
        How nodes train; None follows the run config, see ``LocalTraining.of``.
    train : TrainingLoop or None (default: None)
        Your own training loop in place of mini-batch SGD (docs/how-to/own-training.md); nodes then train one
        after the other.
    mods : Sequence[TrainingMod or Mod] (default: none)
        As in ``BatchClientApp``.
    """

    def learn(calls: Sequence[Call]) -> Sequence[TrainResult | Answer]:
        # Nodes with the same message share what is read from it.
        told: dict[tuple[int, nn.Module], _Instruction] = {}

        def read(call: Call) -> _Job:
            own = task(call.context)
            key = id(call.content), own.model
            if key not in told:
                told[key] = _Instruction.of(call, own)
            config, batch = told[key].config, min(told[key].batch_size, len(own.part))
            return _Job(told[key], call.partition_id, own, local_steps(config, "local-steps", batch))

        how = training_of(calls[0].context, training_mode, train=train)
        return together(read, lambda _, jobs: _learnt(jobs, how))(calls)

    more = introduction_of(task)
    return BatchClientApp(
        {
            "train": TrainHandler(
                learn,
                plain_metrics=lambda call: {"num-steps": whole(only_config(call), "local-steps", 1)},
                home_of=lambda call: at_home_of(call, task(call.context)),
                at_once=train is None,
            ),
            **task_handlers(task),
            WHOAMI: whoami(
                lambda context: 0 if node_role(context) == EDGE else num_examples(context, task),
                lambda context: {} if node_role(context) == EDGE else more(context),
                known_sizes(task),
                are_dealt,
            ),
            GRADIENT: each(lambda call: _gradient(call, task(call.context))),
            **edge_server_handlers(),
        },
        mods,
    )


def _gradient(call: Call, task: LocalTask) -> RecordDict:
    """Return the gradient over all of a node's samples at the model sent, and the estimates there."""
    found = probe_as_told(call, task, "server-round")
    with NodeDraws.of(task.model, stream_as_told(call, "server-round")):
        gradient = local_gradient(task.model, task.x, task.y, task.part)
    return RecordDict(
        {
            "arrays": to_record(gradient),
            "metrics": MetricRecord({"num-examples": len(task.part), **found.estimates()}),
        }
    )


@dataclass(frozen=True)
class _Instruction:
    """What a message says to train."""

    config: ConfigRecord
    start: Mapping[str, Tensor]
    seed: int
    batch_size: int
    done: int  # iterations before this round
    lr: float
    round: int

    @classmethod
    def of(cls, call: Call, task: LocalTask) -> "_Instruction":
        start, config = sent_state(call, task), only_config(call)
        return cls(
            config,
            start,
            whole(config, "seed", 0),
            whole(config, "batch-size", 1),
            whole(config, "first-step", 0),
            step_size(config, "learning-rate"),
            whole(config, "server-round", 0) if "server-round" in config else 0,
        )


@dataclass(frozen=True)
class _Job:
    """One node's share of a round."""

    told: _Instruction
    partition_id: int
    task: LocalTask
    steps: int


def _learnt(jobs: Mapping[int, _Job], how: Training) -> dict[int, TrainResult | Exception]:
    """Train all nodes, eq. (2); mini-batches are drawn together for nodes with the same instruction."""
    batches: dict[int, list[NDArray[np.int64]]] = {}
    alike: dict[tuple[int, int, int], list[int]] = {}
    for at, job in jobs.items():
        alike.setdefault((job.told.seed, job.told.done, job.told.batch_size), []).append(at)
    for (seed, done, batch_size), group in alike.items():
        drawn = step_batches(
            [jobs[at].task.part for at in group],
            seed=seed,
            partition_ids=[jobs[at].partition_id for at in group],
            done=done,
            steps=[jobs[at].steps for at in group],
            batch_size=batch_size,
        )
        batches.update(zip(group, drawn, strict=True))
    works = []
    for at, job in jobs.items():
        told, task = job.told, job.task
        asked = Asked(task.part, told.batch_size, told.seed, told.round, job.partition_id)
        works.append(LocalWork(told.start, task.x, task.y, batches[at], told.lr, asked))
    trained = how.sgd(next(iter(jobs.values())).task.model, works)
    answers: dict[int, TrainResult | Exception] = {}
    for (at, job), one in zip(jobs.items(), trained, strict=True):
        if isinstance(one, ValueError):
            answers[at] = one
            continue
        metrics = {"num-examples": len(job.task.part), "num-steps": job.steps, **one.metrics}
        answers[at] = TrainResult(one.state, metrics, job.told.start)
    return answers
