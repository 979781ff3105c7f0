"""What every algorithm leaves to others, and what every method keeps for a checkpoint."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from tests.registry import REGISTRY
from tests.strategies.quadratic import Quadratics, run

from hedgerow.strategies import (
    FedAvg,
    Federation,
    Method,
    Part,
    RoundFailedError,
    SDFeel,
    ServerUpdate,
    TooFewRepliesError,
    WeightedMean,
)

ROOM = Path(__file__).parents[2] / "strategies"
CONCERNS = re.compile(r"secure|mask|robust|seal|nois|privac|bound|ledger|roster|checkpoint", re.IGNORECASE)


@pytest.mark.parametrize("app", [one.app for one in REGISTRY if one.suite])
def test_an_algorithms_file_has_the_paper_and_no_other_concern(app: str) -> None:
    # CEPS and its baselines share the event, which prints Algorithm 1.
    room = {"ceps": "gossip"}.get(app, app.replace("-", "_"))
    lines = (ROOM / room / "algorithm.py").read_text().splitlines()
    assert len(lines) <= 210
    assert not [line for line in lines if CONCERNS.search(line)]


def test_a_methods_state_overwrites_none_of_the_bases() -> None:
    class Named(FedAvg):
        def _state(self) -> dict[str, Any]:
            return {**super()._state(), "sizes": "the method's own"}

        def _restore(self, state: Mapping[str, Any]) -> None:
            super()._restore(state)
            assert state["sizes"] == "the method's own"

    problem = Quadratics(sizes=[3, 2], centres=[1.0, 2.0])
    strategy = Named(min_available_nodes=2, fraction_evaluate=0.0)
    run(strategy, problem, 1)
    again = Named(min_available_nodes=2, fraction_evaluate=0.0)
    again.load_state_dict(strategy.state_dict())
    assert dict(again.federation.limits.claims.sizes) == dict(strategy.federation.limits.claims.sizes)


class Momentum:
    """State that moves in ``means``, before anyone knows whether the round counts."""

    def __init__(self, fails: int = 0) -> None:
        self.fails, self.tries = fails, 0
        self.forget()

    def forget(self) -> None:
        self.moved: Any = {}

    def state_dict(self) -> dict[str, Any]:
        return {str(pool): move for pool, move in self.moved.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.moved = {int(pool): move for pool, move in state.items()}

    def means(self, exchange: Any, run: Any) -> Any:
        means = yield from WeightedMean().means(exchange, run)
        for pool, mean in means.items():
            self.moved[pool] = mean.model() - exchange.sent(pool) + 0.5 * self.moved.get(pool, 0.0)
        self.tries += 1
        if self.tries == self.fails:
            raise RoundFailedError
        return {
            pool: ServerUpdate(list(mean.nodes), mean.weight, exchange.sent(pool), self.moved[pool])
            for pool, mean in means.items()
        }


class MomentumPart(Part, Momentum):  # type: ignore[misc]
    name = "momentum"
    __init__, forget = Momentum.__init__, Momentum.forget  # type: ignore[assignment]
    state_dict, load_state_dict = Momentum.state_dict, Momentum.load_state_dict


def trained(aggregation: Any, rounds: int, state: Any = None) -> Any:
    strategy = FedAvg(min_available_nodes=2, fraction_evaluate=0.0, aggregation=aggregation)
    if state is not None:
        strategy.load_state_dict(state)
    run(strategy, Quadratics(sizes=[3, 2], centres=[1.0, 2.0]), rounds)
    return strategy


def model(strategy: Any) -> list[float]:
    return [float(x) for array in strategy.current_arrays().values() for x in array.numpy().ravel()]


@pytest.mark.parametrize("kind", [Momentum, MomentumPart])
def test_the_state_of_an_aggregator_is_put_back_unless_the_round_counts(kind: Any) -> None:
    whole = model(trained(kind(), 4))
    assert model(trained(kind(fails=2), 4)) == whole
    assert model(trained(kind(), 4, trained(kind(), 2).state_dict())) == whole


class Inner:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Keeps(WeightedMean):
    """Has attributes of many kinds, and changes one of them in each round."""

    def __init__(self, changes: str | None) -> None:
        class Local(Inner):
            pass

        self.changes = changes
        self.number, self.text, self.none, self.pair = 0, "", None, ((1,), 2)
        self.table: dict[str, Any] = {"a": {"b": [1]}}
        self.array, self.tensor, self.module = np.zeros(3), torch.zeros(3), torch.nn.Linear(1, 1)
        self.drawn, self.inner, self.local, self.many = np.random.default_rng(0), Inner(), Local(), [Local()]
        self.lock, self.function = Lock(), lambda: None

    def means(self, exchange: Any, run: Any) -> Any:
        means = yield from super().means(exchange, run)
        match self.changes:
            case "number" | "array" | "tensor":
                setattr(self, self.changes, getattr(self, self.changes) + 1)
            case "text" | "none" | "pair" | "lock" | "function" | "added":
                setattr(self, self.changes, Lock())
            case "table":
                self.table["a"]["b"].append(2)
            case "module":
                torch.nn.init.constant_(self.module.weight, 3.0)
            case "drawn":
                self.drawn.random()
            case "inner" | "local":
                getattr(self, self.changes).count += 1
            case "many":
                self.many[0].count += 1
        return means


KINDS = [key for key in vars(Keeps(None)) if key != "changes"]


@pytest.mark.parametrize("changes", [*KINDS, "added"])
def test_an_aggregator_whose_state_no_checkpoint_has_is_refused_by_the_attribute(changes: str) -> None:
    with pytest.raises(
        ValueError, match=rf"must have state_dict.*Keeps, of which round 1 changed {changes}:"
    ):
        trained(Keeps(changes), 2)


def test_an_aggregator_that_no_round_changes_needs_no_state_dict() -> None:
    assert model(trained(Keeps(None), 2)) == model(trained(WeightedMean(), 2))


def test_a_part_whose_counter_no_checkpoint_has_is_refused() -> None:
    class Counts(Part):
        name = "counts"
        rounds = 0

        def ended(self, run: Any) -> None:
            self.rounds += 1

    options: Any = {"min_available_nodes": 2, "fraction_evaluate": 0.0, "parts": [Counts()]}
    with pytest.raises(
        ValueError, match=r"parts must have state_dict.*Counts, of which round 1 changed rounds:"
    ):
        run(FedAvg(**options), Quadratics(sizes=[3, 2], centres=[1.0, 2.0]), 2)


def test_a_part_named_like_one_that_the_method_adds_is_refused() -> None:
    class Probes(Part):
        name = "probes"

    with pytest.raises(ValueError, match="parts must have different names"):
        SDFeel(num_servers=2, probe_rounds=1, parts=[Probes()])


@dataclass(frozen=True)
class One:
    x: Any
    n: int


class Idle(Method[One]):
    """Its rounds train nobody."""

    state_class = One

    def begin(self, model: Any) -> One:
        return One(model, 0)

    def round(self, state: One, run: Any) -> Any:
        yield from ()
        return One(state.x, state.n + 1)

    def model(self, state: One) -> Any:
        return state.x


def test_a_round_that_trains_nobody_is_an_error_and_moves_nothing() -> None:
    strategy = Idle(Federation(min_available_nodes=2, fraction_evaluate=0.0))
    with pytest.raises(
        TooFewRepliesError, match="round of Idle must yield an Exchange of the category 'train'"
    ):
        run(strategy, Quadratics(sizes=[3, 2], centres=[1.0, 2.0]), 1)
    assert strategy.state is not None
    assert (strategy.state.n, strategy.completed_rounds) == (0, 0)
