"""An exchange of two vectors, on every way that an exchange of one can go."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from torch import nn

from hedgerow.clients import BatchClientApp, TrainHandler, TrainResult, whoami
from hedgerow.sim import InProcessGrid, flower_identity
from hedgerow.strategies import (
    Ask,
    ErrorFeedback,
    Exchange,
    Federation,
    Method,
    Part,
    SecureSum,
    ServerStep,
    TooFewRepliesError,
    WeightedMean,
)
from hedgerow.strategies.aggregate import Choice
from hedgerow.strategies.aggregate.secure_sums import SecureSums
from hedgerow.wire import Blocks, block_of, in_block, parse_compressor

NODES = 4
MODEL = nn.Linear(3, 2)


@dataclass(frozen=True, eq=False)
class Two:
    x: Any
    s: Any


class Both(Method[Two]):
    """Nodes move the model by their number, and the other block by ten times that."""

    state_class = Two

    def __init__(self, *parts: Part, rule: str = "mean", sums: bool = False, **options: Any) -> None:
        federation = Federation(min_available_nodes=NODES, fraction_evaluate=0.0, **options)
        links: Any = {"down_link": "down", "up_link": "up"}
        self.sums = SecureSums(SecureSum(clip=64.0), federation, **links) if sums else None
        rule_of = Choice.of(rule).aggregator(WeightedMean(by_examples=False))
        super().__init__(federation, aggregator=self.sums or rule_of, parts=parts)

    @property
    def blocks(self) -> Blocks:
        layout = self.federation.known_layout()
        return Blocks({"model": layout, "other": layout.part(["weight"])})

    def begin(self, model: Any) -> Two:
        return Two(model, np.zeros(6, model.dtype))

    def round(self, state: Two, run: Any) -> Any:
        sent = self.blocks.joined(model=state.x, other=state.s)
        asked = Ask(run.online, sent)
        train = Exchange("train", [asked], {"round": run.round}, ("down", "up"), blocks=self.blocks)
        mean = (yield from self.means(train, run)).get(0)
        if mean is None:
            return state
        new = self.blocks.split(mean.model().astype(state.x.dtype))
        return Two(new["model"], new["other"])

    def model(self, state: Two) -> Any:
        return state.x


class Nodes:
    """Node i moves the model by i + 1, and the other block by 10 (i + 1); the first, a block by ``wild``."""

    def __init__(self, wild: Mapping[str, float] | None = None, at_once: bool = True) -> None:
        self.wild, self.at_once = wild or {}, at_once

    def app(self) -> BatchClientApp:
        learning = TrainHandler(self.learn, at_once=self.at_once)
        return BatchClientApp({"train": learning, "query.whoami": whoami(lambda context: 5)})

    def learn(self, calls: Any) -> list[TrainResult]:
        return [self.one(call) for call in calls]

    def one(self, call: Any) -> TrainResult:
        sent = call.content["arrays"].to_torch_state_dict()
        step = float(call.partition_id + 1)
        steps = {"model": step, "other": 10 * step, **(self.wild if call.partition_id == 0 else {})}
        moved = {
            key: value + steps["other" if key.startswith("other/") else "model"]
            for key, value in sent.items()
        }
        assert set(block_of("other", sent)) == {"weight"}
        return TrainResult(moved, {"num-examples": 5, "train-loss": 0.0}, sent)


def played(strategy: Both, nodes: Nodes | None = None, rounds: int = 2, **engine: Any) -> tuple[Any, Any]:
    """Return model and other block, minus those of the start."""
    with InProcessGrid((nodes or Nodes()).app(), NODES, **engine) as grid, flower_identity(1):
        start = ArrayRecord({key: torch.zeros_like(value) for key, value in MODEL.state_dict().items()})
        strategy.start(grid, start, num_rounds=rounds, train_config=ConfigRecord({}))
    state = strategy.state
    assert state is not None
    return state.x, state.s


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "columns": ({}, {}),
    "messages": ({"nodes": Nodes(at_once=False)}, {}),
    "serialised": ({"strict": True}, {}),
    "median": ({}, {"rule": "median"}),
    "clipped": ({}, {"rule": "trimmed-mean(0.25)"}),
    "summed": ({}, {"sums": True}),
}


@pytest.mark.parametrize("way", WAYS)
def test_both_blocks_have_their_own_mean_on_every_way(way: str) -> None:
    engine, options = WAYS[way]
    x, s = played(Both(**options), **engine)
    np.testing.assert_allclose(x, np.full(8, 5.0), atol=1e-6)
    np.testing.assert_allclose(s, np.full(6, 50.0), atol=1e-6)


def test_columns_and_messages_book_and_give_the_same() -> None:
    ways = [Both(), Both()]
    found = [played(one, Nodes(at_once=at_once)) for one, at_once in zip(ways, (True, False), strict=True)]
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
    one, other = (way.federation.ledger for way in ways)
    assert one.state_dict() == other.state_dict()
    # Of (8 + 6) numbers, to and from four nodes, twice.
    assert sum(one.total(link).nominal_bits for link in ("down", "up")) == 32 * 14 * NODES * 2 * 2


def test_error_feedback_keeps_what_it_cuts_off_of_both() -> None:
    rounds, kept = 8, Both(ErrorFeedback(parse_compressor("topk(0.5)"), True))
    cut = Both(ErrorFeedback(parse_compressor("topk(0.5)"), False))
    (x, s), (least, _) = played(kept, rounds=rounds), played(cut, rounds=rounds)
    # Of the other block alone there are six of the seven entries that are sent.
    assert np.count_nonzero(least) == 1
    assert np.count_nonzero(x) == 8
    assert (s > rounds * 25 * 0.5).all()


@pytest.mark.parametrize("block", ["model", "other"])
@pytest.mark.parametrize("at_once", [True, False])
def test_each_block_has_a_bound_of_its_own(at_once: bool, block: str) -> None:
    # The first bound of a block of d zeros is 41 sqrt(d), which 45 in each entry exceeds; of both, it is less
    # than 41 sqrt(14).
    strategy = Both(max_update_norm_ratio=41.0)
    x, s = played(strategy, Nodes(wild={block: 45.0}, at_once=at_once), rounds=1)
    assert strategy.report.rejected == {"update too large": 1}
    np.testing.assert_allclose(x, np.full(8, 3.0))
    np.testing.assert_allclose(s, np.full(6, 30.0))


class Half(ServerStep):
    def step(self, change: Any, memory: Any) -> tuple[Any, Any]:
        assert change.shape == (8,)
        return 0.5 * change, memory


def test_a_server_step_moves_the_model_alone() -> None:
    x, s = played(Both(server_step=Half()))
    np.testing.assert_allclose(x, np.full(8, 2.5))
    np.testing.assert_allclose(s, np.full(6, 50.0))


@pytest.mark.parametrize(
    "layouts", [{}, {"other": 0}, {"model": 0}, {"model": 0, "a/b": 0}, {"other": 0, "model": 0}]
)
def test_blocks_have_the_model_first_and_plain_names(layouts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="layouts must have 'model' first"):
        Blocks(layouts)


def test_keys_of_a_block_are_its_own_again() -> None:
    entries = {"weight": 1, "bias": 2}
    assert in_block("model", entries) == entries
    assert block_of("c", {**entries, **in_block("c", entries), **in_block("cc", {"x": 3})}) == entries


def test_a_node_without_the_block_is_refused() -> None:
    class Plain(Nodes):
        def one(self, call: Any) -> TrainResult:
            full = super().one(call)
            return full.without([key for key in full.state if key.startswith("other/")])

    with pytest.raises(TooFewRepliesError, match="4 x missing key"):
        played(Both(max_repeats=0), Plain(at_once=False))
