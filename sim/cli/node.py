"""``hedgerow node``: Flower's SuperNode, whose ClientApps start warm."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["node"]


def node(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments of flower-supernode: --superlink, --node-config, …", metavar="..."),
    ] = None,
    preload: Annotated[
        list[str] | None,
        typer.Option(help="A module to import in advance, like Flower, torch and the suite. Repeatable."),
    ] = None,
) -> None:
    """Run flower-supernode; each message is handled by a fork of a process that has imported what it needs.

    Takes flower-supernode's own arguments, and becomes it: signals and exit codes are Flower's.
    """
    import os
    from pathlib import Path

    from hedgerow.sim.cli.options import bad_options, known_node_keys
    from hedgerow.sim.deploy.node_arguments import check_node_arguments, misspelt_keys, option_values
    from hedgerow.sim.deploy.processes import program
    from hedgerow.sim.deploy.warm import PRELOAD, warm_path
    from hedgerow.wire.certified import ending
    from hedgerow.wire.proxies import host_of, proxy_of, without_proxy_here

    if not arguments:
        with bad_options():
            raise ValueError(
                "a node needs the address of its SuperLink: hedgerow node --superlink HOST:PORT "
                "--root-certificates ca.crt"
            )
    with bad_options():
        check_node_arguments(arguments)
        trusted = [Path(name).expanduser() for name in option_values(arguments, "--root-certificates")]
        warnings = [*ending(trusted), *misspelt_keys(arguments, known_node_keys())]
    for warning in warnings:
        typer.echo(f"Warning: {warning}", err=True)
    home = Path(os.environ.get("FLWR_HOME") or "~/.flwr").expanduser().absolute()
    supernode = program("flower-supernode")
    # Flower's programs start one another by name.
    path = os.pathsep.join([str(Path(supernode).parent), os.environ.get("PATH", "")])
    for address in option_values(arguments, "--superlink"):
        if proxy := proxy_of(address):
            typer.echo(
                f"The SuperLink {address} is reached through the proxy {proxy}; directly if the environment "
                f"has no_proxy={host_of(address)}",
                err=True,
            )
    env = {**without_proxy_here(os.environ), **warm_path(home, path)}
    if preload:
        env[PRELOAD] = ",".join(preload)
    os.execve(supernode, [supernode, *arguments], env)
