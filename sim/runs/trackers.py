"""Experiment trackers beside the run folder: MLflow, TensorBoard, Weights & Biases.

A tracker gets the settings, each round's numbers and the final status. Its errors are counted, and logged
once; they never end the run. ``trackers.json`` in the run's folder keeps the tracker's id of the run, so that
a resumed run continues there too.
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
from types import MappingProxyType
from typing import Any, Protocol, Self
from uuid import uuid4

from flwr.common import log

from hedgerow.sim.runs.checkpoint import NPZ, SAFETENSORS
from hedgerow.sim.runs.folder import CONFIG, read_json, write_json
from hedgerow.sim.runs.results import SOURCES, numbers
from hedgerow.wire.checks import did_you_mean
from hedgerow.wire.printable import quoted, shown

FILE = "trackers.json"
# Consecutive failures after which a tracker is skipped: an unreachable server would delay every round.
_PATIENCE = 3


@dataclass(frozen=True)
class Tracked:
    """What a tracker knows about a run before its first round.

    Parameters
    ----------
    name : str
        The app's name, also used for the tracker's experiment or project.
    settings : dict
        Run config, versions and commit in one flat mapping.
    folder : Path or None
        The run's folder.
    known : dict or None
        ``Tracker.identity`` of a run that is resumed; None for a new run.
    done : int
        The last recorded round; -1 for none.
    """

    name: str
    settings: Mapping[str, Any]
    folder: Path | None = None
    known: Mapping[str, Any] | None = None
    done: int = -1


class Tracker(Protocol):
    """One run in an experiment tracker; ``Tracking`` catches its errors."""

    identity: Mapping[str, Any]  # JSON values with which a resumed run opens this run again

    def on_round_end(self, server_round: int, scalars: Mapping[str, float]) -> None:
        """Log a round's numbers; the round is their step."""

    def end(self, status: str) -> None:
        """Close the run: ``completed``, ``failed`` or ``interrupted``."""


def scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record of ``rounds.jsonl`` by tag, the same for every tracker.

    ``<source>/<metric>`` for metrics, with the app's names (``central/loss``); ``cost/<name>`` for traffic
    and simulated seconds since the start, and the round's real seconds; ``replies/<name>``; and
    ``lost/<reason>``.
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
        Folder of the log.
    purge_from : int or None (default: None)
        Hide an earlier log's entries from this step on.
    """

    def __init__(self, folder: Path, purge_from: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

        self.identity: Mapping[str, Any] = {"log": folder.name}
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge_from)

    @classmethod
    def of(cls, run: Tracked) -> TensorBoardLog:
        """Open a run's log, in the run's folder if it has one."""
        place = Path("tensorboard") / f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        if run.folder is not None:
            place = run.folder / "tensorboard"
        log = cls(place, None if run.known is None else run.done + 1)
        if run.known is None:
            log._writer.add_text("settings", json.dumps(dict(run.settings), indent=2, default=str))
        return log

    def on_round_end(
        self, server_round: int, scalars: Mapping[str, float], walltime: float | None = None
    ) -> None:
        """Log a round's numbers; ``walltime`` in seconds, now if None."""
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, server_round, walltime=walltime)
        self._writer.flush()

    def end(self, status: str) -> None:
        """Log the final status and close the log."""
        self._writer.add_text("status", status)
        self.close()

    def close(self) -> None:
        """Close the log."""
        self._writer.close()


class _MLflow:
    """A run in MLflow, through its client, so that an app's own active run is not disturbed.

    Without ``MLFLOW_TRACKING_URI`` it is written to files under ``./mlruns``. If ``HEDGEROW_MLFLOW_MODEL``
    names a model, the trained one becomes its next version in MLflow's registry.
    """

    def __init__(self, run: Tracked) -> None:
        uri = (run.known or {}).get("uri") or os.environ.get("MLFLOW_TRACKING_URI")
        uri = uri or Path("mlruns").resolve().as_uri()
        # The import reads these. By default MLflow sends usage data to its developers, and tries for minutes
        # to reach a server that does not answer. Its file store needs a permission; its default is a
        # database, which takes seconds to create and for which the runs of a sweep would compete.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        import mlflow  # noqa: PLC0415
        from mlflow.entities import Metric, Param  # noqa: PLC0415

        self._metric, self._folder = Metric, run.folder
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        if run.known is not None:
            self._run_id = str(run.known["run_id"])
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.name
            with suppress(mlflow.MlflowException):  # It exists.
                self._client.create_experiment(name)
            experiment: Any = self._client.get_experiment_by_name(name)
            made = self._client.create_run(
                experiment.experiment_id,
                run_name=run.folder.name if run.folder is not None else run.name,
            )
            self._run_id = made.info.run_id
            # MLflow's limit for the length of a value.
            params = [Param(_plain_name(key), str(value)[:6000]) for key, value in run.settings.items()]
            self._client.log_batch(self._run_id, params=params)
        self.identity: Mapping[str, Any] = {"run_id": self._run_id, "uri": uri}

    def on_round_end(self, server_round: int, scalars: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(_plain_name(tag), value, now, server_round) for tag, value in scalars.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def end(self, status: str) -> None:
        try:
            if status == "completed" and self._folder is not None:
                self._register(self._folder)
        finally:
            ended = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}[status]
            self._client.set_terminated(self._run_id, ended)

    def _register(self, folder: Path) -> None:
        """Keep the model's files with the run, as a new version in the registry."""
        name = os.environ.get("HEDGEROW_MLFLOW_MODEL")
        files = [file for file in (folder / NPZ, folder / SAFETENSORS, folder / CONFIG) if file.is_file()]
        if not name or not any(file.name in (NPZ, SAFETENSORS) for file in files):
            return
        for file in files:
            self._client.log_artifact(self._run_id, str(file), "model")
        if not any(model.name == name for model in self._client.search_registered_models(f"name = '{name}'")):
            self._client.create_registered_model(name)
        source = f"{self._client.get_run(self._run_id).info.artifact_uri}/model"
        self._client.create_model_version(name, source, self._run_id)


class _Wandb:
    """A run in Weights & Biases: offline, in files under ``./wandb``, unless ``WANDB_MODE`` is set."""

    def __init__(self, run: Tracked) -> None:
        if os.environ.setdefault("WANDB_MODE", "offline") == "offline":
            # Offline means that nothing is sent.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # noqa: PLC0415

        known = run.known or {}
        place = str(known.get("dir") or os.environ.get("WANDB_DIR") or Path.cwd())
        self._run = wandb.init(
            dir=place,
            project=os.environ.get("WANDB_PROJECT") or _plain_name(run.name),
            name=run.folder.name if run.folder is not None else None,
            id=known.get("id") or uuid4().hex[:8],
            resume="allow",
            # The app may have its own run.
            reinit="create_new",
            config=dict(run.settings),
            settings=wandb.Settings(console="off", disable_code=True, silent=True),
        )
        self.identity: Mapping[str, Any] = {"id": self._run.id, "dir": place}

    def on_round_end(self, server_round: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=server_round)

    def end(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "completed" else 1)


# How to open a run in each, by the name of its package and of the extra that installs it.
TRACKERS: Mapping[str, Callable[[Tracked], Tracker]] = MappingProxyType(
    {"mlflow": _MLflow, "tensorboard": TensorBoardLog.of, "wandb": _Wandb}
)


def check_trackers(names: Sequence[str], key: str = "--track") -> tuple[str, ...]:
    """Return the named trackers, each once; ValueError if one is unknown or not installed."""
    for name in names:
        if name not in TRACKERS:
            meant = did_you_mean(name, TRACKERS)
            raise ValueError(
                f"{key} must be one of {', '.join(TRACKERS)}, got {quoted(name)}"
                f"{f' ({meant})' if meant else ''}"
            )
        with suppress(ValueError):  # A loaded module without __spec__.
            if importlib.util.find_spec(name) is not None:
                continue
        raise ValueError(f"{key} {name}: {name} is not installed; pip install 'hedgerow[{name}]'")
    return tuple(dict.fromkeys(names))


# Not a setting: the suite's apps record themselves and read this.
_names: ContextVar[tuple[str, ...]] = ContextVar("trackers", default=())


@contextmanager
def track_with(names: Sequence[str], key: str = "--track") -> Iterator[None]:
    """Track the runs that start in this block; ValueError as in ``check_trackers``."""
    token = _names.set(check_trackers(names, key))
    try:
        yield
    finally:
        _names.reset(token)


class Tracking:
    """All trackers of a run: a context manager that passes them the run's records and catches their errors.

    Parameters
    ----------
    config : Mapping[str, Any]
        The run's ``config.json``.
    folder : Path or None (default: None)
        The run's folder.
    done : int (default: -1)
        The last recorded round; -1 for none.

    Attributes
    ----------
    failures : Counter[str]
        Failed calls by tracker.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path | None = None, done: int = -1) -> None:
        self.failures: Counter[str] = Counter()
        self._config, self._folder, self._done = config, folder, done
        self._open: dict[str, Tracker] = {}
        self._identities: dict[str, dict[str, Any]] = {}
        self._in_a_row: Counter[str] = Counter()

    def __enter__(self) -> Self:
        if not (names := _names.get()):
            return self
        if self._folder is not None:
            with suppress(ValueError):
                known = read_json(self._folder / FILE)
                self._identities = {n: said for n, said in known.items() if isinstance(said, dict)}
        app, settings = str(self._config.get("app", "run")), _settings(self._config)
        for name in names:
            identity = self._identities.get(name) if self._done >= 0 else None
            with self._guarded(name):
                self._open[name] = TRACKERS[name](Tracked(app, settings, self._folder, identity, self._done))
                self._identities[name] = dict(self._open[name].identity)
        self._write()
        return self

    def on_round_end(self, record: Mapping[str, Any]) -> None:
        """Log a round from its record in ``rounds.jsonl``."""
        scalars = scalars_of(record) if self._open else {}
        for name, tracker in self._open.items():
            if self._in_a_row[name] >= _PATIENCE:
                self.failures[name] += 1
                continue
            with self._guarded(name):
                tracker.on_round_end(record["round"], scalars)
                self._in_a_row[name] = 0

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        stopped = "failed" if kind is not None and issubclass(kind, Exception) else "interrupted"
        for name, tracker in self._open.items():
            with self._guarded(name):
                tracker.end("completed" if kind is None else stopped)
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
                log(WARNING, "%s failed to log part of the run (%s). The run continues.", name, reason)

    def _write(self) -> None:
        if self._folder is None:
            return
        trackers = {
            name: {**self._identities.get(name, {}), "failed-calls": self.failures[name]}
            for name in self._identities.keys() | self.failures.keys()
        }
        with suppress(OSError, TypeError, ValueError):
            write_json(self._folder / FILE, trackers)


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run config, with the other facts about the run as ``hedgerow.*``, in one flat mapping."""
    environment = config.get("environment") or {}
    facts = {
        **{key: config.get(key) for key in ("app", "version", "nodes", "realism", "resumes")},
        **{key: environment.get(key) for key in ("engine", "python", "platform", "cpu")},
        **{f"package.{name}": found for name, found in (environment.get("packages") or {}).items()},
        **{f"{key}.commit": (environment.get(key) or {}).get("commit") for key in ("git", "app-git")},
    }
    known = {f"hedgerow.{key}": value for key, value in facts.items() if value is not None}
    return {**config.get("run", {}), **known}


def _plain_name(name: str) -> str:
    """Return a name that MLflow accepts: plain words, at most one slash, no ``..``.

    Metric names come from nodes, which are not trusted.
    """
    head, slash, rest = name.partition("/")
    words = [re.sub(r"[^\w .-]", "_", word)[:200].strip(". ") or "_" for word in (head, rest)]
    return f"{words[0]}/{words[1]}" if slash else words[0]
