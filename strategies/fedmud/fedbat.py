"""FedBAT: one bit and a step size a layer, learnt by the clients, and one bit back.

Paper: S. Li et al., "FedBAT: Communication-Efficient Federated Learning via Learnable Binarization", 2024,
and its use in S. Li et al. (FedMUD), Section 5, where the downlink is binarised too.
Ours, where they leave it open: downwards the step size is the layer's mean magnitude, rounding is
stochastic, and the server moves by what it sends, so that it and its nodes hold the same weights. Within a
budget below one bit a weight the weights that move in a round are drawn (``sign_shares.py``).
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
from hedgerow.wire.checks import in_range
from hedgerow.wire.compress import record_payload
from hedgerow.wire.lowrank import LayerShape
from hedgerow.wire.records import PayloadError
from hedgerow.wire.seeds import Purpose, generator
from hedgerow.wire.sign_shares import drawn_weights, signs_by_layer

__all__ = ["FedBAT", "SignUpdates", "binarised", "signed"]

# Published nowhere for this set-up; chosen as in ``factored.py``.
_RATE = 0.03


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
    """FedBAT with one bit a weight both ways, or less.

    Parameters
    ----------
    ratio : float (default: 1 / 32)
        Target of what is sent each way, in (0, 1]. One bit a weight is 1/32 of the compressed layers: above
        it no more is sent, below it that share of the weights moves in a round.
    budget : {"model", "layer"} (default: "model")
        Whether the ratio is the whole model's or that of the compressed layers.
    **options
        See ``CompressedLayers``, also for what is raised.
    """

    def __init__(
        self, *, ratio: float = 1 / 32, budget: str = "model", **options: Unpack[TrainingOptions]
    ) -> None:
        in_range("ratio", ratio, 0.0, 1.0, open_below=True)
        super().__init__(
            Compression("dense", ratio, budget),
            lambda model: SignUpdates(model.compressed, model.seed, model.coded_bits),
            _RATE,
            **options,
        )


class SignUpdates:
    """Weights that server and nodes move by one bit an entry.

    Parameters
    ----------
    layers : Sequence[LayerShape]
        The compressed layers.
    seed : int
        Keys the rounding, and which weights move.
    bits : int or None (default: None)
        Bits of a message; those of one sign a layer at least, and of one a weight at most. None for that.
    """

    update_record = "updates"
    no_sums = "nodes send signs, and a sum of masked ones is as large as one of weights"
    only_mean = "entries are signs drawn by chance, of which the mean alone is near what the nodes learnt"

    def __init__(self, layers: Sequence[LayerShape], seed: int, bits: int | None = None) -> None:
        self.layers = layers
        self.seed = seed
        self._sizes = {layer.key: layer.size for layer in layers}
        size, steps = sum(self._sizes.values()), 32 * len(layers)
        # Where the budget is one bit a weight, the step sizes are on top of it.
        self.signs = size if bits is None or bits >= size else max(0, bits - steps)
        self._counts = signs_by_layer(self._sizes, self.signs)
        self.uplink_bits = self.downlink_bits = sum(self._counts.values()) + steps
        packed = sum(8 * _packed_bytes(count) for count in self._counts.values()) + steps
        self.log = UpdateLog(packed, 32 * size)
        self._shapes = {layer.key: layer.shape for layer in layers}
        self._weights: dict[str, Tensor] = {}

    def begin(self, weights: Mapping[str, Tensor]) -> None:
        """Start from these weights."""
        self._weights = dict(weights)

    def instructions(self) -> dict[str, Scalar]:
        """Return the method's keys of a message's config."""
        return {"method": "fedbat", "signs": self.signs}

    def down(self) -> dict[str, ArrayRecord]:
        """Return nothing: all that changes is in the updates."""
        return {}

    def base(self) -> Mapping[str, Tensor]:
        """Return the weights."""
        return self._weights

    def read(self, server_round: int, client: int, coded: ArrayRecord) -> NDArray[np.float32]:
        """Return a node's update (D,)."""
        payload = record_payload(coded)
        drawn = self._drawn()
        parts = []
        for layer in self.layers:
            signs = _read_layer(layer.key, payload, self._counts[layer.key])
            parts.append(_placed(signs, drawn[layer.key], layer.size))
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
        moved, lost, start, drawn = {}, 0.0, 0, self._drawn()
        for layer in self.layers:
            exact, kept = mean[start : start + layer.size], drawn[layer.key]
            own = exact if kept is None else exact[kept]
            alpha = np.float32(np.abs(own).mean())
            up = binarised(own, float(alpha), stream.random(own.size))
            step = _placed(signed(up, alpha), kept, layer.size)
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
        share = self.signs / sum(self._sizes.values())
        return f"FedBAT, one bit a weight of {share:.3g} of {len(self.layers)} layers both ways"

    def state_dict(self) -> dict[str, Any]:
        """Return the weights, for a checkpoint."""
        return {"weights": arrays(self._weights)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        self._weights = tensors(state["weights"])

    def _drawn(self) -> dict[str, NDArray[np.int64] | None]:
        return drawn_weights(self._sizes, self.signs, seed=self.seed, version=self.log.version)


def _packed_bytes(count: int) -> int:
    return -(-count // 8)


def _placed(values: NDArray[np.float32], kept: NDArray[np.int64] | None, size: int) -> NDArray[np.float32]:
    """Return the values (d,) of the weights that are drawn, zero elsewhere."""
    if kept is None:
        return values
    whole = np.zeros(size, np.float32)
    whole[kept] = values
    return whole


def _read_layer(name: str, payload: Mapping[str, NDArray[Any]], count: int) -> NDArray[np.float32]:
    """Return one layer's signs times step size (count,), of its packed signs and its step size."""
    found = []
    for part, dtype, size in (("bits", np.uint8, _packed_bytes(count)), ("alpha", np.float32, 1)):
        key = f"{name}:{part}"
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
        raise PayloadError("bad scale", f"{name}:alpha is {alpha}, expected a finite number >= 0")
    return signed(np.unpackbits(bits, count=count).view(bool), alpha)
