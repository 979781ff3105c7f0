"""NumPy's matrix products on one thread, whatever the machine has: their last bits depend on the number."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from threadpoolctl import ThreadpoolController

__all__ = ["one_blas_thread"]


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let BLAS use one thread inside; torch's threads are its own, and stay as they are."""
    with _controller("scipy.linalg" in sys.modules).limit(limits=1, user_api="blas"):
        yield


@cache
def _controller(scipy_is_loaded: bool) -> ThreadpoolController:
    """Return what knows the libraries that are loaded; scipy brings one of its own."""
    return ThreadpoolController()
