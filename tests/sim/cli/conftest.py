"""A made-up sweep of two variants and two seeds."""

from collections.abc import Callable
from pathlib import Path

import pytest

WriteRun = Callable[..., Path]


@pytest.fixture
def made(write_sweep: WriteRun) -> Path:
    return write_sweep({"A": {0: [2.0, 1.0], 1: [2.0, 1.2]}, "B": {0: [2.0, 0.8], 1: [2.0, 1.0]}})
