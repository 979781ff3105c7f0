"""The handlers of gossip methods: they decode messages, call the method, and store the node's state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from statistics import median_low

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict

from hedgerow.clients.app import BatchClientApp, whoami
from hedgerow.clients.gossip.node import GossipNodeMethod, Metrics, ProblemFn, Vector, mixing_in
from hedgerow.clients.gossip.stored_node import StoredNode, check_iteration
from hedgerow.clients.handlers import each
from hedgerow.clients.instructions import flag, only_config, whole
from hedgerow.clients.mods.guard import Refusal, Reveals, check_monitor, check_privacy, is_monitored, reveals
from hedgerow.clients.mods.update import Mod
from hedgerow.wire.calls import BatchHandler, Call
from hedgerow.wire.codec import Codec
from hedgerow.wire.message_types import HELLO, MONITOR, NO_MONITOR, PUBLISH, UPDATE, WHOAMI
from hedgerow.wire.records import records_of, to_record, view

# Largest accepted ratio of a neighbour's norm to the usual norm; the smallest usual norm, per entry (RMS).
_MAX_NORM_RATIO, _SMALL = 100.0, 0.01


def gossip_app(
    problem: ProblemFn,
    methods: Mapping[str, GossipNodeMethod],
    more: Mapping[str, BatchHandler] | None = None,
    mods: Sequence[Mod] = (),
) -> BatchClientApp:
    """Return a ClientApp of gossip methods; ``method`` in the config of ``query.hello`` selects one.

    Parameters
    ----------
    problem : Callable[[Context], Problem]
        Returns a node's objective. Called for every message, so cache what is expensive to build.
    methods : Mapping[str, GossipNodeMethod]
        By name.
    more : Mapping[str, BatchHandler] or None (default: None)
        Further handlers by message type; they replace gossip's own.
    mods : Sequence[Mod] (default: none)
        Flower mods, see ``BatchClientApp``. Update mods are refused: a node publishes a state, not an update
        of the server's model. Noise on gradients protects what it publishes.
    """

    def hello(call: Call) -> RecordDict:
        known = StoredNode.of(call, problem, methods, only_config(call))
        known.keep(call.context)
        hello = {"kappa": known.node.place.kappa, **known.request(), **known.introduction()}
        return RecordDict({"hello": ConfigRecord(hello)})

    def publish(call: Call) -> RecordDict:
        config, introductions, _ = _read(call)
        known = StoredNode.of(call, problem, methods).prepared(whole(config, "iteration", 0))
        payload = known.published(config.get("receivers"), introductions)
        known.keep(call.context)
        return RecordDict({"payload": ConfigRecord({"bytes": payload})})

    def update(calls: Sequence[Call]) -> list[RecordDict | Exception]:
        answers: dict[int, RecordDict | Exception] = {}
        events: dict[int, _Event] = {}
        for position, call in enumerate(calls):
            try:
                events[position] = _Event.of(call, problem, methods)
            except Exception as error:  # one node's bad state or message must not fail the others
                answers[position] = error
        for (position, event), received in zip(events.items(), _decoded(list(events.values())), strict=True):
            try:
                answers[position] = event.answer(calls[position].context, event.believed(received))
            except Exception as error:
                answers[position] = error
        return [answers[position] for position in range(len(calls))]

    handlers: dict[str, BatchHandler] = {
        WHOAMI: whoami(lambda context: problem(context).num_examples),
        HELLO: reveals(Reveals.NOISED, each(hello)),
        PUBLISH: reveals(Reveals.NOISED, each(publish)),
        UPDATE: reveals(Reveals.NOISED, update),
        MONITOR: each(lambda call: _monitored(call, problem, methods)),
        **(more or {}),
    }
    return BatchClientApp(handlers, mods)


def _read(call: Call) -> tuple[ConfigRecord, ConfigRecord, ConfigRecord]:
    """Return a message's config, the introductions in it, and the payloads, both by node."""
    records = records_of(call.content, ConfigRecord)
    introductions = records.pop("introductions", ConfigRecord())
    bundle = records.pop("bundle", ConfigRecord())
    return next(iter(records.values()), ConfigRecord()), introductions, bundle


@dataclass(frozen=True)
class _Event:
    """One node's communication: the node at its iteration and the payloads it received, still encoded."""

    known: StoredNode
    bundle: Mapping[int, bytes]
    refused: Mapping[str, list[int]]
    size: int
    norm: float
    mixing: Mapping[int, float] | None
    monitor: bool

    @classmethod
    def of(cls, call: Call, problem: ProblemFn, methods: Mapping[str, GossipNodeMethod]) -> "_Event":
        config, introductions, bundle = _read(call)
        if not all(isinstance(payload, bytes) for payload in bundle.values()):
            raise ValueError("the bundle must hold bytes, a payload for each sender")
        known, k = StoredNode.of(call, problem, methods), whole(config, "iteration", 1)
        if k % known.node.place.kappa:
            raise ValueError(f"iteration must be a multiple of kappa = {known.node.place.kappa}, got {k}")
        place = known.node.place
        neighbours, mixing = mixing_in(config if "weights" in config else known.node.config, place)
        if strangers := sorted({int(j) for j in bundle} - set(neighbours)):
            raise ValueError(
                f"the bundle's senders must be among the neighbours {neighbours}, got {strangers}"
            )
        ready = known.prepared(k)
        payloads, refused = ready.opened(bundle, introductions)
        own = ready.method.message(ready.node, ready.memory)
        return cls(
            ready,
            payloads,
            refused,
            own.size,
            ready.method.norm(ready.node, own),
            mixing,
            flag(config, "monitor", default=False),
        )

    def believed(self, received: Mapping[int, Vector]) -> dict[int, Vector]:
        """Return the received vectors without those far larger than the node's own and the others' median.

        This bounds a malicious neighbour's pull to 100 times the usual norm.
        """
        with np.errstate(over="ignore"):
            norms = {j: self.known.method.norm(self.known.node, v) for j, v in received.items()}
        finite = [norm for norm in norms.values() if isfinite(norm)]
        usual = max(self.norm, median_low(finite) if finite else 0.0, _SMALL * sqrt(self.size))
        within = _MAX_NORM_RATIO * usual
        return {j: v for j, v in received.items() if isfinite(norms[j]) and norms[j] <= within}

    def answer(self, context: Context, received: Mapping[int, Vector]) -> RecordDict:
        """Update, store the state, and return the reply."""
        node, method = self.known.node, self.known.method
        memory, metrics = method.update(node, self.known.memory, received, self.mixing)
        after = replace(self.known, memory=memory)
        if self.monitor and node.privacy.mode != "sound" and is_monitored(node.privacy.mode):
            check_privacy("none")  # The objective has no noise.
            metrics["objective"] = node.problem.value(method.look(node, memory, memory.iteration)[1])
        counts: Metrics = {
            "num-examples": node.problem.num_examples,
            "used": 1 + len(received),
            "rejected": len(self.bundle) + sum(map(len, self.refused.values())) - len(received),
            "missed": memory.count("missed"),
            "gradients": memory.count("gradients"),
        }
        after.keep(context)
        answer = RecordDict(
            {"next": ConfigRecord(after.request()), "metrics": MetricRecord({**counts, **metrics})}
        )
        if self.refused:
            answer["refused"] = ConfigRecord({**self.refused})
        return answer


def _decoded(events: Sequence[_Event]) -> list[dict[int, Vector]]:
    """Return each event's decoded vectors by sender, without undecodable payloads."""
    alike: dict[tuple[Codec, int], list[tuple[int, int, bytes, tuple[int, ...]]]] = {}
    for position, event in enumerate(events):
        messages = alike.setdefault((event.known.node.place.codec, event.size), [])
        for j, payload in event.bundle.items():
            messages.append((position, j, payload, event.known.code_seed(j)))
    received: list[dict[int, Vector]] = [{} for _ in events]
    for (codec, size), messages in alike.items():
        payloads, seeds = [message[2] for message in messages], [message[3] for message in messages]
        vectors = codec.decode_many(payloads, size, seeds)
        for (position, j, _, _), vector in zip(messages, vectors, strict=True):
            if vector is not None:
                received[position][j] = vector
    return received


def _monitored(call: Call, problem: ProblemFn, methods: Mapping[str, GossipNodeMethod]) -> RecordDict:
    """Return w_i at the start of ``iteration`` and f_i(w_i) as ``objective``, for simulations.

    If the message carries a model, return f_i of that model as ``mean-objective`` instead.
    """
    if not call.context.node_config.get("monitor", True):
        raise Refusal(NO_MONITOR)
    known, k = StoredNode.of(call, problem, methods), whole(only_config(call), "iteration", 0)
    check_monitor(known.node.privacy.mode)
    check_iteration(k, known.memory)
    memory, w = known.method.look(known.node, known.memory, k)
    replace(known, memory=memory).keep(call.context)
    metrics: Metrics = {"num-examples": known.node.problem.num_examples}
    if sent := list(records_of(call.content, ArrayRecord).values()):
        (array,) = sent[0].values()
        vector = np.asarray(view(array), np.float64)
        if vector.shape != w.shape:
            raise ValueError(f"the message's array must have the shape {w.shape}, got {vector.shape}")
        metrics["mean-objective"] = known.node.problem.value(vector)
    else:
        metrics["objective"] = known.node.problem.value(w)
    return RecordDict({"arrays": to_record({"w": w}), "metrics": MetricRecord({**metrics})})
