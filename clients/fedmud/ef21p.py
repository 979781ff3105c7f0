"""EF21-P at a node: it trains from the iterate that it was sent, and returns K entries of the change.

Paper: K. Gruntkowska, A. Tyurin, P. Richtárik, "EF21-P and Friends: Improved Theoretical Communication
Complexity for Distributed Optimization with Bidirectional Compression", 2023: nodes hold w, which moves by
the server's Top-K of x - w; their own messages are compressed without bias. As in the experiments of S. Li et
al. (FedMUD), what is compressed is the change of several local epochs. The indices of Rand-K come from the
seed, so that values alone travel; the server scales them by D / K where they shall be unbiased.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hedgerow.clients.training.work import State
from hedgerow.wire.elias_fano import decode_indices

__all__ = ["moved_by_largest", "random_values"]


def random_values(start: Mapping[str, Tensor], end: Mapping[str, Tensor], kept: NDArray[np.int64]) -> Tensor:
    """Return the entries (K,) of end - start that are kept, float32, unscaled.

    Parameters
    ----------
    start, end : Mapping[str, Tensor]
        Weights; those of ``start`` one after the other are what ``kept`` indexes.
    kept : NDArray[int64]
        Indices (K,).
    """
    change = torch.cat([(end[key] - start[key].to(end[key])).flatten() for key in start])
    return change[torch.from_numpy(kept).to(change.device)].to(torch.float32)


def moved_by_largest(weights: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> State:
    """Return w + p: the sparse update of the server, added to the weights one after the other.

    Parameters
    ----------
    weights : Mapping[str, Tensor]
        w, float32 on the CPU.
    update : Mapping[str, Tensor]
        ``indices``, as ``encode_indices`` codes them, and ``values`` (K,).

    Raises
    ------
    ValueError
        If the update is none of these weights.
    """
    moved = torch.cat([value.flatten() for value in weights.values()])
    indices, values = _sparse(update, len(moved))
    moved[indices] += values
    parts = torch.split(moved, [value.numel() for value in weights.values()])
    return {key: part.reshape(weights[key].shape) for key, part in zip(weights, parts, strict=True)}


def _sparse(update: Mapping[str, Tensor], size: int) -> tuple[Tensor, Tensor]:
    if update.keys() != {"indices", "values"}:
        raise ValueError(f"the update has the keys {sorted(update)}; valid is ['indices', 'values']")
    coded, values = update["indices"], update["values"]
    if values.dtype != torch.float32 or values.dim() != 1 or len(values) > size:
        raise ValueError(
            f"values are {values.dtype} of shape {tuple(values.shape)}; valid is float32 (K,), K up to {size}"
        )
    return torch.from_numpy(decode_indices(coded.numpy(), len(values), size)), values
