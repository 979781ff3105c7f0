"""How often a node asks for work: often after a message, then ever more seldom.

Flower's SuperNode asks its SuperLink every 3 s, and looks for the reply of its ClientApp every 0.5 s; its
SuperExec asks the SuperNode every second, or as often as an environment variable says. A round of little work
is mostly this waiting.
"""

from __future__ import annotations

import os
import random
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# The environment variable with the bounds of a node's pace, "0.1-3".
POLL = "HEDGEROW_POLL"
# Seconds between two requests of a stock SuperNode.
FLOWERS = 3.0
USUAL = f"0.1-{FLOWERS:g}"
_LEAST = 0.02
# Shares: of the time since the last message, and of a request in the time between two.
_SHARE, _BUSY = 0.1, 0.1
# Waits are drawn from an interval whose ends differ by this factor.
_SPREAD = 1.25


@dataclass
class PollPace:
    """How long to wait before the next request.

    A tenth of the time since the last message, or nine times as long as the last request took if that is
    longer, so that a server that answers slowly is asked less often; up to a fifth less at random, so that
    nodes do not ask in step. No wait is outside the bounds: to the shortest, up to a quarter is added.

    Parameters
    ----------
    least : float (default: 0.1)
        Shortest wait in seconds, >= 0.02.
    most : float (default: 3.0)
        Longest wait in seconds, >= ``least`` and <= 60; what Flower's nodes wait always. With equal bounds
        nothing is random.
    """

    least: float = 0.1
    most: float = FLOWERS
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)

    def __post_init__(self) -> None:
        self._active = self._asked = self.clock()

    @classmethod
    def of(cls, text: str) -> PollPace:
        """Return the pace of bounds such as ``"0.1-3"``; ValueError for others."""
        first, _, last = text.partition("-")
        try:
            least, most = float(first), float(last)
        except ValueError:
            least = most = float("nan")
        if not _LEAST <= least <= most <= 60:
            raise ValueError(
                f"poll must be the shortest and the longest wait in seconds, from {_LEAST} to 60, as in "
                f"'{USUAL}', got {text!r}"
            )
        return cls(least, most)

    def active(self) -> None:
        """Note that there was a message just now."""
        self._active = self._asked = self.clock()

    def wait(self) -> float:
        """Return the seconds to wait after a request without a message."""
        now = self.clock()
        took = now - self._asked
        wait = min(max(_SHARE * (now - self._active), took * (1 - _BUSY) / _BUSY), self.most)
        low = max(self.least, wait / _SPREAD)
        return min(low * (1 + (_SPREAD - 1) * random.random()), self.most)

    def sleep(self, _: float = 0.0) -> None:
        """Wait, in place of a fixed time."""
        time.sleep(self.wait())
        self._asked = self.clock()


def paced(supernode: str, arguments: Sequence[str]) -> list[str]:
    """Return the command of ``flower-supernode`` at the pace of the environment's ``POLL``."""
    return [sys.executable, "-m", "hedgerow.sim.deploy.pace", supernode, *arguments]


def main() -> None:
    """Run the Python program of the first argument, Flower's SuperNode, with the others."""
    try:
        # Imported here, because it fails with an unknown version of Flower.
        from hedgerow.sim.engine._compat import pace_supernode  # noqa: PLC0415

        pace_supernode(PollPace.of(os.environ.get(POLL) or USUAL), PollPace(_LEAST, 0.5))
    except ImportError as error:
        print(f"The node asks for messages every {FLOWERS:g} s, as Flower's does: {error}", file=sys.stderr)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
