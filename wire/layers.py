"""The layers of a model whose weights can be factored, and the matrix of each weight.

Paper: S. Li et al., "The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient Federated
Learning" (FedMUD), Section 3. The paper does not say how a convolution becomes a matrix: here the row-major
buffer is read as (out * height) x (in * width), without a permutation of axes.
"""

import math
from dataclasses import dataclass, field

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


def layers_of(model: nn.Module) -> tuple[LayerShape, ...]:
    """Return every trainable weight of a ``Linear`` or ``Conv2d``, in module order."""
    return _survey(model)[0]


def not_compressible(model: nn.Module) -> dict[str, str]:
    """Return, for each other module with parameters, why they are sent uncompressed."""
    return _survey(model)[1]


def _survey(model: nn.Module) -> tuple[tuple[LayerShape, ...], dict[str, str]]:
    layers: list[LayerShape] = []
    reasons: dict[str, str] = {}
    keys: dict[int, list[str]] = {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        keys.setdefault(id(parameter), []).append(key)
    for name, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        if not parameters:
            continue
        weight = parameters.get("weight")
        key = f"{name}.weight".lstrip(".")
        if not isinstance(module, nn.Linear | nn.Conv2d):
            reasons[name] = f"{type(module).__name__} is neither Linear nor Conv2d"
        elif weight is None:
            reasons[name] = "its weight is computed from other parameters"
        elif not weight.requires_grad:
            reasons[name] = "its weight is not trained"
        elif others := [one for one in keys[id(weight)] if one != key]:
            reasons[name] = f"its weight is also {others[0]}"
        else:
            layers.append(LayerShape(key, tuple(weight.shape)))
    return tuple(layers), reasons
