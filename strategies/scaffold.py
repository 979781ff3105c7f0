"""SCAFFOLD, the server's side.

Paper: S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh, "SCAFFOLD: Stochastic
Controlled Averaging for Federated Learning" (ICML 2020), Algorithm 1.

    x <- x + eta_g mean(y_i - x),    c <- c + |S| / N mean(c_i^+ - c_i)

Differs: a node whose reply the server did not absorb keeps its c_i.
"""

from dataclasses import dataclass
from typing import Unpack

import numpy as np

from hedgerow.strategies.aggregate import Choice, WeightedMean
from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Ask, Exchange, Steps, Vector
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.method import Method
from hedgerow.strategies.options import FederationOptions
from hedgerow.strategies.parts import Acknowledgements, EngineTime
from hedgerow.wire.blocks import Blocks
from hedgerow.wire.checks import int_at_least, one_of, positive
from hedgerow.wire.compress import compressed_part


@dataclass(frozen=True, eq=False)
class State:
    """The model x (M,) and the control variate c (d,)."""

    x: Vector
    c: Vector


class Scaffold(Method[State]):
    """SCAFFOLD.

    Parameters
    ----------
    learning_rate : float (default: 0.05)
        The nodes' step size eta_l, > 0.
    global_rate : float (default: 1.0)
        The server's step size eta_g, > 0.
    local_steps : int (default: 5)
        Steps K of a node in a round, >= 1.
    batch_size : int (default: 10)
        Samples per step, >= 1.
    option : {"I", "II"} (default: "II")
        What c_i^+ is: the gradient of all of a node's samples at x, or the mean of its K steps, c_i - c +
        (x - y_i) / (K eta_l).
    aggregation : str (default: "mean")
        How replies are aggregated, see ``parse_aggregation``.
    **options
        See ``FederationOptions``.
    """

    state_class = State

    def __init__(
        self,
        learning_rate: float = 0.05,
        global_rate: float = 1.0,
        local_steps: int = 5,
        batch_size: int = 10,
        option: str = "II",
        aggregation: str = "mean",
        **options: Unpack[FederationOptions],
    ) -> None:
        positive(learning_rate=learning_rate, global_rate=global_rate)
        int_at_least(1, local_steps=local_steps, batch_size=batch_size)
        self.learning_rate, self.global_rate = learning_rate, global_rate
        one_of("option", option, ("I", "II"))
        self.local_steps, self.batch_size, self.option = local_steps, batch_size, option
        mean = WeightedMean(by_examples=False)
        rule = Choice.of(aggregation).aggregator(mean)
        super().__init__(
            Federation(**options), aggregator=rule, parts=[Acknowledgements(), EngineTime()], mean=mean
        )

    @property
    def blocks(self) -> Blocks:
        """The model and, for its trained arrays, the control variate."""
        layout = self.federation.known_layout()
        return Blocks({"model": layout, "control": compressed_part(layout)})

    def begin(self, model: Vector) -> State:
        """Return x_0 and c = 0."""
        return State(model, np.zeros(self.federation.num_parameters, model.dtype))

    def round(self, state: State, run: RoundContext) -> Steps[State]:
        """Send x and c to all nodes that are there, and move both."""
        blocks = self.blocks
        asked = Ask(run.online, blocks.joined(model=state.x, control=state.c))
        config = {
            "server-round": run.round,
            "learning-rate": self.learning_rate,
            "local-steps": self.local_steps,
            "batch-size": self.batch_size,
            "option": self.option,
            "seed": run.seed,
        }
        train = Exchange("train", [asked], config, ("server->client", "client->server"), blocks=blocks)
        mean = (yield from self.means(train, run)).get(0)
        if mean is None:
            return state
        new = blocks.split(mean.model())  # the means of y_i, and of c + c_i^+ - c_i
        x = state.x + self.global_rate * (new["model"] - state.x)
        c = state.c + len(mean.nodes) / self.federation.num_clients * (new["control"] - state.c)
        return State(x.astype(state.x.dtype), c.astype(state.c.dtype))

    def model(self, state: State) -> Vector:
        """Return x."""
        return state.x

    @property
    def iterations(self) -> int:
        """K per round."""
        return self.local_steps * self.completed_rounds
