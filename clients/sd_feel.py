"""The client of SD-FEEL and its baselines: tau1 iterations of mini-batch SGD, eq. (2).

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data", Algorithm 1. A client keeps nothing between rounds: the mini-batch of
iteration k is a function of (seed, client, k) alone, so that runs with other periods, graphs or baselines
see the same batches.
"""

from collections.abc import Sequence
from math import inf
from typing import cast

import numpy as np
import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from hedgerow.clients.app import BatchClientApp, each, whoami
from hedgerow.clients.local_task import LocalTask, LocalTaskFn, local_task
from hedgerow.clients.training import LocalWork, Trained, TrainingMode, local_sgd
from hedgerow.tasks import evaluate
from hedgerow.wire.calls import BatchHandler, Call
from hedgerow.wire.records import to_record, to_state_dict
from hedgerow.wire.seeds import Purpose, generator

__all__ = ["batch_indices", "sd_feel_client"]


def batch_indices(
    seed: int, partition_id: int, iteration: int, num_samples: int, batch_size: int
) -> NDArray[np.int64]:
    """Return the mini-batch of one client in one iteration (from 1), drawn without replacement.

    All ``num_samples`` are taken, in order, if there are no more than ``batch_size``.
    """
    if num_samples <= batch_size:
        return np.arange(num_samples)
    stream = generator(seed, round=iteration, partition_id=partition_id, purpose=Purpose.BATCH)
    return stream.choice(num_samples, batch_size, replace=False)


def sd_feel_client(
    task: LocalTaskFn = local_task, training_mode: TrainingMode | None = None
) -> BatchClientApp:
    """Return the ClientApp of SD-FEEL, HierFAVG, FEEL and FedAvg.

    It answers ``train`` (the config names ``first-step``, ``local-steps``, ``learning-rate``,
    ``batch-size`` and ``seed``), ``evaluate`` and ``query.whoami``.

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
        "evaluate": each(lambda call: _evaluate(call, task(call.context))),
        "query.whoami": whoami(lambda context: len(task(context).part)),
    }
    return BatchClientApp(handlers)


def _work(call: Call, task: LocalTask) -> LocalWork:
    config = _only_config(call)
    first, steps = _whole(config, "first-step", 0), _whole(config, "local-steps", 1)
    seed, batch_size = _whole(config, "seed", 0), _whole(config, "batch-size", 1)
    batches = [
        task.part[batch_indices(seed, call.partition_id, k, len(task.part), batch_size)]
        for k in range(first + 1, first + steps + 1)
    ]
    return LocalWork(_start(call, task), task.x, task.y, batches, _positive(config, "learning-rate"))


def _start(call: Call, task: LocalTask) -> dict[str, Tensor]:
    (arrays,) = call.content.array_records.values()
    start = to_state_dict(arrays, task.x.device)
    sent, own = (
        {key: tuple(value.shape) for key, value in state.items()}
        for state in (start, task.model.state_dict())
    )
    if sent != own:
        raise ValueError(f"the message's arrays are {sent}; valid is the model's {own}")
    return start


def _reply(outcome: Trained, task: LocalTask) -> RecordDict:
    metrics = MetricRecord({"num-examples": len(task.part), "train-loss": outcome.mean_loss})
    return RecordDict({"arrays": to_record(outcome.state), "metrics": metrics})


def _evaluate(call: Call, task: LocalTask) -> RecordDict:
    task.model.load_state_dict(_start(call, task))
    index = torch.as_tensor(task.part, device=task.x.device)
    result = evaluate(task.model, task.x[index], task.y[index])
    metrics = MetricRecord(
        {"num-examples": result.num_examples, "loss": result.loss, "accuracy": result.accuracy}
    )
    return RecordDict({"metrics": metrics})


def _only_config(call: Call) -> ConfigRecord:
    (config,) = call.content.config_records.values()
    return config


def _whole(config: ConfigRecord, key: str, least: int) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{key} is {value!r} in the message's config; valid is an integer >= {least}")
    return value


def _positive(config: ConfigRecord, key: str) -> float:
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf:
        raise ValueError(f"{key} is {value!r} in the message's config; valid is a finite number > 0")
    return value
