"""Which files of a folder each process opens: an audit hook in every Python that is started, by its home."""

import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

# Runs at the start of every Python that finds it on PYTHONPATH.
_SITE = """
import os, sys

def watch():
    watched, log = os.path.realpath(os.environ["WATCHED"]), os.environ["WATCH_LOG"]
    name = os.path.basename(os.environ.get("FLWR_HOME", "")) or "owner"
    file = os.open(os.path.join(log, f"{name}.{os.getpid()}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    busy = []

    def hook(event, arguments):
        if event != "open" or busy or not isinstance(arguments[0], (str, bytes, os.PathLike)):
            return
        busy.append(event)
        try:
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if path.startswith(watched + os.sep):
                os.write(file, path.encode() + b"\\n")
        finally:
            busy.pop()

    sys.addaudithook(hook)

watch()
"""


def watching(watched: Path, scratch: Path) -> dict[str, str]:
    """Return what the environment of processes must have beside, so that ``opened`` tells of them."""
    log = scratch / "opened"
    log.mkdir(parents=True)
    (scratch / "site").mkdir()
    (scratch / "site" / "sitecustomize.py").write_text(_SITE)
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(scratch / "site"), *([before] if before else [])])
    return {"PYTHONPATH": path, "WATCHED": str(watched), "WATCH_LOG": str(log)}


def opened(env: Mapping[str, str]) -> tuple[dict[str, set[Path]], dict[str, int]]:
    """Return the watched files that the processes of each home opened, and how many processes those were."""
    files: dict[str, set[Path]] = defaultdict(set)
    processes: dict[str, int] = defaultdict(int)
    for log in Path(env["WATCH_LOG"]).iterdir():
        home = log.name.partition(".")[0]
        files[home] |= {Path(line) for line in log.read_text().splitlines()}
        processes[home] += 1
    return dict(files), dict(processes)
