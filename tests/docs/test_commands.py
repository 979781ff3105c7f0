"""The commands of the apps' pages and of docs/methods: each starts and gets to its first round.

To their ends they take minutes to hours. Those with a `/path/to/…`, a run's `…` or an address are for the
reader to complete, and those that read a run want one.
"""

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from .pages import METHODS, ROOT, blocks, commands, environment

SECONDS = 300
OPEN = ("/path/to/", "…", "10.0.0.", "127.0.0.1:", "clinic.csv")
# Real SuperLinks and SuperNodes have tests of their own.
COMMANDS = sorted(
    shlex.join(words)
    for page in (*sorted((ROOT / "flower_apps").glob("*/*.md")), *sorted(METHODS.glob("*.md")))
    for block in blocks(page)
    for words in commands(block)
    if words[0] not in ("deploy", "plot", "table")
    and not block.needs
    and not any(part in shlex.join(words) for part in OPEN)
)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_an_app_gets_to_its_first_round(command: str, tmp_path: Path) -> None:
    (tmp_path / "flower_apps").symlink_to(ROOT / "flower_apps")
    words = shlex.split(command)
    if words[0] == "sweep":
        words.append("--dry-run")
    log, end = tmp_path / "log", time.monotonic() + SECONDS
    with (
        log.open("wb") as output,
        subprocess.Popen(
            ["hedgerow", *words],
            cwd=tmp_path,
            env=environment(tmp_path),
            stdout=output,
            stderr=output,
            start_new_session=True,
        ) as run,
    ):
        try:
            while run.poll() is None and not _trained(tmp_path) and time.monotonic() < end:
                time.sleep(0.2)
            assert run.poll() == 0 or _trained(tmp_path), log.read_text()[-4000:]
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGTERM)


def _trained(folder: Path) -> bool:
    """Whether a run there has recorded a round after the 0th."""
    return any(len(rounds.read_text().splitlines()) > 1 for rounds in folder.glob("runs/*/rounds.jsonl"))
