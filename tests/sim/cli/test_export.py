"""``hedgerow export``: what it writes."""

from pathlib import Path

from tests.sim.cli.command_line import hedgerow


def test_an_export_says_how_many_rows(made: Path, tmp_path: Path) -> None:
    assert hedgerow("export", made, "--csv", tmp_path / "o.csv").stdout == f"{tmp_path / 'o.csv'}: 20 rows\n"


def test_nothing_to_write_is_explained(made: Path) -> None:
    result = hedgerow("export", made)
    assert result.exit_code == 2
    assert "valid is --csv FILE, --json FILE, --tensorboard FOLDER or several" in result.stderr
