"""An update that is refused and one that its node did not make: the same model to the last bit, or not.

Steps of many nodes are one stack on one machine (``training-mode = "auto"``). A node that raises before its
steps is not in the stack of that message, one whose answer is refused was: kernels that a library picks by
the size of a stack may then round the others' steps otherwise. That was seen (C-HSGD and HSGD, images, layout
``devices``: 3e-8, the loss the same to every digit shown), and is what ``loop`` is for (docs/bits.md).
"""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from tests.strategies.hsgd.real_nodes import GROUPS, Server, World, run, strategy

from hedgerow.clients.hsgd import node
from hedgerow.strategies import RoundEnd, UploadNoise

KIND = "train.update"
ROUNDS, P, Q = 4, 2, 1
PEOPLE = 4


class Failing(Server):
    """Refuses what a partition makes of its updates, or keeps it from making any: ``of`` those of a round."""

    def __init__(
        self,
        world: World,
        who: int,
        change: Callable[[RecordDict], Any] | None,
        mode: str,
        of: Collection[int],
        a_round: int,
    ) -> None:
        super().__init__(
            world, self._asked, pull=self._told if change else None, run_config={"training-mode": mode}
        )
        self.who, self.change, self.of, self.asked, self.a_round = who, change, of, 0, a_round

    def _hit(self, kind: str, partition: int, *, asked: bool) -> bool:
        if (kind, partition) != (KIND, self.who):
            return False
        self.asked += asked
        return (self.asked - 1) % self.a_round in self.of

    def _asked(self, kind: str, partition: int, content: RecordDict) -> RecordDict | None:
        if self._hit(kind, partition, asked=True) and self.change is None:
            return RecordDict({"config": ConfigRecord({"t": -1})})
        return None

    def _told(self, kind: str, partition: int, reply: Message) -> None:
        if self._hit(kind, partition, asked=False):
            assert self.change is not None
            self.change(reply.content)


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
    layout: str,
    who: int,
    change: Callable[[RecordDict], Any] | None,
    mode: str = "loop",
    of: Collection[int] = range(P // Q),
    P: int = P,
    **options: Any,
) -> tuple[np.ndarray, list[RoundEnd]]:
    world = World(layout, people=PEOPLE)
    hsgd = strategy(world, P, Q, **{"method": "c-hsgd", "quarantine_after": 0, **options})
    model, ends, _ = run(hsgd, world, ROUNDS, Failing(world, who, change, mode, of, P // Q))
    return model, ends


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
    raised, ends = ended(layout, who, None)
    assert sum(sum(end.rejected.values()) for end in ends) == ROUNDS * (P // Q)
    for change in changes:
        refused, ends = ended(layout, who, change)
        assert sum(sum(end.rejected.values()) for end in ends) == ROUNDS * (P // Q)
        assert refused.tobytes() == raised.tobytes()


@pytest.mark.parametrize(
    ("layout", "who", "options"),
    [
        ("devices", 0, {}),
        ("edges", 2, {}),
        pytest.param("devices", 0, {"method": "jfl"}, marks=pytest.mark.slow),
        pytest.param("edges", 2, {"method": "jfl"}, marks=pytest.mark.slow),
        pytest.param("edges", 0, {"method": "jfl"}, marks=pytest.mark.slow),
        pytest.param(
            "edges",
            0,
            {"method": "hsgd", "upload_noise": UploadNoise(1.0, 0.1, source="seed")},
            marks=pytest.mark.slow,
        ),
        pytest.param("devices", 0, {"sealed": True}, marks=pytest.mark.slow),
        pytest.param("edges", 2, {"sealed": True}, marks=pytest.mark.slow),
    ],
)
def test_a_group_that_missed_an_interval_goes_on_from_the_same_bits_whoever_made_steps_in_it(
    layout: str, who: int, options: dict[str, Any]
) -> None:
    """The second of three in each round: of who is refused, the steps are made and taken back."""
    whole, _ = ended(layout, who, None, of=(), P=3, **options)
    raised, _ = ended(layout, who, None, of=(1,), P=3, **options)
    refused, ends = ended(layout, who, not_finite, of=(1,), P=3, **options)
    assert [(end.train["lost-groups"], end.train["missed-intervals"]) for end in ends] == [(0, 1)] * ROUNDS
    assert refused.tobytes() == raised.tobytes() != whole.tobytes()


def test_in_a_stack_it_is_who_stands_beside_a_node_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    steps = node.device_steps

    def counted(model: Any, loss: Any, stack: Any, *rest: Any) -> Any:
        sizes.append(len(stack.device))
        return steps(model, loss, stack, *rest)

    monkeypatch.setattr(node, "device_steps", counted)
    refused, _ = ended("devices", 5, other_weight, "auto")
    assert set(sizes) == {GROUPS * PEOPLE}
    sizes.clear()
    raised, _ = ended("devices", 5, None, "auto")
    assert set(sizes) == {GROUPS * PEOPLE - 1}
    assert np.abs(refused - raised).max() < 1e-6
