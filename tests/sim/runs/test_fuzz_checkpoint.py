"""A checkpoint that was cut, overwritten or forged is an error of its own, and never unpickled."""

import json
import pickle
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
from tests.wire.fuzzing import Decoder, hunt

from hedgerow.sim import CheckpointError, load_checkpoint, save_checkpoint

STATE: dict[str, Any] = {"round": 3, "x": np.arange(6.0), "nodes": {"0": [np.ones(2, np.int8), "a"]}}


def file(tmp_path: Path) -> Decoder:
    path = tmp_path / "checkpoint.npz"
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


class Bomb:
    went_off = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Bomb, "went_off", True)


def test_an_array_of_objects_is_never_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.npz"
    tree = np.frombuffer(json.dumps({"x": {"__array__": "array-0"}}).encode(), np.uint8)
    with ZipFile(path, "w") as archive:
        with archive.open("tree.json.npy", "w") as member:
            np.lib.format.write_array(member, tree)
        with archive.open("array-0.npy", "w") as member:
            np.lib.format.write_array(member, np.array([Bomb()], object), allow_pickle=True)
    with pytest.raises(CheckpointError):
        load_checkpoint(path)
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError):
        load_checkpoint(path)
    assert not Bomb.went_off
