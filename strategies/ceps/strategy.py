"""The settings of CEPS: sparse decentralised federated learning with one-bit messages.

Algorithm 1 is in ``algorithm.py``.
"""

from logging import INFO, WARNING
from typing import Literal, Unpack, get_args

from flwr.common import log

from hedgerow.strategies.ceps.algorithm import Algorithm1, OneBitCode, Topology, neighbourhood_graph
from hedgerow.strategies.ceps.privacy import Privacy
from hedgerow.strategies.gossip.exposure import NoisyReleases
from hedgerow.strategies.gossip.method import Scalar
from hedgerow.strategies.gossip.payload_sizes import PayloadCoding
from hedgerow.strategies.gossip.strategy import Gossip, GossipOptions, places_in
from hedgerow.strategies.router import graph_at
from hedgerow.wire.checks import in_range, int_at_least, one_of
from hedgerow.wire.robust_means import Aggregation, neighbourhood_rule

SigmaRule = Literal["paper", "fixed_c"]
SigmaDivisor = Literal["samples", "bits"]


class CEPS(Gossip):
    """Communication-efficient, personalised and private: sparse models, exchanged as signs.

    Node i averages some neighbours' models, takes one hard-thresholded gradient step from the average, and
    computes no other gradient until its next communication, every kappa_i iterations. The nodes' models stay
    different: the method solves a penalised problem.

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
        The neighbourhoods, a connected graph; None is a random regular graph of degree m / 4.
    participation : float (default: 0.2)
        r in (0, 1]: the share of its neighbours that a node hears in a communication.
    interval : int or tuple[int, int] (default: (10, 15))
        kappa_i >= 1, or the smallest and the largest value that nodes draw.
    stragglers : bool (default: False)
        Hear the neighbours that reply first, instead of drawn ones.
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
        coding = PayloadCoding(
            codec,
            dim,
            sparsity=sparsity,
            measurements=-(-dim // 2) if measurements is None else measurements,
            per_receiver=codec == "1bcs" and code.phi_owner == "receiver",
        )
        method = Algorithm1(
            num_nodes=num_nodes,
            dim=dim,
            graph=graph_at(neighbourhood_graph(topology, num_nodes, options.get("seed", 0))),
            sizes=coding.sizes,
            coding=coding,
            code=code,
            participation=participation,
            interval=_checked_interval(interval),
            stragglers=stragglers,
            step={"mu": mu, "sigma-rule": sigma_rule, "sigma-d": sigma_d, "c": c},
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
        self.interval = method.interval
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
