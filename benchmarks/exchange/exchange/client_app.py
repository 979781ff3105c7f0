"""SGD on LeNet's 21,840 parameters, and when the process started, was ready, and was done."""

import os
import time
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from hedgerow.clients import BatchClientApp, LocalWork, each, local_sgd, whoami
from hedgerow.tasks import build_model
from hedgerow.wire import WHOAMI, Call


def process_start() -> float:
    """Return the start of this process as a Unix time (Linux)."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def train(call: Call) -> RecordDict:
    called = time.time()
    model = build_model("lenet", (1, 28, 28), 10, 0)
    start = call.content["arrays"].to_torch_state_dict()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10, 1, 28, 28, generator=generator)
    y = torch.randint(10, (10,), generator=generator)
    batches = [np.arange(10)] * int(call.context.run_config["local-steps"])
    # As the suite's nodes do: the first step of a torch.optim optimiser would import torch's compiler.
    (trained,) = local_sgd(model, [LocalWork(start, x, y, batches, 0.01)])
    times = {
        "partition": int(call.context.node_config["partition-id"]),
        "started": process_start(),
        "called": called,
        "done": time.time(),
    }
    return RecordDict({"arrays": ArrayRecord(dict(trained.state)), "times": MetricRecord(times)})


app = BatchClientApp({"train": each(train), WHOAMI: whoami(lambda _: 10)})
