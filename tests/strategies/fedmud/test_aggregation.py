"""Robust rules of the family: taken of the updates that replies stand for, and given back as factors."""

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, RecordDict
from tests.strategies.fedmud.cases import fedmud
from tests.strategies.linear_federation import LAYERS, MODEL, NUM_PARAMETERS, LinearFederation, run

from hedgerow.strategies import FedHM
from hedgerow.strategies.fedmud.projection import nearest_factors
from hedgerow.strategies.vectors import joined, split
from hedgerow.wire import Factorisation

LINEAR = ("mud+f", "mud+aad", "mud+bkd+f", "mud+bkd+aad")


def fedhm(**parameters: Any) -> FedHM:
    defaults = {"ratio": 0.3, "budget": "layer", "learning_rate": 0.1, "min_available_nodes": 5}
    return FedHM(**{**MODEL, **defaults, **parameters})


@pytest.mark.parametrize("layout", ["flat", "tiled"])
@pytest.mark.parametrize("variant", LINEAR)
def test_the_nearest_factors_are_an_orthogonal_projection_onto_what_factors_give(
    variant: str, layout: str
) -> None:
    plan = Factorisation.plan(
        LAYERS, variant=variant, num_parameters=NUM_PARAMETERS, ratio=0.4, budget="layer", layout=layout
    )
    frozen = {key: value.double() for key, value in plan.frozen(3, 1).items()}
    rng = np.random.default_rng(5)

    def update(factors: Any) -> Any:
        parts = {key: value.double() for key, value in split(factors, plan.shapes).items()}
        return joined(plan.deltas(parts, frozen), [layer.key for layer in plan.layers])

    given = [update(rng.standard_normal(plan.count)) for _ in range(4)]
    scale = max(np.linalg.norm(one) for one in given)
    mean = np.mean(given, axis=0)
    assert np.linalg.norm(update(nearest_factors(plan, frozen, mean)) - mean) < 1e-5 * scale

    other = rng.standard_normal(plan.dense_count)
    nearest = update(nearest_factors(plan, frozen, other))
    for one in given:
        assert abs((other - nearest) @ one) < 1e-4 * scale * np.linalg.norm(other)
        assert np.linalg.norm(nearest - one) <= np.linalg.norm(other - one) * (1 + 1e-6)


@pytest.mark.parametrize(("make", "more"), [(fedmud, {}), (fedmud, {"reset_interval": 2}), (fedhm, {})])
def test_a_rule_that_leaves_all_as_it_is_comes_to_what_the_mean_of_factors_comes_to(
    make: Any, more: dict[str, Any]
) -> None:
    # Under a rule each node counts as one.
    plain, _ = run(make(weighting="uniform", **more), LinearFederation(), 4)
    ruled, _ = run(make(aggregation="clipped(1e9)", **more), LinearFederation(), 4)
    for key, values in plain.items():
        assert ruled[key] == pytest.approx(values, rel=1e-3, abs=1e-4), key


def test_merges_are_as_small_under_a_rule_as_under_the_mean() -> None:
    plain, ruled = fedmud(num_clients_per_round=3), fedmud(num_clients_per_round=3, aggregation="median")
    for strategy in (plain, ruled):
        run(strategy, LinearFederation(), 4)
    assert plain.traffic() == ruled.traffic()


def lying(client: int, server_round: int, reply: RecordDict) -> RecordDict:
    """Send what goes far the other way, of two of eleven nodes."""
    if client not in (1, 4):
        return reply
    arrays = {
        key: Array(np.multiply(array.numpy(), -30, out=array.numpy().copy(), casting="unsafe"))
        for key, array in reply["arrays"].items()  # type: ignore[union-attr]
    }
    return RecordDict({**reply, "arrays": ArrayRecord(arrays)})


@pytest.mark.parametrize(
    ("make", "rule"), [(fedmud, "median"), (fedmud, "multi-krum(2,5)"), (fedhm, "trimmed-mean(0.2)")]
)
def test_liars_move_a_rule_less_than_the_mean(make: Any, rule: str) -> None:
    def off(aggregation: str) -> float:
        options = {"min_available_nodes": 11, "aggregation": aggregation}
        # The mean is to be ruined, and the run not ended for that.
        options |= {"max_update_norm_ratio": 0, "max_loss_ratio": 0}
        options |= {"learning_rate": 0.01, "local_epochs": 1}
        honest, _ = run(make(**options), LinearFederation(11), 2)
        lied, _ = run(make(**options), LinearFederation(11, sabotage=lying), 2)
        return float(sum(np.linalg.norm(lied[key] - honest[key]) for key in honest if "norm" not in key))

    assert off(rule) < 0.2 * off("mean")


def test_factors_whose_product_overflows_are_one_lost_reply_without_bounds_too() -> None:
    def huge(client: int, server_round: int, reply: RecordDict) -> RecordDict:
        if client != 1:
            return reply
        arrays = {
            key: Array(np.full_like(array.numpy(), 3e38)) if ":" in key else array
            for key, array in reply["arrays"].items()  # type: ignore[union-attr]
        }
        return RecordDict({**reply, "arrays": ArrayRecord(arrays)})

    strategy = fedmud(init_a=5.0, learning_rate=0.001, aggregation="krum(0)", max_update_norm_ratio=0)
    final, ends = run(strategy, LinearFederation(sabotage=huge), 2)
    assert [end.rejected for end in ends[1:]] == [{"non-finite": 1}] * 2
    assert all(np.isfinite(values).all() for values in final.values())


def test_of_a_round_of_too_few_replies_for_the_rule_the_median_is_taken() -> None:
    def silent(client: int, server_round: int, reply: RecordDict) -> RecordDict:
        return RecordDict({"metrics": reply["metrics"]}) if client < 2 else reply

    final, ends = run(fedmud(aggregation="krum(1)"), LinearFederation(sabotage=silent), 2)
    assert ends[-1].accepted == 3
    assert [end.train["rule-fell-back"] for end in ends[1:]] == [1, 1]
    median, _ = run(fedmud(aggregation="median"), LinearFederation(sabotage=silent), 2)
    assert all((final[key] == values).all() for key, values in median.items())
