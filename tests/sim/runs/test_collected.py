"""A sweep in one file gives the pictures and tables that its folders give."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hedgerow.sim import Results, load
from hedgerow.sim.runs.collected import POINTS, collect, write_collected
from hedgerow.sim.runs.compare import budget_table, target_table

WriteRun = Callable[..., Path]


@pytest.fixture
def results(write_sweep: WriteRun) -> Results:
    losses = {
        "A": {0: [2.0, None, 1.0], 1: [2.2, None, 0.6]},
        "B": {0: [2.0, None, 1.5], 1: [2.2, None, 1.3, 1.2]},
    }
    return load([write_sweep(losses)])


def test_the_file_gives_the_tables_of_the_folders(results: Results, tmp_path: Path) -> None:
    file = tmp_path / "new" / "made.json"
    assert write_collected(results, file) == 4
    back = load([file])
    assert (back.title, back.realism, back.xs, back.ys) == (
        "Made up",
        "numbers by hand",
        ["sim-seconds"],
        ["loss"],
    )
    assert [run.settings["method"] for run in back.runs] == ["A", "A", "B", "B"]
    for x in ("rounds", "iterations", "bits", "wall-seconds"):
        assert budget_table(back, x, "loss", 2) == budget_table(results, x, "loss", 2)
        assert target_table(back, x, "loss", 1.3) == target_table(results, x, "loss", 1.3)


def test_a_long_run_keeps_its_ends_and_its_real_seconds(write_run: WriteRun) -> None:
    run = load([write_run("a", [2.0 - n / 1000 for n in range(1000)] + [None])])
    (made,) = collect(run)["runs"]
    columns = made["columns"]
    assert columns["round"][0] == 0
    assert columns["round"][-1] == 1000
    assert POINTS / 2 < len(columns["round"]) <= POINTS + 2
    assert sum(columns["wall_seconds"]) == pytest.approx(1001)
    assert columns["central.loss"][-2:] == [pytest.approx(1.001), None]


def test_folders_of_this_machine_are_not_told(write_run: WriteRun) -> None:
    made = collect(load([write_run("a", [2.0], **{"data-dir": "/home/me", "tau1": 2})]))
    assert made["settings"] == {"seed": 0, "tau1": 2}


def test_a_file_and_a_folder_of_one_name_are_parts_of_one_sweep(
    write_sweep: WriteRun, tmp_path: Path
) -> None:
    file = tmp_path / "kept" / "fig1.json"
    write_collected(load([write_sweep({"A": {0: [2.0], 1: [2.5]}}, "fig1")]), file)
    (tmp_path / "more").mkdir()
    more = write_sweep({"A": {2: [3.0]}, "B": {0: [1.0]}}, "more/fig1")
    both = load([file, more])
    assert {label: list(seeds) for label, seeds in both.variants().items()} == {"A": [0, 1, 2], "B": [0]}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "hedgerow-results-9"}', "[" * 100_000])
def test_another_file_is_one_error(text: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"x\.json is not a file of `hedgerow export --json`"):
        load([file])


def test_links_that_the_sweep_shows_are_kept_round_by_round(results: Results, tmp_path: Path) -> None:
    runs = []
    for run in results.runs:
        up = [
            {"up": {"nominal_bits": 8 * n, "payload_bytes": n}, "down": {"nominal_bits": n}} for n in range(4)
        ]
        rounds = [{**record, "by_link": up[record["round"]]} for record in run.rounds]
        runs.append(replace(run, rounds=rounds))
    asked = replace(results, runs=runs, xs=["bits up"], differences=True)
    write_collected(asked, tmp_path / "made.json")
    back = load([tmp_path / "made.json"])
    assert (back.xs, back.differences) == (["bits up"], True)
    for x in ("bits up", "payload-bytes up"):
        assert [run.series(x, "loss") for run in back.runs] == [run.series(x, "loss") for run in runs]
    with pytest.raises(ValueError, match=r"x = 'bits down': .* does not record it round by round"):
        back.runs[0].costs("bits down")
    assert back.runs[0].value_at("bits down", 2) == 2
