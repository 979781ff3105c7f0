"""What every node with a task answers: who it is, and how the sent model does on the node's own samples."""

import torch
from flwr.app import MetricRecord, RecordDict

from hedgerow.clients.app import each, whoami
from hedgerow.clients.instructions import sent_state
from hedgerow.clients.local_task import LocalTask, LocalTaskFn
from hedgerow.tasks import evaluate
from hedgerow.wire.calls import BatchHandler, Call
from hedgerow.wire.message_types import WHOAMI

__all__ = ["evaluate_on_part", "task_handlers"]


def task_handlers(task: LocalTaskFn) -> dict[str, BatchHandler]:
    """Return the handlers of ``evaluate`` and ``query.whoami`` of nodes with a task."""
    return {
        "evaluate": each(lambda call: evaluate_on_part(call, task(call.context))),
        WHOAMI: whoami(lambda context: len(task(context).part)),
    }


def evaluate_on_part(call: Call, task: LocalTask) -> RecordDict:
    """Return ``num-examples``, ``loss`` (mean cross-entropy, nats) and ``accuracy`` (0..1)."""
    task.model.load_state_dict(sent_state(call, task))
    index = torch.as_tensor(task.part, device=task.x.device)
    result = evaluate(task.model, task.x[index], task.y[index])
    metrics = MetricRecord(
        {"num-examples": result.num_examples, "loss": result.loss, "accuracy": result.accuracy}
    )
    return RecordDict({"metrics": metrics})
