"""What a GPU does: whole rounds on both engines, and node-steps of stacked local SGD against the loop.

    PYTHONPATH=.typing python benchmarks/gpu.py [--device cuda] [--nodes 10 100 1000] [--seconds 400]

Ends within ``--seconds`` plus one measurement. Rounds come first: of 1,000 nodes in columns that stay on the
device, in messages, and on the CPU, and of 50 nodes on Flower's engine, four of them sharing the GPU, where
Ray is installed.

Of the steps, ``layers`` is the form that ``stack`` takes for plain sequences, ``vmap`` the one for any other
model; ``graph`` replays one step of ``layers`` as a CUDA graph, on one stack and with its inputs gathered
outside, and so is what ``layers`` would be if launches cost nothing. The loop's cost is the same for every
node, so it is measured on ten.
TF32 is off in all: the loop's convolutions would otherwise round to ten bits where the stack's products do
not.
"""

import argparse
import logging
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import cast
from unittest.mock import patch

import numpy as np
import torch
from engine import APPS, app_run
from reports import report
from torch import nn
from torch.profiler import ProfilerActivity, profile

from hedgerow.clients.fedmud.factored_model import wrap
from hedgerow.clients.training.loop import train_one
from hedgerow.clients.training.stack import chunk_size, node_bytes, train_stack
from hedgerow.clients.training.stacked_layers import StackedLayers, stacked_layers
from hedgerow.clients.training.work import LocalWork
from hedgerow.sim import InProcessGrid
from hedgerow.sim.runs.app import load_app
from hedgerow.sim.runs.folder import read_rounds
from hedgerow.sim.runs.launch import plan_run, run_app
from hedgerow.tasks import build_model, count_parameters

STEPS = 4
Shape = tuple[int, int, int]
GREY, COLOUR = (1, 28, 28), (3, 32, 32)


def four_convolutions(shape: Shape) -> nn.Module:
    layers: list[nn.Module] = []
    for i in range(4):
        layers += [nn.Conv2d(64 if i else shape[0], 64, 3, padding=1), nn.ReLU()]
        if i % 2:
            layers.append(nn.MaxPool2d(2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 7 * 7, 10))


def plain(name: str) -> Callable[[Shape], nn.Module]:
    return lambda shape: build_model(name, shape, 10, 0)


def factored(name: str) -> Callable[[Shape], nn.Module]:
    return lambda shape: wrap(build_model(name, shape, 10, 0), variant="mud+bkd+aad", ratio=1 / 32)


# What is built, for samples of which shape, in batches of how many.
MODELS: dict[str, tuple[Callable[[Shape], nn.Module], Shape, int]] = {
    "lenet": (plain("lenet"), GREY, 10),
    "cnn-431k": (plain("cnn-431k"), GREY, 64),
    "4 convolutions": (four_convolutions, GREY, 10),
    "cnn4": (plain("cnn4"), GREY, 32),
    "cnn4 factored": (factored("cnn4"), GREY, 32),
    "cnn10": (plain("cnn10"), COLOUR, 32),
    "cnn10 factored": (factored("cnn10"), COLOUR, 32),
}


ROUNDS = "method=feel num-servers=1 tau1=1 tau2=1 partition=iid batch-size=10 evaluate-every=1000 workers=1 "
FLOWER = (
    "num-clients=50 num-servers=10 tau1=2 tau2=1 alpha=5 iterations=20 batch-size=10 evaluate-every=1000 "
)


def round_seconds(config: str) -> float:
    """Return the median seconds of a round after the first two, in this process."""
    app = load_app(APPS / "sd-feel")
    with tempfile.TemporaryDirectory() as folder:
        run_app(app, plan_run(app.spec, [f"{ROUNDS} {config} output-dir='{folder}'"]))
        (run,) = Path(folder).iterdir()
        return median(record["wall_seconds"] for record in read_rounds(run)[3:])


def whole_rounds(device: torch.device, nodes: int) -> None:
    """Measure rounds in columns, in messages and on the CPU; then those of Flower's engine."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    config = f"num-clients={nodes} clients-per-round={nodes} iterations=8 device={device}"
    ours = round_seconds(config)
    print(f"a round of {nodes:,} nodes of LeNet, a step of batch 4 each: {ours:.4f} s", flush=True)
    report(f"a round of {nodes} nodes of LeNet", ours, "s")
    with patch.object(InProcessGrid, "columns", lambda *asked: None):
        others = {"in messages": round_seconds(config)}
    others["on the CPU"] = round_seconds(f"{config} device=cpu")
    for what, other in others.items():
        print(f"  {what} {other:.4f} s ({other / ours:.1f}x)", flush=True)
        report(f"a round of {nodes} nodes of LeNet", ours, "s", other / ours, f"the same {what}")
    if find_spec("ray") is None:
        print("Flower's engine is left out: Ray is not installed")
        return
    shared = ["--client-gpus", "0.25"] if device.type == "cuda" else []
    try:
        _, flower = app_run("flower", f"{FLOWER} device={device}", *shared)
        _, inprocess = app_run("inprocess", f"{FLOWER} device={device}")
    except RuntimeError as error:
        print(f"Flower's engine is left out: {error}")
        return
    print(f"a round of 50 nodes x 2 steps: Flower's engine {flower:.4f} s, Hedgerow's {inprocess:.4f} s")
    report("a round of 50 nodes x 2 steps", inprocess, "s", flower / inprocess, "Flower's engine, 4 clients")


def works_of(model: nn.Module, nodes: int, shape: Shape, batch: int, device: torch.device) -> list[LocalWork]:
    stream = np.random.default_rng(0)
    x = torch.as_tensor(stream.normal(size=(5000, *shape)), dtype=torch.float32).to(device)
    y = torch.as_tensor(stream.integers(0, 10, 5000)).to(device)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    return [
        LocalWork(start, x, y, [stream.integers(0, 5000, batch) for _ in range(STEPS)], 0.01)
        for _ in range(nodes)
    ]


def in_chunks(model: nn.Module, works: list[LocalWork], size: int, layers: StackedLayers | None) -> None:
    for begin in range(0, len(works), size):
        train_stack(model, works[begin : begin + size], layers=layers)


class GraphedStack:
    """Local SGD of one stack of equal batches, a step of which is captured once and replayed.

    On a device without CUDA graphs the step is called instead.
    """

    def __init__(self, model: nn.Module, works: list[LocalWork], layers: StackedLayers) -> None:
        device = works[0].x.device
        model.train()
        self._works, self._layers = works, layers
        self._trainable = [name for name, p in model.named_parameters() if p.requires_grad]
        self._start = {
            name: torch.stack([w.start[name] for w in works]).to(v) for name, v in model.state_dict().items()
        }
        self._index = torch.as_tensor(
            np.array([[work.batches[step] for work in works] for step in range(STEPS)])
        ).to(device)
        self.stack = {name: value.clone() for name, value in self._start.items()}
        self._x, self._y = self._gathered(0)
        self._replay = self._step
        if device.type == "cuda":
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._step()
            torch.cuda.current_stream(device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step()
            self._replay = graph.replay

    def __call__(self) -> None:
        """Train from the start, as ``train_stack`` does."""
        for name, value in self._start.items():
            self.stack[name].copy_(value)
        for step in range(STEPS):
            x, y = self._gathered(step)
            self._x.copy_(x)
            self._y.copy_(y)
            self._replay()

    def _gathered(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._works[0].x[self._index[step]], self._works[0].y[self._index[step]]

    def _step(self) -> None:
        leaves = {name: self.stack[name].detach().requires_grad_() for name in self._trainable}
        outputs = self._layers({**self.stack, **leaves}, self._x)
        each = nn.functional.cross_entropy(outputs.flatten(0, 1), self._y.flatten(), reduction="none")
        loss = each.view(self._y.shape).mean(1).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        with torch.no_grad():
            torch._foreach_add_(
                [self.stack[name] for name in self._trainable], list(gradients), alpha=-self._works[0].lr
            )


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
    parser.add_argument("--seconds", type=float, default=400)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device: nothing measured (--device cpu --nodes 10 tries the script)")
        return
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}")
    end = time.monotonic() + options.seconds
    whole_rounds(device, max(options.nodes))
    print("node-steps a second (times the loop's)")
    for title, (build, shape, batch) in MODELS.items():
        model = build(shape).to(device)
        print(f"{title}: {count_parameters(model):,} parameters, batch {batch}")
        ten = works_of(model, min(10, *options.nodes), shape, batch, device)
        loop = STEPS * len(ten) / seconds(lambda: [train_one(model, w) for w in ten], device)  # noqa: B023
        print(f"  {'loop':>8} {len(ten):5d} nodes {loop:10,.0f}", flush=True)
        bytes_a_node = node_bytes(model, ten[0].x[:1], batch)
        stacked = stacked_layers(model, 3)
        for form in ("layers", "vmap", "graph"):
            slowest = 0.0
            for nodes in sorted(options.nodes):
                # A form that would take minutes here has lost already.
                if time.monotonic() > end or 10 * slowest > 40:
                    print(f"  {form:>8} {nodes:5d} nodes  left out: the time is spent")
                    continue
                works = works_of(model, nodes, shape, batch, device)
                size = chunk_size(nodes, bytes_a_node, device)
                trained = nodes
                if form == "graph":
                    # Its start and its captured step's memory are kept beside the stack.
                    size = trained = max(1, size // 2) if size < nodes else size
                    run: Callable[[], object] = GraphedStack(
                        model, works[:size], cast(StackedLayers, stacked)
                    )
                else:
                    layers = stacked if form == "layers" else None
                    run = partial(in_chunks, model, works, size, layers)
                slowest = seconds(run, device)
                rate = STEPS * trained / slowest
                peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
                gib = size * bytes_a_node / 2**30
                print(f"  {form:>8} {nodes:5d} nodes {rate:10,.0f} ({rate / loop:5.1f}x)", end="  ")
                report(
                    f"{title}, {nodes} nodes, {form}", rate, "steps/s", rate / loop, "the loop of 10 nodes"
                )
                print(f"stacks of {size}, estimated {gib:.2f} GiB, peak {peak:.2f} GiB", flush=True)
                del run
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats(device)
        nodes = sorted(options.nodes)[len(options.nodes) // 2]
        works = works_of(model, nodes, shape, batch, device)
        size = chunk_size(nodes, bytes_a_node, device)
        what_bounds(partial(in_chunks, model, works, size, stacked), device)


if __name__ == "__main__":
    main()
