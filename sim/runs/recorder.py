"""A run's folder: what determined it, and one line a round, readable with nothing but ``json``.

``config.json`` is written before the first round; ``rounds.jsonl`` grows by one flushed line a round, so
that a killed run leaves all it had done; ``checkpoint/`` lets it go on. Nothing half-written is ever read
as a result: every other file is written aside and renamed.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from hedgerow.sim.runs.checkpoint import CheckpointError, load_checkpoint, save_arrays, save_checkpoint
from hedgerow.sim.runs.environment import environment
from hedgerow.sim.signals import sigterm_raises

__all__ = [
    "RESUME_MAY_CHANGE",
    "RoundLike",
    "RunFolderError",
    "RunRecorder",
    "Stateful",
    "new_run_folder",
    "read_config",
    "read_rounds",
    "write_json",
]

# Settings that do not determine the rounds already run: where results go, how long to wait, how far to go.
RESUME_MAY_CHANGE = (
    "checkpoint-every",
    "checkpoint-nodes",
    "iterations",
    "output-dir",
    "quiet",
    "resume",
    "round-timeout",
)

class RunFolderError(ValueError):
    """A folder is not that of a run, or of a run with other settings."""


class RoundLike(Protocol):
    """What a strategy tells a callback at the end of a round: a dataclass with these fields at least."""

    round: int
    central: dict[str, Any]
    bits: int
    sim_seconds: float


@runtime_checkable
class Stateful(Protocol):
    """What can be saved and restored; the state is never changed after it was given out."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state: JSON values and ndarrays, nested."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""


def new_run_folder(parent: str | os.PathLike[str], name: str) -> Path:
    """Make and return a folder of a new run, ``<parent>/<name>-<UTC time>``, absolute.

    A relative ``parent`` is taken from the environment variable ``HEDGEROW_OUTPUT_DIR``, else from the
    working directory, which under ``flwr run`` is the one where Flower's local SuperLink was started.
    """
    base = Path(os.environ.get("HEDGEROW_OUTPUT_DIR", Path.cwd())) / Path(parent).expanduser()
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
        folder = (base / f"{name}-{stamp}{suffix}").resolve()
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"{base / f'{name}-{stamp}'} and 998 more")


class RunRecorder:
    """Writes a run's folder; give ``on_round_end`` to the strategy and run it under ``guard``.

    Parameters
    ----------
    folder : Path
        An existing folder: empty for a new run, that of an earlier run to go on with it.
    config : Mapping[str, Any]
        Everything that determined the run, JSON values only.
    checkpoint_every : int (default: 10)
        Rounds between two checkpoints, >= 1. One more is written when the run is interrupted.

    Raises
    ------
    RunFolderError
        If the folder holds a run with another config (the keys that differ are named), or files but
        no run.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], *, checkpoint_every: int = 10) -> None:
        self.folder = folder
        self.checkpoint_every = checkpoint_every
        self.rounds: list[dict[str, Any]] = []
        self._parts: dict[str, Stateful] = {}
        self._on_demand = False
        self._state: Mapping[str, Any] | None = None
        if (folder / "config.json").exists():
            _check_same(read_config(folder), config)
        elif not folder.is_dir() or any(folder.iterdir()):
            raise RunFolderError(f"{folder} is not the folder of a run: it has no config.json")
        else:
            write_json(folder / "config.json", {**config, "environment": environment()})
        self._file: TextIOWrapper = (folder / "rounds.jsonl").open("a", encoding="utf-8")

    @property
    def checkpoint(self) -> Path:
        """Where the checkpoint lies."""
        return self.folder / "checkpoint" / "latest.npz"

    def keep_state(self, **parts: object) -> None:
        """Put the state of these parts (``strategy=…, engine=grid``) into checkpoints.

        Parts without ``state_dict``, Flower's own grids for example, are left out: they keep nothing
        that could be saved. With a part whose ``on_demand`` is true all are asked only when a checkpoint
        is due, and an interrupted run falls back to the last one.
        """
        self._parts = {name: part for name, part in parts.items() if isinstance(part, Stateful)}
        self._on_demand = any(getattr(part, "on_demand", False) for part in self._parts.values())

    def resume(self) -> None:
        """Load the checkpoint into the parts; the rounds after it are struck from the record.

        Raises
        ------
        CheckpointError
            If the folder has no checkpoint, or one that holds the state of another engine.
        """
        state = load_checkpoint(self.checkpoint)
        if unknown := sorted(state["parts"].keys() - self._parts.keys()):
            raise CheckpointError(
                f"{self.checkpoint} holds the state of {', '.join(unknown)}, which this run does not have: "
                "resume it on the engine that it was started on"
            )
        for name, part_state in state["parts"].items():
            self._parts[name].load_state_dict(part_state)
        self.rounds = [record for record in read_rounds(self.folder) if record["round"] <= state["round"]]
        self._file.close()
        (self.folder / "summary.json").unlink(missing_ok=True)
        lines = "".join(json.dumps(record) + "\n" for record in self.rounds)
        _replace_text(self.folder / "rounds.jsonl", lines)
        self._file = (self.folder / "rounds.jsonl").open("a", encoding="utf-8")

    def on_round_end(self, end: Any) -> None:
        """Append a round (a dataclass, see RoundLike), and write a checkpoint if one is due."""
        record = asdict(end)
        self.rounds.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        due = record["round"] % self.checkpoint_every == 0
        if self._parts and record["round"] > 0 and (due or not self._on_demand):
            states = {name: part.state_dict() for name, part in self._parts.items()}
            self._state = {"round": record["round"], "parts": states}
            if due:
                self._save_state()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Write a checkpoint of the last whole round if the run is interrupted or fails.

        SIGTERM then ends the run as Ctrl-C does, where the run owns the process's main thread.
        """
        try:
            with sigterm_raises():
                yield
        except BaseException:
            self._save_state()
            raise
        finally:
            self._file.close()

    def finish(self, summary: Mapping[str, Any], model: Mapping[str, NDArray[Any]] | None = None) -> None:
        """Write the final model, then ``summary.json``, whose presence says that the run ended by itself."""
        self._file.close()
        self._save_state()
        if model is not None:
            aside = self.folder / "model.partial"
            save_arrays(aside, model)
            aside.replace(self.folder / "model.npz")
        write_json(self.folder / "summary.json", dict(summary))

    def _save_state(self) -> None:
        if self._state is not None:
            save_checkpoint(self.checkpoint, self._state)


def _check_same(earlier: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    then, now = (_determining(c) for c in (earlier, json.loads(json.dumps(dict(config)))))
    if differing := sorted(key for key in then.keys() | now.keys() if then.get(key) != now.get(key)):
        changes = "; ".join(f"{key} was {then.get(key)!r} and is {now.get(key)!r}" for key in differing)
        raise RunFolderError(f"The run to go on with had other settings: {changes}")


def _determining(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.get("run", {}).items() if key not in RESUME_MAY_CHANGE}


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a run folder's ``config.json``.

    Raises
    ------
    RunFolderError
        If there is none.
    """
    try:
        config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunFolderError(f"{folder} is not the folder of a run: it has no config.json") from error
    return config


def read_rounds(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the rounds of a run folder; a last line cut off by a kill is left out."""
    rounds = []
    for line in (Path(folder) / "rounds.jsonl").read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            rounds.append(json.loads(line))
    return rounds


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file aside and rename it: a reader sees the old one or the new one."""
    _replace_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def _replace_text(path: Path, text: str) -> None:
    aside = path.with_suffix(".partial")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
