"""A stack's gradients for dense networks with cross-entropy, as a prepared sequence of products.

Each operation is the one that autograd does for ``StackedLayers``, on operands laid out alike, so that the
gradients are equal to the bit. A small model spends most of a step in Python and in autograd: here buffers,
their aligned slabs and each node's rows are made once for a batch length, and a step fills them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hedgerow.clients.training.stacked_layers import DenseLayer, Parameters, aligned, aligned_empty

_LossGradient = torch.ops.aten.nll_loss_backward.default
_IGNORED = -100  # cross-entropy's default ``ignore_index``


class DenseSteps:
    """The losses and gradients of steps with one number of nodes and one batch length.

    - ``layers``: The network; ``DenseLayer`` says which ones there are.
    - ``values``: The nodes' parameters (nodes, *shape). Each step reads what they are then.
    - ``x``, ``y``: All samples (samples, ...) and their classes (samples,), int64, on the CPU.
    - ``batch``: The samples of each node in a step, >= 1.
    """

    def __init__(
        self, layers: Sequence[DenseLayer], values: Parameters, x: Tensor, y: Tensor, batch: int
    ) -> None:
        nodes = len(values[f"{layers[0].prefix}weight"])
        self._x, self._y = x, y
        self._input = x.new_empty(nodes * batch, *x.shape[1:])
        self._layers: list[_Layer] = []
        below = self._input.view(nodes, batch, -1).mT
        for layer in layers:
            self._layers.append(_Layer(layer, values, below, first=layer is layers[0]))
            below = self._layers[-1].output
        self._outputs = below.new_empty(nodes, batch, below.shape[1])
        # Each sample's share of its node's mean.
        self._shares = below.new_ones(nodes * batch) / batch
        self._none = below.new_zeros(())

    def step(self, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each sample (nodes, batch), and the gradient of each parameter by its name.

        The gradients are buffers, which the next step overwrites. No gradients are recorded.

        - ``rows``: The samples of all nodes, one node after the other (nodes * batch,).
        """
        torch.index_select(self._x, 0, rows, out=self._input)
        targets = self._y.index_select(0, rows)
        for layer in self._layers:
            layer.forward()
        outputs = self._outputs.copy_(self._layers[-1].output.mT).flatten(0, 1)
        logs = torch.log_softmax(outputs, 1)
        losses = torch.nn.functional.nll_loss(logs, targets, reduction="none")
        of_logs = _LossGradient(self._shares, logs, targets, None, 0, _IGNORED, self._none)
        of_outputs = torch._log_softmax_backward_data(of_logs, logs, 1, logs.dtype)
        gradient = aligned(of_outputs.view_as(self._outputs).mT)
        gradients: dict[str, Tensor] = {}
        for layer in reversed(self._layers):
            gradient = layer.backward(gradient, gradients)
        return losses.view(self._outputs.shape[:2]), gradients


class _Layer:
    """A layer's operands, as ``stacked_layers.multiplied`` takes them: all nodes', and node by node."""

    def __init__(self, layer: DenseLayer, values: Parameters, x: Tensor, *, first: bool) -> None:
        self._layer = layer
        self._weight = _Aligned(values[f"{layer.prefix}weight"])  # (nodes, m, k)
        self._x = _Aligned(x)  # (nodes, k, batch)
        nodes, m, k = self._weight.stack.shape
        self._bias = values.get(f"{layer.prefix}bias")
        columns = [None] * nodes if self._bias is None else self._bias.unsqueeze(-1).unbind()
        self.output = aligned_empty(nodes, m, x.shape[2], like=x)
        self._products = list(
            zip(
                columns,
                self._weight.stack.unbind(),
                self._x.stack.unbind(),
                self.output.unbind(),
                strict=True,
            )
        )
        self._of_weight = aligned_empty(nodes, m, k, like=x)
        self._across = list(zip(self._x.stack.mT.unbind(), self._of_weight.unbind(), strict=True))
        self._of_x, self._down = x, list[tuple[Tensor, Tensor]]()
        if not first:
            self._of_x = aligned_empty(nodes, k, x.shape[2], like=x)
            self._down = list(zip(self._weight.stack.mT.unbind(), self._of_x.unbind(), strict=True))

    def forward(self) -> None:
        """Compute ``output`` (nodes, m, batch)."""
        self._weight.refresh()
        self._x.refresh()
        for column, weight, x, output in self._products:
            if column is None:
                torch.mm(weight, x, out=output)
            else:
                torch.addmm(column, weight, x, out=output)
        if self._layer.rectified:
            self.output.relu_()

    def backward(self, gradient: Tensor, gradients: dict[str, Tensor]) -> Tensor:
        """Add the parameters' gradients to ``gradients``; return the input's, if it is not the first layer.

        - ``gradient``: That of the output (nodes, m, batch), aligned.
        """
        if self._layer.rectified:
            gradient = aligned(torch.ops.aten.threshold_backward.default(gradient, self.output, 0))
        slabs = gradient.unbind()
        for slab, (x, out) in zip(slabs, self._across, strict=True):
            torch.mm(slab, x, out=out)
        gradients[f"{self._layer.prefix}weight"] = self._of_weight
        if self._bias is not None:
            gradients[f"{self._layer.prefix}bias"] = gradient.sum(2)
        for slab, (weight, out) in zip(slabs, self._down, strict=bool(self._down)):
            torch.mm(weight, slab, out=out)
        return self._of_x


class _Aligned:
    """A stack of matrices in aligned slabs: itself, or a copy to be refreshed before it is read."""

    def __init__(self, source: Tensor) -> None:
        self.stack = aligned(source)
        self._source = None if self.stack.data_ptr() == source.data_ptr() else source

    def refresh(self) -> None:
        """Copy what the source has now."""
        if self._source is not None:
            self.stack.copy_(self._source)
