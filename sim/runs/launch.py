"""Run a Flower App in this process, on Hedgerow's engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flwr.app import Context, UserConfig

from hedgerow.global_draws import seed_global_draws
from hedgerow.sim.engine.generators import draw_seed
from hedgerow.sim.engine.grid import InProcessGrid
from hedgerow.sim.engine.workers import check_workers
from hedgerow.sim.runs.app import LoadedApp
from hedgerow.sim.runs.foreign import Records, about_app, show_run, watched_run
from hedgerow.sim.runs.plan import Plan, plan_run
from hedgerow.sim.runs.serverapp import records_itself
from hedgerow.sim.runs.settings import SettingsError
from hedgerow.sim.runs.simulate import server_context
from hedgerow.sim.runs.trackers import track_with

# Everything that a program needs to run an app.


def run_app(
    app: LoadedApp,
    plan: Plan | None = None,
    *,
    node_configs: Sequence[UserConfig] | None = None,
    strict: bool = False,
    max_in_flight: int | None = None,
    real_time: bool = False,
    records: Records | None = None,
    track: Sequence[str] = (),
) -> Context:
    """Run an app in this process and return the ServerApp's context.

    Parameters
    ----------
    app : LoadedApp
        The app.
    plan : Plan or None (default: None)
        From ``plan_run``; the app's defaults if None. Its seed, or one drawn here, determines node ids,
        faults and the global generators.
    node_configs, strict, max_in_flight, real_time
        As in ``InProcessGrid``.
    records : Records or None (default: None)
        How to record the run; None to record nothing. Ignored for the suite's apps, which record themselves.
    track : sequence of str (default: none)
        Trackers: ``"mlflow"``, ``"tensorboard"``, ``"wandb"``. Other projects' apps also need ``records``.

    Raises
    ------
    ValueError
        If a tracker is unknown or not installed.
    Exception
        Whatever the ServerApp raises; with ``records``, what ``watched_run`` raises.
    """
    plan = plan or plan_run(app.spec)
    workers = plan.workers
    if workers is None and records_itself(app.server_app):
        workers = int(plan.run_config.get("workers", 0))
    try:
        check_workers(workers or 0, real_time=real_time)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    seed = run_seed(plan)
    seed_global_draws(seed, later=True)
    with (
        track_with(track),
        InProcessGrid(
            app.client_app,
            plan.num_nodes,
            run_config=plan.run_config,
            node_configs=node_configs,
            faults=plan.faults,
            strict=strict,
            seed=seed,
            max_in_flight=max_in_flight,
            real_time=real_time,
            workers=workers or 0,
        ) as grid,
    ):
        context = server_context(grid, plan.run_config)
        if records is None or records_itself(app.server_app):
            app.server_app(grid, context)
        else:
            about = about_app(app.spec)
            config = {"seed": seed, **plan.run_config}
            records = replace(records, defaults=app.config)
            done = watched_run(
                lambda watched: app.server_app(watched, context), grid, about, config, records, seed=seed
            )
            show_run(done, about.name)
    return context


def run_seed(plan: Plan) -> int:
    """Return a run's seed: the user's, the app's key ``seed`` if it is an integer >= 0, or one drawn now."""
    if plan.seed is not None:
        return plan.seed
    seed = plan.run_config.get("seed")
    return seed if type(seed) is int and seed >= 0 else draw_seed()
