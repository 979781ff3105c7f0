"""An LSTM for ``torch.func.vmap``, which ``torch.nn.LSTM`` does not support.

vmap over the elementary operations of each step works too, but takes seven times as long, because they are
tiny. Here the recurrence is one operation with its own gradient and vmap rule.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from .models import draw_uniform


class LSTM(nn.Module):
    """The last hidden state of a one-layer LSTM, (batch, steps, features) -> (batch, hidden).

    The parameters have the names, shapes and meaning of ``torch.nn.LSTM``, and the result is the same.

    Parameters
    ----------
    features, hidden : int
        Inputs of a step and units, >= 1.
    """

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.weight_ih_l0 = nn.Parameter(torch.empty(4 * hidden, features))
        self.weight_hh_l0 = nn.Parameter(torch.empty(4 * hidden, hidden))
        self.bias_ih_l0 = nn.Parameter(torch.empty(4 * hidden))
        self.bias_hh_l0 = nn.Parameter(torch.empty(4 * hidden))

    def reset(self, generator: np.random.Generator) -> None:
        """Draw all parameters as ``torch.nn.LSTM`` does, U(-1/sqrt(hidden), 1/sqrt(hidden))."""
        for parameter in self.parameters():
            draw_uniform(parameter, 1 / math.sqrt(self.hidden), generator)

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden state after the last step."""
        inputs = functional.linear(x, self.weight_ih_l0, self.bias_ih_l0 + self.bias_hh_l0)
        last: Tensor = _recurrence(inputs[None], self.weight_hh_l0[None])[0]
        return last[0]


class _Recurrence(torch.autograd.Function):
    """The recurrence of N networks: inputs (N, batch, steps, 4 h) and weights (N, 4 h, h) to (N, batch, h).

    Gates are in torch's order: input, forget, cell, output. The other outputs are for the gradient.
    """

    @staticmethod
    def forward(inputs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        N, batch, steps, _ = inputs.shape
        h = weight.shape[-1]
        recurrent = weight.mT.contiguous()
        gates = inputs.movedim(2, 0).clone(memory_format=torch.contiguous_format)  # (steps, N, batch, 4 h)
        cells, hiddens = inputs.new_zeros(2, steps + 1, N, batch, h)
        for t in range(steps):
            step = gates[t]
            step += torch.bmm(hiddens[t], recurrent)
            step[..., : 2 * h].sigmoid_()
            step[..., 2 * h : 3 * h].tanh_()
            step[..., 3 * h :].sigmoid_()
            i, f, g, o = torch.split(step, h, -1)
            torch.mul(f, cells[t], out=cells[t + 1]).addcmul_(i, g)
            torch.tanh(cells[t + 1], out=hiddens[t + 1]).mul_(o)
        return hiddens[-1].clone(), gates, cells, hiddens

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        _, gates, cells, hiddens = output
        ctx.mark_non_differentiable(gates, cells, hiddens)
        ctx.save_for_backward(inputs[1], gates, cells, hiddens)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor, Tensor]:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        weight, gates, cells, hiddens = saved
        steps, N, batch, _ = gates.shape
        h = weight.shape[-1]
        i, f, g, o = torch.split(gates, h, -1)
        tanh = cells[1:].tanh()
        # d gate / d cell of input, forget and cell gate; of the output gate, d gate / d hidden.
        slopes = torch.stack([g * i * (1 - i), cells[:-1] * f * (1 - f), i * (1 - g * g)], -2)
        output_slope, cell_slope = tanh * o * (1 - o), o * (1 - tanh * tanh)
        d_gates = torch.empty_like(gates)
        d_hidden = outputs[0].contiguous()
        d_cell = torch.zeros_like(d_hidden)
        for t in reversed(range(steps)):
            d_cell.addcmul_(d_hidden, cell_slope[t])
            inner = d_gates[t, ..., : 3 * h].view(N, batch, 3, h)
            torch.mul(d_cell[..., None, :], slopes[t], out=inner)
            torch.mul(d_hidden, output_slope[t], out=d_gates[t, ..., 3 * h :])
            d_hidden = torch.bmm(d_gates[t], weight)
            d_cell *= f[t]
        d_inputs = d_gates.movedim(0, 2)  # (N, batch, steps, 4 h)
        before = hiddens[:-1].movedim(0, 2).reshape(N, batch * steps, h)
        d_weight = torch.bmm(d_inputs.reshape(N, batch * steps, 4 * h).mT, before)
        return d_inputs, d_weight

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], inputs: Tensor, weight: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        stacks = [
            value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
            for value, dim in zip((inputs, weight), in_dims, strict=True)
        ]
        last, *rest = _recurrence(*(stack.flatten(0, 1) for stack in stacks))
        S, N = stacks[0].shape[:2]
        members = (value.reshape(len(value), S, N, *value.shape[2:]) for value in rest)
        return (last.reshape(S, N, *last.shape[1:]), *members), (0, 1, 1, 1)


_recurrence: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = _Recurrence.apply
