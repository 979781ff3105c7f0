"""A quickstart ClientApp of Flower's under Flower's strategies: on our engine, and the same on Flower's."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.sim.engine.quickstart_jobs import NODES, STRATEGIES, Outcome, client_app, load, run_jobs

from hedgerow.sim import InProcessGrid

ROOT = Path(__file__).parents[3]


# One worker runs them all: the jobs are done once, on either engine.
pytestmark = pytest.mark.xdist_group("quickstarts")


@pytest.fixture(scope="session")
def ours() -> dict[str, Outcome]:
    """All jobs on our engine."""
    before = random.getstate(), np.random.get_state()  # noqa: NPY002
    with InProcessGrid(client_app(), NODES) as grid:
        outcomes = run_jobs(grid)
    random.setstate(before[0])
    np.random.set_state(before[1])  # noqa: NPY002
    return outcomes


@pytest.mark.parametrize("job", STRATEGIES)
def test_a_quickstart_learns_on_our_engine(job: str, ours: dict[str, Outcome]) -> None:
    # Of zero weights the squared error is 1.
    assert ours[job]["losses"][1][-1] < 1.0


def test_our_engine_repeats_to_the_bit(ours: dict[str, Outcome]) -> None:
    jobs = ("DP-server-fixed", "Krum")
    with InProcessGrid(client_app(), NODES) as grid:
        again = run_jobs(grid, jobs)
    for job in jobs:
        for key, array in again[job].items():
            np.testing.assert_array_equal(array, ours[job][key], err_msg=f"{job} {key}")


@pytest.mark.slow
def test_flowers_engine_gives_the_same(ours: dict[str, Outcome], tmp_path: Path) -> None:
    path = tmp_path / "outcomes.npz"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FLWR_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.sim.engine.quickstart_jobs", str(path)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    flowers = load(path)
    assert flowers.keys() == ours.keys()
    for job, one in ours.items():
        assert flowers[job].keys() == one.keys()
        for key, array in one.items():
            # Flower's strategies sum in the order in which replies come.
            np.testing.assert_allclose(flowers[job][key], array, rtol=1e-12, err_msg=f"{job} {key}")
