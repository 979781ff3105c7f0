"""Log lines of Flower's programs and their children as JSON, one object per line: a filter of standard input.

Flower has no option for it. Its lines are ``LEVEL : message``, perhaps coloured; a line without a level, such
as one of a traceback, has none here either.

``hedgerow node … 2>&1 | python -m hedgerow.sim.deploy.log_lines``
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)\s*(?:\d{4}-\S+ \S+)?\s*:\s*(.*)")


def as_json(lines: Iterable[str]) -> Iterator[str]:
    """Yield an object with ``time`` (UTC, when the line was read), ``level`` and ``message`` for each line.

    Lines without text yield nothing.
    """
    for line in lines:
        text = _COLOUR.sub("", line).strip()
        found = _LEVEL.fullmatch(text)
        level, message = found.groups() if found else (None, text)
        if message:
            time = datetime.now(UTC).isoformat(timespec="milliseconds")
            yield json.dumps({"time": time, "level": level, "message": message})


def main() -> None:
    """Read standard input to its end, also after Ctrl-C, which ends the program before the filter."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    with suppress(BrokenPipeError):
        for line in as_json(sys.stdin):
            print(line, flush=True)


if __name__ == "__main__":
    main()
