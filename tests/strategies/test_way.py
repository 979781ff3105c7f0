"""How many functions and files one training round enters, and how often it changes file.

Comprehensions and lambdas count for no function. The round is the second of a default run, without its
evaluation, in this process, with one worker. The numbers below may only become smaller.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Functions, files and changes of file at most. Python 3.12 inlines comprehensions: there are fewer changes.
WAYS = {
    "sd-feel iterations=20": (234, 53, 427),
    # A fault that never happens needs messages.
    "sd-feel iterations=20 fault-dropout=0.000000001": (298, 59, 1003),
    "similarity-free num-rounds=2": (316, 59, 1533),
    "fedmud num-rounds=2": (386, 66, 1048),
    "hsgd iterations=40": (348, 45, 1924),
    "ceps iterations=40": (320, 55, 1071),
}


def test_no_round_enters_more_functions_and_files_than_before(tmp_path: Path) -> None:
    environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    script = [sys.executable, __file__, str(ROOT), *WAYS]
    done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = dict(zip(WAYS, map(json.loads, done.stdout.splitlines()[-len(WAYS) :]), strict=True))
    longer = {
        run: one for run, one in found.items() if any(a > b for a, b in zip(one, WAYS[run], strict=True))
    }
    assert not longer


class _EnoughError(BaseException):
    """The second round has been counted."""


def _count(root: str, run: str) -> list[int]:
    """Return the three numbers of a run's second round."""
    from hedgerow.sim.cli import app
    from hedgerow.strategies import rounds

    entered, files, changes, last = set[tuple[str, str]](), dict[str, str | None](), 0, ""
    train = rounds._train

    def own(path: str) -> str | None:
        real = os.path.realpath(path)
        return real if real.startswith(root + os.sep) and ".venv" not in real else None

    def entering(frame, event, arg):  # type: ignore[no-untyped-def]
        nonlocal changes, last
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename not in files:
            files[code.co_filename] = own(code.co_filename)
        if (file := files[code.co_filename]) is None:
            return
        changes += file != last
        last = file
        if not code.co_name.startswith("<"):
            entered.add((file, code.co_qualname))

    def traced(strategy, grid, current, *arguments):  # type: ignore[no-untyped-def]
        if current > 2:
            raise _EnoughError
        sys.setprofile(entering if current == 2 else None)
        try:
            return train(strategy, grid, current, *arguments)
        finally:
            sys.setprofile(None)

    rounds._train = traced
    name, *settings = run.split()
    options = [word for setting in settings for word in ("-c", setting)]
    try:
        with suppress(_EnoughError):
            app(["run", name, "--workers", "1", "-q", *options], standalone_mode=False)
    finally:
        rounds._train = train
    return [len(entered), len({file for file, _ in entered}), changes]


if __name__ == "__main__":
    numbers = [_count(sys.argv[1], one) for one in sys.argv[2:]]
    for one in numbers:
        print(json.dumps(one))
