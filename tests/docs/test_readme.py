"""The README's example runs as shown and the pages newcomers read stay short."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 110


def test_the_page_on_writing_a_method_is_short() -> None:
    assert len((ROOT / "docs" / "tutorials" / "new-method.md").read_text().splitlines()) <= 150


def test_the_example_runs_and_ends_at_the_accuracy_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python[^\n]*\n(.*?)```", README, re.DOTALL)
    shown = float(code.rsplit("# ", 1)[1])
    exec(compile(code, "readme_example.py", "exec"), {})
    assert float(capsys.readouterr().out.split()[-1]) == pytest.approx(shown, abs=0.005)
