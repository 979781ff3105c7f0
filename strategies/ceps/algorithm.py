"""CEPS, Algorithm 1, as seen by the server that relays its messages.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", Algorithm 1: which
neighbours a node hears, when, and how large a message is. ``gossip/algorithm.py`` has the event of an
iteration k, the same for all methods on a graph. Algorithm 2 and the steps (3) and (4) run at the nodes
(``clients/ceps``), which hold the models, gradients and sensing matrices and average their neighbourhoods.
Differs: the paper counts node i among its neighbours N_i, and among the t_i of them that are heard. Here N_i
excludes i, max(1, round(r |N_i|)) of it are heard, and the node's own model is used in addition, which the
volumes of the paper's Table V support.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import networkx as nx

from hedgerow.strategies.gossip.method import GossipMethod, Scalar
from hedgerow.strategies.gossip.payload_sizes import PayloadCoding, PayloadSizes
from hedgerow.strategies.router import GraphAt
from hedgerow.strategies.topology import as_graph
from hedgerow.wire.checks import in_range, one_of
from hedgerow.wire.sensing import MATRICES

Topology: TypeAlias = str | nx.Graph | Sequence[tuple[int, int]] | None

_SEED_BYTES = 8
_GAMMA_BYTES = 8


def participants(participation: float, degree: int) -> int:
    """Return how many neighbours a node hears, max(1, round(r degree)); 0 for a node without neighbours."""
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
    """The coding of one-bit messages; see ``hedgerow.wire.onebit.OneBit``.

    Parameters
    ----------
    expand : {"consistent", "literal"} (default: "consistent")
        Whether to recover the scale that Algorithm 2 divides out, or to follow the algorithm literally.
    compand : {"log", "none"} (default: "log")
        The measured vector: sign(w) log(1 + |w|), or w.
    gamma : float (default: 5.0)
        Base of the literal expansion, > 1.
    decoder : {"gpsp", "biht"} (default: "gpsp")
        The solver of problem (9).
    phi : {"gaussian", "srht"} (default: "gaussian")
        The paper's Gaussian matrix, or a subsampled randomised Hadamard transform, for dimensions with too
        large a matrix.
    phi_density : float (default: 1.0)
        Fraction of nonzeros of a Gaussian Phi, in [0.5, 1].
    phi_owner : {"sender", "receiver"} (default: "sender")
        The owner of Phi: the sender, which encodes once for all receivers, or each receiver.
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
    """Which neighbours a node hears, when, and how large a message is."""

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
    name: str = "ceps"

    # Initialisation: node i chooses kappa_i, sigma_i and Phi_i, and sends Phi_i and gamma_i to neighbours.

    def instructions(self, node: int) -> dict[str, Scalar]:
        """Return a node's settings, sent once."""
        low, high = self.interval
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
            "neighbours": list(self.peers(node)),
            "num-nodes": self.num_nodes,
        }

    @property
    def set_up_bytes(self) -> int:
        """A seed of Phi_i, and gamma_i if it is used, for each neighbour."""
        literal = self.code.expand == "literal"
        return (_SEED_BYTES + literal * _GAMMA_BYTES) if self.coding.codec == "1bcs" else 0

    # Iteration k in K_i: the neighbours in N_i^k send z_j^k.

    def wants(self, node: int, k: int) -> Sequence[int] | None:
        """Return N_i if the first replies count; None if the node draws N_i^k from it."""
        return self.peers(node) if self.stragglers else None

    def first(self, node: int) -> int | None:
        """Return t_i if the first replies count (section III-E)."""
        return participants(self.participation, len(self.peers(node))) if self.stragglers else None

    def describe(self) -> Iterable[str]:
        """Return the settings in a few lines."""
        degrees = sorted(degree for _, degree in self.graph(0).degree)
        yield f"Neighbours: {degrees[0]} to {degrees[-1]}, heard: r = {self.participation:g}" + (
            ", the first that reply" if self.stragglers else ""
        )
        low, high = self.interval
        yield f"{self.coding.codec}, n = {self.dim}, s = {self.coding.sparsity}, kappa: {low} to {high}"
        yield f"mu = {self.step['mu']:g}, sigma: {self.step['sigma-rule']}"
