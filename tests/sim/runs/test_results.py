"""Runs and sweeps are read back with the labels, costs and doubts that a comparison needs."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hedgerow.sim import Results, load
from hedgerow.sim.runs.compare import budget_table, target_table
from hedgerow.sim.runs.plot import draw
from hedgerow.sim.runs.results import POINTS, collect, write_collected

WriteRun = Callable[..., Path]


def test_a_series_holds_the_evaluated_rounds_only(write_run: WriteRun) -> None:
    run = load([write_run("a", [2.0, None, 1.0])]).runs[0]
    assert [tuple(point) for point in run.series("iterations", "loss")] == [(0, 0.0, 2.0), (2, 20.0, 1.0)]


@pytest.mark.parametrize(
    ("x", "last"),
    [
        ("rounds", 2),
        ("iterations", 20),
        ("sim-seconds", 1.0),
        ("bits", 2e6),
        ("payload-bytes", 4e5),
        ("wall-seconds", 3.0),
    ],
)
def test_costs_are_cumulative(write_run: WriteRun, x: str, last: float) -> None:
    assert load([write_run("a", [2.0, None, 1.0])]).runs[0].costs(x)[-1] == last


def test_an_unknown_cost_is_refused_with_those_there_are(write_run: WriteRun) -> None:
    run = load([write_run("a", [2.0])]).runs[0]
    with pytest.raises(ValueError, match=r"x must be one of rounds, iterations, .*, got 'epochs'"):
        run.series("epochs", "loss")


def test_an_unknown_metric_is_refused_with_those_there_are(write_run: WriteRun) -> None:
    run = load([write_run("a", [2.0, 1.0])]).runs[0]
    with pytest.raises(
        ValueError, match=r"y must be a metric of .* \(accuracy, consensus-error, loss\), got 'f1'"
    ):
        run.series("rounds", "f1")


def test_a_cost_may_be_what_training_told(write_run: WriteRun) -> None:
    folder = write_run("a", [2.0, 1.5, 1.0])
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for record in records[1:]:
        record["train"] = {**record.get("train", {}), "gradients": 4.5 * record["round"]}
    (folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    run = load([folder]).runs[0]
    assert run.costs("gradients") == [0.0, 4.5, 9.0]
    assert [point.x for point in run.series("gradients", "loss")] == [0.0, 4.5, 9.0]
    with pytest.raises(ValueError, match=r"does not record 'train\.communications'"):
        run.costs("communications")


@pytest.fixture
def listing(write_run: WriteRun) -> Path:
    """A run that measured a list."""
    folder = write_run("lists", [2.0, 1.0])
    records = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for record in records:
        record["central"]["f1"] = [0.5 + record["round"] / 10, 0.75]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_a_number_of_a_list_is_a_metric(listing: Path, tmp_path: Path) -> None:
    results = load([listing])
    write_collected(results, tmp_path / "kept.json")
    for found in (results, load([tmp_path / "kept.json"])):
        assert [point.y for point in found.runs[0].series("rounds", "f1[0]")] == [0.5, 0.6]
        assert "| f1[1] |" in budget_table(found, "rounds", "f1[0]", 1, ["f1[1]"])
        assert draw(found, ["rounds"], ["f1[1]"]).axes[0].get_ylabel() == "f1[1]"


def test_a_list_is_refused_with_the_name_of_a_number_of_it(listing: Path) -> None:
    with pytest.raises(ValueError, match=r"y must be one number of this list, as 'f1\[0\]', got 'f1'"):
        load([listing]).runs[0].series("rounds", "f1")
    with pytest.raises(ValueError, match=r"\(accuracy, consensus-error, f1\[…\], loss\), got 'f2'"):
        load([listing]).runs[0].series("rounds", "f2")


def test_single_runs_are_labelled_by_what_differs(write_run: WriteRun) -> None:
    folders = [
        write_run("a", [2.0], tau1=2, method="x", device="cpu"),
        write_run("b", [2.0], tau1=5, method="x", device="cuda"),
        write_run("c", [2.0], tau1=5, method="x", seed=1),
    ]
    assert {label: list(seeds) for label, seeds in load(folders).variants().items()} == {
        "tau1=2": [0],
        "tau1=5": [0, 1],
    }


def test_labels_have_no_more_settings_than_tell_the_runs_apart(write_run: WriteRun) -> None:
    many = [f"setting-{n}" for n in range(12)]
    settings = [dict.fromkeys(many, "a-long-value"), dict.fromkeys(many, "another-value")]
    for name, method, values in (("a", "x", 0), ("b", "y", 1), ("c", "y", 0)):
        folder = write_run(name, [2.0], method=method, **settings[values])
    labels = [run.label for run in load([folder.parent]).runs]
    assert all(label.startswith(f"method={method}, ") for label, method in zip(labels, "xyy", strict=True))
    assert len(set(labels)) == 3
    assert max(map(len, labels)) <= 48


def test_runs_on_several_data_sets_are_labelled_by_them(write_run: WriteRun) -> None:
    write_run("a", [2.0], dataset="digits", rate=1)
    write_run("b", [2.0], dataset="mnist", rate=1)
    folder = write_run("c", [2.0], dataset="mnist", rate=2)
    assert [run.label for run in load([folder.parent]).runs] == ["digits", "mnist, rate=1", "mnist, rate=2"]


def test_a_sweep_gives_its_labels_in_its_order(write_sweep: WriteRun) -> None:
    results = load([write_sweep({"Zeta": {0: [2.0], 1: [2.0]}, "Alpha": {0: [1.0], 1: [1.0]}})])
    assert [(run.label, run.seed) for run in results.runs] == [
        ("Zeta", 0), ("Zeta", 1), ("Alpha", 0), ("Alpha", 1),
    ]  # fmt: skip
    assert (results.title, results.realism) == ("Made up", "numbers by hand")
    assert (results.xs, results.ys) == (["sim-seconds"], ["loss"])


def test_a_sweeps_unfinished_run_is_left_out_and_told(write_sweep: WriteRun) -> None:
    folder = write_sweep({"A": {0: [2.0], 1: [2.0]}})
    (folder / "A" / "seed-1" / "summary.json").unlink()
    results = load([folder])
    assert [run.seed for run in results.runs] == [0]
    assert results.warnings == ["A, seed 1: not finished, left out"]


def test_two_runs_of_the_same_settings_and_seed_are_told_apart_by_time(write_run: WriteRun) -> None:
    for name, minute in (("a", 5), ("b", 7)):
        write_run(name, [2.0], tau1=1, environment={"time": f"2026-01-02T03:0{minute}:00+00:00"})
    folder = write_run("c", [2.0], tau1=2).parent
    labels = [run.label for run in load([folder]).runs]
    assert labels == ["tau1=1 (2026-01-02 03:05:00)", "tau1=1 (2026-01-02 03:07:00)", "tau1=2"]


def test_a_folder_of_runs_and_sweeps_is_all_of_them(write_run: WriteRun, write_sweep: WriteRun) -> None:
    alone = write_run("alone", [2.0], tau1=3)
    write_sweep({"A": {0: [1.0]}, "B": {0: [1.5]}})
    (alone.parent / "notes").mkdir()
    assert {run.label for run in load([alone.parent]).runs} == {"made: A", "made: B", "made-up"}


def test_runs_of_several_apps_are_labelled_by_app_and_what_differs_within_it(write_run: WriteRun) -> None:
    for name, app, settings in (("a", "one", {"x": 1}), ("b", "one", {"x": 2}), ("c", "two", {"y": 1})):
        folder = write_run(name, [2.0], **settings)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "app": app}))
    results = load([folder.parent])
    assert [run.label for run in results.runs] == ["one: x=1", "one: x=2", "two"]
    assert results.title == "one / two"


# Runs that failed


@pytest.fixture
def half_failed(write_sweep: WriteRun) -> Path:
    """A sweep of which seed 1 of B failed."""
    folder = write_sweep({"A": {0: [2.0, 1.0], 1: [2.0, 1.0]}, "B": {0: [2.0, 0.5], 1: [2.0, 0.5]}})
    (folder / "B" / "seed-1").rename(folder / "B" / "seed-1.failed")
    (folder / "B" / "seed-1.log").write_text("[ROUND 1/2]\nRun failed: the loss is \x1b[2J1e9\n\n")
    return folder


def test_a_failed_run_is_in_no_mean_and_is_told_with_its_reason(half_failed: Path) -> None:
    results = load([half_failed])
    assert [(run.label, run.seed) for run in results.runs] == [("A", 0), ("A", 1), ("B", 0)]
    assert results.failed == {"B": {1: "Run failed: the loss is \\x1b[2J1e9"}}
    assert results.warnings == ["B, seed 1: failed (Run failed: the loss is \\x1b[2J1e9), left out"]
    assert (results.started("A"), results.started("B")) == (2, 2)


def test_a_failed_run_that_ended_in_another_part_of_the_sweep_did_not_fail(
    half_failed: Path, write_sweep: WriteRun, tmp_path: Path
) -> None:
    (tmp_path / "again").mkdir()
    again = write_sweep({"B": {1: [2.0, 0.6]}}, "again/made")
    results = load([half_failed, again])
    assert (results.failed, results.started("B")) == ({}, 2)


def test_tables_count_a_failed_run(half_failed: Path) -> None:
    results = load([half_failed])
    assert budget_table(results, "rounds", "loss", 1).splitlines()[-1].endswith("| 1 of 2 |")
    assert target_table(results, "rounds", "loss", 0.7).splitlines()[-1] == "| B | n/a | n/a | n/a | 1 of 2 |"


def test_a_file_of_results_keeps_what_failed(half_failed: Path, tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    write_collected(load([half_failed]), file)
    assert load([file]).failed == load([half_failed]).failed
    (tmp_path / "other.json").write_text(file.read_text())
    assert set(load([file, tmp_path / "other.json"]).failed) == {"kept: B", "other: B"}


def test_a_picture_says_how_many_runs_failed(half_failed: Path) -> None:
    caption = draw(load([half_failed]), ["rounds"], ["loss"]).get_supxlabel().replace("\n", " ")
    assert "1 of 4 runs failed, and are left out." in caption


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
