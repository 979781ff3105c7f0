"""Every random stream of a run, keyed by what it is for.

A stream depends on (seed, round, partition id, purpose) alone, so that it is the same on any engine,
in any order of execution, and for any other node's fate. Global generators are never used.
"""

from enum import IntEnum

import numpy as np
import torch

from hedgerow.wire.checks import at_least

__all__ = ["Purpose", "generator", "torch_generator"]


class Purpose(IntEnum):
    """What a stream is drawn for. The numbers are part of every result: never renumber them."""

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


def generator(seed: int, *, round: int = 0, partition_id: int = 0, purpose: Purpose) -> np.random.Generator:
    """Return the stream of one purpose at one node in one round.

    Parameters
    ----------
    seed : int
        The run's seed, >= 0.
    round : int (default: 0)
        The round, or the local iteration where a method draws once an iteration; 0 for set-up.
    partition_id : int (default: 0)
        The node's partition id; 0 for draws of the server.
    purpose : Purpose
        What is drawn. Streams of different purposes are independent.

    Raises
    ------
    ValueError
        If a number is negative.
    """
    return np.random.default_rng(_seed_sequence(seed, round, partition_id, purpose))


def torch_generator(seed: int, *, round: int = 0, partition_id: int = 0, purpose: Purpose) -> torch.Generator:
    """Return the same stream as a CPU ``torch.Generator`` (drawn on the CPU on every device)."""
    words = _seed_sequence(seed, round, partition_id, purpose).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0] >> np.uint64(1)))


def _seed_sequence(seed: int, round: int, partition_id: int, purpose: Purpose) -> np.random.SeedSequence:
    at_least(0, seed=seed, round=round, partition_id=partition_id)
    return np.random.SeedSequence([seed, round, partition_id, int(purpose)])
