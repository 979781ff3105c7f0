"""Run a Flower App through ``flwr run`` without its pitfalls: settings as planned, a true exit status."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from flwr.app import UserConfig

from hedgerow.sim.deploy.flower_cli import FlowerRun, environment, healthy
from hedgerow.sim.deploy.processes import Program, free_ports, program
from hedgerow.sim.runs.app import AppSpec
from hedgerow.sim.runs.plan import Plan, absolute_output, plan_run, toml_text
from hedgerow.sim.signals import sigterm_raises, uninterrupted
from hedgerow.wire.extras import MissingExtraError

__all__ = ["flower_run", "follow", "submit"]


def flower_run(
    spec: AppSpec, plan: Plan | None = None, *, client_cpus: int = 1, client_gpus: float = 0.0
) -> int:
    """Run an app on Flower's own engine, through ``flwr run``, and return the run's true exit status.

    The run gets a SuperLink of its own, on a free port and with a home of its own, in the current
    directory; it is stopped when the run ends or is interrupted. Nothing is installed for the run: it
    sees this environment. The logs are printed as they come. A relative ``output-dir`` is made absolute.

    Parameters
    ----------
    spec : AppSpec
        The app.
    plan : Plan or None (default: None)
        From ``plan_run``, without faults. None: the app's defaults.
    client_cpus : int (default: 1)
        CPUs that Ray reserves for each client, >= 1.
    client_gpus : float (default: 0.0)
        Share of a GPU that Ray reserves for each client, >= 0.

    Returns
    -------
    int
        0 if Flower says that the run completed, 1 if not.

    Raises
    ------
    ValueError
        If the plan has faults, which Flower's engine cannot play, or a parameter is out of range.
    RuntimeError
        If Flower's programs are missing, or the SuperLink does not start.
    """
    if client_cpus < 1:
        raise ValueError(f"client_cpus: {client_cpus} is not an integer >= 1")
    if not client_gpus >= 0:
        raise ValueError(f"client_gpus: {client_gpus} is not >= 0")
    plan = plan or plan_run(spec)
    if plan.faults is not None:
        raise ValueError("fault-*: Flower's engine plays no faults; use the engine inprocess")
    if find_spec("ray") is None:
        raise MissingExtraError("Flower's own engine needs ray: pip install 'hedgerow[sim]'")
    federation = (
        f"num-supernodes={plan.num_nodes} client-resources-num-cpus={client_cpus} "
        f"client-resources-num-gpus={float(client_gpus)}"
    )
    with sigterm_raises(), _superlink() as (home, env):
        arguments = [str(spec.folder), "--federation-config", federation]
        return follow(submit(arguments, plan.run_config, home / "run-config.toml", env))


def submit(
    arguments: Sequence[str],
    run_config: UserConfig,
    file: Path,
    env: dict[str, str],
    *,
    superlink: str = "",
    echo: bool = True,
    prefix: str = "",
) -> FlowerRun:
    """Submit a run with a run config, whose ``output-dir`` is made absolute, and return at once.

    Parameters
    ----------
    arguments : Sequence[str]
        What follows ``flwr run``, without ``--run-config`` and ``--stream``.
    run_config : dict
        Every key of the app with its value.
    file : Path
        Where it is written for Flower.
    env, superlink, echo, prefix
        As for ``FlowerRun``; with ``echo`` the command is printed too.
    """
    arguments = list(arguments)
    if run_config:
        file.write_text(toml_text(absolute_output(run_config)), encoding="utf-8")
        arguments += ["--run-config", str(file)]
    if echo:
        print(f"{prefix}$", shlex.join(["flwr", "run", *arguments, "--stream"]), flush=True)
    return FlowerRun(arguments, env, superlink=superlink, echo=echo, prefix=prefix)


def follow(run: FlowerRun) -> int:
    """Follow a run to its end and return its true exit code; say on stderr how it failed."""
    try:
        end = run.wait()
    finally:
        run.close()
    if end.exit_code:
        print(f"Run {end.run_id}: {end.status} {end.details}".rstrip(), file=sys.stderr)
    return end.exit_code


@contextmanager
def _superlink(patience: float = 60.0) -> Iterator[tuple[Path, dict[str, str]]]:
    """Keep a SuperLink for one run; yields its home and the environment that leads to it."""
    port, control_port = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="hedgerow-flwr-", ignore_cleanup_errors=True) as home:
        env = {
            **environment(Path(home)),
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port),
            "FLWR_LOCAL_CONTROL_API_PORT": str(control_port),
        }
        command = [program("flower-superlink"), "--insecure", "--simulation", "--isolation", "subprocess"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        superlink = Program("the SuperLink", command, env, Path(home) / "superlink.log")
        try:
            superlink.start()
            superlink.wait_until(lambda: healthy(port), patience)
            yield Path(home), env
        finally:
            # An interrupted run's simulation and its Ray would outlive their SuperLink.
            with uninterrupted():
                superlink.stop()
