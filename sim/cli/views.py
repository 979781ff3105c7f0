"""The commands that show runs: ``runs``, ``report``, ``plot``, ``table``, and ``watch`` in the browser."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hedgerow.sim.cli.options import (
    Costs,
    Metrics,
    Paths,
    bad_options,
    interruptible,
    load_results,
    name_and_number,
)

if TYPE_CHECKING:
    from hedgerow.sim.runs.results import Results

# Seconds between two looks for the first run.
_PATIENCE = 0.5


def runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FOLDER]...", help="Folders of runs and sweeps. Default: runs."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """List runs by date: settings, rounds done, last accuracy and loss, state, and how to resume."""
    from hedgerow.sim.runs.folder import json_text, runs_folder
    from hedgerow.sim.runs.listed import listed, table

    with bad_options():
        places = [folder.expanduser() for folder in folders or [runs_folder("runs")]]
        if missing := [str(place) for place in places if not place.is_dir()]:
            raise ValueError(f"{', '.join(missing)} does not exist or is no folder")
        found = listed(places)
    if json:
        typer.echo(json_text(found, indent=1))
    else:
        typer.echo(table(found) or "No runs.")


def report(
    paths: Paths,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE.html",
            help="Output file. Default: report.html in the folder of the run or sweep; for several, here.",
        ),
    ] = None,
    x: Costs = None,
    y: Metrics = None,
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="Y=VALUE", help="Also compare the cost of reaching this. Repeatable."),
    ] = None,
) -> None:
    """Write one page of runs: curves, tables, traffic by link, lost replies, settings."""
    from hedgerow.wire.extras import needed

    needed("matplotlib", "plots")
    from hedgerow.sim.runs.hooks import drawn_network
    from hedgerow.sim.runs.report import write_report

    with bad_options():
        if out is not None and out.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"--out must be a file whose name ends with .html, got {str(out)!r}")
        targets = dict(name_and_number("--target", one) for one in target or [])
        results = load_results(paths)
        out = out or (results.folder or Path.cwd()) / "report.html"
        written = write_report(results, out, xs=x or (), ys=y or (), targets=targets, network=drawn_network)
    typer.echo(written)


def plot(
    paths: Paths,
    x: Costs = None,
    y: Metrics = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="FILE.png, FILE.svg or FILE.pdf; without a suffix all three. Default: in the folder of "
            "the run or sweep; for several, here."
        ),
    ] = None,
    log_x: Annotated[bool, typer.Option("--log-x", help="Draw x on a logarithmic scale.")] = False,
    log_y: Annotated[bool, typer.Option("--log-y", help="Draw y on a logarithmic scale.")] = False,
    by: Annotated[
        str | None, typer.Option(metavar="KEY", help="One column of panels for each value of this setting.")
    ] = None,
    differences: Annotated[
        bool | None,
        typer.Option(
            "--differences/--no-differences",
            help="Also plot paired differences from the first variant. Default: the sweep's setting.",
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Draw the means in the terminal; write files only with --out.")
    ] = False,
) -> None:
    """Draw each variant's mean and band over its seeds: a panel for each pair of x and y."""
    from hedgerow.wire.extras import needed

    needed("matplotlib", "plots")
    from hedgerow.sim.runs.plot import default_path, draw, save

    with bad_options():
        results = load_results(paths, y)
        xs, ys = x or results.xs, y or results.ys
        if show:
            _show_curves(results, xs, ys)
            if out is None:
                return
        by = results.by if by is None else by
        differences = results.differences if differences is None else differences
        figure = draw(results, xs, ys, log_x=log_x, log_y=log_y, by=by, differences=differences)
        written = save(figure, out or default_path(results, xs, ys))
    for path in written:
        typer.echo(path)


def _show_curves(results: Results, xs: Sequence[str], ys: Sequence[str]) -> None:
    from rich.console import Console

    from hedgerow.sim.runs.terminal_plot import terminal_curves

    console = Console(highlight=False)
    for y in ys:
        for x in xs:
            console.print(terminal_curves(results, x, y, width=console.width), soft_wrap=True)


def table(
    paths: Paths,
    x: Costs = None,
    y: Metrics = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="X=VALUE", help="Compare at this cost. Default: the largest that all runs reached."
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="Another column: a cost or a metric at that cost, 'payload-bytes client->server' for one "
            "link. Repeatable. Default: the sweep's."
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="Y=VALUE", help="Compare the cost of reaching this."),
    ] = None,
) -> None:
    """Compare variants in markdown: values at a budget, cost to a target, paired differences over seeds.

    Runs on different data, or with metrics on different samples, are listed and not compared.
    """
    from hedgerow.sim.runs.compare import (
        NOTE,
        budget_comparison,
        common_budget,
        groups,
        listing,
        measured,
        target_comparison,
    )

    with bad_options():
        results = load_results(paths, y)
        budgets = dict([name_and_number("--budget", budget)]) if budget else {}
        metric, value = name_and_number("--target", target) if target else ("", 0.0)
        xs, ys = x or list(budgets) or results.xs, y or results.ys
        parts = groups(results, ys)
        made = []
        for part in parts:
            at = {a: budgets[a] if a in budgets else common_budget(part, a) for a in xs}
            tables = [budget_comparison(part, a, b, at[a], column) for a in xs for b in ys]
            made.append([*tables, *(target_comparison(part, a, metric, value) for a in xs if target)])
        said, alone = [], []
        for part, tables in zip(parts, made, strict=True):
            if len(parts) > 1 and len(part.variants()) == 1:
                alone.append((part, tables))
                continue
            said += [f"## {part.title}", *(one.markdown() for one in tables), " ".join(measured(part, ys))]
        if alone:
            others = [part for part, _ in alone]
            said += ["## Runs that no other is compared with"]
            said += [
                listing(others, of_all).markdown()
                for of_all in zip(*(tables for _, tables in alone), strict=True)
            ]
            said += [f"{part.title}. {' '.join(_unsaid(part, ys))}".strip() for part in others]
    said += [NOTE, f"Realism: {results.realism or 'not stated'}."]
    typer.echo("\n\n".join(filter(None, said)))


def _unsaid(part: Results, ys: Sequence[str]) -> list[str]:
    """Return the sentences of ``measured`` that a group's title does not have."""
    from hedgerow.sim.runs.compare import measured

    return [said for said in measured(part, ys) if said.partition(": ")[2].rstrip(".") not in part.title]


def _with_a_run(folder: Path) -> Path:
    """Return a folder as soon as there is a run in it."""
    import time

    from hedgerow.sim.runs.folder import CONFIG, run_folders

    said = False
    while not any((run / CONFIG).is_file() for run in run_folders(folder)):
        if not said:
            typer.echo(f"Waiting for the first run in {folder} (Ctrl-C ends it)", err=True)
        said = True
        time.sleep(_PATIENCE)
    return folder


def watch(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN|FOLDER]...",
            help="A run's folder, running or not, or a folder of runs, of which the newest is shown. "
            "Default: runs, and the first run in it if there is none yet.",
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

    with bad_options(), interruptible(lambda: "Stopped waiting: there is no run yet"):
        folder = newest_run(runs or [_with_a_run(runs_folder("runs"))])
        try:
            server = FollowServer(FollowedRun(folder, x or (), y or (), drawn_network), host, port)
        except OSError as error:
            raise ValueError(f"cannot listen on --host {host!r} --port {port}: {error.strerror}") from error
    with interruptible(lambda: "Stopped watching; the run is not affected"):
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
