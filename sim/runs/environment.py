"""Where a run comes from: the machine, the versions, the commit."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["environment"]

_PACKAGES = ("hedgerow", "flwr", "torch", "numpy", "scipy", "networkx")


def environment() -> dict[str, Any]:
    """Return time, machine, versions and commit, as JSON values."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "git": _git_state(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Return commit and whether files differ from it, of the checkout that this library runs from."""
    command = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        commit = subprocess.run([*command, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        status = subprocess.run(
            [*command, "status", "--porcelain"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": commit.stdout.strip(), "modified": bool(status.stdout.strip())}
