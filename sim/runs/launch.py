"""Run a Flower App in this process, on the engine of this suite."""

from __future__ import annotations

from flwr.app import Context, RecordDict, UserConfig

from hedgerow.sim.engine._compat import SUPERLINK_NODE_ID, flower_identity
from hedgerow.sim.engine.grid import InProcessGrid
from hedgerow.sim.runs.app import LoadedApp, load_app
from hedgerow.sim.runs.plan import Plan, plan_run

# All three that a program needs to run an app.
__all__ = ["load_app", "plan_run", "run_app"]


def run_app(
    app: LoadedApp, plan: Plan | None = None, *, strict: bool = False, max_in_flight: int | None = None
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

    Raises
    ------
    Exception
        Whatever the ServerApp raises.
    """
    plan = plan or plan_run(app.spec)
    grid = InProcessGrid(
        app.client_app,
        plan.num_nodes,
        run_config=plan.run_config,
        faults=plan.faults,
        strict=strict,
        seed=_seed(plan.run_config),
        max_in_flight=max_in_flight,
    )
    context = Context(
        run_id=grid.run.run_id,
        node_id=SUPERLINK_NODE_ID,
        node_config={},
        state=RecordDict(),
        run_config=dict(plan.run_config),
    )
    with flower_identity(grid.run.run_id):
        app.server_app(grid, context)
    return context


def _seed(run_config: UserConfig) -> int:
    """Return the key of node ids and faults; a bad seed is for the app to refuse, with its other settings."""
    seed = run_config.get("seed", 0)
    return seed if isinstance(seed, int) and seed >= 0 else 0
