"""Draws docs/topologies.svg: the four shapes of federation that the apps use.

Run it with ``python docs/topologies.py`` after a change here.
"""

from math import cos, pi, sin
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Point = tuple[float, float]
NODE = {"marker": "o", "markersize": 9, "color": "white", "markeredgecolor": "black"}
HOSPITAL = {"marker": "P", "markersize": 13, "color": "white", "markeredgecolor": "black"}
SERVER = {"marker": "s", "markersize": 15, "color": "#444444", "markeredgecolor": "black"}
CLOUD = {"marker": "h", "markersize": 19, "color": "#444444", "markeredgecolor": "black"}


def circle(count: int, radius: float, centre: Point = (0.0, 0.0), turn: float = 0.0) -> list[Point]:
    """Return evenly spaced points on a circle."""
    angles = [2 * pi * i / count + turn for i in range(count)]
    return [(centre[0] + radius * cos(a), centre[1] + radius * sin(a)) for a in angles]


def link(axes: Axes, a: Point, b: Point, style: str = "-") -> None:
    """Draw an edge."""
    axes.plot([a[0], b[0]], [a[1], b[1]], style, color="#777777", linewidth=1.3, zorder=1)


def dots(axes: Axes, points: list[Point], look: dict[str, object]) -> None:
    """Draw nodes."""
    axes.plot([x for x, _ in points], [y for _, y in points], linestyle="", zorder=2, **look)  # type: ignore[arg-type]


def star(axes: Axes) -> None:
    """One server, many clients."""
    clients = circle(9, 1.0)
    for client in clients:
        link(axes, (0, 0), client)
    dots(axes, clients, NODE)
    dots(axes, [(0.0, 0.0)], SERVER)


def clusters(axes: Axes) -> None:
    """Edge servers that gossip, each with clients of its own."""
    servers = circle(4, 0.55, turn=pi / 4)
    for i, server in enumerate(servers):
        link(axes, server, servers[(i + 1) % 4], "--")
        angle = pi / 4 + i * pi / 2
        clients = [
            (server[0] + 0.5 * cos(angle + turn), server[1] + 0.5 * sin(angle + turn))
            for turn in (-0.75, 0.0, 0.75)
        ]
        for client in clients:
            link(axes, server, client)
        dots(axes, clients, NODE)
    dots(axes, servers, SERVER)


def groups(axes: Axes) -> None:
    """Hospitals and devices that swap sealed encodings through their edge, and a cloud over groups."""
    for i in range(3):
        angle = pi / 2 + i * 2 * pi / 3
        edge = (0.62 * cos(angle), 0.62 * sin(angle))
        hospital, *devices = [
            (edge[0] + 0.48 * cos(angle + turn), edge[1] + 0.48 * sin(angle + turn))
            for turn in (1.5, 0.5, -0.5, -1.5)
        ]
        link(axes, (0.0, 0.0), edge)
        for end in (hospital, *devices):
            link(axes, edge, end, ":")
        dots(axes, devices, NODE)
        dots(axes, [hospital], HOSPITAL)
        dots(axes, [edge], SERVER)
    dots(axes, [(0.0, 0.0)], CLOUD)


def mesh(axes: Axes) -> None:
    """Nodes that talk to neighbours only."""
    nodes = circle(9, 1.0, turn=pi / 2)
    for i, node in enumerate(nodes):
        link(axes, node, nodes[(i + 1) % 9], "--")
        link(axes, node, nodes[(i + 3) % 9], "--")
    dots(axes, nodes, NODE)


def main() -> None:
    """Write the picture beside this script."""
    figure = Figure(figsize=(11.6, 3.8))
    panels = [
        (star, "one server", "similarity-free, fedmud"),
        (clusters, "clusters whose servers\nexchange models", "sd-feel"),
        (groups, "a cloud over groups: hospitals (+)\nand devices swap sealed encodings", "hsgd"),
        (mesh, "neighbours only", "ceps"),
    ]
    for position, (draw, title, apps) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), position + 1)
        draw(axes)
        axes.set_title(title, fontsize=11)
        axes.text(0, -1.38, apps, ha="center", fontsize=10, style="italic")
        axes.set(xlim=(-1.3, 1.3), ylim=(-1.45, 1.2), aspect="equal")
        axes.axis("off")
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("topologies.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
