"""Checkpoints: exact, atomic, and never unpickled."""

import json
import os
import tracemalloc
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hedgerow.sim import CheckpointError, load_checkpoint, save_checkpoint
from hedgerow.sim.runs.checkpoint import save_arrays

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


@settings(deadline=None, max_examples=25)
@given(tree=trees)
def test_a_state_comes_back_bit_for_bit(tree: dict[str, Any], tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("checkpoint") / "latest.npz"
    save_checkpoint(path, tree)
    assert same(tree, load_checkpoint(path))


def test_arrays_may_have_any_name(tmp_path: Path) -> None:
    arrays = {"file": np.arange(3), "args": np.zeros((2, 0)), "a.b": np.float32(1.5)}
    save_arrays(tmp_path / "model.npz", arrays)
    with np.load(tmp_path / "model.npz", allow_pickle=False) as stored:
        assert {name: stored[name].tolist() for name in stored.files} == {
            "file": [0, 1, 2],
            "args": [[], []],
            "a.b": 1.5,
        }


# What a file claims


def forged(path: Path, members: dict[str, bytes], compression: int = ZIP_STORED) -> None:
    with ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)


def stored(values: Any) -> bytes:
    buffer = BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


def text(value: Any) -> bytes:
    return stored(np.frombuffer(json.dumps(value).encode(), np.uint8))


def claiming(shape: str, descr: str = "<f8", data: bytes = b"") -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


def peak(path: Path) -> int:
    """Return the most bytes that reading a file which is no checkpoint allocated."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            load_checkpoint(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_small_file_does_not_unpack_to_a_large_one(tmp_path: Path) -> None:
    path = tmp_path / "latest.npz"
    zeros = stored(np.zeros(8_000_000))
    forged(path, {"tree.json": text({"x": {"__array__": "a"}}), "a": zeros}, ZIP_DEFLATED)
    assert path.stat().st_size < 200_000
    assert peak(path) < 2_000_000


@pytest.mark.parametrize(
    "shape", ["(70000000,)", "(1000000, 1000000)", "(4611686018427387904, 4)", "(-1, -8)"]
)
def test_an_array_that_claims_more_than_its_bytes_is_not_allocated(tmp_path: Path, shape: str) -> None:
    path = tmp_path / "latest.npz"
    forged(path, {"tree.json": text({"x": {"__array__": "a"}}), "a": claiming(shape, data=bytes(64))})
    assert peak(path) < 2_000_000


def test_an_array_that_the_tree_names_often_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "latest.npz"
    named = {"__array__": "a"}
    forged(path, {"tree.json": text({"x": [named] * 1000}), "a": stored(np.zeros(10_000))})
    tracemalloc.start()
    state = load_checkpoint(path)
    assert tracemalloc.get_traced_memory()[1] < 3_000_000
    tracemalloc.stop()
    assert all(array is state["x"][0] for array in state["x"])


@pytest.mark.parametrize("place", ["folder", "pipe"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, place: str) -> None:
    path = tmp_path / "latest.npz"
    path.mkdir() if place == "folder" else os.mkfifo(path)
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        load_checkpoint(path)


@pytest.mark.parametrize("place", ["folder", "pipe", "link"])
def test_what_stands_where_a_file_is_written_aside_is_not_written_into(tmp_path: Path, place: str) -> None:
    path, aside = tmp_path / "latest.npz", tmp_path / "latest.npz.partial"
    (tmp_path / "target").write_text("precious")
    if place == "folder":
        aside.mkdir()
        with pytest.raises(OSError, match=r"latest.npz.partial"):
            save_checkpoint(path, {})
        return
    aside.symlink_to(tmp_path / "target") if place == "link" else os.mkfifo(aside)
    save_checkpoint(path, {})
    assert load_checkpoint(path) == {}
    assert (tmp_path / "target").read_text() == "precious"
