"""Robust rules in place of HSGD's means: what they withstand, and what is refused before a run."""

from functools import cache
from typing import Any

import numpy as np
import pytest
from flwr.app import RecordDict
from tests.oracles.hsgd import Group
from tests.oracles.test_hsgd_oracle import START, ScalarModel, flat
from tests.strategies.hsgd.nodes import Parties, run
from tests.strategies.hsgd.test_failures import Silent
from tests.strategies.hsgd.test_strategy import LAYOUTS, hsgd

from hedgerow.strategies import Exchange, Mean, PairingError, RoundContext, ServerUpdate, Steps, WeightedMean
from hedgerow.wire import to_record, view

RULES = ["median", "trimmed-mean(0.25)", "krum(1)", "multi-krum(1,3)", "geometric-median", "clipped(0.05)"]
M, K = 5, 5


def groups(people: int = K) -> list[Group]:
    """Return five groups that differ a little, as one of people who are alike."""
    rng = np.random.default_rng(3)
    return [
        Group(
            1 / M,
            *(1 + 0.1 * rng.normal(size=(2, people))),
            1 + 0.1 * rng.normal(size=people),
        )
        for _ in range(M)
    ]


class Liar:
    """Adds something to what a partition uploads."""

    def __init__(self, partition: int, by: float) -> None:
        self.partition, self.by = partition, by

    def __call__(self, kind: str, partition: int, t: int, reply: RecordDict) -> RecordDict:
        if (kind, partition) == ("update", self.partition) and "arrays" in reply:
            lies = {key: view(array) + self.by for key, array in reply.array_records["arrays"].items()}
            reply["arrays"] = to_record(lies)
        return reply


def ended(
    sabotage: Any = None, *, edges: bool = True, rounds: int = 2, people: int = K, **options: Any
) -> tuple[np.ndarray, list[Any]]:
    parties = Parties(
        ScalarModel(), groups(people), edges, **({} if sabotage is None else {"sabotage": sabotage})
    )
    # Bounds would refuse what a rule is to withstand.
    model, ends, _ = run(hsgd(parties, max_update_norm_ratio=0.0, **options), parties, START, rounds)
    return model, ends


@cache
def with_mean(edges: bool, liar: int | None = None) -> np.ndarray:
    return ended(None if liar is None else Liar(liar, 5.0), edges=edges)[0]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("edges", "liar"), [(True, 1), (True, M + 1), (False, M + 7)])
def test_one_liar_moves_the_model_little(rule: str, edges: bool, liar: int) -> None:
    """A hospital, an edge, and a device."""
    honest = with_mean(edges)
    with_rule, ends = ended(Liar(liar, 5.0), edges=edges, aggregation=rule)
    moved = np.abs(honest - flat(START)).max()
    assert np.abs(with_mean(edges, liar) - honest).max() > 2 * moved
    assert np.abs(with_rule - honest).max() < (1.0 if rule == "clipped(0.05)" else 0.3) * moved
    assert ends[-1].rejected == {}
    assert "rule-fell-back" not in ends[-1].train


def test_the_rule_of_groups_is_of_all_blocks_together_and_every_group_is_one() -> None:
    """Against the rule computed by hand of the groups' models: krum takes one group's model whole."""
    told: dict[int, dict[str, np.ndarray]] = {}

    def note(kind: str, partition: int, t: int, reply: RecordDict) -> RecordDict:
        if kind == "update":
            told[partition] = {key: np.array(view(a)) for key, a in reply.array_records["arrays"].items()}
        return reply

    model, _ = ended(note, rounds=1, aggregation="krum(1)")
    models = np.stack(
        [np.concatenate([told[m]["head"], told[m]["hospital"], told[M + m]["device"]]) for m in range(M)]
    )
    scores = []
    for one in models:
        near = np.sort(((models - one) ** 2).sum(axis=1))[1 : M - 1 - 1 + 1]
        scores.append(near[: M - 1 - 2].sum())
    assert model == pytest.approx(models[int(np.argmin(scores))], abs=1e-12)


@pytest.mark.parametrize(
    "rule", [pytest.param(one, marks=[] if "m(1)" in one else pytest.mark.slow) for one in RULES]
)
def test_the_pairs_of_jfl_have_the_rule_of_devices(rule: str) -> None:
    honest, _ = ended(edges=False, method="jfl")
    lied, _ = ended(Liar(M + 7, 5.0), edges=False, method="jfl", device_aggregation=rule)
    with_mean, _ = ended(Liar(M + 7, 5.0), edges=False, method="jfl")
    assert np.abs(lied - honest).max() < 0.5 * np.abs(with_mean - honest).max()


def test_two_rules_can_differ_and_one_alone_is_that_of_both() -> None:
    liar = Liar(M + 7, 5.0)
    both, _ = ended(liar, edges=False, aggregation="median")
    named, _ = ended(liar, edges=False, aggregation="median", device_aggregation="median")
    devices, _ = ended(liar, edges=False, device_aggregation="median")
    assert both.tolist() == named.tolist()
    assert both.tolist() != devices.tolist()


@pytest.mark.parametrize(("edges", "silent", "times"), [(True, 1, 1), (False, M + 7, 1)])
def test_too_few_for_the_rule_have_their_median_and_the_run_goes_on(
    edges: bool, silent: int, times: int
) -> None:
    _, ends = ended(Silent(("update", silent, 1)), edges=edges, aggregation="krum(1)")
    assert [end.train.get("rule-fell-back", 0) for end in ends[1:]] == [0, times]
    assert np.isfinite(ends[-1].train["iterations"])


def test_groups_that_are_kept_apart_have_no_rule_over_groups() -> None:
    plain, _ = ended(aggregate=False)
    ruled, _ = ended(aggregate=False, aggregation="median")
    assert plain.tolist() == ruled.tolist()


def test_batches_too_small_for_their_rule_end_the_run_before_its_first_round() -> None:
    with pytest.raises(PairingError, match=r"device_aggregation is 'krum\(1\)', which needs 5 devices"):
        ended(edges=False, people=3, device_aggregation="krum(1)")
    with pytest.raises(PairingError, match=r"'multi-krum\(1,3\)', which needs 5 devices"):
        ended(edges=False, participation=0.5, method="jfl", device_aggregation="multi-krum(1,3)")


class Halved(WeightedMean):
    """Goes half of the way to the mean of the groups."""

    def means(self, exchange: Exchange, run: RoundContext) -> Steps[dict[int, Mean]]:
        found = yield from super().means(exchange, run)
        starts = {pool: exchange.sent(pool) for pool in found}
        return {
            pool: ServerUpdate(list(mean.nodes), mean.weight, starts[pool], (mean.model() - starts[pool]) / 2)
            for pool, mean in found.items()
        }


@LAYOUTS
def test_an_aggregator_of_ones_own_takes_the_groups(edges: bool) -> None:
    whole, _ = ended(edges=edges, rounds=1)
    half, _ = ended(edges=edges, rounds=1, aggregation=Halved())
    start = flat(START)
    assert half == pytest.approx((start + whole) / 2, abs=1e-12)
    assert not np.array_equal(half, start)


def test_a_checkpoint_has_the_norms_of_the_runs_own_updates() -> None:
    parties = Parties(ScalarModel(), groups(K), True)
    strategy = hsgd(parties)
    run(strategy, parties, START, 2)
    norms = strategy.state_dict()["federation"]["update-norms"]
    assert norms
    assert all(len(rounds) == 2 for rounds in norms.values())
