"""FedBAT: one bit and a step size a layer, learnt by the clients, and one bit back.

Paper: S. Li et al., "FedBAT: Communication-Efficient Federated Learning via Learnable Binarization", 2024,
and its use in Y. Li et al. (FedMUD), Section 6, where the downlink is binarised too.
Ours, where they leave it open: downwards the step size is the layer's mean magnitude, rounding is
stochastic, and the server moves by what it sends, so that it and its nodes hold the same weights.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from hedgerow.strategies.fedmud.compressed_layers import CompressedLayers, TrainingOptions
from hedgerow.strategies.fedmud.layer_method import Compression, Scalar
from hedgerow.strategies.fedmud.sync import UpdateLog
from hedgerow.strategies.vectors import arrays, joined, tensors, weighted_mean
from hedgerow.wire.compress import record_payload
from hedgerow.wire.lowrank import LayerShape
from hedgerow.wire.records import PayloadError
from hedgerow.wire.seeds import Purpose, generator

__all__ = ["FedBAT", "SignUpdates", "binarised", "signed"]


def binarised(x: NDArray[Any], alpha: float, uniform: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return where S(x, alpha) is +alpha; elsewhere it is -alpha.

    S is +alpha with probability clip((x / alpha + 1) / 2, 0, 1): unbiased for entries in [-alpha, alpha], and
    +-alpha beyond.

    Parameters
    ----------
    x : NDArray
        The entries (d,).
    alpha : float
        The step size, >= 0.
    uniform : NDArray
        Draws (d,) from [0, 1).
    """
    probability = (x / alpha + 1) / 2 if alpha > 0 else np.full(x.shape, 0.5)
    up: NDArray[np.bool_] = uniform < probability
    return up


def signed(up: NDArray[np.bool_], alpha: np.float32) -> NDArray[np.float32]:
    """Return +alpha where ``up``, else -alpha."""
    return np.where(up, alpha, -alpha)


class FedBAT(CompressedLayers):
    """FedBAT with one bit a weight both ways.

    Parameters
    ----------
    **options
        See ``CompressedLayers``, also for what is raised.
    """

    def __init__(self, **options: Unpack[TrainingOptions]) -> None:
        compression = Compression("dense", 1 / 32, "layer")
        super().__init__(compression, lambda model: SignUpdates(model.compressed, model.seed), **options)


class SignUpdates:
    """Weights that server and nodes move by one bit an entry.

    Parameters
    ----------
    layers : Sequence[LayerShape]
        The compressed layers.
    seed : int
        Keys the rounding.
    """

    update_record = "updates"
    no_sums = "nodes send signs, and a sum of masked ones is as large as one of weights"
    only_mean = "entries are signs drawn by chance, of which the mean alone is near what the nodes learnt"

    def __init__(self, layers: Sequence[LayerShape], seed: int) -> None:
        self.layers = layers
        self.seed = seed
        size = sum(layer.size for layer in layers)
        self.bits = size + 32 * len(layers)
        packed = sum(8 * _packed_bytes(layer) + 32 for layer in layers)
        self.log = UpdateLog(packed, 32 * size)
        self._shapes = {layer.key: layer.shape for layer in layers}
        self._weights: dict[str, Tensor] = {}

    def begin(self, weights: Mapping[str, Tensor]) -> None:
        """Start from these weights."""
        self._weights = dict(weights)

    def instructions(self) -> dict[str, Scalar]:
        """Return the method's keys of a message's config."""
        return {"method": "fedbat"}

    def down(self) -> dict[str, ArrayRecord]:
        """Return nothing: all that changes is in the updates."""
        return {}

    def base(self) -> Mapping[str, Tensor]:
        """Return the weights."""
        return self._weights

    def read(self, server_round: int, client: int, coded: ArrayRecord) -> NDArray[np.float32]:
        """Return a node's update (D,)."""
        payload = record_payload(coded)
        parts = [_read_layer(layer, payload) for layer in self.layers]
        if len(payload) != 2 * len(parts):
            raise PayloadError("unknown key", f"one of {sorted(payload)}")
        return np.concatenate(parts)

    def moved(self, read: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return what was read, a change, and the weights."""
        return read, joined(self._weights, self._shapes)

    def mean(self, uplinks: Iterable[tuple[float, NDArray[np.float32]]]) -> NDArray[np.float64] | None:
        """Return the mean update (D,)."""
        return weighted_mean(uplinks)

    def move(self, server_round: int, mean: Any) -> dict[str, float]:
        """Move by the mean update, binarised layer by layer with alpha = mean |M|."""
        stream = generator(self.seed, round=server_round, purpose=Purpose.COMPRESSION)
        update: dict[str, NDArray[Any]] = {}
        moved, lost, start = {}, 0.0, 0
        for layer in self.layers:
            exact = mean[start : start + layer.size]
            alpha = np.float32(np.abs(exact).mean())
            up = binarised(exact, float(alpha), stream.random(layer.size))
            step = signed(up, alpha)
            moved[layer.key] = self._weights[layer.key] + torch.from_numpy(step).reshape(layer.shape)
            update |= {f"{layer.key}:bits": np.packbits(up), f"{layer.key}:alpha": np.array([alpha])}
            lost += float(np.square(exact - step).sum())
            start += layer.size
        self._weights = moved
        self.log.append(update)
        return {"quantisation-error": lost**0.5}

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights."""
        return self._weights

    def describe(self) -> str:
        """Return the settings in one line."""
        return f"FedBAT, one bit a weight of {len(self.layers)} layers both ways"

    def state_dict(self) -> dict[str, Any]:
        """Return the weights, for a checkpoint."""
        return {"weights": arrays(self._weights)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        self._weights = tensors(state["weights"])


def _packed_bytes(layer: LayerShape) -> int:
    return -(-layer.size // 8)


def _read_layer(layer: LayerShape, payload: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    """Return one layer's update (d,) of its packed signs and its step size."""
    found = []
    for part, dtype, size in (("bits", np.uint8, _packed_bytes(layer)), ("alpha", np.float32, 1)):
        key = f"{layer.key}:{part}"
        if key not in payload:
            raise PayloadError("missing key", repr(key))
        array = payload[key]
        if array.dtype != dtype:
            raise PayloadError("wrong dtype", f"{key!r} is {array.dtype}, expected {np.dtype(dtype)}")
        if array.size != size:
            raise PayloadError("wrong shape", f"{key!r} has {array.shape}, expected ({size},)")
        found.append(array.ravel())
    bits, (alpha,) = found
    if not np.isfinite(alpha) or alpha < 0:
        raise PayloadError("bad scale", f"{layer.key}:alpha is {alpha}, expected a finite number >= 0")
    return signed(np.unpackbits(bits, count=layer.size).view(bool), alpha)
