"""The command line answers at once, and every command explains itself."""

import subprocess
import sys

from tests.sim.cli.command_line import SD_FEEL, hedgerow

from hedgerow.sim.runs.hooks import descriptions, shipped_apps


def test_help_imports_neither_flower_nor_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from hedgerow.sim.cli import app; "
        "shown = CliRunner().invoke(app, ['--help']); assert 'run' in shown.output; "
        "print(sorted({'flwr', 'torch'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_the_command_line_alone_shows_its_help_and_exits_0() -> None:
    for arguments in ([], ["deploy"], ["plan"]):
        alone = hedgerow(*arguments)
        assert (alone.exit_code, alone.stderr) == (0, "")
        assert alone.output == hedgerow(*arguments, "--help").output


def test_the_help_lists_the_apps_groups_the_commands_and_has_examples_that_can_be_run() -> None:
    text = hedgerow("--help").output
    assert all(f"  {name:17}{descriptions()[name]}\n" in text for name in shipped_apps())
    for panel in ("Run:", "Look at runs:", "Apps and data:", "Deploy and plan:"):
        assert f"\n{panel}\n" in text
    examples = [line.split("  ")[1] for line in text.splitlines() if line.startswith("  hedgerow ")]
    assert len(examples) == 6
    for example in examples:
        name = example.split()[1]
        assert hedgerow(name, "--help").exit_code == 0


def test_the_help_says_what_arguments_are() -> None:
    text = " ".join(hedgerow("run", "--help").output.split())
    assert text.count("fedmud, hsgd, scaffold, sd-feel or similarity-free; or") == 1
    assert hedgerow("plot", "--help").output.count("Folders of runs or sweeps.") == 1


def test_every_key_is_listed_with_default_meaning_and_what_is_valid() -> None:
    result = hedgerow("settings", SD_FEEL)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[:4] == [
        "# Those that matter first",
        'method = "sd-feel"',
        "    SD-FEEL, or a baseline; flwr:… is FedAvg with a strategy of Flower",
        "    valid: one of 'sd-feel', 'hierfavg', 'feel', 'fedavg', or a strategy of Flower, such as "
        "'flwr:FedYogi(eta=0.01)'",
    ]
    assert (
        "tau1 = 5\n    intra-cluster period, in local iterations\n    valid: an integer from 1 to 2^20\n"
        in result.stdout
    )
    titles = [line for line in result.stdout.splitlines() if line.startswith("# ")][1:]
    assert titles == [
        "# Method",
        "# Data",
        "# Training",
        "# Privacy",
        "# Robustness",
        "# Deployment",
        "# Run",
    ]
