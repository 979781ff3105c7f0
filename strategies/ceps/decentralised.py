"""The common part of CEPS's baselines: options, graphs, mixing weights, messages.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", section V, the settings
of the comparison.
Differs: mixing weights, which the paper leaves open, are Metropolis weights. All nodes communicate at the
same iterations. A node that misses a payload keeps that payload's weight itself.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Required, Self, Unpack

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from hedgerow.strategies.ceps.privacy import Privacy
from hedgerow.strategies.ceps.strategy import Topology, neighbourhood_graph
from hedgerow.strategies.gossip.exposure import NoisyReleases
from hedgerow.strategies.gossip.method import GossipMethod, PayloadSizes, Scalar, coded_sizes
from hedgerow.strategies.gossip.strategy import Gossip, GossipOptions, places_in
from hedgerow.strategies.router import GraphAt, graph_at
from hedgerow.strategies.topology import (
    ONE_PEER,
    as_digraph,
    metropolis,
    one_peer_exponential,
    push_weights,
    senders,
)
from hedgerow.wire.checks import in_range, int_at_least
from hedgerow.wire.seeds import Purpose, generator

Matrix = NDArray[np.float64]

LARGEST_STEP = 1e6


class NetworkOptions(GossipOptions, total=False):
    """Keyword options of every baseline, except its privacy; see ``Decentralised``."""

    dim: Required[int]
    topology: Topology


class BaselineOptions(NetworkOptions, total=False):
    """Keyword options of a baseline with optional privacy; see ``Decentralised``."""

    privacy: Privacy | None


@dataclass(frozen=True)
class Network:
    """The graph at iteration k, its mixing matrix W (m, m), and whether they change with k.

    If nodes push, W's columns sum to one and its rows need not: what a node's receivers do not get stays with
    the node.
    """

    graph: GraphAt
    matrix: Callable[[int], Matrix]
    changes: bool
    pushes: bool = False

    @classmethod
    def weighted(
        cls, graph: GraphAt, weights: Callable[[Any], Matrix], *, changes: bool, pushes: bool = False
    ) -> Self:
        """Return the network with the weights of its graph at each iteration as matrix."""
        return cls(graph, lru_cache(maxsize=8)(lambda k: weights(graph(k))), changes, pushes)


def fixed_network(topology: Topology, num_nodes: int, seed: int) -> Network:
    """Return a graph with Metropolis weights, the same for all iterations."""
    graph = graph_at(neighbourhood_graph(topology, num_nodes, seed))
    return Network.weighted(graph, _metropolis, changes=False)


def dynamic_network(topology: Topology, num_nodes: int, seed: int) -> Network:
    """Return a random graph with Metropolis weights, drawn anew for every communication."""
    _check_drawn(topology)

    def draw(k: int) -> nx.Graph:
        return neighbourhood_graph(topology, num_nodes, _own_seed(seed, k))

    graph = graph_at(draw)
    graph(0)  # Report an invalid name now.
    return Network.weighted(graph, _metropolis, changes=True)


def push_network(
    topology: Topology, num_nodes: int, seed: int, *, interval: int, dynamic: bool = False
) -> Network:
    """Return a strongly connected directed graph with the weights of push-sum; ValueError if there is none.

    The topology is as in ``topology.as_digraph``; ``one-peer-exponential``, another graph at each
    communication; or None, the undirected random regular graph of the other baselines, with edges in both
    directions. ``interval`` is the number of iterations between communications, >= 1; ``dynamic`` draws the
    graph anew for each.
    """

    def draw(own: int) -> nx.DiGraph:
        if topology is None:
            return neighbourhood_graph(None, num_nodes, own).to_directed()
        return as_digraph(topology, num_nodes, own)

    def one_peer(k: int) -> nx.DiGraph:
        # The first communication is at iteration ``interval``.
        return one_peer_exponential(num_nodes, max(0, k // interval - 1))

    if dynamic:
        _check_drawn(topology)
        graph = graph_at(lambda k: draw(_own_seed(seed, k)))
    elif changes := isinstance(topology, str) and topology.strip() == ONE_PEER:
        graph = graph_at(one_peer)
    else:
        graph = graph_at(draw(seed))
    graph(0)  # Report an invalid name now.
    return Network.weighted(graph, push_weights, changes=dynamic or changes, pushes=True)


def _check_drawn(topology: Topology) -> None:
    if not (topology is None or isinstance(topology, str)):
        raise ValueError(
            f"topology must be the name of a random one, or None, in a dynamic network, got {topology!r}"
        )


def _own_seed(seed: int, k: int) -> int:
    """Return the seed of the graph drawn for iteration k."""
    return int(generator(seed, round=k, purpose=Purpose.TOPOLOGY).integers(2**31))


def _metropolis(graph: nx.Graph) -> Matrix:
    return metropolis(graph).matrix


class Decentralised(Gossip):
    """A baseline: its name, its nodes' settings, and the size of its messages.

    **The ClientApp must be** ``hedgerow.clients.ceps_client(problem)``, which has the arithmetic.

    Parameters
    ----------
    name : str
        The method's name in the nodes' settings.
    learning_rate : float
        eta in (0, 10^6].
    keys : Mapping[str, Scalar] (default: none)
        Further settings of the nodes.
    local_steps : int (default: 1)
        Iterations from one communication to the next, >= 1.
    participation : float (default: 1.0)
        In (0, 1]. Below 1 a node draws that share of its neighbours, and averages their models and its own
        with equal weights.
    codec, sparsity, vectors
        Of a message, as in ``gossip.method.coded_sizes``.
    gradients : int (default: 1)
        Gradients per iteration, each with noise of its own.
    scalars : int (default: 0)
        Numbers in a message beside its vectors, with a dense codec.
    network : Callable (default: fixed_network)
        Returns the network for a topology, number of nodes and seed.
    dim : int
        Model dimension n, >= 1.
    topology : str, networkx.Graph, edges or None (default: None)
        A connected graph; None is a random regular one of degree m / 4.
    privacy : Privacy or None (default: None)
        The noise on each gradient; ``sound`` also clips.
    **options
        See ``GossipOptions`` and ``Gossip``; ``num_clients`` is the number of nodes m.
    """

    def __init__(
        self,
        name: str,
        learning_rate: float,
        keys: Mapping[str, Scalar] | None = None,
        local_steps: int = 1,
        participation: float = 1.0,
        *,
        codec: str = "dense64",
        sparsity: int | None = None,
        vectors: int = 1,
        gradients: int = 1,
        scalars: int = 0,
        network: Callable[[Topology, int, int], Network] = fixed_network,
        dim: int,
        topology: Topology = None,
        privacy: Privacy | None = None,
        **options: Unpack[GossipOptions],
    ) -> None:
        in_range("learning_rate", learning_rate, 0.0, LARGEST_STEP, open_below=True)
        in_range("participation", participation, 0.0, 1.0, open_below=True)
        num_nodes, seed = places_in(options), options.get("seed", 0)
        int_at_least(1, local_steps=local_steps)
        int_at_least(0, seed=seed)
        int_at_least(1, dim=dim)
        sizes = coded_sizes(codec, dim + scalars, sparsity, vectors=vectors)
        # Nodes need the number of vectors only of a quantiser.
        told = f"{codec}x{vectors}" if vectors > 1 and codec.startswith("quantised") else codec
        settings: dict[str, Scalar] = {"codec": told, "r": participation, "eta": learning_rate}
        if sparsity is not None:
            settings["s"] = vectors * sparsity
        settings |= dict.fromkeys(("local-steps", "kappa-low", "kappa-high"), local_steps)
        joined = network(topology, num_nodes, seed)
        method = _Method(
            name,
            num_nodes,
            dim,
            joined,
            joined.graph,
            sizes,
            {**settings, **(keys or {})},
            hears_all=participation == 1,
        )

        def releases(begun: int, updates: int, iterations: int) -> int:
            # A node that joins late, or lost its state, repeats the steps from W^0 with new noise.
            return iterations * gradients

        super().__init__(method, privacy=NoisyReleases(privacy or Privacy(), releases), **options)


@dataclass(frozen=True)
class _Method(GossipMethod):
    """A baseline as the relay sees it."""

    name: str
    num_nodes: int
    dim: int
    network: Network
    graph: GraphAt
    sizes: PayloadSizes
    keys: Mapping[str, Scalar]
    hears_all: bool

    def instructions(self, node: int) -> dict[str, Scalar]:
        return {**self.keys, "num-nodes": self.num_nodes, **self._place(node, 0)}

    def peers(self, node: int) -> Sequence[int]:
        if self.network.changes:
            return [j for j in range(self.num_nodes) if j != node]
        return super().peers(node)

    def event(self, node: int, k: int, readers: Sequence[int]) -> dict[str, Scalar]:
        receivers = set(self.graph(k).neighbors(node)) if self.network.pushes else set()
        heard_by = sorted(receivers.intersection(readers))
        if not self.network.changes and len(heard_by) == len(receivers):
            return {}
        place = self._place(node, k)
        if len(heard_by) < len(receivers):
            # What is not delivered stays with the node: columns always sum to one.
            place["weights"][-1] = 1.0 - float(self.network.matrix(k)[heard_by, node].sum())
        return place

    def wants(self, node: int, k: int) -> Sequence[int] | None:
        return senders(self.graph(k), node) if self.hears_all else None

    def describe(self) -> Iterable[str]:
        yield ", ".join(f"{key} = {value}" for key, value in self.keys.items())

    def _place(self, node: int, k: int) -> dict[str, Any]:
        """Return a node's neighbours and, if it hears all of them, their weights with its own at the end."""
        place: dict[str, Any] = {"neighbours": senders(self.graph(k), node)}
        if self.hears_all:
            place["weights"] = self.network.matrix(k)[node, [*place["neighbours"], node]].tolist()
        return place
