"""``hedgerow runs`` lists what was run, however its folders look."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from tests.sim.cli.command_line import hedgerow

from hedgerow.sim.runs import listed as listed_module

WriteRun = Callable[..., Path]

MEASURED = {"*": "on the 360 test samples of digits", "loss": "on all training samples"}


def at(hour: int) -> dict[str, str]:
    return {"time": f"2026-01-02T{hour:02d}:04:05+00:00"}


def rows(*arguments: object) -> list[list[str]]:
    """Return the cells of the table's lines; two spaces are between cells."""
    shown = hedgerow("runs", *arguments)
    assert shown.exit_code == 0, shown.output
    return [re.split(r" {2,}", line) for line in shown.stdout.partition("\n\n")[0].splitlines()]


def entries(*arguments: object) -> list[dict[str, Any]]:
    shown = hedgerow("runs", *arguments, "--json")
    assert shown.exit_code == 0, shown.output
    found: list[dict[str, Any]] = json.loads(shown.stdout)
    return found


def change(run: Path, **changes: Any) -> Path:
    file = run / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return run


def test_runs_are_listed_by_date_with_what_they_were_and_where_they_ended(
    write_run: WriteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"method": "feel", "dataset": "digits", "model": "cnn", "num-rounds": 4}
    late = write_run("runs/late", [2.0, 1.0, 0.5], environment=at(9), finished=False, **settings)
    change(
        late,
        app="sd_feel",
        measured=MEASURED,
    )
    (late / "checkpoint").mkdir()
    (late / "checkpoint/latest.npz").touch()
    write_run("runs/early", [2.0, None, 1.5], environment=at(8), iterations=20, model="m" * 21)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(listed_module, "has_checkpoint", lambda folder: (folder / "latest.npz").exists())
    heads = ["folder", "app", "method", "data set", "model", "done"]
    assert rows() == [
        [*heads, "accuracy", "of", "loss", "state", "started"],
        # A name of a model that is long is left out.
        ["runs/early", "made-up", "20/20 iterations", "0.625", "1.5", "finished", "2026-01-02 08:04"],
        [
            *("runs/late", "sd_feel", "feel", "digits", "cnn", "2/4 rounds", "0.875", "held-out", "0.5"),
            *("stopped", "2026-01-02 09:04"),
        ],
    ]  # fmt: skip
    told = "runs/late stopped; resume with: hedgerow run sd-feel --resume runs/late\n"
    assert hedgerow("runs").stdout.endswith(f"\n\n{told}")
    first, second = entries(tmp_path / "runs", tmp_path / "runs/late")
    assert first["model"] == "m" * 21
    assert (second["done"], second["asked"], second["accuracy"], second["loss-of"]) == (
        2,
        4,
        0.875,
        "training",
    )
    assert second["accuracy-measured"] == MEASURED["*"]
    assert second["resume"] == "hedgerow run sd-feel --resume runs/late"


def test_an_accuracy_says_whether_it_is_the_nodes(write_run: WriteRun, tmp_path: Path) -> None:
    for name, evaluated in {"a": {"held-out": 1.0}, "b": {"held-out": 0.0}, "c": {}}.items():
        run = write_run(name, [None])
        record = json.loads((run / "rounds.jsonl").read_text())
        record["evaluate"] = {"accuracy": 0.5, **evaluated}
        (run / "rounds.jsonl").write_text(json.dumps(record) + "\n")
    found = {run["folder"][-1]: run["accuracy-of"] for run in entries(tmp_path)}
    assert found == {"a": "nodes', held-out", "b": "nodes', training", "c": "nodes'"}


def test_a_long_path_is_shown_whole_and_without_control_characters(
    write_run: WriteRun, tmp_path: Path
) -> None:
    parent = tmp_path / ("x" * 120)
    write_run("good", [1.0])
    BREAKS["config.json is no JSON"](write_run("bad", [1.0]))
    (write_run("stopped\x1b[2J", [1.0], finished=False) / "checkpoint").mkdir()
    (tmp_path / "stopped\x1b[2J/checkpoint/latest.safetensors").write_bytes(b"")
    parent.mkdir()
    for name in ("good", "bad", "stopped\x1b[2J"):
        (tmp_path / name).rename(parent / name)
    told = hedgerow("runs", tmp_path).stdout
    path = os.path.relpath(parent)
    for name in ("good  ", "bad: cannot be read: ", "stopped\\x1b[2J stopped; "):
        assert f"{path}/{name}" in told
    assert "\x1b" not in told
    assert "…" not in told


def test_a_state_is_what_the_folder_is_in(write_run: WriteRun, write_sweep: WriteRun, tmp_path: Path) -> None:
    running = write_run("running", [1.0], finished=False)
    write_run("none", [], finished=False)
    sweep = write_sweep({"A": {0: [2.0, 1.0], 1: [2.0]}})
    failed, begun = sweep / "A/seed-0.failed", sweep / "A/seed-1"
    (sweep / "A/seed-0").rename(failed)
    for run in (failed, begun):
        (run / "summary.json").unlink()
    (sweep / "A/seed-0.log").write_text("Traceback\nValueError: bad\n")
    with FileLock(running / ".lock"):
        found = {run["folder"].rpartition("/")[2]: run for run in entries(tmp_path)}
    assert {name: run["state"] for name, run in found.items()} == {
        "running": "running", "none": "stopped", "seed-0.failed": "failed", "seed-1": "stopped",
    }  # fmt: skip
    assert found["seed-0.failed"]["log-ends"] == "ValueError: bad"
    told = hedgerow("runs", tmp_path).stdout
    assert "none stopped; it left no checkpoint to resume from" in told
    assert "seed-1 stopped; resume with: the same 'hedgerow sweep' again" in told
    assert (
        "seed-0.failed failed; resume with: the same 'hedgerow sweep' again; its log ends: ValueError" in told
    )


def link(file: Path) -> None:
    file.replace(file.with_name("x"))
    file.symlink_to("x")


BREAKS: dict[str, Callable[[Path], object]] = {
    "config.json is no JSON": lambda run: (run / "config.json").write_text("{"),
    "config.json is a list": lambda run: (run / "config.json").write_text("[]"),
    "config.json is a link": lambda run: link(run / "config.json"),
    "no config.json": lambda run: (run / "config.json").unlink(),
    "no rounds.jsonl": lambda run: (run / "rounds.jsonl").unlink(),
    "rounds.jsonl is no JSON": lambda run: (run / "rounds.jsonl").write_text("{\n"),
    "rounds.jsonl is a folder": lambda run: ((run / "rounds.jsonl").unlink(), (run / "rounds.jsonl").mkdir()),
    "a metric is a text": lambda run: (run / "rounds.jsonl").write_text('{"round": 1, "central": 3}\n'),
    "of a newer version": lambda run: change(run, format=99),
    "an environment is a text": lambda run: change(run, environment="\x1b[2J"),
}  # fmt: skip


@pytest.mark.parametrize("damage", BREAKS)
def test_a_damaged_run_is_one_line_beside_the_others(
    damage: str, write_run: WriteRun, tmp_path: Path
) -> None:
    write_run("good", [1.0])
    BREAKS[damage](write_run("bad", [1.0]))
    shown = hedgerow("runs", tmp_path)
    assert shown.exit_code == 0
    assert shown.stderr == ""
    assert "\x1b" not in shown.stdout
    (line,) = [line for line in shown.stdout.splitlines() if "cannot be read: " in line]
    assert "bad: cannot be read: " in line
    assert "finished" in shown.stdout
    bad = next(run for run in entries(tmp_path) if run["error"])
    assert bad["state"] == "damaged"


def test_no_runs_are_no_error_and_no_folder_is_one(tmp_path: Path) -> None:
    assert hedgerow("runs", tmp_path).stdout == "No runs.\n"
    assert entries(tmp_path) == []
    lacking = hedgerow("runs", tmp_path / "x")
    assert (lacking.exit_code, lacking.stderr) == (
        2,
        f"Error: {tmp_path / 'x'} does not exist or is no folder\n",
    )
