"""Forward passes that draw, or that keep values outside of the state dict: a node depends on no other one."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from logging import WARNING
from weakref import WeakKeyDictionary

import numpy as np
import torch
from flwr.common import log
from torch import Tensor, nn

from hedgerow.global_draws import GlobalDraws, seed_global_draws
from hedgerow.kept_values import KeptValues
from hedgerow.tasks.modes import evaluating
from hedgerow.wire.seeds import Purpose, seed_words

# A run's seed, the round and the node's partition id.
Stream = tuple[int, int, int]


class NodeDraws:
    """What the forward passes of one model draw from and change, apart from its state dict.

    - ``before``: The states of the global generators when this was made.
    """

    def __init__(self, model: nn.Module) -> None:
        self.before = GlobalDraws.now()
        self._values: WeakKeyDictionary[nn.Module, KeptValues] = WeakKeyDictionary()
        self._values[model] = self._first = KeptValues(model)
        self._seeded = False

    @property
    def own(self) -> bool:
        """Whether the model keeps generators."""
        return bool(self._first.generators)

    @property
    def changed(self) -> bool:
        """Whether the model keeps other values now."""
        return self._first.moved

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
        for generator in self._values[model].generators:
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            elif isinstance(generator, np.random.Generator):
                generator.bit_generator.state = type(generator.bit_generator)(seed).state
            else:
                generator.seed(seed % 2**32)

    def reset(self, model: nn.Module) -> None:
        """Set what the model keeps outside of its state dict back to what it was when this was made.

        A copy of the model is as it was when this first saw it.
        """
        if model in self._values:
            self._values[model].restore()
        else:
            self._values[model] = KeptValues(model)


def warn_of_foreign_draws(model: nn.Module, x: Tensor) -> None:
    """Log a warning if two forward passes of a batch in training mode differ, with equal seeds.

    Then the model draws from what no seed determines, or keeps values where they are not found. The model is
    left as it was.
    """
    draws, kept, outputs = NodeDraws(model), copy.deepcopy(model.state_dict()), []
    try:
        with evaluating(model):
            for _ in range(2):
                draws.begin(model, (0, 0, 0))
                model.train()
                outputs.append(torch.as_tensor(model(x)))
                model.load_state_dict(kept)
    except Exception:  # Not a batch that the model takes.
        return
    finally:
        draws.before.restore()
    one, other = (output.detach().cpu().numpy().tobytes() for output in outputs)
    if one != other:
        log(
            WARNING,
            "The model %s draws from what the run's seed does not determine, such as the operating system "
            "or a generator in a variable of a Python module: neither a repetition nor a resumed run has the "
            "same bits. Draw from torch's, NumPy's or Python's global generator, or one that a module keeps.",
            type(model).__name__,
        )
