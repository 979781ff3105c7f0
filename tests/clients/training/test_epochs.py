"""Local epochs: every sample once an epoch, in an order of (seed, round, client) alone."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hedgerow.clients.training.batches import epoch_batches, fails_on_one
from hedgerow.global_draws import GlobalDraws

PART = np.array([3, 1, 4, 15, 92, 65, 35])
KEY = {"seed": 1, "round": 2, "partition_id": 3}


@settings(deadline=None, max_examples=40)
@given(samples=st.integers(1, 40), epochs=st.integers(1, 4), batch_size=st.integers(1, 50))
def test_every_epoch_holds_every_sample_once_and_what_is_left_last(
    samples: int, epochs: int, batch_size: int
) -> None:
    part = np.arange(100, 100 + samples)
    batches = epoch_batches(part, **KEY, epochs=epochs, batch_size=batch_size)
    per_epoch = -(-samples // batch_size)
    assert len(batches) == epochs * per_epoch
    for epoch in range(epochs):
        *full, last = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(np.concatenate([*full, last])) == part.tolist()
        assert {len(batch) for batch in full} <= {batch_size}


@settings(deadline=None, max_examples=40)
@given(samples=st.integers(1, 40), batch_size=st.integers(1, 50), shortest=st.integers(1, 50))
def test_only_a_last_batch_that_is_too_short_is_left_out(
    samples: int, batch_size: int, shortest: int
) -> None:
    part = np.arange(100, 100 + samples)
    every = epoch_batches(part, **KEY, epochs=1, batch_size=batch_size)
    kept = epoch_batches(part, **KEY, epochs=1, batch_size=batch_size, shortest=min(shortest, batch_size))
    short = len(every) > 1 and len(every[-1]) < min(shortest, batch_size)
    assert [batch.tolist() for batch in kept] == [batch.tolist() for batch in every[: len(every) - short]]


NORM = torch.nn.BatchNorm1d(3)


@pytest.mark.parametrize(
    ("model", "shape", "fails"),
    [
        (torch.nn.Linear(3, 2), (3,), False),
        (torch.nn.Sequential(torch.nn.Linear(3, 3), NORM), (3,), True),
        (torch.nn.Sequential(torch.nn.Sequential(torch.nn.Dropout(), NORM)), (3,), True),
        (torch.nn.InstanceNorm1d(3), (3, 1), True),
        (torch.nn.BatchNorm2d(3), (3, 4, 4), False),  # the pixels of one image have a variance
        (torch.nn.BatchNorm2d(3), (3, 1, 1), True),
        (torch.nn.LayerNorm(3), (3,), False),
    ],
)
def test_which_models_cannot_train_on_one_sample_and_that_trying_changes_nothing(
    model: torch.nn.Module, shape: tuple[int, ...], fails: bool
) -> None:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.eval()
    torch.manual_seed(0)
    drawn = torch.rand(3)
    torch.manual_seed(0)
    assert fails_on_one(model, torch.ones(1, *shape)) is fails
    assert torch.equal(torch.rand(3), drawn)
    assert not model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


class Noise(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + float(np.random.random()) + random.random()  # noqa: NPY002


def test_trying_one_sample_moves_no_global_generator() -> None:
    with GlobalDraws.restored() as before:
        assert not fails_on_one(Noise(), torch.ones(1, 3))
        assert not before.moved


def test_the_order_is_a_function_of_seed_round_and_client_and_another_in_each_epoch() -> None:
    def order(epoch: int = 0, **key: int) -> tuple[int, ...]:
        return tuple(epoch_batches(PART, **{**KEY, **key}, epochs=2, batch_size=7)[epoch])

    assert order() == order()
    assert len({order(), order(1), order(seed=2), order(round=3), order(partition_id=4)}) == 5
