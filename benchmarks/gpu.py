"""Node-steps a second of stacked local SGD on a GPU against the loop on the same GPU, and what bounds it.

    PYTHONPATH=.typing python benchmarks/gpu.py [--device cuda] [--nodes 10 100 1000] [--seconds 420]

Needs torch, numpy, flwr and this repository; ends within ``--seconds`` plus one measurement. The loop's cost
is the same for every node, so it is measured on ten. ``layers`` is the form that ``stack`` takes for plain
sequences, ``vmap`` the one for any other model. TF32 is off in both: the loop's convolutions would
otherwise round to ten bits where the stack's products do not.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from reports import report
from torch import nn
from torch.profiler import ProfilerActivity, profile

from hedgerow.clients.fedmud.factored_model import wrap
from hedgerow.clients.training.loop import train_one
from hedgerow.clients.training.memory import chunk_size, node_bytes
from hedgerow.clients.training.stack import train_stack
from hedgerow.clients.training.stacked_layers import StackedLayers, stacked_layers
from hedgerow.clients.training.work import LocalWork
from hedgerow.tasks import build_model, count_parameters

IMAGES = (1, 28, 28)
STEPS = 4


def four_convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for i in range(4):
        layers += [nn.Conv2d(64 if i else 1, 64, 3, padding=1), nn.ReLU()]
        if i % 2:
            layers.append(nn.MaxPool2d(2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 7 * 7, 10))


def factored(name: str) -> nn.Module:
    return wrap(build_model(name, IMAGES, 10, 0), variant="mud+bkd+aad", ratio=1 / 32)


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and the batch
    "lenet": (lambda: build_model("lenet", IMAGES, 10, 0), 10),
    "cnn-431k": (lambda: build_model("cnn-431k", IMAGES, 10, 0), 64),
    "4 convolutions": (four_convolutions, 10),
    "cnn4": (lambda: build_model("cnn4", IMAGES, 10, 0), 32),
    "cnn4 factored": (lambda: factored("cnn4"), 32),
}


def works_of(model: nn.Module, nodes: int, batch: int, device: torch.device) -> list[LocalWork]:
    stream = np.random.default_rng(0)
    x = torch.as_tensor(stream.normal(size=(5000, *IMAGES)), dtype=torch.float32).to(device)
    y = torch.as_tensor(stream.integers(0, 10, 5000)).to(device)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    return [
        LocalWork(start, x, y, [stream.integers(0, 5000, batch) for _ in range(STEPS)], 0.01)
        for _ in range(nodes)
    ]


def in_chunks(model: nn.Module, works: list[LocalWork], size: int, layers: StackedLayers | None) -> None:
    for begin in range(0, len(works), size):
        train_stack(model, works[begin : begin + size], layers=layers)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the better of two runs after a warm-up."""

    def once() -> float:
        _synchronize(device)
        begin = time.perf_counter()
        run()
        _synchronize(device)
        return time.perf_counter() - begin

    once()
    return min(once(), once())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def what_bounds(run: Callable[[], object], device: torch.device) -> None:
    activities = {
        ProfilerActivity.CPU,
        ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU,
    }
    _synchronize(device)
    begin = time.perf_counter()
    with profile(activities=activities) as profiler:
        run()
        _synchronize(device)
    wall = time.perf_counter() - begin
    events = profiler.key_averages()
    if device.type == "cuda":
        kernels = [
            (e.self_device_time_total / 1e6, e.count, e.key) for e in events if e.device_type.name == "CUDA"
        ]
    else:
        kernels = [(e.self_cpu_time_total / 1e6, e.count, e.key) for e in events]
    busy = sum(time for time, _, _ in kernels)
    count = sum(number for _, number, _ in kernels)
    verdict = "kernels" if busy > 0.7 * wall else "launches"
    print(f"  profile: {wall:.3f} s, device busy {busy / wall:.0%} in {count} kernels: bound by {verdict}")
    for total, number, key in sorted(kernels, reverse=True)[:8]:
        print(f"    {total / max(busy, 1e-12):6.1%} {number:6d} x  {key[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--seconds", type=float, default=420)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device: nothing measured (--device cpu --nodes 10 tries the script)")
        return
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}; node-steps a second (times the loop's)")
    end = time.monotonic() + options.seconds
    for title, (build, batch) in MODELS.items():
        model = build().to(device)
        print(f"{title}: {count_parameters(model):,} parameters, batch {batch}")
        ten = works_of(model, min(10, *options.nodes), batch, device)
        loop = STEPS * len(ten) / seconds(lambda: [train_one(model, w) for w in ten], device)  # noqa: B023
        print(f"  {'loop':>8} {len(ten):5d} nodes {loop:10,.0f}", flush=True)
        bytes_a_node = node_bytes(model, ten[0].x[:1], batch)
        for form, layers in (("layers", stacked_layers(model, 3)), ("vmap", None)):
            slowest = 0.0
            for nodes in sorted(options.nodes):
                # A form that would take minutes here has lost already.
                if time.monotonic() > end or 10 * slowest > 40:
                    print(f"  {form:>8} {nodes:5d} nodes  left out: the time is spent")
                    continue
                works = works_of(model, nodes, batch, device)
                size = chunk_size(nodes, bytes_a_node, device)
                slowest = seconds(lambda: in_chunks(model, works, size, layers), device)  # noqa: B023
                rate = STEPS * nodes / slowest
                peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
                gib = size * bytes_a_node / 2**30
                print(f"  {form:>8} {nodes:5d} nodes {rate:10,.0f} ({rate / loop:5.1f}x)", end="  ")
                report(
                    f"{title}, {nodes} nodes, {form}", rate, "steps/s", rate / loop, "the loop of 10 nodes"
                )
                print(f"stacks of {size}, estimated {gib:.2f} GiB, peak {peak:.2f} GiB", flush=True)
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
        nodes = sorted(options.nodes)[len(options.nodes) // 2]
        works = works_of(model, nodes, batch, device)
        size = chunk_size(nodes, bytes_a_node, device)
        what_bounds(lambda: in_chunks(model, works, size, stacked_layers(model, 3)), device)  # noqa: B023


if __name__ == "__main__":
    main()
