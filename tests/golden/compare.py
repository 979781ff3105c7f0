"""Compare the results of two commits: ``python tests/golden/compare.py --against COMMIT``.

Every row of the table (``table.py``) is run from both checkouts, on one core each. A row is equal if exit
code, model, rounds, ledger, clock, privacy report, summary and messages are equal bit by bit; real seconds
and paths are ignored. The exit code is 1 if a row differs.
"""

import argparse
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.golden.table import ROWS, Row  # noqa: E402

__all__ = ["ASPECTS", "Verdict", "differences", "played", "verdict"]

PLAYER = Path(__file__).with_name("play.py")
# The compared aspects of a run, in the order in which differences are reported.
ASPECTS = ("exit", "model", "rounds", "ledger", "clock", "privacy", "privacy-log", "summary", "transcript")
_MISSING = "nothing"
_LONGEST = 160


@dataclass(frozen=True)
class Verdict:
    """The result of a row: ``equal``, ``differs`` or ``not there``, and the reason, or both sides' error."""

    row: str
    state: str
    aspects: tuple[str, ...] = ()
    first: str = ""

    def __str__(self) -> str:
        if self.state == "differs":
            return f"{self.row}: {', '.join(self.aspects)} differ: {self.first}"
        return f"{self.row}: {self.state}{self.first and f' ({self.first})'}"


def differences(one: Any, other: Any, place: str = "") -> Iterator[str]:
    """Yield where two trees of JSON values differ, and how."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            yield from differences(one.get(key, _MISSING), other.get(key, _MISSING), f"{place}.{key}")
    elif isinstance(one, list) and isinstance(other, list):
        for i, (a, b) in enumerate(zip(one, other, strict=False)):
            yield from differences(a, b, f"{place}[{i}]")
        if len(one) != len(other):
            yield f"{place or 'all'}: {len(one)} entries, {len(other)} against"
    # As text, in which NaN equals NaN.
    elif json.dumps(one) != json.dumps(other):
        yield f"{place.lstrip('.') or 'all'}: {_short(one)}, {_short(other)} against"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def verdict(row: Row, one: Mapping[str, Any], other: Mapping[str, Any]) -> Verdict:
    """Compare a row's results in the tree and in the commit."""
    for side, played_ in (("the tree", one), ("the commit", other)):
        for part in played_["parts"]:
            if part.get("there") is False:
                return Verdict(row.name, "not there", first=f"{part['why']} in {side}")
    ends = [part.get("exit", ["killed", ""]) for side in (one, other) for part in side["parts"]]
    for end in ends:
        # Nothing was compared, even if both sides ended like this.
        if end[0] in ("timeout", "broken", "killed"):
            return Verdict(row.name, "differs", ("exit",), f"{end[0]}: {end[1]}")
    found: dict[str, str] = {}
    parts = list(zip(one["parts"], other["parts"], strict=True))
    for aspect in ASPECTS:
        for a, b in parts:
            if (first := next(differences(a.get(aspect), b.get(aspect), aspect), None)) is not None:
                found.setdefault(aspect, first)
    # If both sides end with the same error, report it.
    error = next((end[1] for end in ends if end[0]), "")
    return Verdict(row.name, "differs" if found else "equal", tuple(found), next(iter(found.values()), error))


# Two checkouts


@contextmanager
def checkout_of(commit: str) -> Iterator[Path]:
    """Yield a temporary folder with a commit's files."""
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        archive = subprocess.run(
            ["git", "-C", str(ROOT), "archive", "--format=tar", commit], capture_output=True, check=False
        )
        if archive.returncode:
            sys.exit(f"{commit} is not a commit of {ROOT}: {archive.stderr.decode().strip()}")
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


def linked(checkout: Path, folder: Path) -> None:
    """Lay out a checkout's packages as if installed, by links."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())
    places = project["tool"]["setuptools"]["package-dir"]
    for package, place in places.items():
        link = folder.joinpath(*package.split("."))
        link.parent.mkdir(parents=True, exist_ok=True)
        if any(other.startswith(f"{package}.") for other in places):
            # A folder of its own, into which the links of the packages below go.
            link.mkdir(exist_ok=True)
            for file in (checkout.resolve() / place).glob("*.py"):
                (link / file.name).symlink_to(file)
        else:
            link.symlink_to(checkout.resolve() / place)


@dataclass
class Player:
    """A process that plays rows from one checkout."""

    checkout: Path
    rows: Sequence[Row]
    folder: Path
    transcripts: bool = True

    def start(self) -> None:
        """Start the process."""
        self.out.mkdir(parents=True)
        linked(self.checkout, self.folder / "packages")
        order = {
            "checkout": str(self.checkout.resolve()),
            "out": str(self.out),
            "transcripts": self.transcripts,
            "rows": [asdict(row) for row in self.rows],
        }
        (self.folder / "order.json").write_text(json.dumps(order))
        apps = [str(path) for path in sorted(self.checkout.resolve().glob("flower_apps/*")) if path.is_dir()]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self.folder / "packages"), *apps]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_HOME": str(self.folder / "flwr"),
            "HEDGEROW_NODE_POLICY": "",
            "COLUMNS": "100",
        }
        self._log = (self.folder / "log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(PLAYER), str(self.folder / "order.json")],
            env=environment, cwd=self.folder, stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip

    @property
    def out(self) -> Path:
        """The folder of the results."""
        return self.folder / "out"

    def result(self, number: int) -> dict[str, Any]:
        """Wait for a row and return its result."""
        file = self.out / f"{number}.json"
        while not file.exists():
            if self._process.poll() is not None and not file.exists():
                raise RuntimeError(f"{self.checkout}: {(self.folder / 'log').read_text()[-3000:]}")
            time.sleep(0.02)
        return dict(json.loads(file.read_text()))

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._log.close()


@contextmanager
def player(checkout: Path, rows: Sequence[Row], *, transcripts: bool = True) -> Iterator[Player]:
    """Run a checkout's player for a ``with`` block."""
    with tempfile.TemporaryDirectory(prefix="golden-play-") as folder:
        one = Player(checkout, rows, Path(folder).resolve(), transcripts)
        one.start()
        try:
            yield one
        finally:
            one.end()


def played(checkout: Path, rows: Sequence[Row], *, transcripts: bool = True) -> list[dict[str, Any]]:
    """Return the results of rows in a checkout."""
    with player(checkout, rows, transcripts=transcripts) as one:
        return [one.result(number) for number in range(len(rows))]


def main() -> int:
    """Run the comparison of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", metavar="COMMIT", help="commit to compare with")
    parser.add_argument(
        "--tree", type=Path, default=ROOT, metavar="DIR", help="checkout to compare (default: this one)"
    )
    parser.add_argument("--only", metavar="PATTERN", help="rows whose name or tag matches, as in '*sums*'")
    parser.add_argument("--list", action="store_true", help="list the rows without running them")
    parser.add_argument("--no-transcripts", action="store_true", help="do not compare messages")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the results in a new folder")
    asked = parser.parse_args()
    rows = [row for row in ROWS if asked.only is None or _fits(row, asked.only)]
    if asked.list:
        for row in rows:
            print(row.name, f"[{', '.join(row.tags)}]")
        print(f"{len(rows)} rows")
        return 0
    if not asked.against:
        parser.error("--against must be given")
    began, states = time.perf_counter(), list[str]()
    with ExitStack() as stack:
        other = stack.enter_context(checkout_of(asked.against))
        sides = [
            stack.enter_context(player(side, rows, transcripts=not asked.no_transcripts))
            for side in (asked.tree, other)
        ]
        for number, row in enumerate(rows):
            one = verdict(row, *(side.result(number) for side in sides))
            states.append(one.state)
            print(one, flush=True)
        if asked.keep:
            for name, side in zip(("tree", "commit"), sides, strict=True):
                shutil.copytree(side.out, asked.keep / name)
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("equal", "differs", "not there"))
    print(f"{len(rows)} rows: {counts}; {time.perf_counter() - began:.0f} s")
    return int("differs" in states)


def _fits(row: Row, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(text, pattern) for text in (row.name, *row.tags))


if __name__ == "__main__":
    sys.exit(main())
