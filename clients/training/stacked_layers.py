"""Common layers over a stack of nodes, with the batch as the last axis.

A sample's axes stay in torch's order, (nodes, channels, height, width, batch). A convolution is then one copy
of long contiguous runs and a matrix product per node (torch's grouped convolution, which ``vmap`` uses, has
no fast kernels for so many groups). A linear layer is a product without a transpose, flattening is free, and
the values that batch normalisation averages are contiguous.

A node's bits depend only on its own matrices. Batched library routines may split a stack by its size, and
take another code path if a matrix is not aligned to a vector register (MKL's ``sgemm`` on Zen 4 does so if
the output is not aligned to 16 bytes). So each product is a call of its own, on slabs that are aligned to
cache lines.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from hedgerow.tasks.layout import ChannelsLast

Parameters = Mapping[str, Tensor]
Layer = Callable[[Parameters, Tensor], Tensor]

# Maps a stack's parameters, by name, to those of the layers.
Weights = Callable[[Parameters], Parameters]

_ELEMENTWISE = (nn.Identity, nn.Sigmoid, nn.Tanh, nn.GELU, nn.Softplus)
# By number of axes of a sample.
_BATCH_NORMS = {1: nn.BatchNorm1d, 3: nn.BatchNorm2d}
# A cache line, and the widest vector register of current processors.
_BYTES = 64
_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)


class Reparametrised(nn.Module):
    """A model that computes a plain model's function with weights derived from its own parameters."""

    plain: nn.Module

    @abstractmethod
    def plain_values(self, own: Parameters) -> dict[str, Tensor]:
        """Return the plain model's parameters and buffers, by its names, from this model's.

        All values may have the same additional leading axes, which the result then has too.
        """


@dataclass(frozen=True)
class DenseLayer:
    """A linear layer by its parameters' prefix, and whether a ReLU follows."""

    prefix: str
    rectified: bool = False


class StackedLayers:
    """A sequence of supported layers as one function of all nodes' parameters and inputs.

    - ``weights``: A method that derives the layers' parameters from the stack's; None if they are the same.
    - ``dense``: The same layers if there are only linear ones with or without ReLU in between, else None.
    """

    def __init__(
        self, layers: list[Layer], weights: Weights | None = None, dense: Sequence[DenseLayer] | None = None
    ) -> None:
        self.layers, self.dense = layers, dense
        # Weakly: the form of a model that is kept must not keep the model.
        self._weights = None if weights is None else WeakMethod(weights)

    def __call__(self, parameters: Parameters, x: Tensor) -> Tensor:
        """Map x (nodes, batch, ...) by parameters (nodes, *shape) to outputs (nodes, batch, ...).

        Buffers, which are among the parameters, are updated in place.
        """
        if self._weights is not None:
            derive = self._weights()
            assert derive is not None, "the model is there while it trains"
            parameters = derive(parameters)
        x = x.movedim(1, -1)  # (nodes, ..., batch)
        for layer in self.layers:
            x = layer(parameters, x)
        return x.movedim(-1, 1)


def stacked_layers(model: nn.Module, sample_dims: int) -> StackedLayers | None:
    """Return a model's stacked form, or None if it is not a plain sequence of supported layers.

    Supported are Conv2d (zero padding, no groups, no dilation), max and average pooling, batch normalisation,
    Flatten, Linear on vectors, ReLU and other elementwise activations, sequences of these without hooks, and
    ``Reparametrised`` models of them.

    - ``model``: Any model, in training mode; not changed.
    - ``sample_dims``: The number of axes of a sample: 3 for (C, H, W), 1 for features.
    """
    if isinstance(model, Reparametrised):
        inner = None if _has_hooks(model) else stacked_layers(model.plain, sample_dims)
        return None if inner is None else StackedLayers(inner.layers, model.plain_values)
    layers: list[Layer] = []
    dims = sample_dims
    leaves = _leaves(model, "")
    if leaves is None:
        return None
    for prefix, module in leaves:
        layer: Layer
        if type(module) is ChannelsLast and dims == 3:
            continue  # stacks have their own layout
        if type(module) is nn.Conv2d and dims == 3 and _is_plain_convolution(module):
            layer = _convolution(prefix, module)
        elif type(module) in _POOLS and dims == 3 and not getattr(module, "return_indices", False):
            layer = _pool(module)
        elif type(module) is _BATCH_NORMS.get(dims) and can_normalise(module):
            layer = _batch_norm(prefix, module)
        elif type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
            layer, dims = _flatten, 1
        elif type(module) is nn.Linear and dims == 1:
            layer = _linear(prefix)
        elif type(module) is nn.ReLU:
            layer = _relu
        elif type(module) in _ELEMENTWISE or (
            isinstance(module, nn.modules.dropout._DropoutNd) and not module.p
        ):
            layer = _elementwise(module)
        else:
            return None
        layers.append(layer)
    return StackedLayers(layers, dense=_dense(leaves))


def _dense(leaves: Sequence[tuple[str, nn.Module]]) -> list[DenseLayer] | None:
    """Return the linear layers, with or without ReLU in between; None if there is another kind of layer."""
    dense: list[DenseLayer] = []
    for prefix, module in leaves:
        if type(module) is nn.Linear:
            dense.append(DenseLayer(prefix))
        elif type(module) is nn.ReLU and dense:
            dense[-1] = replace(dense[-1], rectified=True)
        elif type(module) is not nn.Flatten or dense:
            return None
    return dense if dense and not dense[-1].rectified else None


def can_normalise(module: nn.Module) -> bool:
    """Return whether a stack supports a batch normalisation: its momentum, if it tracks, is fixed."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and (
        module.momentum is not None or not module.track_running_stats
    )


def _has_hooks(module: nn.Module) -> bool:
    """Return whether a call of the module does more than its class says, or something else."""
    own = vars(module)
    return "forward" in own or any(kept for name, kept in own.items() if name.endswith("_hooks"))


def _leaves(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]] | None:
    if _has_hooks(module):
        return None
    if type(module) is not nn.Sequential:
        return [(prefix, module)]
    leaves = []
    # ``named_children`` would leave out the second use of a module.
    for name, child in module._modules.items():
        inner = None if child is None else _leaves(child, f"{prefix}{name}.")
        if inner is None:
            return None
        leaves += inner
    return leaves


def _is_plain_convolution(module: nn.Conv2d) -> bool:
    return (
        module.groups == 1
        and module.dilation == (1, 1)
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _relu(parameters: Parameters, x: Tensor) -> Tensor:
    return torch.relu(x)


def _elementwise(module: nn.Module) -> Layer:
    return lambda parameters, x: cast(Tensor, module(x))


def _flatten(parameters: Parameters, x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1, x.shape[-1])


def _linear(prefix: str) -> Layer:
    weight, bias = f"{prefix}weight", f"{prefix}bias"

    def multiply(parameters: Parameters, x: Tensor) -> Tensor:
        operands = parameters[weight], x, parameters.get(bias)
        return cast(Tensor, _Product.apply(*operands))  # type: ignore[no-untyped-call]

    return multiply


def _batch_norm(prefix: str, module: nn.Module) -> Layer:
    norm = cast(nn.modules.batchnorm._BatchNorm, module)
    momentum, eps = norm.momentum or 0.0, norm.eps

    def normalise(parameters: Parameters, x: Tensor) -> Tensor:
        def flat(name: str) -> Tensor | None:
            value = parameters.get(prefix + name)
            return None if value is None else value.flatten(0, 1)

        if (count := parameters.get(f"{prefix}num_batches_tracked")) is not None:
            count.add_(1)
        # Nodes and channels together are the channels of one long sample.
        y = nn.functional.batch_norm(
            x.contiguous().view(1, x.shape[0] * x.shape[1], -1),
            flat("running_mean"), flat("running_var"), flat("weight"), flat("bias"), True, momentum, eps,
        )  # fmt: skip
        return y.view(x.shape)

    return normalise


def _convolution(prefix: str, module: nn.Conv2d) -> Layer:
    weight, bias = f"{prefix}weight", f"{prefix}bias"
    stride, (rows, columns) = _pair(module.stride), _pair(cast(tuple[int, int], module.padding))

    def convolve(parameters: Parameters, x: Tensor) -> Tensor:
        if rows or columns:
            x = nn.functional.pad(x, (0, 0, columns, columns, rows, rows))
        operands = (x, parameters[weight], parameters.get(bias), stride)
        return cast(Tensor, _Convolution.apply(*operands))  # type: ignore[no-untyped-call]

    return convolve


def _pool(module: nn.Module) -> Layer:
    def pool(parameters: Parameters, x: Tensor) -> Tensor:
        # With nodes and channels as the batch, and the batch as channels, x is channels-last.
        y = module(x.flatten(0, 1).permute(0, 3, 1, 2))
        return cast(Tensor, y.permute(0, 2, 3, 1).unflatten(0, x.shape[:2]))

    return pool


class _Convolution(torch.autograd.Function):
    """Patches as columns, then one product per node; the input's gradient is the transpose of both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int]) -> Tensor:
        kernel = weight.shape[3:]
        patches = x.contiguous().unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])
        height, width = patches.shape[2:4]
        patches = patches.permute(0, 1, 5, 6, 2, 3, 4)  # (nodes, C, k, k, H', W', batch)
        columns = aligned_empty(*patches.shape, like=x).copy_(patches).flatten(4).flatten(1, 3)
        kernels = aligned(weight.flatten(2))
        ctx.save_for_backward(columns, kernels)
        ctx.stride, ctx.shapes, ctx.positions = stride, (x.shape, weight.shape), (height, width)
        return multiplied(kernels, columns, bias).view(*weight.shape[:2], height, width, x.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        columns, kernels = ctx.saved_tensors
        x_shape, weight_shape = ctx.shapes
        gradient = aligned(gradients[0].flatten(2))
        to_x = to_weight = to_bias = None
        if ctx.needs_input_grad[1]:
            to_weight = multiplied(gradient, columns.mT).view(weight_shape)
        if ctx.needs_input_grad[2]:
            to_bias = gradient.sum(2)
        if ctx.needs_input_grad[0]:
            shares = multiplied(kernels.mT, gradient)  # (nodes, C k k, H' W' batch)
            shares = shares.view(weight_shape[0], *weight_shape[2:], *ctx.positions, -1)
            to_x = _sum_at_places(shares, x_shape, ctx.stride)
        return to_x, to_weight, to_bias, None


def _sum_at_places(shares: Tensor, shape: torch.Size, stride: tuple[int, int]) -> Tensor:
    """Return patches (nodes, C, k, k, H', W', batch) summed at their places in an image."""
    total = shares.new_zeros(shape)
    (height, width), (down, right) = shares.shape[4:6], stride
    spans = down * (height - 1) + 1, right * (width - 1) + 1
    # (nodes, C, k, k, batch, H', W'), where several entries are one pixel
    patches = total.unfold(2, spans[0], 1).unfold(3, spans[1], 1)[..., ::down, ::right]
    places = [place.movedim(2, -1) for row in patches.unbind(2) for place in row.unbind(2)]
    parts = [part for row in shares.unbind(2) for part in row.unbind(2)]
    if total.is_cpu:
        torch._foreach_add_(places, parts)  # in order, and without holding Python's lock in between
    else:
        for place, part in zip(places, parts, strict=True):
            place.add_(part)
    return total


# Products.


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
    """a b + bias of each node, for a (nodes, m, k), b (nodes, k, n) and bias (nodes, m) or None."""

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
