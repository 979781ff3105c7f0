"""Every random stream of a run, keyed by its purpose.

A stream depends only on (seed, round, partition id, purpose): it is the same on any engine, in any order of
execution, and whatever happens to other nodes. Global generators are never used.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

from hedgerow.wire.checks import at_least

_WORD = 2**32
# Fewer streams are faster to make one by one.
_FEW = 4


class Purpose(IntEnum):
    """The purpose of a stream. The numbers affect every result: never renumber them."""

    MODEL = 1
    PARTITION = 2
    BATCH = 3
    PARTICIPATION = 4
    SCHEDULE = 5
    FAULT = 6
    TOPOLOGY = 7
    EVALUATION = 8
    PROBE = 9
    COMPRESSION = 10
    SENSING = 11
    SUBSET = 12
    NOISE = 13
    DATA = 14
    HOLDOUT = 15
    STRAGGLER = 16
    MOBILITY = 17
    AUGMENTATION = 18
    TRAINING = 19
    ROUNDING = 20
    BUFFER = 21
    TEST_SHARES = 22


def generator(seed: int, *, round: int = 0, partition_id: int = 0, purpose: Purpose) -> np.random.Generator:
    """Return the stream of one purpose at one node in one round.

    Parameters
    ----------
    seed : int
        The run's seed, >= 0.
    round : int (default: 0)
        The round, or the local iteration if a method draws once per iteration; 0 for set-up.
    partition_id : int (default: 0)
        The node's partition id; 0 for draws of the server.
    purpose : Purpose
        The purpose of the draws. Streams of different purposes are independent.

    Raises
    ------
    ValueError
        If a number is negative.
    """
    return np.random.default_rng(_seed_sequence(seed, round, partition_id, purpose))


def generators(
    seed: int, rounds: Sequence[int], partition_ids: Sequence[int], purpose: Purpose
) -> list[np.random.Generator]:
    """Return the streams of many (round, partition id), each equal to that of ``generator``.

    NumPy's ``SeedSequence`` is computed for all of them at once, because seeding one takes as long as drawing
    a mini-batch.
    """
    if len(rounds) < _FEW or max(seed, *rounds, *partition_ids) >= _WORD:
        return [
            generator(seed, round=k, partition_id=i, purpose=purpose)
            for k, i in zip(rounds, partition_ids, strict=True)
        ]
    at_least(0, seed=seed, rounds=min(rounds), partition_ids=min(partition_ids))
    entropy = np.empty((4, len(rounds)), np.uint32)
    entropy[0], entropy[1], entropy[2], entropy[3] = seed, rounds, partition_ids, purpose
    # NumPy accepts any ISeedSequence, although its annotations do not say so.
    seeds: list[Any] = [_State(words) for words in _states(entropy)]
    return [np.random.Generator(np.random.PCG64(one)) for one in seeds]


def torch_generator(seed: int, *, round: int = 0, partition_id: int = 0, purpose: Purpose) -> torch.Generator:
    """Return the same stream as a ``torch.Generator`` on the CPU, whatever the device of a run."""
    return torch.Generator().manual_seed(seed_words(seed, round, partition_id, purpose))


def seed_words(seed: int, round: int, partition_id: int, purpose: Purpose) -> int:
    """Return the 63 bits that seed a stream's ``torch.Generator``."""
    words = _seed_sequence(seed, round, partition_id, purpose).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))


def _seed_sequence(seed: int, round: int, partition_id: int, purpose: Purpose) -> np.random.SeedSequence:
    at_least(0, seed=seed, round=round, partition_id=partition_id)
    return np.random.SeedSequence([seed, round, partition_id, int(purpose)])


class _State(ISeedSequence):
    """A precomputed seed sequence, with the one state that PCG64 requests."""

    def __init__(self, words: NDArray[np.uint64]) -> None:
        self._words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        """Return the state, four words of 64 bits."""
        assert (n_words, dtype) == (4, np.uint64), "only PCG64 is seeded by it"
        return self._words


def _powers(first: int, factor: int, count: int) -> NDArray[np.uint32]:
    """Return first factor^k modulo 2^32 for k = 0, ..., count - 1, as a column."""
    return np.array([first * pow(factor, k, _WORD) % _WORD for k in range(count)], np.uint32)[:, None]


# The constants of NumPy's SeedSequence, whose streams are stable by NEP 19.
_MIXED = _powers(0x43B0D7E5, 0x931E8875, 17)
_DRAWN = _powers(0x8B51F9DD, 0x58F38DED, 9)
_LEFT, _RIGHT, _SHIFT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715), np.uint32(16)


def _hashed(words: NDArray[np.uint32], constants: NDArray[np.uint32]) -> NDArray[np.uint32]:
    hashed: NDArray[np.uint32] = (words ^ constants[:-1]) * constants[1:]
    return hashed ^ (hashed >> _SHIFT)


def _states(entropy: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Return ``SeedSequence(words).generate_state(4, uint64)`` (n, 4) of each column of entropy (4, n)."""
    pool = _hashed(entropy, _MIXED[:5])
    for source in range(4):
        others = [k for k in range(4) if k != source]
        at = 4 + 3 * source
        mixed = _LEFT * pool[others] - _RIGHT * _hashed(pool[source], _MIXED[at : at + 4])
        pool[others] = mixed ^ (mixed >> _SHIFT)
    drawn = _hashed(np.concatenate([pool, pool]), _DRAWN)
    return np.ascontiguousarray(drawn.T).astype("<u4").view("<u8").astype(np.uint64, copy=False)
