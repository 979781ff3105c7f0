"""Whole runs of every app: the same bits however nodes are called, on any number of threads and workers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.clients.training.test_bits import OTHERS
from tests.flower_apps.digests import RUNS, digests

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "run",
    [pytest.param(run, marks=[] if run in ("sd-feel", "ceps", "hsgd") else pytest.mark.slow) for run in RUNS],
)
def test_a_run_does_not_tell_who_was_called_with_whom_on_how_many_threads_and_workers(run: str) -> None:
    found = digests(run, brief=True)
    assert len(set(found.values())) == 1, found


@pytest.mark.slow
@pytest.mark.parametrize("settings", OTHERS)
def test_so_it_is_under_other_instruction_sets(settings: str) -> None:
    changes = dict(pair.split("=") for pair in settings.split())
    command = [sys.executable, "-m", "tests.flower_apps.digests"]
    out = subprocess.run(
        command, env={**os.environ, **changes}, cwd=ROOT, check=True, capture_output=True, timeout=1200
    )
    told: dict[str, dict[str, str]] = json.loads(out.stdout.splitlines()[-1])
    assert [run for run, found in told.items() if len(set(found.values())) != 1] == []
