"""Fixtures that every room's tests may use."""

from collections.abc import Iterator

import pytest

from hedgerow.sim.engine._compat import flower_identity as identity


@pytest.fixture
def flower_identity() -> Iterator[int]:
    """Lets a test build ``flwr.app.Message``; its value is the run id."""
    with identity(run_id=1):
        yield 1
