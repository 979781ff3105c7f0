"""One run of an app on its own loopback deployment: ``hedgerow deploy local``."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from flwr.app import UserConfigValue

from hedgerow.sim.deploy.flower_run import follow
from hedgerow.sim.deploy.launcher import LOGS_GONE, Deployment
from hedgerow.sim.deploy.recorded import recorded_path
from hedgerow.sim.runs.app import AppSpec
from hedgerow.sim.runs.folder import runs_folder
from hedgerow.sim.runs.plan import Plan, absolute_output


def deploy_local(
    spec: AppSpec,
    plan: Plan,
    *,
    tls: bool = False,
    node_config: Sequence[Mapping[str, UserConfigValue]] | None = None,
    own_data: bool = False,
    own_users: bool = False,
    keep_logs: bool = False,
    records: Path | None = None,
) -> int:
    """Run an app on its own loopback deployment, and return 0 if the run completed, else 1.

    Parameters
    ----------
    spec, plan : AppSpec, Plan
        The app, and the plan of its run, without faults.
    tls, node_config, own_users
        As in ``Deployment``.
    own_data : bool (default: False)
        Whether nodes have their own files; then no program gets a common data folder.
    keep_logs : bool (default: False)
        Keep the logs in ``logs-<time>`` beside the run folder.
    records : Path or None (default: None)
        Parent of the run folder of an app that writes none itself; None for one that does.

    Raises
    ------
    StartError
        If a program does not start.
    """
    run_config = absolute_output(plan.run_config)
    logs = None
    if keep_logs:
        logs = Path(str(records or run_config.get("output-dir") or ".")) / time.strftime("logs-%Y%m%d-%H%M%S")
    # Hide a common data folder of the environment from server and nodes.
    env = {"HEDGEROW_DATA_DIR": ""} if own_data else {}
    with ExitStack() as after:
        if records is not None:
            scripts = after.enter_context(tempfile.TemporaryDirectory(prefix="hedgerow-record-"))
            env |= recorded_path(spec, runs_folder(records).absolute(), Path(scripts))
        deployment = Deployment(
            spec,
            plan.num_nodes,
            tls=tls,
            node_config=node_config,
            env=env,
            keep_logs=logs,
            own_users=own_users,
        )
        if logs:
            after.callback(print, f"Logs: {logs}", flush=True)
        started = time.monotonic()
        with deployment:
            guarded = "TLS, authenticated" if tls else "no TLS"
            print(
                f"SuperLink on {deployment.address}, {plan.num_nodes} SuperNodes ({guarded}), "
                f"up after {time.monotonic() - started:.0f} s",
                flush=True,
            )
            if own_data:
                print(_users(deployment), flush=True)
            code = follow(deployment.submit(plan))
            for node in deployment.nodes:
                if not node.running:
                    print(node.failure(f"ended with exit code {node.returncode}"), file=sys.stderr)
            if code and not logs:
                print(LOGS_GONE, file=sys.stderr)
            return code


def _users(deployment: Deployment) -> str:
    if deployment.users:
        first, last = deployment.users[0], deployment.users[-1]
        return f"Each SuperNode runs as its own user ({first} to {last}); only it may read its files"
    return f"All SuperNodes run as you and may read all your files: {deployment.no_users}"
