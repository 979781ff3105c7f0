"""FedMUD: clients train low-rank updates of a frozen base; the server averages and merges the factors.

Paper: S. Li et al., "The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient Federated
Learning", eqs. (3) to (9): model updates as factors, merged every s rounds; with Kronecker blocks (BKD) and
with one frozen factor per trained one (AAD). Without a base the factors are the weights: FedLMT, FedPara.
Differs: the server merges right after averaging and nodes replay its merges; the authors' code merges at the
start of the next round. The two are equal up to rounding. A node with its own data weighs at most
``max_weight_ratio`` medians.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Exchange, Steps, Vector
from hedgerow.strategies.fedmud.codings import Factors
from hedgerow.strategies.fedmud.compressed_layers import CompressedLayers
from hedgerow.strategies.vectors import joined, split
from hedgerow.wire.records import to_record


@dataclass(frozen=True, eq=False)
class State:
    """The server's state after a round."""

    # The uncompressed part (d,); W of the compressed layers (D,), empty without a base; F (C,).
    theta: Vector
    base: Vector
    factors: Vector
    # nu, the number of merges, which seeds the factors; and the rounds since the last merge.
    resets: int = 0
    age: int = 0


class FactorAveraging(CompressedLayers[State]):
    """The algorithm; a subclass sets the factors and the merge interval."""

    state_class = State
    # s; None for no merges.
    reset_interval: int | None = None

    @property
    def keeps_base(self) -> bool:
        """Whether there are no merges."""
        return self.reset_interval is None

    def unstepped(self) -> str | None:
        """Return why no server step can act, if factors are drawn anew."""
        redrawn = self.plan.layers and self.reset_interval is not None
        return f"its factors are drawn anew every {self.reset_interval} rounds" if redrawn else None

    def begin(self, model: Vector) -> State:
        """Return theta^0, W^0 and the first factors."""
        theta, weights = self.parted(model)
        base = weights if self.plan.has_base else np.zeros(0, np.float32)
        return State(theta, base, self._drawn(0))

    def factor_training(self, state: State, run: RoundContext, method: str = "factored") -> Exchange:
        """Return the exchange in which the participants train F and theta, (3) and (8)."""
        fresh = self.plan.has_base and not state.age
        F = split(state.factors, self.plan.shapes)
        return self.training(
            run,
            state.theta,
            state.factors,
            Factors(self.rest, self.uplink_bits, self.plan, self._frozen(state)),
            # Nodes draw fresh factors themselves.
            records={} if fresh or not F else {"factors": to_record(F)},
            base=state.base,
            keys={"method": method if self.plan.layers else "dense"},
        )

    def round(self, state: State, run: RoundContext) -> Steps[State]:
        """Let the participants train F and theta, average both, and merge F every s rounds."""
        mean = (yield from self.means(self.factor_training(state, run), run)).get(0)
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
        """Return theta and W + Delta; without a base, theta and the product of the factors."""
        unmerged = state.age or not self.plan.has_base
        return self.whole(state.theta, self._weights(state) if unmerged else state.base)

    def _weights(self, state: State) -> Vector:
        base, F = self.by_layer(state.base), split(state.factors, self.plan.shapes)
        return self.flat(self.plan.merge(base, F, self._frozen(state)))

    def _drawn(self, resets: int) -> Vector:
        return joined(self.plan.init(self.settings.seed, resets), self.plan.shapes)

    def _frozen(self, state: State) -> Mapping[str, Tensor]:
        return self.plan.frozen(self.settings.seed, state.resets)
