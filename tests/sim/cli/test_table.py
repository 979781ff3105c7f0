"""``hedgerow table`` and ``hedgerow export``: what they print."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.sim.cli.command_line import hedgerow

WriteRun = Callable[..., Path]


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


def test_an_export_says_how_many_rows(made: Path, tmp_path: Path) -> None:
    assert hedgerow("export", made, "--csv", tmp_path / "o.csv").stdout == f"{tmp_path / 'o.csv'}: 20 rows\n"


@pytest.mark.parametrize("option", ["--csv", "--json", "--onnx", "--torchscript"])
def test_an_export_into_no_folder_is_refused_and_makes_none(option: str, made: Path, tmp_path: Path) -> None:
    file = tmp_path / "nowhere/x.csv"
    result = hedgerow("export", made, option, file)
    assert result.exit_code == 2
    assert result.stderr == f"Error: {option} must be a file in a folder that exists, got '{file}'\n"
    assert not file.parent.exists()
