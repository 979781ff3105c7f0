"""``hedgerow table``: what it prints, and how it explains a bad option."""

from pathlib import Path

import pytest
from tests.sim.cli.command_line import hedgerow


def test_the_table_of_a_sweep(made: Path) -> None:
    assert hedgerow("table", made, "--budget", "rounds=1", "--target", "accuracy=0.7").stdout == (
        "## Made up\n\n"
        "### loss at rounds = 1\n\n"
        "| variant | loss, mean ± sd | evaluated at | difference from A [95 % interval] | differs | seeds |\n"
        "|---|---:|---:|---:|---|---:|\n"
        "| A | 1.1 ± 0.14 | 1 | reference |  | 2 of 2 |\n"
        "| B | 0.9 ± 0.14 | 1 | -0.2 [-0.2, -0.2] | yes | 2 of 2 |\n\n"
        "### rounds to accuracy >= 0.7\n\n"
        "| variant | rounds, mean ± sd | difference from A [95 % interval] | differs | reached |\n"
        "|---|---:|---:|---|---:|\n"
        "| A | 1 ± 0 | reference |  | 2 of 2 |\n"
        "| B | 1 ± 0 | +0 [+0, +0] | no | 2 of 2 |\n\n"
        "Means and sample standard deviations over seeds. A value at a budget is that of the last evaluation "
        "within it. Differences are paired by seed, with a 95 % Student t interval of their mean, not "
        "corrected for several variants; one seed gives no interval.\n\n"
        "Realism: numbers by hand.\n"
    )


def test_a_table_without_a_budget_takes_the_largest_that_all_spent(made: Path) -> None:
    assert "### loss at sim-seconds = 0.5" in hedgerow("table", made).stdout


def test_a_table_takes_several_metrics_and_costs(made: Path) -> None:
    result = hedgerow("table", made, "--x", "rounds", "--x", "bits", "--y", "loss", "--y", "accuracy")
    titles = [line for line in result.stdout.splitlines() if line.startswith("### ")]
    assert titles == [
        "### loss at rounds = 1",
        "### accuracy at rounds = 1",
        "### loss at bits = 1000000",
        "### accuracy at bits = 1000000",
    ]


def test_a_table_warns_of_what_is_missing(made: Path) -> None:
    (made / "B" / "seed-1" / "summary.json").unlink()
    assert hedgerow("table", made).stderr == "Warning: B, seed 1: not finished, left out\n"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--budget", "rounds"], "--budget 'rounds'; valid is name=number"),
        (["--budget", "epochs=3"], "x = 'epochs'; valid is one of rounds"),
        (["--target", "f1=0.5"], "y = 'f1'; valid in "),
    ],
)
def test_a_bad_option_is_explained(made: Path, options: list[str], error: str) -> None:
    result = hedgerow("table", made, *options)
    assert (result.exit_code, error in result.stderr) == (2, True), result.output
