"""``hedgerow report``: runs as one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hedgerow.sim.cli.options import Costs, Metrics, Paths, bad_options, load_results, name_and_number

if TYPE_CHECKING:
    from hedgerow.sim.runs.diagram import DrawnNetwork
    from hedgerow.sim.runs.results import RecordedRun

__all__ = ["report"]


def report(
    paths: Paths,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE.html",
            help="Where the page goes. Default: report.html in the folder of the run or sweep; of several, "
            "here.",
        ),
    ] = None,
    x: Costs = None,
    y: Metrics = None,
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="Y=VALUE", help="Compare what it cost to reach this, too. Repeatable."),
    ] = None,
) -> None:
    """Write one page of runs: curves, tables, what crossed each link, lost replies, settings."""
    from hedgerow.wire.extras import needed

    needed("matplotlib", "plots")
    from hedgerow.sim.runs.report import write_report

    with bad_options():
        if out is not None and out.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"--out {str(out)!r}; valid is a file whose name ends with .html")
        targets = dict(name_and_number("--target", one) for one in target or [])
        results = load_results(paths)
        out = out or (results.folder or Path.cwd()) / "report.html"
        written = write_report(results, out, xs=x or (), ys=y or (), targets=targets, network=network_of)
    typer.echo(written)


def network_of(run: RecordedRun) -> DrawnNetwork | None:
    """Return the graph of a run whose settings say it; None of any other."""
    from collections import Counter

    from hedgerow.sim.runs.diagram import MOST_DRAWN, DrawnNetwork
    from hedgerow.strategies.ceps.strategy import neighbourhood_graph
    from hedgerow.strategies.edges import contiguous_clusters
    from hedgerow.strategies.topology import as_digraph, graph

    said, links = run.settings, run.rounds[-1].get("by_link") or {}
    topology = said.get("topology")
    servers, clients = said.get("num-servers"), said.get("num-clients")
    if not isinstance(topology, str) or type(clients) is not int or run.seed < 0:
        return None
    try:
        if "edge->edge" in links and type(servers) is int and 1 <= servers <= MOST_DRAWN:
            edges = sorted(graph(topology, servers, run.seed).edges)
            hanging: list[int] = []
            # Which groups nodes are of, no record says.
            if said.get("clusters") == "contiguous" and servers <= clients <= 1_000_000:
                members = Counter(contiguous_clusters(clients, servers))
                hanging = [members[server] for server in range(servers)]
            return DrawnNetwork("edge", servers, edges, "client", hanging)
        if "node->node" in links and 1 <= clients <= MOST_DRAWN:
            if not topology:
                return DrawnNetwork(
                    "node", clients, sorted(neighbourhood_graph(None, clients, run.seed).edges)
                )
            drawn = as_digraph(topology, clients, run.seed)
            directed = any(not drawn.has_edge(b, a) for a, b in drawn.edges)
            both = drawn if directed else drawn.to_undirected()
            return DrawnNetwork("node", clients, sorted(both.edges), directed=directed)
    except ValueError:
        # A graph of that name is not to be had on so many nodes: not a run of ours.
        return None
    return None
