"""A federation of quadratics: clients whose whole run can be checked by hand.

F_i(w) = a_i/2 (w - c_i)^2 with full gradients; models are float64 so that goldens hold to their digits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from hedgerow.sim import FaultModel, InProcessGrid, flower_identity
from hedgerow.strategies import RoundEnd
from hedgerow.strategies.sd_feel import ClusteredStrategy

# What a client does with its reply before it is sent: (partition id, round, reply) -> reply.
Sabotage = Callable[[int, int, RecordDict], RecordDict]


@dataclass
class Quadratics:
    """Clients i with F_i(w) = a_i/2 ||w - c_i||^2, sizes |S_i|, step size eta."""

    sizes: Sequence[int]
    centres: Sequence[float]
    curvatures: Sequence[float] | None = None
    eta: float = 0.1
    introduces_itself: bool = True
    # The iterations that a client takes of those it is asked for, and what it tells of them.
    steps: Callable[[int, int], int] = lambda client, asked: asked
    tells_steps: bool = True
    group: Callable[[int], str] | None = None
    num_examples: Callable[[int, int], float] | None = None
    sabotage: Sabotage | None = None
    seen: list[tuple[int, int]] = field(default_factory=list)

    def gradient(self, client: int, k: int, w: Any) -> Any:
        a = 1.0 if self.curvatures is None else self.curvatures[client]
        return a * (w - self.centres[client])

    def client_app(self) -> ClientApp:
        app = ClientApp()

        @app.train()
        def train(message: Message, context: Context) -> Message:
            client = int(context.node_config["partition-id"])
            config = message.content["config"]
            server_round = int(config["server-round"])
            self.seen.append((server_round, client))
            w = message.content["arrays"]["w"].numpy()
            asked = config["local-steps"] if "local-steps" in config else config["local-iters"]
            steps = self.steps(client, int(asked))
            for k in range(steps):
                w = w - self.eta * self.gradient(client, k, w)
            told = (
                self.sizes[client] if self.num_examples is None else self.num_examples(client, server_round)
            )
            reply = RecordDict(
                {
                    "arrays": ArrayRecord({"w": Array(w)}),
                    "metrics": MetricRecord({"num-examples": told, "loss": float(np.mean(w))}),
                }
            )
            if self.tells_steps:
                reply["metrics"]["num-steps"] = steps
            if "local-step" in config:
                reply["metrics"]["local-step"] = config["local-step"]
            if self.sabotage is not None:
                reply = self.sabotage(client, server_round, reply)
            return Message(reply, reply_to=message)

        @app.evaluate()
        def evaluate(message: Message, context: Context) -> Message:
            client = int(context.node_config["partition-id"])
            w = message.content["arrays"]["w"].numpy()
            loss = float(0.5 * (w[0] - self.centres[client]) ** 2)
            metrics = MetricRecord({"num-examples": self.sizes[client], "loss": loss})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)

        if self.introduces_itself:

            @app.query("whoami")
            def whoami(message: Message, context: Context) -> Message:
                client = int(context.node_config["partition-id"])
                me = ConfigRecord({"partition-id": client, "num-examples": self.sizes[client]})
                if self.group is not None:
                    me["group"] = self.group(client)
                return Message(RecordDict({"whoami": me}), reply_to=message)

        return app

    def grid(self, faults: FaultModel | None = None, seed: int = 0) -> InProcessGrid:
        return InProcessGrid(self.client_app(), len(self.sizes), faults=faults, seed=seed)


def initial(value: float = 0.0, params: int = 1) -> ArrayRecord:
    return ArrayRecord({"w": Array(np.full(params, value))})


def run(
    strategy: ClusteredStrategy,
    problem: Quadratics,
    num_rounds: int,
    *,
    faults: FaultModel | None = None,
    timeout: float = 60.0,
    w0: float = 0.0,
    grid: Any = None,
) -> tuple[Any, list[RoundEnd]]:
    """Run and return the final u (params,) and what callbacks were told."""
    ends: list[RoundEnd] = []
    strategy.on_round_end = [*strategy.on_round_end, ends.append]
    with flower_identity(1):
        result = strategy.start(
            grid or problem.grid(faults), initial(w0), num_rounds=num_rounds, timeout=timeout
        )
    return result.arrays["w"].numpy(), ends


def servers(strategy: ClusteredStrategy) -> Any:
    """Return the servers' scalar models (D,)."""
    return np.array([record["w"].numpy()[0] for record in strategy.server_models()])
