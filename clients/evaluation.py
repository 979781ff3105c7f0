"""Handlers that every node with a task shares: its introduction, and the evaluation of the sent model."""

from collections.abc import Callable

import torch
from flwr.app import Context, MetricRecord, RecordDict, UserConfig

from hedgerow.clients.app import Introduction, Sizes, whoami
from hedgerow.clients.handlers import each
from hedgerow.clients.local_layers import asks_for_layers
from hedgerow.clients.local_task import LocalTask, LocalTaskFn, dealt_sizes, local_task
from hedgerow.clients.own_share import check_enough, has_own, own_handlers, own_introduction, own_part
from hedgerow.clients.sent_models import sent_state
from hedgerow.tasks import OWN, Evaluation, evaluate
from hedgerow.wire.calls import BatchHandler, Call
from hedgerow.wire.frozen import frozen_keys
from hedgerow.wire.message_types import WHOAMI


def task_handlers(task: LocalTaskFn) -> dict[str, BatchHandler]:
    """Return the handlers of ``evaluate``, ``query.whoami``, ``query.statistics`` and ``query.standardise``.

    The last two are for nodes with their own data.
    """
    return {
        "evaluate": each(lambda call: evaluate_on_part(call, task(call.context))),
        WHOAMI: whoami(
            lambda context: num_examples(context, task), introduction_of(task), known_sizes(task), are_dealt
        ),
        **own_handlers(),
    }


def known_sizes(task: LocalTaskFn) -> Sizes:
    """Return a function from the run config to all nodes' sizes, or to None unless the task is built in."""
    return dealt_sizes if task is local_task else lambda _: None


def introduction_of(task: LocalTaskFn) -> Callable[[Context], Introduction]:
    """Return what a node adds to its introduction: shapes of its own data; the frozen keys of your model.

    The server of an app has the model of the built-in task itself.
    """
    if task is local_task:
        return own_introduction

    def introduction(context: Context) -> Introduction:
        own = task(context)
        frozen = frozen_keys(own.model, own.x[torch.as_tensor(own.part[:2], device=own.x.device)])
        return {**own_introduction(context), **({"frozen": list(frozen)} if frozen else {})}

    return introduction


def are_dealt(run_config: UserConfig) -> bool:
    """Return whether nodes are dealt their samples, and have no files of their own."""
    return run_config.get("partition") != OWN


def num_examples(context: Context, task: LocalTaskFn) -> int:
    """Return the number of a node's training samples; with own data also before their standardisation."""
    own = has_own(context) and task is local_task
    return own_part(context) if own else len(task(context).part)


def evaluate_on_part(call: Call, task: LocalTask) -> RecordDict:
    """Return ``num-examples``, ``loss`` (mean cross-entropy, nats), ``accuracy``, ``auc`` and ``held-out``.

    They are measured on the node's evaluation samples (``LocalTask.personal_test`` if layers of the model are
    its own); ``auc`` only for two classes. ``held-out`` is 1 if the node does not train on these samples, and
    0 if it does.
    """
    x, y, apart = task.measured(personal=asks_for_layers(call))
    check_enough(call.context, len(y))
    task.model.load_state_dict(sent_state(call, task))
    return RecordDict({"metrics": metrics_of(evaluate(task.model, x, y), apart)})


def metrics_of(found: Evaluation, apart: bool) -> MetricRecord:
    """Return an evaluation as a reply's metrics; ``apart`` if the node does not train on its samples."""
    metrics = {"num-examples": found.num_examples, "loss": found.loss, "accuracy": found.accuracy}
    metrics["held-out"] = int(apart)
    return MetricRecord({**metrics, **({} if found.auc is None else {"auc": found.auc})})
