"""A weight W + U V that is not built: a linear layer computes x W^T + (x V^T) U^T with it.

Paper: S. Li et al., "The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient Federated
Learning" (FedMUD), eqs. (3) and (8). Eq. (8), U V~ + U~ V, is the product of [U, U~] and [V~; V], that is a
LoRA adapter of twice the rank. Neither the sum nor its gradient, as large as W, is computed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map


class LowRankWeight(Tensor):
    """A weight (m, n), W + U V, in the place of a parameter.

    ``functional.linear``, and ``addmm`` and ``matmul`` from the right, compute with the parts. Every other
    function gets the sum as an ordinary tensor, computed once, so that any model runs.

    Parameters
    ----------
    base : Tensor or None
        W (m, n); None for zero.
    left, right : Tensor
        U (m, q) and V (q, n).
    """

    base: Tensor | None
    left: Tensor
    right: Tensor
    _sum: Tensor | None

    @staticmethod
    def __new__(cls, base: Tensor | None, left: Tensor, right: Tensor) -> "LowRankWeight":
        """Return a tensor of the sum's shape without memory."""
        like = left if base is None else base
        made: LowRankWeight = Tensor._make_wrapper_subclass(
            cls, (left.shape[-2], right.shape[-1]), dtype=like.dtype, device=like.device
        )
        made.base, made.left, made.right, made._sum = base, left, right, None
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Compute with the parts where that is less, else with the sum."""
        kwargs = kwargs or {}
        if func is functional.linear and isinstance(args[1], cls) and not isinstance(args[0], cls):
            return _linear(*args, **kwargs)
        if func in _PRODUCTS and isinstance(args[-1], cls) and not kwargs:
            return _product(*map(_whole, args[:-1]), args[-1])
        return func(*tree_map(_whole, args), **tree_map(_whole, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without the function
        cls, func: Callable[..., Any], *_: Any
    ) -> Any:
        """Refuse: below autograd the sum's gradient would be lost."""
        raise TypeError(f"{func} cannot compute with a weight in two parts")

    def whole(self) -> Tensor:
        """Return W + U V."""
        if self._sum is None:
            product = self.left @ self.right
            self._sum = product if self.base is None else self.base + product
        return self._sum


# Of a matrix on the right: y = b + x M, as in the layers of GPT-2, which hold their matrices transposed.
_PRODUCTS = (torch.addmm, Tensor.addmm, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, LowRankWeight) else value


def _linear(x: Tensor, weight: LowRankWeight, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + (x V^T) U^T + b."""
    update = functional.linear(functional.linear(x, weight.right), weight.left)
    if weight.base is None:
        return update if bias is None else update + bias
    return functional.linear(x, weight.base, bias) + update


def _product(*operands: Any) -> Any:
    """Return b + x W + (x U) V, or without b."""
    *bias, x, weight = operands
    update = (x @ weight.left) @ weight.right
    if weight.base is not None:
        update = x @ weight.base + update
    return bias[0] + update if bias else update
