"""An update that is refused and one that its node did not make: the same model to the last bit, or not.

Steps of many nodes are one stack on one machine (``training-mode = "auto"``). A node that raises before its
steps is not in the stack of that message, one whose answer is refused was: kernels that a library picks by
the size of a stack may then round the others' steps otherwise. That was seen (C-HSGD and HSGD, images, layout
``devices``: 3e-8, the loss the same to every digit shown), and is what ``loop`` is for (docs/bits.md).
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from tests.strategies.hsgd.real_nodes import GROUPS, Server, World, run, strategy

from hedgerow.clients.hsgd import work

KIND = "train.update"
ROUNDS, P, Q = 4, 2, 1
PEOPLE = 4


class Failing(Server):
    """Refuses all that a partition makes of its updates, or keeps it from making any."""

    def __init__(self, world: World, who: int, change: Callable[[RecordDict], Any] | None, mode: str) -> None:
        super().__init__(world, run_config={"training-mode": mode})
        self.who, self.change = who, change

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        for message in messages if self.change is None else ():
            if (message.metadata.message_type, self.partitions[message.metadata.dst_node_id]) == (
                KIND,
                self.who,
            ):
                message.content = RecordDict({"config": ConfigRecord({"t": -1})})
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        pulled = super().pull_messages(message_ids)
        for message in pulled if self.change is not None else ():
            if (message.metadata.message_type, self.partitions[message.metadata.src_node_id]) == (
                KIND,
                self.who,
            ):
                assert self.change is not None
                self.change(message.content)
        return pulled


def no_metrics(told: RecordDict) -> None:
    del told["metrics"]


def other_weight(told: RecordDict) -> None:
    told["metrics"] = MetricRecord({"num-examples": 77, "loss": 0.5})


def more_records(told: RecordDict) -> None:
    told["labels"] = ConfigRecord({"y": [1]})


def not_finite(told: RecordDict) -> None:
    told["arrays"] = ArrayRecord({"device": Array(np.full(3, np.nan, np.float32))})


CHANGES = [other_weight, not_finite]
MORE = [no_metrics, more_records]


def ended(
    layout: str, who: int, change: Callable[[RecordDict], Any] | None, mode: str = "loop"
) -> tuple[np.ndarray, list[dict[str, int]]]:
    world = World(layout, people=PEOPLE)
    hsgd = strategy(world, P, Q, method="c-hsgd", quarantine_after=0)
    model, ends, _ = run(hsgd, world, ROUNDS, Failing(world, who, change, mode))
    return model, [dict(end.rejected) for end in ends]


@pytest.mark.parametrize(
    ("layout", "who", "changes"),
    [
        ("devices", 5, CHANGES),
        ("edges", 0, CHANGES[:1]),
        pytest.param("devices", 5, MORE, marks=pytest.mark.slow),
        pytest.param("devices", 0, CHANGES + MORE, marks=pytest.mark.slow),
        pytest.param("edges", 0, CHANGES[1:] + MORE, marks=pytest.mark.slow),
        pytest.param("edges", 2, CHANGES + MORE, marks=pytest.mark.slow),
    ],
)
def test_eight_refused_updates_are_to_the_bit_as_eight_that_were_not_made(
    layout: str, who: int, changes: list[Callable[[RecordDict], Any]]
) -> None:
    """Eight of a device; of a hospital or an edge four, whose group is out for the rest of each round."""
    raised, reasons = ended(layout, who, None)
    count = ROUNDS * (P // Q if who == 5 else 1)
    assert sum(sum(one.values()) for one in reasons) == count
    for change in changes:
        refused, reasons = ended(layout, who, change)
        assert sum(sum(one.values()) for one in reasons) == count
        assert refused.tobytes() == raised.tobytes()


def test_in_a_stack_it_is_who_stands_beside_a_node_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    steps = work.device_steps

    def counted(model: Any, loss: Any, stack: Any, *rest: Any) -> Any:
        sizes.append(len(stack.device))
        return steps(model, loss, stack, *rest)

    monkeypatch.setattr(work, "device_steps", counted)
    refused, _ = ended("devices", 5, other_weight, "auto")
    assert set(sizes) == {GROUPS * PEOPLE}
    sizes.clear()
    raised, _ = ended("devices", 5, None, "auto")
    assert set(sizes) == {GROUPS * PEOPLE - 1}
    assert np.abs(refused - raised).max() < 1e-6
