"""CEPS: sparse decentralised federated learning with one-bit messages.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", Algorithm 1.
Differs: Flower's server relays the messages, and has no other part in the method: models, gradients and
sensing matrices live on the nodes. A node uses its own model in addition to those of
max(1, round(r |N_i|)) neighbours; the paper leaves open whether it counts among them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import Literal, TypeAlias, Unpack, get_args

import networkx as nx
from flwr.common import log

from hedgerow.strategies.gossip.method import GossipOptions, Scalar, places_in
from hedgerow.strategies.gossip.payload_sizes import Coding, PayloadSizes
from hedgerow.strategies.gossip.strategy import Gossip
from hedgerow.strategies.privacy import Privacy
from hedgerow.strategies.robust import NEIGHBOURHOOD_RULES, Aggregation, neighbourhood_rule
from hedgerow.strategies.router import GraphAt, graph_at
from hedgerow.strategies.topology import as_graph
from hedgerow.wire.checks import in_range, int_at_least, one_of
from hedgerow.wire.sensing import MATRICES

__all__ = [
    "CEPS",
    "NEIGHBOURHOOD_RULES",
    "OneBitCode",
    "Topology",
    "neighbourhood_graph",
    "neighbourhood_rule",
    "participants",
]

Topology: TypeAlias = str | nx.Graph | Sequence[tuple[int, int]] | None
SigmaRule = Literal["paper", "fixed_c"]
SigmaDivisor = Literal["samples", "bits"]

# As an error or a setting's help says what is valid.
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

    Raises
    ------
    ValueError
        If a value is not valid.
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
            raise ValueError(f"phi_density is {self.phi_density!r}; valid with phi = 'srht' is 1")

    def instructions(self) -> dict[str, str | float]:
        """Return the settings as keys of a message's config."""
        return {key.replace("_", "-"): value for key, value in self.__dict__.items()}


class CEPS(Gossip):
    """Communication-efficient, personalised and private: sparse models, exchanged as signs.

    Node i averages what some neighbours sent, takes one hard-thresholded gradient step from the average,
    and holds still until it communicates again, every kappa_i iterations. The nodes' models stay different:
    what is solved is a penalised problem.

    **The ClientApp must be** ``hedgerow.clients.ceps_client(problem)``.

    Parameters
    ----------
    dim : int
        Model dimension n, >= 1.
    sparsity : int
        s, how many entries of a model are not zero, 1 to n.
    measurements : int or None (default: None)
        d, signs of a one-bit message, >= 1; None is n / 2. The support needs d >= 25 s.
    codec : str (default: "1bcs")
        ``1bcs``, or one that sends the model itself: ``sparse16``, ``sparse32``, ``sparse64``, ``dense32``
        or ``dense64``, the paper's "Perf".
    code : OneBitCode (default: OneBitCode())
        How one-bit messages are made and read.
    topology : str, networkx.Graph, edges or None (default: None)
        The neighbourhoods, a connected graph; None is a random regular graph of degree m / 4.
    participation : float (default: 0.2)
        r in (0, 1]: the share of its neighbours that a node hears in a communication.
    interval : int or tuple[int, int] (default: (10, 15))
        kappa_i >= 1, or the least and the largest of what each node draws.
    stragglers : bool (default: False)
        Whether a node hears the neighbours that reply first instead of some that it draws.
    mu : float (default: 0.1)
        Proximal weight of a local step, > 0.
    sigma_rule : {"paper", "fixed_c"} (default: "paper")
        sigma_i = lambda_max(A_i^T A_i) / (m (2 r + 0.1) d_i), or c / m_i^k at each communication.
    sigma_d : {"samples", "bits"} (default: "samples")
        What d_i is in that formula: the node's records, or the signs of a message.
    c : float (default: 1.0)
        Inverse step size of ``fixed_c``, > 0. Stable above half the curvature along sparse directions; one
        to one and a half times the curvature is best.
    privacy : Privacy (default: Privacy())
        The noise on the gradients.
    aggregation : str (default: "mean")
        What a node takes of its own model and those that it heard: ``mean``, as in (3), or what a minority of
        liars among them cannot ruin: ``median``, ``trimmed-mean(b)``, with 0 <= b < 0.5, both entry by entry,
        or ``clipped(tau)``, with tau > 0, to whose norm each difference from the own model is cut. All
        of it happens at the nodes, on what they decoded.
    **options
        See ``GossipOptions`` and ``Gossip``; ``num_clients`` is the number of nodes m.

    Raises
    ------
    ValueError
        If a parameter is out of range, naming it, its value and what is valid; or with mode ``sound`` and
        the paper's sigma_i, which is computed from the data and would have to be accounted for.
    """

    def __init__(
        self,
        *,
        dim: int,
        sparsity: int,
        measurements: int | None = None,
        codec: str = "1bcs",
        code: OneBitCode | None = None,
        topology: Topology = None,
        participation: float = 0.2,
        interval: int | tuple[int, int] = (10, 15),
        stragglers: bool = False,
        mu: float = 0.1,
        sigma_rule: SigmaRule = "paper",
        sigma_d: SigmaDivisor = "samples",
        c: float = 1.0,
        privacy: Privacy | None = None,
        aggregation: str = "mean",
        **options: Unpack[GossipOptions],
    ) -> None:
        code, privacy = code or OneBitCode(), privacy or Privacy()
        in_range("participation", participation, 0.0, 1.0, open_below=True)
        in_range("mu", mu, 0.0, 1e300, open_below=True)
        in_range("c", c, 0.0, 1e300, open_below=True)
        one_of("sigma_rule", sigma_rule, get_args(SigmaRule))
        one_of("sigma_d", sigma_d, get_args(SigmaDivisor))
        if privacy.mode == "sound" and sigma_rule == "paper":
            raise ValueError(
                "sigma_rule is 'paper'; valid with privacy mode 'sound' is 'fixed_c': the paper's is "
                "computed from the data"
            )
        if not isinstance(codec, str) or codec.startswith("quantised"):
            raise ValueError(f"codec is {codec!r}; valid is 1bcs, or a sparse or a dense one")
        rule = neighbourhood_rule(aggregation)
        num_nodes = places_in(options)
        int_at_least(1, dim=dim, sparsity=sparsity)
        method = _Method(
            num_nodes=num_nodes,
            graph=graph_at(neighbourhood_graph(topology, num_nodes, options.get("seed", 0))),
            coding=Coding(
                codec,
                dim,
                sparsity=sparsity,
                measurements=-(-dim // 2) if measurements is None else measurements,
                per_receiver=codec == "1bcs" and code.phi_owner == "receiver",
            ),
            code=code,
            participation=participation,
            interval=_checked_interval(interval),
            stragglers=stragglers,
            step={"mu": mu, "sigma-rule": sigma_rule, "sigma-d": sigma_d, "c": c},
            privacy=privacy,
            rule=rule,
        )
        super().__init__(method, **options)
        self.participation = participation
        self.privacy = privacy
        self.interval = method.interval
        self.graph = method.graph(0)
        if privacy.mode == "sound" and self.monitor is not None:
            log(WARNING, "A monitor is told exact objectives: where nodes answer it, epsilon is infinite.")


@dataclass(frozen=True)
class _Method:
    """What the relay is told of CEPS."""

    num_nodes: int
    graph: GraphAt
    coding: Coding
    code: OneBitCode
    participation: float
    interval: tuple[int, int]
    stragglers: bool
    step: Mapping[str, Scalar]
    privacy: Privacy
    rule: Aggregation
    name: str = "ceps"

    @property
    def dim(self) -> int:
        return self.coding.dim

    @property
    def sizes(self) -> PayloadSizes:
        return self.coding.sizes

    @property
    def set_up_bytes(self) -> int:
        """A seed of Phi, and gamma where it is used, for each neighbour."""
        literal = self.code.expand == "literal"
        return (_SEED_BYTES + literal * _GAMMA_BYTES) if self.coding.codec == "1bcs" else 0

    def instructions(self, node: int) -> dict[str, Scalar]:
        return {
            "codec": self.coding.codec,
            "s": self.coding.sparsity or 0,
            "d": self.coding.measurements or 0,
            **self.code.instructions(),
            "r": self.participation,
            "ask": "all" if self.stragglers else "chosen",
            "kappa-low": self.interval[0],
            "kappa-high": self.interval[1],
            **self.step,
            **self.privacy.instructions(),
            **self._rule_instructions(),
            "neighbours": self._neighbours(node),
            "num-nodes": self.num_nodes,
        }

    def peers(self, node: int) -> Sequence[int]:
        return self._neighbours(node)

    def event(self, node: int, k: int, readers: Sequence[int]) -> dict[str, Scalar]:
        return {}

    def wants(self, node: int, k: int) -> Sequence[int] | None:
        return self._neighbours(node) if self.stragglers else None

    def first(self, node: int) -> int | None:
        return participants(self.participation, len(self._neighbours(node))) if self.stragglers else None

    def releases(self, begun: int, updates: int, iterations: int) -> int:
        # The gradient at W^0, and one a communication: whatever iterations the node made in between.
        return begun + updates

    def describe(self) -> Iterable[str]:
        graph = self.graph(0)
        degrees = sorted(degree for _, degree in graph.degree)
        yield f"Neighbours: {degrees[0]} to {degrees[-1]}, heard: r = {self.participation:g}" + (
            ", the first that reply" if self.stragglers else ""
        )
        low, high = self.interval
        yield f"{self.coding.codec}, n = {self.dim}, s = {self.coding.sparsity}, kappa: {low} to {high}"
        yield f"mu = {self.step['mu']:g}, sigma: {self.step['sigma-rule']}, privacy: {self.privacy.mode}"
        yield f"Aggregation: {self.rule}"

    def _rule_instructions(self) -> dict[str, Scalar]:
        if self.rule.is_mean:
            return {}
        return {"aggregation": self.rule.name, "aggregation-number": (*self.rule.arguments, 0.0)[0]}

    def _neighbours(self, node: int) -> list[int]:
        return sorted(self.graph(0).neighbors(node))


def _checked_interval(interval: int | tuple[int, int]) -> tuple[int, int]:
    low, high = interval if isinstance(interval, tuple | list) and len(interval) == 2 else (interval,) * 2
    int_at_least(1, interval=low)
    int_at_least(low, interval=high)
    return low, high
