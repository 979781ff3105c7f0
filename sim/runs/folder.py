"""The files of a run's folder, each read whole or refused, and the lock of who writes them."""

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hedgerow.sim.runs.durable import write_file
from hedgerow.wire.printable import quoted

__all__ = [
    "FORMAT",
    "Lock",
    "RunFolderError",
    "in_use",
    "json_text",
    "lost_replies",
    "new_run_folder",
    "parse_rounds",
    "read_config",
    "read_rounds",
    "recorded_settings",
    "refused",
    "runs_folder",
    "shown_settings",
    "write_json",
]

# Of a run's folder. A config.json that names none is of format 1, which is read as this one is.
FORMAT = 2
CONFIG, ROUNDS, SUMMARY, LOCK = "config.json", "rounds.jsonl", "summary.json", ".lock"
# Stands for an infinity while a text is made; no text that anybody writes.
_INFINITY = "\ue000infinity\ue000"
# Flower's log, without Flower: reading a folder needs none of it.
_logger = logging.getLogger("flwr")


class RunFolderError(ValueError):
    """A folder is not that of a run, or of a run with other settings; or it cannot be read or written."""


def runs_folder(parent: str | os.PathLike[str]) -> Path:
    """Return where the folders of runs go, given the setting ``output-dir``.

    A relative one is taken from the environment variable ``HEDGEROW_OUTPUT_DIR``, else from the working
    directory, which under ``flwr run`` is the one where Flower's local SuperLink was started.
    """
    return Path(os.environ.get("HEDGEROW_OUTPUT_DIR", Path.cwd())) / Path(parent).expanduser()


def new_run_folder(parent: str | os.PathLike[str], name: str) -> Path:
    """Make and return a folder of a new run, ``<parent>/<name>-<UTC time>``, absolute; see ``runs_folder``.

    Raises
    ------
    RunFolderError
        If the disk takes no folder.
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
    """Turn what the disk refuses into one clear error.

    Raises
    ------
    RunFolderError
        For every OSError.
    """
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"{error.filename or folder}: {error.strerror or error}") from error


class Lock:
    """Keeps other recorders from writing into a run's folder, until ``release`` or this process's end.

    Parameters
    ----------
    folder : Path
        The run's folder.

    Raises
    ------
    RunFolderError
        If another recorder, of any process, holds it.
    """

    def __init__(self, folder: Path) -> None:
        # Whoever asks whether the run is being written holds it for a moment.
        self._lock = FileLock(folder / LOCK, timeout=1)
        with refused(folder):
            try:
                self._lock.acquire()
            except Timeout:
                raise RunFolderError(
                    f"{folder} is in use: another process writes this run; wait until it ends, or stop it"
                ) from None

    def release(self) -> None:
        """Let others in; more than once is once."""
        self._lock.release()


def in_use(folder: Path) -> bool:
    """Return whether a process writes a run's folder now."""
    if not (folder / LOCK).exists():
        return False
    lock = FileLock(folder / LOCK, blocking=False)
    try:
        lock.acquire()
    except OSError:
        return True
    lock.release()
    return False


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a run folder's ``config.json``.

    Raises
    ------
    RunFolderError
        If there is no readable one, or a newer version wrote it.
    """
    file = Path(folder) / CONFIG
    try:
        with refused(file.parent):
            config = _parsed(file.read_bytes(), str(file))
    except RunFolderError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise RunFolderError(f"{folder} is not a run folder: it has no config.json") from error
        raise
    said = config.get("format", 1)
    if type(said) is not int or not 1 <= said <= FORMAT:
        newer = type(said) is int and said > FORMAT
        raise RunFolderError(
            f"{file}: format must be an integer from 1 to {FORMAT}, or left out for 1, got {quoted(said)}"
            + ("; a newer Hedgerow wrote it, and reads it" if newer else "")
        )
    if not isinstance(config.get("run", {}), dict):
        raise RunFolderError(f"{file} is damaged: 'run' is not a mapping of settings")
    return config


def recorded_settings(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the run config that a run folder's ``config.json`` holds.

    Raises
    ------
    RunFolderError
        As ``read_config``; and if it holds none.
    """
    config = read_config(folder)
    if "run" not in config:
        raise RunFolderError(f"{Path(folder) / CONFIG} is damaged: it has no 'run'")
    settings: dict[str, Any] = config["run"]
    return settings


def shown_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run for people: ``engine`` is the one that carried it, whatever was asked."""
    settings, begun = dict(config.get("run", {})), config.get("environment")
    carried = begun.get("engine") if isinstance(begun, dict) else None
    if "engine" in settings and isinstance(carried, str):
        settings["engine"] = carried
    return settings


def read_rounds(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the rounds of a run folder; a last line cut off by a kill is left out.

    Raises
    ------
    RunFolderError
        If there are no readable ones, or one appears twice.
    """
    file = Path(folder) / ROUNDS
    with refused(file.parent):
        return parse_rounds(file.read_bytes(), file)


def parse_rounds(data: bytes, file: Path) -> list[dict[str, Any]]:
    """Return the rounds that ``rounds.jsonl`` held, as ``read_rounds``."""
    rounds: list[dict[str, Any]] = []
    # What follows the last line's end was cut off.
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
    """Return a value as JSON, which has no infinity: in its place stands a number that is read as one."""
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
    """Write a JSON file aside and rename it: a reader sees the old one or the new one."""
    text = json_text(value, indent=2, sort_keys=True) + "\n"
    write_file(path, lambda file: file.write(text.encode()))


def _parsed(data: bytes, place: str) -> dict[str, Any]:
    """Return the JSON object that stands at a place, such as a file."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"{place} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise RunFolderError(f"{place} is damaged: it must hold a mapping, got a {type(value).__name__}")
    return value


def lost_replies(rounds: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the replies that records of rounds count as lost, by reason."""
    lost: dict[str, int] = {}
    for record in rounds:
        for reason, count in record.get("rejected", {}).items():
            lost[reason] = lost.get(reason, 0) + count
    return lost
