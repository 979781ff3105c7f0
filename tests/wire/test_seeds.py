"""Streams depend on (seed, round, partition, purpose) alone, and stay what they are for ever."""

import random
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hedgerow.tasks import models, partitions, regression
from hedgerow.wire import Purpose, generator, torch_generator
from hedgerow.wire.seeds import generators

KEYS = st.tuples(
    st.integers(0, 2**31), st.integers(0, 10_000), st.integers(0, 10_000), st.sampled_from(Purpose)
)


def numpy_draw(seed: int, round: int, partition_id: int, purpose: Purpose) -> list[int]:
    stream = generator(seed, round=round, partition_id=partition_id, purpose=purpose)
    return [int(n) for n in stream.bit_generator.random_raw(3)]


def torch_draw(seed: int, round: int, partition_id: int, purpose: Purpose) -> list[int]:
    stream = torch_generator(seed, round=round, partition_id=partition_id, purpose=purpose)
    return [int(n) for n in torch.randint(2**62, (3,), generator=stream)]


@settings(deadline=None, max_examples=50)
@given(
    seed=st.one_of(st.integers(0, 2**31), st.integers(2**31, 2**70)),
    pairs=st.lists(st.tuples(st.integers(0, 2**33), st.integers(0, 2**32 - 1)), max_size=9),
    purpose=st.sampled_from(Purpose),
)
def test_streams_made_at_once_are_those_made_one_by_one(
    seed: int, pairs: list[tuple[int, int]], purpose: Purpose
) -> None:
    rounds, nodes = [k for k, _ in pairs], [i for _, i in pairs]
    at_once = [
        stream.bit_generator.random_raw(3).tolist() for stream in generators(seed, rounds, nodes, purpose)
    ]
    assert at_once == [numpy_draw(seed, k, i, purpose) for k, i in pairs]


def test_streams_made_at_once_want_numbers_that_are_not_negative() -> None:
    with pytest.raises(ValueError, match="rounds must be an integer >= 0, got -1"):
        generators(0, [1, 2, -1, 3], [0, 1, 2, 3], Purpose.BATCH)


both = pytest.mark.parametrize("draw", [numpy_draw, torch_draw])
Draw = Callable[..., list[int]]


@both
@settings(deadline=None, max_examples=50)
@given(a=KEYS, b=KEYS)
def test_the_same_key_gives_the_same_stream_and_another_another(
    draw: Draw, a: tuple[Any, ...], b: tuple[Any, ...]
) -> None:
    assert draw(*a) == draw(*a)
    assert (draw(*a) == draw(*b)) == (a == b)


@both
def test_every_part_of_the_key_counts_and_its_place_too(draw: Draw) -> None:
    keys = [
        (1, 0, 0, Purpose.MODEL),
        (2, 0, 0, Purpose.MODEL),
        (1, 2, 0, Purpose.MODEL),
        (1, 0, 2, Purpose.MODEL),
        (1, 0, 0, Purpose.PARTITION),
        (0, 1, 0, Purpose.MODEL),
        (0, 0, 1, Purpose.MODEL),
    ]
    draws = [tuple(draw(*key)) for key in keys]
    assert all(a != b for a, b in combinations(draws, 2))


def test_the_streams_are_the_ones_of_published_results() -> None:
    of_a_model = [5502067147563351689, 12515878954227384525, 3820720400789793009]
    assert numpy_draw(0, 0, 0, Purpose.MODEL) == of_a_model
    # Rounds and partitions are zero where they do not matter.
    assert generator(0, purpose=Purpose.MODEL).bit_generator.random_raw(3).tolist() == of_a_model
    of_a_batch = [1475312428842228831, 1426149468256992307, 13632534253182844288]
    assert numpy_draw(7, 3, 5, Purpose.BATCH) == of_a_batch
    assert torch_generator(0, purpose=Purpose.MODEL).initial_seed() == 8407437806151696170
    seven = torch_generator(7, round=3, partition_id=5, purpose=Purpose.BATCH)
    assert seven.initial_seed() == 5206793289234588837
    assert seven.device == torch.device("cpu")


def test_the_purposes_numbers_are_the_ones_of_published_results() -> None:
    names = (
        "MODEL PARTITION BATCH PARTICIPATION SCHEDULE FAULT TOPOLOGY EVALUATION PROBE COMPRESSION SENSING "
        "SUBSET NOISE DATA HOLDOUT STRAGGLER MOBILITY AUGMENTATION TRAINING ROUNDING BUFFER "
        "TEST_SHARES"
    )
    assert {purpose.name: int(purpose) for purpose in Purpose} == {
        name: number for number, name in enumerate(names.split(), 1)
    }


def test_the_rooms_that_may_not_import_the_wire_use_its_numbers() -> None:
    assert models._PURPOSE == Purpose.MODEL
    assert partitions._PURPOSE == Purpose.PARTITION
    assert partitions._PURPOSE_OF_OTHERS == Purpose.TEST_SHARES
    assert regression._PURPOSE == Purpose.DATA


@both
def test_no_global_generator_is_read_or_moved(draw: Draw) -> None:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)

    def states() -> tuple[Any, ...]:
        numpy_state: Any = np.random.get_state()  # noqa: NPY002
        return random.getstate(), numpy_state[1].tolist(), numpy_state[2], torch.get_rng_state().tolist()

    before = states()
    first = draw(1, 2, 3, Purpose.BATCH)
    assert states() == before
    torch.manual_seed(2)
    np.random.seed(2)  # noqa: NPY002
    assert draw(1, 2, 3, Purpose.BATCH) == first
