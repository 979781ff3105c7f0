"""What a gossip method tells the strategy that runs it: who hears whom, and how large a message is."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from hedgerow.strategies.gossip.payload_sizes import PayloadSizes
from hedgerow.strategies.parts.privacy import NodeNoise
from hedgerow.strategies.router import GraphAt
from hedgerow.strategies.topology import neighbours

__all__ = ["GossipMethod", "Scalar"]

Scalar = bool | int | float | str | list[int] | list[float]


class GossipMethod(Protocol):
    """What sets a method apart: who may hear whom, who does, and how large a message is.

    Attributes
    ----------
    name : str
        The method's name, as nodes know it.
    num_nodes, dim : int
        Nodes m, and the model's dimension n.
    graph : GraphAt
        Who may hear whom at an iteration.
    sizes : PayloadSizes
        How large a message is.
    privacy : NodeNoise
        The noise on the nodes' gradients.
    """

    name: str
    num_nodes: int
    dim: int
    graph: GraphAt
    sizes: PayloadSizes
    privacy: NodeNoise

    def instructions(self, node: int) -> Mapping[str, Scalar]:
        """Return the settings that a node is told once."""

    @property
    def set_up_bytes(self) -> int:
        """Bytes that a node tells each neighbour before its first message."""
        return 0

    def peers(self, node: int) -> Sequence[int]:
        """Return whom a node exchanges payloads with at any iteration, ascending."""
        return neighbours(self.graph(0), node)

    def wants(self, node: int, k: int) -> Sequence[int] | None:
        """Return the neighbours that a node gets payloads of at iteration k; None leaves it to the node."""
        return None

    def first(self, node: int) -> int | None:
        """Return how many payloads a node takes, the first that arrive; None for all that it wants."""
        return None

    def event(self, node: int, k: int, readers: Sequence[int]) -> Mapping[str, Scalar]:
        """Return what a node is told of its communication at iteration k alone.

        ``readers`` are the nodes that were handed what it published, ascending.
        """
        return {}

    def releases(self, begun: int, updates: int, iterations: int) -> int:
        """Return how many noisy gradients a node releases at most.

        Parameters
        ----------
        begun : int
            How often it began at W^0.
        updates : int
            Updates that it was sent.
        iterations : int
            Iterations that it made, those before it began anew included.
        """

    def describe(self) -> Iterable[str]:
        """Return the settings in a few lines."""
        return []
