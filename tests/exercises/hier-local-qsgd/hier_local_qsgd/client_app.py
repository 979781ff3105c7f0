"""The node's half: tau1 steps of SGD, of which the quantised change goes up."""

import numpy as np
from flwr.app import MetricRecord, RecordDict

from hedgerow.clients import BatchClientApp, LocalWork, batch_indices, local_sgd, local_task, whoami

from .quantiser import packed, quantised


def flat(state):
    return np.concatenate([np.asarray(value).ravel() for value in state.values()])


def train(calls):
    works = []
    for call in calls:
        task, told, config = local_task(call.context), call.content["config"], call.context.run_config
        first = (told["round"] - 1) * told["tau1"]
        batches = [
            task.part[batch_indices(told["seed"], call.partition_id, k, len(task.part), config["batch-size"])]
            for k in range(first, first + told["tau1"])
        ]
        start = call.content["arrays"].to_torch_state_dict()
        works.append(LocalWork(start, task.x, task.y, batches, lr=config["lr"]))
    outcomes = local_sgd(local_task(calls[0].context).model, works)
    return [reply(call, work, outcome) for call, work, outcome in zip(calls, works, outcomes, strict=True)]


def reply(call, work, outcome):
    told = call.content["config"]
    change = flat(outcome.state) - flat(work.start)
    norm, signed = quantised(change, told["levels"], told["seed"], told["round"], call.partition_id)
    examples = len(local_task(call.context).part)
    metrics = MetricRecord({"num-examples": examples, "train-loss": outcome.mean_loss})
    return RecordDict({"arrays": packed(norm, signed), "metrics": metrics})


app = BatchClientApp({"train": train, "query.whoami": whoami(lambda context: len(local_task(context).part))})
