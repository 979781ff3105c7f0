"""Nodes that gossip numbers: each payload says who sent it, at which iteration, and what it then was."""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from tests.strategies.recording_grid import RecordingGrid

from hedgerow.sim import FaultModel, flower_identity
from hedgerow.strategies import Gossip, RoundEnd

# Dimension of the models that must never leave a node.
DIM = 60


@dataclass
class Event:
    """What a node did when it was asked to."""

    kind: str
    node: int
    k: int
    received: dict[int, tuple[int, int, float]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class Nodes:
    """Node i starts at x = i and moves to the mean of what it heard and itself, plus a thousandth of i."""

    kappas: Sequence[int]
    want: Callable[[int, int], list[int]]
    sabotage: Callable[[str, int, RecordDict], RecordDict] = lambda kind, i, reply: reply
    trace: list[Event] = field(default_factory=list)

    def events(self, kind: str) -> list[Event]:
        return [event for event in self.trace if event.kind == kind]

    def app(self) -> ClientApp:
        app = ClientApp()
        handlers = {"hello": self.hello, "publish": self.publish, "monitor": self.look, "whoami": self.whoami}
        for name, handler in handlers.items():
            app.query(name)(self._handled(name, handler))
        app.train("update")(self._handled("update", self.update))
        return app

    def _handled(self, kind: str, handler: Callable[..., RecordDict]) -> Callable[..., Message]:
        def handle(message: Message, context: Context) -> Message:
            i = int(context.node_config["partition-id"])
            reply = handler(i, message.content, context.state)
            return Message(self.sabotage(kind, i, reply), reply_to=message)

        return handle

    def whoami(self, i: int, content: RecordDict, state: RecordDict) -> RecordDict:
        return RecordDict({"whoami": ConfigRecord({"partition-id": i, "num-examples": 10 + i})})

    def hello(self, i: int, content: RecordDict, state: RecordDict) -> RecordDict:
        self.trace.append(Event("hello", i, 0, config=dict(content["config"])))
        state["model"] = ArrayRecord({"w": Array(np.full(DIM, float(i)))})
        state["numbers"] = ConfigRecord({"x": float(i)})
        config, kappa = content["config"], self.kappas[i]
        low, high = config.get("kappa-low", kappa), config.get("kappa-high", kappa)
        kappa = min(max(kappa, int(low)), int(high))
        self.kappas = [*self.kappas[:i], kappa, *self.kappas[i + 1 :]]
        return RecordDict(
            {"hello": ConfigRecord({"kappa": kappa, "next": kappa, "want": self.want(i, kappa)})}
        )

    def publish(self, i: int, content: RecordDict, state: RecordDict) -> RecordDict:
        config = content["config"]
        k, x = int(config["iteration"]), float(state["numbers"]["x"])
        self.trace.append(Event("publish", i, k, config=dict(config)))
        if "receivers" in config:
            payload: Any = [struct.pack("<iidi", i, k, x, to) for to in config["receivers"]]
        else:
            payload = struct.pack("<iid", i, k, x)
        return RecordDict({"payload": ConfigRecord({"bytes": payload})})

    def update(self, i: int, content: RecordDict, state: RecordDict) -> RecordDict:
        k, x = int(content["config"]["iteration"]), float(state["numbers"]["x"])
        received = {int(j): struct.unpack_from("<iid", payload) for j, payload in content["bundle"].items()}
        self.trace.append(Event("update", i, k, received, dict(content["config"])))
        x = float(np.mean([x, *(received[j][2] for j in sorted(received))])) + i / 1000
        state["numbers"] = ConfigRecord({"x": x})
        state["model"] = ArrayRecord({"w": Array(np.full(DIM, x))})
        after = k + self.kappas[i]
        return RecordDict(
            {
                "next": ConfigRecord({"next": after, "want": self.want(i, after)}),
                "metrics": MetricRecord({"num-examples": 10 + i, "x": x, "disagreement": 0.0}),
            }
        )

    def look(self, i: int, content: RecordDict, state: RecordDict) -> RecordDict:
        told = {"num-examples": 10 + i, "objective": float(state["numbers"]["x"]) ** 2}
        if content.array_records:
            told["mean-objective"] = float(content["arrays"]["mean"].numpy()[0]) ** 2
        return RecordDict({"arrays": state["model"], "metrics": MetricRecord(told)})


class Spy(RecordingGrid):
    """A grid that keeps every content that passes: message type, partition id, content."""

    def __init__(self, nodes: Nodes, **options: Any) -> None:
        super().__init__(nodes.app(), len(nodes.kappas), strict=True, **options)


def run(
    strategy: Gossip,
    nodes: Nodes,
    num_rounds: int,
    *,
    faults: FaultModel | dict[int, FaultModel] | None = None,
    grid: Spy | None = None,
    timeout: float = 60.0,
) -> tuple[Any, list[RoundEnd], Spy]:
    """Run and return the result, what callbacks were told, and the grid."""
    ends: list[RoundEnd] = []
    strategy.on_round_end = [*strategy.on_round_end, ends.append]
    grid = grid or Spy(nodes, faults=faults)
    with flower_identity(1):
        result = strategy.start(grid, ArrayRecord(), num_rounds=num_rounds, timeout=timeout)
    return result, ends, grid


def payloads_within(root: object) -> list[bytes]:
    """Return all bytes that can be reached from an object: attributes, items, and what closures hold."""
    found: list[bytes] = []
    seen: set[int] = set()
    rest: list[Any] = [root]
    while rest:
        one = rest.pop()
        if isinstance(one, bytes):
            found.append(one)
        if id(one) in seen or isinstance(one, str | int | float | bytes | type | ModuleType):
            continue
        seen.add(id(one))
        if isinstance(one, Mapping):
            rest += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            rest += one
        rest += [cell.cell_contents for cell in getattr(one, "__closure__", None) or ()]
        rest += [getattr(one, "__self__", None), *getattr(one, "__dict__", {}).values()]
    return found
