"""Runs commands: one, measured with everything it starts, or several at once; and reads what a run booked."""

import json
import os
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from hedgerow.sim.deploy.processes import free_ports

MARK = "HEDGEROW_BENCHMARK"


@dataclass(frozen=True)
class Measured:
    seconds: float
    peak_gib: float
    output: str


def memory_of(processes: Iterable[psutil.Process]) -> int:
    """Return the bytes of processes, with shared pages counted once; those that ended count 0 (Linux)."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it ended, or is another user's
            if process.environ().get(MARK) == mark:
                yield process


def measure(command: list[str], env: dict[str, str] | None = None) -> Measured:
    """Run a command to its end; it must exit with 0. Detached children count too: they carry a mark."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        env={**os.environ, **(env or {}), MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.5):
            peak = max(peak, memory_of(_marked(mark)))

    watcher = threading.Thread(target=watch)
    started = time.perf_counter()
    watcher.start()
    output = process.communicate()[0].decode()
    seconds = time.perf_counter() - started
    done.set()
    watcher.join()
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} exited with {process.returncode}:\n{output[-3000:]}")
    return Measured(seconds, peak / 2**30, output)


def run_together(commands: Sequence[Sequence[str]]) -> None:
    """Run commands at once to their ends; all must exit with 0, or those that still run are killed."""
    with tempfile.TemporaryFile() as log:
        running = [subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) for command in commands]
        try:
            for one in running:
                if one.wait() != 0:
                    log.seek(0)
                    said = log.read()[-3000:].decode(errors="replace")
                    raise RuntimeError(
                        f"{' '.join(map(str, one.args))} exited with {one.returncode}:\n{said}"
                    )
        finally:
            for one in running:
                one.kill()
                one.wait()


def free_addresses(count: int) -> list[str]:
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


def links_of(folder: Path) -> dict[str, int]:
    """Return the bytes of each link of the one run in a folder."""
    (run,) = folder.iterdir()
    by_link = json.loads((run / "summary.json").read_text())["by_link"]
    return {link: traffic["payload_bytes"] for link, traffic in by_link.items()}
