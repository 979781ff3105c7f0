"""What Hedgerow's engine costs beside Flower's: the same app on both, in one run, on this machine.

    python benchmarks/engine.py overhead    # a message that does nothing
    python benchmarks/engine.py sd-feel     # SD-FEEL as a user runs it, and the floor of its arithmetic
    python benchmarks/engine.py thousand    # 1,000 nodes, 100 a round
    python benchmarks/engine.py workers     # SD-FEEL on 1, 2, ... worker processes

Each prints both sides and their ratio, medians over repetitions.
"""

import io
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer
from processes import Measured, measure
from reports import report

from hedgerow.sim.runs.app import load_app
from hedgerow.sim.runs.folder import read_rounds
from hedgerow.sim.runs.launch import Records, plan_run, run_app

HERE = Path(__file__).resolve().parent
APPS = HERE.parent / "flower_apps"
app = typer.Typer(add_completion=False)
ENGINES = ("flower", "inprocess")
Repeats = Annotated[int, typer.Option(min=1)]


def hedgerow(app_folder: Path, engine: str, config: str, *options: str) -> Measured:
    command = [sys.executable, "-m", "hedgerow.sim", "run", str(app_folder), "--engine", engine, "-c", config]
    return measure([*command, *options])


def show(what: str, unit: str, flower: Sequence[float], ours: Sequence[float]) -> None:
    a, b = median(flower), median(ours)
    print(f"{what:<44} Flower {a:10.3f}   Hedgerow {b:10.3f} {unit:<9} ratio {a / b:6.1f}", flush=True)
    report(what, b, unit, a / b, "Flower's engine")


@app.command()
def overhead(repeats: Repeats = 3) -> None:
    """Milliseconds a message: 50 nodes, a plain ClientApp that sends back what it got."""
    for params, rounds in ((21_840, 10), (11_000_000, 3)):
        milliseconds: dict[str, list[float]] = {engine: [] for engine in ENGINES}
        memory: dict[str, list[float]] = {engine: [] for engine in ENGINES}
        for _ in range(repeats):
            for engine in ENGINES:
                with tempfile.TemporaryDirectory() as folder:
                    result = Path(folder) / "seconds.json"
                    config = (
                        f"num-params={params} num-rounds={rounds} result='{result}' output-dir='{folder}'"
                    )
                    measured = hedgerow(HERE / "noop", engine, config)
                    # The first round of Flower's engine contains the start of Ray.
                    seconds = json.loads(result.read_text())[1:]
                milliseconds[engine].append(1e3 * median(seconds) / 50)
                memory[engine].append(measured.peak_gib)
        show(f"a message, {params:,} parameters", "ms", milliseconds["flower"], milliseconds["inprocess"])
        show(f"peak memory, {params:,} parameters", "GiB", memory["flower"], memory["inprocess"])
    recording(repeats)


def recording(repeats: int) -> None:
    """Milliseconds a message that a run folder costs an app that knows of none, with and without in turn."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    noop = load_app(HERE / "noop")
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(10 * repeats):
        for recorded in seconds:
            with tempfile.TemporaryDirectory() as folder:
                result = Path(folder) / "seconds.json"
                plan = plan_run(noop.spec, [f"num-rounds=21 result='{result}'"])
                records = Records(output_dir=Path(folder), quiet=True) if recorded else None
                with redirect_stdout(io.StringIO()):
                    run_app(noop, plan, records=records)
                seconds[recorded] += json.loads(result.read_text())[1:]
    bare, whole = (1e3 * median(seconds[recorded]) / 50 for recorded in (False, True))
    print(
        f"recording a message of another's app: {whole - bare:.4f} ms "
        f"({bare:.4f} without, {whole:.4f} with); meant to be at most 0.05"
    )
    report("recording a message of another's app", whole - bare, "ms")


def app_run(engine: str, config: str, *options: str) -> tuple[Measured, float]:
    """Return the whole process and the median seconds of a round after the first."""
    with tempfile.TemporaryDirectory() as folder:
        measured = hedgerow(APPS / "sd-feel", engine, f"{config} output-dir='{folder}'", *options)
        rounds = read_rounds(next(Path(folder).iterdir()))
    return measured, median(record["wall_seconds"] for record in rounds[2:])


@app.command("sd-feel")
def sd_feel(repeats: Repeats = 3) -> None:
    """50 nodes, 21,840 parameters, tau1 = 2, batch 10, 50 rounds: a round, the process, and the floor."""
    config = (
        "num-clients=50 num-servers=10 tau1=2 tau2=1 alpha=5 iterations=100 batch-size=10 evaluate-every=1000"
    )
    rounds: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    whole: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    floors: list[float] = []
    for _ in range(repeats):
        for engine in ENGINES:
            measured, seconds = app_run(engine, config)
            rounds[engine].append(seconds)
            whole[engine].append(measured.seconds)
        floors.append(bare_loop_seconds(nodes=50, steps=2))
    show("a round of 50 nodes x 2 steps", "s", rounds["flower"], rounds["inprocess"])
    show("the whole process, 50 rounds", "s", whole["flower"], whole["inprocess"])
    floor, ours = median(floors), median(rounds["inprocess"])
    print(f"the same SGD steps as a bare loop: {floor:.3f} s; our round takes {ours / floor:.2f} of that")
    report("a round of SD-FEEL, 50 nodes x 2 steps", ours, "s", floor / ours, "a bare loop of its SGD steps")


def bare_loop_seconds(nodes: int, steps: int) -> float:
    """Seconds of one round's SGD steps without any framework: one node after another."""
    import torch

    from hedgerow.tasks import build_model, federated

    data = federated("mnist-5k", "dirichlet(0.5)", nodes, 0)
    models = [build_model("lenet", (1, 28, 28), 10, 0) for _ in range(nodes)]
    rng = np.random.default_rng(0)
    times = []
    for _ in range(12):
        batches = [
            [rng.choice(part, min(10, len(part)), replace=False) for _ in range(steps)] for part in data.parts
        ]
        started = time.perf_counter()
        for model, node_batches in zip(models, batches, strict=True):
            optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
            for batch in node_batches:
                optimiser.zero_grad()
                index = torch.from_numpy(batch)
                torch.nn.functional.cross_entropy(model(data.x[index]), data.y[index]).backward()
                optimiser.step()
        times.append(time.perf_counter() - started)
    return median(times[2:])


@app.command()
def workers(most: Annotated[int, typer.Option(min=2)] = 2, repeats: Repeats = 3) -> None:
    """SD-FEEL as in sd-feel, on one process with 1 and all threads, and on 2 to ``most`` workers, in turn."""
    config = (
        "num-clients=50 num-servers=10 tau1=2 tau2=1 alpha=5 iterations=100 batch-size=10 evaluate-every=1000"
    )
    cases = {"one process, one thread": (1, "1"), "one process, all threads": (1, None)}
    cases |= {f"{count} workers": (count, None) for count in range(2, most + 1)}
    rounds: dict[str, list[float]] = {name: [] for name in cases}
    whole: dict[str, list[float]] = {name: [] for name in cases}
    before = os.environ.get("OMP_NUM_THREADS")
    for _ in range(repeats):
        for name, (count, threads) in cases.items():
            os.environ.pop("OMP_NUM_THREADS", None)
            if threads or before:
                os.environ["OMP_NUM_THREADS"] = threads or str(before)
            measured, seconds = app_run("inprocess", f"{config} workers={count}")
            rounds[name].append(seconds)
            whole[name].append(measured.seconds)
    first = next(iter(cases))
    for name in cases:
        a, b = median(rounds[name]), median(whole[name])
        print(
            f"{name:<26} a round {a:7.4f} s, {median(rounds[first]) / a:5.2f} times the first; "
            f"the process {b:6.2f} s, {median(whole[first]) / b:5.2f} times; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        ratio = None if name == first else median(rounds[first]) / a
        report(f"a round of SD-FEEL, {name}", a, "s", ratio, first)


@app.command()
def thousand(repeats: Repeats = 3) -> None:
    """1,000 nodes of which FEEL schedules 100 a round, one local step each: a round, and peak memory."""
    config = (
        "method=feel num-clients=1000 clients-per-round=100 num-servers=1 tau1=1 tau2=1 iterations=6 "
        "partition=iid batch-size=4 evaluate-every=1000"
    )
    rounds: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    memory: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    for _ in range(repeats):
        for engine in ENGINES:
            measured, seconds = app_run(engine, config)
            rounds[engine].append(seconds)
            memory[engine].append(measured.peak_gib)
    show("a round, 100 of 1,000 nodes", "s", rounds["flower"], rounds["inprocess"])
    show("peak memory of all processes", "GiB", memory["flower"], memory["inprocess"])


if __name__ == "__main__":
    app()
