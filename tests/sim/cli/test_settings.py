"""``hedgerow settings``: every key of an app with its default, its meaning and what is valid."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.sim.cli.command_line import APPS, SD_FEEL, hedgerow
from tests.sim.tiny_app import MakeApp


def test_every_key_is_listed_with_default_meaning_and_what_is_valid() -> None:
    result = hedgerow("settings", APPS / "sd_feel")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[:3] == [
        'method = "sd-feel"',
        "    SD-FEEL, or a baseline",
        "    valid: one of 'sd-feel', 'hierfavg', 'feel', 'fedavg'",
    ]
    assert "tau1 = 5\n    intra-cluster period\n    valid: an integer from 1 to 2^20\n" in result.stdout


def test_the_apps_files_are_brought_up_to_date(tmp_path: Path) -> None:
    app = tmp_path / "sd-feel"
    shutil.copytree(SD_FEEL, app, ignore=shutil.ignore_patterns("figures"))
    pyproject = app / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace("tau1 = 5", "tau1 = 6"))
    # A process of its own: in this one the app's modules may be imported from where they really lie.
    command = [sys.executable, "-m", "hedgerow.sim", "settings", str(app), "--write"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert shown.stdout == f"{pyproject}\n"
    assert pyproject.read_text() == (SD_FEEL / "pyproject.toml").read_text()


def test_an_app_without_settings_is_explained(make_app: MakeApp) -> None:
    result = hedgerow("settings", make_app())
    assert result.exit_code == 2
    assert "app 'tiny-app' has no module tinyapp.settings" in result.stderr
