"""CEPS's settings: sparse decentralised federated learning with one-bit messages.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning". Algorithm 1 is in
``strategies/gossip/algorithm.py`` as the server sees it, which relays messages, and in
``clients/ceps/algorithm.py`` at a node, with the steps (3) and (4). Algorithm 2 is ``hedgerow.wire.OneBit``.
Differs: the paper counts node i among its neighbours N_i, and among the t_i of them that are heard. Here N_i
excludes i, max(1, round(r |N_i|)) of it are heard, and the node's own model is used in addition, which the
volumes of the paper's Table V support.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Literal, TypeAlias, Unpack, get_args

import networkx as nx
from flwr.common import log

from hedgerow.strategies.ceps.privacy import Privacy
from hedgerow.strategies.gossip.exposure import NoisyReleases
from hedgerow.strategies.gossip.method import GossipMethod, PayloadSizes, Scalar, coded_sizes
from hedgerow.strategies.gossip.strategy import Gossip, GossipOptions, places_in
from hedgerow.strategies.router import GraphAt, graph_at
from hedgerow.strategies.topology import as_graph
from hedgerow.wire.checks import in_range, int_at_least, one_of
from hedgerow.wire.robust_means import Aggregation, neighbourhood_rule
from hedgerow.wire.sensing import MATRICES

SigmaRule = Literal["paper", "fixed_c"]
SigmaDivisor = Literal["samples", "bits"]
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
        The paper's Gaussian matrix, or a subsampled randomized Hadamard transform, for dimensions with too
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
class _Neighbourhoods(GossipMethod):
    """Which neighbours a node hears, and what it is told once."""

    num_nodes: int
    dim: int
    graph: GraphAt
    sizes: PayloadSizes
    keys: Mapping[str, Scalar]
    seed_bytes: int
    name: str = "ceps"

    def instructions(self, node: int) -> dict[str, Scalar]:
        """Return a node's settings, sent once."""
        return {**self.keys, "neighbours": list(self.peers(node)), "num-nodes": self.num_nodes}

    @property
    def set_up_bytes(self) -> int:
        """A seed of Phi_i, and gamma_i if it is used, for each neighbour."""
        return self.seed_bytes

    def wants(self, node: int, k: int) -> Sequence[int] | None:
        """Return N_i if the first replies count; None if the node draws N_i^k from it."""
        return self.peers(node) if self.keys["ask"] == "all" else None

    def first(self, node: int) -> int | None:
        """Return t_i if the first replies count (section III-E)."""
        if self.keys["ask"] == "chosen":
            return None
        return participants(float(self.keys["r"]), len(self.peers(node)))  # type: ignore[arg-type]

    def describe(self) -> Iterable[str]:
        """Return the settings in a few lines."""
        keys, degrees = self.keys, sorted(degree for _, degree in self.graph(0).degree)
        first = ", the first that reply" if keys["ask"] == "all" else ""
        yield f"Neighbours: {degrees[0]} to {degrees[-1]}, heard: r = {keys['r']:g}{first}"
        interval = f"{keys['kappa-low']} to {keys['kappa-high']}"
        yield f"{keys['codec']}, n = {self.dim}, s = {keys['s']}, kappa: {interval}"
        yield f"mu = {keys['mu']:g}, sigma: {keys['sigma-rule']}"


class CEPS(Gossip):
    """Communication-efficient, personalized and private: sparse models, exchanged as signs.

    Node i averages some neighbors' models, takes one hard-thresholded gradient step from the average, and
    computes no other gradient until its next communication, every kappa_i iterations. The nodes' models stay
    different: the method solves a penalized problem.

    **The ClientApp must be** ``hedgerow.clients.ceps_client(problem)``.

    Parameters
    ----------
    dim : int
        Model dimension n, >= 1.
    sparsity : int
        s, the number of nonzero entries of a model, 1 to n.
    measurements : int or None (default: None)
        d, signs per one-bit message, >= 1; None is n / 2. Recovering the support needs d >= 25 s.
    codec : str (default: "1bcs")
        ``1bcs``, or one that sends the model itself: ``sparse16``, ``sparse32``, ``sparse64``, ``dense32``
        or ``dense64``, the paper's "Perf".
    code : OneBitCode (default: OneBitCode())
        The coding of one-bit messages.
    topology : str, networkx.Graph, edges or None (default: None)
        The neighborhoods, a connected graph; None is a random regular graph of degree m / 4.
    participation : float (default: 0.2)
        r in (0, 1]: the share of its neighbors that a node hears in a communication.
    interval : int or tuple[int, int] (default: (10, 15))
        kappa_i >= 1, or the smallest and the largest value that nodes draw.
    stragglers : bool (default: False)
        Hear the neighbors that reply first, instead of drawn ones.
    mu : float (default: 0.1)
        Proximal weight of a local step, > 0.
    sigma_rule : {"paper", "fixed_c"} (default: "paper")
        sigma_i = lambda_max(A_i^T A_i) / (m (2 r + 0.1) d_i), or c / m_i^k at each communication.
    sigma_d : {"samples", "bits"} (default: "samples")
        d_i in that formula: the node's records, or the signs of a message.
    c : float (default: 1.0)
        Inverse step size of ``fixed_c``, > 0. Stable above half the curvature along sparse directions; one
        to one and a half times the curvature is best.
    privacy : Privacy (default: Privacy())
        The noise on the gradients.
    aggregation : str (default: "mean")
        How a node combines its own model and the received ones, decoded: ``mean``, as in (3), or a rule that
        withstands a Byzantine minority: ``median`` or ``trimmed-mean(b)`` with 0 <= b < 0.5, both entry by
        entry, or ``clipped(tau)``, which cuts each difference from the own model to the norm tau > 0.
    **options
        See ``GossipOptions`` and ``Gossip``; ``num_clients`` is the number of nodes m.

    Raises
    ------
    ValueError
        Also with mode ``sound`` and the paper's sigma_i, which is computed from the data and would have to be
        accounted for.
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
                "sigma_rule must be 'fixed_c' with privacy mode 'sound', got 'paper', which computes it "
                "from the data"
            )
        if not isinstance(codec, str) or codec.startswith("quantised"):
            raise ValueError(f"codec must be 1bcs, a sparse or a dense one, got {codec!r}")
        rule = neighbourhood_rule(aggregation)
        num_nodes = places_in(options)
        int_at_least(1, dim=dim, sparsity=sparsity)
        d = -(-dim // 2) if measurements is None else measurements
        one_bit = codec == "1bcs"
        per_receiver = one_bit and code.phi_owner == "receiver"
        low, high = _checked_interval(interval)
        keys: dict[str, Scalar] = {
            "codec": codec, "s": sparsity, "d": d, **code.instructions(), "r": participation,
            "ask": "all" if stragglers else "chosen", "kappa-low": low, "kappa-high": high,
            "mu": mu, "sigma-rule": sigma_rule, "sigma-d": sigma_d, "c": c,
        }  # fmt: skip
        method = _Neighbourhoods(
            num_nodes=num_nodes,
            dim=dim,
            sizes=coded_sizes(codec, dim, sparsity, d, per_receiver=per_receiver),
            graph=graph_at(neighbourhood_graph(topology, num_nodes, options.get("seed", 0))),
            keys=keys,
            seed_bytes=(_SEED_BYTES + (code.expand == "literal") * _GAMMA_BYTES) if one_bit else 0,
        )
        super().__init__(
            method,
            privacy=NoisyReleases(privacy, _releases),
            node_settings=_instructions(rule),
            **options,
        )
        self.participation = participation
        self.privacy = privacy
        self.rule = rule
        self.interval = low, high
        self.graph = method.graph(0)
        if privacy.mode == "sound" and self.monitor is not None:
            log(WARNING, "A monitor is told exact objectives: where nodes answer it, epsilon is infinite.")

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t├──> Aggregation: %s", self.rule)
        super().summary()


def _releases(begun: int, updates: int, iterations: int) -> int:
    """Return one gradient at W^0 and one per communication, for any number of iterations in between."""
    return begun + updates


def _instructions(rule: Aggregation) -> dict[str, Scalar]:
    """Return a rule as keys of the nodes' settings; none for the mean."""
    if rule.is_mean:
        return {}
    return {"aggregation": rule.name, "aggregation-number": (*rule.arguments, 0.0)[0]}


def _checked_interval(interval: int | tuple[int, int]) -> tuple[int, int]:
    low, high = interval if isinstance(interval, tuple | list) and len(interval) == 2 else (interval,) * 2
    int_at_least(1, interval=low)
    int_at_least(low, interval=high)
    return low, high
