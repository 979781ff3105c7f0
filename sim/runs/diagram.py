"""Who tells whom, and how much: links and networks as small SVG drawings.

Links come from records, which name them ``from->to`` and what they are for (``node->node set-up``). Nothing
here knows a method: a network's own graph is handed over by who does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import networkx as nx

__all__ = ["MOST_DRAWN", "Crossed", "DrawnNetwork", "links_svg", "network_svg", "size"]

# A network of more nodes is a ball of wool.
MOST_DRAWN = 40
_MOST_LABELLED = 12
_MOST_LEAVES = 6
# What stands above whatever it talks to.
_HIGH = ("cloud", "hub", "monitor")
_LINK = re.compile(r"([^\s>]+)->([^\s>]+)(?:\s+(.+))?")
_WIDTH = 460
_BOX_WIDTH, _BOX_HEIGHT, _LINE = 104, 34, 17
_LEFT = 116
_CENTRE = _LEFT + _BOX_WIDTH / 2
_RIGHT = _LEFT + _BOX_WIDTH


@dataclass(frozen=True)
class Crossed:
    """What crossed a link: messages, nominal bits, payload bytes; means where it is said of several runs."""

    messages: float
    nominal_bits: float
    payload_bytes: float


@dataclass(frozen=True)
class DrawnNetwork:
    """The graph of a run.

    Parameters
    ----------
    kind : str
        What its nodes are, as links name them: ``"edge"``.
    num_nodes : int
        How many, >= 1.
    edges : sequence of (int, int)
        Who tells whom; nodes from 0.
    leaf : str (default: "")
        What hangs at the nodes: ``"client"``; empty for nothing.
    leaves : sequence of int (default: none)
        How many of them at each node.
    directed : bool (default: False)
        Whether the first of an edge tells the second and is not told, or both tell each other.
    """

    kind: str
    num_nodes: int
    edges: Sequence[tuple[int, int]]
    leaf: str = ""
    leaves: Sequence[int] = ()
    directed: bool = False


def size(value: float, unit: str = "B") -> str:
    """Return bytes, or bits, as people say them: ``12.3 kB``."""
    if not math.isfinite(value):
        return "n/a"
    power = 0
    while abs(value) >= 999.5 and power < 5:
        value /= 1000
        power += 1
    return f"{value:.3g} {('', 'k', 'M', 'G', 'T', 'P')[power]}{unit}"


def links_svg(crossed: Mapping[str, Crossed], name: str) -> str:
    """Return the kinds of nodes one above another, with what each told the other; empty without links.

    Parameters
    ----------
    crossed : Mapping[str, Crossed]
        By link. One whose name is not ``from->to`` is left out.
    name : str
        Of the drawing, for ids: letters, digits and ``-``.
    """
    links = _links(crossed)
    if not links:
        return ""
    order = _in_order(nx.Graph([(a, b) for a, b, _ in links]))
    place = {kind: at for at, kind in enumerate(order)}
    beside: dict[tuple[int, int], list[tuple[str, str, Crossed]]] = {}
    for (a, b, what), one in links.items():
        low, high = sorted((place[a], place[b]))
        arrow = "↻" if a == b else "↓" if place[a] < place[b] else "↑"
        beside.setdefault((low, high), []).append((arrow, what, one))
    most = max(one.payload_bytes for one in links.values())
    tops, y = [], 12.0
    for at in range(len(order)):
        tops.append(y)
        # Each step is as high as what stands beside it.
        y += _BOX_HEIGHT + max(1.6, len(beside.get((at, at + 1), ())) + 0.6) * _LINE + 14
    parts: list[str] = []
    for (low, high), told in sorted(beside.items(), key=lambda item: item[0][0] - item[0][1]):
        width = _stroke(max(one.payload_bytes for _, _, one in told), most)
        middle = [tops[at] + _BOX_HEIGHT / 2 for at in (low, high)]
        if low == high:
            x, y0 = _RIGHT, middle[0]
            path = f"M{x} {y0 - 9:.1f}C{x + 42} {y0 - 26:.1f} {x + 42} {y0 + 26:.1f} {x} {y0 + 9:.1f}"
            parts += [_path(path, width), _beside(x + 42, y0, told)]
        elif high == low + 1:
            path = f"M{_CENTRE} {tops[low] + _BOX_HEIGHT:.1f}V{tops[high]:.1f}"
            y0 = (tops[low] + _BOX_HEIGHT + tops[high]) / 2
            parts += [_path(path, width), _beside(_CENTRE + 14, y0, told)]
        else:
            x, bow = _LEFT, 26 + 12 * (high - low)
            top, bottom = middle
            path = f"M{x} {top:.1f}C{x - bow} {top:.1f} {x - bow} {bottom:.1f} {x} {bottom:.1f}"
            parts += [_path(path, width), _beside(x - bow + 4, (top + bottom) / 2, told, end=True)]
    for kind, top in zip(order, tops, strict=True):
        parts.append(
            f'<rect class="box" x="{_LEFT}" y="{top:.1f}" width="{_BOX_WIDTH}" '
            f'height="{_BOX_HEIGHT}" rx="6"/>'
            f'<text class="kind" x="{_CENTRE}" y="{top + _BOX_HEIGHT / 2 + 4.5:.1f}">{_text(kind, 13)}</text>'
        )
    said = "; ".join(f"{link}: {size(one.payload_bytes)}" for link, one in crossed.items())
    return _svg(name, "Links and what crossed them", said, _WIDTH, tops[-1] + _BOX_HEIGHT + 12, parts)


def network_svg(network: DrawnNetwork, crossed: Mapping[str, Crossed], name: str) -> str:
    """Return a network in a circle, its leaves around it, with the mean of what crossed each of its links.

    Records hold the sums over all links of a kind: each is drawn with its share. Empty where the records have
    no link between such nodes, or there are more than ``MOST_DRAWN`` of them.
    """
    between = crossed.get(f"{network.kind}->{network.kind}")
    if between is None or not 0 < network.num_nodes <= MOST_DRAWN:
        return ""
    graph = nx.DiGraph() if network.directed else nx.Graph()
    graph.add_nodes_from(range(network.num_nodes))
    graph.add_edges_from(network.edges)
    ways, ways_told = (1, "") if network.directed else (2, " each way")
    each = size(between.payload_bytes / max(1, ways * graph.number_of_edges()))
    leaves = list(network.leaves) if len(network.leaves) == network.num_nodes else []
    radius = 132.0 if leaves else 168.0
    centre, outer = _WIDTH / 2, 196.0
    turn = [2 * math.pi * node / network.num_nodes - math.pi / 2 for node in graph]
    if network.num_nodes == 1:
        radius = 0.0
    spot = [(centre + radius * math.cos(t), outer + radius * math.sin(t)) for t in turn]
    dot = min(15.0, max(5.0, 2.2 * radius / network.num_nodes)) if radius else 15.0
    parts, labels = [], []
    legs = [crossed.get(f"{network.leaf}->{network.kind}"), crossed.get(f"{network.kind}->{network.leaf}")]
    for (x, y), t, count in zip(spot, turn, leaves, strict=False):
        reach = 50.0
        fan = min(0.9, 4.4 / network.num_nodes)
        told = _leaf_told(network, legs, sum(leaves))
        for place in range(min(count, _MOST_LEAVES)):
            aim = t + fan * ((place + 0.5) / min(count, _MOST_LEAVES) - 0.5) * 2
            to = (x + reach * math.cos(aim), y + reach * math.sin(aim))
            parts.append(
                f'<g><title>{_text(told, 200)}</title><path class="thin" d="M{x:.1f} {y:.1f}L{to[0]:.1f} '
                f'{to[1]:.1f}"/><circle class="leaf" cx="{to[0]:.1f}" cy="{to[1]:.1f}" r="4"/></g>'
            )
        if count > _MOST_LEAVES:
            more = (x + 66 * math.cos(t), y + 62 * math.sin(t) + 4)
            labels.append(f'<text class="many" x="{more[0]:.1f}" y="{more[1]:.1f}">×{count}</text>')
    for a, b in sorted(graph.edges):
        (x, y), (u, v) = spot[a], spot[b]
        told = f"{network.kind} {a} {'→' if network.directed else '–'} {network.kind} {b}: {each}{ways_told}"
        head = _arrowhead((x, y), (u, v), dot) if network.directed else ""
        parts.append(
            f"<g><title>{_text(told, 200)}</title>"
            f'<path class="wire" stroke-width="2.5" d="M{x:.1f} {y:.1f}L{u:.1f} {v:.1f}"/>{head}</g>'
        )
        if graph.number_of_edges() <= _MOST_LABELLED:
            # Off the middle, where lines of a dense graph cross.
            at = 0.5 if graph.number_of_edges() <= network.num_nodes else 0.36
            labels.append(
                f'<text class="much" x="{x + at * (u - x):.1f}" y="{y + at * (v - y) + 4:.1f}">{each}</text>'
            )
    for node, (x, y) in enumerate(spot):
        number = f'<text class="kind" x="{x:.1f}" y="{y + 4.5:.1f}">{node}</text>' if dot >= 9 else ""
        labels.append(f'<circle class="box" cx="{x:.1f}" cy="{y:.1f}" r="{dot:.1f}"/>{number}')
    hanging = f", {sum(leaves)} × {network.leaf}" if leaves else ""
    said = (
        f"{network.num_nodes} × {network.kind}, {graph.number_of_edges()} links{hanging}; "
        f"each link carried {each}{ways_told}. {_leaf_told(network, legs, sum(leaves))}"
    )
    return _svg(name, "The network and what crossed each link", said, _WIDTH, 2 * outer, [*parts, *labels])


def _arrowhead(tail: tuple[float, float], tip: tuple[float, float], gap: float) -> str:
    """Return the head of an arrow that ends ``gap`` before its tip; nothing where it has no length."""
    dx, dy = tip[0] - tail[0], tip[1] - tail[1]
    if (length := math.hypot(dx, dy)) == 0:
        return ""
    dx, dy = dx / length, dy / length
    x, y = tip[0] - gap * dx, tip[1] - gap * dy
    left, right = ((x - 9 * dx + side * 4 * dy, y - 9 * dy - side * 4 * dx) for side in (1, -1))
    corners = " ".join(f"{a:.1f},{b:.1f}" for a, b in ((x, y), left, right))
    return f'<polygon class="head" points="{corners}"/>'


def _leaf_told(network: DrawnNetwork, legs: Sequence[Crossed | None], count: int) -> str:
    heads = (f"{network.leaf}->{network.kind}", f"{network.kind}->{network.leaf}")
    told = [
        f"{head}: {size(leg.payload_bytes / count)} each"
        for head, leg in zip(heads, legs, strict=True)
        if leg is not None and count
    ]
    return "; ".join(told)


def _links(crossed: Mapping[str, Crossed]) -> dict[tuple[str, str, str], Crossed]:
    found = {}
    for link, one in crossed.items():
        if match := _LINK.fullmatch(link):
            found[match[1], match[2], match[3] or ""] = one
    return found


def _in_order(kinds: nx.Graph) -> list[str]:
    """Return the kinds so that those that talk stand beside each other, where a line of them can do that."""
    order: list[str] = []
    for members in sorted(nx.connected_components(kinds), key=min):
        part = kinds.subgraph(members)
        far = nx.eccentricity(part)
        lowest = min(members, key=lambda kind: (-far[kind], kind in _HIGH, kind))
        steps = nx.single_source_shortest_path_length(part, lowest)
        order += sorted(members, key=lambda kind: (-steps[kind], kind))
    return order


def _beside(x: float, y: float, told: Sequence[tuple[str, str, Crossed]], *, end: bool = False) -> str:
    lines = []
    for number, (arrow, what, one) in enumerate(told):
        words = f"{arrow} {size(one.payload_bytes)}" + (f" {what}" if what else "")
        words += "" if end else f", {one.messages:,.0f} messages"
        at = y + (number - (len(told) - 1) / 2) * _LINE + 4
        kind = "told end" if end else "told"
        lines.append(f'<text class="{kind}" x="{x:.1f}" y="{at:.1f}">{_text(words, 40)}</text>')
    return "".join(lines)


def _stroke(payload_bytes: float, most: float) -> float:
    return 1.5 + 4.5 * (payload_bytes / most if most > 0 else 0)


def _path(path: str, width: float) -> str:
    return f'<path class="wire" stroke-width="{width:.1f}" d="{path}"/>'


def _text(text: str, limit: int) -> str:
    return escape(text if len(text) <= limit else text[: limit - 1] + "…")


def _svg(name: str, title: str, said: str, width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg class="diagram" role="img" aria-labelledby="{name}-t {name}-d" viewBox="0 0 {width:.0f} '
        f'{height:.0f}"><title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(said)}</desc>'
        + "".join(parts)
        + "</svg>"
    )
