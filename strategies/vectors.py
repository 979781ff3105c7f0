"""Tensors as one vector and back, and vectors that stay on a GPU."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class DeviceRows(Sequence[Any]):
    """Rows (K, M) on their device; the first access to one copies all to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, at: Any) -> Any:
        return self._host[at]

    @cached_property
    def _host(self) -> NDArray[Any]:
        return self.tensor.numpy(force=True)


def joined(parts: Mapping[str, Tensor], keys: Iterable[str]) -> NDArray[np.float32]:
    """Return the tensors of these keys, in this order, as one new vector."""
    vectors = [parts[key].detach().numpy().ravel() for key in keys]
    return np.concatenate([np.zeros(0, np.float32), *vectors])


def split(vector: NDArray[Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return a vector as new float32 tensors of these shapes: the inverse of ``joined``."""
    parts, start = {}, 0
    for key, shape in shapes.items():
        values = vector[start : start + prod(shape)].reshape(shape)
        parts[key] = torch.from_numpy(values.astype(np.float32))
        start += prod(shape)
    return parts
