"""A guardian process that ends the programs of its owner when the owner is gone, even by SIGKILL.

It runs in its own session and reads the started programs from a pipe. When the pipe closes, it ends those
that are still alive and have the recorded start time.
"""

import os
import signal
import sys

from hedgerow.sim.deploy.processes import began, stop_groups


def main() -> None:
    """Read lines of a process id and its start time until the pipe closes, then end these processes."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    os.chdir("/")
    started = [line.split(maxsplit=1) for line in sys.stdin]
    stop_groups({int(pid) for pid, when in started if began(int(pid)) == when.strip()}, 10.0)


if __name__ == "__main__":
    main()
