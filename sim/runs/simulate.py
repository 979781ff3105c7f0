"""Run a federation in a script or a notebook with one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result, Strategy

from hedgerow.global_draws import GlobalDraws, seed_global_draws
from hedgerow.sim.engine._compat import SUPERLINK_NODE_ID, main_function
from hedgerow.sim.engine.faults import FaultModel
from hedgerow.sim.engine.grid import InProcessGrid
from hedgerow.sim.runs.foreign import About, Records, watched_run
from hedgerow.sim.runs.live import colour_log, only_warnings
from hedgerow.sim.runs.recorder import code_folder
from hedgerow.sim.runs.serverapp import records_itself
from hedgerow.sim.runs.trackers import track_with


@dataclass(frozen=True)
class Simulation:
    """The outcome of a simulation.

    Parameters
    ----------
    result : Result or None
        The result of the last ``Strategy.start``; None if no strategy was started.
    rounds : list of dict
        The records of all rounds, as in ``rounds.jsonl``.
    folder : Path or None
        The run's folder; None if none was requested, or the app makes its own.
    context : Context
        The ServerApp's context.
    """

    result: Result | None
    rounds: list[dict[str, Any]]
    folder: Path | None
    context: Context


def simulate(
    server_app: ServerApp | Strategy | Callable[[], Strategy],
    client_app: ClientApp,
    num_nodes: int,
    *,
    run_config: UserConfig | None = None,
    node_configs: Sequence[UserConfig] | None = None,
    faults: FaultModel | Mapping[int, FaultModel] | None = None,
    output_dir: str | Path | None = None,
    resume: str | Path | None = None,
    checkpoint_every: int = 10,
    seed: int = 0,
    strict: bool = False,
    quiet: bool = False,
    max_in_flight: int | None = None,
    real_time: bool = False,
    workers: int = 1,
    track: Sequence[str] = (),
    **start: Any,
) -> Simulation:
    """Run a federation in this process, in a notebook too.

    Parameters
    ----------
    server_app : ServerApp, Strategy, or a function that makes a Strategy
        The server: an app, or a strategy to start.
    client_app : ClientApp
        The nodes' app.
    num_nodes : int
        Number of nodes, >= 1.
    run_config : dict or None (default: None)
        Both apps' ``context.run_config``.
    node_configs, faults, strict, max_in_flight, real_time, workers
        As in ``InProcessGrid``.
    output_dir : str, Path or None (default: None)
        Parent of the run folder with config, rounds, checkpoints and final model; None to write nothing. The
        suite's apps always write a run folder, by default under ``runs``.
    resume : str, Path or None (default: None)
        Folder of a stopped run to resume; its ``config.json`` says what is restored. The suite's apps have a
        run-config key ``resume`` instead.
    checkpoint_every : int (default: 10)
        Rounds between two checkpoints, >= 1.
    seed : int (default: 0)
        Seed of node ids, faults and the global generators of Python, NumPy and torch, >= 0. The generators
        are put back afterwards.
    quiet : bool (default: False)
        Log only warnings, and show no progress. The suite's apps still print their final table.
    track : sequence of str (default: none)
        Trackers: ``"mlflow"``, ``"tensorboard"``, ``"wandb"``. Each is an optional extra.
    **start
        Arguments of ``Strategy.start`` (``initial_arrays``, ``num_rounds``, ...), for a strategy.

    Returns
    -------
    Simulation
        Flower's ``Result``, if there is one, and the records of all rounds.

    Raises
    ------
    TypeError
        If ``server_app`` has another type, or an argument is unknown.
    ValueError
        If a parameter is out of range, or a tracker is unknown or not installed.
    Exception
        Whatever the ServerApp raises.

    Examples
    --------
    ::

        done = simulate(FedAvg(), client_app, 10, initial_arrays=arrays, num_rounds=3)
        done.result.arrays, done.rounds[-1]["train"]
    """
    records = Records(_path(output_dir), _path(resume), checkpoint_every, quiet)
    config = dict(run_config or {})
    own = isinstance(server_app, ServerApp) and records_itself(server_app)
    if own and resume is not None:
        raise ValueError("resume must be None: this app resumes a run by its run-config key 'resume'")
    if own and output_dir is not None:
        config["output-dir"] = str(records.output_dir)
    if own and quiet:
        config["quiet"] = True
    colour_log()
    with (
        only_warnings(quiet),
        GlobalDraws.restored(),
        track_with([track] if isinstance(track, str) else track, "track:"),
        InProcessGrid(
            client_app,
            num_nodes,
            run_config=config,
            node_configs=node_configs,
            faults=faults,
            strict=strict,
            seed=seed,
            max_in_flight=max_in_flight,
            real_time=real_time,
            workers=workers,
        ) as grid,
    ):
        seed_global_draws(seed, later=True)
        context = server_context(grid, config)
        main, about = _main(server_app, context, start)
        if own:
            done = watched_run(main, grid, about, config, Records(quiet=True), own=True)
        else:
            said = {"seed": seed, **config, **({} if faults is None else {"faults": repr(faults)})}
            done = watched_run(main, grid, about, said, records, seed=seed)
    return Simulation(done.result, done.rounds, done.folder, context)


def server_context(grid: Grid, run_config: UserConfig) -> Context:
    """Return the context of a ServerApp in this process."""
    return Context(
        run_id=grid.run.run_id,
        node_id=SUPERLINK_NODE_ID,
        node_config={},
        state=RecordDict(),
        run_config=dict(run_config),
    )


def _main(
    server: ServerApp | Strategy | Callable[[], Strategy], context: Context, start: Mapping[str, Any]
) -> tuple[Callable[[Grid], object], About]:
    """Return the function to call with the grid, and a description of it."""
    if isinstance(server, ServerApp):
        if start:
            raise TypeError(f"{', '.join(start)} must be used with a strategy; a ServerApp starts its own")
        app = server
        return lambda grid: app(grid, context), About("simulation", folder=code_folder(main_function(app)))
    strategy = server if isinstance(server, Strategy) else server()
    if not isinstance(strategy, Strategy):
        raise TypeError(f"server_app must be a ServerApp or a Strategy, got a {type(strategy).__name__}")
    name = type(strategy).__name__
    return lambda grid: strategy.start(grid=grid, **start), About(name, folder=code_folder(type(strategy)))


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path).expanduser().resolve()
