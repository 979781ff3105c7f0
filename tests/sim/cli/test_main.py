"""The command line answers at once, and every command explains itself."""

import subprocess
import sys

from tests.sim.cli.command_line import hedgerow


def test_every_command_explains_itself() -> None:
    for command in ("run", "sweep", "plot", "table", "export", "data", "plan", "settings", "deploy"):
        result = hedgerow(command, "--help")
        assert result.exit_code == 0, result.output


def test_help_imports_neither_flower_nor_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from hedgerow.sim.cli.main import app; "
        "shown = CliRunner().invoke(app, ['--help']); assert 'run' in shown.output; "
        "print(sorted({'flwr', 'torch'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
