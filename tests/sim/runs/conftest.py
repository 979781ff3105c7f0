"""A sweep file of the SD-FEEL app."""

import json
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

APP = Path(__file__).parents[3] / "flower_apps" / "sd-feel"
WriteToml = Callable[[str], Path]


@pytest.fixture
def write_toml(tmp_path: Path) -> WriteToml:
    def write(text: str, app: str = str(APP)) -> Path:
        file = tmp_path / "mine.toml"
        file.write_text(f"app = {json.dumps(app)}\n{textwrap.dedent(text)}")
        return file

    return write
