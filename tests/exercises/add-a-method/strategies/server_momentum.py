"""FedAvg with momentum at the server: T. H. Hsu, H. Qi, M. Brown, arXiv:1909.06335.

m <- beta m + (x - sum_i p_i x_i),    x <- x - m,    p_i: node i's share of all examples.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hedgerow.strategies.aggregate import WeightedMean
from hedgerow.strategies.exchange import Ask, Exchange
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.method import Method

__all__ = ["ServerMomentum"]


@dataclass(frozen=True)
class State:
    """The model and its momentum, (M,) each."""

    x: NDArray[Any]
    m: NDArray[Any]


class ServerMomentum(Method[State]):
    """FedAvg with momentum.

    Parameters
    ----------
    beta : float (default: 0.9)
        Share of the momentum that is kept, in [0, 1); 0 is FedAvg.
    options
        As of ``Federation``.
    """

    state_class = State

    def __init__(self, beta: float = 0.9, **options: Any) -> None:
        if not 0 <= beta < 1:
            raise ValueError(f"beta must be in [0, 1), got {beta!r}")
        self.beta = beta
        super().__init__(Federation(**options), aggregator=WeightedMean())

    def begin(self, model: NDArray[Any]) -> State:
        """Return the state before the first round."""
        return State(model, np.zeros_like(model))

    def round(self, state: State, run: Any) -> Any:
        """Play one round."""
        everyone = range(self.federation.num_clients)
        train = Exchange("train", [Ask(everyone, state.x)], {"round": run.round}, ("down", "up"))
        mean = (yield from self.means(train, run)).get(0)
        if mean is None:  # Nobody replied.
            return state
        m = self.beta * state.m + (state.x - mean.model())
        return State((state.x - m).astype(state.x.dtype), m.astype(state.m.dtype))

    def model(self, state: State) -> NDArray[Any]:
        """Return the global model."""
        return state.x
