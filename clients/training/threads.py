"""Nodes on several threads, each on a model of its own."""

import copy
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeVar

from torch import nn

from hedgerow.tasks.threads import map_on_threads

__all__ = ["train_on_threads"]

T = TypeVar("T")
R = TypeVar("R")


def train_on_threads(
    function: Callable[[nn.Module, T], R], model: nn.Module, items: Sequence[T], threads: int
) -> list[R]:
    """Return ``[function(model, item) for item in items]``, each thread on a model of its own."""
    idle: SimpleQueue[nn.Module] = SimpleQueue()
    for scratch in [model, *(copy.deepcopy(model) for _ in range(threads - 1))]:
        idle.put(scratch)

    def run(item: T) -> R:
        scratch = idle.get()
        try:
            return function(scratch, item)
        finally:
            idle.put(scratch)

    return map_on_threads(run, items, threads)
