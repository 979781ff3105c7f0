"""Independent tasks on several threads, each with its arithmetic on one."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

__all__ = ["map_on_threads"]

T = TypeVar("T")
R = TypeVar("R")


def map_on_threads(function: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """Return ``[function(item) for item in items]``, computed on ``threads`` threads of the CPU.

    Inside, torch's own operations run on one thread each, also where ``threads`` is 1. The caller's
    setting is left as it was.

    Parameters
    ----------
    function : Callable[[T], R]
        Safe to run beside itself.
    items : Sequence[T]
        Taken in order; the first exception is raised.
    threads : int
        At least 1.
    """
    before = torch.get_num_threads()
    try:
        if threads == 1:
            torch.set_num_threads(1)
            return [function(item) for item in items]
        # The setting is a thread's own, and the default of threads that are new to torch: the pool's
        # threads take 1 before their first operation, and the default is put back below.
        with ThreadPoolExecutor(threads, initializer=partial(torch.set_num_threads, 1)) as pool:
            futures = [pool.submit(function, item) for item in items]
            try:
                return [future.result() for future in futures]
            finally:
                pool.shutdown(cancel_futures=True)
    finally:
        torch.set_num_threads(before)
