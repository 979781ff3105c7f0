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
