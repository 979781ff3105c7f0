"""A run's folder: its configuration and one line per round, readable with ``json`` alone.

``config.json`` is written before the first round. ``rounds.jsonl`` grows by one flushed line per round, so
that a killed run keeps all finished rounds; ``checkpoint/`` is for resuming. All other files are written
under a temporary name and renamed, so that no partial file is ever read. The folder is locked during a run.
"""

import inspect
import json
import logging
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from hedgerow.sim.runs.checkpoint import (
    LATEST,
    Checkpoint,
    CheckpointError,
    drop_damaged,
    load_newest,
    save_model,
    save_newest,
)
from hedgerow.sim.runs.common_settings import role_of
from hedgerow.sim.runs.durable import Lines, remove, write_file
from hedgerow.sim.runs.folder import (
    CONFIG,
    FORMAT,
    LOCK,
    PRIVACY,
    ROUNDS,
    SUMMARY,
    Lock,
    RunFolderError,
    json_text,
    parse_rounds,
    read_config,
    read_file,
    refused,
    write_json,
)
from hedgerow.sim.signals import sigterm_raises

_logger = logging.getLogger("flwr")


class RoundLike(Protocol):
    """A strategy's record of a round: a dataclass with at least these fields."""

    round: int
    central: dict[str, Any]
    bits: int
    sim_seconds: float


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and restored; a returned state never changes."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state: JSON values and ndarrays, nested."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""


class RunRecorder:
    """Writes a run's folder: pass ``on_round_end`` to the strategy and run it under ``guard``.

    The folder is locked against other recorders, in any process, until ``finish``, ``close``, an error under
    ``guard``, or the end of the process.

    Parameters
    ----------
    folder : Path
        An existing folder: empty for a new run, an earlier run's to resume it.
    config : Mapping[str, Any]
        Everything that determines the run, JSON values only; ``environment`` is added if missing.
    checkpoint_every : int (default: 10)
        Rounds between two checkpoints, >= 1. Another one is written when the run is interrupted.
    defaults : Mapping[str, Any] (default: none)
        The app's default settings, which stand for those that an earlier run's app did not have.

    Raises
    ------
    RunFolderError
        If the folder holds a run with another config (the error names the differing keys), or files but no
        run; if it is in use; and, here and in all methods, if the disk is full: the run as written before
        can then still be resumed.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        *,
        checkpoint_every: int = 10,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.checkpoint_every = checkpoint_every
        self.rounds: list[dict[str, Any]] = []
        self._parts: dict[str, Stateful] = {}
        self._on_demand = False
        # State of the last complete round that is not yet in a checkpoint.
        self._state: tuple[Mapping[str, Any], dict[str, Any]] | None = None
        self._lines: Lines | None = None
        with refused(folder):
            # Refuses a folder of other files before it gets a lock file.
            _is_begun(folder)
            self._lock = Lock(folder)
            try:
                self._open(config, defaults or {})
            except BaseException:
                self._lock.release()
                raise

    @property
    def checkpoint(self) -> Path:
        """Path of the newest checkpoint."""
        return self.folder / "checkpoint" / LATEST

    def keep_state(self, **parts: object) -> None:
        """Include the state of these parts (``strategy=…, engine=grid``) in checkpoints.

        Parts without ``state_dict`` (Flower's own grids) are left out. If a part's ``on_demand`` is true, all
        states are read only when a checkpoint is due, and an interrupted run falls back to the last one.
        """
        self._parts = {name: part for name, part in parts.items() if isinstance(part, Stateful)}
        self._on_demand = any(getattr(part, "on_demand", False) for part in self._parts.values())

    def resume(self) -> None:
        """Load the newest intact checkpoint into the parts and remove later rounds from the record.

        Raises
        ------
        CheckpointError
            If the folder has no checkpoint, or one of another run or engine.
        RunFolderError
            If ``rounds.jsonl`` has changed since the checkpoint was written.
        """
        with refused(self.folder):
            place, found = load_newest(self.checkpoint.parent)
            self._restore(place, found)
            kept = self._rounds_until(place, found)
            drop_damaged(self.checkpoint.parent, place)
            self.rounds = parse_rounds(kept, self.folder / ROUNDS)
            self._close_lines()
            remove(self.folder / SUMMARY)
            write_file(self.folder / ROUNDS, lambda file: file.write(kept))
            self._open_lines(kept)

    def on_round_end(self, end: Any) -> None:
        """Append a round (a dataclass, see RoundLike), and write a checkpoint if one is due."""
        record = asdict(end)
        line = (json_text(record) + "\n").encode()
        with refused(self.folder):
            if self._lines is None:
                file = self.folder / ROUNDS
                self._open_lines(read_file(file) if file.exists() else b"")
            assert self._lines is not None
            self._lines.append(line)
        self.rounds.append(record)
        self._written.update(line)
        self._size += len(line)
        due = record["round"] % self.checkpoint_every == 0
        if self._parts and record["round"] > 0 and (due or not self._on_demand):
            states = {name: part.state_dict() for name, part in self._parts.items()}
            rounds = {"bytes": self._size, "sha256": self._written.hexdigest()}
            about = {"round": record["round"], "config": self._config, "rounds": rounds}
            self._state = {"round": record["round"], "parts": states}, about
            if due:
                self._save_state()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Write a checkpoint of the last complete round if the run is interrupted or fails.

        In the main thread SIGTERM ends the run as Ctrl-C does.
        """
        try:
            with sigterm_raises():
                yield
        except BaseException:
            try:
                self._save_state()
            except RunFolderError as error:
                _logger.warning("No checkpoint of the last round: %s", error)
            finally:
                self.close()
            raise
        finally:
            self._close_lines()

    @contextmanager
    def privacy(self, strategy: Any) -> Iterator[None]:
        """Write ``privacy.json`` when the block ends, however it does."""
        try:
            yield
        finally:
            if (told := strategy.privacy_record) is not None:
                with refused(self.folder):
                    write_json(self.folder / PRIVACY, dict(told))

    def finish(self, summary: Mapping[str, Any], model: Mapping[str, NDArray[Any]] | None = None) -> None:
        """Write the final model, then ``summary.json``, which marks the run as completed."""
        try:
            self._save_state()
            with refused(self.folder):
                if self._lines is not None:
                    self._lines.sync()
                if model is not None:  # Empty if models stay on the nodes.
                    save_model(self.folder, model)
                write_json(self.folder / SUMMARY, dict(summary))
        finally:
            self.close()

    def close(self) -> None:
        """Unlock the folder; idempotent."""
        self._close_lines()
        self._lock.release()

    def _open(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        if _is_begun(self.folder):
            _check_same(read_config(self.folder), config, defaults)
        else:
            known = config if "environment" in config else {"environment": environment(), **config}
            begun = {"format": FORMAT, **known}
            write_json(self.folder / CONFIG, begun)
            self._open_lines(b"")
        self._config = sha256(read_file(self.folder / CONFIG)).hexdigest()

    def _open_lines(self, content: bytes) -> None:
        self._lines = Lines(self.folder / ROUNDS)
        self._written, self._size = sha256(content), len(content)

    def _close_lines(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _save_state(self) -> None:
        if self._state is None:
            return
        with refused(self.folder):
            # After a power cut the record must have every round of the checkpoint.
            if self._lines is not None:
                self._lines.sync()
            save_newest(self.checkpoint.parent, *self._state)
        self._state = None

    def _restore(self, place: Path, found: Checkpoint) -> None:
        if found.about.get("config") != self._config:
            raise CheckpointError(
                f"{place} is not a checkpoint of this run: it was written under another config.json"
            )
        parts = _parts(place, found.state)
        if unknown := sorted(parts.keys() - self._parts.keys()):
            engine = read_config(self.folder).get("environment", {}).get("engine", "not recorded")
            engine = "--engine flower" if engine == "flower-simulation" else engine
            raise CheckpointError(
                f"{place} has the state of {', '.join(unknown)}, which this run does not have: resume it on "
                f"the engine that the run used, {engine}"
            )
        for name, state in parts.items():
            try:
                self._parts[name].load_state_dict(state)
            except CheckpointError:
                raise
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                because = f"{type(error).__name__}: {error}"
                raise CheckpointError(f"{place} has a state that {name} cannot restore: {because}") from error

    def _rounds_until(self, place: Path, found: Checkpoint) -> bytes:
        """Return the contents of ``rounds.jsonl`` at the time of the checkpoint."""
        file, last = self.folder / ROUNDS, found.state["round"]
        data = read_file(file)
        parse_rounds(data, file)
        then = found.about["rounds"]
        kept = data[: then["bytes"]]
        if sha256(kept).hexdigest() != then["sha256"]:
            raise RunFolderError(
                f"{file} is damaged: its rounds up to {last} differ from those of {place}, so the run cannot "
                "be resumed"
            )
        return kept


def _is_begun(folder: Path) -> bool:
    """Return whether a folder holds a run; RunFolderError if it holds other files."""
    beginning = {LOCK, CONFIG + ".partial"}
    others = {path.name for path in folder.iterdir()} - beginning if folder.is_dir() else {""}
    # Checked after the listing: another process may have started a run meanwhile.
    if (folder / CONFIG).exists():
        return True
    if others:
        raise RunFolderError(f"{folder} is not a run folder: it has no config.json")
    return False


def _parts(place: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's states by part; CheckpointError if a clock among them is not finite."""
    parts = state.get("parts")
    if not isinstance(state.get("round"), int) or not isinstance(parts, dict):
        raise CheckpointError(f"{place} is not the checkpoint of a run: it has no round and parts")
    for name, part in parts.items():
        clock = part.get("clock", 0.0) if isinstance(part, dict) else 0.0
        seconds = clock.get("seconds", 0.0) if isinstance(clock, dict) else clock
        if not isinstance(seconds, int | float) or not math.isfinite(seconds):
            raise CheckpointError(f"{place}: the clock of {name} must be finite, got {seconds!r} seconds")
    return parts


def _check_same(earlier: Mapping[str, Any], config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    then, now, usual = (
        _determining(json.loads(json.dumps(dict(c)))) for c in (earlier, config, {"run": dict(defaults)})
    )
    problems = []
    for key in sorted(then.keys() | now.keys()):
        # By text: NaN is itself.
        if key in then and repr(then[key]) != repr(now.get(key)):
            problems.append(f"{key} was {then[key]!r} and is {now.get(key)!r}")
        elif key not in then and (key not in usual or now[key] != usual[key]):
            valid = f"its default, {usual[key]!r}" if key in usual else "left out"
            problems.append(f"{key}, which the run did not have, must be {valid}, got {now[key]!r}")
    if problems:
        raise RunFolderError(f"The run to resume had other settings: {'; '.join(problems)}")


def _determining(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.get("run", {}).items() if not role_of(key).may_change}


# What a run ran on


_PACKAGES = ("hedgerow", "flwr", "torch", "numpy", "scipy", "networkx")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_CPUINFO = Path("/proc/cpuinfo")


def environment(*, engine: str | None = None, app: Path | None = None) -> dict[str, Any]:
    """Return time, command, machine, engine, versions and commits as JSON values; None for unknown ones.

    Parameters
    ----------
    engine : str or None (default: None)
        ``"inprocess"``, ``"flower-simulation"`` or ``"flower-deployment"``.
    app : Path or None (default: None)
        The app's folder, whose repository's state is ``app-git``. ``git`` is the state of this library's
        checkout.
    """
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(sys.argv),
        "engine": engine,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "cpu": _cpu_model(),
        "torch": _torch_build(),
        "threads": {"torch": _torch_threads(), **{name: os.environ.get(name) for name in _THREADS}},
        "packages": {name: _version(name) for name in _PACKAGES},
        "git": _git_state(Path(__file__).resolve().parent),
        "app-git": None if app is None else _git_state(app),
    }


def _command(arguments: Sequence[str]) -> str:
    """Return the command line if it is Hedgerow's; of another program only the name.

    Another program's arguments may hold passwords.
    """
    program = Path(arguments[0] if arguments else "")
    ours = program.name == "hedgerow" or program.parts[-2:] == ("sim", "__main__.py")
    return shlex.join(["hedgerow", *arguments[1:]]) if ours else program.name


def code_folder(thing: Any) -> Path | None:
    """Return the folder of the code that defines a function or class; None if it has none."""
    try:
        return Path(inspect.getfile(thing)).resolve().parent
    except (TypeError, OSError):
        return None


def _cpu_model() -> str | None:
    try:
        for line in _CPUINFO.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except (OSError, UnicodeDecodeError):
        pass
    # Empty on most systems; the model's name on some without /proc.
    return platform.processor() or None


def _torch_build() -> dict[str, Any] | None:
    """Return the properties of torch that determine its kernels' bits: build and instruction set."""
    try:
        import torch  # noqa: PLC0415  # Reading a run needs no torch.
    except ImportError:
        return None
    return {
        "version": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": torch.backends.mkl.is_available(),  # type: ignore[no-untyped-call]
        "onednn": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
    }


def _torch_threads() -> int | None:
    try:
        import torch  # noqa: PLC0415
    except ImportError:
        return None
    return torch.get_num_threads()


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the repository that holds a folder, and whether files differ from it."""
    command = ["git", "--no-optional-locks", "-C", str(folder), "status", "--porcelain=v2", "--branch"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    commit = lines[0].removeprefix("# branch.oid ")
    if commit == "(initial)":
        return None
    return {"commit": commit, "modified": any(not line.startswith("# ") for line in lines)}
