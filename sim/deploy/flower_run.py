"""Run a Flower App through ``flwr run``, with the planned settings and a true exit status."""

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
from hedgerow.sim.deploy.processes import Program, StartError, free_ports, program
from hedgerow.sim.runs.app import AppSpec
from hedgerow.sim.runs.plan import Plan, absolute_output, plan_run, toml_text
from hedgerow.sim.signals import sigterm_raises, uninterrupted
from hedgerow.wire.extras import MissingExtraError


def flower_run(
    spec: AppSpec, plan: Plan | None = None, *, client_cpus: int = 1, client_gpus: float = 0.0
) -> int:
    """Run an app on Flower's own engine, through ``flwr run``, and return the run's true exit status.

    The run has its own SuperLink, on a free port and with its own home, which stops when the run ends or is
    interrupted. The run uses this environment; nothing is installed for it. Logs are printed as they come. A
    relative ``output-dir`` is made absolute.

    Parameters
    ----------
    spec : AppSpec
        The app.
    plan : Plan or None (default: None)
        From ``plan_run``, without faults; None for the app's defaults.
    client_cpus : int (default: 1)
        CPUs that Ray reserves for each client, >= 1.
    client_gpus : float (default: 0.0)
        Share of a GPU that Ray reserves for each client, >= 0.

    Returns
    -------
    int
        0 if the run completed, else 1, with the reason on stderr.

    Raises
    ------
    ValueError
        If the plan has faults, which Flower's engine cannot inject, or a parameter is out of range.
    RuntimeError
        If Flower's programs are missing.
    """
    if client_cpus < 1:
        raise ValueError(f"client_cpus must be an integer >= 1, got {client_cpus}")
    if not client_gpus >= 0:
        raise ValueError(f"client_gpus must be a number >= 0, got {client_gpus}")
    plan = plan or plan_run(spec)
    plan.check_no_faults()
    check_ray()
    federation = (
        f"num-supernodes={plan.num_nodes} client-resources-num-cpus={client_cpus} "
        f"client-resources-num-gpus={float(client_gpus)}"
    )
    try:
        with sigterm_raises(), _superlink() as (home, env):
            arguments = [str(spec.folder), "--federation-config", federation]
            return follow(submit(arguments, plan.run_config, home / "run-config.toml", env))
    except StartError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1


def check_ray() -> None:
    """Raise MissingExtraError if ray is not installed, which Flower's own engine needs."""
    if find_spec("ray") is None:
        raise MissingExtraError("Flower's own engine needs ray: pip install 'hedgerow[sim]'")


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
    """Submit a run and return at once. A relative ``output-dir`` of its run config is made absolute.

    Parameters
    ----------
    arguments : Sequence[str]
        The arguments of ``flwr run``, without ``--run-config`` and ``--stream``.
    run_config : dict
        Every key of the app with its value.
    file : Path
        The file in which Flower receives the run config.
    env, superlink, echo, prefix
        As in ``FlowerRun``; ``echo`` prints the command too.
    """
    arguments = list(arguments)
    if run_config:
        file.write_text(toml_text(absolute_output(run_config)), encoding="utf-8")
        arguments += ["--run-config", str(file)]
    if echo:
        print(f"{prefix}$", shlex.join(["flwr", "run", *arguments, "--stream"]), flush=True)
    return FlowerRun(arguments, env, superlink=superlink, echo=echo, prefix=prefix)


def follow(run: FlowerRun) -> int:
    """Follow a run to its end and return its true exit code; a failure is explained on stderr."""
    try:
        end = run.wait()
    finally:
        run.close()
    if end.exit_code:
        print(f"Run {end.run_id}: {end.status} {end.details}".rstrip(), file=sys.stderr)
    return end.exit_code


@contextmanager
def _superlink(patience: float = 60.0) -> Iterator[tuple[Path, dict[str, str]]]:
    """Start a SuperLink for one run; yield its home and the environment that uses it."""
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
            # An interrupted run's simulation and Ray would outlive the SuperLink.
            with uninterrupted():
                superlink.stop()
