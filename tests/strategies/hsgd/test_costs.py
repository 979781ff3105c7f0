import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles.hsgd import Group, Theta, run

from hedgerow.strategies.hsgd.costs import (
    PAPER_RATES,
    Method,
    Sizes,
    paper_bytes,
    round_parts,
    round_seconds,
    run_seconds,
    traffic,
)
from hedgerow.wire import Clock, Rates

ORGAN = Sizes(19_211, 3_424, 3_424, 144, 144, 34)
ESR = Sizes(165, 1_216, 1_216, 16, 16, 18)
MIMIC = Sizes(33, 3_584, 3_584, 16, 16, 29)
TOY = (Sizes(2, 1, 1, 1, 1, 3), Sizes(2, 1, 1, 1, 1, 1))

COUNTS = st.integers(1, 40)
SIZES = st.builds(Sizes, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS)
METHODS = st.sampled_from(list(Method))


@pytest.mark.parametrize(
    ("sizes", "method", "P", "Q", "golden"),
    [
        (ORGAN, "hsgd", 1, 1, 595_372),
        (ORGAN, "hsgd", 4, 2, 294_262),
        (ORGAN, "hsgd", 4, 4, 148_843),
        (ORGAN, "c-hsgd", 1, 1, 504_737.625),
        (ORGAN, "jfl", 1, 1, 6_195_888),
        (ESR, "hsgd", 1, 1, 95_380),
        (ESR, "hsgd", 4, 2, 46_474),
        (ESR, "hsgd", 4, 4, 23_845),
        (ESR, "c-hsgd", 1, 1, 93_064.375),
        (ESR, "jfl", 1, 1, 201_168),
        (MIMIC, "hsgd", 1, 1, 433_924),
        (MIMIC, "hsgd", 4, 2, 213_378),
        (MIMIC, "hsgd", 4, 4, 108_481),
        (MIMIC, "c-hsgd", 1, 1, 430_920.875),
        (MIMIC, "jfl", 1, 1, 842_856),
    ],
)
def test_the_papers_cost_of_an_iteration_is_golden(
    sizes: Sizes, method: str, P: int, Q: int, golden: float
) -> None:
    assert paper_bytes(sizes, P=P, Q=Q, T=8, method=method) == 8 * golden


LINKS = (
    "device->edge",
    "edge->device",
    "edge->hospital",
    "hospital->edge",
    "hospital->cloud",
    "cloud->hospital",
    "edge->cloud",
    "cloud->edge",
)


@pytest.mark.parametrize(
    ("sizes", "P", "Q", "links", "total", "paper"),
    [
        (MIMIC, 1, 1, (3_340_800, 3_371_424, 14_848, 15_904, 115_744, 114_688), 7_203_840, 3_471_392),
        (MIMIC, 4, 2, (1_670_400, 1_685_712, 7_424, 7_952, 28_936, 28_672), 3_486_704, 1_707_024),
        (MIMIC, 4, 4, (835_200, 842_856, 3_712, 3_976, 28_936, 28_672), 1_800_960, 867_848),
        (ORGAN, 4, 2, (1_940_992, 12_391_776, 78_336, 385_712, 181_080, 27_392), 15_213_760, 2_354_096),
        (ESR, 4, 2, (354_816, 402_336, 4_608, 7_248, 11_048, 9_728), 810_560, 371_792),
    ],
)
def test_the_whole_traffic_is_golden(
    sizes: Sizes, P: int, Q: int, links: tuple[int, ...], total: int, paper: int
) -> None:
    sent = traffic(sizes, P=P, Q=Q, T=8)
    *local, hospital, edge = links
    assert sent == dict(zip(LINKS, (*local, hospital, hospital, edge, edge), strict=True))
    assert sum(sent.values()) == total
    assert paper_bytes(sizes, P=P, Q=Q, T=8) == paper


def test_the_toys_two_ledgers_are_golden() -> None:
    assert sum(paper_bytes(sizes, P=4, Q=2, T=4) for sizes in TOY) == 136
    assert sum(paper_bytes(sizes, P=1, Q=1, T=4) for sizes in TOY) == 288
    assert [sum(traffic(sizes, P=4, Q=2, T=4).values()) for sizes in TOY] == [240, 112]


class Flat:
    """A split network of given sizes that learns nothing: only the sizes of its messages count."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def encode1(self, theta1: Any, x1: Any) -> Any:
        return np.zeros((len(x1), self.sizes.hospital_encoding))

    def encode2(self, theta2: Any, x2: Any) -> Any:
        return np.zeros((len(x2), self.sizes.device_encoding))

    def hospital(self, theta0: Any, theta1: Any, x1: Any, Z2: Any, y: Any) -> Any:
        return np.zeros_like(theta0), np.zeros_like(theta1)

    def device(self, theta0: Any, Z1: Any, theta2: Any, x2: Any, y: Any) -> Any:
        return np.zeros_like(theta2)


@given(st.builds(Sizes, *[st.integers(1, 5)] * 6), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
@settings(deadline=None, max_examples=40)
def test_the_traffic_is_what_the_algorithm_sends(sizes: Sizes, Q: int, ratio: int, rounds: int) -> None:
    data = np.zeros((sizes.batch, 1))
    start = Theta(*(np.zeros(n) for n in (sizes.head, sizes.hospital, sizes.device)))
    P = Q * ratio
    T = P * rounds
    sent = run(
        Flat(sizes), start, [Group(1.0, data, data, data[:, 0])], P=P, Q=Q, T=T, eta=lambda _: 0.1
    ).sent
    assert traffic(sizes, P=P, Q=Q, T=T) == {link: 4 * scalars for link, scalars in sent.items()}


def test_the_final_model_costs_one_more_broadcast() -> None:
    kept, sent = (traffic(MIMIC, P=4, Q=2, T=8, send_final=final) for final in (False, True))
    extra = {link: sent[link] - kept[link] for link in LINKS if sent[link] != kept[link]}
    assert extra == {"cloud->hospital": 4 * (33 + 3_584), "cloud->edge": 4 * 3_584}


def test_compressed_traffic_is_values_with_their_indices() -> None:
    # Head 33: 7 entries of 4 + 1 bytes; encodings 16: 3 entries of 4 + 1 bytes. Models stay dense.
    sent = traffic(MIMIC, P=1, Q=1, T=1, compressed=True)
    assert sent["edge->hospital"] == 29 * 15
    assert sent["hospital->edge"] == 35 + 29 * 15
    assert sent["edge->device"] == 29 * (4 * 3_584 + 35 + 15)
    assert sent["hospital->cloud"] == traffic(MIMIC, P=1, Q=1, T=1)["hospital->cloud"]


def test_one_scalar_needs_no_index() -> None:
    tiny = Sizes(1, 1, 1, 1, 1, 1)
    assert traffic(tiny, P=1, Q=1, T=1, compressed=True) == traffic(tiny, P=1, Q=1, T=1)


def test_merged_training_costs_no_global_aggregation_but_the_raw_data() -> None:
    cost = paper_bytes(MIMIC, P=1, Q=1, T=10, method="tdcd", raw_bytes=1e6)
    assert cost == paper_bytes(MIMIC, P=1, Q=1, T=10) - 10 * 4 * 3_584 + 1e6
    compressed = paper_bytes(MIMIC, P=1, Q=1, T=10, method="c-tdcd", raw_bytes=1e6)
    assert compressed == 10 * (430_920.875 - 4 * 3_584) + 1e6


@given(SIZES, st.integers(1, 30))
@settings(deadline=None)
def test_equal_intervals_divide_the_cost(sizes: Sizes, P: int) -> None:
    unit = paper_bytes(sizes, P=1, Q=1, T=60)
    assert paper_bytes(sizes, P=P, Q=P, T=60) == pytest.approx(unit / P, rel=1e-12)


@given(SIZES, st.integers(1, 10), st.integers(1, 5))
@settings(deadline=None)
def test_the_cost_falls_with_either_interval(sizes: Sizes, Q: int, ratio: int) -> None:
    P = 2 * Q * ratio
    here = paper_bytes(sizes, P=P, Q=Q, T=100)
    assert paper_bytes(sizes, P=P, Q=2 * Q, T=100) < here
    assert paper_bytes(sizes, P=2 * P, Q=Q, T=100) < here


@given(SIZES)
@settings(deadline=None)
def test_the_cost_is_affine_in_the_number_of_local_intervals(sizes: Sizes) -> None:
    one, two, three = (paper_bytes(sizes, P=12, Q=12 // ratio, T=12) for ratio in (1, 2, 3))
    assert three - two == pytest.approx(two - one, rel=1e-9)


# Times.


def test_the_times_of_a_round_are_golden() -> None:
    parts = round_parts(MIMIC)
    assert parts.global_aggregation == pytest.approx(0.0021314807, abs=5e-11)
    assert parts.local_aggregation == pytest.approx(0.0092346182, abs=5e-11)
    assert parts.exchange == pytest.approx(0.0002657449, abs=5e-11)
    assert round_seconds(parts, P=4, Q=2, compute_seconds=0.05) == pytest.approx(0.2211322068, abs=1e-10)
    assert round_seconds(parts, P=1, Q=1, compute_seconds=0.05) == pytest.approx(0.0616318437, abs=1e-10)


def test_the_times_of_the_large_head_are_golden() -> None:
    parts = round_parts(ORGAN)
    assert parts.global_aggregation == pytest.approx(0.0133386963, abs=5e-11)
    assert parts.local_aggregation == pytest.approx(0.0088223584, abs=5e-11)
    assert parts.exchange == pytest.approx(0.0163843370, abs=5e-11)
    assert round_seconds(parts, P=1, Q=1, compute_seconds=0.06) == pytest.approx(0.0985453917, abs=1e-10)


def test_merged_training_waits_for_the_raw_data_and_for_no_cloud() -> None:
    merged = round_parts(MIMIC, method="tdcd")
    assert merged == replace(round_parts(MIMIC), global_aggregation=0.0)
    late, prompt = (
        run_seconds(merged, P=2, Q=2, T=8, compute_seconds=0.05, raw_seconds=raw) for raw in (1450.0, 0.0)
    )
    assert late == prompt + 1450


def test_separate_pairs_send_a_model_a_device_over_the_hospitals_link() -> None:
    parts = round_parts(MIMIC, method="jfl")
    assert parts.local_aggregation == 0
    hospital = 32 * 29 * (33 + 3_584)
    assert parts.global_aggregation == pytest.approx(hospital / 74e6 + hospital / 204e6, rel=1e-12)
    exchange = 32 * (16 / 14e6 + 29 * (33 + 16) / 74e6 + (33 + 16) / 110e6)
    assert parts.exchange == pytest.approx(exchange, rel=1e-12)


def test_one_separate_pair_waits_for_its_devices_mobile_link() -> None:
    lone = replace(MIMIC, batch=1)
    mobile = 32 * 3_584 * (1 / 14e6 + 1 / 110e6)
    assert round_parts(lone, method="jfl").global_aggregation == pytest.approx(mobile, rel=1e-12)


def test_compression_shortens_the_swap_alone() -> None:
    dense, compressed = round_parts(ORGAN), round_parts(ORGAN, method="c-hsgd")
    assert compressed.exchange == pytest.approx(7 / 32 * dense.exchange, rel=1e-12)
    assert replace(compressed, exchange=dense.exchange) == dense


def test_a_run_takes_its_rounds() -> None:
    clock, parts = Clock(), round_parts(ESR)
    for _ in range(5):
        clock.advance(round_seconds(parts, P=4, Q=2, compute_seconds=0.064))
    assert run_seconds(parts, P=4, Q=2, T=20, compute_seconds=0.064) == pytest.approx(clock.seconds)


def test_the_slower_side_of_the_swap_counts() -> None:
    wide = replace(MIMIC, device_encoding=500)
    exchange = 32 * (500 / 14e6 + 29 * 500 / 74e6 + (33 + 16) / 110e6)
    assert round_parts(wide).exchange == pytest.approx(exchange, rel=1e-12)


def test_counts_may_be_numpys() -> None:
    assert paper_bytes(MIMIC, P=np.int64(4), Q=np.int64(2), T=8) == paper_bytes(MIMIC, P=4, Q=2, T=8)


def test_faster_links_shorten_every_part() -> None:
    twice = Rates({link: 2 * rate for link, rate in PAPER_RATES.bits_per_second.items()})
    slow, fast = round_parts(ORGAN), round_parts(ORGAN, rates=twice)
    assert fast.exchange == pytest.approx(slow.exchange / 2, rel=1e-12)
    assert fast.local_aggregation == pytest.approx(slow.local_aggregation / 2, rel=1e-12)
    assert fast.global_aggregation == pytest.approx(slow.global_aggregation / 2, rel=1e-12)


@given(SIZES, METHODS, st.integers(1, 5), st.integers(1, 4))
@settings(deadline=None)
def test_costs_and_times_are_positive_and_finite(sizes: Sizes, method: str, Q: int, ratio: int) -> None:
    cost = paper_bytes(sizes, P=Q * ratio, Q=Q, T=20, method=method)
    seconds = round_seconds(round_parts(sizes, method=method), P=Q * ratio, Q=Q, compute_seconds=0.0)
    assert 0 < cost < math.inf
    assert 0 < seconds < math.inf


# What is refused.
