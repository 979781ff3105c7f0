"""What every contender is given and what it gives back. Needs NumPy only: it runs in every environment."""

import argparse
import json
import time
from dataclasses import dataclass

import numpy as np

CLIENTS = 100
COHORT = 10  # clients a round, drawn without replacement
BATCH = 10
LR = 0.05
MODELS = ("logistic", "lenet")
STEPS_A_ROUND = COHORT * 4  # 40 samples a client, one epoch


@dataclass(frozen=True)
class Task:
    model: str
    mode: str
    rounds: int
    seed: int
    x: np.ndarray  # (samples, 1, 28, 28) float32
    y: np.ndarray  # (samples,) int64
    x_test: np.ndarray
    y_test: np.ndarray
    parts: np.ndarray  # (clients, 40): indices into x and y
    weights: dict[str, np.ndarray]  # where every contender starts, by torch's names and in torch's layout


def read_task() -> Task:
    """Return the task that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("task")
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    with np.load(arguments.task) as file:
        arrays = {key: file[key] for key in ("x", "y", "x_test", "y_test", "parts")}
        prefix = f"{arguments.model}/"
        weights = {key.removeprefix(prefix): file[key] for key in file.files if key.startswith(prefix)}
    return Task(arguments.model, arguments.mode, arguments.rounds, arguments.seed, **arrays, weights=weights)


class Rounds:
    """Wall seconds and SGD steps of each round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.steps: list[int] = []
        self._steps = 0
        self._started = 0.0

    def start(self) -> None:
        self._steps = 0
        self._started = time.perf_counter()

    def step(self, count: int = 1) -> None:
        self._steps += count

    def end(self) -> None:
        """End a round; the next one starts at once."""
        now = time.perf_counter()
        self.seconds.append(now - self._started)
        self.steps.append(self._steps)
        self._steps = 0
        self._started = now

    def report(self, accuracy: float, versions: str) -> None:
        """Print what the driver reads: one line of JSON, the last on stdout."""
        result = {"seconds": self.seconds, "steps": self.steps, "accuracy": accuracy, "versions": versions}
        print("\n" + json.dumps(result), flush=True)
