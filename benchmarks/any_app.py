"""A Flower app that knows no Hedgerow on both engines: its rounds, its whole process and its memory.

    python benchmarks/any_app.py            # 3 pairs of runs, in turn

The app has the shape of Flower's first PyTorch example (``quickstart/``): an ordinary training loop, a
network of 61,706 parameters, 100 nodes of 40 images each, of which FedAvg of Flower draws 10 to train and 10
to evaluate. Flower's engine runs two nodes at a time on two cores, Hedgerow's has two workers.
"""

import json
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from engine import ENGINES, HERE, Repeats, show
from engine import hedgerow as hedgerow_run

import hedgerow.tasks


def main(
    repeats: Repeats = 3,
    rounds: Annotated[int, typer.Option(min=4)] = 30,
    workers: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Print medians over pairs of runs, each engine's first round left out."""
    data = Path(hedgerow.tasks.__file__).parent / "mnist_5k.npz"
    options: dict[str, tuple[str, ...]] = {"flower": (), "inprocess": ("--workers", str(workers))}
    found: dict[str, dict[str, list[float]]] = {
        what: {engine: [] for engine in ENGINES} for what in ("round", "whole", "memory", "accuracy")
    }
    for _ in range(repeats):
        for engine in ENGINES:
            with tempfile.TemporaryDirectory() as folder:
                result = Path(folder) / "result.json"
                config = f"num-rounds={rounds} data='{data}' result='{result}' output-dir='{folder}'"
                measured = hedgerow_run(HERE / "quickstart", engine, config, *options[engine])
                result_of = json.loads(result.read_text())
            # Before the first round is the start; Ray's is in that round.
            ends = result_of["ends"][1:]
            found["round"][engine].append(median(b - a for a, b in pairwise(ends)))
            found["whole"][engine].append(measured.seconds)
            found["memory"][engine].append(measured.peak_gib)
            found["accuracy"][engine].append(result_of["accuracy"])
    show("a round, 10 of 100 nodes train", "s", *found["round"].values())
    show(f"the whole process, {rounds} rounds", "s", *found["whole"].values())
    show("peak memory of all processes", "GiB", *found["memory"].values())
    print(f"accuracy: {found['accuracy']}")


if __name__ == "__main__":
    typer.run(main)
