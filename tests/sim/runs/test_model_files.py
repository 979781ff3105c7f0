"""The last global model in its two files."""

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from hedgerow.sim import read_model
from hedgerow.sim.runs.folder import RunFolderError
from hedgerow.sim.runs.model_files import save_model

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
