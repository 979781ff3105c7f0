"""``hedgerow plot``: where figures go."""

from collections.abc import Callable
from pathlib import Path

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


def test_a_plot_of_single_runs_goes_where_it_is_told(write_run: WriteRun, tmp_path: Path) -> None:
    runs = [write_run("a", [2.0, 1.0], tau1=1), write_run("b", [2.0, 1.0], tau1=2)]
    result = hedgerow("plot", *runs, "--x", "wall-seconds", "--y", "consensus-error", "--out", tmp_path / "c")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "c.png").is_file()
    assert (tmp_path / "c.svg").is_file()


def test_a_folder_that_is_no_run_is_explained(tmp_path: Path) -> None:
    result = hedgerow("plot", tmp_path)
    assert result.exit_code == 2
    assert "neither a run's folder (rounds.jsonl), nor a sweep's" in result.stderr
