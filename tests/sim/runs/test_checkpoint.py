"""Checkpoints: exact, atomic, and never unpickled."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors import safe_open
from safetensors.numpy import save
from tests.wire.fuzzing import Decoder, hunt

from hedgerow.sim import CheckpointError, load_checkpoint, read_model, save_checkpoint
from hedgerow.sim.runs.checkpoint import save_arrays, save_model
from hedgerow.sim.runs.folder import RunFolderError

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
    path = tmp_path_factory.mktemp("checkpoint") / "latest.safetensors"
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


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latest.safetensors"
    save_checkpoint(path, {})
    with safe_open(path, "numpy") as file:
        told = file.metadata()
    path.write_bytes(save({}, {**told, "format": "9"}))
    with pytest.raises(CheckpointError, match="has format 9; this version of hedgerow reads 3"):
        load_checkpoint(path)


def test_a_state_of_what_no_file_holds_is_refused(tmp_path: Path) -> None:
    for value in ({1, 2}, np.array(["a"]), np.array([1j])):
        with pytest.raises(TypeError):
            save_checkpoint(tmp_path / "latest.safetensors", {"x": value})


def test_where_a_folder_stands_nothing_is_written_and_nothing_is_read(tmp_path: Path) -> None:
    path = tmp_path / "latest.safetensors"
    path.mkdir()
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        load_checkpoint(path)
    with pytest.raises(OSError, match=r"latest\.safetensors"):
        save_checkpoint(path, {})


# What was cut, overwritten or forged

STATE: dict[str, Any] = {"round": 3, "x": np.arange(6.0), "nodes": {"0": [np.ones(2, np.int8), "a"]}}


def file(tmp_path: Path) -> Decoder:
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, STATE)
    payload = path.read_bytes()

    def load(data: bytes) -> dict[str, Any]:
        path.write_bytes(data)
        return load_checkpoint(path)

    return Decoder("file", payload, load, lambda state: isinstance(state, dict), errors=(CheckpointError,))


def test_damaged_bytes_are_a_checkpoint_or_an_error_that_says_so(tmp_path: Path) -> None:
    hunt(file(tmp_path), 150)


@pytest.mark.slow
def test_thousands_of_damaged_files_are_checkpoints_or_errors_that_say_so(tmp_path: Path) -> None:
    hunt(file(tmp_path), 5000, explore=True)


ARRAYS = {
    "file": np.arange(6.0).reshape(2, 3).T,
    "conv.weight": np.ones((2, 1, 3), np.float16),
    "scalar": np.array(3, np.int64),
    "empty": np.zeros((0, 4), np.float32),
    "big-endian": np.arange(3, dtype=">f4"),
    "mask": np.array([True, False]),
}


@pytest.mark.parametrize("name", ["", "model.npz", "model.safetensors"])
def test_either_file_gives_the_model_back(name: str, tmp_path: Path) -> None:
    save_model(tmp_path, ARRAYS)
    read = read_model(tmp_path / name)
    assert sorted(read) == sorted(ARRAYS)
    for key, array in ARRAYS.items():
        np.testing.assert_array_equal(read[key], array)
        assert read[key].shape == array.shape
        assert read[key].dtype == array.dtype.newbyteorder("=") or name != "model.safetensors"


def test_other_frameworks_read_it(tmp_path: Path) -> None:
    save_model(tmp_path, ARRAYS)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as stored:
        assert stored.get_tensor("file").tolist() == ARRAYS["file"].tolist()


@pytest.mark.parametrize(
    "arrays", [{"words": np.array(["a"])}, {"w": np.zeros(2, np.complex128)}, {"__metadata__": np.zeros(1)}]
)
def test_what_safetensors_does_not_hold_is_in_npz_alone(
    arrays: dict[str, np.ndarray], tmp_path: Path
) -> None:
    save_model(tmp_path, ARRAYS)
    save_model(tmp_path, arrays)
    assert not (tmp_path / "model.safetensors").exists()
    assert list(read_model(tmp_path)) == list(arrays)


@pytest.mark.parametrize("name", ["model.npz", "model.safetensors"])
@pytest.mark.parametrize("data", [b"", b"\xff" * 64, b"PK\x03\x04" + bytes(40)])
def test_a_damaged_file_is_one_error(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(RunFolderError, match=f"{name} cannot be read as a model"):
        read_model(tmp_path)


def test_no_model_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"neither model.npz nor model.safetensors"):
        read_model(tmp_path)
    with pytest.raises(RunFolderError, match="No such file"):
        read_model(tmp_path / "model.npz")
