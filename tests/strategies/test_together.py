"""Exchanges that are made at once: who is sent what first, and who is handed which replies."""

from typing import Any

import numpy as np
import pytest
from tests.oracles.test_hsgd_oracle import START
from tests.strategies.hsgd.nodes import run
from tests.strategies.hsgd.test_strategy import hsgd, toy

from hedgerow.strategies import (
    Ask,
    Exchange,
    Question,
    RoundContext,
    Steps,
    Together,
    WeightedMean,
    means_of,
    together,
)
from hedgerow.strategies.parts import Parts


def exchange(kind: str) -> Exchange:
    return Exchange(kind, [Ask([0], None)])


def steps(log: list[Any], name: str, times: int, ask_first: bool = False) -> Steps[str]:
    if ask_first:
        log.append((name, (yield Question(name, "", {}, lambda node, content: None))))
    for number in range(times):
        log.append((name, (yield exchange(f"{name}{number}"))))
    return name


def test_each_is_handed_its_own_replies_and_questions_are_asked_alone() -> None:
    log: list[Any] = []
    made = together(steps(log, "a", 1), steps(log, "b", 2, ask_first=True))
    assert isinstance(next(made), Question)
    first = made.send("answers")
    assert isinstance(first, Together)
    assert [one.kind for one in first.exchanges] == ["a0", "b0"]
    second = made.send(("to a", "to b"))
    assert [one.kind for one in second.exchanges] == ["b1"]  # type: ignore[union-attr]
    with pytest.raises(StopIteration) as end:
        made.send(("more",))
    assert end.value.value == ("a", "b")
    assert log == [("b", "answers"), ("a", "to a"), ("b", "to b"), ("b", "more")]


def test_what_is_asked_together_goes_out_pool_by_pool_before_any_reply_is_read() -> None:
    parties = toy()
    _, _, grid = run(hsgd(parties), parties, START, 1)
    sent = [partition for kind, partition, _ in grid.sent if kind == "train.exchange"]
    assert sent == [0, 2, 3, 4, 1, 5]  # A hospital and its devices, then the other's.


def test_an_aggregator_takes_rows_that_are_there() -> None:
    rows = {3: np.array([1.0, 2.0]), 5: np.array([3.0, 6.0])}
    empty = RoundContext(hsgd(toy()).federation, 1, {}, [], Parts())
    taken = means_of(WeightedMean(by_examples=False), {7: (np.zeros(2), rows)}, empty)
    with pytest.raises(StopIteration) as end:
        next(taken)
    assert end.value.value[7].model().tolist() == [2.0, 4.0]
