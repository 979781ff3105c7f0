"""FedBAT: one bit per weight and a learnt step size per layer upwards, and one bit per weight downwards.

Paper: S. Li et al., "FedBAT: Communication-Efficient Federated Learning via Learnable Binarization", 2024,
and its use in S. Li et al. (FedMUD), Section 5, where the downlink is binarised too.
Ours, as the papers leave it open: the downlink's step size is the layer's mean magnitude, its rounding is
stochastic, and the server moves by the update it sends, so that server and nodes hold the same weights. If
the budget is below one bit per weight, each round draws the weights that move (``sign_shares.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Steps, Vector
from hedgerow.strategies.fedmud.codings import Coded
from hedgerow.strategies.fedmud.compressed_layers import TrainingOptions, WithoutFactors
from hedgerow.strategies.parts import UpdateLog
from hedgerow.wire.compress import record_payload
from hedgerow.wire.layers import LayerShape
from hedgerow.wire.seeds import Purpose, generator
from hedgerow.wire.sign_shares import SignUpdates, signed


def binarised(x: NDArray[Any], alpha: float, uniform: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return the mask (d,) of S(x, alpha) = +alpha; S is -alpha elsewhere.

    S is +alpha with probability clip((x / alpha + 1) / 2, 0, 1): unbiased for entries in [-alpha, alpha], and
    +-alpha beyond. alpha >= 0, and ``uniform`` (d,) is drawn from [0, 1).
    """
    probability = (x / alpha + 1) / 2 if alpha > 0 else np.full(x.shape, 0.5)
    up: NDArray[np.bool_] = uniform < probability
    return up


@dataclass(frozen=True, eq=False)
class State:
    """The uncompressed part theta (d,), the weights w (D,), and how often they moved."""

    theta: Vector
    weights: Vector
    moves: int = 0


class FedBAT(WithoutFactors[State]):
    """FedBAT with at most one bit per weight, both ways.

    ``quantisation-error`` reports each round the distance of the sent update from the mean update.

    Parameters
    ----------
    ratio : float (default: 1 / 32)
        Target size of messages each way, in (0, 1]. One bit per weight is 1/32 of the compressed layers; a
        larger ratio sends no more, a smaller one moves that share of the weights in a round.
    budget : {"model", "layer"} (default: "model")
        Whether the ratio is of the whole model or of the compressed layers.
    **options
        See ``CompressedLayers``.
    """

    state_class = State
    no_sums = "nodes send signs, and a sum of masked ones is as large as one of weights"
    only_mean = "entries are signs drawn by chance, of which the mean alone is near what the nodes learnt"

    def __init__(
        self, *, ratio: float = 1 / 32, budget: str = "model", **options: Unpack[TrainingOptions]
    ) -> None:
        super().__init__(ratio, budget, **options)

    def _coded(self, layers: Sequence[LayerShape]) -> Sequence[LayerShape]:
        self.coded = super()._coded(layers)
        bits = self.budget_bits
        # A budget of one bit per weight does not include the step sizes.
        signs = self.size if bits >= self.size else max(0, bits - 32 * len(self.coded))
        self.code = SignUpdates({layer.key: layer.size for layer in self.coded}, signs, self.seed)
        return self.coded

    @property
    def coded_bits(self) -> tuple[int, int]:
        """The nominal bits of the signs and of one step size per layer, either way."""
        return self.code.bits, self.code.bits

    @property
    def least_bits(self) -> int:
        """The bits of one sign and one step size per layer, or of one per weight without step sizes."""
        return min(self.size, 33 * len(self.coded))

    def log(self) -> UpdateLog:
        """Return an empty log of updates of packed signs."""
        return UpdateLog(self.code.packed_bits, 32 * self.size)

    def unbuffered(self) -> str | None:
        """Return why a buffer cannot hold the replies, if a round draws the weights that move."""
        drawn = self.code.signs < self.size
        return "each round draws the weights that move, and earlier replies are of others" if drawn else None

    def begin(self, model: Vector) -> State:
        """Return theta^0 and w^0."""
        return State(*self.parted(model))

    def round(self, state: State, run: RoundContext) -> Steps[State]:
        """Average the signs times step sizes to M, and move by M binarized with alpha = mean |M|."""
        drawn = self.code.drawn(state.moves)

        def update(coded: ArrayRecord, node: int) -> NDArray[np.float32]:
            return np.concatenate(list(self.code.read(record_payload(coded), state.moves).values()))

        train = self.training(
            run,
            state.theta,
            np.zeros(self.size, np.float32),
            Coded(self.rest, self.uplink_bits, update),
            base=state.weights,
            keys={"method": "fedbat", "signs": self.code.signs},
            near=state.weights,
        )
        mean = (yield from self.means(train, run)).get(0)
        if mean is None:
            return state
        theta, exact = self.halved(mean.model())
        stream = generator(run.seed, round=run.round, purpose=Purpose.COMPRESSION)
        sent, steps, start, lost = dict[str, NDArray[Any]](), list[NDArray[np.float32]](), 0, 0.0
        for key, size in self.code.sizes.items():
            M, kept = exact[start : start + size], drawn[key]
            own = M if kept is None else M[kept]
            alpha = np.float32(np.abs(own).mean())
            up = binarised(own, float(alpha), stream.random(own.size))
            steps.append(self.code.placed(key, signed(up, alpha), state.moves))
            sent |= {f"{key}:bits": np.packbits(up), f"{key}:alpha": np.array([alpha])}
            lost += float(np.square(M - steps[-1]).sum())
            start += size
        run.update, run.metrics["quantisation-error"] = sent, lost**0.5
        return State(theta, state.weights + np.concatenate(steps), state.moves + 1)

    def model(self, state: State) -> Vector:
        """Return theta and w."""
        return self.whole(state.theta, state.weights)

    def describe(self) -> str:
        """Return the settings in one line."""
        share = self.code.signs / self.size
        return f"FedBAT, one bit a weight of {share:.3g} of {len(self.coded)} layers both ways"
