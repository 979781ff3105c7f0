"""Matrix products node by node; each node's bits depend only on its own matrices.

Batched library routines may split a stack by its size, and take another code path if a matrix is not aligned
to a vector register (MKL's ``sgemm`` on Zen 4 does so if the output is not aligned to 16 bytes). A node's
last bits would then depend on the other nodes in the stack. Here each product is a call of its own, on slabs
that are aligned to cache lines.
"""

from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["aligned", "aligned_empty", "product"]

# A cache line, and the widest vector register of current processors.
_BYTES = 64


def aligned_empty(nodes: int, *shape: int, like: Tensor) -> Tensor:
    """Return an uninitialised stack (nodes, *shape) whose slabs are aligned to 64 bytes."""
    slab = torch.Size(shape).numel()
    entries = _BYTES // like.element_size()
    stride = -(-slab // entries) * entries
    return like.new_empty(nodes, stride)[:, :slab].view(nodes, *shape)


def aligned(stack: Tensor) -> Tensor:
    """Return a stack (nodes, m, n) in aligned slabs, row-major or column-major: itself, or a copy.

    torch accepts any stride for an axis of length 1, but a product's code path depends on it; such a matrix
    is treated as row-major. On devices other than CPUs the stack is returned unchanged.
    """
    if not stack.is_cpu:
        return stack
    _, m, n = stack.shape
    by_columns = min(m, n) > 1 and stack.stride()[1:] == (1, m)
    begins = stack.data_ptr() % _BYTES == 0 and stack.stride(0) * stack.element_size() % _BYTES == 0
    if begins and (by_columns or stack.stride()[1:] == (n, 1)):
        return stack
    if by_columns:
        return aligned(stack.mT).mT
    return aligned_empty(len(stack), m, n, like=stack).copy_(stack)


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a b + bias of each node, differentiably.

    - ``a``, ``b``: (nodes, m, k) and (nodes, k, n).
    - ``bias``: (nodes, m).
    """
    return cast(Tensor, _Product.apply(a, b, bias))  # type: ignore[no-untyped-call]


def multiplied(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a b + bias of each node; a and b are ``aligned`` or their transposes."""
    if not a.is_cpu:
        return torch.bmm(a, b) if bias is None else torch.baddbmm(bias.unsqueeze(-1), a, b)
    result = aligned_empty(len(a), a.shape[1], b.shape[2], like=a)
    if bias is None:
        for left, right, out in zip(a.unbind(), b.unbind(), result.unbind(), strict=True):
            torch.mm(left, right, out=out)
    else:
        columns = bias.unsqueeze(-1).unbind()
        for column, left, right, out in zip(columns, a.unbind(), b.unbind(), result.unbind(), strict=True):
            torch.addmm(column, left, right, out=out)
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        a, b = aligned(a), aligned(b)
        ctx.save_for_backward(a, b)
        return multiplied(a, b, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (a, b), gradient = ctx.saved_tensors, aligned(gradients[0])
        to_a = multiplied(gradient, b.mT) if ctx.needs_input_grad[0] else None
        to_b = multiplied(a.mT, gradient) if ctx.needs_input_grad[1] else None
        to_bias = gradient.sum(2) if ctx.needs_input_grad[2] else None
        return to_a, to_b, to_bias
