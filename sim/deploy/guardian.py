"""Ends what a process started when that process is gone, killed too: by a pipe that closes with it.

The guardian is a process of its own, in a session of its own, that reads which programs were started and does
nothing until there is no more to read. It ends only those that are who they were when it was told of them.
"""

import os
import signal
import sys

from hedgerow.sim.deploy.processes import began, stop_groups


def main() -> None:
    """Read lines of a process id and when it began; at the end of them, end those that still live."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    os.chdir("/")
    told = [line.split(maxsplit=1) for line in sys.stdin]
    stop_groups({int(pid) for pid, when in told if began(int(pid)) == when.strip()}, 10.0)


if __name__ == "__main__":
    main()
