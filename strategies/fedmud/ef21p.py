"""EF21-P: the server sends the largest entries of what its nodes lack, and keeps the rest for later.

Paper: K. Gruntkowska, A. Tyurin, P. Richtárik, "EF21-P and Friends: Improved Theoretical Communication
Complexity for Distributed Optimization with Bidirectional Compression", 2023: w <- w + C(x - w) downwards
with a contractive C, an unbiased compressor upwards.
Differs: nodes send the change of several local epochs instead of a gradient, as in the experiments of S. Li
et al. (FedMUD); C is Top-K and the uplink Rand-K over all compressed layers at once. The indices of Rand-K
come from the seed, so only values travel; those of Top-K travel, coded (``elias_fano.py``), and are paid for:
within one budget fewer entries go down than up.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from hedgerow.strategies.fedmud.compressed_layers import CompressedLayers, TrainingOptions
from hedgerow.strategies.fedmud.layer_method import Compression, Scalar
from hedgerow.strategies.fedmud.sync import UpdateLog
from hedgerow.strategies.roster import placed
from hedgerow.strategies.vectors import joined, split, weighted_mean
from hedgerow.wire.checks import in_range
from hedgerow.wire.compress import TopK, rand_k
from hedgerow.wire.elias_fano import encode_indices, index_bits, most_entries
from hedgerow.wire.lowrank import LayerShape
from hedgerow.wire.records import Layout, PayloadError

__all__ = ["EF21P", "BroadcastIterate"]

# Published nowhere for this set-up; chosen as in ``factored.py``.
_RATE = 0.03


class EF21P(CompressedLayers):
    """EF21-P with Top-K downwards and Rand-K upwards.

    The global model is the server's iterate x. ``memory-norm`` tells ||x - w|| each round, what the nodes do
    not know yet.

    Parameters
    ----------
    ratio : float (default: 1 / 32)
        Target of what is sent each way, in (0, 1].
    budget : {"model", "layer"} (default: "model")
        Whether the ratio is the whole model's or that of the compressed layers: as many entries travel as it
        pays for with their indices, one at least.
    scale : bool (default: True)
        Whether what Rand-K keeps counts D / K times, which makes it unbiased.
    **options
        See ``CompressedLayers``, also for what is raised.
    """

    def __init__(
        self,
        *,
        ratio: float = 1 / 32,
        budget: str = "model",
        scale: bool = True,
        **options: Unpack[TrainingOptions],
    ) -> None:
        in_range("ratio", ratio, 0.0, 1.0, open_below=True)
        super().__init__(
            Compression("dense", ratio, budget),
            lambda model: BroadcastIterate(model.compressed, model.coded_bits, scale, model.seed),
            _RATE,
            **options,
        )
        # Both sides draw by it which entries a node sends.
        self.federation.admits = placed


class BroadcastIterate:
    """The server's iterate x, and w, which the nodes hold.

    Parameters
    ----------
    layers : Sequence[LayerShape]
        The compressed layers; x and w are their weights one after the other, (D,).
    bits : int
        Bits of a message, either way; less than one entry costs is taken for that.
    scale : bool
        As in ``EF21P``.
    seed : int
        The run's seed.
    """

    update_record = "updates"
    no_sums = "each node sends other entries, so that masks on all of them save nothing"
    only_mean = "each node sends other entries: most of what a rule would compare are zeros that none sent"

    def __init__(self, layers: Sequence[LayerShape], bits: int, scale: bool, seed: int) -> None:
        self.layers = layers
        self.scale = scale
        self.seed = seed
        self.size = sum(layer.size for layer in layers)
        self.keep = min(self.size, max(1, bits // 32))
        self.uplink_bits = 32 * self.keep
        self.largest = most_entries(self.size, bits)
        self.downlink_bits = 32 * self.largest + index_bits(self.size, self.largest)
        self.log = UpdateLog(self.downlink_bits, 32 * self.size)
        self._top = TopK(count=self.largest)
        self._shapes = {layer.key: layer.shape for layer in layers}
        self._x = self._w = np.zeros(0, np.float32)

    def begin(self, weights: Mapping[str, Tensor]) -> None:
        """Start from x = w."""
        self._x = joined(weights, self._shapes)
        self._w = self._x.copy()

    def instructions(self) -> dict[str, Scalar]:
        """Return the method's keys of a message's config."""
        return {"method": "ef21p", "keep": self.keep, "scale": self.scale}

    def down(self) -> dict[str, ArrayRecord]:
        """Return nothing: all that changes is in the updates."""
        return {}

    def base(self) -> Mapping[str, Tensor]:
        """Return w."""
        return split(self._w, self._shapes)

    def read(self, server_round: int, client: int, coded: ArrayRecord) -> NDArray[np.float32]:
        """Return Q(Delta_i), (D,)."""
        values = Layout(("values",), ((self.keep,),), ("float32",)).flatten(coded, np.float32)
        change = np.zeros(self.size, np.float32)
        with np.errstate(over="ignore"):  # What overflows is infinite, and found below.
            factor = np.float32(self.size / self.keep if self.scale else 1.0)
            kept = rand_k(self.size, self.keep, seed=self.seed, round=server_round, partition_id=client)
            change[kept] = factor * values
        if not np.isfinite(change).all():
            raise PayloadError("non-finite", "a value overflows when it is scaled")
        return change

    def moved(self, read: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return what was read, a change, and x."""
        return read, self._x

    def mean(self, uplinks: Iterable[tuple[float, NDArray[np.float32]]]) -> NDArray[np.float64] | None:
        """Return the mean of Q(Delta_i), (D,)."""
        return weighted_mean(uplinks)

    def move(self, server_round: int, mean: Any) -> dict[str, float]:
        """Move x by the mean, and w by the largest entries of x - w."""
        self._x = (self._x + mean).astype(np.float32)
        largest = self._top.encode(self._x - self._w)
        self._w = self._w.copy()
        self._w[largest["indices"]] += largest["values"]
        coded = encode_indices(largest["indices"], self.size)
        self.log.append({"indices": coded, "values": largest["values"]})
        return {"memory-norm": float(np.linalg.norm(self._x - self._w))}

    def weights(self) -> Mapping[str, Tensor]:
        """Return x."""
        return split(self._x, self._shapes)

    def describe(self) -> str:
        """Return the settings in one line."""
        scaled = f" times {self.size / self.keep:g}" if self.scale else ""
        return f"EF21-P, of {self.size} entries Top-{self.largest} down, Rand-{self.keep}{scaled} up"

    def state_dict(self) -> dict[str, Any]:
        """Return x and w, for a checkpoint."""
        return {"x": self._x, "w": self._w}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        self._x, self._w = np.array(state["x"]), np.array(state["w"])
