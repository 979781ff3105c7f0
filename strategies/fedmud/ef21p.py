"""EF21-P: the server sends the largest entries of the difference to its nodes' weights, the rest later.

Paper: K. Gruntkowska, A. Tyurin, P. Richtárik, "EF21-P and Friends: Improved Theoretical Communication
Complexity for Distributed Optimization with Bidirectional Compression", 2023: w <- w + C(x - w) downwards
with a contractive C, an unbiased compressor upwards.
Differs: nodes send the change of several local epochs instead of a gradient, as in the experiments of S. Li
et al. (FedMUD); C is Top-K and the uplink Rand-K over all compressed layers at once. The indices of Rand-K
come from the seed, so only values are sent; those of Top-K are sent, coded (``elias_fano.py``), and counted:
within one budget fewer entries are sent down than up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Steps, Vector
from hedgerow.strategies.fedmud.codings import Coded
from hedgerow.strategies.fedmud.compressed_layers import TrainingOptions, WithoutFactors
from hedgerow.strategies.node import placed
from hedgerow.strategies.parts import UpdateLog
from hedgerow.wire.compress import TopK, rand_k
from hedgerow.wire.elias_fano import added, most_entries
from hedgerow.wire.layers import LayerShape
from hedgerow.wire.records import Layout, PayloadError


@dataclass(frozen=True, eq=False)
class State:
    """The uncompressed part theta (d,), the server's iterate x (D,), and the nodes' weights w (D,)."""

    theta: Vector
    x: Vector
    w: Vector


class EF21P(WithoutFactors[State]):
    """EF21-P with Top-K downwards and Rand-K upwards.

    The global model is the server's iterate x. ``memory-norm`` reports ||x - w|| each round, the part that
    the nodes do not know yet.

    Parameters
    ----------
    ratio : float (default: 1 / 32)
        Target size of messages each way, in (0, 1].
    budget : {"model", "layer"} (default: "model")
        Whether the ratio is of the whole model or of the compressed layers. It pays for entries and their
        indices, at least one.
    scale : bool (default: True)
        Scale the entries kept by Rand-K by D / K, which makes it unbiased.
    **options
        See ``CompressedLayers``.
    """

    state_class = State
    no_sums = "each node sends other entries, so that masks on all of them save nothing"
    only_mean = "each node sends other entries: most of what a rule would compare are zeros that none sent"

    def __init__(
        self,
        *,
        ratio: float = 1 / 32,
        budget: str = "model",
        scale: bool = True,
        **options: Unpack[TrainingOptions],
    ) -> None:
        self.scale = scale
        super().__init__(ratio, budget, **options)
        # Both sides draw a node's entries by its place.
        self.federation.members.admits = placed

    def _coded(self, layers: Sequence[LayerShape]) -> Sequence[LayerShape]:
        self.coded = super()._coded(layers)
        self.keep = min(self.size, max(1, self.budget_bits // 32))
        self.largest = most_entries(self.size, self.budget_bits)
        return self.coded

    @property
    def coded_bits(self) -> tuple[int, int]:
        """The nominal bits of K values, and of the largest entries with their indices."""
        return 32 * self.keep, TopK(count=self.largest).bits(self.size)

    @property
    def least_bits(self) -> int:
        """The bits of one entry with its index."""
        return TopK(count=1).bits(self.size)

    def log(self) -> UpdateLog:
        """Return an empty log of sparse updates."""
        return UpdateLog(self.coded_bits[1], 32 * self.size)

    def begin(self, model: Vector) -> State:
        """Start from x = w."""
        theta, weights = self.parted(model)
        return State(theta, weights, weights)

    def round(self, state: State, run: RoundContext) -> Steps[State]:
        """Move x by the mean of Q(Delta_i), and w by the largest entries of x - w."""
        values = Layout(("values",), ((self.keep,),), ("float32",))

        def unbiased(coded: ArrayRecord, node: int) -> NDArray[np.float32]:  # Q(Delta_i)
            change, sent = np.zeros(self.size, np.float32), values.flatten(coded, np.float32)
            with np.errstate(over="ignore"):  # An overflow is infinite, and found below.
                factor = np.float32(self.size / self.keep if self.scale else 1.0)
                kept = rand_k(self.size, self.keep, seed=run.seed, round=run.round, partition_id=node)
                change[kept] = factor * sent
            if not np.isfinite(change).all():
                raise PayloadError("non-finite", "a value overflows when it is scaled")
            return change

        train = self.training(
            run,
            state.theta,
            np.zeros(self.size, np.float32),
            Coded(self.rest, self.uplink_bits, unbiased),
            base=state.w,
            keys={"method": "ef21p", "keep": self.keep, "scale": self.scale},
            near=state.x,
        )
        mean = (yield from self.means(train, run)).get(0)
        if mean is None:
            return state
        theta, change = self.halved(mean.model())
        x = (state.x + change).astype(np.float32)
        run.update = TopK(count=self.largest).encode(x - state.w)  # C(x - w)
        w = added(state.w, run.update)
        run.metrics["memory-norm"] = float(np.linalg.norm(x - w))
        return State(theta, x, w)

    def model(self, state: State) -> Vector:
        """Return theta and x."""
        return self.whole(state.theta, state.x)

    def describe(self) -> str:
        """Return the settings in one line."""
        scaled = f" times {self.size / self.keep:g}" if self.scale else ""
        return f"EF21-P, of {self.size} entries Top-{self.largest} down, Rand-{self.keep}{scaled} up"
