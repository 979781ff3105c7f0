"""Fixtures that every room's tests may use."""

import atexit
import logging
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import settings

from hedgerow.sim import flower_identity as identity
from hedgerow.wire.simulated import simulated

# The same examples in every run: what one run finds, every run finds.
settings.register_profile("same", derandomize=True, database=None)
settings.load_profile("same")

# Handlers that tests call themselves, some when they are collected, are those of simulated nodes.
_NODES = ExitStack()
_NODES.enter_context(simulated())
atexit.register(_NODES.close)


@pytest.fixture
def flower_identity() -> Iterator[int]:
    """Lets a test build ``flwr.app.Message``; its value is the run id."""
    with identity(run_id=1):
        yield 1


@pytest.fixture(autouse=True)
def flowers_log() -> Iterator[None]:
    """Flower's log as it was: ``hedgerow run --quiet`` is for a process of its own."""
    logger = logging.getLogger("flwr")
    level = logger.level
    yield
    logger.setLevel(level)
