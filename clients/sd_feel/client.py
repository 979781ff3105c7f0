"""The client of SD-FEEL and its baselines: tau1 iterations of mini-batch SGD, eq. (2).

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data", Algorithm 1. A client keeps nothing between rounds: the mini-batch of
iteration k is a function of (seed, client, k) alone, so that runs with other periods, graphs or baselines
see the same batches.
"""

from collections.abc import Sequence
from typing import cast

from flwr.app import MetricRecord, RecordDict

from hedgerow.clients.app import BatchClientApp, each, whoami
from hedgerow.clients.evaluation import evaluate_on_part
from hedgerow.clients.instructions import local_steps, only_config, positive, sent_state, whole
from hedgerow.clients.local_task import LocalTask, LocalTaskFn, local_task
from hedgerow.clients.sd_feel.edge_server import edge_server_handlers, role_of
from hedgerow.clients.training.batches import batch_indices
from hedgerow.clients.training.sgd import LocalWork, Trained, TrainingMode, local_sgd
from hedgerow.wire.calls import BatchHandler, Call
from hedgerow.wire.edge_servers import EDGE
from hedgerow.wire.records import to_record

__all__ = ["sd_feel_client"]


def sd_feel_client(
    task: LocalTaskFn = local_task, training_mode: TrainingMode | None = None
) -> BatchClientApp:
    """Return the ClientApp of SD-FEEL, HierFAVG, FEEL and FedAvg.

    It answers ``train`` (the config names ``first-step``, ``local-steps``, ``learning-rate``,
    ``batch-size`` and ``seed``), ``evaluate`` and ``query.whoami``. A node that is an edge server (see
    ``edge_server.role_of``) has no data and answers ``train.intra`` and ``train.gossip``.

    Parameters
    ----------
    task : Callable[[Context], LocalTask] (default: local_task)
        Finds a node's model and data; the default reads the run config.
    training_mode : {"auto", "loop", "stack"} or None (default: None)
        How nodes train; None is the run config's ``training-mode``, or ``auto``. The run config's
        ``stack-nodes`` bounds how many train at once (0 or none: what memory and caches hold).
    """

    def train(calls: Sequence[Call]) -> list[RecordDict | Exception]:
        answers: list[RecordDict | Exception] = [RuntimeError("not reached")] * len(calls)
        works: dict[int, LocalWork] = {}
        tasks: dict[int, LocalTask] = {}
        for position, call in enumerate(calls):
            try:
                tasks[position] = task(call.context)
                works[position] = _work(call, tasks[position])
            except Exception as error:  # One node's bad task or message must not fail the others.
                answers[position] = error
        if works:
            run_config = calls[0].context.run_config
            mode = training_mode or cast(TrainingMode, run_config.get("training-mode", "auto"))
            max_nodes = int(run_config.get("stack-nodes", 0)) or None
            model = tasks[next(iter(works))].model
            trained = local_sgd(model, list(works.values()), mode=mode, max_nodes=max_nodes)
            for position, outcome in zip(works, trained, strict=True):
                answers[position] = _reply(outcome, tasks[position])
        return answers

    handlers: dict[str, BatchHandler] = {
        "train": train,
        "evaluate": each(lambda call: evaluate_on_part(call, task(call.context))),
        "query.whoami": whoami(lambda context: 0 if role_of(context) == EDGE else len(task(context).part)),
        **edge_server_handlers(),
    }
    return BatchClientApp(handlers)


def _work(call: Call, task: LocalTask) -> LocalWork:
    config = only_config(call)
    seed, batch_size = whole(config, "seed", 0), whole(config, "batch-size", 1)
    first = whole(config, "first-step", 0)
    steps = local_steps(config, "local-steps", min(batch_size, len(task.part)))
    batches = [
        task.part[batch_indices(seed, call.partition_id, k, len(task.part), batch_size)]
        for k in range(first + 1, first + steps + 1)
    ]
    return LocalWork(sent_state(call, task), task.x, task.y, batches, positive(config, "learning-rate"))


def _reply(outcome: Trained, task: LocalTask) -> RecordDict:
    metrics = MetricRecord({"num-examples": len(task.part), "train-loss": outcome.mean_loss})
    return RecordDict({"arrays": to_record(outcome.state), "metrics": metrics})
