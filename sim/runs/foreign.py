"""Run any Flower app in this process and write the same run folder as the suite's apps do.

The app needs no change: it is observed from outside (``watch``). A checkpoint of such a run holds the global
model, the nodes' state, the global generators, the rounds done, and the attributes of Flower's or the app's
strategy that have changed (``carried.py``). It cannot hold other state of the app (``RESUMES``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, UserConfig
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from hedgerow.sim.engine._compat import app_pyproject
from hedgerow.sim.engine.generators import LEGACY, WHICH_ARE_LATE, Unrepeated
from hedgerow.sim.engine.grid import InProcessGrid
from hedgerow.sim.runs.app import AppSpec
from hedgerow.sim.runs.folder import lost_replies, new_run_folder, read_config, recorded_settings
from hedgerow.sim.runs.live import LiveProgress, round_table, run_end
from hedgerow.sim.runs.plan import toml_value
from hedgerow.sim.runs.recorder import RunRecorder, environment
from hedgerow.sim.runs.serverapp import run_summary
from hedgerow.sim.runs.trackers import Tracking
from hedgerow.sim.runs.watch import Watch
from hedgerow.wire.failures import RunFailedError
from hedgerow.wire.printable import shown
from hedgerow.wire.records import PayloadError, view

REALISM = "every node's work is real, in one process; messages travel in memory and their time is virtual"
REAL_TIME = (
    "every node's work is real, in one process; messages travel in memory. The clock counts the real seconds "
    "of the server and of each node's work, as if every node had this machine to itself"
)
# Written before the strategy is known, so it must be true for every strategy.
RESUMES = (
    "from checkpoint/, which is written only if the strategy can be resumed. Restored: the rounds done, the "
    "global model, the nodes' state, the global generators of Python, NumPy and torch, and the strategy's "
    "state, from its state_dict or else its attributes. Not restored: what the log names, and other state of "
    "the app, such as variables of its modules or of its main function"
)


# Of a run on a deployment.
DEVICES = (
    "every node is a SuperNode with processes of its own, and messages travel over the network; how many "
    "machines there are is not recorded. Seconds are real"
)
NO_RESUME = "no: of a run on a deployment nothing is kept that another could start from"


class AllLostError(RunFailedError):
    """No reply of a run was accepted."""


@dataclass(frozen=True)
class About:
    """The app of a run.

    Parameters
    ----------
    name, version : str
        Name and version; the version may be empty.
    folder : Path or None
        Folder of its code.
    """

    name: str
    version: str = ""
    folder: Path | None = None


@dataclass(frozen=True)
class Records:
    """Where and how a watched run is recorded.

    Parameters
    ----------
    output_dir : Path or None (default: None)
        Parent of the new run folder; None to write nothing.
    resume : Path or None (default: None)
        Folder of a stopped run to resume instead.
    checkpoint_every : int (default: 10)
        Rounds between two checkpoints, >= 1.
    quiet : bool (default: False)
        Show no progress.
    defaults : Mapping[str, Any] (default: none)
        The app's default run config, for resuming a run that is older than some of its keys.
    """

    output_dir: Path | None = None
    resume: Path | None = None
    checkpoint_every: int = 10
    quiet: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.checkpoint_every < 1:
            raise ValueError(f"checkpoint_every must be an integer >= 1, got {self.checkpoint_every}")


@dataclass(frozen=True)
class Watched:
    """The outcome of a watched run.

    Parameters
    ----------
    result : Result or None
        The result of the last ``Strategy.start``.
    rounds : list of dict
        The records of all rounds, as in ``rounds.jsonl``.
    folder : Path or None
        The run's folder, if it was recorded.
    """

    result: Result | None
    rounds: list[dict[str, Any]] = field(default_factory=list)
    folder: Path | None = None


def scalars(*measured: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of the first mapping that is not empty: the metrics to show."""
    first: Mapping[str, Any] = next(filter(None, measured), {})
    return {name: value for name, value in first.items() if isinstance(value, int | float)}


def about_app(spec: AppSpec) -> About:
    """Return the ``About`` of an app."""
    pyproject, _ = app_pyproject(spec.folder)
    return About(spec.name, str(pyproject["project"].get("version", "")), spec.folder)


def show_run(done: Watched, title: str) -> None:
    """Print a run's rounds as a table, and where its folder is."""
    shown = [
        {**end, "central": scalars(end["central"], end["evaluate"], end["train"])} for end in done.rounds
    ]
    # As many of the app's metrics as fit on a terminal.
    metrics = list(dict.fromkeys(name for end in shown for name in end["central"]))[:4]
    print(round_table(shown, title, metrics=metrics))
    print(run_end(done.rounds, done.folder), flush=True)


@dataclass(frozen=True)
class Earlier:
    """Options of a recorded run of another project's app: run config, nodes, seed and clock."""

    run_config: UserConfig
    nodes: int
    seed: int | None = None
    real_time: bool = False

    @property
    def overrides(self) -> list[str]:
        """The run config in the form of ``plan_run``."""
        return [f"{key}={toml_value(value)}" for key, value in self.run_config.items()]


def earlier_run(folder: str | Path, keys: Collection[str], name: str = "") -> Earlier:
    """Return the options of a recorded run of another project's app with these run-config keys.

    Raises
    ------
    RunFolderError
        If the folder is not a run folder.
    ValueError
        If it is a run of another app than ``name`` (if given), or of the suite's, which have a key
        ``resume``.
    """
    config = read_config(folder)
    if name and config.get("app") not in (None, name):
        raise ValueError(f"--resume: {folder} is a run of app {config['app']!r}, not of {name!r}")
    if not isinstance(config.get("nodes"), int):
        raise ValueError(f"--resume: {folder} does not record the number of nodes")
    run_config = recorded_settings(folder)
    # Earlier versions recorded the user's seed only, as a setting.
    seed = None if "seed" in keys else run_config.pop("seed", None)
    seed = config.get("seed", seed)
    return Earlier(run_config, config["nodes"], seed, config.get("time") == "real")


def watched_run(
    main: Callable[[Grid], object],
    grid: Grid,
    about: About,
    run_config: Mapping[str, Any],
    records: Records,
    *,
    seed: int | None = 0,
    own: bool = False,
) -> Watched:
    """Call a ServerApp's main with a grid and record the run.

    Parameters
    ----------
    main : Callable[[Grid], object]
        The function to call.
    grid : Grid
        The nodes, of this engine or of a deployment.
    about : About
        The app, for ``config.json``.
    run_config : Mapping[str, Any]
        Everything that determines the run besides its code, JSON values.
    records : Records
        Where and how to record it.
    seed : int or None (default: 0)
        The run's seed, for the record; None if there is none, as on a deployment.
    own : bool (default: False)
        Whether it is one of the suite's apps, which record themselves: only their rounds are collected.

    Raises
    ------
    RunFolderError
        If the folder cannot be written, or belongs to another run.
    CheckpointError
        If there is no checkpoint, or the app cannot be resumed.
    Exception
        Whatever ``main`` raises.
    """
    simulated = isinstance(grid, InProcessGrid)
    real_time = not isinstance(grid, InProcessGrid) or grid.real_time
    config = {
        "app": about.name,
        "version": about.version,
        "realism": DEVICES if not simulated else REAL_TIME if real_time else REALISM,
        # A stranger's server says of no metric on what it was measured.
        "measured": {},
        "time": "real" if real_time else "virtual",
        **({} if seed is None else {"seed": seed}),
        "run": dict(run_config),
        "nodes": len(list(grid.get_node_ids())),
        "resumes": RESUMES if simulated else NO_RESUME,
        "environment": environment(
            engine="inprocess" if simulated else "flower-deployment", app=about.folder
        ),
    }
    recorder = None
    if records.resume is not None or records.output_dir is not None:
        folder = records.resume or new_run_folder(records.output_dir or ".", about.name)
        recorder = RunRecorder(
            folder, config, checkpoint_every=records.checkpoint_every, defaults=records.defaults
        )
    with ExitStack() as stack:
        if recorder is not None:
            stack.callback(recorder.close)
            log(INFO, "Run folder: %s", recorder.folder)
        return _run(main, grid, records, recorder, None if own else config)


def _run(
    main: Callable[[Grid], object],
    grid: Grid,
    records: Records,
    recorder: RunRecorder | None,
    config: Mapping[str, Any] | None,
) -> Watched:
    """Run an app that records itself (``config`` is None) or is recorded here, and report the result."""
    live = LiveProgress(1, records.quiet)
    seed = None if config is None else config.get("seed")
    unrepeated = None if config is None or seed is None else Unrepeated(seed, config["run"], foreign=True)
    if unrepeated is not None and getattr(grid, "real_time", False):
        unrepeated.add(WHICH_ARE_LATE)
    rounds: list[dict[str, Any]] = []

    def started(num_rounds: int | None) -> None:
        live.num_rounds = num_rounds or live.num_rounds
        if recorder is None:
            return
        if not isinstance(grid, InProcessGrid):
            # Nodes keep their state, and a deployment starts no run from a checkpoint.
            recorder.keep_state()
        elif watch.can_resume:
            recorder.keep_state(watch=watch, engine=grid)
            if lost := watch.left_behind:
                log(WARNING, "A checkpoint cannot hold these attributes of the strategy: %s", ", ".join(lost))
        else:
            # No run could resume from a checkpoint.
            recorder.keep_state()
            log(
                WARNING,
                "No checkpoints: only an app's first strategy can resume, and only in Flower's own loop or "
                "with a state_dict.",
            )

    def ended(end: Any) -> None:
        if recorder is None:
            rounds.append(asdict(end))
        else:
            _record(recorder, end)
        if tracking is not None:
            tracking.on_round_end(rounds[-1] if recorder is None else recorder.rounds[-1])
        live.num_rounds = max(live.num_rounds, end.round)
        measured = scalars(end.central, end.evaluate, end.train)
        live(replace(end, central=measured or {"round": end.round}))

    watch = Watch(grid, on_start=started, on_round_end=[ended], count=config is not None)
    if recorder is not None and records.resume is not None:
        recorder.keep_state(watch=watch, engine=grid)
        recorder.resume()
    done = recorder.rounds[-1]["round"] if recorder is not None and recorder.rounds else -1
    tracking = None if config is None else Tracking(config, recorder.folder if recorder else None, done)
    with tracking or nullcontext():
        with ExitStack() as stack:
            if recorder is not None:
                stack.enter_context(recorder.guard())
            stack.enter_context(live)
            stack.enter_context(watch)
            main(watch.grid)
        if config is not None:
            _check_heard(rounds if recorder is None else recorder.rounds)
        if recorder is None or config is None:
            return Watched(watch.result, rounds)
        if unrepeated is not None and watch.is_legacy:
            unrepeated.add(LEGACY)
        summary = {**run_summary(recorder.rounds), **(unrepeated.summary() if unrepeated else {})}
        recorder.finish(summary, _model(watch.arrays))
        return Watched(watch.result, recorder.rounds, recorder.folder)


def _check_heard(rounds: Sequence[Mapping[str, Any]]) -> None:
    """Raise AllLostError if messages were sent and no reply was accepted."""
    sent = sum(record.get("sent") or 0 for record in rounds)
    if sent and not any(record.get("accepted") for record in rounds):
        reasons = ", ".join(f"{count} x {shown(why)}" for why, count in sorted(lost_replies(rounds).items()))
        raise AllLostError(f"none of {sent} replies was accepted ({reasons}); see the nodes' log")


def _record(recorder: RunRecorder, end: Any) -> None:
    if getattr(end, "kind", "") == "exchange":
        # Only a strategy's rounds can be resumed.
        recorder.keep_state()
    try:
        recorder.on_round_end(end)
    except PayloadError as error:
        # The round is recorded; only the checkpoint failed, on an array that it cannot hold.
        log(WARNING, "No checkpoints of this run: %s", error)
        recorder.keep_state()


def _model(arrays: ArrayRecord | None) -> dict[str, NDArray[np.generic]] | None:
    """Return the global model's arrays; None if there are none, or NumPy cannot read them."""
    try:
        return None if not arrays else {key: view(array) for key, array in arrays.items()}
    except PayloadError as error:
        log(WARNING, "No file of the model: %s", error)
        return None
