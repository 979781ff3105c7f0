"""The roster of nodes that an engine knows, in which none comes or goes: no node is asked who it is.

What it costs goes by the nodes that take part, not by those that there are.
"""

from collections.abc import ItemsView, Iterator, Mapping, MutableMapping, MutableSet, Sequence, ValuesView
from typing import Any, overload

import numpy as np
from flwr.serverapp import Grid
from numpy.typing import NDArray

from hedgerow.strategies.roster import Admits, Node, Roster, Shapes
from hedgerow.wire.calls import KnownNodes

__all__ = ["KnownRoster", "KnownSizes", "known_roster"]


class KnownSizes(MutableMapping[int, float]):
    """The numbers of examples (N,) of all clients, by partition id."""

    def __init__(self, sizes: Sequence[int] | NDArray[Any]) -> None:
        self.array = np.array(sizes, np.float64)

    def __getitem__(self, client: int) -> float:
        if not 0 <= client < len(self.array):
            raise KeyError(client)
        return float(self.array[client])

    def __setitem__(self, client: int, size: float) -> None:
        self.array[client] = size

    def __delitem__(self, client: int) -> None:
        raise TypeError(f"the size of client {client} is known, and stays")

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.array)))

    def __len__(self) -> int:
        return len(self.array)

    def items(self) -> ItemsView[int, float]:
        """Return clients and sizes."""
        return dict(enumerate(self.array.tolist())).items()

    def values(self) -> ValuesView[float]:
        """Return the sizes."""
        return dict(self.items()).values()


class _Nodes(Sequence[Node]):
    """The nodes at their partition ids, each made when it is first asked for."""

    def __init__(self, known: KnownNodes) -> None:
        self._known = known
        self.made: dict[int, Node] = {}

    def __len__(self) -> int:
        return len(self._known.node_ids)

    @overload
    def __getitem__(self, at: int) -> Node: ...
    @overload
    def __getitem__(self, at: slice) -> list[Node]: ...
    def __getitem__(self, at: int | slice) -> Node | list[Node]:
        if isinstance(at, int) and (node := self.made.get(at)) is not None:
            return node
        partitions = range(len(self))[at]
        if isinstance(partitions, range):
            return [self[i] for i in partitions]
        if partitions not in self.made:
            self.made[partitions] = Node(
                partitions,
                int(self._known.node_ids[partitions]),
                num_examples=int(self._known.sizes[partitions]),
                name=f"partition-{partitions}",
            )
        return self.made[partitions]


class _Online(MutableSet[int]):
    """The node ids of all but those that rest; asked of the federation's own nodes alone."""

    def __init__(self, node_ids: NDArray[np.uint64], away: set[int]) -> None:
        self._node_ids = node_ids
        self.away = away

    def __contains__(self, node_id: object) -> bool:
        return node_id not in self.away

    def __iter__(self) -> Iterator[int]:
        return (i for i in self._node_ids.tolist() if i not in self.away)

    def __len__(self) -> int:
        return len(self._node_ids) - len(self.away)

    def add(self, node_id: int) -> None:
        self.away.discard(node_id)

    def discard(self, node_id: int) -> None:
        self.away.add(node_id)


class KnownRoster(Roster):
    """All nodes of a grid that knows who they are.

    Parameters
    ----------
    known : KnownNodes
        What the grid knows.

    Attributes
    ----------
    sizes : KnownSizes
        The nodes' numbers of examples.
    """

    def __init__(self, known: KnownNodes) -> None:
        super().__init__([], True)
        self._known = known
        self._places = _Nodes(known)
        self.places = len(known.node_ids)
        self.sizes = KnownSizes(known.sizes)
        self.online = _Online(known.node_ids, set())
        self._by_place: dict[int, int] | None = None

    @property
    def nodes(self) -> Sequence[Node]:
        """One for each place, at its partition id."""
        return self._places

    @property
    def present(self) -> Sequence[int]:
        """The partition ids of those that are there, ascending."""
        if len(self.online) == len(self):
            return range(len(self))
        return super().present

    @property
    def node_ids(self) -> Mapping[int, int]:
        """The node ids of those that are there, by partition id, ascending."""
        if len(self.online) < len(self):
            return super().node_ids
        if self._by_place is None:
            self._by_place = dict(enumerate(self._known.node_ids.tolist()))
        return self._by_place

    def continued(
        self, names: Mapping[str, int], shapes: Shapes | None = None, admits: Admits | None = None
    ) -> Roster:
        """Return the roster of the same nodes, for a run that goes on, see ``Roster.continued``."""
        if not names and shapes is None and admits is None:
            return self
        self._told = {node.partition_id: node for node in self.nodes}
        return super().continued(names, shapes, admits)

    def refuse(self, node_id: int, reason: str, server_round: int) -> None:
        """Leave a node out, for a reason of some words that is counted, for some rounds."""
        for node in [node for node in self._places.made.values() if node.node_id == node_id]:
            self.online.discard(node_id)
            self._leave_out(node, reason, server_round)
        self._warn_of_all()

    def _look(self, grid: Grid, timeout: float, server_round: int) -> None:
        resting = [at for at, (_, until) in self._resting.items() if server_round < until]
        self._kept = {self.nodes[at].node_id for at in resting if at < len(self)}
        refused = {i for i, (_, until) in self._outside.items() if server_round < until}
        self.online = _Online(self._known.node_ids, self._kept | refused)


def known_roster(grid: Grid, expected: int | None, admits: Admits | None) -> KnownRoster | None:
    """Return the roster of a grid's nodes where it knows who they are; None where they must be asked.

    Parameters
    ----------
    grid : Grid
        Any; hedgerow's engine has ``known_nodes``.
    expected, admits
        As in ``Roster.gather``.
    """
    known: KnownNodes | None = getattr(grid, "known_nodes", lambda: None)()
    if known is None or expected not in (None, len(known.node_ids)):
        return None
    roster = KnownRoster(known)
    return None if admits is not None and any(map(admits, roster.nodes)) else roster
