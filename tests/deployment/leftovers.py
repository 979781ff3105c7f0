"""Which processes still carry a deployment's home in their environment."""

import os
from pathlib import Path


def left_running(home: Path) -> list[str]:
    """Return the commands of this user's processes that were started for a deployment (Linux)."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            ours = f"FLWR_HOME={home}/".encode() in Path(f"/proc/{pid}/environ").read_bytes()
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it ended, or is another user's
        if ours and command:
            found.append(command)
    return found
