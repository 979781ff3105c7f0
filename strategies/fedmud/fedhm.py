"""FedHM: clients train the weights truncated to their largest singular values; the server averages products.

Paper: D. Yao et al., "FedHM: Efficient Federated Learning for Heterogeneous Models via Low-rank
Factorization", 2021. Differs: a convolution is the same matrix as in FedMUD, the weight's buffer row by row,
unless FedHM's own view is chosen; clients train without its Frobenius decay. Nodes are stateless.
"""

from dataclasses import dataclass
from typing import Unpack

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Steps, Vector
from hedgerow.strategies.fedmud.codings import Coded, Factors
from hedgerow.strategies.fedmud.compressed_layers import (
    BASELINE_RATE,
    CompressedLayers,
    Compression,
    TrainingOptions,
)
from hedgerow.strategies.vectors import joined, split
from hedgerow.wire.extras import needed
from hedgerow.wire.records import to_record


@dataclass(frozen=True, eq=False)
class State:
    """The uncompressed part theta (d,), the dense weights W (D,), and their truncation, U and V (C,)."""

    theta: Vector
    weights: Vector
    factors: Vector


class FedHM(CompressedLayers[State]):
    """FedHM: clients train the largest singular values of the server's dense weights.

    The mean of the factors' products is exact; ``truncation-error`` reports each round what the next
    truncation cuts off. The global model is the dense one, before truncation.

    Parameters
    ----------
    ratio, budget
        As in ``FedMUD``.
    view : {"buffer", "convolutions"} (default: "buffer")
        As in ``TrainedFactors``.
    **options
        See ``CompressedLayers``.
    """

    state_class = State
    no_sums = "the mean is of what each reply's factors multiply to, which no sum of factors gives"

    def __init__(
        self,
        *,
        ratio: float = 1 / 32,
        budget: str = "model",
        view: str = "buffer",
        **options: Unpack[TrainingOptions],
    ) -> None:
        super().__init__(Compression("lmt", ratio, budget, view=view), BASELINE_RATE, **options)

    def begin(self, model: Vector) -> State:
        """Return theta^0, W^0 and its truncation."""
        theta, weights = self.parted(model)
        return State(theta, weights, self._truncated(weights))

    def round(self, state: State, run: RoundContext) -> Steps[State]:
        """Send U and V of rank r, and average the replies' products."""
        factors = Factors(self.rest, self.uplink_bits, self.plan, {})

        def weights(coded: ArrayRecord, node: int) -> NDArray[np.float32]:
            return self._given(factors.decode(coded, node))

        train = self.training(
            run,
            state.theta,
            self._given(state.factors),
            Coded(self.rest, self.uplink_bits, weights),
            records={"factors": to_record(split(state.factors, self.plan.shapes))},
            keys={"method": "factored"},
        )
        mean = (yield from self.means(train, run)).get(0)
        if mean is None:
            return state
        theta, averaged = self.halved(mean.model())
        W = averaged.astype(np.float32)
        cut = self._truncated(W)
        run.metrics["truncation-error"] = float(np.linalg.norm(W - self._given(cut)))
        return State(theta, W, cut)

    def model(self, state: State) -> Vector:
        """Return theta and the dense weights."""
        return self.whole(state.theta, state.weights)

    def describe(self) -> str:
        """Return the settings in one line."""
        return f"singular values of {len(self.coded)} layers, C = {self.plan.count}"

    def _given(self, factors: Vector) -> NDArray[np.float32]:
        return self.flat(self.plan.deltas(split(factors, self.plan.shapes), {}))

    def _truncated(self, weights: Vector) -> Vector:
        factors: dict[str, Tensor] = {}
        for layer, weight in zip(self.plan.layers, self.by_layer(weights).values(), strict=True):
            u, v = truncated(layer.as_matrix(weight), layer.rank)
            factors |= {f"{layer.key}:U": u, f"{layer.key}:V": v}
        return joined(factors, self.plan.shapes)


def truncated(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the factors U (m, r) and V (r, n), float32, of a matrix (m, n).

    U V is the best approximation of rank r >= 1; both factors have the roots of the singular values. Columns
    beyond min(m, n) are zero.
    """
    tall = matrix.double().numpy() if len(matrix) >= matrix.shape[1] else matrix.T.double().numpy()
    size = tall.shape[1]
    kept = min(rank, size)
    # The leading right singular vectors from the smaller Gram matrix take a tenth of the time of a full SVD.
    eigh = needed("scipy.linalg", "math").eigh
    _, vectors = eigh(tall.T @ tall, subset_by_index=(size - kept, size - 1))
    scaled = tall @ vectors  # (larger side, kept), columns of norm s_j
    roots = np.sqrt(np.linalg.norm(scaled, axis=0))
    long, short = np.zeros((len(tall), rank), np.float32), np.zeros((size, rank), np.float32)
    long[:, :kept] = np.divide(scaled, roots, where=roots > 0, out=np.zeros_like(scaled))
    short[:, :kept] = vectors * roots
    u, v = (long, short) if len(matrix) >= matrix.shape[1] else (short, long)
    return torch.from_numpy(u), torch.from_numpy(np.ascontiguousarray(v.T))
