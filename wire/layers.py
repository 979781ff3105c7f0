"""The layers of a model whose weights can be factored, and the matrix of each weight.

Paper: S. Li et al., "The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient Federated
Learning" (FedMUD), Section 3. The paper does not say how a convolution becomes a matrix: here the row-major
buffer is read as (out * height) x (in * width), without a permutation of axes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn


@dataclass(frozen=True)
class LayerShape:
    """A weight that can be factored.

    Parameters
    ----------
    key : str
        The weight's key in the model's state dict.
    shape : tuple of int
        (out, in) of a linear layer, or (out, in / groups, height, width) of a convolution.

    Attributes
    ----------
    m, n : int
        Rows and columns of the weight's matrix.
    size : int
        Entries of the weight, m n.

    Raises
    ------
    ValueError
        If the shape has neither two nor four positive lengths.
    """

    key: str
    shape: tuple[int, ...]
    m: int = field(init=False, repr=False, compare=False)
    n: int = field(init=False, repr=False, compare=False)
    size: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the shape, and derive the sizes."""
        if len(self.shape) not in (2, 4) or min(self.shape) < 1:
            raise ValueError(
                f"{self.key} must have the shape (out, in) or (out, in, height, width), got {self.shape}"
            )
        m, n = math.prod(self.shape[::2]), math.prod(self.shape[1::2])
        derive(self, m=m, n=n, size=m * n)


def derive(one: object, **values: object) -> None:
    """Set what follows from the other fields of a frozen dataclass; called by its ``__post_init__``."""
    for name, value in values.items():
        object.__setattr__(one, name, value)


def layers_of(model: nn.Module, names: str = "") -> tuple[LayerShape, ...]:
    """Return the weights to factor, in the order of the model's parameters.

    - ``names``: Patterns with commas, such as ``*.query,*.value``, of weights' keys or of their modules'
      names. Each weight that is a matrix or a convolution's and matches one is returned, of any module and
      also if it is frozen: naming it trains it through its factors. Without names, all trained weights of
      ``Linear`` and ``Conv2d`` are.

    A ValueError if a pattern matches no such weight, or a named weight is shared by two modules.
    """
    keys: dict[int, list[str]] = {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        keys.setdefault(id(parameter), []).append(key)
    if names:
        return _named(model, names, {key: own for own in keys.values() for key in own})
    layers = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Conv2d):
            continue
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is not None and weight.requires_grad and len(keys[id(weight)]) == 1:
            layers.append(LayerShape(f"{name}.weight".lstrip("."), tuple(weight.shape)))
    return tuple(layers)


def _named(model: nn.Module, names: str, same: Mapping[str, list[str]]) -> tuple[LayerShape, ...]:
    """Return the weights that match; ``same`` has all keys of each parameter."""
    weights = {key: tuple(p.shape) for key, p in model.named_parameters() if p.ndim in (2, 4)}
    found: dict[str, tuple[int, ...]] = {}
    for pattern in filter(None, map(str.strip, names.split(","))):
        matching = [key for key in weights if fnmatchcase(key, pattern) or fnmatchcase(_module(key), pattern)]
        if not matching:
            likely = get_close_matches(pattern, [*weights, *map(_module, weights)], 1, 0)
            raise ValueError(
                f"layers must match a matrix or a convolution of the model, got {pattern!r}; it has "
                f"{len(weights)}, such as {likely[0] if likely else None}"
            )
        found.update((key, weights[key]) for key in matching)
    for key in found:
        if len(same[key]) > 1:
            raise ValueError(f"layers must not be shared by modules, got {' and '.join(same[key])}")
    return tuple(LayerShape(key, shape) for key, shape in weights.items() if key in found)


def _module(key: str) -> str:
    return key.rpartition(".")[0]


def held_layers(model: nn.Module, keys: Sequence[str]) -> tuple[LayerShape, ...]:
    """Return the weights with these keys; ValueError if the model lacks one, or a key is there twice."""
    parameters = dict(model.named_parameters())
    for key in keys:
        if key not in parameters or keys.count(key) > 1:
            raise ValueError(
                f"layers must be different weights of this node's model, got {key!r} in the message's config"
            )
    return tuple(LayerShape(key, tuple(parameters[key].shape)) for key in keys)


def trained_numbers(model: nn.Module, layers: Sequence[LayerShape]) -> int:
    """Return how many numbers dense training changes: those of ``layers`` and all others that are trained."""
    factored = {layer.key for layer in layers}
    return sum(p.numel() for key, p in model.named_parameters() if p.requires_grad or key in factored)
