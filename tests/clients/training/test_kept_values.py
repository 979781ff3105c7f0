"""What a model keeps outside of its state dict reaches no other node, and is as before after every call."""

import functools
import logging
import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hedgerow.clients import LocalWork, frozen_part, local_sgd
from hedgerow.kept_values import KeptValues
from hedgerow.tasks import evaluate


class Keeping(nn.Module):
    """Adds to its hidden layer what one place has counted."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.number, self.tensor, self.array = 0.0, torch.zeros(1), np.zeros(1)
        self.items: Any = [0.0]
        self.table, self.queue, self.numbers = {"n": torch.zeros(1)}, deque([0.0], maxlen=2), set[int]()
        self.nested = ({"deep": SimpleNamespace(count=0.0, tensors=[torch.zeros(1)])},)
        self.outside = [nn.BatchNorm1d(4)]
        self.count = self._closure()
        self.part = functools.partial(self._of, [0.0])
        self.generator, self.generators = torch.Generator(), [SimpleNamespace(own=random.Random(1))]
        if place.startswith("buffer"):
            self.register_buffer("hidden", torch.zeros(1), persistent=False)

    @staticmethod
    def _closure() -> Callable[[], float]:
        count = 0.0

        def counted() -> float:
            nonlocal count
            count += 1
            return count

        return counted

    @staticmethod
    def _of(counts: list[float]) -> float:
        counts[0] += 1
        return counts[0]

    def _changed(self, z: Tensor) -> Any:  # noqa: PLR0911, PLR0912
        match self.place:
            case "number":
                self.number += 1
                return self.number
            case "tensor":
                self.tensor = self.tensor + 1
                return self.tensor
            case "tensor in place":
                return self.tensor.add_(1)
            case "array":
                self.array += 1
                return float(self.array[0])
            case "list":
                self.items.append(1.0)
                return sum(self.items)
            case "dictionary":
                self.table["n"] = self.table["n"] + 1
                return self.table["n"]
            case "queue":
                self.queue.append(self.queue[-1] + 1)
                return self.queue[-1]
            case "set":
                self.numbers.add(len(self.numbers))
                return len(self.numbers)
            case "object":
                self.nested[0]["deep"].count += 1
                return self.nested[0]["deep"].count
            case "tensor of an object":
                return self.nested[0]["deep"].tensors[0].add_(1)
            case "new attribute":
                self.late = getattr(self, "late", 0.0) + 1
                return self.late
            case "module outside":
                return self.outside[0](z).detach().mean() + self.outside[0].running_var.sum()
            case "variable of a function":
                return self.count()
            case "variable of a function, later":
                return max(0.0, self.count() - 1)
            case "partial":
                return self.part()
            case "another module's attribute":
                self.first.out_features += 1
                return self.first.out_features
            case "generator":
                return torch.rand(1, generator=self.generator)
            case "generator of an object":
                return self.generators[0].own.random()
            case "buffer in place":
                return self.hidden.add_(1)
        self.hidden = self.hidden + 1
        return self.hidden

    def forward(self, x: Tensor) -> Tensor:
        z = torch.relu(self.first(x))
        return self.last(z + 0.1 * self._changed(z))


PLACES = (
    "number", "tensor", "tensor in place", "array", "list", "dictionary", "queue", "set", "object",
    "tensor of an object", "new attribute", "module outside", "variable of a function", "partial",
    "variable of a function, later",
    "another module's attribute", "generator", "generator of an object", "buffer in place", "buffer",
)  # fmt: skip


def _made(place: str) -> Keeping:
    torch.manual_seed(0)
    return Keeping(place)


def _works(model: nn.Module) -> list[LocalWork]:
    rng = np.random.default_rng(0)
    x, y = torch.tensor(rng.normal(size=(24, 3)), dtype=torch.float32), torch.tensor(rng.integers(0, 2, 24))
    start = {key: value.clone() for key, value in model.state_dict().items()}
    parts = [[rng.integers(0, 24, 4) for _ in range(steps)] for steps in (3, 2, 3)]
    return [LocalWork(start, x, y, batches, 0.1) for batches in parts]


def _learnt(model: nn.Module, works: list[LocalWork], mode: Any) -> list[bytes]:
    trained = local_sgd(model, works, mode=mode)
    return [b"".join(value.numpy().tobytes() for value in one.state.values()) for one in trained]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("mode", ["loop", "auto"])
@pytest.mark.parametrize("place", PLACES)
def test_a_node_learns_the_same_in_any_company_and_again(place: str, mode: str) -> None:
    model = _made(place)
    works = _works(model)
    alone = [_learnt(_made(place), [work], mode)[0] for work in works]
    assert _learnt(model, works, mode) == alone
    assert _learnt(model, works[::-1], mode) == alone[::-1]
    assert [_learnt(model, [work], mode)[0] for work in works] == alone


@pytest.mark.parametrize("place", PLACES)
def test_an_evaluation_has_the_same_result_again_and_leaves_no_trace(place: str) -> None:
    model = _made(place)
    work = _works(model)[0]
    first = evaluate(model, work.x, work.y, batch_size=5)
    assert evaluate(model, work.x, work.y, batch_size=5).loss == first.loss
    values = KeptValues(model)
    evaluate(model, work.x, work.y, batch_size=5)
    assert not values.moved
    model.eval()(work.x)
    assert values.moved


def test_what_its_owner_sets_between_two_calls_stays() -> None:
    model = _made("number")
    works = _works(model)
    first = _learnt(model, works, "loop")
    model.number = 7.0
    assert _learnt(model, works, "loop") != first
    assert model.number == 7.0


_FOREIGN = np.random.default_rng(0)


class Foreign(Keeping):
    """Draws from a variable of this module."""

    def _changed(self, z: Tensor) -> float:
        return _FOREIGN.random()


class Secret(Keeping):
    """Draws from the operating system."""

    def _changed(self, z: Tensor) -> float:
        return float(np.random.default_rng().random())


@pytest.mark.parametrize(
    "model", [*map(_made, PLACES), Foreign(""), Secret("")], ids=lambda m: m.place or type(m).__name__
)
def test_draws_that_no_seed_determines_are_reported(model: Keeping, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("flwr")
    logger.addHandler(caplog.handler)
    before = KeptValues(model)
    frozen_part(model, torch.ones(2, 3))
    logger.removeHandler(caplog.handler)
    assert ("draws from what the run's seed does not determine" in caplog.text) is (
        type(model) is not Keeping
    )
    assert not before.moved


def test_a_generator_without_a_state_is_left_as_it_is() -> None:
    model = nn.Linear(2, 2)
    model.drawing = random.SystemRandom()  # type: ignore[assignment]
    values = KeptValues(model)
    assert values.generators == []
    assert not values.moved
    values.restore()
