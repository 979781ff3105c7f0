"""Run a Flower App in this process, on the engine of this suite."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from flwr.app import Context, UserConfig

from hedgerow.sim.engine.grid import InProcessGrid
from hedgerow.sim.engine.ray_cluster import Cluster, ClusterError, app_packages
from hedgerow.sim.engine.workers import check_workers
from hedgerow.sim.runs.app import LoadedApp, load_app
from hedgerow.sim.runs.foreign import Records, Watched, about_app, scalars, watched_run
from hedgerow.sim.runs.plan import Plan, plan_run
from hedgerow.sim.runs.round_table import round_table, run_end
from hedgerow.sim.runs.serverapp import records_itself
from hedgerow.sim.runs.settings import SettingsError
from hedgerow.sim.runs.simulate import server_context
from hedgerow.sim.runs.trackers import track_with

# All that a program needs to run an app.
__all__ = ["ClusterError", "Records", "load_app", "plan_run", "run_app", "seed_generators"]


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
        From ``plan_run``. None: the app's defaults. Key ``seed`` of its run config, or its own seed, keys
        node ids and faults.
    node_configs, strict, max_in_flight, real_time
        As in ``InProcessGrid``.
    records : Records or None (default: None)
        How the run of an app that is not the suite's own is recorded; the suite's record themselves. None: it
        is not.
    track : sequence of str (default: none)
        The trackers of the run: ``"mlflow"``, ``"tensorboard"``, ``"wandb"``. Of another's app only with
        ``records``.

    Raises
    ------
    ValueError
        If there is no such tracker, or its package is not installed.
    Exception
        Whatever the ServerApp raises; with ``records``, what ``watched_run`` raises.
    """
    plan = plan or plan_run(app.spec)
    workers, cluster = _workers(app, plan, real_time=real_time)
    with (
        track_with(track),
        InProcessGrid(
            app.client_app,
            plan.num_nodes,
            run_config=plan.run_config,
            node_configs=node_configs,
            faults=plan.faults,
            strict=strict,
            seed=_seed(plan.run_config) if plan.seed is None else plan.seed,
            max_in_flight=max_in_flight,
            real_time=real_time,
            workers=workers,
            ray=cluster or "",
        ) as grid,
    ):
        context = server_context(grid, plan.run_config)
        if records is None or records_itself(app.server_app):
            app.server_app(grid, context)
        else:
            about = about_app(app.spec)
            said = plan.run_config if plan.seed is None else {"seed": plan.seed, **plan.run_config}
            records = replace(records, defaults=app.config)
            done = watched_run(lambda watched: app.server_app(watched, context), grid, about, said, records)
            _show(done, about.name)
    return context


def seed_generators(seed: int | None) -> None:
    """Seed the global generators of Python, NumPy and torch, for an app that draws from them and has no key.

    Parameters
    ----------
    seed : int or None
        From 0, below 2^63. NumPy's takes its lowest 32 bits. None: they are left as they are.
    """
    if seed is None:
        return
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  # The one that such apps draw from.
    torch.manual_seed(seed)


def _show(done: Watched, title: str) -> None:
    shown = [
        {**end, "central": scalars(end["central"], end["evaluate"], end["train"])} for end in done.rounds
    ]
    # The app's own names, as many as a terminal is wide.
    metrics = list(dict.fromkeys(name for end in shown for name in end["central"]))[:4]
    print(round_table(shown, title, metrics=metrics))
    print(run_end(done.rounds, done.folder), flush=True)


def _workers(app: LoadedApp, plan: Plan, *, real_time: bool) -> tuple[int, Cluster | None]:
    """Return how many workers were asked for, 0 where nobody said, and on which Ray cluster."""
    asked, ray = plan.workers, plan.ray
    if records_itself(app.server_app):
        asked = int(plan.run_config.get("workers", 0)) if asked is None else asked
        ray = ray or str(plan.run_config.get("ray", ""))
    asked = asked or 0
    try:
        check_workers(asked, real_time=real_time, ray=ray)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    return asked, Cluster(ray, tuple(app_packages(app.spec.folder))) if ray else None


def _seed(run_config: UserConfig) -> int:
    """Return the key of node ids and faults; a bad seed is for the app to refuse, with its other settings."""
    seed = run_config.get("seed", 0)
    return seed if isinstance(seed, int) and seed >= 0 else 0
