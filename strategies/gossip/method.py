"""The protocol of gossip methods: communication graph, choice of neighbours, and message sizes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from hedgerow.strategies.gossip.payload_sizes import PayloadSizes
from hedgerow.strategies.router import GraphAt
from hedgerow.strategies.topology import neighbours

Scalar = bool | int | float | str | list[int] | list[float]


class GossipMethod(Protocol):
    """A gossip method, as the strategy sees it.

    Attributes
    ----------
    name : str
        The method's name, as nodes know it.
    num_nodes, dim : int
        Nodes m, and the model's dimension n.
    graph : GraphAt
        The communication graph of an iteration.
    sizes : PayloadSizes
        The size of a message.
    """

    name: str
    num_nodes: int
    dim: int
    graph: GraphAt
    sizes: PayloadSizes

    def instructions(self, node: int) -> Mapping[str, Scalar]:
        """Return the settings that a node is sent once."""

    @property
    def set_up_bytes(self) -> int:
        """Bytes that a node sends each neighbour before its first message."""
        return 0

    def peers(self, node: int) -> Sequence[int]:
        """Return the nodes that a node exchanges payloads with at any iteration, ascending."""
        return neighbours(self.graph(0), node)

    def wants(self, node: int, k: int) -> Sequence[int] | None:
        """Return the neighbours that a node gets payloads from at iteration k; None if the node chooses."""
        return None

    def first(self, node: int) -> int | None:
        """Return how many payloads a node takes, the first that arrive; None for all that it wants."""
        return None

    def event(self, node: int, k: int, readers: Sequence[int]) -> Mapping[str, Scalar]:
        """Return a node's config for iteration k; ``readers`` are its payload's receivers, ascending."""
        return {}

    def describe(self) -> Iterable[str]:
        """Return the settings in a few lines."""
        return []
