"""Which processes still carry a deployment's home in their environment."""

import os
from pathlib import Path


def left_running(home: Path) -> list[str]:
    """Return the commands of this user's processes whose FLWR_HOME is the folder, or within it (Linux)."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it ended, or is another user's
        homes = [entry.partition(b"=")[2].decode() for entry in environment if entry[:10] == b"FLWR_HOME="]
        if command and any(Path(one).is_relative_to(home) for one in homes):
            found.append(command)
    return found
