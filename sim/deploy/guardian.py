"""A guardian process that ends the programs of its owner when the owner is gone, even by SIGKILL.

It runs in its own session and reads the started programs from a pipe. When the pipe closes, it ends those
that are still alive and have the recorded start time, unlike a later process of the same id.
"""

import os
import signal
import sys

from hedgerow.sim.deploy.processes import began, stop_groups

# A change of the system clock may move the recorded times a little.
_TOLERANCE = 1.0


def main() -> None:
    """Read lines of a process id and its start time until the pipe closes, then end these processes."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    os.chdir("/")
    started = [line.split() for line in sys.stdin]
    stop_groups({int(pid) for pid, when in started if abs(began(int(pid)) - float(when)) < _TOLERANCE}, 10.0)


if __name__ == "__main__":
    main()
