"""A federation whose nodes can tell what they learnt within a sum, and a grid that loses what it should."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from tests.strategies.recording_grid import RecordingGrid

from hedgerow.clients import BatchClientApp, each, masked_sum_handlers, whoami
from hedgerow.sim import flower_identity
from hedgerow.strategies import FederatedStrategy, RoundEnd
from hedgerow.wire import WHOAMI, Call, to_record, view

SIZE = 40
# Message type, partition, how many messages of the type it got before -> whether its answer is lost.
Loses = Callable[[str, int, int], bool]
NOTHING: Loses = lambda kind, node, time: False  # noqa: E731


def examples(node: int) -> int:
    return 100 + 37 * node % 90


def update(node: int, server_round: int) -> np.ndarray:
    return np.random.default_rng([node, server_round]).normal(0.0, 0.1, SIZE)


def _train(call: Call) -> RecordDict:
    node, server_round = call.partition_id, int(call.content["config"]["server-round"])
    w = view(call.content["arrays"]["w"])
    told = {"num-examples": examples(node), "num-steps": call.content["config"]["local-steps"]}
    return RecordDict(
        {
            "arrays": to_record({"w": w + update(node, server_round)}),
            "metrics": MetricRecord({**told, "train-loss": 2.0 + node, "private": 1.0}),
        }
    )


def app(train: Callable[[Call], RecordDict] = _train) -> BatchClientApp:
    introduction = whoami(lambda context: examples(int(context.node_config["partition-id"])))
    steps = masked_sum_handlers(
        each(train), plain_metrics=lambda call: {"num-steps": int(call.content["config"]["local-steps"])}
    )
    return BatchClientApp({**steps, WHOAMI: introduction})


class LossyGrid(RecordingGrid):
    """Loses answers, after the node worked."""

    def __init__(self, num_nodes: int, loses: Loses = NOTHING, client: Any = None, **options: Any) -> None:
        super().__init__(client or app(), num_nodes, **options)
        self.loses, self.pull = loses, self._passed
        self._times: Counter[tuple[str, int]] = Counter()

    def _passed(self, kind: str, node: int, reply: Message) -> Error | None:
        self._times[kind, node] += 1
        return Error(code=0, reason="lost") if self.loses(kind, node, self._times[kind, node] - 1) else None


def run(
    strategy: FederatedStrategy, grid: LossyGrid, rounds: int = 2, start: np.ndarray | None = None
) -> tuple[np.ndarray, list[RoundEnd]]:
    ends: list[RoundEnd] = []
    strategy.on_round_end = [ends.append]
    w = np.zeros(SIZE) if start is None else start
    with flower_identity(1):
        result = strategy.start(grid, ArrayRecord({"w": Array(w)}), num_rounds=rounds, timeout=60.0)
    return view(result.arrays["w"]), [end for end in ends if end.round]
