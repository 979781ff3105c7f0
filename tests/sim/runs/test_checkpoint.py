"""Checkpoints: exact, atomic, and never unpickled."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hedgerow.sim.runs.checkpoint import CheckpointError, load_checkpoint, save_arrays, save_checkpoint

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
arrays = hnp.arrays(
    st.sampled_from([np.float32, np.float64, np.int64]), hnp.array_shapes(max_dims=3, max_side=4, min_side=0)
)
keys = st.text(min_size=1, max_size=8).filter(lambda key: key != "__array__")
trees = st.dictionaries(
    keys,
    st.recursive(leaves | arrays, lambda x: st.lists(x, max_size=3) | st.dictionaries(keys, x, max_size=3)),
    max_size=4,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@settings(deadline=None, max_examples=60)
@given(tree=trees)
def test_a_state_comes_back_bit_for_bit(tree: dict[str, Any], tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("checkpoint") / "latest.npz"
    save_checkpoint(path, tree)
    assert same(tree, load_checkpoint(path))


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "latest.npz"
    save_checkpoint(path, {"round": 1})
    with pytest.raises(TypeError):
        save_checkpoint(path, {"round": object()})
    assert load_checkpoint(path) == {"round": 1}


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04garbage"])
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "latest.npz"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        load_checkpoint(path)


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No checkpoint at"):
        load_checkpoint(tmp_path / "latest.npz")


def test_pickled_arrays_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "latest.npz"
    np.savez(path, **{"tree.json": np.array([object()], dtype=object)})
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        load_checkpoint(path)


def test_arrays_may_have_any_name(tmp_path: Path) -> None:
    arrays = {"file": np.arange(3), "args": np.zeros((2, 0)), "a.b": np.float32(1.5)}
    save_arrays(tmp_path / "model.npz", arrays)
    with np.load(tmp_path / "model.npz", allow_pickle=False) as stored:
        assert {name: stored[name].tolist() for name in stored.files} == {
            "file": [0, 1, 2],
            "args": [[], []],
            "a.b": 1.5,
        }
