"""Run a Flower App in this process, on the engine of this suite."""

from __future__ import annotations

from flwr.app import Context, UserConfig

from hedgerow.sim.engine.grid import InProcessGrid
from hedgerow.sim.runs.app import LoadedApp, load_app
from hedgerow.sim.runs.foreign import Records, Watched, about_app, scalars, watched_run
from hedgerow.sim.runs.plan import Plan, plan_run
from hedgerow.sim.runs.round_table import round_table
from hedgerow.sim.runs.serverapp import records_itself
from hedgerow.sim.runs.simulate import server_context

# All that a program needs to run an app.
__all__ = ["Records", "load_app", "plan_run", "run_app"]


def run_app(
    app: LoadedApp,
    plan: Plan | None = None,
    *,
    strict: bool = False,
    max_in_flight: int | None = None,
    records: Records | None = None,
) -> Context:
    """Run an app in this process and return the ServerApp's context.

    Parameters
    ----------
    app : LoadedApp
        The app.
    plan : Plan or None (default: None)
        From ``plan_run``. None: the app's defaults. Key ``seed`` of its run config keys node ids and faults.
    strict, max_in_flight
        As in ``InProcessGrid``.
    records : Records or None (default: None)
        How the run of an app that is not the suite's own is recorded; the suite's record themselves. None: it
        is not.

    Raises
    ------
    Exception
        Whatever the ServerApp raises; with ``records``, what ``watched_run`` raises.
    """
    plan = plan or plan_run(app.spec)
    with InProcessGrid(
        app.client_app,
        plan.num_nodes,
        run_config=plan.run_config,
        faults=plan.faults,
        strict=strict,
        seed=_seed(plan.run_config),
        max_in_flight=max_in_flight,
    ) as grid:
        context = server_context(grid, plan.run_config)
        if records is None or records_itself(app.server_app):
            app.server_app(grid, context)
        else:
            about = about_app(app.spec)
            done = watched_run(
                lambda watched: app.server_app(watched, context), grid, about, plan.run_config, records
            )
            _show(done, about.name)
    return context


def _show(done: Watched, title: str) -> None:
    shown = [
        {**end, "central": scalars(end["central"], end["evaluate"], end["train"])} for end in done.rounds
    ]
    print(round_table(shown, title))
    print(f"Run folder: {done.folder}", flush=True)


def _seed(run_config: UserConfig) -> int:
    """Return the key of node ids and faults; a bad seed is for the app to refuse, with its other settings."""
    seed = run_config.get("seed", 0)
    return seed if isinstance(seed, int) and seed >= 0 else 0
