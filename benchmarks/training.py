"""Milliseconds a node-step of local SGD: the loop, each form of the stack, and one model on all the data.

    python benchmarks/training.py [--threads 2] [--repeats 5] [--only lenet]
    python benchmarks/training.py --arithmetic --threads 1 [--batch 32]

``stack`` is the library's choice of form and chunks, ``vmap`` all nodes in one chunk by ``vmap``. The last
column is the same samples once through one model. The first number of a pair is the best of all repeats, the
second their median: what a machine under its present load gives. ``--arithmetic`` compares the loop of
FedMUD's network in float32 with bfloat16, compiled, and both, and with a stack of its nodes, one a thread.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from reports import report
from torch import nn

from hedgerow.clients.fedmud.factored_model import wrap
from hedgerow.clients.training.arithmetic import FLOAT32, Arithmetic
from hedgerow.clients.training.loop import train_loop, train_one
from hedgerow.clients.training.stack import train_stack, train_stacks
from hedgerow.clients.training.work import LocalWork, cross_entropy
from hedgerow.tasks import MODELS, build_model

IMAGES = (1, 28, 28)
COLOUR = "-colour"  # behind a name: on images of 3x32x32
CASES = [  # model, nodes, batch, steps
    ("lenet", 1, 10, 20),
    ("lenet", 10, 10, 10),
    ("lenet", 20, 10, 10),
    ("lenet", 50, 10, 6),
    ("lenet", 100, 10, 4),
    ("lenet-colour", 1, 10, 20),
    ("lenet-colour", 10, 10, 10),
    ("lenet-colour", 50, 10, 4),
    ("cnn-431k", 1, 64, 5),
    ("cnn-431k", 10, 64, 3),
    ("logistic", 50, 10, 20),
    ("mlp", 50, 10, 10),
    ("groupnorm", 50, 10, 4),
    ("layernorm-mlp", 50, 10, 10),
]


def model_of(name: str) -> nn.Module:
    if (known := name.removesuffix(COLOUR)) in MODELS:
        return build_model(known, shape_of(name), 10, seed=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "groupnorm":
            return nn.Sequential(
                nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
                nn.Flatten(), nn.Linear(32 * 7 * 7, 10),
            )  # fmt: skip
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))


def shape_of(name: str) -> tuple[int, int, int]:
    return (3, 32, 32) if name.endswith(COLOUR) else IMAGES


def works_of(
    model: nn.Module, nodes: int, batch: int, steps: int, shape: tuple[int, int, int] = IMAGES
) -> list[LocalWork]:
    stream = np.random.default_rng(0)
    x = torch.as_tensor(stream.normal(size=(2000, *shape)), dtype=torch.float32)
    y = torch.as_tensor(stream.integers(0, 10, 2000))
    start = {key: value.clone() for key, value in model.state_dict().items()}
    return [
        LocalWork(start, x, y, [stream.integers(0, 2000, batch) for _ in range(steps)], 0.01)
        for _ in range(nodes)
    ]


def arithmetics(threads: int, repeats: int, batch: int, only: str) -> None:
    """Print a node's step of FedMUD's networks in every arithmetic, in turns in this one process."""
    print(f"{threads} threads; best / median ms a node-step of batch {batch}, and the ratio to float32")
    forms = {
        "float32": FLOAT32,
        "bf16": Arithmetic("bf16"),
        "compiled": Arithmetic(compiled=batch),
        "bf16, compiled": Arithmetic("bf16", batch),
    }
    for name in ("cnn4", "cnn4 factored"):
        if only not in name:
            continue
        model = build_model("cnn4", IMAGES, 10, seed=0)
        if "factored" in name:
            model = wrap(model, variant="mud+bkd+aad", ratio=1 / 32)
        works = works_of(model, threads, batch, steps=4)
        runs: dict[str, Callable[[], object]] = {
            form: partial(train_loop, copy.deepcopy(model), works, cross_entropy, arithmetic=how)
            for form, how in forms.items()
        }
        runs["stack"] = partial(train_stacks, copy.deepcopy(model), works)
        times = milliseconds(runs, repeats)
        best, median = times["float32"]
        for form, (own_best, own_median) in times.items():
            cell = f"{own_best / 4 / threads:7.1f}/{own_median / 4 / threads:7.1f}"
            print(
                f"{name:>14} {form:>15} {cell}  {best / own_best:.2f} {median / own_median:.2f}", flush=True
            )


def milliseconds(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, tuple[float, float]]:
    """Return (best, median) of each run; they take turns, so that a machine's load falls on all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            if turn:  # The first is the warm-up.
                seconds[name].append(time.perf_counter() - begin)
    return {name: (1e3 * min(s), 1e3 * statistics.median(s)) for name, s in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5, help="at least 3")
    parser.add_argument("--only", default="", help="part of the model's name")
    parser.add_argument("--arithmetic", action="store_true", help="precisions and torch.compile instead")
    parser.add_argument("--batch", type=int, default=32, help="of --arithmetic, at least 2")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.arithmetic:
        arithmetics(options.threads, max(options.repeats, 3), options.batch, options.only)
        return
    print(f"{options.threads} threads; best / median ms a node-step; big = one model on all batches")
    print(f"{'model':>14} {'nodes':>5} {'batch':>5}", *(f"{c:>15}" for c in ("loop", "stack", "vmap", "big")))
    for name, nodes, batch, steps in CASES:
        if options.only not in name:
            continue
        model = model_of(name)
        works = works_of(model, nodes, batch, steps, shape_of(name))
        together = [np.concatenate([work.batches[step] for work in works]) for step in range(steps)]
        big = LocalWork(works[0].start, works[0].x, works[0].y, together, 0.01)
        times = milliseconds(
            {
                "loop": lambda: train_loop(model, works, cross_entropy),  # noqa: B023
                "stack": lambda: train_stacks(model, works),  # noqa: B023
                "vmap": lambda: train_stack(model, works),  # noqa: B023
                "big": lambda: train_one(model, big),  # noqa: B023
            },
            max(options.repeats, 3),
        )
        cells = (
            f"{best / nodes / steps:7.3f}/{median / nodes / steps:7.3f}" for best, median in times.values()
        )
        ratio = times["stack"][0] / times["big"][0]
        print(f"{name:>14} {nodes:>5} {batch:>5}", *cells, f"  stack/big {ratio:.2f}", flush=True)
        stack = times["stack"][0]
        report(f"{name} step, {nodes} nodes, batch {batch}", stack / nodes / steps, "ms",
               times["loop"][0] / stack, "the loop")  # fmt: skip


if __name__ == "__main__":
    main()
