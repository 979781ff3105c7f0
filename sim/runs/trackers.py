"""Experiment trackers beside the run folder: MLflow, TensorBoard, Weights & Biases.

A tracker is told the settings, the numbers of each round and how the run ended. It is an observer: what it
raises costs one warning and is counted, never the run. ``trackers.json`` in the run's folder keeps which
run of a tracker this one is, so that a run that goes on goes on there too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from logging import INFO, WARNING
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Protocol, Self
from uuid import uuid4

from flwr.common import log

from hedgerow.sim.runs.folder import write_json
from hedgerow.sim.runs.results import SOURCES, numbers
from hedgerow.wire.checks import did_you_mean
from hedgerow.wire.printable import quoted, shown

__all__ = [
    "TRACKERS",
    "TensorBoardLog",
    "Tracked",
    "Tracker",
    "Tracking",
    "check_trackers",
    "scalars_of",
    "track_with",
]

FILE = "trackers.json"
# A tracker whose server is gone would hold up every round.
_PATIENCE = 3


@dataclass(frozen=True)
class Tracked:
    """What a tracker gets about a run before its first round.

    Parameters
    ----------
    name : str
        The app's, which is the experiment's or project's too.
    settings : dict
        What determined the run, flat: its run config, versions, commit.
    folder : Path or None
        The run's folder.
    known : dict or None
        What ``Tracker.identity`` said when the run was begun; None for a run that begins now.
    done : int
        The last round that is recorded already; -1 for none.
    """

    name: str
    settings: Mapping[str, Any]
    folder: Path | None = None
    known: Mapping[str, Any] | None = None
    done: int = -1


class Tracker(Protocol):
    """One run in an experiment tracker. ``Tracking`` reports its errors."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """What finds this run again, JSON values."""

    def on_round_end(self, server_round: int, scalars: Mapping[str, float]) -> None:
        """Take the numbers of a round; the round is their step."""

    def end(self, status: str) -> None:
        """Close the run: ``completed``, ``failed`` or ``interrupted``."""


def scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record of ``rounds.jsonl``, by the tags that every tracker gives them.

    ``<source>/<metric>`` of the metrics, named as the app names them (``central/loss``); ``cost/<what>``,
    traffic and simulated seconds since the start and the round's real ones; ``replies/<what>``; and
    ``lost/<reason>`` for each reason.
    """
    out = {f"{source}/{metric}": value for source in SOURCES for metric, value in numbers(record, source)}
    for name in ("bits", "payload_bytes", "sim_seconds", "wall_seconds"):
        if record.get(name) is not None:
            out[f"cost/{name}"] = float(record[name])
    for name in ("sent", "accepted"):
        if name in record:
            out[f"replies/{name}"] = float(record[name])
    if "rejected" in record:
        out["replies/lost"] = float(sum(record["rejected"].values()))
        out |= {f"lost/{reason}": float(count) for reason, count in record["rejected"].items()}
    return out


class TensorBoardLog:
    """A TensorBoard log of one run.

    Parameters
    ----------
    folder : Path
        Where the log goes.
    purge_from : int or None (default: None)
        The first step that is written again: an earlier log's entries from this step on are hidden.
    """

    def __init__(self, folder: Path, purge_from: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

        self._folder = folder
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge_from)

    @classmethod
    def of(cls, run: Tracked) -> TensorBoardLog:
        """Return the log of a run, in its folder where it has one."""
        place = Path("tensorboard") / f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        if run.folder is not None:
            place = run.folder / "tensorboard"
        log = cls(place, None if run.known is None else run.done + 1)
        if run.known is None:
            log._writer.add_text("settings", json.dumps(dict(run.settings), indent=2, default=str))
        return log

    @property
    def identity(self) -> Mapping[str, Any]:
        """Where it lies."""
        return {"log": self._folder.name}

    def on_round_end(
        self, server_round: int, scalars: Mapping[str, float], walltime: float | None = None
    ) -> None:
        """Write a round's numbers, at a time in seconds (now, if None)."""
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, server_round, walltime=walltime)
        self._writer.flush()

    def end(self, status: str) -> None:
        """Write how the run ended, and close the log."""
        self._writer.add_text("status", status)
        self._writer.close()

    def close(self) -> None:
        """Close the log."""
        self._writer.close()


class _MLflow:
    """A run of MLflow, by its client: what the app itself does with MLflow's active run is left alone.

    Without ``MLFLOW_TRACKING_URI`` it goes to the files of ``./mlruns``.
    """

    _STATUS: Mapping[str, str] = MappingProxyType(
        {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
    )
    # MLflow's own bounds of one call, and of one value.
    _PARAMS, _METRICS, _LENGTH = 100, 1000, 6000

    def __init__(self, run: Tracked) -> None:
        # Set before the import, which reads them. It tells its makers of its use unless told not to, and
        # tries for minutes to reach a server that is gone.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        uri = (run.known or {}).get("uri") or os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = Path("mlruns").resolve().as_uri()
        if uri.startswith("file:"):
            # MLflow now prefers a data base, whose making takes seconds and which a sweep's runs would race
            # for; its files are "in maintenance mode", and have to be asked for so.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        import mlflow  # noqa: PLC0415
        from mlflow.entities import Metric, Param  # noqa: PLC0415

        self._metric, self._uri = Metric, uri
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        if run.known is not None:
            self._run_id = str(run.known["run_id"])
            self._client.update_run(self._run_id, status="RUNNING")
            return
        made = self._client.create_run(
            self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.name),
            run_name=run.folder.name if run.folder is not None else run.name,
        )
        self._run_id = made.info.run_id
        params = [Param(_plain_name(key), str(value)[: self._LENGTH]) for key, value in run.settings.items()]
        for first in range(0, len(params), self._PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + self._PARAMS])

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except Exception:  # Another run of a sweep may have been quicker.
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"run_id": self._run_id, "uri": self._uri}

    def on_round_end(self, server_round: int, scalars: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(_plain_name(tag), value, now, server_round) for tag, value in scalars.items()]
        for first in range(0, len(metrics), self._METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + self._METRICS])

    def end(self, status: str) -> None:
        self._client.set_terminated(self._run_id, self._STATUS[status])


class _Wandb:
    """A run of Weights & Biases: in files under ``./wandb`` unless ``WANDB_MODE`` says otherwise."""

    def __init__(self, run: Tracked) -> None:
        mode = os.environ.setdefault("WANDB_MODE", "offline")
        if mode == "offline":
            # What is to stay here stays here.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # noqa: PLC0415

        known = run.known or {}
        self._place = str(known.get("dir") or os.environ.get("WANDB_DIR") or Path.cwd())
        self._run = wandb.init(
            dir=self._place,
            project=os.environ.get("WANDB_PROJECT") or _plain_name(run.name),
            name=run.folder.name if run.folder is not None else None,
            id=known.get("id") or uuid4().hex[:8],
            resume="allow",
            # The app may have a run of its own.
            reinit="create_new",
            config=dict(run.settings),
            settings=wandb.Settings(console="off", disable_code=True, silent=True),
        )

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"id": self._run.id, "dir": self._place}

    def on_round_end(self, server_round: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=server_round)

    def end(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "completed" else 1)


class _Kind(NamedTuple):
    """A tracker: the modules that it needs, the extra that brings them, how a run is opened."""

    modules: tuple[str, ...]
    extra: str
    open: Callable[[Tracked], Tracker]


TRACKERS: Mapping[str, _Kind] = MappingProxyType(
    {
        "mlflow": _Kind(("mlflow",), "mlflow", _MLflow),
        "tensorboard": _Kind(("torch", "tensorboard"), "tensorboard", TensorBoardLog.of),
        "wandb": _Kind(("wandb",), "wandb", _Wandb),
    }
)


def check_trackers(names: Sequence[str], key: str = "--track") -> tuple[str, ...]:
    """Return the trackers asked for, each once.

    Raises
    ------
    ValueError
        If there is no such tracker, or its package is not installed.
    """
    for name in names:
        if name not in TRACKERS:
            meant = did_you_mean(name, TRACKERS)
            raise ValueError(
                f"{key} must be one of {', '.join(TRACKERS)}, got {quoted(name)}"
                f"{f' ({meant})' if meant else ''}"
            )
        kind = TRACKERS[name]
        if missing := [module for module in kind.modules if not _is_installed(module)]:
            raise ValueError(
                f"{key} {name}: {missing[0]} is not installed; pip install 'hedgerow[{kind.extra}]'"
            )
    return tuple(dict.fromkeys(names))


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # A module that says nothing of where it is from.
        return False


# For the suite's apps, which record themselves: not a setting.
_asked: ContextVar[tuple[str, ...]] = ContextVar("trackers", default=())


@contextmanager
def track_with(names: Sequence[str], key: str = "--track") -> Iterator[None]:
    """Let runs that are begun in this block be tracked.

    Raises
    ------
    ValueError
        As ``check_trackers``.
    """
    token = _asked.set(check_trackers(names, key))
    try:
        yield
    finally:
        _asked.reset(token)


class Tracking:
    """All trackers of a run, none of which can stop it; give ``on_round_end`` the run's records in its block.

    Parameters
    ----------
    config : Mapping[str, Any]
        The run's ``config.json``.
    folder : Path or None (default: None)
        The run's folder.
    done : int (default: -1)
        The last round that is recorded already; -1 for none.

    Attributes
    ----------
    failures : Counter[str]
        Calls that a tracker did not take, by its name.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path | None = None, done: int = -1) -> None:
        self.failures: Counter[str] = Counter()
        self._config, self._folder, self._done = config, folder, done
        self._open: dict[str, Tracker] = {}
        self._identities: dict[str, dict[str, Any]] = {}
        self._in_a_row: Counter[str] = Counter()

    def __enter__(self) -> Self:
        names = _asked.get()
        if not names:
            return self
        known = self._known()
        self._identities = dict(known)
        settings = _settings(self._config)
        for name in names:
            run = Tracked(
                str(self._config.get("app", "run")),
                settings,
                self._folder,
                known.get(name) if self._done >= 0 else None,
                self._done,
            )
            with self._guarded(name):
                self._open[name] = TRACKERS[name].open(run)
                self._identities[name] = dict(self._open[name].identity)
        self._write()
        return self

    def on_round_end(self, record: Mapping[str, Any]) -> None:
        """Tell of a round, by its record in ``rounds.jsonl``."""
        scalars = scalars_of(record) if self._open else {}
        for name, tracker in self._open.items():
            if self._in_a_row[name] >= _PATIENCE:
                self.failures[name] += 1
                continue
            with self._guarded(name):
                tracker.on_round_end(record["round"], scalars)
                self._in_a_row[name] = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stopped = "failed" if kind is not None and issubclass(kind, Exception) else "interrupted"
        status = "completed" if kind is None else stopped
        for name, tracker in self._open.items():
            with self._guarded(name):
                tracker.end(status)
        if self.failures:
            lost = ", ".join(f"{name}: {count}" for name, count in self.failures.items())
            log(INFO, "Failed calls to trackers: %s", lost)
            self._write()

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failures[name] += 1
            self._in_a_row[name] += 1
            if self.failures[name] == 1:
                reason = shown(f"{type(error).__name__}: {error}", 300)
                log(WARNING, "%s does not have all of the run (%s). The run continues.", name, reason)

    def _known(self) -> dict[str, dict[str, Any]]:
        if self._folder is None:
            return {}
        try:
            known = json.loads((self._folder / FILE).read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(known, dict):
            return {}
        return {str(name): said for name, said in known.items() if isinstance(said, dict)}

    def _write(self) -> None:
        if self._folder is None:
            return
        said = {
            name: {**self._identities.get(name, {}), "failed-calls": self.failures[name]}
            for name in self._identities.keys() | self.failures.keys()
        }
        with suppress(OSError, TypeError, ValueError):
            write_json(self._folder / FILE, said)


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what determined a run, flat: its run config, and as ``hedgerow.*`` what else is known of it."""
    environment = config.get("environment") or {}
    said = {
        **{key: config.get(key) for key in ("app", "version", "nodes", "realism", "resumes")},
        **{key: environment.get(key) for key in ("engine", "python", "platform", "cpu")},
        **{f"package.{name}": found for name, found in (environment.get("packages") or {}).items()},
        **{f"{key}.commit": (environment.get(key) or {}).get("commit") for key in ("git", "app-git")},
    }
    known = {f"hedgerow.{key}": value for key, value in said.items() if value is not None}
    return {**config.get("run", {}), **known}


def _plain_name(name: str) -> str:
    """Return a name as MLflow takes it: a path of plain words, at most one level deep, that climbs nowhere.

    Names of metrics come from nodes, which may be anybody.
    """
    head, slash, rest = name.partition("/")
    words = [re.sub(r"[^\w .-]", "_", word)[:200].strip(". ") or "_" for word in (head, rest)]
    return f"{words[0]}/{words[1]}" if slash else words[0]
