"""Independent tasks on several threads, with single-threaded arithmetic in each."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def map_on_threads(function: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """Return ``[function(item) for item in items]``, computed on ``threads`` threads of the CPU.

    Each of torch's operations inside runs on one thread, even if ``threads`` is 1. The caller's setting is
    restored.

    Parameters
    ----------
    function : Callable[[T], R]
        Thread-safe.
    items : Sequence[T]
        Processed in order; the first exception is raised.
    threads : int
        At least 1.
    """
    before = torch.get_num_threads()
    try:
        if threads == 1:
            torch.set_num_threads(1)
            return [function(item) for item in items]
        # The setting is per thread, and also the default of threads new to torch: the pool's threads set 1
        # before their first operation, and the default is restored below.
        with ThreadPoolExecutor(threads, initializer=partial(torch.set_num_threads, 1)) as pool:
            futures = [pool.submit(function, item) for item in items]
            try:
                return [future.result() for future in futures]
            finally:
                pool.shutdown(cancel_futures=True)
    finally:
        torch.set_num_threads(before)
