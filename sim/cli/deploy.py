"""``hedgerow deploy``: an app on SuperNodes started here, and keys for machines of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hedgerow.sim.cli.options import (
    AppPath,
    NodeConfig,
    RunConfig,
    bad_options,
    interruptible,
    read_node_configs,
)

__all__ = ["deploy_keys", "deploy_local"]


def deploy_local(
    app_path: AppPath,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Number of SuperNodes. Default: what the app says, else 2.")
    ] = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="Encrypt, and let in only SuperNodes whose key is registered.")
    ] = False,
    run_config: RunConfig = None,
    node_config: NodeConfig = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the run folder goes: the key 'output-dir'.")
    ] = None,
    keep_logs: Annotated[
        bool, typer.Option("--keep-logs", help="Leave the programs' logs beside the run folder.")
    ] = False,
) -> None:
    """Run an app on a SuperLink and SuperNodes started here for it, and stop them.

    Exits with 0 if the run completed, 1 if it failed or a program did not start, 2 on bad options, 130 if
    interrupted, 143 if terminated.
    """
    from hedgerow.sim.deploy.local import deploy_local as start
    from hedgerow.sim.deploy.processes import StartError
    from hedgerow.sim.runs.app import find_app
    from hedgerow.sim.runs.plan import plan_run, toml_value

    with bad_options():
        spec = find_app(app_path)
        overrides = [*(run_config or []), *([f"output-dir={toml_value(str(out))}"] if out else [])]
        plan = plan_run(spec, overrides, num_nodes=nodes)
        if plan.faults is not None:
            raise ValueError("fault-*: a deployment plays no faults; use 'run' with --engine inprocess")
        configs = read_node_configs(spec, node_config, plan.num_nodes)
    try:
        with interruptible(lambda: "Interrupted; all that was started is stopped"):
            code = start(spec, plan, tls=tls, node_config=configs, keep_logs=keep_logs)
    except StartError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    raise typer.Exit(code)


def deploy_keys(
    folder: Annotated[Path, typer.Argument(help="Where they are written.")],
    nodes: Annotated[int, typer.Option(min=0, help="Number of SuperNodes.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Address or name of the SuperLink. Repeatable. Default: loopback only."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="How long the certificates are valid.")] = 365,
) -> None:
    """Make a CA, the SuperLink's certificate and a key pair for each SuperNode, for machines you own."""
    from hedgerow.sim.deploy.certificates import LOOPBACK, make_credentials

    with bad_options():
        made = make_credentials(folder, nodes, hosts=[*LOOPBACK, *(host or [])], days=days)
    typer.echo(f"SuperLink: {made.ca} {made.server_certificate} {made.server_key}")
    for key in made.nodes:
        typer.echo(f"SuperNode: {made.ca} {key.private}; register {key.public}")
