"""Local epochs: every sample once an epoch, in an order of (seed, round, client) alone."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hedgerow.clients.training.batches import epoch_batches

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


def test_the_order_is_a_function_of_seed_round_and_client_and_another_in_each_epoch() -> None:
    def order(epoch: int = 0, **key: int) -> tuple[int, ...]:
        return tuple(epoch_batches(PART, **{**KEY, **key}, epochs=2, batch_size=7)[epoch])

    assert order() == order()
    assert len({order(), order(1), order(seed=2), order(round=3), order(partition_id=4)}) == 5
