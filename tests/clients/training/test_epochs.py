"""Local epochs: every sample once an epoch, in an order of (seed, round, client) alone."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hedgerow.clients.training.epochs import epoch_batches

PART = np.array([3, 1, 4, 15, 92, 65, 35])
KEY = {"seed": 1, "round": 2, "partition_id": 3}


@settings(deadline=None, max_examples=40)
@given(samples=st.integers(1, 40), epochs=st.integers(1, 4), batch_size=st.integers(1, 50))
def test_every_epoch_holds_every_sample_once(samples: int, epochs: int, batch_size: int) -> None:
    part = np.arange(100, 100 + samples)
    batches = epoch_batches(part, **KEY, epochs=epochs, batch_size=batch_size)
    per_epoch = -(-samples // batch_size)
    assert len(batches) == epochs * per_epoch
    for epoch in range(epochs):
        own = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(np.concatenate(own)) == part.tolist()


def test_the_last_batch_of_an_epoch_is_what_is_left() -> None:
    assert [len(b) for b in epoch_batches(PART, **KEY, epochs=2, batch_size=3)] == [3, 3, 1, 3, 3, 1]


def test_epochs_are_shuffled_anew() -> None:
    first, second = epoch_batches(PART, **KEY, epochs=2, batch_size=7)
    assert first.tolist() != second.tolist()


def test_the_order_is_a_function_of_seed_round_and_client() -> None:
    def order(**key: int) -> tuple[int, ...]:
        return tuple(epoch_batches(PART, **{**KEY, **key}, epochs=1, batch_size=7)[0])

    assert order() == order()
    assert len({order(), order(seed=2), order(round=3), order(partition_id=4)}) == 4
