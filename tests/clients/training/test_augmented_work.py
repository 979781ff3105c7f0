"""Work on augmented samples: the same batches of transformed copies, drawn for each node and round."""

import numpy as np
import torch

from hedgerow.clients import LocalWork
from hedgerow.clients.training.batches import augmented_work

X = torch.rand(30, 1, 6, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(30)
KEY = {"seed": 3, "round": 2, "partition_id": 1}


def work() -> LocalWork:
    return LocalWork({}, X, Y, [np.array([4, 9, 4]), np.array([29]), np.array([0, 9])], 0.1)


def test_batches_keep_their_samples_lengths_and_labels() -> None:
    plain, other = work(), augmented_work(work(), "flips", **KEY)
    assert [len(batch) for batch in other.batches] == [3, 1, 2]
    for before, after in zip(plain.batches, other.batches, strict=True):
        assert torch.equal(other.y[after], Y[before])
        for image, source in zip(other.x[after], X[before], strict=True):
            assert torch.equal(image, source) or torch.equal(image, source.flip(-1))


def test_draws_are_of_the_run_the_round_and_the_node_and_a_sample_is_transformed_in_each_batch() -> None:
    first = augmented_work(work(), "crops-and-flips", **KEY).x
    assert torch.equal(first, augmented_work(work(), "crops-and-flips", **KEY).x)
    for key in KEY:
        assert not torch.equal(first, augmented_work(work(), "crops-and-flips", **{**KEY, key: 7}).x)
    often = LocalWork({}, X, Y, [np.array([4])] * 20, 0.1)
    flipped = [torch.equal(image, X[4]) for image in augmented_work(often, "flips", **KEY).x]
    assert 0 < sum(flipped) < 20
    assert augmented_work(often, "none", **KEY) is often
