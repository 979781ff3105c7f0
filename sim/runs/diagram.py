"""Draw links and networks: which nodes send to which, and how much.

Links come from records, which name them ``from->to`` with an optional purpose (``node->node set-up``). This
module knows no method: the caller supplies the graph of a network.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

# Larger networks are unreadable.
MOST_DRAWN = 40
_MOST_LABELLED = 12
_MOST_LEAVES = 6
# Kinds of nodes that are drawn at the top.
_HIGH = ("cloud", "hub", "monitor")
_LINK = re.compile(r"([^\s>]+)->([^\s>]+)(?:\s+(.+))?")
_LONGEST = 40
# Placeholder colours that no figure uses; the page replaces them with its own.
PAPER, PANEL, WIRE = "#010204", "#010205", "#010206"
_BOX = {"boxstyle": "round,pad=0.5", "edgecolor": WIRE, "facecolor": PANEL, "linewidth": 1.5}


@dataclass(frozen=True)
class Crossed:
    """Traffic on a link; means if it is of several runs."""

    messages: float
    nominal_bits: float
    payload_bytes: float


@dataclass(frozen=True)
class DrawnNetwork:
    """The graph of a run.

    Parameters
    ----------
    kind : str
        Kind of its nodes, as in names of links: ``"edge"``.
    num_nodes : int
        Number of nodes, >= 1.
    edges : sequence of (int, int)
        Senders and receivers, numbered from 0.
    leaf : str (default: "")
        Kind of the leaves attached to the nodes: ``"client"``; empty for none.
    leaves : sequence of int (default: none)
        Number of leaves at each node.
    directed : bool (default: False)
        Whether only the first node of an edge sends to the second; otherwise both send to each other.
    """

    kind: str
    num_nodes: int
    edges: Sequence[tuple[int, int]]
    leaf: str = ""
    leaves: Sequence[int] = ()
    directed: bool = False


@dataclass(frozen=True)
class Drawing:
    """A drawing with its title and a description in words."""

    figure: Figure
    title: str
    description: str


def size(value: float, unit: str = "B") -> str:
    """Return a number of bytes or bits with a decimal prefix: ``12.3 kB``."""
    if not math.isfinite(value):
        return "n/a"
    power = 0
    while abs(value) >= 999.5 and power < 5:
        value /= 1000
        power += 1
    return f"{value:.3g} {('', 'k', 'M', 'G', 'T', 'P')[power]}{unit}"


def draw_links(crossed: Mapping[str, Crossed]) -> Drawing | None:
    """Draw the kinds of nodes in a column, with the traffic between them; None without links.

    A link whose name is not ``from->to`` is left out.
    """
    links = {match.groups(): one for link, one in crossed.items() if (match := _LINK.fullmatch(link))}
    if not links:
        return None
    order = _in_order(nx.Graph([(a, b) for a, b, _ in links]))
    beside: dict[tuple[int, int], list[tuple[str, Crossed]]] = {}
    for (a, b, what), one in links.items():
        low, high = sorted((order.index(a), order.index(b)))
        arrow = "↻" if a == b else "↓" if order[low] == a else "↑"
        words = f"{arrow} {size(one.payload_bytes)}" + (f" {_brief(what)}" if what else "")
        beside.setdefault((low, high), []).append((f"{words}, {one.messages:,.0f} messages", one))
    most = max(one.payload_bytes for one in links.values())
    figure, ax = _empty(0.5 + 1.1 * len(order))
    for (low, high), told in beside.items():
        width = 1.5 + 4.5 * (max(one.payload_bytes for _, one in told) / most if most else 0.0)
        # A link that skips a kind is bent around it, with its label on the left.
        bent = 0.35 * (high > low + 1)
        if high > low:
            style = f"arc3,rad={bent}"
            line = FancyArrowPatch((0, -low), (0, -high), arrowstyle="-", connectionstyle=style)
            ax.add_patch(line).set(color=WIRE, linewidth=width)
        x, side = (-0.2 * (high - low), "right") if bent else (0.3 if high == low else 0.05, "left")
        words = "\n".join(words for words, _ in told)
        ax.text(x, -(low + high) / 2, words, ha=side, va="center", size="small")
    for at, kind in enumerate(order):
        ax.text(0, -at, _brief(kind), ha="center", va="center", weight="bold", bbox=_BOX)
    ax.set(xlim=(-1, 1), ylim=(0.4 - len(order), 0.4))
    description = "; ".join(f"{link}: {size(one.payload_bytes)}" for link, one in crossed.items())
    return Drawing(figure, "Links and their traffic", description)


def draw_network(network: DrawnNetwork, crossed: Mapping[str, Crossed]) -> Drawing | None:
    """Draw a network as a circle with its leaves around it and the mean traffic on each link.

    Records hold sums over all links of a kind, so each link is drawn with its mean share. None if the records
    have no link between such nodes, or there are more than ``MOST_DRAWN``.
    """
    between = crossed.get(f"{network.kind}->{network.kind}")
    if between is None or not 0 < network.num_nodes <= MOST_DRAWN:
        return None
    graph = nx.DiGraph() if network.directed else nx.Graph()
    graph.add_nodes_from(range(network.num_nodes))
    graph.add_edges_from(network.edges)
    ways, each_way = (1, "") if network.directed else (2, " each way")
    each = size(between.payload_bytes / max(1, ways * graph.number_of_edges()))
    leaves = list(network.leaves) if len(network.leaves) == network.num_nodes else []
    place = nx.circular_layout(graph)
    figure, ax = _empty(4.6)
    ax.set_aspect("equal")
    fan = min(0.5, 2.2 / network.num_nodes)
    for node, count in enumerate(leaves):
        turn, shown = 2 * math.pi * node / network.num_nodes, min(count, _MOST_LEAVES)
        for leaf in range(shown):
            aim = turn + fan * (2 * (leaf + 0.5) / shown - 1)
            ends = place[node], (1.4 * math.cos(aim), 1.4 * math.sin(aim))
            ax.plot(*zip(*ends, strict=True), color=WIRE, linewidth=1, marker="o", markevery=[1])
        if count > shown:
            ax.text(1.6 * math.cos(turn), 1.6 * math.sin(turn), f"×{count}", ha="center", va="center")
    node_size = min(500, 8000 // network.num_nodes)
    nx.draw_networkx_edges(
        graph, place, ax=ax, edge_color=WIRE, width=2, node_size=node_size, arrows=network.directed
    )
    nx.draw_networkx_nodes(graph, place, ax=ax, node_color=PANEL, edgecolors=WIRE, node_size=node_size)
    if network.num_nodes <= MOST_DRAWN // 2:
        nx.draw_networkx_labels(graph, place, ax=ax, font_weight="bold")
    if graph.number_of_edges() <= _MOST_LABELLED:
        # Not in the middle of a link, where the links of a dense graph cross.
        at = 0.5 if graph.number_of_edges() <= network.num_nodes else 0.36
        nx.draw_networkx_edge_labels(
            graph, place, dict.fromkeys(graph.edges, each), ax=ax, font_size=8, label_pos=at, rotate=False,
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1},
        )  # fmt: skip
    total = sum(leaves)
    legs = "".join(
        f" {head}: {size(crossed[head].payload_bytes / total)} each."
        for head in (f"{network.leaf}->{network.kind}", f"{network.kind}->{network.leaf}")
        if total and head in crossed
    )
    hanging = f", {total} × {network.leaf}" if leaves else ""
    description = (
        f"{network.num_nodes} × {network.kind}, {graph.number_of_edges()} links{hanging}; "
        f"each link carried {each}{each_way}.{legs}"
    )
    return Drawing(figure, "The network and the traffic on each link", description)


def _empty(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(4.6, height), layout="constrained")
    ax = figure.subplots()
    ax.set_axis_off()
    return figure, ax


def _brief(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _in_order(kinds: nx.Graph) -> list[str]:
    """Return the kinds in an order that puts communicating kinds next to each other, if one exists."""
    order: list[str] = []
    for members in sorted(nx.connected_components(kinds), key=min):
        part = kinds.subgraph(members)
        far = nx.eccentricity(part)
        lowest = min(members, key=lambda kind: (-far[kind], kind in _HIGH, kind))
        steps = nx.single_source_shortest_path_length(part, lowest)
        order += sorted(members, key=lambda kind: (-steps[kind], kind))
    return order
