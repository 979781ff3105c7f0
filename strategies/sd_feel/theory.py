"""Latency, traffic, convergence bound and a plan of a run, by the paper's formulas.

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for
Fast Convergence on Non-IID Data": the latency model of section IV, Lemma 2 (13), Theorem 1 (14)-(15).
Differs: the paper prints no latency formulas for the baselines; theirs follow from its rates. Downlinks
and a cloud link shared by all senders are our own assumptions, off by default.

Recurring parameters; a value out of range raises a ValueError that names it, its value and the valid range:

- ``scheme``: a ``SystemName`` or its value;
- ``tau1``, ``tau2`` >= 1: aggregation periods; FEEL's rounds have tau1 iterations;
- ``alpha`` >= 0: gossip steps. They are sequential: each costs one transfer, whatever the number of
  neighbours;
- ``K`` >= 0: local iterations;
- ``zeta``: second largest eigenvalue modulus of the mixing matrix, in [0, 1).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Required, TypedDict, TypeVar, Unpack

import numpy as np
import numpy.typing as npt

from hedgerow.wire.checks import at_least, check_ordinary, in_range, not_negative, one_of, positive, require
from hedgerow.wire.clock import Compute, Rates

# One number, or a grid of them.
Number = TypeVar("Number", float, npt.NDArray[np.float64])
Count = TypeVar("Count", int, float, npt.NDArray[np.float64])

_BITS_PER_PARAMETER = 32
_PAPER_FLOPS_PER_ITERATION = 138.4e6
_PAPER_FLOPS_PER_SECOND = 10e9
_PAPER_PARAMETERS = 21_840
_CIFAR_LARGE_PARAMETERS = 5_852_170

# The paper gives uplinks only; each downlink has the rate of its uplink.
PAPER_RATES = Rates(
    {
        "client->edge": 5e6,
        "edge->client": 5e6,
        "edge->edge": 50e6,
        "edge->cloud": 5e6,
        "cloud->edge": 5e6,
        "client->cloud": 2.5e6,
        "cloud->client": 2.5e6,
    }
)

PRESETS = ("cifar-large", "honest", "paper-text")


class SystemName(StrEnum):
    """The four systems that the paper compares."""

    SD_FEEL = "sd-feel"
    FEDAVG = "fedavg"
    FEEL = "feel"
    HIERFAVG = "hierfavg"


@dataclass(frozen=True)
class System:
    """The modelled system of a latency.

    Parameters
    ----------
    num_params : int
        Trainable parameters M of a model, >= 1; each is sent as 32 bits.
    compute : Compute
        Cost of a client's local iteration.
    rates : Rates (default: PAPER_RATES)
        Rates of the links ``client->edge``, ``edge->edge``, ``edge->cloud``, ``client->cloud``, and of
        the opposite ones if ``downlink``.
    downlink : bool (default: False)
        Count the broadcasts too, which the paper omits.
    shared_cloud_link : bool (default: False)
        An assumption that is not in the paper: all senders share one link to the cloud, so that an upload
        takes the time of ``num_clients`` (FedAvg) or ``num_servers`` (HierFAVG) models, and so does the
        download if ``downlink``.
    num_clients, num_servers : int (default: 50, 10)
        C and D, >= 1; used only if ``shared_cloud_link``.
    """

    num_params: int
    compute: Compute
    rates: Rates = PAPER_RATES
    downlink: bool = False
    shared_cloud_link: bool = False
    num_clients: int = 50
    num_servers: int = 10

    def __post_init__(self) -> None:
        at_least(1, num_params=self.num_params, num_clients=self.num_clients, num_servers=self.num_servers)

    def model_seconds(self, link: str) -> float:
        """Return the seconds of sending one model over a link."""
        return self.rates.seconds(_BITS_PER_PARAMETER * self.num_params, link)

    def leg_seconds(self, up: str, down: str, uplink: float = 1.0) -> float:
        """Return the seconds of one aggregation between two tiers: up, and down again if counted.

        ``uplink`` is the share of a model's bits that is uploaded.
        """
        return self.model_seconds(up) * uplink + (self.model_seconds(down) if self.downlink else 0.0)


def preset(name: str, *, num_params: int | None = None, flops_per_iteration: float | None = None) -> System:
    """Return the system of a latency preset; state its name beside every axis of simulated time.

    The paper's 21,840 parameters are those of a net for one-channel 28 x 28 images, its 138.4 MFLOPs
    those of a far larger net; neither matches CIFAR-10's small one.

    Parameters
    ----------
    name : str
        ``"paper-text"``: the paper's two numbers, whatever net is trained. ``"honest"``: those of the
        trained net. ``"cifar-large"``: 5,852,170 parameters with the paper's 138.4 MFLOPs.
    num_params, flops_per_iteration : int | None, float | None (default: None)
        Of the trained net; ``"honest"`` needs both, the others ignore them.
    """
    one_of("preset", name, PRESETS)
    if name == "honest":
        if num_params is None or flops_per_iteration is None:
            raise ValueError(
                "preset 'honest' needs the trained net's num_params and flops_per_iteration, both > 0, got "
                f"{num_params!r} and {flops_per_iteration!r}"
            )
        return System(num_params, Compute(flops_per_iteration, _PAPER_FLOPS_PER_SECOND))
    parameters = _PAPER_PARAMETERS if name == "paper-text" else _CIFAR_LARGE_PARAMETERS
    return System(parameters, Compute(_PAPER_FLOPS_PER_ITERATION, _PAPER_FLOPS_PER_SECOND))


def _valid_scheme(scheme: str) -> SystemName:
    one_of("scheme", scheme, SystemName)
    return SystemName(scheme)


# A block is the repeated unit: some rounds, each with local iterations and one aggregation of the clients'
# models, then the servers' aggregation.


def _rounds_per_block(scheme: SystemName, tau2: Count) -> Count:
    return tau2 if scheme in (SystemName.SD_FEEL, SystemName.HIERFAVG) else tau2 * 0 + 1


def _iterations_per_round(scheme: SystemName, tau1: Count, tau2: Count) -> Count:
    return tau1 * tau2 if scheme is SystemName.FEDAVG else tau1


def _intra_seconds(scheme: SystemName, system: System, uplink: float = 1.0) -> float:
    if scheme is not SystemName.FEDAVG:
        return system.leg_seconds("client->edge", "edge->client", uplink)
    if not system.shared_cloud_link:
        return system.leg_seconds("client->cloud", "cloud->client", uplink)
    cloud = system.num_clients * system.leg_seconds("edge->cloud", "cloud->edge", uplink)
    return system.leg_seconds("client->edge", "edge->client", uplink) + cloud


def _inter_seconds(scheme: SystemName, system: System, alpha: Number) -> Number:
    if scheme is SystemName.SD_FEEL:
        return alpha * system.model_seconds("edge->edge")
    if scheme is SystemName.HIERFAVG:
        senders = system.num_servers if system.shared_cloud_link else 1
        return alpha * 0 + senders * system.leg_seconds("edge->cloud", "cloud->edge")
    return alpha * 0


def _block_iterations(scheme: SystemName, tau1: Count, tau2: Count) -> Count:
    return _iterations_per_round(scheme, tau1, tau2) * _rounds_per_block(scheme, tau2)


def _block_seconds(scheme: SystemName, system: System, tau1: Number, tau2: Number, alpha: Number) -> Number:
    iterations = _iterations_per_round(scheme, tau1, tau2)
    intra = iterations * system.compute.seconds() + _intra_seconds(scheme, system)
    return _rounds_per_block(scheme, tau2) * intra + _inter_seconds(scheme, system, alpha)


def round_seconds(
    scheme: str, system: System, *, tau1: int, tau2: int = 1, slowdown: float = 1.0, uplink: float = 1.0
) -> float:
    """Return the seconds of one round: local iterations and the aggregation of clients' models.

    A round is tau1 iterations (tau1 * tau2 in FedAvg). Every tau2-th round of SD-FEEL and HierFAVG
    takes ``inter_seconds`` longer. The slowest client takes ``slowdown`` (>= 1) times as long for an
    iteration, and the largest reply has the share ``uplink`` (>= 0) of a model's bits.
    """
    at_least(1, tau1=tau1, tau2=tau2)
    require("slowdown", slowdown, "a number >= 1", slowdown >= 1)
    not_negative(uplink=uplink)
    scheme = _valid_scheme(scheme)
    iterations = _iterations_per_round(scheme, float(tau1), float(tau2))
    return iterations * system.compute.seconds() * slowdown + _intra_seconds(scheme, system, uplink)


def inter_seconds(scheme: str, system: System, *, alpha: int = 1) -> float:
    """Return the seconds of one inter-cluster aggregation: gossip, the cloud's mean, or 0 if none."""
    at_least(0, alpha=alpha)
    return _inter_seconds(_valid_scheme(scheme), system, float(alpha))


def block_seconds(scheme: str, system: System, *, tau1: int, tau2: int = 1, alpha: int = 1) -> float:
    """Return the seconds of one block: tau1 * tau2 local iterations (FEEL: tau1) and all their messages.

    SD-FEEL: tau2 (tau1 t_cmp + t_client->edge) + alpha t_edge->edge. HierFAVG: the same with t_edge->cloud
    in place of the gossip. FedAvg: tau1 tau2 t_cmp + t_client->cloud. FEEL: tau1 t_cmp + t_client->edge. A
    link without a rate is a ValueError.
    """
    at_least(1, tau1=tau1, tau2=tau2)
    at_least(0, alpha=alpha)
    return _block_seconds(_valid_scheme(scheme), system, float(tau1), float(tau2), float(alpha))


def latency(scheme: str, system: System, *, K: int, tau1: int, tau2: int = 1, alpha: int = 1) -> float:
    """Return t_tot, the seconds of K local iterations; an incomplete block counts as complete.

    Parameters
    ----------
    scheme : str
        ``"sd-feel"``, ``"fedavg"``, ``"feel"`` or ``"hierfavg"``.
    system : System
        Sizes, compute and rates; a link without a rate is a ValueError.
    K : int
        Local iterations, >= 0.
    tau1, tau2 : int
        Aggregation periods, >= 1. FEEL's rounds have tau1 iterations.
    alpha : int (default: 1)
        Gossip steps, >= 0.
    """
    at_least(0, K=K)
    seconds = block_seconds(scheme, system, tau1=tau1, tau2=tau2, alpha=alpha)
    return -(-K // _block_iterations(SystemName(scheme), tau1, tau2)) * seconds


def traffic(
    scheme: str,
    *,
    K: int,
    tau1: int,
    tau2: int = 1,
    alpha: int = 1,
    num_clients: int,
    num_servers: int = 1,
    num_edges: int = 0,
) -> dict[str, int]:
    """Return how many models a run of K iterations sends, by the ledger's link names.

    The first distribution of w_0 is not counted. Sending models at a round's start instead of its end
    gives the same numbers: w_0 is then sent down, and the last mean is not. With participation beta < 1
    the clients' numbers shrink by beta in expectation.

    Parameters
    ----------
    scheme : str
        As in ``latency``.
    K : int
        Local iterations, >= 0, a multiple of the block (tau1 * tau2; FEEL: tau1).
    tau1, tau2 : int
        Aggregation periods, >= 1.
    alpha : int (default: 1)
        Gossip steps, >= 0.
    num_clients : int
        Clients per round, >= 1: all C of them; in FEEL the scheduled ones.
    num_servers : int (default: 1)
        D >= 1.
    num_edges : int (default: 0)
        Edges of the servers' graph; a gossip step sends one model each way over every edge.
    """
    at_least(1, tau1=tau1, tau2=tau2, num_clients=num_clients, num_servers=num_servers)
    at_least(0, K=K, alpha=alpha, num_edges=num_edges)
    scheme = _valid_scheme(scheme)
    block = _block_iterations(scheme, tau1, tau2)
    if K % block != 0:
        raise ValueError(f"K must be a multiple of {block}, the iterations of a block, got {K!r}")
    rounds = K // _iterations_per_round(scheme, tau1, tau2)
    blocks = K // block
    if scheme is SystemName.FEDAVG:
        return {"client->cloud": num_clients * rounds, "cloud->client": num_clients * rounds}
    clients = {"client->edge": num_clients * rounds, "edge->client": num_clients * rounds}
    if scheme is SystemName.SD_FEEL:
        return clients | {"edge->edge": 2 * alpha * num_edges * blocks}
    if scheme is SystemName.HIERFAVG:
        return clients | {"edge->cloud": num_servers * blocks, "cloud->edge": num_servers * blocks}
    return clients


@dataclass(frozen=True)
class ProblemConstants:
    """The constants of Assumption 1. The paper does not give them; measured ones are lower estimates."""

    delta: float  # F(w_0) - F*, >= 0.
    smoothness: float  # L > 0.
    sigma2: float  # Bound on the variance of a mini-batch gradient, >= 0.
    kappa2: float  # Squared bound on the dissimilarity of the clients' gradients, >= 0; 0 is IID data.
    sum_m2: float  # Sum of the squared client weights m_i, in (0, 1]; 1/C for equal clients.

    def __post_init__(self) -> None:
        not_negative(delta=self.delta, sigma2=self.sigma2, kappa2=self.kappa2)
        positive(smoothness=self.smoothness)
        in_range("sum_m2", self.sum_m2, 0.0, 1.0, open_below=True)


@dataclass(frozen=True)
class BoundConstants:
    """The constants of Lemma 2 that depend on the periods and the graph only.

    tau1 and tau2 enter only by their product, and the graph and alpha only by q = zeta^alpha, so the
    constants cannot show that intra-cluster averaging between inter-cluster rounds helps.
    """

    q: float  # zeta^alpha, in [0, 1).
    kernel: float  # Lambda.
    V1_prime: float  # V_1', the numerator of V_1.
    V3: float


def _constants(tau: Number, q: Number) -> tuple[Number, Number, Number]:
    kernel = q**2 / (1 - q**2) + 2 * q / (1 - q) + q**2 / (1 - q) ** 2
    V3 = tau * (tau * kernel + (tau - 1) / 2 * (2 - q) / (1 - q))
    V1_prime = tau * q**2 / (1 - q**2) + (tau - 1) / 2
    return kernel, V1_prime, V3


def bound_constants(tau1: int, tau2: int, alpha: int, zeta: float) -> BoundConstants:
    """Return Lambda, V_1' and V_3 of Lemma 2, for ``alpha`` >= 1."""
    at_least(1, tau1=tau1, tau2=tau2, alpha=alpha)
    in_range("zeta", zeta, 0.0, 1.0, open_above=True)
    q = float(zeta) ** alpha
    return BoundConstants(q, *_constants(float(tau1 * tau2), q))


def eta_max(smoothness: float, V3: float) -> float:
    """Return the largest step size that satisfies (14), for L > 0 and V_3 >= 0.

    With x = eta L and V_2 eliminated, (14) is g(x) = 1 - x - 24 V_3 x^2 + 16 V_3 x^3 >= 0 together with
    x < 1 / (4 sqrt(V_3)); g decreases from 1 on (0, 1) and is -1/2 at the upper end.
    """
    positive(smoothness=smoothness)
    not_negative(V3=V3)
    if V3 == 0:
        return 1.0 / smoothness
    low, high = 0.0, min(1.0, 0.25 / math.sqrt(V3))
    # Bisection down to neighbouring floats; the lower end always satisfies (14).
    while low < (x := (low + high) / 2) < high:
        low, high = (x, high) if 1 - x - 24 * V3 * x**2 + 16 * V3 * x**3 >= 0 else (low, x)
    return low / smoothness


def _floor(problem: ProblemConstants, eta: float, V1_prime: Any, V3: Any) -> npt.NDArray[np.float64]:
    """Return the terms of (15) that no number of iterations reduces, +inf where (14) fails."""
    x2 = (eta * problem.smoothness) ** 2
    denominator = 1 - 16 * x2 * np.asarray(V3)
    with np.errstate(divide="ignore", invalid="ignore"):
        V1, V2 = V1_prime / denominator, V3 / denominator
        admissible = (denominator > 0) & (1 - eta * problem.smoothness - 8 * x2 * V2 >= 0)  # (14)
        floor = (
            eta * problem.smoothness * problem.sigma2 * problem.sum_m2
            + 2 * x2 * V1 * problem.sigma2
            + 8 * x2 * V2 * problem.kappa2
        )
    return np.where(admissible, floor, np.inf)


def bound(problem: ProblemConstants, constants: BoundConstants, *, eta: float, K: int) -> float:
    """Return the right side of (15), a bound on the mean squared gradient norm over K >= 1 iterations.

    It is +inf if (14) fails, i.e. if the step size eta > 0 exceeds ``eta_max``. Training may still work
    there: the paper's own experiments violate (14).
    """
    positive(eta=eta)
    at_least(1, K=K)
    floor = _floor(problem, eta, constants.V1_prime, constants.V3)
    return 2 * problem.delta / (eta * K) + float(floor)


@dataclass(frozen=True)
class SchedulePlan:
    """A schedule with a bound (15) that reaches a target, and its cost."""

    tau1: int
    tau2: int
    alpha: int
    K: int
    seconds: float


def plans(
    target: float,
    problem: ProblemConstants,
    system: System,
    *,
    eta: float,
    zeta: float,
    tau1: Iterable[int] = range(1, 31),
    tau2: Iterable[int] = range(1, 11),
    alpha: Iterable[int] = range(1, 31),
) -> list[SchedulePlan]:
    """Return every SD-FEEL schedule of a grid that brings the bound (15) down to a target, cheapest first.

    K is the fewest iterations, a multiple of tau1 * tau2, that reach the target; the cost is the latency.
    Ties (to a nanosecond) prefer the smaller tau1 * tau2, then the smaller alpha. ``target`` > 0 is a mean
    squared gradient norm, ``eta`` > 0 the step size, and the grid's entries are >= 1.

    Warning: the bound depends on tau1 and tau2 only by their product, while at a fixed product the latency
    falls with tau1. So tau2 = 1 always wins, unless the grid's tau1 ends too early to reach the best
    product. That is a property of the paper's formulas, not evidence about training.
    """
    positive(target=target, eta=eta)
    constants = {key: getattr(problem, key) for key in ("delta", "smoothness", "sigma2", "kappa2")}
    check_ordinary(target=target, eta=eta, **constants)
    in_range("zeta", zeta, 0.0, 1.0, open_above=True)
    t1, t2, a = (
        axis.ravel() for axis in np.meshgrid(_axis("tau1", tau1), _axis("tau2", tau2), _axis("alpha", alpha))
    )
    tau = t1 * t2
    _, V1_prime, V3 = _constants(tau, zeta**a)
    floor = _floor(problem, eta, V1_prime, V3)
    reaches = np.flatnonzero(floor < target)
    t1, t2, a, tau, floor = (column[reaches] for column in (t1, t2, a, tau, floor))
    needed = np.ceil(2 * problem.delta / (eta * (target - floor)))
    blocks = np.ceil(np.maximum(needed, 1.0) / tau)
    seconds = blocks * _block_seconds(SystemName.SD_FEEL, system, t1, t2, a)
    order = np.lexsort((t1, a, tau, np.round(seconds, 9)))
    columns = (column[order].tolist() for column in (t1, t2, a, blocks * tau, seconds))
    return [SchedulePlan(int(p), int(q), int(r), int(k), s) for p, q, r, k, s in zip(*columns, strict=True)]


class PlanGrid(TypedDict, total=False):
    """Keyword arguments of ``plan``, as of ``plans``."""

    eta: Required[float]
    zeta: Required[float]
    tau1: Iterable[int]
    tau2: Iterable[int]
    alpha: Iterable[int]


def plan(target: float, problem: ProblemConstants, system: System, **grid: Unpack[PlanGrid]) -> SchedulePlan:
    """Return the first of ``plans``, the cheapest schedule; ``plans`` explains why its tau2 is always 1.

    A ValueError means that no schedule of the grid reaches the target.
    """
    found = plans(target, problem, system, **grid)
    if not found:
        raise ValueError(
            f"target must be reachable by a schedule of the grid, got {target!r} at eta {grid['eta']!r} "
            f"and zeta {grid['zeta']!r}: take a larger target, a smaller eta or more gossip steps"
        )
    return found[0]


def _axis(key: str, values: Iterable[int]) -> npt.NDArray[np.float64]:
    values = list(values)
    if not values:
        raise ValueError(f"{key} must have at least one integer >= 1, got none")
    for value in values:
        at_least(1, **{key: value})
    return np.array(values, dtype=np.float64)
