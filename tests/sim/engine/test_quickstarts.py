"""Flower's quickstart ClientApps under Flower's strategies: on our engine, and the same on Flower's."""

import os
import random
import subprocess
import sys
from math import log
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from tests.sim.engine.quickstart_jobs import ALL, NODES, Outcome, client_app, load, run_jobs
from tests.sim.runs import quickstarts as apps

from hedgerow.sim import InProcessGrid

ROOT = Path(__file__).parents[3]
# Each framework once, and a strategy of each kind: mean, adaptive, robust, private. A slow test has all.
SOME = ("torch/FedAvg", "sklearn/FedAvg", "numpy/FedYogi", "numpy/Krum", "numpy/DP-client-adaptive")


def torch_loss() -> float:
    """Return the initial PyTorch model's loss, the mean over the nodes, which have as many examples."""
    model = torch.nn.Linear(2, 2)
    model.load_state_dict(apps.torch_arrays().to_torch_state_dict())
    losses = []
    for i in range(NODES):
        x, y = apps.data(Context(1, 1, {"partition-id": i}, RecordDict(), {}))
        predicted = model(torch.tensor(x, dtype=torch.float32))
        losses.append(torch.nn.functional.cross_entropy(predicted, torch.tensor(y)).item())
    return sum(losses) / NODES


# At the start: of zero weights the squared error and the cross-entropy of two classes, of torch's its own.
START = {"numpy": 1.0, "torch": torch_loss(), "sklearn": log(2)}
# Flower's strategies sum in the order in which replies come: float64, float32, and steps of a solver.
TOLERANCES = {"numpy": 1e-12, "torch": 1e-5, "sklearn": 1e-9}


# One worker runs them all: the jobs are done once, on either engine.
pytestmark = pytest.mark.xdist_group("quickstarts")


@pytest.fixture(scope="session")
def ours() -> dict[str, Outcome]:
    """All jobs on our engine."""
    before = random.getstate(), np.random.get_state()  # noqa: NPY002
    with InProcessGrid(client_app(), NODES) as grid:
        outcomes = run_jobs(grid, ALL)
    random.setstate(before[0])
    np.random.set_state(before[1])  # noqa: NPY002
    return outcomes


def on_flowers_engine(folder: Path, *jobs: str) -> dict[str, Outcome]:
    path = folder / "outcomes.npz"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FLWR_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.sim.engine.quickstart_jobs", str(path), *jobs],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return load(path)


@pytest.fixture(scope="session")
def flowers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Some jobs in Flower's simulation, started once."""
    return on_flowers_engine(tmp_path_factory.mktemp("flower"), *SOME)


def assert_same(job: str, one: Outcome, other: Outcome) -> None:
    tolerance = TOLERANCES[job.split("/", maxsplit=1)[0]]
    assert one.keys() == other.keys()
    for key in one:
        np.testing.assert_allclose(
            one[key], other[key], rtol=tolerance, atol=tolerance, err_msg=f"{job} {key}"
        )


@pytest.mark.parametrize("job", ALL)
def test_a_quickstart_learns_on_our_engine(job: str, ours: dict[str, Outcome]) -> None:
    evaluated = ours[job]["losses"][1]
    assert evaluated[-1] < START[job.split("/", maxsplit=1)[0]]


def test_our_engine_repeats_to_the_bit(ours: dict[str, Outcome]) -> None:
    jobs = ("numpy/DP-server-fixed", "torch/FedYogi", "sklearn/Krum")
    with InProcessGrid(client_app(), NODES) as grid:
        again = run_jobs(grid, jobs)
    for job in jobs:
        for key, array in again[job].items():
            np.testing.assert_array_equal(array, ours[job][key], err_msg=f"{job} {key}")


@pytest.mark.parametrize("job", SOME)
def test_flowers_engine_gives_the_same(
    job: str, ours: dict[str, Outcome], flowers: dict[str, Outcome]
) -> None:
    assert_same(job, flowers[job], ours[job])


@pytest.mark.slow
def test_flowers_engine_gives_the_same_in_all_pairs(ours: dict[str, Outcome], tmp_path: Path) -> None:
    flowers = on_flowers_engine(tmp_path)
    for job in ALL:
        assert_same(job, flowers[job], ours[job])
