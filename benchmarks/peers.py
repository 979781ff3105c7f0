"""The same local work in other libraries' simulators: Apple's pfl-research, Google's FedJAX, fluke.

    python benchmarks/peers.py --env pfl=PYTHON --env fedjax=PYTHON --env fluke=PYTHON

100 clients with 40 real MNIST images each, dealt IID; 10 drawn at random a round; one epoch of batch 10 at
each (40 SGD steps a round), step size 0.05, FedAvg; logistic regression and a CNN of 21,840 parameters. All
start from the same weights, train on the same arrays and evaluate nothing in the timed part. A contender
whose steps differ, or whose final test accuracy is more than 0.03 from Hedgerow's, is not compared.

Seconds a round are the median without the first two rounds, then the median over repetitions; every
repetition is a new process, and repetitions of all contenders take turns. Each library runs in every way
in which it is fast on two cores (see ``peers/with_*.py``), torch with its own choice of threads and with
one. Each library wants an environment of its own, given by its Python; one may be given twice:

    python -m venv pfl    && pfl/bin/pip install pfl torch==2.13.0
    python -m venv fedjax && fedjax/bin/pip install fedjax
    python -m venv fluke  && fluke/bin/pip install fluke-fl torch==2.13.0

and, where ``import torchvision`` fails in fluke's, nothing more: the script leaves its operators out.
FedJAX's parallel backend does not run with today's JAX; with the JAX of its time it does:

    python -m venv old && old/bin/pip install fedjax jax==0.4.25 jaxlib==0.4.25 'numpy<2' 'scipy<1.13' \
        'dm-haiku<0.0.13' 'optax<0.2.3'
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer
from peers.task import CLIENTS, MODELS, STEPS_A_ROUND
from reports import report

from hedgerow.tasks import build_model, federated

HERE = Path(__file__).resolve().parent / "peers"
WARM_UP = 2
MAX_ACCURACY_GAP = 0.03
TWO_PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
TWO_DEVICES = "--xla_force_host_platform_device_count=2"


@dataclass
class Contender:
    library: str
    python: str
    mode: str
    threads: int | None = None  # of torch; None leaves it to torch
    launcher: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{self.library} {self.mode}"]
        parts += ["2 processes"] if self.launcher else []
        parts += [f"{self.threads} thread"] if self.threads else []
        return ", ".join(parts)


@dataclass
class Measured:
    contender: Contender
    seconds: list[float] = field(default_factory=list)  # one a repetition
    accuracies: list[float] = field(default_factory=list)
    versions: str = ""
    trouble: str = ""

    def run(self, command_line: list[str]) -> None:
        """Add one repetition, unless there was trouble before."""
        if self.trouble:
            return
        who = self.contender
        threads = {"OMP_NUM_THREADS": str(who.threads)} if who.threads else {}
        command = [who.python, *who.launcher, str(HERE / f"with_{who.library}.py"), *command_line]
        # Two processes of pfl sometimes end with an abort: that is tried once more.
        for _ in range(2):
            finished = subprocess.run(
                [*command, "--mode", who.mode],
                env={**os.environ, **threads, **who.environment},
                capture_output=True,
                text=True,
                check=False,
            )
            if finished.returncode == 0:
                break
        if finished.returncode != 0:
            self.trouble = f"does not run: {_error(finished.stderr)}"
            print(f"{who}:\n{finished.stderr[-4000:]}", file=sys.stderr, flush=True)
            return
        result = json.loads(finished.stdout.strip().splitlines()[-1])
        steps = set(result["steps"])
        if steps != {STEPS_A_ROUND}:
            self.trouble = f"not compared: {sorted(steps)} steps a round instead of {STEPS_A_ROUND}"
        self.seconds.append(median(result["seconds"][WARM_UP:]))
        self.accuracies.append(result["accuracy"])
        self.versions = result["versions"]


def _error(stderr: str) -> str:
    """Return the line that names the error: a child's, prefixed or not, before that of torchrun itself."""
    lines = stderr.splitlines()
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?\S*Error\b", line)]
    causes = [line for line in errors if "ChildFailedError" not in line]
    return (causes or errors or lines or ["no message"])[-1][:100]


def contenders(pythons: list[tuple[str, str]]) -> Iterator[Contender]:
    for threads in (None, 1):
        for mode in ("auto", "loop"):
            yield Contender("hedgerow", sys.executable, mode, threads)
    yield Contender("hedgerow", sys.executable, "workers", threads=1)
    for library, python in pythons:
        match library:
            case "pfl":
                yield Contender(library, python, "plain")
                yield Contender(library, python, "plain", threads=1)
                yield Contender(library, python, "plain", threads=1, launcher=TWO_PROCESSES)
            case "fedjax":
                yield Contender(library, python, "jit")
                yield Contender(library, python, "pmap", environment={"XLA_FLAGS": TWO_DEVICES})
            case "fluke":
                yield Contender(library, python, "api")
                yield Contender(library, python, "api", threads=1)


def write_task(path: Path) -> None:
    data = federated("mnist-5k", "iid", CLIENTS, 0)
    weights = {
        f"{name}/{key}": value.numpy()
        for name in MODELS
        for key, value in build_model(name, data.dataset.input_shape, 10, 0).state_dict().items()
    }
    np.savez(
        path,
        x=data.x.numpy(),
        y=data.y.numpy(),
        x_test=data.x_test.numpy(),
        y_test=data.y_test.numpy(),
        parts=np.stack(data.parts),
        **weights,
    )


def show(model: str, rows: list[Measured]) -> None:
    """Print the table of one model; ratios are to Hedgerow's fastest form."""
    ours = [row for row in rows if row.contender.library == "hedgerow"]
    if trouble := [row for row in ours if row.trouble]:
        raise RuntimeError(f"{trouble[0].contender} {trouble[0].trouble}")
    reference = min(ours, key=lambda row: median(row.seconds))
    expected = median(reference.accuracies)
    print(f"\n{model}: milliseconds a round, median (lowest to highest repetition)")
    best: dict[str, float] = {}
    for row in rows:
        gap = max((abs(accuracy - expected) for accuracy in row.accuracies), default=0.0)
        if not row.trouble and gap > MAX_ACCURACY_GAP:
            row.trouble = f"not compared: accuracies {row.accuracies}, Hedgerow's is {expected:.3f}"
        if row.trouble:
            print(f"  {row.contender!s:<36} {row.trouble}")
            continue
        seconds = median(row.seconds)
        spread = f"({1e3 * min(row.seconds):.1f} to {1e3 * max(row.seconds):.1f})"
        ratio = seconds / median(reference.seconds)
        accuracy = median(row.accuracies)
        print(
            f"  {row.contender!s:<36} {1e3 * seconds:8.1f} {spread:<20} ratio {ratio:6.2f}   "
            f"accuracy {accuracy:.3f}   {row.versions}"
        )
        best[row.contender.library] = min(ratio, best.get(row.contender.library, ratio))
    for name, ratio in best.items():
        if name != "hedgerow":
            report(f"a round of {model}", 1e3 * median(reference.seconds), "ms", ratio, name)
    print("  each library's fastest: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in best.items()))


def main(
    env: Annotated[list[str] | None, typer.Option(help="pfl=PYTHON, fedjax=PYTHON or fluke=PYTHON")] = None,
    rounds: Annotated[int, typer.Option(min=22)] = 34,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    cores: Annotated[int, typer.Option(min=1, help="CPU cores that every contender may use")] = 2,
) -> None:
    pythons = []
    for entry in env or []:
        library, _, python = entry.partition("=")
        if library not in ("pfl", "fedjax", "fluke") or not Path(python).is_file():
            raise typer.BadParameter(f"--env must be pfl=, fedjax= or fluke= and a Python, got {entry}")
        pythons.append((library, python))
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:cores]))
    print(f"load before: {os.getloadavg()}", flush=True)
    rows = {model: [Measured(contender) for contender in contenders(pythons)] for model in MODELS}
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / "task.npz"
        write_task(task)
        for seed in range(repeats):
            for model in MODELS:
                for row in rows[model]:
                    row.run([str(task), "--model", model, "--rounds", str(rounds), "--seed", str(seed)])
    print(f"load after: {os.getloadavg()}")
    for model in MODELS:
        show(model, rows[model])


if __name__ == "__main__":
    typer.run(main)
