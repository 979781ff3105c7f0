"""A node of FedAvg with momentum: five steps of mini-batch SGD, of all nodes of a round at once."""

from collections.abc import Sequence

from flwr.app import MetricRecord, RecordDict

from hedgerow.clients.app import BatchClientApp, whoami
from hedgerow.clients.local_task import local_task
from hedgerow.clients.training.batches import batch_indices
from hedgerow.clients.training.sgd import LocalWork, local_sgd
from hedgerow.wire.calls import Call
from hedgerow.wire.records import to_record

__all__ = ["server_momentum_client"]

_STEPS, _BATCH = 5, 10


def server_momentum_client() -> BatchClientApp:
    """Return the nodes' app."""
    return BatchClientApp(
        {"train": _train, "query.whoami": whoami(lambda context: len(local_task(context).part))}
    )


def _train(calls: Sequence[Call]) -> list[RecordDict]:
    tasks, works = [], []
    for call in calls:
        task = local_task(call.context)
        first = _STEPS * int(call.content["config"]["round"])  # type: ignore[arg-type]
        seed = int(call.context.run_config["seed"])
        batches = [
            task.part[batch_indices(seed, call.partition_id, step, len(task.part), _BATCH)]
            for step in range(first, first + _STEPS)
        ]
        tasks.append(task)
        start = call.content["arrays"].to_torch_state_dict()  # type: ignore[union-attr]
        works.append(LocalWork(start, task.x, task.y, batches, lr=0.05))
    return [
        RecordDict(
            {
                "arrays": to_record(done.state),
                "metrics": MetricRecord({"num-examples": len(task.part), "train-loss": done.mean_loss}),
            }
        )
        for task, done in zip(tasks, local_sgd(tasks[0].model, works, mode="loop"), strict=True)
    ]
