"""CEPS, Algorithm 1, as the server sees it that carries its messages.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", Algorithm 1: who hears
whom, when, and what a message takes. An event of iteration k is that of all methods on a graph
(``gossip/algorithm.py``). Algorithm 2 and the steps (3) and (4) are the nodes' (``clients/ceps``): models,
gradients and sensing matrices live there, and so does the mean of a neighbourhood.
Differs: the paper counts node i among its neighbours N_i, and among the t_i of them that are heard. Here N_i
is without i, max(1, round(r |N_i|)) of it are heard, and the node's own model is used besides, which the
volumes of the paper's Table V support.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import networkx as nx

from hedgerow.strategies.ceps.privacy import Privacy
from hedgerow.strategies.gossip.method import GossipMethod, Scalar
from hedgerow.strategies.gossip.payload_sizes import PayloadCoding, PayloadSizes
from hedgerow.strategies.router import GraphAt
from hedgerow.strategies.topology import as_graph
from hedgerow.wire.checks import in_range, one_of
from hedgerow.wire.robust_means import Aggregation
from hedgerow.wire.sensing import MATRICES

__all__ = ["Algorithm1", "OneBitCode", "Topology", "neighbourhood_graph", "participants"]

Topology: TypeAlias = str | nx.Graph | Sequence[tuple[int, int]] | None

_SEED_BYTES = 8
_GAMMA_BYTES = 8


def participants(participation: float, degree: int) -> int:
    """Return how many neighbours a node hears, max(1, round(r degree)); 0 for a node without any."""
    return min(degree, max(1, round(participation * degree)))


def neighbourhood_graph(topology: Topology, num_nodes: int, seed: int) -> nx.Graph:
    """Return a connected graph; without a topology a random regular one of degree m / 4, at least 2."""
    if topology is not None:
        return as_graph(topology, num_nodes, seed)
    degree = max(2, round(num_nodes / 4))
    if num_nodes <= 3:
        return as_graph("complete", num_nodes, seed)
    return as_graph(f"regular({degree + degree * num_nodes % 2})", num_nodes, seed)


@dataclass(frozen=True)
class OneBitCode:
    """How one-bit messages are made and read; see ``hedgerow.wire.onebit.OneBit``.

    Parameters
    ----------
    expand : {"consistent", "literal"} (default: "consistent")
        Whether the scale that Algorithm 2 divides out is recovered, or the algorithm taken literally.
    compand : {"log", "none"} (default: "log")
        What is measured: sign(w) log(1 + |w|), or w.
    gamma : float (default: 5.0)
        Base of the literal expansion, > 1.
    decoder : {"gpsp", "biht"} (default: "gpsp")
        How problem (9) is solved.
    phi : {"gaussian", "srht"} (default: "gaussian")
        The paper's Gaussian matrix, or a subsampled randomised Hadamard transform, for a dimension whose
        matrix is too large.
    phi_density : float (default: 1.0)
        Fraction of nonzeros of a Gaussian Phi, in [0.5, 1].
    phi_owner : {"sender", "receiver"} (default: "sender")
        Whose Phi measures: the sender's, and it encodes once for all; or each receiver's.
    """

    expand: str = "consistent"
    compand: str = "log"
    gamma: float = 5.0
    decoder: str = "gpsp"
    phi: str = "gaussian"
    phi_density: float = 1.0
    phi_owner: str = "sender"

    def __post_init__(self) -> None:
        for key, names in (
            ("expand", ("consistent", "literal")),
            ("compand", ("log", "none")),
            ("decoder", ("gpsp", "biht")),
            ("phi", MATRICES),
            ("phi_owner", ("sender", "receiver")),
        ):
            one_of(key, getattr(self, key), names)
        in_range("gamma", self.gamma, 1.0, 1e100, open_below=True)
        in_range("phi_density", self.phi_density, 0.5, 1.0)
        if self.phi == "srht" and self.phi_density != 1:
            raise ValueError(f"phi_density must be 1 with phi = 'srht', got {self.phi_density!r}")

    def instructions(self) -> dict[str, str | float]:
        """Return the settings as keys of a message's config."""
        return {key.replace("_", "-"): value for key, value in self.__dict__.items()}


@dataclass(frozen=True)
class Algorithm1(GossipMethod):
    """Who hears whom, when, and what a message takes."""

    num_nodes: int
    dim: int
    graph: GraphAt
    sizes: PayloadSizes
    coding: PayloadCoding
    code: OneBitCode
    participation: float
    interval: tuple[int, int]
    stragglers: bool
    step: Mapping[str, Scalar]
    privacy: Privacy
    rule: Aggregation
    name: str = "ceps"

    # Initialisation: node i picks kappa_i, sigma_i and Phi_i, and tells its neighbours Phi_i and gamma_i.

    def instructions(self, node: int) -> dict[str, Scalar]:
        """Return what a node is told once."""
        low, high = self.interval
        rule: dict[str, Scalar] = {}
        if not self.rule.is_mean:
            rule = {"aggregation": self.rule.name, "aggregation-number": (*self.rule.arguments, 0.0)[0]}
        return {
            "codec": self.coding.codec,
            "s": self.coding.sparsity or 0,
            "d": self.coding.measurements or 0,
            **self.code.instructions(),
            "r": self.participation,
            "ask": "all" if self.stragglers else "chosen",
            "kappa-low": low,
            "kappa-high": high,
            **self.step,
            **self.privacy.instructions(),
            **rule,
            "neighbours": list(self.peers(node)),
            "num-nodes": self.num_nodes,
        }

    @property
    def set_up_bytes(self) -> int:
        """A seed of Phi_i, and gamma_i where it is used, for each neighbour."""
        literal = self.code.expand == "literal"
        return (_SEED_BYTES + literal * _GAMMA_BYTES) if self.coding.codec == "1bcs" else 0

    # Iteration k in K_i: the neighbours in N_i^k send z_j^k.

    def wants(self, node: int, k: int) -> Sequence[int] | None:
        """Return N_i, where those count that reply first; None: the node draws N_i^k of it."""
        return self.peers(node) if self.stragglers else None

    def first(self, node: int) -> int | None:
        """Return t_i, where those count that reply first (section III-E)."""
        return participants(self.participation, len(self.peers(node))) if self.stragglers else None

    def releases(self, begun: int, updates: int, iterations: int) -> int:
        """Return a gradient at W^0, and one a communication, whatever iterations the node made in between."""
        return begun + updates

    def describe(self) -> Iterable[str]:
        """Return the settings in a few lines."""
        degrees = sorted(degree for _, degree in self.graph(0).degree)
        yield f"Neighbours: {degrees[0]} to {degrees[-1]}, heard: r = {self.participation:g}" + (
            ", the first that reply" if self.stragglers else ""
        )
        low, high = self.interval
        yield f"{self.coding.codec}, n = {self.dim}, s = {self.coding.sparsity}, kappa: {low} to {high}"
        yield f"mu = {self.step['mu']:g}, sigma: {self.step['sigma-rule']}, privacy: {self.privacy.mode}"
        yield f"Aggregation: {self.rule}"
