"""Single-threaded NumPy matrix products, because their last bits depend on the number of threads."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from threadpoolctl import ThreadpoolController


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit BLAS to one thread for a ``with`` block; torch's threads are not affected."""
    with _controller("scipy.linalg" in sys.modules).limit(limits=1, user_api="blas"):
        yield


@cache
def _controller(scipy_is_loaded: bool) -> ThreadpoolController:
    """Return a controller of the loaded libraries; scipy loads its own."""
    return ThreadpoolController()
