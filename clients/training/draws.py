"""Forward passes that draw, or that keep values outside of the state dict: a node depends on no other one."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from hedgerow.global_draws import GlobalDraws, seed_global_draws
from hedgerow.wire.seeds import Purpose, seed_words

# A run's seed, the round and the node's partition id.
Stream = tuple[int, int, int]

_GENERATORS = torch.Generator, np.random.Generator, np.random.RandomState, random.Random

# By model: the first values seen of buffers that are not in its state dict.
_TRANSIENT: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()


class NodeDraws:
    """What the forward passes of one model draw from and change, apart from its state dict.

    - ``before``: The states of the global generators when this was made.
    - ``own``: The generators that the model's modules keep as attributes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.before = GlobalDraws.now()
        found = (value for module in model.modules() for value in vars(module).values())
        self.own: list[Any] = [value for value in found if isinstance(value, _GENERATORS)]
        if model not in _TRANSIENT:
            kept = model.state_dict().keys()
            _TRANSIENT[model] = {
                name: value.detach().clone() for name, value in model.named_buffers() if name not in kept
            }
        self._buffers = _TRANSIENT[model]
        self._seeded = False

    @classmethod
    @contextmanager
    def of(cls, model: nn.Module, stream: Stream | None = None) -> Iterator["NodeDraws"]:
        """Begin a node's work on the model, if its stream is given; restore what was seeded afterwards."""
        draws = cls(model)
        try:
            if stream is not None:
                draws.begin(model, stream)
            yield draws
        finally:
            draws.reset(model)
            if draws._seeded:
                draws.before.restore()

    def begin(self, model: nn.Module, stream: Stream) -> None:
        """Begin a node's work on the model or a copy: all draws follow from the stream."""
        self.reset(model)
        self._seeded = True
        seed = seed_words(*stream, Purpose.TRAINING)
        seed_global_draws(seed)
        for generator in self.own:
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            elif isinstance(generator, np.random.Generator):
                generator.bit_generator.state = type(generator.bit_generator)(seed).state
            else:
                generator.seed(seed % 2**32)

    def reset(self, model: nn.Module) -> None:
        """Set the buffers outside of the state dict to their first values."""
        if self._buffers:
            buffers = dict(model.named_buffers())
            with torch.no_grad():
                for name, value in self._buffers.items():
                    buffers[name].copy_(value)
