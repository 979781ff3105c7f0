"""Draws docs/rooms.svg and docs/edge-servers.svg: who imports whom, and where SD-FEEL's edge servers are.

Run it with ``python docs/diagrams.py`` after a change here.
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

Point = tuple[float, float]
SERVER, NODE = "#dceeea", "white"


def box(axes: Axes, centre: Point, text: str, size: Point, colour: str = NODE) -> None:
    """Draw a box with a text."""
    (x, y), (width, height) = centre, size
    axes.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2),
            width,
            height,
            boxstyle="round,pad=0.02",
            facecolor=colour,
            edgecolor="#333333",
            zorder=2,
        )
    )
    axes.text(x, y, text, ha="center", va="center", fontsize=9, zorder=3)


def arrow(axes: Axes, start: Point, end: Point, style: str = "-|>") -> None:
    """Draw an arrow."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": style, "color": "#777777"}, zorder=1)


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure with one axes in inches and nothing else."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def rooms() -> Figure:
    """Draw the rooms, from the apps down to the wire."""
    figure, axes = canvas(9.2, 4.6)
    apps, strategies, clients, sim = (4.6, 4.1), (1.5, 2.5), (4.6, 2.5), (7.7, 2.5)
    tasks, wire = (6.4, 0.6), (2.4, 0.6)
    for start, ends in (
        (apps, (strategies, clients, sim)),
        (strategies, (wire,)),
        (clients, (wire, tasks)),
        (sim, (wire,)),
    ):
        for end in ends:
            arrow(axes, (start[0], start[1] - 0.4), (end[0], end[1] + 0.42))
    arrow(axes, (6.07, 3.7), (6.07, 1.02))
    box(
        axes,
        apps,
        "flower_apps/ — what a user runs\none Flower App a method: settings, ServerApp, ClientApp, sweeps",
        (5.0, 0.7),
    )
    box(axes, strategies, "strategies/ — the server's side\ndecides and aggregates", (2.6, 0.7))
    box(axes, clients, "clients/ — the node's side\nlearns on local data", (2.4, 0.7))
    box(axes, sim, "sim/ — a federation on one\nmachine: engine, runs, deploy, cli", (2.7, 0.7))
    box(axes, tasks, "tasks/ — what is learnt\ndata sets, partitions, models, metrics", (3.2, 0.7))
    box(
        axes,
        wire,
        "wire/ — what passes between them\ncodecs, records, seeds, ledger, clock",
        (3.2, 0.7),
        SERVER,
    )
    return figure


def edge_servers() -> Figure:
    """Draw the three levels beside each other."""
    figure, axes = canvas(9.6, 3.4)
    small, wide = (0.75, 0.4), (1.9, 0.6)
    axes.text(1.2, 3.15, "E1: emulated", ha="center", fontsize=11)
    for x in (0.45, 1.3, 2.15):
        arrow(axes, (x, 0.65), (1.3, 1.6), "<|-|>")
        box(axes, (x, 0.45), "client", small)
    box(axes, (1.3, 1.9), "server\n(all edge servers)", wide, SERVER)
    axes.text(4.6, 3.15, "E2: nodes", ha="center", fontsize=11)
    for x in (3.7, 5.3):
        arrow(axes, (x, 0.65), (4.5, 1.3), "<|-|>")
        box(axes, (x, 0.45), "client", small)
        arrow(axes, (4.5, 1.7), (x, 2.3), "<|-|>")
    box(axes, (4.5, 1.5), "Flower's server", (1.5, 0.4))
    for x, name in ((3.7, "edge server 0"), (5.3, "edge server 1")):
        box(axes, (x, 2.5), name, (1.2, 0.4), SERVER)
    axes.text(8.0, 3.15, "E3: direct", ha="center", fontsize=11)
    for x, server in ((6.75, 7.15), (7.6, 7.15), (8.4, 8.8), (9.2, 8.8)):
        arrow(axes, (x, 0.65), (server, 1.6), "<|-|>")
        box(axes, (x, 0.45), "client", (0.7, 0.4))
    arrow(axes, (7.8, 1.9), (8.15, 1.9), "<|-|>")
    for x, name in ((7.15, "SuperLink 0\nServerApp 0"), (8.8, "SuperLink 1\nServerApp 1")):
        box(axes, (x, 1.9), name, (1.2, 0.6), SERVER)
    return figure


def main() -> None:
    """Write the pictures beside this script."""
    for name, figure in (("rooms", rooms()), ("edge-servers", edge_servers())):
        figure.savefig(Path(__file__).with_name(f"{name}.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
