"""Rules that liars cannot ruin: what each is, and how far from the honest mean it stays."""

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, RecordDict
from flwr.serverapp.strategy.fedtrimmedavg import trim_mean
from flwr.serverapp.strategy.multikrum import select_multikrum

from hedgerow.wire import Aggregation, lazy_array, parse_aggregation

N, D, LIARS = 20, 50, 4
HONEST = np.random.default_rng(5).normal(1.0, 0.3, (N, D))
ROBUST = ["median", "trimmed-mean(0.25)", "krum(4)", "multi-krum(4,10)", "geometric-median"]


def attacked(attack: str) -> np.ndarray[Any, Any]:
    updates = HONEST.copy()
    lies = {
        "sign flip": -10 * updates[:LIARS],
        "scaling": 1e6 * updates[:LIARS],
        "largest": np.full((LIARS, D), 3e38),
        "colluding": np.tile(HONEST.mean(axis=0) - 5.0, (LIARS, 1)),
    }
    updates[:LIARS] = lies[attack]
    return updates


def off(rule: Aggregation, updates: Any, weights: Any) -> float:
    """Return how far a rule is from the honest mean, in deviations of an honest update from it."""
    mean = HONEST.mean(axis=0)
    usual = np.median(np.linalg.norm(HONEST - mean, axis=1))
    return float(np.linalg.norm(rule.combined(updates, weights) - mean) / usual)


@pytest.mark.parametrize("attack", ["sign flip", "scaling", "largest", "colluding"])
@pytest.mark.parametrize("rule", ROBUST)
def test_a_fifth_of_liars_leaves_a_rule_within_an_honest_updates_distance(rule: str, attack: str) -> None:
    updates = attacked(attack)
    assert off(parse_aggregation(rule), updates, np.ones(N)) <= 1.2
    assert off(parse_aggregation("mean"), updates, np.ones(N)) > 3.0


@pytest.mark.parametrize("rule", [*ROBUST, "clipped(2)"])
def test_a_lying_weight_moves_no_rule_but_the_mean(rule: str) -> None:
    weights = np.ones(N)
    weights[0] = 2.0**53
    updates = attacked("scaling")
    one, other = (parse_aggregation(rule).combined(updates, w) for w in (np.ones(N), weights))
    assert (one == other).all()


@pytest.mark.parametrize("attack", ["sign flip", "scaling", "largest", "colluding"])
def test_clipping_bounds_what_each_liar_moves(attack: str) -> None:
    tau = float(np.median(np.linalg.norm(HONEST, axis=1)))
    rule = parse_aggregation(f"clipped({tau})")
    clean = rule.combined(HONEST, np.ones(N))
    assert np.linalg.norm(rule.combined(attacked(attack), np.ones(N)) - clean) <= 2 * tau * LIARS / N + 1e-9


@pytest.mark.parametrize("updates", [HONEST, HONEST[:11, :1], np.round(HONEST), HONEST[::-1].T.copy().T])
def test_trimmed_mean_and_krum_are_flowers_to_the_bit(updates: Any) -> None:
    weights = np.arange(1.0, len(updates) + 1)
    for share in (0.0, 0.1, 0.25, 0.49):
        trimmed = parse_aggregation(f"trimmed-mean({share})").combined(updates, weights)
        assert (trimmed == trim_mean(updates, share)).all()
    contents = [RecordDict({"a": ArrayRecord({"v": lazy_array(row)})}) for row in updates]
    for liars, kept in ((0, 1), (3, 1), (4, 5)):
        chosen = [id(one) for one in select_multikrum(contents, liars, kept)]
        rows = np.stack([row for row, one in zip(updates, contents, strict=True) if id(one) in chosen])
        combined = parse_aggregation(f"multi-krum({liars},{kept})").combined(updates, weights)
        assert (combined == parse_aggregation("mean").combined(rows, np.ones(kept))).all()


def test_the_geometric_median_is_where_the_sum_of_distances_is_least() -> None:
    found = parse_aggregation("geometric-median").combined(HONEST, np.ones(N))

    def total(point: Any) -> float:
        return float(np.linalg.norm(HONEST - point, axis=1).sum())

    # The gradient of the sum is zero there.
    away = found - HONEST
    assert np.linalg.norm((away / np.linalg.norm(away, axis=1)[:, None]).sum(axis=0)) < 1e-3
    steps = np.random.default_rng(0).normal(0.0, 0.01, (20, D))
    assert all(total(found) <= total(found + step) for step in steps)


def test_alike_updates_are_what_every_rule_gives() -> None:
    updates = np.tile(HONEST[0], (N, 1))
    for rule in (*ROBUST, "mean", "clipped(1e9)"):
        assert parse_aggregation(rule).combined(updates, np.ones(N)) == pytest.approx(HONEST[0], rel=1e-12)


def test_krum_refuses_fewer_updates_than_its_proof_wants() -> None:
    assert parse_aggregation("krum(4)").least == 11
    assert parse_aggregation("multi-krum(2,9)").least == 11
    with pytest.raises(ValueError, match=r"krum\(4\) must have at least 11 updates, got 10"):
        parse_aggregation("krum(4)").combined(HONEST[:10], np.ones(10))


def test_of_too_few_updates_for_krum_their_median_is_taken_which_a_minority_cannot_ruin() -> None:
    rule = parse_aggregation("multi-krum(4,9)")
    assert rule.for_count(13) is rule
    for count in (12, 5, 1):
        assert str(rule.for_count(count)) == "median"
    left = np.concatenate([np.full((4, D), 1e30), HONEST[:8]])
    held = rule.for_count(len(left)).combined(left, np.ones(len(left)))
    assert ((held >= HONEST[:8].min(axis=0)) & (held <= HONEST[:8].max(axis=0))).all()
    for text in ROBUST:
        if "krum" not in text:
            assert parse_aggregation(text).for_count(1) == parse_aggregation(text)


def test_a_rule_says_itself_as_it_is_written() -> None:
    for text in (*ROBUST, "mean", "clipped(0.5)", "clipped(1.2345678901234567)", "clipped(1e+22)"):
        assert str(parse_aggregation(text)) == text
