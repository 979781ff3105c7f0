"""A checkpoint that was cut, overwritten or forged is an error of its own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.wire.fuzzing import Decoder, hunt

from hedgerow.sim import CheckpointError, load_checkpoint, save_checkpoint

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
