"""docs/formats.md names what runs write and what their messages hold."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from flwr.app import Message
from typer.testing import CliRunner

from hedgerow.sim import InProcessGrid
from hedgerow.sim.cli import app
from hedgerow.sim.runs.checkpoint import FORMAT
from hedgerow.sim.runs.folder import FORMAT as FOLDER
from hedgerow.sim.runs.results import FORMAT as COLLECTED

from .pages import DOCS, ROOT

TEXT = (DOCS / "formats.md").read_text(encoding="utf-8")
RUNS = {
    "sd-feel": "model=logistic iterations=10 edge-servers=nodes",
    "similarity-free": "model=logistic num-rounds=1",
    "fedmud": "num-rounds=2 model=lenet ratio=0.0625",
    "ceps": "iterations=12 num-clients=8",
    "hsgd": "iterations=4",
}


def documented(message_type: str) -> str:
    """Return the rows of the tables of messages that are about a type."""
    return "\n".join(row for row in TEXT.splitlines() if row.startswith("|") and f"`{message_type}`" in row)


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """The records of all messages of a run, by type."""
    seen: dict[str, set[str]] = {}
    push, pull = InProcessGrid.push_messages, InProcessGrid.pull_messages

    def note(given: Iterable[Message]) -> list[Message]:
        kept = list(given)
        for message in kept:
            if message.has_content():
                seen.setdefault(message.metadata.message_type, set()).update(message.content)
        return kept

    monkeypatch.setattr(InProcessGrid, "push_messages", lambda self, given: push(self, note(given)))
    monkeypatch.setattr(InProcessGrid, "pull_messages", lambda self, ids: note(pull(self, ids)))
    return seen


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in ("fedmud", "hsgd") else name for name in RUNS],
)
def test_a_run_writes_and_sends_what_is_documented(
    name: str, messages: dict[str, set[str]], tmp_path: Path
) -> None:
    command = [
        "run",
        str(ROOT / "flower_apps" / name),
        "-c",
        RUNS[name],
        "--quiet",
        "--output-dir",
        str(tmp_path),
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    (folder,) = tmp_path.iterdir()
    assert all(f"`{file.name}" in TEXT or f"`{file.name}/" in TEXT for file in folder.iterdir())
    assert all(f"`checkpoint/{file.name}`" in TEXT for file in (folder / "checkpoint").iterdir())
    record = json.loads((folder / "rounds.jsonl").read_text().splitlines()[-1])
    rows = re.findall(
        r"^\| (`[^|]+`) \|", TEXT.split("A record of `rounds.jsonl`")[1].split("###")[0], re.MULTILINE
    )
    assert record.keys() == set(re.findall(r"`(\w+)`", " ".join(rows)))
    assert json.loads((folder / "summary.json").read_text()).keys() <= set(re.findall(r"`([\w-]+)`", TEXT))
    assert json.loads((folder / "config.json").read_text()).keys() <= set(re.findall(r"`([\w-]+)`", TEXT))
    assert messages
    for message_type, records in messages.items():
        assert all(f"`{record}`" in documented(message_type) for record in records), (message_type, records)


def test_the_versions_are_those_of_the_code() -> None:
    assert f"| run folder | {FOLDER} |" in TEXT
    assert f"| checkpoint | {FORMAT} |" in TEXT
    assert f"`{COLLECTED}`" in TEXT
