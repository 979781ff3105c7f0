"""Products of matrices node by node, whose bits depend on nothing but that node's matrices.

A library that is handed a stack may split it by its size, and takes other paths where a matrix does not begin
at the boundary of a vector register: a node's last bits would then tell how many stand beside it, and where
(MKL's ``sgemm`` on Zen 4 does so where the output is not aligned to 16 bytes). Here each product is a call of
its own, on slabs that begin at the boundaries of cache lines.
"""

from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["aligned", "aligned_empty", "product"]

# A cache line, and the widest vector register of today's processors.
_BYTES = 64


def aligned_empty(nodes: int, *shape: int, like: Tensor) -> Tensor:
    """Return an uninitialised stack (nodes, *shape) whose slabs begin at boundaries of 64 bytes."""
    slab = torch.Size(shape).numel()
    entries = _BYTES // like.element_size()
    stride = -(-slab // entries) * entries
    return like.new_empty(nodes, stride)[:, :slab].view(nodes, *shape)


def aligned(stack: Tensor) -> Tensor:
    """Return a stack (nodes, m, n) in such slabs, row by row or column by column: itself, or a copy.

    Of an axis of length 1 torch takes any stride for right, and a product another path by it: such a matrix
    is taken row by row. On other devices than CPUs the stack is returned as it is.
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
    """Return a b + bias of each node, which can be differentiated.

    - ``a``, ``b``: (nodes, m, k) and (nodes, k, n).
    - ``bias``: (nodes, m).
    """
    return cast(Tensor, _Product.apply(a, b, bias))  # type: ignore[no-untyped-call]


def multiplied(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a b + bias of each node; a and b are ``aligned``, or transposes of such."""
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
