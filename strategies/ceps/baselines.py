"""What the relay must know of the methods that CEPS is compared with: graphs, mixing weights, messages.

Papers: D-PSGD (X. Lian et al., 2017), DCD-PSGD (H. Tang et al., 2018), DFedAvgM (T. Sun et al., 2022),
DFedSAM (Y. Shi et al., 2023), MATCHA (J. Wang et al., 2019) and DP-DSGT, differentially private gradient
tracking; in the settings of S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning",
section V, which adds D-PSGD over dynamic networks and with partial communication.
Differs: mixing weights, which that comparison leaves open, are Metropolis's. All nodes communicate at the
same iterations; one of which a payload is lost keeps that payload's weight itself.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Unpack

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from hedgerow.strategies.ceps.matcha import Activation
from hedgerow.strategies.ceps.strategy import neighbourhood_graph
from hedgerow.strategies.gossip.payload_sizes import PayloadSizes
from hedgerow.strategies.gossip.strategy import Gossip, GossipOptions, Scalar
from hedgerow.strategies.privacy import Privacy
from hedgerow.strategies.router import GraphAt, graph_at
from hedgerow.strategies.topology import metropolis
from hedgerow.wire.checks import in_range, int_at_least
from hedgerow.wire.seeds import Purpose, generator

__all__ = ["DCDPSGD", "DPDSGT", "DPSGD", "DFedAvgM", "DFedSAM", "Matcha"]

Matrix = NDArray[np.float64]
MatrixAt = Callable[[int], Matrix]

_LARGEST_STEP = 1e6


class DPSGD(Gossip):
    """Decentralised parallel SGD: every ``local_steps`` iterations the step starts from the neighbours' mean.

    x_i <- sum_j W_ij x_j - eta g_i(x_i) at a communication, x_i <- x_i - eta g_i(x_i) otherwise.

    **The ClientApp must be** ``hedgerow.clients.decentralised_client(problem)``, here and for every strategy
    of this file.

    Parameters
    ----------
    dim : int
        Model dimension n, >= 1.
    learning_rate : float (default: 0.1)
        eta > 0.
    local_steps : int (default: 10)
        Iterations from one communication to the next, >= 1.
    topology : str, networkx.Graph, edges or None (default: None)
        A connected graph; None is a random regular one of degree m / 4.
    dynamic : bool (default: False)
        Whether every communication draws a new graph (D-PSGD-DN); then ``topology`` is a random one's name
        or None.
    participation : float (default: 1.0)
        In (0, 1]. Below 1 a node hears that share of its neighbours, drawn by itself, and averages them and
        itself with equal weights (D-PSGD-PC).
    sparsity : int or None (default: None)
        Keep this many of the largest entries after each communication, >= 1; the comparison of CEPS leaves
        its rivals dense. None keeps all.
    privacy : Privacy or None (default: None)
        The noise on each gradient; ``sound`` also clips.
    **options
        See ``GossipOptions`` and ``Gossip``; ``min_available_nodes`` is the number of nodes m.

    Raises
    ------
    ValueError
        If a parameter is out of range, naming it, its value and what is valid.
    """

    def __init__(
        self,
        *,
        dim: int,
        learning_rate: float = 0.1,
        local_steps: int = 10,
        topology: str | nx.Graph | Sequence[tuple[int, int]] | None = None,
        dynamic: bool = False,
        participation: float = 1.0,
        sparsity: int | None = None,
        privacy: Privacy | None = None,
        **options: Unpack[GossipOptions],
    ) -> None:
        if dynamic and participation < 1:
            raise ValueError(f"participation is {participation!r}; valid in a dynamic network is 1")
        name = "d-psgd-dn" if dynamic else "d-psgd-pc" if participation < 1 else "d-psgd"
        nodes, seed = _nodes_and_seed(options)
        graph = _changing(topology, nodes, seed) if dynamic else _fixed(topology, nodes, seed)
        keys = _step_keys(learning_rate, local_steps)
        if sparsity is not None:
            int_at_least(1, sparsity=sparsity)
            keys |= {"threshold": True, "s": sparsity}
        method = _Method(
            name,
            nodes,
            graph,
            PayloadSizes("dense64", dim),
            keys,
            privacy or Privacy(),
            changes=dynamic,
            participation=participation,
        )
        super().__init__(method, **options)


class DFedAvgM(Gossip):
    """Decentralised FedAvg with momentum: ``local_steps`` heavy-ball steps, then one step of mixing.

    Parameters
    ----------
    dim, topology, privacy, **options
        As in ``DPSGD``.
    learning_rate : float (default: 0.02)
        eta > 0.
    momentum : float (default: 0.9)
        theta in [0, 1); starts anew after each communication.
    local_steps : int (default: 10)
        Steps between communications, >= 1.
    participation : float (default: 1.0)
        As in ``DPSGD``. The comparison of CEPS takes CEPS's.
    bits : int or None (default: None)
        Bits of an entry of what is sent, the quantised change of a round, 2 to 16; None sends models.

    Raises
    ------
    ValueError
        If a parameter is out of range, naming it, its value and what is valid.
    """

    def __init__(
        self,
        *,
        dim: int,
        learning_rate: float = 0.02,
        momentum: float = 0.9,
        local_steps: int = 10,
        participation: float = 1.0,
        bits: int | None = None,
        topology: str | nx.Graph | Sequence[tuple[int, int]] | None = None,
        privacy: Privacy | None = None,
        **options: Unpack[GossipOptions],
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum!r}; valid is a number in [0, 1)")
        nodes, seed = _nodes_and_seed(options)
        keys = {**_step_keys(learning_rate, local_steps), "theta": momentum}
        sizes = PayloadSizes("dense64" if bits is None else f"quantised{bits}", dim)
        graph = _fixed(topology, nodes, seed)
        method = _Method(
            "dfedavgm", nodes, graph, sizes, keys, privacy or Privacy(), participation=participation
        )
        super().__init__(method, **options)


class DFedSAM(Gossip):
    """Decentralised sharpness-aware minimisation: gradients are taken where the loss is worst nearby.

    y <- y - eta g(y + rho g(y) / ||g(y)||) ``local_steps`` times, then one step of mixing.

    Parameters
    ----------
    dim, topology, privacy, **options
        As in ``DPSGD``.
    learning_rate : float (default: 0.1)
        eta > 0.
    rho : float (default: 0.05)
        How far away, >= 0; 0 is plain local SGD.
    local_steps, participation
        As in ``DFedAvgM``.

    Raises
    ------
    ValueError
        If a parameter is out of range, naming it, its value and what is valid.
    """

    def __init__(
        self,
        *,
        dim: int,
        learning_rate: float = 0.1,
        rho: float = 0.05,
        local_steps: int = 10,
        participation: float = 1.0,
        topology: str | nx.Graph | Sequence[tuple[int, int]] | None = None,
        privacy: Privacy | None = None,
        **options: Unpack[GossipOptions],
    ) -> None:
        in_range("rho", rho, 0.0, _LARGEST_STEP)
        nodes, seed = _nodes_and_seed(options)
        keys = {**_step_keys(learning_rate, local_steps), "rho-sam": rho}
        method = _Method(
            "dfedsam",
            nodes,
            _fixed(topology, nodes, seed),
            PayloadSizes("dense64", dim),
            keys,
            privacy or Privacy(),
            participation=participation,
            gradients=2,
        )
        super().__init__(method, **options)


class DCDPSGD(Gossip):
    """D-PSGD with difference compression: nodes hold replicas of their neighbours, moved by what is sent.

    Each iteration sends the quantised change of x_i. Every replica of x_i is x_i itself as long as no
    message is lost; a lost one leaves the replica behind for good.

    Parameters
    ----------
    dim, topology, privacy, **options
        As in ``DPSGD``.
    learning_rate : float (default: 0.1)
        eta > 0.
    bits : int (default: 8)
        Bits of an entry, 2 to 16. Too few let the method diverge.

    Raises
    ------
    ValueError
        If a parameter is out of range, naming it, its value and what is valid.
    """

    def __init__(
        self,
        *,
        dim: int,
        learning_rate: float = 0.1,
        bits: int = 8,
        topology: str | nx.Graph | Sequence[tuple[int, int]] | None = None,
        privacy: Privacy | None = None,
        **options: Unpack[GossipOptions],
    ) -> None:
        nodes, seed = _nodes_and_seed(options)
        graph, sizes = _fixed(topology, nodes, seed), PayloadSizes(f"quantised{bits}", dim)
        method = _Method("dcd-psgd", nodes, graph, sizes, _step_keys(learning_rate, 1), privacy or Privacy())
        super().__init__(method, **options)


class DPDSGT(Gossip):
    """Differentially private gradient tracking: models and trackers of the mean gradient, both mixed.

    Each iteration sends x_j and y_j, two dense vectors.

    Parameters
    ----------
    dim, topology, **options
        As in ``DPSGD``.
    privacy : Privacy
        Clipping and noise; ``Privacy.for_run`` finds the noise of a run.
    learning_rate : float (default: 0.1)
        eta > 0.

    Raises
    ------
    ValueError
        If a parameter is out of range, naming it, its value and what is valid.
    """

    def __init__(
        self,
        *,
        dim: int,
        privacy: Privacy,
        learning_rate: float = 0.1,
        topology: str | nx.Graph | Sequence[tuple[int, int]] | None = None,
        **options: Unpack[GossipOptions],
    ) -> None:
        nodes, seed = _nodes_and_seed(options)
        graph, sizes = _fixed(topology, nodes, seed), PayloadSizes("dense64", dim, vectors=2)
        method = _Method("dp-dsgt", nodes, graph, sizes, _step_keys(learning_rate, 1), privacy)
        super().__init__(method, **options)


class Matcha(Gossip):
    """MATCHA: each iteration communicates over some matchings of the graph, drawn at random.

    x_i <- sum_j W_ij (x_j - eta g_j).

    Parameters
    ----------
    dim, topology, privacy, **options
        As in ``DPSGD``.
    learning_rate : float (default: 0.1)
        eta > 0.
    budget : float (default: 0.5)
        C_b in (0, 1]: the share of the whole graph's communication.

    Raises
    ------
    ValueError
        If a parameter is out of range, naming it, its value and what is valid.
    """

    def __init__(
        self,
        *,
        dim: int,
        learning_rate: float = 0.1,
        budget: float = 0.5,
        topology: str | nx.Graph | Sequence[tuple[int, int]] | None = None,
        privacy: Privacy | None = None,
        **options: Unpack[GossipOptions],
    ) -> None:
        nodes, seed = _nodes_and_seed(options)
        self.activation = activation = Activation(neighbourhood_graph(topology, nodes, seed), budget)
        graph = graph_at(lambda k: activation.active(seed, k))
        method = _Method(
            "matcha",
            nodes,
            graph,
            PayloadSizes("dense64", dim),
            _step_keys(learning_rate, 1),
            privacy or Privacy(),
            matrix=lambda k: activation.matrix(graph(k)),
            changes=True,
        )
        super().__init__(method, **options)


class _Method:
    """What the relay is told of a baseline."""

    set_up_bytes = 0

    def __init__(
        self,
        name: str,
        num_nodes: int,
        graph: GraphAt,
        sizes: PayloadSizes,
        keys: Mapping[str, Scalar],
        privacy: Privacy,
        *,
        matrix: MatrixAt | None = None,
        changes: bool = False,
        participation: float = 1.0,
        gradients: int = 1,
    ) -> None:
        in_range("participation", participation, 0.0, 1.0, open_below=True)
        self.name = name
        self.num_nodes = num_nodes
        self.graph = graph
        self.sizes = sizes
        self.privacy = privacy
        self.participation = participation
        self.gradients = gradients
        self.changes = changes
        self.matrix = lru_cache(maxsize=8)(matrix or (lambda k: metropolis(graph(k)).matrix))
        self._keys = {"codec": sizes.codec, "r": participation, **keys}

    def instructions(self, node: int) -> dict[str, Scalar]:
        place = {"num-nodes": self.num_nodes, **self._place(node, 0)}
        return {**self._keys, **self.privacy.instructions(), **place}

    def event(self, node: int, k: int) -> dict[str, Scalar]:
        return self._place(node, k) if self.changes else {}

    def wants(self, node: int, k: int) -> Sequence[int] | None:
        return self._neighbours(node, k) if self.participation == 1 else None

    def first(self, node: int) -> int | None:
        return None

    def metrics(self, iterations: int, restarts: int = 0) -> dict[str, float]:
        if self.privacy.mode == "none":
            return {}
        # A node that lost its state takes the steps from W^0 on again, with other noise.
        return self.privacy.report(iterations * self.gradients * (1 + restarts)).metrics()

    def describe(self) -> Iterable[str]:
        yield ", ".join(f"{key} = {value}" for key, value in self._keys.items())

    def _place(self, node: int, k: int) -> dict[str, Scalar]:
        """Return a node's neighbours and, where it hears all of them, their weights and its own, the last."""
        neighbours = self._neighbours(node, k)
        if self.participation < 1:
            return {"neighbours": neighbours}
        return {"neighbours": neighbours, "weights": self.matrix(k)[node, [*neighbours, node]].tolist()}

    def _neighbours(self, node: int, k: int) -> list[int]:
        return sorted(self.graph(k).neighbors(node))


def _nodes_and_seed(options: GossipOptions) -> tuple[int, int]:
    nodes, seed = options.get("min_available_nodes", 2), options.get("seed", 0)
    int_at_least(1, min_available_nodes=nodes)
    int_at_least(0, seed=seed)
    return nodes, seed


def _step_keys(learning_rate: float, local_steps: int) -> dict[str, Scalar]:
    in_range("learning_rate", learning_rate, 0.0, _LARGEST_STEP, open_below=True)
    int_at_least(1, local_steps=local_steps)
    interval: dict[str, Scalar] = {"kappa-low": local_steps, "kappa-high": local_steps}
    return {"eta": learning_rate, "local-steps": local_steps, **interval}


def _fixed(topology: str | nx.Graph | Sequence[tuple[int, int]] | None, num_nodes: int, seed: int) -> GraphAt:
    return graph_at(neighbourhood_graph(topology, num_nodes, seed))


def _changing(
    topology: str | nx.Graph | Sequence[tuple[int, int]] | None, num_nodes: int, seed: int
) -> GraphAt:
    """Return a new draw of a random graph for every iteration that communicates."""
    if not (topology is None or isinstance(topology, str)):
        raise ValueError(
            f"topology is {topology!r}; valid in a dynamic network is a random one's name, or None"
        )

    def draw(k: int) -> nx.Graph:
        own = int(generator(seed, round=k, purpose=Purpose.TOPOLOGY).integers(2**31))
        return neighbourhood_graph(topology, num_nodes, own)

    return graph_at(draw)
