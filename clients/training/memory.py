"""Estimate of how many nodes one stack can hold."""

from functools import lru_cache
from logging import INFO
from typing import Any
from weakref import WeakKeyDictionary

import torch
from flwr.common import log
from torch import Tensor, nn

from hedgerow.tasks.global_draws import GlobalDraws
from hedgerow.tasks.modes import evaluating

__all__ = ["chunk_size", "node_bytes"]

# Per thread, as measured: smaller stacks lose time between operations, larger ones exceed the caches.
_CACHE_BYTES = 48 * 2**20
# A CPU stack of fewer bytes finishes before a second thread starts.
_WORTH_THREADS = 8 * 2**20
# Usable share of free memory; the rest is for kernels' work space and fragmentation.
_USABLE = 0.8
# The sizes of models that were measured, by the shape of a sample.
_KNOWN: WeakKeyDictionary[nn.Module, dict[torch.Size, tuple[int, int]]] = WeakKeyDictionary()


def node_bytes(model: nn.Module, sample: Tensor, batch_size: int) -> int:
    """Estimate the bytes that one node of a stack needs for training, by one forward pass of the model.

    It counts parameters four times (start, value, gradient, temporary), each layer's output three times
    (value, gradient, temporary), and the patches of a convolution twice (columns and their gradient).

    - ``sample``: One sample, (1, ...), on the model's device.
    - ``batch_size``: The longest batch, >= 0.
    """
    known = _KNOWN.setdefault(model, {})
    if sample.shape not in known:
        known[sample.shape] = _bytes_of(model, sample)
    parameters, outputs = known[sample.shape]
    return 4 * parameters + batch_size * outputs


def _bytes_of(model: nn.Module, sample: Tensor) -> tuple[int, int]:
    """Return the bytes of the parameters, and of the layers' outputs for one sample, as counted above."""
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    outputs: list[int] = [sample.numel() * sample.element_size()]

    def count(module: nn.Module, inputs: Any, output: Any) -> None:
        if not isinstance(output, Tensor):
            return
        size = 3 * output.numel()
        if isinstance(module, nn.Conv2d):
            size += 2 * output[0, 0].numel() * module.weight[0].numel()
        outputs.append(size * output.element_size())

    hooks = [m.register_forward_hook(count) for m in model.modules() if not any(True for _ in m.children())]
    try:
        # A single sample has no batch statistics.
        with torch.no_grad(), evaluating(model), GlobalDraws.restored():
            model(sample)
    finally:
        for hook in hooks:
            hook.remove()
    return parameters, sum(outputs)


def chunk_size(nodes: int, bytes_a_node: int, device: torch.device, max_nodes: int | None = None) -> int:
    """Return the largest number of nodes for one stack, at least 1.

    On CUDA it is what free memory holds. On a CPU it is what stays in a core's caches, in equal chunks whose
    number is a multiple of the threads, so that no thread idles at the end; small work stays on one thread.

    - ``nodes``: All nodes to train, >= 1.
    - ``max_nodes``: Overrides the estimate, except that a CPU's threads still share the nodes.
    """
    if device.type == "cpu":
        threads = torch.get_num_threads() if nodes * bytes_a_node > _WORTH_THREADS else 1
        most = max(1, max_nodes or _CACHE_BYTES // bytes_a_node)
        turns = -(-nodes // (threads * most))
        return -(-nodes // (threads * turns))
    if max_nodes is not None:
        return min(nodes, max_nodes)
    free = _free_bytes(device)
    size = max(1, min(nodes, int(_USABLE * free) // bytes_a_node))
    _announce(nodes, size, bytes_a_node, str(device))
    return size


def _free_bytes(device: torch.device) -> int:
    free: int = torch.cuda.mem_get_info(device)[0]
    # Memory that torch has cached counts as free.
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@lru_cache(maxsize=64)
def _announce(nodes: int, size: int, bytes_a_node: int, device: str) -> None:
    said = "Local training on %s: %d nodes, at most %d in one stack (%.1f MiB each)"
    log(INFO, said, device, nodes, size, bytes_a_node / 2**20)
