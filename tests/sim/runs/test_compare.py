"""Comparisons are paired by seed, say how sure they are, and never invent a number."""

import html
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tests.sim.cli.command_line import hedgerow

from hedgerow.sim import RecordedRun, load
from hedgerow.sim.runs.compare import (
    Paired,
    at_budget,
    budget_table,
    common_budget,
    groups,
    paired_difference,
    t_interval,
    target_table,
    to_target,
    where,
)

WriteRun = Callable[..., Path]
numbers = st.floats(-1e3, 1e3, allow_nan=False)


@pytest.fixture
def run(write_run: WriteRun) -> RecordedRun:
    return load([write_run("a", [2.0, None, 1.5, None, 1.0, None])]).runs[0]


# One run


def test_the_value_at_a_budget_is_the_last_evaluation_within_it(run: RecordedRun) -> None:
    point = at_budget(run, "iterations", 39, "loss")
    assert point == (2, 20.0, 1.5)


@pytest.mark.parametrize(("target", "cost"), [(2.5, 0.0), (1.5, 1.0), (1.2, 2.0), (0.9, None)])
def test_a_loss_target_is_reached_from_above(run: RecordedRun, target: float, cost: float | None) -> None:
    assert to_target(run, "sim-seconds", "loss", target) == cost


@pytest.mark.parametrize(("target", "cost"), [(0.5, 0.0), (0.6, 1.0), (0.75, 2.0), (0.9, None)])
def test_an_accuracy_target_is_reached_from_below(
    run: RecordedRun, target: float, cost: float | None
) -> None:
    assert to_target(run, "sim-seconds", "accuracy", target) == cost


# Statistics


@given(st.lists(numbers, min_size=2, max_size=8))
@settings(deadline=None)
def test_the_interval_is_students(values: list[float]) -> None:
    low, high = t_interval(values)
    error = stats.sem(values)
    if error == 0:
        assert low == pytest.approx(values[0]) == high
        return
    expected = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=error)
    assert (low, high) == pytest.approx(expected)


def test_differences_are_paired_over_common_seeds() -> None:
    paired = paired_difference({0: 1.0, 1: 2.0, 7: 99.0}, {1: 1.5, 0: 0.5, 8: -99.0})
    assert paired == Paired(0.5, 0.5, 0.5, 2)


# Tables


@pytest.fixture
def sweep(write_sweep: WriteRun) -> Path:
    return write_sweep(
        {
            "SD-FEEL": {0: [2.0, 1.0, 0.5], 1: [2.0, 1.1, 0.6], 2: [2.0, 1.2, 0.7]},
            "FedAvg": {0: [2.0, 1.3, 0.8], 1: [2.0, 1.4, 0.91], 2: [2.0, 1.5, 0.99]},
            "twin": {0: [2.0, 1.0, 0.5], 1: [2.0, 1.1, 0.6], 2: [2.0, 1.2, 0.7]},
        }
    )


def test_the_budget_table(sweep: Path) -> None:
    assert budget_table(load([sweep]), "sim-seconds", "loss", 1.0).splitlines() == [
        "### loss at sim-seconds = 1",
        "",
        "| variant | loss, mean ± sd | evaluated at | difference from SD-FEEL [95 % interval] "
        "| differs | seeds |",
        "|---|---:|---:|---:|---|---:|",
        "| SD-FEEL | 0.6 ± 0.1 | 1 | reference |  | 3 of 3 |",
        # Differences 0.3, 0.31, 0.29: mean 0.3, sd 0.01, t(2) = 4.3027, half width 0.024842.
        "| FedAvg | 0.9 ± 0.095 | 1 | +0.3 [+0.2752, +0.3248] | yes | 3 of 3 |",
        "| twin | 0.6 ± 0.1 | 1 | +0 [+0, +0] | no | 3 of 3 |",
    ]


def test_the_target_table(sweep: Path) -> None:
    assert target_table(load([sweep]), "iterations", "accuracy", 0.8).splitlines() == [
        "### iterations to accuracy >= 0.8",
        "",
        "| variant | iterations, mean ± sd | difference from SD-FEEL [95 % interval] | differs | reached |",
        "|---|---:|---:|---|---:|",
        "| SD-FEEL | 20 ± 0 | reference |  | 3 of 3 |",
        "| FedAvg | n/a | n/a | n/a | 1 of 3 |",
        "| twin | 20 ± 0 | +0 [+0, +0] | no | 3 of 3 |",
    ]


def test_a_table_shows_what_else_is_asked_for_where_its_value_was_measured(sweep: Path) -> None:
    links = "payload-bytes client->server"
    results = load([sweep])
    runs = [
        replace(
            run,
            rounds=[
                {**r, "by_link": {"client->server": {"payload_bytes": 7 * r["round"]}}} for r in run.rounds
            ],
        )
        for run in results.runs
    ]
    asked = replace(results, runs=runs, columns=["iterations", links, "accuracy"])
    table = budget_table(asked, "rounds", "loss", 1).splitlines()
    assert table[2].startswith(
        f"| variant | loss, mean ± sd | evaluated at | iterations | {links} | accuracy | "
    )
    assert table[4].startswith("| SD-FEEL | 1.1 ± 0.1 | 1 | 10 | 7 | ")
    assert "iterations" not in budget_table(asked, "rounds", "loss", 1, []).splitlines()[2]
    with pytest.raises(ValueError, match=r"column must be a cost, .*, got 'payload-bytes node->moon'"):
        budget_table(asked, "rounds", "loss", 1, ["payload-bytes node->moon"])


def test_runs_that_ended_before_the_budget_are_counted_out(write_sweep: WriteRun) -> None:
    folder = write_sweep(
        {"A": {0: [2.0, 1.0], 1: [2.0, 1.0]}, "B": {0: [2.0, 0.5], 1: [2.0]}, "C": {0: [2.0]}}
    )
    assert budget_table(load([folder]), "rounds", "loss", 1).splitlines()[-2:] == [
        "| B | 0.5 | 1 | -0.5 [n/a] | unknown: 1 seed | 1 of 2 |",
        "| C | n/a | n/a | n/a | n/a | 0 of 1 |",
    ]


def test_the_common_budget_is_what_every_run_spent(write_sweep: WriteRun) -> None:
    folder = write_sweep({"A": {0: [2.0, 1.0, 0.5]}, "B": {0: [2.0, None]}})
    assert common_budget(load([folder]), "sim-seconds") == 0.5


PLAIN = {"dataset": "mnist-5k", "partition": "iid", "train-loss-samples": 0, "seed": 0}


def write(
    parent: Path, name: str, app: str = "sd_feel", *, held: float | None = None, **settings: Any
) -> Path:
    folder = parent / name
    folder.mkdir(parents=True)
    config = {"format": 2, "app": app, "run": {**PLAIN, **settings}}
    (folder / "config.json").write_text(json.dumps(config))
    lines = []
    for number in (0, 1):
        metrics = {"loss": 2.0 - number, "accuracy": 0.5}
        evaluate = {} if held is None else {**metrics, "held-out": held}
        central = metrics if held is None else {}
        record = {"round": number, "train": {}, "evaluate": evaluate, "central": central, "wall_seconds": 1.0}
        lines.append(json.dumps(record))
    (folder / "rounds.jsonl").write_text("\n".join(lines) + "\n")
    return folder


# Of each kind of difference: settings of the other run, and whether both may be compared.
CHANGES: dict[str, tuple[dict[str, Any], bool]] = {
    "learning rate": ({"learning-rate": 0.3}, True),
    "another method": ({"app": "fedmud", "method": "fedavg"}, True),
    "data set": ({"dataset": "cifar-10"}, False),
    "split": ({"partition": "dirichlet(0.1)"}, False),
    "task": ({"app": "ceps", "problem": "linear"}, False),
    "samples of the loss": ({"train-loss-samples": 100}, False),
    "measured by nodes": ({"held": 1.0}, False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_runs_are_compared_only_where_that_means_something(change: str, tmp_path: Path) -> None:
    settings, comparable = CHANGES[change]
    write(tmp_path, "a")
    write(tmp_path, "b", **settings)
    parts = groups(load([tmp_path]), ["loss"])
    assert len(parts) == 1 + (not comparable)
    shown = hedgerow("table", tmp_path, "--y", "loss")
    assert shown.exit_code == 0, shown.output
    out = tmp_path / "r.html"
    assert hedgerow("report", tmp_path, "--out", out).exit_code == 0
    page = html.unescape(out.read_text())
    for text in (shown.stdout, page):
        assert ("difference from" in text) == comparable
        assert comparable or all(part.title in text for part in parts)
    assert ("Runs that no other is compared with" in shown.stdout) != comparable
    assert ("| data set |" in shown.stdout) != comparable


def test_groups_of_several_apps_are_named_by_their_own(tmp_path: Path) -> None:
    write(tmp_path, "a")
    write(tmp_path, "b", "fedmud", dataset="cifar-10")
    titles = [part.title for part in groups(load([tmp_path]), ["loss"])]
    assert [title.split(":")[0] for title in titles] == ["sd_feel", "fedmud"]


def test_apps_of_strangers_with_the_same_settings_are_not_compared(tmp_path: Path) -> None:
    for name, app in itertools.product("ab", ("one", "two")):
        folder = write(tmp_path, f"{name}{app}", app, **{"dataset": "my.task:load", "lr": name})
        assert folder.is_dir()
    assert [len(part.runs) for part in groups(load([tmp_path]), ["loss"])] == [2, 2]


@pytest.mark.parametrize(
    ("held", "told"), [(1.0, "on held-out"), (0.0, "on their training"), (0.5, "partly on their training")]
)
def test_a_nodes_metric_says_on_what_it_was_measured(held: float, told: str, tmp_path: Path) -> None:
    (run,) = load([write(tmp_path, "a", held=held)]).runs
    assert told in where(run, "accuracy")
    assert told in hedgerow("table", run.folder, "--y", "accuracy").output


def test_a_servers_metric_is_shown_with_what_the_record_says(tmp_path: Path) -> None:
    folder = write(tmp_path, "a", held=None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "measured": {"loss": "on X", "*": "on Y"}}))
    out, drawn = tmp_path / "r.html", tmp_path / "p.svg"
    assert hedgerow("report", folder, "--out", out).exit_code == 0
    assert hedgerow("plot", folder, "--y", "loss", "--y", "accuracy", "--out", drawn).exit_code == 0
    collected = tmp_path / "r.json"
    assert hedgerow("export", folder, "--json", collected).exit_code == 0
    shown = [
        hedgerow("table", place, "--y", "loss", "--y", "accuracy").output for place in (folder, collected)
    ]
    for text in (*shown, html.unescape(out.read_text()), drawn.read_text()):
        assert "loss: on X." in text
        assert "accuracy: on Y." in text


def test_a_metric_of_a_server_that_does_not_say_on_what_is_shown_so(tmp_path: Path) -> None:
    folder = write(tmp_path, "a")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "measured": {}}))
    (run,) = load([folder]).runs
    assert "does not say" in where(run, "loss")
