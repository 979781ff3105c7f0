"""``hedgerow plot``: where figures go."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.sim.cli.command_line import hedgerow

WriteRun = Callable[..., Path]


def test_a_plot_goes_into_the_sweeps_folder(made: Path) -> None:
    result = hedgerow("plot", made)
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [
        str(made / "made-loss-over-sim-seconds.png"),
        str(made / "made-loss-over-sim-seconds.svg"),
        str(made / "made-loss-over-sim-seconds.pdf"),
    ]


def test_a_plot_of_one_run_goes_into_its_folder_and_of_several_here(
    write_run: WriteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [write_run("runs/a", [2.0, 1.0]), write_run("runs/b", [2.0, 1.5])]
    alone = hedgerow("plot", runs[0])
    assert alone.stdout.split()[0] == str(runs[0] / "made-up-loss-over-rounds.png")
    both = hedgerow("plot", "runs")
    assert both.stdout.split()[0] == str(tmp_path / "made-up-loss-over-rounds.png")
    # The pictures are in nobody's way.
    assert hedgerow("plot", *Path("runs").iterdir()).exit_code == 0


@pytest.mark.parametrize("command", ["plot", "table"])
def test_a_run_without_the_metric_is_left_out_where_others_have_it(
    command: str, write_run: WriteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run("runs/a", [2.0, 1.0], tau1=1)
    write_run("runs/b", [None, None], tau1=2)
    shown = hedgerow(command, "runs")
    assert shown.exit_code == 0, shown.output
    assert "Warning: tau1=2, seed 0: no loss, left out" in shown.stderr
    assert "tau1=2" not in shown.stdout
    shown = hedgerow(command, "runs", "--y", "beauty")
    assert shown.exit_code == 2
    assert "Error: y must be a metric of " in shown.stderr
    assert "got 'beauty'" in shown.stderr


def shown(*arguments: object) -> tuple[list[str], list[str]]:
    """Return the lines of a curve shown in the terminal, without axis, and those of its legend."""
    result = hedgerow("plot", *arguments, "--show")
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout
    lines = list(filter(None, result.stdout.splitlines()))
    return [line.partition("│")[2] for line in lines if "│" in line], lines[-2:]


def test_a_curve_is_shown_in_the_terminal_and_no_file_is_written(write_run: WriteRun, tmp_path: Path) -> None:
    run = write_run("a", [2.0, None, 1.0, 0.5, 0.0])
    before = sorted(tmp_path.rglob("*"))
    rows, _ = shown(run)
    assert len(rows) == 14
    # It falls from the first corner to the last, in all rows.
    assert [row[:1].strip() != "" for row in rows] == [True, *[False] * 13]
    assert rows[-1].rstrip()[-1] == rows[-1][67]
    firsts = [len(row) - len(row.lstrip()) for row in rows]
    assert firsts == sorted(firsts)
    said = hedgerow("plot", run, "--show").stdout
    assert said.startswith("loss over rounds\n         2 │")
    assert (
        "\n           └0                                                                  4\nmade-up: 0\n"
        in said
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_of_several_curves_each_ends_at_its_letter(made: Path) -> None:
    rows, legend = shown(made)
    assert legend == ["A A: 1.1", "B B: 0.9"]
    assert sorted(row.rstrip()[-1] for row in rows if row.rstrip()[-1:] in ("A", "B")) == ["A", "B"]


def test_a_level_or_diverged_curve_is_shown(write_run: WriteRun) -> None:
    rows, _ = shown(write_run("level", [1.0, 1.0]))
    assert rows[0].strip()
    assert "no finite value" in hedgerow("plot", write_run("lost", [float("nan")]), "--show").stdout


def test_a_curve_is_shown_and_written_where_both_are_asked_for(made: Path, tmp_path: Path) -> None:
    result = hedgerow("plot", made, "--show", "--out", tmp_path / "x.svg")
    assert result.stdout.endswith(f"{tmp_path / 'x.svg'}\n")
    assert (tmp_path / "x.svg").exists()
    bad = hedgerow("plot", made, "--show", "--y", "no")
    assert (bad.exit_code, bad.stdout) == (2, "")
