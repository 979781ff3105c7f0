from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles.hsgd import Group, Theta, run

from hedgerow.strategies.hsgd.theory import (
    Sizes,
    paper_bytes,
    round_parts,
    round_seconds,
    traffic,
)

ORGAN = Sizes(19_211, 3_424, 3_424, 144, 144, 34)
ESR = Sizes(165, 1_216, 1_216, 16, 16, 18)
MIMIC = Sizes(33, 3_584, 3_584, 16, 16, 29)


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


def test_compressed_traffic_is_values_with_their_indices() -> None:
    # Head 33: 7 entries of 4 + 1 bytes; encodings 16: 3 entries of 4 + 1 bytes. Models stay dense.
    sent = traffic(MIMIC, P=1, Q=1, T=1, compressed=True)
    assert sent["edge->hospital"] == 29 * 15
    assert sent["hospital->edge"] == 35 + 29 * 15
    assert sent["edge->device"] == 29 * (4 * 3_584 + 35 + 15)
    assert sent["hospital->cloud"] == traffic(MIMIC, P=1, Q=1, T=1)["hospital->cloud"]


def test_merged_training_costs_no_global_aggregation_but_the_raw_data() -> None:
    cost = paper_bytes(MIMIC, P=1, Q=1, T=10, method="tdcd", raw_bytes=1e6)
    assert cost == paper_bytes(MIMIC, P=1, Q=1, T=10) - 10 * 4 * 3_584 + 1e6
    compressed = paper_bytes(MIMIC, P=1, Q=1, T=10, method="c-tdcd", raw_bytes=1e6)
    assert compressed == 10 * (430_920.875 - 4 * 3_584) + 1e6


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


def test_merged_training_waits_for_no_cloud() -> None:
    assert round_parts(MIMIC, method="tdcd") == replace(round_parts(MIMIC), global_aggregation=0.0)


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


def test_the_slower_side_of_the_swap_counts() -> None:
    wide = replace(MIMIC, device_encoding=500)
    exchange = 32 * (500 / 14e6 + 29 * 500 / 74e6 + (33 + 16) / 110e6)
    assert round_parts(wide).exchange == pytest.approx(exchange, rel=1e-12)
