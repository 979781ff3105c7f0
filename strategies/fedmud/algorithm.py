"""FedMUD: clients train low-rank updates of a frozen base, whose factors are averaged and merged.

Paper: S. Li et al., "The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient Federated
Learning", eqs. (3) to (9): model updates as factors, merged every s rounds; with Kronecker blocks (BKD) and
with one frozen factor to each trained one (AAD). Without a base factors are the weights: FedLMT, FedPara.
Differs: the server merges right after it has averaged, and nodes replay its merges; in the authors' code they
merge at the start of the next round. The two are equal up to rounding.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from hedgerow.strategies.exchange import Steps, Vector
from hedgerow.strategies.fedmud.codings import Factors
from hedgerow.strategies.fedmud.compressed_layers import CompressedLayers
from hedgerow.strategies.run import Run
from hedgerow.strategies.vectors import joined, split
from hedgerow.wire.records import to_record

__all__ = ["FactorAveraging", "State"]


@dataclass(frozen=True, eq=False)
class State:
    """What the server knows after a round."""

    # All that is not compressed (d,); W of the compressed layers (D,), empty where there is none; F (C,).
    theta: Vector
    base: Vector
    factors: Vector
    # nu, by which factors are drawn: how often F was merged into W; and the rounds since.
    resets: int = 0
    age: int = 0


class FactorAveraging(CompressedLayers[State]):
    """The algorithm; a subclass says of which factors, and how often they are merged."""

    state_class = State
    # s; None for never.
    reset_interval: int | None = None

    def begin(self, model: Vector) -> State:
        """Return W^0, the factors of the first draw, and theta^0."""
        theta, weights = self.parted(model)
        base = weights if self.plan.has_base else np.zeros(0, np.float32)
        return State(theta, base, self._drawn(0))

    def round(self, state: State, run: Run) -> Steps[State]:
        """Have the participants train F and theta, average them, and merge F every s rounds."""
        fresh = self.plan.has_base and not state.age
        F = split(state.factors, self.plan.shapes)
        train = self.training(
            run,
            state.theta,
            state.factors,
            Factors(self.rest, self.uplink_bits, self.plan, self._frozen(state)),  # (3), (8)
            # Fresh factors are drawn by nodes too.
            records={} if fresh or not F else {"factors": to_record(F)},
            base=state.base,
            told={"method": "factored" if self.plan.layers else "dense"},
        )
        mean = (yield from self.means(train, run)).get(0)
        if mean is None:
            return state
        theta, factors = self.halved(mean.model())  # (4)
        factors = factors.astype(np.float32)
        averaged = replace(state, theta=theta, factors=factors, age=state.age + 1)
        if averaged.age != self.reset_interval:
            return averaged
        run.update = split(factors, self.plan.shapes)
        nu = state.resets + 1
        return State(theta, self._weights(averaged), self._drawn(nu), nu)  # (5)

    def model(self, state: State) -> Vector:
        """Return theta, and W + Delta, or what F stands for where there is no W."""
        unmerged = state.age or not self.plan.has_base
        return self.whole(state.theta, self._weights(state) if unmerged else state.base)

    def _weights(self, state: State) -> Vector:
        base, F = self.by_layer(state.base), split(state.factors, self.plan.shapes)
        return self.flat(self.plan.merge(base, F, self._frozen(state)))

    def _drawn(self, resets: int) -> Vector:
        return joined(self.plan.init(self.settings.seed, resets), self.plan.shapes)

    def _frozen(self, state: State) -> Mapping[str, Tensor]:
        return self.plan.frozen(self.settings.seed, state.resets)
