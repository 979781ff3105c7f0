"""``hedgerow node``: Flower's SuperNode, whose ClientApps start warm."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["node"]


def node(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="What flower-supernode takes: --superlink, --node-config, …", metavar="..."),
    ] = None,
    preload: Annotated[
        list[str] | None,
        typer.Option(help="A module to import once beside Flower, torch and the suite. Repeatable."),
    ] = None,
    fallback: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,…",
            help="Other SuperLinks, dialled in turn when the one at hand refuses the node or does not answer "
            "for --max-wait-time (default here: 60 s).",
        ),
    ] = None,
) -> None:
    """Run flower-supernode; each message is handled by a fork of a process that has imported what it needs.

    Takes flower-supernode's own arguments, and becomes it: signals and exit codes are Flower's. With
    --fallback it starts it, again and again.
    """
    import os
    from pathlib import Path

    from hedgerow.sim.cli.options import bad_options
    from hedgerow.sim.deploy.fallback import dial_in_turn, superlinks
    from hedgerow.sim.deploy.node_arguments import check_node_arguments
    from hedgerow.sim.deploy.processes import program
    from hedgerow.sim.deploy.warm import PRELOAD, warm_path

    if not arguments and fallback is None:
        with bad_options():
            raise ValueError(
                "no arguments; a node needs its SuperLink: hedgerow node --superlink HOST:PORT "
                "--root-certificates ca.crt"
            )
    with bad_options():
        check_node_arguments(arguments or [])
    home = Path(os.environ.get("FLWR_HOME") or "~/.flwr").expanduser().absolute()
    supernode = program("flower-supernode")
    # Flower's programs start one another by name.
    path = os.pathsep.join([str(Path(supernode).parent), os.environ.get("PATH", "")])
    env = {**os.environ, **warm_path(home, path)}
    if preload:
        env[PRELOAD] = ",".join(preload)
    if fallback is not None:
        with bad_options():
            dialled = superlinks(arguments or [], fallback)
        raise typer.Exit(dial_in_turn(dialled, arguments or [], env))
    os.execve(supernode, [supernode, *(arguments or [])], env)
