"""What leaves a node of HSGD, and what is done to encodings before."""

from typing import Any

import numpy as np
import pytest
from tests.clients.hsgd.federation import context, sent

from hedgerow.clients.grid_noise import GridNoise
from hedgerow.clients.hsgd.messages import ProtectedUpload, Release, config_of
from hedgerow.wire import Call

Array = np.ndarray


def call(config: dict[str, Any], partition_id: int = 4, **node_config: Any) -> Call:
    return Call(sent({}, **config), context(partition_id, **node_config), "train.exchange")


def released(rows: Array, t: int = 0, one: Call | None = None, **config: Any) -> Array:
    one = one or call({key.replace("_", "-"): value for key, value in config.items()})
    release = Release.of(config_of(one))
    return rows if release is None else release(rows, t, one)


ROWS = np.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])


def test_a_row_is_scaled_to_the_clip_and_noise_has_the_deviation_of_multiplier_times_clip() -> None:
    assert released(ROWS) is ROWS
    assert released(ROWS, clip=1.0) == pytest.approx(np.array([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))
    noisy = released(np.zeros((200, 100)), clip=2.0, noise_multiplier=0.5, seed=1)
    assert noisy.std() == pytest.approx(1.0, rel=0.02)
    assert abs(noisy.mean()) < 0.03


def test_noise_is_keyed_by_seed_iteration_and_node_unless_message_or_node_want_that_of_the_system() -> None:
    config = {"clip": 1.0, "noise-multiplier": 1.0}
    first = released(ROWS, 0, call(config | {"seed": 3}))
    # The run's seed is taken where the message has none.
    for same in (call(config | {"seed": 3}), call(config)):
        assert np.array_equal(first, released(ROWS, 0, same))
    for t, other in ((1, call(config)), (0, call(config, 5)), (0, call(config | {"seed": 2}))):
        assert not np.array_equal(first, released(ROWS, t, other))
    source = {"noise-source": "entropy"}
    for one in (call(config | source), call(config, **source)):
        assert not np.array_equal(released(ROWS, 0, one), released(ROWS, 0, one))


# Uploads


START = {"head": np.zeros(300), "hospital": np.ones(500)}


def uploaded(end: dict[str, Array], t: int = 0, one: Call | None = None, **config: Any) -> dict[str, Array]:
    one = one or call({key.replace("_", "-"): value for key, value in config.items()})
    protected = ProtectedUpload.of(config_of(one))
    assert protected is not None
    return protected(end, START, t, one)


def change(end: dict[str, Array], start: dict[str, Array] = START) -> Array:
    return np.concatenate([end[key] - start[key] for key in end], axis=-1)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e200, np.inf, np.nan])
def test_the_change_of_all_blocks_of_each_pair_is_clipped_whatever_it_is(size: float) -> None:
    quiet = {"upload_clip": 2.0, "upload_noise_multiplier": 1e-12, "seed": 1}
    expected = 1e-3 * 800**0.5 if size == 1e-3 else 2.0 if np.isfinite(size) else 0.0
    end = {key: block + size for key, block in START.items()}
    assert np.linalg.norm(change(uploaded(end, **quiet))) == pytest.approx(expected, abs=1e-9)
    pairs = {key: np.stack([block + size, block + 1e-3]) for key, block in START.items()}
    norms = np.linalg.norm(change(uploaded(pairs, **quiet)), axis=1)
    assert norms == pytest.approx([expected, 1e-3 * 800**0.5], abs=1e-9)


def test_noise_of_uploads_has_its_deviation_and_is_none_of_the_encodings() -> None:
    many = {"upload_clip": 2.0, "upload_noise_multiplier": 3.0, "seed": 1}
    drawn = change(uploaded(START, **many))
    assert drawn.std() == pytest.approx(6.0, rel=0.1)
    encodings = released(np.zeros((1, 800)), clip=2.0, noise_multiplier=3.0, seed=1)[0]
    assert abs(np.corrcoef(drawn, encodings)[0, 1]) < 0.2
    assert not np.array_equal(drawn, change(uploaded(START, t=1, **many)))
    source = {"upload-clip": 2.0, "upload-noise-multiplier": 3.0, "noise-source": "entropy"}
    one = call(source)
    assert not np.array_equal(change(uploaded(START, 0, one)), change(uploaded(START, 0, one)))


@pytest.mark.parametrize("lacking", ["upload-clip", "upload-noise-multiplier"])
def test_half_a_protection_is_an_error(lacking: str) -> None:
    config = {"upload-clip": 1.0, "upload-noise-multiplier": 1.0}
    with pytest.raises(ValueError, match=rf"{lacking} must be .*got None"):
        ProtectedUpload.of(config_of(call({key: v for key, v in config.items() if key != lacking})))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_told_with_noise_is_computed_of_points_of_a_grid(dtype: Any) -> None:
    rows = np.random.default_rng(0).normal(size=(40, 6)).astype(dtype)
    rows[0], rows[1] = np.nan, np.inf
    told = released(rows, clip=1.0, noise_multiplier=0.5, seed=1)
    grid = GridNoise.of(0.25, 1.0, 6)
    assert told.dtype == dtype
    assert np.isfinite(told).all()
    on_grid = np.rint(told.astype(np.float64) / grid.step) * grid.step
    np.testing.assert_array_equal(told, on_grid.astype(dtype))
    # What is added to the model is a point as well, and nothing of the model itself is added to that.
    end = {key: value + 1.25 for key, value in START.items()}
    moved = change(uploaded(end, upload_clip=1.0, upload_noise_multiplier=0.5, seed=1), START)
    grid = GridNoise.of(0.25, 1.0, moved.size)
    points = np.rint(moved / grid.step) * grid.step
    again = np.concatenate([value.ravel() for value in START.values()])
    np.testing.assert_array_equal(again + moved, again + points)
