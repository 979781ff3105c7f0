"""Processes that still have a deployment's home in their environment."""

from contextlib import suppress
from pathlib import Path

import psutil


def left_running(home: Path) -> list[str]:
    """Return the commands of this user's processes whose FLWR_HOME is the folder, or within it."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it ended, or is another user's
            at = process.environ().get("FLWR_HOME")
            if at and Path(at).is_relative_to(home) and process.cmdline():
                found.append(" ".join(process.cmdline()))
    return found
