import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles.sd_feel import Run, run

from hedgerow.strategies import Mixing, as_graph, mixing
from hedgerow.strategies.sd_feel import System, latency, preset, traffic
from hedgerow.strategies.sd_feel.theory import (
    PAPER_RATES,
    ProblemConstants,
    SchedulePlan,
    SystemName,
    block_seconds,
    bound,
    bound_constants,
    eta_max,
    inter_seconds,
    plan,
    plans,
    round_seconds,
)
from hedgerow.strategies.topology import graph
from hedgerow.wire import Clock, Compute, Rates

PAPER = preset("paper-text")
C10 = 0.8256645486206611
PERIODS = st.integers(1, 8)


# Latency


# (tau1, tau2, alpha): block of SD-FEEL, FedAvg, HierFAVG, FEEL; K = 1000 of each
# fmt: off
LATENCY = {
    (1, 1, 1): ((0.1675936, 0.293392, 0.293392, 0.153616), (167.5936, 293.392, 293.392, 153.616)),
    (2, 1, 5): ((0.237344, 0.307232, 0.307232, 0.167456), (118.672, 153.616, 153.616, 83.728)),
    (3, 1, 1): ((0.1952736, 0.321072, 0.321072, 0.181296), (65.2213824, 107.238048, 107.238048, 60.552864)),
    (20, 1, 1): ((0.4305536, 0.556352, 0.556352, 0.416576), (21.52768, 27.8176, 27.8176, 20.8288)),
    (5, 1, 1): ((0.2229536, 0.348752, 0.348752, 0.208976), (44.59072, 69.7504, 69.7504, 41.7952)),
    (5, 5, 1): ((1.0588576, 0.625552, 1.184656, 0.208976), (42.354304, 25.02208, 47.38624, 41.7952)),
    (5, 5, 10): ((1.184656, 0.625552, 1.184656, 0.208976), None),
}
# fmt: on
SCHEMES = (SystemName.SD_FEEL, SystemName.FEDAVG, SystemName.HIERFAVG, SystemName.FEEL)


def settings_of(taus: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("tau1", "tau2", "alpha"), taus, strict=True))


@pytest.mark.parametrize(
    ("link", "seconds"),
    [
        ("client->edge", 0.139776),
        ("edge->edge", 0.0139776),
        ("edge->cloud", 0.139776),
        ("client->cloud", 0.279552),
    ],
)
def test_a_model_takes_the_papers_seconds_over_each_link(link: str, seconds: float) -> None:
    assert PAPER.model_seconds(link) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("taus", LATENCY, ids=str)
def test_a_block_and_a_thousand_iterations_take_the_tabulated_seconds(taus: tuple[int, int, int]) -> None:
    blocks, thousands = LATENCY[taus]
    found = tuple(block_seconds(scheme, PAPER, **settings_of(taus)) for scheme in SCHEMES)
    assert found == pytest.approx(blocks, rel=1e-12)
    if thousands is not None:
        found = tuple(latency(scheme, PAPER, K=1000, **settings_of(taus)) for scheme in SCHEMES)
        assert found == pytest.approx(thousands, rel=1e-12)


def test_an_incomplete_block_counts_as_complete() -> None:
    assert latency("sd-feel", PAPER, K=1001, tau1=5, tau2=5) == pytest.approx(43.4131616, rel=1e-12)
    assert latency("sd-feel", PAPER, K=0, tau1=5, tau2=5) == 0


def test_trap_10_gossip_is_faster_than_the_cloud_up_to_ten_steps_only() -> None:
    cloud = block_seconds("hierfavg", PAPER, tau1=5, tau2=5)
    for alpha in range(1, 21):
        gossip = block_seconds("sd-feel", PAPER, tau1=5, tau2=5, alpha=alpha)
        assert (gossip == pytest.approx(cloud)) if alpha == 10 else ((gossip < cloud) == (alpha < 10))


@settings(deadline=None)
@given(PERIODS)
def test_trap_7_hierfavg_takes_the_seconds_of_fedavg_if_every_round_is_inter_cluster(tau1: int) -> None:
    assert block_seconds("hierfavg", PAPER, tau1=tau1) == pytest.approx(
        block_seconds("fedavg", PAPER, tau1=tau1)
    )


@settings(deadline=None)
@given(PERIODS, st.integers(2, 8), PERIODS)
def test_rare_inter_cluster_rounds_make_sd_feel_slower_an_iteration_than_fedavg(
    tau1: int, tau2: int, alpha: int
) -> None:
    sd_feel, fedavg = (
        block_seconds(scheme, PAPER, tau1=tau1, tau2=tau2, alpha=alpha) for scheme in ("sd-feel", "fedavg")
    )
    assert sd_feel > fedavg


@settings(deadline=None)
@given(PERIODS, PERIODS, PERIODS)
def test_feel_has_the_shortest_iterations_at_equal_round_length(tau1: int, tau2: int, alpha: int) -> None:
    feel = block_seconds("feel", PAPER, tau1=tau1) / tau1
    assert feel < block_seconds("sd-feel", PAPER, tau1=tau1, tau2=tau2, alpha=alpha) / (tau1 * tau2)
    assert feel < block_seconds("hierfavg", PAPER, tau1=tau1, tau2=tau2) / (tau1 * tau2)
    same_rounds = block_seconds("feel", PAPER, tau1=tau1 * tau2)
    assert same_rounds < block_seconds("fedavg", PAPER, tau1=tau1, tau2=tau2)


@pytest.mark.parametrize("scheme", SystemName)
@pytest.mark.parametrize("downlink", [False, True])
def test_a_clock_that_runs_round_by_round_shows_the_latency(scheme: SystemName, downlink: bool) -> None:
    system = replace(PAPER, downlink=downlink)
    clock = Clock()
    iterations = 6 if scheme is SystemName.FEDAVG else 2
    for round in range(1, 120 // iterations + 1):
        clock.advance(round_seconds(scheme, system, tau1=2, tau2=3))
        if round % 3 == 0:
            clock.advance(inter_seconds(scheme, system, alpha=4))
    assert clock.seconds == pytest.approx(latency(scheme, system, K=120, tau1=2, tau2=3, alpha=4))


@pytest.mark.parametrize(
    ("scheme", "tau1", "tau2", "downlink"),
    [
        ("sd-feel", 2, 3, 3 * 0.139776),
        ("feel", 2, 3, 0.139776),
        ("fedavg", 2, 3, 0.279552),
        ("hierfavg", 2, 3, 3 * 0.139776 + 0.139776),
    ],
)
def test_the_downlink_switch_adds_every_broadcast_of_a_block(
    scheme: str, tau1: int, tau2: int, downlink: float
) -> None:
    both = block_seconds(scheme, replace(PAPER, downlink=True), tau1=tau1, tau2=tau2)
    assert both - block_seconds(scheme, PAPER, tau1=tau1, tau2=tau2) == pytest.approx(downlink)


@pytest.mark.parametrize(("scheme", "seconds"), [("fedavg", 7.156256), ("hierfavg", 1.565216)])
def test_a_shared_cloud_link_costs_every_senders_model(scheme: str, seconds: float) -> None:
    shared = replace(PAPER, shared_cloud_link=True)
    assert block_seconds(scheme, shared, tau1=2) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("scheme", ["sd-feel", "feel"])
def test_a_shared_cloud_link_costs_nothing_without_a_cloud(scheme: str) -> None:
    shared = replace(PAPER, shared_cloud_link=True)
    assert block_seconds(scheme, shared, tau1=2) == block_seconds(scheme, PAPER, tau1=2)


# Presets


def test_trap_8_the_paper_preset_keeps_its_two_numbers_whatever_net_is_trained() -> None:
    assert preset("paper-text", num_params=31_340, flops_per_iteration=1e6) == PAPER
    assert PAPER.num_params == 21_840
    assert PAPER.compute.flops_per_iteration == 138.4e6


def test_the_honest_preset_takes_the_trained_nets_numbers() -> None:
    system = preset("honest", num_params=31_340, flops_per_iteration=3.3e7)
    assert system == System(31_340, Compute(3.3e7, 10e9), PAPER_RATES)


def test_the_large_preset_has_the_large_nets_seconds() -> None:
    large = preset("cifar-large")
    assert large.model_seconds("client->edge") == pytest.approx(37.453888, rel=1e-12)
    blocks = {
        scheme: block_seconds(scheme, large, tau1=2, alpha=5)
        for scheme in ("sd-feel", "hierfavg", "fedavg", "feel")
    }
    expected = {"sd-feel": 56.208512, "hierfavg": 74.935456, "fedavg": 74.935456, "feel": 37.481568}
    assert blocks == pytest.approx(expected, rel=1e-12)


# Traffic


@pytest.mark.parametrize(
    ("tau1", "tau2", "alpha", "name", "clients", "servers"),
    [
        (2, 1, 5, "ring", 25_000, 50_000),
        (5, 5, 1, "ring", 10_000, 800),
        (5, 5, 1, "bipartite", 10_000, 2_000),
        (5, 5, 1, "complete", 10_000, 3_600),
    ],
)
def test_a_thousand_iterations_send_the_tabulated_models(
    tau1: int, tau2: int, alpha: int, name: str, clients: int, servers: int
) -> None:
    edges = graph(name, 10).number_of_edges()
    sent = traffic(
        "sd-feel",
        K=1000,
        tau1=tau1,
        tau2=tau2,
        alpha=alpha,
        num_clients=50,
        num_servers=10,
        num_edges=edges,
    )
    assert sent == {"client->edge": clients, "edge->client": clients, "edge->edge": servers}


def test_the_baselines_send_over_links_of_their_own() -> None:
    run_of = {"K": 60, "tau1": 2, "tau2": 3, "num_servers": 10}
    assert traffic("fedavg", **run_of, num_clients=50) == {"client->cloud": 500, "cloud->client": 500}
    assert traffic("feel", **run_of, num_clients=5) == {"client->edge": 150, "edge->client": 150}
    assert traffic("hierfavg", **run_of, num_clients=50) == {
        "client->edge": 1500,
        "edge->client": 1500,
        "edge->cloud": 100,
        "cloud->edge": 100,
    }


# The convergence bound


CONSTANTS = [
    # zeta, (tau1, tau2, alpha), q, Lambda, V1', V3, eta_max L
    (0.6, (1, 1, 1), 0.6, 5.8125, 0.5625, 5.8125, 0.083411111),
    (0.6, (2, 1, 1), 0.6, 5.8125, 1.625, 26.75, 0.03920118),
    (0.6, (5, 5, 1), 0.6, 5.8125, 26.0625, 4682.8125, 0.0029814303),
    (1 / 3, (1, 1, 1), 0.333333, 1.375, 0.125, 1.375, 0.16848105),
    (1 / 3, (5, 5, 1), 0.333333, 1.375, 15.125, 1609.375, 0.0050838907),
    (0.0, (1, 1, 1), 0, 0, 0, 0, 1),
    (0.0, (2, 1, 4), 0, 0, 0.5, 2, 0.14055718),
    (0.0, (5, 5, 4), 0, 0, 12, 600, 0.0083217028),
    (C10, (2, 1, 5), 0.383723, 1.8056537, 0.84533562, 9.8452625, 0.06432222),
    (C10, (5, 5, 1), 0.825665, 34.044383, 65.547672, 23298.56, 0.0013370048),
    (C10, (5, 1, 1), 0.825665, 34.044383, 12.709534, 918.47025, 0.0067277851),
    (C10, (1, 5, 1), 0.825665, 34.044383, 12.709534, 918.47025, 0.0067277851),
]
GOLDEN_PROBLEM = ProblemConstants(delta=1, smoothness=1, sigma2=1, kappa2=0.25, sum_m2=0.02)


@pytest.mark.parametrize(("zeta", "taus", "q", "kernel", "V1_prime", "V3", "step"), CONSTANTS)
def test_the_constants_of_the_bound_are_the_golden_ones(
    zeta: float,
    taus: tuple[int, int, int],
    q: float,
    kernel: float,
    V1_prime: float,
    V3: float,
    step: float,
) -> None:
    constants = bound_constants(*taus, zeta)
    assert constants.q == pytest.approx(q, abs=5.1e-7)
    found = (constants.kernel, constants.V1_prime, constants.V3)
    assert found == pytest.approx((kernel, V1_prime, V3), rel=1e-7)
    assert eta_max(1.0, constants.V3) == pytest.approx(step, rel=2e-7)


@pytest.mark.parametrize("q", [0.0, 0.1, 0.6, C10])
def test_the_kernel_is_the_sum_of_its_series(q: float) -> None:
    terms = (q ** (2 * n) + 2 * q**n + q ** (n + 1) / (1 - q) for n in range(1, 1000))
    assert bound_constants(1, 1, 1, q).kernel == pytest.approx(sum(terms), rel=1e-12)


@pytest.mark.parametrize(
    ("zeta", "taus", "expected"),
    [
        (C10, (2, 1, 5), 0.2000413846),
        (0.6, (5, 5, 1), 0.2102005259),
        (1 / 3, (5, 5, 1), 0.203354873),
        (0.0, (5, 5, 1), 0.2012558643),
        (0.0, (1, 1, 1), 0.20002),
        (0.6, (5, 1, 1), 0.2003913213),
        (0.6, (1, 5, 1), 0.2003913213),
    ],
)
def test_the_bound_is_the_golden_one(zeta: float, taus: tuple[int, int, int], expected: float) -> None:
    value = bound(GOLDEN_PROBLEM, bound_constants(*taus, zeta), eta=0.001, K=10_000)
    assert value == pytest.approx(expected, abs=5.1e-11)


def test_the_papers_step_size_needs_a_smoother_loss_than_its_schedule_admits() -> None:
    constants = bound_constants(5, 5, 1, C10)
    assert eta_max(0.133, constants.V3) > 0.01 > eta_max(0.135, constants.V3)


@settings(deadline=None)
@given(st.floats(0, 1e8), st.floats(1e-3, 1e3))
def test_the_largest_step_is_the_edge_of_condition_14(V3: float, smoothness: float) -> None:
    def admissible(eta: float) -> bool:
        x = eta * smoothness
        denominator = 1 - 16 * x**2 * V3
        return denominator > 0 and 1 - x - 8 * x**2 * V3 / denominator >= 0

    largest = eta_max(smoothness, V3)
    assert admissible(largest * (1 - 1e-9))
    assert not admissible(largest * (1 + 1e-9))


@settings(deadline=None)
@given(PERIODS, PERIODS, PERIODS, st.floats(0, 0.95), st.floats(1e-2, 1e2))
def test_the_bound_is_infinite_exactly_above_the_largest_step(
    tau1: int, tau2: int, alpha: int, zeta: float, smoothness: float
) -> None:
    constants = bound_constants(tau1, tau2, alpha, zeta)
    problem = replace(GOLDEN_PROBLEM, smoothness=smoothness)
    largest = eta_max(smoothness, constants.V3)
    assert math.isfinite(bound(problem, constants, eta=largest * (1 - 1e-9), K=100))
    assert bound(problem, constants, eta=largest * (1 + 1e-9), K=100) == math.inf


@settings(deadline=None)
@given(PERIODS, PERIODS, PERIODS, st.floats(0, 0.95))
def test_trap_9_the_bound_sees_the_periods_only_by_their_product(
    tau1: int, tau2: int, alpha: int, zeta: float
) -> None:
    constants = bound_constants(tau1, tau2, alpha, zeta)
    assert bound_constants(tau2, tau1, alpha, zeta) == constants
    assert bound_constants(tau1 * tau2, 1, alpha, zeta) == constants


# Planning


GOLDEN_PLAN: dict[str, Any] = {"eta": 0.005, "zeta": C10}


def test_the_plan_is_the_golden_one() -> None:
    best = plan(0.1, GOLDEN_PROBLEM, PAPER, **GOLDEN_PLAN)
    assert (best.tau1, best.tau2, best.alpha, best.K) == (14, 1, 8, 5012)
    assert best.seconds == pytest.approx(159.4377344, rel=1e-10)


@pytest.mark.parametrize(
    ("choose", "taus", "K", "seconds"),
    [
        (lambda found: found[1], (15, 1, 9), 5055, 159.4597728),
        (lambda found: next(p for p in found if p.tau2 > 1), (8, 2, 11), 5008, 204.9353728),
        (
            lambda found: next(p for p in found if (p.tau1, p.tau2, p.alpha) == (2, 1, 5)),
            (2, 1, 5),
            4026,
            477.773472,
        ),
    ],
    ids=["runner-up", "best-with-intra-rounds", "the-papers-fig-3"],
)
def test_the_other_plans_are_the_golden_ones(
    choose: Callable[[list[SchedulePlan]], SchedulePlan], taus: tuple[int, int, int], K: int, seconds: float
) -> None:
    chosen = choose(plans(0.1, GOLDEN_PROBLEM, PAPER, **GOLDEN_PLAN))
    assert (chosen.tau1, chosen.tau2, chosen.alpha, chosen.K) == (*taus, K)
    assert chosen.seconds == pytest.approx(seconds, rel=1e-10)


@pytest.mark.parametrize(
    ("target", "alpha", "last"),
    # A loose target leaves condition (14) alone to decide, a tight one the terms that K does not reduce.
    [(1.0, 1, 6), (1.0, 5, 23), (0.1, 1, 5), (0.1, 5, 19)],
)
def test_so_many_local_iterations_are_feasible(target: float, alpha: int, last: int) -> None:
    found = plans(target, GOLDEN_PROBLEM, PAPER, **GOLDEN_PLAN, tau2=[1], alpha=[alpha])
    assert sorted(p.tau1 for p in found) == list(range(1, last + 1))


def test_trap_9_the_planner_always_picks_inter_cluster_rounds_only() -> None:
    for target in (0.05, 0.1, 0.3, 1.0):
        for zeta in (0.0, 0.6, C10, 0.95):
            assert plan(target, GOLDEN_PROBLEM, PAPER, eta=0.002, zeta=zeta, tau1=range(1, 91)).tau2 == 1


@settings(deadline=None, max_examples=25)
@given(st.floats(0.05, 1), st.floats(1e-3, 1e-2), st.floats(0, 0.9), st.booleans())
def test_every_plan_meets_the_target_with_whole_blocks_and_no_block_to_spare(
    target: float, eta: float, zeta: float, downlink: bool
) -> None:
    system = replace(PAPER, downlink=downlink)
    axes = {"tau1": (1, 3, 7), "tau2": (1, 4), "alpha": (1, 5)}
    found = plans(target, GOLDEN_PROBLEM, system, eta=eta, zeta=zeta, **axes)
    assert all(a.seconds <= b.seconds + 1e-9 for a, b in pairwise(found))
    for p in found:
        constants = bound_constants(p.tau1, p.tau2, p.alpha, zeta)
        block = p.tau1 * p.tau2
        assert p.K % block == 0
        assert bound(GOLDEN_PROBLEM, constants, eta=eta, K=p.K) <= target * (1 + 1e-12)
        if block < p.K:
            assert bound(GOLDEN_PROBLEM, constants, eta=eta, K=p.K - block) > target * (1 - 1e-12)
        seconds = latency("sd-feel", system, K=p.K, tau1=p.tau1, tau2=p.tau2, alpha=p.alpha)
        assert p.seconds == pytest.approx(seconds)


def test_a_tie_goes_to_the_smaller_block() -> None:
    # Free links and two iterations to make: blocks of one and of two cost the same.
    system = replace(PAPER, rates=Rates({"client->edge": 1e30, "edge->edge": 1e30}))
    problem = ProblemConstants(delta=1e-3, smoothness=1e-6, sigma2=0, kappa2=0, sum_m2=1)
    found = plans(0.1, problem, system, eta=0.01, zeta=0.0, tau1=[1, 2], tau2=[1, 2], alpha=[2, 1])
    assert len({round(p.seconds, 9) for p in found[:6]}) == 1
    ranked = [(p.tau1 * p.tau2, p.alpha, p.tau1) for p in found[:6]]
    assert ranked == sorted(ranked)
    assert (found[0].tau1, found[0].tau2, found[0].alpha) == (1, 1, 1)


# Algorithm 1 as a plain loop: golden trajectories G8 to G14

SIX = {"sizes": [30, 20, 10, 20, 15, 5], "clusters": [[0, 1], [2, 3], [4, 5]], "edges": [(0, 1), (1, 2)]}
ONE_CLUSTER = {"sizes": SIX["sizes"], "clusters": [range(6)], "edges": []}
G1_EDGES = [(0, 1), (1, 2), (2, 3), (3, 0)]
CURVATURE = (1, 0.5, 2, 1, 0.25, 4)
UNIT = (1,) * 6


def quadratic(curvature: Sequence[float]) -> Callable[[int, int, np.ndarray], np.ndarray]:
    """Full gradients of F_i(w) = a_i / 2 (w - c_i)^2 with c_i = 1, 2, ..."""
    return lambda i, k, w: curvature[i] * (w - (i + 1))


def train(
    system: dict[str, Any], curvature: Sequence[float], taus: Sequence[int], K: int, **more: Any
) -> Run:
    tau1, tau2, alpha = taus
    return run(
        np.zeros(1),
        quadratic(curvature),
        **system,
        tau1=tau1,
        tau2=tau2,
        alpha=alpha,
        eta=0.1,
        K=K,
        **more,
    )


def pairs(*values: float) -> list[float]:
    return [value for value in values for _ in range(2)]


G8 = {
    1: ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 0.285),
    2: (pairs(0.266, 0.696666666667, 0.9975), 0.5415),
    3: ([0.3394, 0.4394, 0.927, 1.027, 1.39775, 1.49775], 0.77235),
    4: (pairs(0.709608292683, 1.146333333333, 1.407054268293), 0.980115),
    5: (
        [0.738647463415, 0.838647463415, 1.3317, 1.4317, 1.766348841463, 1.866348841463],
        1.1671035,
    ),
    6: (pairs(0.840782717073, 1.625196666667, 2.137213957317), 1.33539315),
    7: (
        [0.856704445366, 0.956704445366, 1.762677, 1.862677, 2.423492561585, 2.523492561585],
        1.486853835,
    ),
    8: (pairs(1.259046283513, 1.842112733946, 2.205057447797), 1.6231684515),
}


@pytest.mark.parametrize("k", G8)
def test_the_loop_gives_the_golden_clients_and_mean_of_g8(k: int) -> None:
    state = train(SIX, UNIT, (2, 2, 1), K=8).states[k]
    clients, u = G8[k]
    np.testing.assert_allclose(state.clients[:, 0], clients, atol=5.1e-13)
    assert state.u[0] == pytest.approx(u, abs=5.1e-11)
    assert state.u[0] == pytest.approx(2.85 * (1 - 0.9**k))


G9 = [
    (SIX, (2, 2, 1), "gossip", 4, [0.695579577236, 1.217211078241, 1.665808705499]),
    (SIX, (2, 2, 1), "gossip", 8, [1.250721190808, 2.001405680161, 2.459416452643]),
    (SIX, (2, 2, 3), "gossip", 4, [0.945812968756, 1.095072190638, 1.223433558104]),
    (SIX, (2, 2, 3), "gossip", 8, [1.623092064171, 1.792125994861, 1.902009976262]),
    (SIX, (1, 1, 1), "gossip", 4, [0.904087487101, 1.241937988787, 1.447303087763]),
    (SIX, (1, 1, 1), "gossip", 8, [1.621271042189, 1.956766704889, 2.147229745163]),
    (SIX, (1, 4, 1), "gossip", 4, [0.697212276784, 1.341196415533, 1.738238437817]),
    (SIX, (1, 4, 1), "gossip", 8, [1.271963024038, 2.114689062596, 2.573156427634]),
    (SIX, (4, 1, 1), "gossip", 4, [0.692119878049, 1.022867679751, 1.550206695408]),
    (SIX, (4, 1, 1), "gossip", 8, [1.216153266318, 1.817117021944, 2.275125702230]),
    (SIX, (2, 2, 0), "gossip", 8, [0.609034449216, 2.381920217284, 3.395902160939]),
    (SIX, (2, 2, 1), "none", 8, [0.609034449216, 2.381920217284, 3.395902160939]),
    (SIX, (2, 2, 1), "exact", 4, [1.046114853190] * 3),
    (SIX, (2, 2, 1), "exact", 8, [1.734363853652] * 3),
    (SIX, (2, 1, 1), "exact", 4, [1.058961409180] * 3),
    (SIX, (2, 1, 1), "exact", 8, [1.753906828814] * 3),
    (ONE_CLUSTER, (2, 1, 1), "gossip", 4, [1.058961409180]),
    (ONE_CLUSTER, (2, 1, 1), "gossip", 8, [1.753906828814]),
    (ONE_CLUSTER, (4, 1, 1), "gossip", 4, [0.962961582031]),
    (ONE_CLUSTER, (4, 1, 1), "gossip", 8, [1.611944180006]),
    (ONE_CLUSTER, (2, 3, 2), "gossip", 6, [1.442889269068]),
    (SIX, (2, 1, 1), "exact", 6, [1.442889269068] * 3),
]


@pytest.mark.parametrize(("system", "taus", "inter", "k", "servers"), G9)
def test_the_loop_gives_the_golden_servers_of_g9(
    system: dict[str, Any], taus: tuple[int, int, int], inter: str, k: int, servers: list[float]
) -> None:
    state = train(system, CURVATURE, taus, K=k, inter=inter).states[k]
    np.testing.assert_allclose(state.servers[:, 0], servers, atol=5.1e-13)


@pytest.mark.parametrize(("alpha", "u"), [(1, 1.717665589981), (3, 1.729585825796)])
def test_the_loop_gives_the_golden_mean_of_g9(alpha: int, u: float) -> None:
    state = train(SIX, CURVATURE, (2, 2, alpha), K=8).states[8]
    assert state.u[0] == pytest.approx(u, abs=5.1e-13)


def test_synchronous_training_on_a_clique_of_equal_clusters_is_golden_g10() -> None:
    system = {"sizes": [1] * 6, "clusters": SIX["clusters"], "edges": [(0, 1), (1, 2), (0, 2)]}
    states = train(system, CURVATURE, (1, 1, 1), K=4).states
    golden = [0.620833333333, 1.151128472222, 1.604088903356, 1.990992604950]
    for state, value in zip(states[1:], golden, strict=True):
        np.testing.assert_allclose(state.clients[:, 0], value, atol=5.1e-13)


def test_one_client_a_server_is_golden_g11() -> None:
    system = {"sizes": [40, 30, 20, 10], "clusters": [[0], [1], [2], [3]], "edges": G1_EDGES}
    states = train(system, (1,) * 4, (1, 1, 1), K=2).states
    golden = [
        [0.163157894737, 0.2, 0.3, 0.147368421053],
        [0.312991689751, 0.391966759003, 0.498199445983, 0.375734072022],
    ]
    for state, values in zip(states[1:], golden, strict=True):
        np.testing.assert_allclose(state.clients[:, 0], values, atol=5.1e-13)


EIGHT = {
    "sizes": [10, 30, 20, 10, 5, 15, 6, 4],
    "clusters": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "edges": G1_EDGES,
}
G12 = [
    ([0.175, 0.333333333333, 0.575, 0.74], 0.359),
    ([0.564921052632, 0.721964912281, 0.763447368421, 0.868526315789], 0.6821),
    ([0.683428947368, 0.983101754386, 1.262102631579, 1.521673684211], 0.97289),
    ([1.085608455314, 1.291469114059, 1.331853797201, 1.465461242164], 1.234601),
]


def test_two_clients_a_server_are_golden_g12() -> None:
    states = train(EIGHT, (1,) * 8, (1, 2, 2), K=4).states
    for state, (servers, u) in zip(states[1:], G12, strict=True):
        np.testing.assert_allclose(state.servers[:, 0], servers, atol=5.1e-13)
        assert state.u[0] == pytest.approx(u, abs=5.1e-13)


def test_feel_is_one_cluster_of_scheduled_clients_as_in_golden_g13() -> None:
    schedule = {1: (2, 5), 2: (1, 6)}
    states = train(
        ONE_CLUSTER, UNIT, (2, 1, 1), K=4, active=lambda r: [i + 1 in schedule[r] for i in range(6)]
    ).states
    assert states[2].servers[0, 0] == pytest.approx(0.624285714286, abs=5.1e-13)
    assert states[4].servers[0, 0] == pytest.approx(0.831385714286, abs=5.1e-13)


G14 = [
    ("111111", [1.4, 3.666666666667, 5.25], [2.063414634146, 3.333333333333, 4.091463414634]),
    ("101101", [1, 3.666666666667, 6], [1.780487804878, 3.504065040650, 4.292682926829]),
    ("110011", [1.4, 0.5, 5.25], [1.136585365854, 3.256097560976, 1.774390243902]),
]


@pytest.mark.parametrize(("draw", "intra", "gossip"), G14, ids=[draw for draw, *_ in G14])
def test_absent_clients_leave_renormalised_weights_as_in_golden_g14(
    draw: str, intra: list[float], gossip: list[float]
) -> None:
    for inter, expected in (("none", intra), ("gossip", gossip)):
        # With eta = 1 every present client lands on its own optimum 1, ..., 6.
        result = run(
            np.full(1, 0.5),
            quadratic(UNIT),
            **SIX,
            tau1=1,
            eta=1.0,
            K=1,
            active=lambda r: [c == "1" for c in draw],
            inter=inter,
        )
        np.testing.assert_allclose(result.states[1].servers[:, 0], expected, atol=5.1e-13)


# Properties T5, T7 to T12 of the whole algorithm


@st.composite
def federations(draw: st.DrawFn) -> dict[str, Any]:
    """Two to four servers on a random tree (and maybe one more edge), one to three clients each."""
    D = draw(st.integers(2, 4))
    edges = [(draw(st.integers(0, d - 1)), d) for d in range(1, D)]
    missing = [(i, j) for i in range(D) for j in range(i + 1, D) if (i, j) not in edges]
    edges += draw(st.lists(st.sampled_from(missing), max_size=1)) if missing else []
    counts = draw(st.lists(st.integers(1, 3), min_size=D, max_size=D))
    C = sum(counts)
    ends = np.cumsum(counts)
    clusters = [list(range(end - count, end)) for end, count in zip(ends.tolist(), counts, strict=True)]
    sizes = draw(st.lists(st.integers(1, 50), min_size=C, max_size=C))
    return {"sizes": sizes, "clusters": clusters, "edges": edges}


SCHEDULES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))


def curvatures(system: dict[str, Any]) -> np.ndarray:
    return np.random.default_rng(0).uniform(0.2, 2.0, len(system["sizes"]))


def network_of(system: dict[str, Any]) -> Mixing:
    D = len(system["clusters"])
    sizes = [sum(system["sizes"][i] for i in cluster) for cluster in system["clusters"]]
    return mixing(as_graph(system["edges"], D), sizes)


def aggregation_matrices(system: dict[str, Any], alpha: int) -> tuple[np.ndarray, ...]:
    """V, B, m, H_1 and H_2 of the paper's matrix form, Lemma 1."""
    n = np.array(system["sizes"], float)
    B = np.array([[i in cluster for i in range(len(n))] for cluster in system["clusters"]], float)
    V = (B * n / (B @ n)[:, None]).T
    power = np.linalg.matrix_power(network_of(system).matrix, alpha)
    return V, B, n / n.sum(), V @ B, V @ power @ B


@settings(deadline=None)
@given(federations(), st.integers(1, 3))
def test_the_aggregation_matrices_keep_mean_and_consensus_and_absorb_each_other(
    system: dict[str, Any], alpha: int
) -> None:
    V, B, m, H1, H2 = aggregation_matrices(system, alpha)
    near = {"atol": 1e-11}
    np.testing.assert_allclose(B @ V, np.eye(len(B)), **near)
    for product, expected in ((H1 @ H1, H1), (H1 @ H2, H2), (H2 @ H1, H2)):
        np.testing.assert_allclose(product, expected, **near)
    for H in (H1, H2):
        np.testing.assert_allclose(H @ m, m, **near)
        np.testing.assert_allclose(H.sum(axis=0), 1, **near)


def scaled_norm(matrix: np.ndarray, m: np.ndarray) -> float:
    root = np.sqrt(m)
    return float(np.linalg.norm(matrix * root / root[:, None], 2))


@settings(deadline=None)
@given(federations(), st.integers(1, 3), st.integers(1, 3))
def test_lemma_6_holds_in_the_norm_weighted_by_sizes(system: dict[str, Any], alpha: int, j: int) -> None:
    _, _, m, H1, H2 = aggregation_matrices(system, alpha)
    M = np.outer(m, np.ones(len(m)))
    assert scaled_norm(H1 - M, m) == pytest.approx(1)
    zeta = network_of(system).zeta
    assert scaled_norm(np.linalg.matrix_power(H2, j) - M, m) == pytest.approx(zeta ** (j * alpha), abs=1e-9)


def test_the_aggregation_matrices_of_g8_are_golden_g7() -> None:
    V, _, m, H1, H2 = aggregation_matrices(SIX, 1)
    golden = [[0.6, 0.4, 0, 0, 0, 0], [0, 0, 1 / 3, 2 / 3, 0, 0], [0, 0, 0, 0, 0.75, 0.25]]
    np.testing.assert_allclose(V.T, golden, atol=1e-15)
    np.testing.assert_allclose(H2[0], pairs(0.424390243902, 0.292682926829, 0), atol=5.1e-13)
    M = np.outer(m, np.ones(6))
    assert np.linalg.norm(H2 - M, 2) == pytest.approx(0.728108520964, abs=5.1e-13)
    assert scaled_norm(H2 - M, m) == pytest.approx(0.534919809743, abs=5.1e-13)
    assert np.linalg.norm(H1 - M, 2) == pytest.approx(1.142333191, abs=5.1e-10)
    assert scaled_norm(H1 - M, m) == pytest.approx(1)


@settings(deadline=None, max_examples=50)
@given(federations(), SCHEDULES)
def test_the_loop_is_the_papers_matrix_form(system: dict[str, Any], taus: tuple[int, int, int]) -> None:
    tau1, tau2, alpha = taus
    *_, H1, H2 = aggregation_matrices(system, alpha)
    a = curvatures(system)
    W = np.zeros(len(a))
    for state in train(system, a, taus, K=9).states[1:]:
        T = H2 if state.k % (tau1 * tau2) == 0 else H1 if state.k % tau1 == 0 else np.eye(len(a))
        W = (W - 0.1 * a * (W - np.arange(1, len(a) + 1))) @ T  # Lemma 1
        np.testing.assert_allclose(state.clients[:, 0], W, atol=1e-11)


@settings(deadline=None, max_examples=50)
@given(federations(), SCHEDULES, st.sampled_from([("sd-feel", "gossip"), ("hierfavg", "exact")]))
def test_t12_the_loop_sends_the_models_of_the_closed_forms(
    system: dict[str, Any], taus: tuple[int, int, int], kind: tuple[str, str]
) -> None:
    scheme, inter = kind
    tau1, tau2, alpha = taus
    K = 2 * tau1 * tau2
    sent = train(system, curvatures(system), taus, K=K, inter=inter).sent
    expected = traffic(
        scheme,
        K=K,
        tau1=tau1,
        tau2=tau2,
        alpha=alpha,
        num_clients=len(system["sizes"]),
        num_servers=len(system["clusters"]),
        num_edges=len(system["edges"]),
    )
    assert dict(sent) == expected


def test_t12_absent_clients_send_nothing() -> None:
    sent = train(SIX, UNIT, (2, 2, 1), K=8, active=lambda r: [True, False, True, True, False, True]).sent
    assert sent["client->edge"] == sent["edge->client"] == 4 * 4
    assert sent["edge->edge"] == 2 * 2 * 2


def test_an_absent_client_neither_trains_nor_resumes_from_a_stale_model() -> None:
    states = train(SIX, UNIT, (2, 1, 1), K=4, active=lambda r: [r == 2, True, True, True, True, True]).states
    assert states[1].clients[0, 0] == 0.0
    server = states[2].servers[0, 0]
    assert states[3].clients[0, 0] == pytest.approx(server - 0.1 * (server - 1))
