"""A node's ledger of releases, on its own disk: it survives restarts and runs, and no message can change it.

One JSON line per entry, written and synchronised under a lock before the release leaves the node, so that
concurrent messages cannot spend the same epsilon. An unfinished last line was never acted on and is cut off;
any other unreadable line blocks all releases until the owner repairs the file. Lines that no longer count (a
unit given back, the number of an older state) are dropped by replacing the file; where the owner lets the
app's user only append, they stay.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from math import inf, sqrt
from pathlib import Path
from time import time
from typing import IO, Any

try:
    import fcntl
except ImportError:  # not on Windows, where a SuperNode handles one message at a time
    fcntl = None  # type: ignore[assignment]

_HELLO, _RESTORE, _RELEASE, _SUM = "hello", "restore", "release", "sum"
_LOCK, _POOLED, _OPEN, _BACK = "lock", "pooled", "open", "back"
_KINDS = (_HELLO, _RESTORE, _RELEASE, _SUM, _LOCK, _POOLED, _OPEN, _BACK)


class ReleasesError(ValueError):
    """A ledger that cannot be read or written."""


class Spent(ValueError):  # noqa: N818
    """A release that would exceed the privacy budget."""


class TooOften(ValueError):  # noqa: N818
    """An action that has already been done as often as allowed."""


class Releases:
    """The ledger of a node's releases.

    ``path`` is its file, created with its folder if missing, readable only by its owner. ``simulation`` names
    a simulated node and its simulation, whose runs have the ids, and the seeded noise, of others' runs. Every
    method raises ReleasesError if the file is damaged or cannot be written.
    """

    def __init__(self, path: Path, simulation: str = "") -> None:
        self.path, self.simulation = path, simulation

    def hello(self, run: str, node: int, most: int) -> None:
        """Record that a gossip method begins in a run; TooOften if it did so ``most`` times."""
        with self._opened() as (file, lines):
            self._append(file, _one_more(lines, _HELLO, run, node, most))

    def lock(self, run: str, node: int) -> int:
        """Record that a state is locked, and return its number; numbers increase."""
        with self._opened() as (file, lines):
            known = [line for line in lines if line["what"] == _LOCK]
            number = 1 + max((line["index"] for line in known), default=0)
            entry = {"what": _LOCK, "run": run, "node": node, "index": number}
            # Only the largest number counts, so that queries do not grow the file.
            if not (known and self._replaced(file, known[-1], entry)):
                self._append(file, entry)
        return number

    def restore(self, run: str, node: int, most: int, of: str, number: int) -> None:
        """Record that state ``number`` of run ``of`` replaces the state of ``run``.

        TooOften if ``most`` states were restored in ``run``, or a later state of run ``of`` was restored.
        """
        with self._opened() as (file, lines):
            entry = _one_more(lines, _RESTORE, run, node, most)
            if any(
                line["what"] == _RESTORE and line.get("of") == of and line.get("index", 0) > number
                for line in lines
            ):
                raise TooOften(f"a later state of run {of} was restored than number {number}")
            self._append(file, {**entry, "of": of, "index": number})

    def summed(self, run: str, node: int, index: int) -> None:
        """Record a secure sum of a run; TooOften if there was one of this index."""
        entry = {"what": _SUM, "run": run, "node": node, "index": index}
        with self._opened() as (file, lines):
            if any(entry.items() <= line.items() for line in lines):
                raise TooOften(f"run {run} had sum {index} already: each must be made once")
            self._append(file, entry)

    def pooled(self, run: str, node: int, source: str, digest: str, most: int) -> None:
        """Record a sum over the records of a source; the same sum may be reported again.

        ``source`` names the records and the kind of sum; ``digest`` identifies the sum. TooOften if ``most``
        other sums were reported, over all runs.
        """
        entry = {"what": _POOLED, "run": run, "node": node, "source": source, "digest": digest}
        with self._opened() as (file, lines):
            sums = {line["digest"] for line in lines if line["what"] == _POOLED and line["source"] == source}
            if digest in sums:
                return
            if len(sums) >= most:
                raise TooOften(
                    f"{len(sums)} other sums over these records were reported, before they changed; "
                    f"max-pooled = {most} in the policy: raise it by one to allow this one"
                )
            self._append(file, entry)

    def open(self, run: str, node: int, kind: str, most: int) -> None:
        """Record an answer that depends on records without noise or a secure sum.

        TooOften if there were ``most``, over all runs.
        """
        with self._opened() as (file, lines):
            kinds = [line["what"] for line in lines]
            if (made := kinds.count(_OPEN) - kinds.count(_BACK)) >= most:
                raise TooOften(f"{made} unprotected answers were given; at most {most} may be")
            self._append(file, {"what": _OPEN, "run": run, "node": node, "kind": kind})

    def give_back(self, run: str, node: int) -> None:
        """Undo one ``open`` of a node in a run."""
        mine = {"what": _OPEN, "run": run, "node": node}
        with self._opened() as (file, lines):
            made = next(line for line in reversed(lines) if mine.items() <= line.items())
            if not self._replaced(file, made, None):
                self._append(file, {**mine, "what": _BACK})

    def release(
        self, run: str, node: int, root: int, index: int, multiplier: float, delta: float, max_epsilon: float
    ) -> None:
        """Record a Gaussian release whose noise has a deviation of ``multiplier`` > 0 sensitivities.

        ``root`` and ``index`` seed its noise: the same noise on two gradients would reveal their difference.
        ``delta`` and ``max_epsilon`` are the budget of all releases; an infinite one is not accounted. Spent
        if the budget is exceeded, TooOften if the noise was used before.
        """
        noise = sha256(f"{root}/{index}{self.simulation}".encode()).hexdigest()[:32]
        with self._opened() as (file, lines):
            made = [line for line in lines if line["what"] == _RELEASE]
            if any(line["noise"] == noise for line in made):
                raise TooOften(f"the noise of release {index} must be used only once; it was used before")
            entry: dict[str, Any] = {
                "what": _RELEASE, "run": run, "node": node, "noise": noise, "multiplier": multiplier,
                "rho": 1 / (2 * multiplier**2),
            }  # fmt: skip
            if max_epsilon < inf:
                epsilon = epsilon_of([*(line["multiplier"] for line in made), multiplier], delta)
                if epsilon > max_epsilon:
                    raise Spent(
                        f"epsilon must be at most {max_epsilon:g}, got {epsilon:.4g} at delta {delta:g} "
                        f"after {len(made) + 1} releases"
                    )
                entry |= {"epsilon": epsilon, "delta": delta}
            self._append(file, entry)

    def made(self, run: str) -> tuple[int, int]:
        """Return the number of releases of a run, and how many earlier runs it was resumed from.

        A resumed run has a new id. The count covers all runs linked by restored states: the run resumed from,
        including its releases after the checkpoint, and other runs resumed from the same one. Nodes that
        share a ledger are counted together, because a node that reconnects may have a new id.
        """
        with self._opened() as (_, lines):
            restored = [line for line in lines if line["what"] == _RESTORE and "of" in line]
            made = [line["run"] for line in lines if line["what"] == _RELEASE]
        # A restored state has the id of its run, of whichever simulation.
        named = {run, *made, *(line["run"] for line in restored)}
        links = [
            (line["run"], one)
            for line in restored
            for one in [one for one in named if one.partition("@")[0] == line["of"]] or [line["of"]]
        ]
        steps, last = 0, {run}
        earlier = {run}
        while last := {of for one, of in links if one in last} - earlier:
            earlier |= last
            steps += 1
        linked, size = {run}, 0  # the connected component, in either direction
        while len(linked) > size:
            size = len(linked)
            linked |= {one for link in links if linked & set(link) for one in link}
        return sum(one in linked for one in made), steps

    @contextmanager
    def _opened(self) -> Iterator[tuple[IO[bytes], list[dict[str, Any]]]]:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = self._locked()
        except OSError as error:
            raise ReleasesError(f"ledger {self.path} cannot be opened: {error.strerror}") from error
        with file:
            yield file, self._lines(file)

    def _locked(self) -> IO[bytes]:
        """Open and lock the file; the lock is released when it is closed."""
        while True:
            file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b")
            if fcntl is None:
                return file
            fcntl.flock(file, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(self.path)):
                    return file
            file.close()  # It was replaced while this process waited for the lock.

    def _append(self, file: IO[bytes], entry: dict[str, Any]) -> None:
        file.write(_line(entry))
        file.flush()
        os.fsync(file.fileno())

    def _replaced(self, file: IO[bytes], old: dict[str, Any], new: dict[str, Any] | None) -> bool:
        """Replace the file by one without its last line ``old``, and with a line ``new``.

        Returns False if the file cannot be replaced; it is then as it was.
        """
        file.seek(0)
        lines = file.read().splitlines(keepends=True)
        del lines[max(at for at, line in enumerate(lines) if json.loads(line) == old)]
        aside = self.path.with_name(self.path.name + ".partial")
        try:
            with suppress(FileNotFoundError):
                aside.unlink()
            handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as copy:
                copy.write(b"".join(lines) + (b"" if new is None else _line(new)))
                copy.flush()
                os.fsync(copy.fileno())
            os.replace(aside, self.path)
        except OSError:
            return False
        return True

    def _lines(self, file: IO[bytes]) -> list[dict[str, Any]]:
        file.seek(0)
        text = file.read()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            file.truncate(whole)
        try:
            return [_checked(json.loads(line)) for line in text[:whole].splitlines()]
        except (ValueError, TypeError, KeyError) as error:
            raise ReleasesError(
                f"ledger {self.path} is damaged ({error!r}): every line must be a ledger entry"
            ) from error


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps({"time": round(time(), 3), **entry}).encode() + b"\n"


def epsilon_of(multipliers: list[float], delta: float) -> float:
    """Return the exact epsilon at delta of Gaussian releases with these noise multipliers."""
    # Imported late: a device starts a process for every message, and few of them need it.
    from hedgerow.wire.gaussian_dp import gaussian_epsilon  # noqa: PLC0415

    return gaussian_epsilon(sqrt(sum(multiplier**-2 for multiplier in multipliers)), delta)


def _checked(line: dict[str, Any]) -> dict[str, Any]:
    str(line["run"]), int(line["node"]), str(line.get("of"))
    if line["what"] not in _KINDS:
        raise ValueError(f"what is {line['what']!r}")
    for key in {_LOCK: ("index",), _POOLED: ("source", "digest")}.get(line["what"], ()):
        line[key]
    int(line.get("index", 0))
    if line["what"] == _RELEASE and not (float(line["multiplier"]) > 0 and line["noise"]):
        raise ValueError(f"multiplier is {line['multiplier']!r}")
    return line


def _one_more(lines: list[dict[str, Any]], what: str, run: str, node: int, most: int) -> dict[str, Any]:
    """Return the entry for one more of a kind; TooOften if the run already had ``most``."""
    before = sum((line["what"], line["run"], line["node"]) == (what, run, node) for line in lines)
    if before >= most:
        raise TooOften(f"run {run} had {before} of {what}; at most {most} may be")
    return {"what": what, "run": run, "node": node}
