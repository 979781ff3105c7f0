"""Other tools read back what a run folder holds."""

import json
import sys
from collections.abc import Callable
from math import nan
from pathlib import Path

import pandas as pd
import pytest

from hedgerow.sim import load
from hedgerow.sim.cli.export import write_csv, write_tensorboard
from hedgerow.sim.runs.results import COSTS

WriteRun = Callable[..., Path]


def test_every_measured_value_is_one_row(write_run: WriteRun, tmp_path: Path) -> None:
    results = load([write_run("a", [2.0, None, 1.0])])
    rows = results.frame().to_dict("records")
    assert [(row["rounds"], row["source"], row["metric"], row["value"]) for row in rows] == [
        (0, "central", "loss", 2.0),
        (0, "central", "accuracy", 0.5),
        (1, "train", "consensus-error", 0.01),
        (2, "central", "loss", 1.0),
        (2, "central", "accuracy", 0.75),
        (2, "train", "consensus-error", 0.02),
    ]
    assert [rows[-1][x] for x in COSTS] == pytest.approx(
        [2, 20, 1.0, 2_000_000, 400_000, nan, nan, 3.0], nan_ok=True
    )


def test_the_csv_reads_back_as_its_rows(write_run: WriteRun, tmp_path: Path) -> None:
    results = load([write_run("a", [2.0, None, 1.0])])
    file = tmp_path / "out.csv"
    assert write_csv(results, file) == 6
    pd.testing.assert_frame_equal(pd.read_csv(file), results.frame())


def test_numbers_of_a_list_are_rows_of_their_own(write_run: WriteRun) -> None:
    folder = write_run("a", [2.0])
    record = json.loads((folder / "rounds.jsonl").read_text())
    record["central"] = {"loss": 2.0, "f1": [0.25, "n/a", 0.5], "classes": ["cat", "dog"], "none": []}
    (folder / "rounds.jsonl").write_text(json.dumps(record) + "\n")
    frame = load([folder]).frame()
    assert dict(zip(frame["metric"], frame["value"], strict=True)) == {
        "loss": 2.0,
        "f1[0]": 0.25,
        "f1[2]": 0.5,
    }


def test_a_log_holds_every_metric_and_cost_by_round(write_run: WriteRun, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    results = load([write_run("a", [2.0, None, 1.0], seed=3)])

    assert write_tensorboard(results, tmp_path / "logs") == 1

    log = accumulator.EventAccumulator(str(tmp_path / "logs" / results.runs[0].label / "seed-3"))
    log.Reload()
    scalars = {tag: [(e.step, e.value) for e in log.Scalars(tag)] for tag in log.Tags()["scalars"]}
    assert scalars["central/loss"] == [(0, 2.0), (2, 1.0)]
    assert scalars["cost/bits"] == [(0, 0.0), (1, 1e6), (2, 2e6)]
    assert set(scalars) == {
        "central/loss",
        "central/accuracy",
        "train/consensus-error",
        "cost/bits",
        "cost/payload_bytes",
        "cost/sim_seconds",
        "cost/wall_seconds",
    }


def test_without_tensorboard_the_error_says_what_to_install(
    write_run: WriteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ValueError, match=r"pip install 'hedgerow\[tensorboard\]'"):
        write_tensorboard(load([write_run("a", [2.0])]), tmp_path / "logs")
