"""The command line as tests call it."""

from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from hedgerow.sim.cli import app

APPS = Path(__file__).parents[3] / "flower_apps"
SD_FEEL = APPS / "sd-feel"
# A data set of one's own.
OWN_SET = """
import numpy as np
from hedgerow.tasks import Dataset
def load(data_dir):
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    return Dataset("mine", x[:40], y[:40], x[40:], y[40:], num_classes=2)
"""


def hedgerow(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def cells(output: str, *first: str) -> list[str]:
    """Return the other cells of the table row that starts with these."""
    for line in output.splitlines():
        row = [cell.strip() for cell in line.strip("│").split("│")]
        if tuple(row[: len(first)]) == first:
            return row[len(first) :]
    raise AssertionError(f"no row {first} in\n{output}")
