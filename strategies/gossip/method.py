"""What a gossip method tells the strategy that runs it: who hears whom, and how large a message is."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from hedgerow.strategies.federation import FederationOptions
from hedgerow.strategies.gossip.monitor import Monitor
from hedgerow.strategies.gossip.payload_sizes import PayloadSizes
from hedgerow.strategies.gossip.sites import Site
from hedgerow.strategies.privacy import Privacy
from hedgerow.strategies.router import GraphAt
from hedgerow.strategies.topology import neighbours
from hedgerow.wire.checks import int_at_least

__all__ = ["GossipMethod", "GossipOptions", "Scalar", "places_in"]

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
    privacy : Privacy
        The noise on the nodes' gradients.
    """

    name: str
    num_nodes: int
    dim: int
    graph: GraphAt
    sizes: PayloadSizes
    privacy: Privacy

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


class GossipOptions(FederationOptions, total=False):
    """Options that every gossip strategy takes, by keyword; see ``Gossip``."""

    num_iterations: int | None
    monitor: Monitor | None
    sealed: bool
    site: Site | None


def places_in(options: GossipOptions) -> int:
    """Return the nodes m of the graph: ``num_clients`` where it is given, else ``min_available_nodes``.

    Raises
    ------
    ValueError
        If it is no integer >= 1: a graph has a number of nodes.
    """
    if (places := options.get("num_clients")) is not None:
        int_at_least(1, num_clients=places)
        return places
    places = options.get("min_available_nodes", 2)
    int_at_least(1, min_available_nodes=places)
    return places
