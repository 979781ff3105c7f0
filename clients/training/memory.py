"""How many nodes one stack holds, estimated before it starts."""

from functools import lru_cache
from logging import INFO
from typing import Any

import torch
from flwr.common import log
from torch import Tensor, nn

from hedgerow.tasks.modes import evaluating

__all__ = ["chunk_size", "node_bytes"]

# Per thread, as measured: smaller stacks lose time between operations, larger ones leave the caches.
_CACHE_BYTES = 48 * 2**20
# A CPU's stack of fewer bytes is over before a second thread has begun.
_WORTH_THREADS = 8 * 2**20
# What is left of free memory is for kernels' work space and fragments.
_USABLE = 0.8


def node_bytes(model: nn.Module, sample: Tensor, batch_size: int) -> int:
    """Estimate the bytes that one node of a stack takes while it trains.

    Parameters are counted four times (start, value, gradient, temporary), each layer's output three times
    (value, gradient, temporary), and the patches of a convolution twice (columns and their gradient).

    - ``model``: The architecture; one forward pass is run.
    - ``sample``: One sample, (1, ...), on the model's device.
    - ``batch_size``: The longest batch, >= 0.
    """
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
        with torch.no_grad(), evaluating(model):  # One sample alone has no batch statistics.
            model(sample)
    finally:
        for hook in hooks:
            hook.remove()
    return 4 * parameters + batch_size * sum(outputs)


def chunk_size(nodes: int, bytes_a_node: int, device: torch.device, max_nodes: int | None = None) -> int:
    """Return the most nodes that one stack should hold, at least 1.

    - ``nodes``: All nodes that are to train, >= 1.
    - ``device``: On CUDA as many nodes as free memory holds; on a CPU as many as stay in a core's caches, in
      chunks of equal size whose number the threads divide, so that none waits for another at the end; little
      work is left to one thread.
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
    # What torch holds for later counts as free.
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@lru_cache(maxsize=64)
def _announce(nodes: int, size: int, bytes_a_node: int, device: str) -> None:
    said = "Local training on %s: %d nodes, at most %d in one stack (%.1f MiB each)"
    log(INFO, said, device, nodes, size, bytes_a_node / 2**20)
