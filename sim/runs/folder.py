"""Read and write the files of a run's folder, and lock it.

What a folder holds is data that others may have written: only regular files of a sane size are read.
"""

import errno
import json
import logging
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from hedgerow.sim.runs.durable import write_file
from hedgerow.wire.paths import foreign_path
from hedgerow.wire.printable import quoted

# Format of a run's folder. A config.json without a format has format 1, which is read like this one.
FORMAT = 2
CONFIG, ROUNDS, SUMMARY, LOCK = "config.json", "rounds.jsonl", "summary.json", ".lock"
PRIVACY = "privacy.json"
# Largest file of text (bytes): a million rounds of 1 kB.
_LARGEST_TEXT = 1 << 30
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFLNK: "a link",
    stat.S_IFSOCK: "a socket",
}
# Placeholder for an infinity in JSON text, in a private-use character so that no real text equals it.
_INFINITY = "\ue000infinity\ue000"
# Errors that damaged records can cause.
DAMAGES = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
# Flower's logger by its name: reading a folder must not import Flower.
_logger = logging.getLogger("flwr")


class RunFolderError(ValueError):
    """A folder is not a run's, or of a run with other settings, or it cannot be read or written."""


def runs_folder(parent: str | os.PathLike[str]) -> Path:
    """Return the parent folder of run folders, from the setting ``output-dir``.

    A relative path starts at the environment variable ``HEDGEROW_OUTPUT_DIR``, or else at the working
    directory, which under ``flwr run`` is that of Flower's local SuperLink. RunFolderError for a path of
    another system.
    """
    if wrong := foreign_path(os.fspath(parent)):
        raise RunFolderError(f"output-dir must be a folder, got {quoted(str(parent))}: {wrong}")
    return Path(os.environ.get("HEDGEROW_OUTPUT_DIR", Path.cwd())) / Path(parent).expanduser()


def new_run_folder(parent: str | os.PathLike[str], name: str) -> Path:
    """Create the folder of a new run, ``<parent>/<name>-<UTC time>``, and return its absolute path.

    ``parent`` as in ``runs_folder``; RunFolderError if the folder cannot be created.
    """
    base = runs_folder(parent)
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    with refused(base):
        for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
            folder = (base / f"{name}-{stamp}{suffix}").resolve()
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                continue
            return folder
    raise FileExistsError(f"{base / f'{name}-{stamp}'} and 998 numbered folders exist")


@contextmanager
def refused(folder: Path) -> Iterator[None]:
    """Raise every OSError as a RunFolderError with a clear message."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"{error.filename or folder}: {error.strerror or error}") from error


class Lock:
    """Locks a run's folder against other recorders, until ``release`` or the end of this process.

    Raises RunFolderError if another recorder, in any process, holds the lock.
    """

    def __init__(self, folder: Path) -> None:
        # ``in_use`` holds the lock for a moment, hence the timeout.
        self._lock = FileLock(folder / LOCK, timeout=1)
        with refused(folder):
            try:
                self._lock.acquire()
            except Timeout:
                raise RunFolderError(
                    f"{folder} is in use: another process writes this run; wait until it ends, or stop it"
                ) from None

    def release(self) -> None:
        """Release the lock; idempotent."""
        self._lock.release()


def in_use(folder: Path) -> bool:
    """Return whether a process is writing a run's folder."""
    if not (folder / LOCK).exists():
        return False
    lock = FileLock(folder / LOCK, blocking=False)
    try:
        lock.acquire()
    except OSError:
        return True
    lock.release()
    return False


def run_folders(place: Path) -> list[Path]:
    """Return a run's folder itself; of another folder, the run folders of runs and sweeps in it."""
    if (place / CONFIG).is_file():
        return [place]
    return sorted({file.parent for name in (CONFIG, ROUNDS) for file in place.rglob(f"*/{name}")})


def run_state(folder: Path) -> str:
    """Return whether a run is ``waiting`` (for its first round), ``running``, ``stopped`` or ``finished``."""
    if (folder / SUMMARY).exists():
        return "finished"
    rounds = folder / ROUNDS
    if not rounds.exists() or not rounds.stat().st_size:
        return "waiting"
    return "running" if in_use(folder) else "stopped"


def opened(path: Path) -> IO[bytes]:
    """Open a regular file for reading, without waiting; an OSError that names the file for anything else."""
    # Checked before the opening too, since opening a device may act on it.
    _check_regular(path, os.lstat(path))
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    file = open(os.open(path, flags), "rb")  # noqa: SIM115
    try:
        _check_regular(path, os.fstat(file.fileno()))
    except OSError:
        file.close()
        raise
    return file


def _check_regular(path: Path, about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode):
        kind = _KINDS.get(stat.S_IFMT(about.st_mode), "a device")
        raise OSError(errno.EINVAL, f"must be a regular file, got {kind}", str(path))


def read_file(path: Path) -> bytes:
    """Return the contents of a file of text; OSError as in ``opened``, or if it is larger than 1 GiB."""
    with opened(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > _LARGEST_TEXT:
            raise OSError(errno.EINVAL, f"must have at most {_LARGEST_TEXT} bytes, got {size}", str(path))
        return file.read(_LARGEST_TEXT)


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file; RunFolderError if it is unreadable or something else."""
    with refused(path.parent):
        return _parsed(read_file(path), str(path))


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a run folder's ``config.json``; RunFolderError if it is unreadable or of a newer format."""
    file = Path(folder) / CONFIG
    try:
        config = read_json(file)
    except RunFolderError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise RunFolderError(f"{folder} is not a run folder: it has no config.json") from error
        raise
    form = config.get("format", 1)
    if type(form) is not int or not 1 <= form <= FORMAT:
        newer = type(form) is int and form > FORMAT
        raise RunFolderError(
            f"{file}: format must be an integer from 1 to {FORMAT}, or left out for 1, got {quoted(form)}"
            + ("; it was written by a newer Hedgerow" if newer else "")
        )
    if not isinstance(config.get("run", {}), dict):
        raise RunFolderError(f"{file} is damaged: 'run' is not a mapping of settings")
    return config


def recorded_settings(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the run config in a run folder's ``config.json``; RunFolderError if there is none."""
    config = read_config(folder)
    if "run" not in config:
        raise RunFolderError(f"{Path(folder) / CONFIG} is damaged: it has no 'run'")
    settings: dict[str, Any] = config["run"]
    return settings


def shown_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's settings for display: ``engine`` is the one that ran it, not the requested one."""
    settings, used = dict(config.get("run", {})), recorded_engine(config)
    if "engine" in settings and used:
        settings["engine"] = used
    return settings


def recorded_engine(config: Mapping[str, Any]) -> str:
    """Return the engine that ran a run; empty if its ``config.json`` names none."""
    environment = config.get("environment")
    used = environment.get("engine") if isinstance(environment, dict) else None
    return used if isinstance(used, str) else ""


def read_rounds(folder: str | os.PathLike[str], name: str = ROUNDS) -> list[dict[str, Any]]:
    """Return the rounds in a file of a run folder, without a truncated last line.

    Raises RunFolderError if a round is unreadable or out of order.
    """
    file = Path(folder) / name
    with refused(file.parent):
        return parse_rounds(read_file(file), file)


def parse_rounds(data: bytes, file: Path) -> list[dict[str, Any]]:
    """Return the rounds in the contents of ``rounds.jsonl``, as ``read_rounds`` does."""
    rounds: list[dict[str, Any]] = []
    # The part after the last newline was cut off when the run was killed.
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        place = f"{file}, line {number},"
        record = _parsed(line, place)
        if not isinstance(record.get("round"), int):
            raise RunFolderError(f"{place} is damaged: it has no round")
        if rounds and record["round"] <= rounds[-1]["round"]:
            raise RunFolderError(
                f"{place} is damaged: round {record['round']} follows round {rounds[-1]['round']}"
            )
        rounds.append(record)
    return rounds


def json_text(value: Any, **options: Any) -> str:
    """Return a value as JSON, with infinities as 1e999, which JSON readers take for infinity."""
    text = json.dumps(_with_names(value), **options)
    return text.replace(json.dumps(_INFINITY), "1e999").replace(json.dumps("-" + _INFINITY), "-1e999")


def _with_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_names(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_names(one) for one in value]
    if isinstance(value, float) and math.isinf(value):
        return _INFINITY if value > 0 else "-" + _INFINITY
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    text = json_text(value, indent=2, sort_keys=True) + "\n"
    write_file(path, lambda file: file.write(text.encode()))


def _parsed(data: bytes, place: str) -> dict[str, Any]:
    """Parse a JSON object; ``place`` names its source in errors."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"{place} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise RunFolderError(f"{place} is damaged: it must hold a mapping, got a {type(value).__name__}")
    return value


def lost_replies(rounds: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of lost replies in the rounds, by reason."""
    lost: dict[str, int] = {}
    for record in rounds:
        for reason, count in record.get("rejected", {}).items():
            lost[reason] = lost.get(reason, 0) + count
    return lost
