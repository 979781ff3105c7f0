"""Flips and crops: what an image can become, how often, and from which stream."""

import numpy as np
import torch

from hedgerow.tasks import augmented


def stream(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def images(n: int = 400) -> torch.Tensor:
    return torch.rand(n, 2, 6, 5, generator=torch.Generator().manual_seed(1))


def test_half_of_the_images_are_flipped_and_the_others_stay() -> None:
    x = images()
    out = augmented(x, "flips", stream())
    same = (out == x).flatten(1).all(1)
    flipped = (out == x.flip(-1)).flatten(1).all(1)
    assert bool((same ^ flipped).all())
    assert 150 < int(flipped.sum()) < 250


def test_a_crop_is_a_window_of_the_padded_image_at_every_place() -> None:
    x = images()
    out = augmented(x, "crops-and-flips", stream())
    padded = torch.nn.functional.pad(x, (4,) * 4)
    places = set()
    for image, whole in zip(out, padded, strict=True):
        found = [
            (row, column)
            for row in range(9)
            for column in range(9)
            for window in [whole[:, row : row + 6, column : column + 5]]
            if torch.equal(image, window) or torch.equal(image, window.flip(-1))
        ]
        assert found
        places.add(found[0])
    assert len(places) > 60


def test_one_stream_gives_one_result_and_leaves_the_images_and_none_draws_nothing() -> None:
    x, draws = images(20), stream()
    before = x.clone()
    assert torch.equal(augmented(x, "crops-and-flips", stream()), augmented(x, "crops-and-flips", stream()))
    assert not torch.equal(augmented(x, "flips", stream()), augmented(x, "flips", stream(1)))
    assert augmented(x, "none", draws) is x
    assert torch.equal(x, before)
    assert draws.random() == stream().random()
