"""``hedgerow watch``: a run followed in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hedgerow.sim.cli.options import Costs, Metrics, bad_options, interruptible

__all__ = ["watch"]


def watch(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN|FOLDER]...",
            help="A run's folder, running or not, or a folder of runs, of which the newest is shown. "
            "Default: runs.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Anybody who can connect to it sees the run.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 0,
    x: Costs = None,
    y: Metrics = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in this machine's browser.")] = False,
) -> None:
    """Follow a run in the browser, read only: its report as it grows, and the time left; until Ctrl-C."""
    import ipaddress
    import webbrowser

    from hedgerow.wire.extras import needed

    needed("matplotlib", "plots")
    from hedgerow.sim.runs.folder import runs_folder
    from hedgerow.sim.runs.follow import FollowedRun, FollowServer, newest_run
    from hedgerow.sim.runs.hooks import drawn_network

    with bad_options():
        folder = newest_run(runs or [runs_folder("runs")])
        try:
            server = FollowServer(FollowedRun(folder, x or (), y or (), drawn_network), host, port)
        except OSError as error:
            raise ValueError(f"cannot listen on --host {host!r} --port {port}: {error.strerror}") from error
    with interruptible(lambda: "Watched no longer; the run is not touched"):
        try:
            alone = ipaddress.ip_address(host).is_loopback
        except ValueError:
            alone = host == "localhost"
        if not alone:
            typer.echo("Warning: whoever can connect to this port sees the run and its settings", err=True)
        typer.echo(f"Watching {folder} at {server.url} (Ctrl-C ends it)")
        if open_:
            webbrowser.open(server.url)
        server.serve()
