"""Precision and compilation of a node's forward pass.

Parameters, gradients, sums of statistics and losses are always float32. ``torch.compile`` compiles the
forward and backward pass of one batch length; it fuses successive normalisations, activations and poolings.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from logging import WARNING
from typing import Any, Literal, cast

import torch
from flwr.common import log
from torch import Tensor, nn
from torch.func import functional_call

from hedgerow.clients.training.stacked_layers import Reparametrised
from hedgerow.wire.checks import at_least

Precision = Literal["float32", "bf16"]
Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Arithmetic:
    """Precision and compilation of forward passes; ValueError for an invalid value."""

    # "bf16" is torch's autocast: matrix products and convolutions take and return bfloat16.
    precision: Precision = "float32"
    # The batch length, >= 2, for which the forward pass is compiled; 0 for none. Other lengths are not
    # compiled, so that a node's result depends only on its own batches.
    compiled: int = 0

    def __post_init__(self) -> None:
        if self.precision not in ("float32", "bf16"):
            raise ValueError(f"precision must be 'float32' or 'bf16', got {self.precision!r}")
        at_least(0, compiled=self.compiled)

    @property
    def rounds(self) -> bool:
        """Whether products are rounded to bfloat16."""
        return self.precision == "bf16"

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context for a forward pass."""
        return torch.autocast(device.type, torch.bfloat16) if self.rounds else nullcontext()

    def exact(self, outputs: Tensor) -> Tensor:
        """Return outputs for a loss, with bfloat16 converted to float32."""
        return outputs.float() if outputs.dtype == torch.bfloat16 else outputs

    def forward(self, model: nn.Module) -> Forward:
        """Return a model's forward pass."""

        def plain(x: Tensor) -> Tensor:
            outputs: Tensor = model(x)
            return outputs.float() if outputs.dtype == torch.bfloat16 else outputs

        def run(x: Tensor) -> Tensor:
            with self.autocast(x.device):
                if self.compiled and len(x) == self.compiled > 1:
                    return self.exact(_run_compiled(model, x))
                return self.exact(model(x))

        return run if self.rounds or self.compiled else plain


FLOAT32 = Arithmetic()


def _run_compiled(model: nn.Module, x: Tensor) -> Tensor:
    if not _usable[0]:
        return cast(Tensor, model(x))
    try:
        if isinstance(model, Reparametrised):
            # Weights are built from factors in Python, outside of the compiled program.
            return _compiler()(model.plain, model.plain_values(dict(model.named_parameters())), x)
        return _compiler()(model, {}, x)
    except Exception as error:
        outputs = cast(Tensor, model(x))  # raises too if the model itself is at fault
        _give_up(error)
        return outputs


def _called(model: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    return cast(Tensor, functional_call(model, weights, (x,)) if weights else model(x))


# False once compilation has failed; the process then compiles nothing any more.
_usable = [True]


@lru_cache(maxsize=1)
def _compiler() -> Callable[..., Tensor]:
    return cast(Callable[..., Tensor], torch.compile(_called, dynamic=False))


def _give_up(error: Exception) -> None:
    if _usable[0]:
        _usable[0] = False
        reason = next(
            (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        log(WARNING, "torch.compile does not work here, nodes train as without `compile`: %s", reason[:200])
