"""Only runs of one task, data, split and definition of a metric are compared, and a metric says on what."""

import html
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tests.sim.cli.command_line import hedgerow

from hedgerow.sim import load
from hedgerow.sim.runs.measured import groups, where

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
    heads = [line for line in shown.output.splitlines() if line.startswith("## ")]
    assert len(set(heads)) == len(parts)
    out = tmp_path / "r.html"
    assert hedgerow("report", tmp_path, "--out", out).exit_code == 0
    for head in heads:
        assert (head.removeprefix("## ") in html.unescape(out.read_text())) or comparable


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
