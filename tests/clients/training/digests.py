"""What nodes learn in stacks of every size, on one thread and on two: a digest each, told as JSON.

Run as a program, so that the libraries' instruction sets can be set from outside.
"""

import hashlib
import itertools
import json
import sys
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from hedgerow.clients import LocalWork, TrainingMode, local_sgd
from hedgerow.tasks import MODELS, build_model

Shape = tuple[int, ...]

SHAPE: Shape = (1, 28, 28)
NODES = 6


def digest(states: Iterable[Mapping[str, Tensor]]) -> str:
    found = hashlib.sha256()
    for state in states:
        for key in sorted(state):
            found.update(np.ascontiguousarray(state[key].numpy()).tobytes())
    return found.hexdigest()[:16]


def weights() -> dict[str, str]:
    """Digests of the initial weights of all models of images."""
    return {
        name: digest([build_model(name, (3, 32, 32), 10, 0).state_dict()])
        for name in MODELS
        if name != "text-transformer"
    }


def ragged_works(model: nn.Module, batch: int, shape: Shape = SHAPE, steps: int = 3) -> list[LocalWork]:
    draws = np.random.default_rng(7)
    x = torch.from_numpy(draws.standard_normal((200, *shape)).astype(np.float32))
    y = torch.from_numpy(draws.integers(0, 10, 200))
    start = {key: value.clone() for key, value in model.state_dict().items()}
    return [
        LocalWork(
            start, x, y, [draws.choice(200, batch, replace=False) for _ in range(steps - node % 2)], 0.05
        )
        for node in range(NODES)
    ]


def learnt(name: str, batch: int, mode: TrainingMode = "stack", shape: Shape = SHAPE) -> dict[str, str]:
    """Digests by threads and size of a stack, or under ``loop`` and ``auto`` of a call."""
    model = build_model(name, shape, 10, 0)
    works = ragged_works(model, batch, shape)
    before = torch.get_num_threads()
    found = {}
    try:
        for threads, size in itertools.product((1, 2), (1, 4, NODES)):
            torch.set_num_threads(threads)
            if mode == "stack":
                trained = local_sgd(model, works, mode="stack", max_nodes=size)
            else:
                calls = [works[i : i + size] for i in range(0, NODES, size)]
                trained = [one for call in calls for one in local_sgd(model, call, mode=mode)]
            found[f"{threads} threads, {size} nodes"] = digest(one.state for one in trained)
    finally:
        torch.set_num_threads(before)
    return found


if __name__ == "__main__":
    names, batches, modes = (part.split(",") for part in sys.argv[1:])
    told = {
        f"{name}, batch {batch}, {mode}": learnt(name, int(batch), mode)
        for name, batch, mode in itertools.product(names, batches, modes)
    }
    print(json.dumps({"capability": torch.backends.cpu.get_cpu_capability(), "weights": weights(), **told}))
