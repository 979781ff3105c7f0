"""Whatever a node replies, the server's checks give a PayloadError or a right value, and nothing else."""

from collections.abc import Callable
from functools import partial
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from tests.strategies.linear_federation import COMPRESSED, LAYERS, MODEL
from tests.wire.fuzzing import Decoder, hunt

from hedgerow.sim import flower_identity
from hedgerow.strategies import (
    EF21P,
    Ask,
    CompressedChanges,
    ErrorFeedback,
    Exchange,
    FedBAT,
    Federation,
    FedMUD,
    Models,
    Node,
    PayloadSizes,
    RoundContext,
    Router,
)
from hedgerow.strategies.compressed import Uplink
from hedgerow.strategies.gossip.monitor import seen
from hedgerow.strategies.gossip.state import Appointment, next_communication
from hedgerow.strategies.gossip.state import introduced as greeted
from hedgerow.strategies.hsgd.exchange import Schema
from hedgerow.strategies.hsgd.membership import Introduction, introduction
from hedgerow.strategies.inbox import checked_metrics
from hedgerow.strategies.messenger import Reader
from hedgerow.strategies.node import introduced
from hedgerow.strategies.parts import Parts
from hedgerow.wire import (
    MAX_EXAMPLES,
    Layout,
    Ledger,
    PayloadError,
    pack_update,
    parse_compressor,
    record_payload,
    to_record,
)

RNG = np.random.default_rng(3)
NODE = Node(partition_id=2, node_id=9, num_examples=7)
METRICS = MetricRecord({"num-examples": 7, "train-loss": 0.5, "per-class": [0.1, 0.2]})
STATE: dict[str, Any] = {
    "w": RNG.standard_normal((5, 4)).astype(np.float32),
    "b": RNG.standard_normal(3).astype(np.float32),
    "norm.num_batches_tracked": np.array(3, np.int64),
}
LAYOUT = Layout.of(to_record(STATE))


def refuses(
    name: str, content: RecordDict, decode: Callable[[Any], Any], right: Callable[[Any], bool]
) -> Decoder:
    return Decoder(name, content, decode, right, errors=(PayloadError,))


def finite(vector: Any, *shape: int) -> bool:
    return bool(vector.shape == shape and vector.dtype.kind == "f" and np.isfinite(vector).all())


def rows(part: Any, count: int, length: int) -> bool:
    return finite(part, count, length) if isinstance(part, np.ndarray) else len(part) == count


# Introductions and metrics


def who(content: RecordDict) -> Node:
    with flower_identity(1):
        return introduced(Message(content, reply_to=Message(RecordDict(), 9, "query.whoami")))


def is_node(node: Node) -> bool:
    known = 0 <= node.partition_id <= MAX_EXAMPLES or (node.partition_id == -1 and bool(node.name))
    return known and 0 <= (node.num_examples or 0) <= MAX_EXAMPLES


def are_metrics(metrics: MetricRecord) -> bool:
    numbers = np.hstack([np.asarray(value, np.float64).ravel() for value in metrics.values()])
    return bool(np.isfinite(numbers).all() and 0 < metrics["num-examples"] <= MAX_EXAMPLES)  # type: ignore[operator]


def is_party(party: Introduction) -> bool:
    return party.group >= 0 and party.shape[0] >= 1 and all(isinstance(one, str) for one in party.ids)


def is_next(value: tuple[int, list[int]]) -> bool:
    return value[0] > 4 and all(isinstance(j, int) for j in value[1])


WHOAMI = ConfigRecord({"partition-id": 2, "num-examples": 7, "role": "device", "group": "g"})
PAIR = ConfigRecord({"role": "hospital", "group": 1, "ids": ["a", "b"], "encoding": 3})
HELLO = ConfigRecord({"kappa": 3, "next": 6, "want": [1, 3]})
SIGHT = {"arrays": to_record({"w": RNG.standard_normal(6)}), "metrics": METRICS}
TOLD = [
    refuses("whoami", RecordDict({"whoami": WHOAMI}), who, is_node),
    refuses("metrics", RecordDict({"m": METRICS}), lambda c: checked_metrics(c, "num-examples"), are_metrics),
    refuses("pair", RecordDict({"pair": PAIR}), introduction, is_party),
    refuses(
        "hello", RecordDict({"hello": HELLO}), partial(greeted, NODE), lambda a: isinstance(a, Appointment)
    ),
    refuses("next", RecordDict({"next": HELLO}), lambda c: next_communication(c, "next", after=4), is_next),
    refuses("look", RecordDict(SIGHT), lambda c: seen(NODE, c, 6), lambda sight: sight.model.shape == (6,)),
]


# A router's payloads


def routed(payload: bytes | list[bytes], per_receiver: bool) -> Decoder:
    sizes = PayloadSizes(128, 16, per_receiver)
    router = Router(nx.path_graph(2), sizes, Ledger())
    return refuses(
        f"routed-{'each' if per_receiver else 'all'}",
        RecordDict({"payload": ConfigRecord({"bytes": payload})}),
        lambda content: router._checked(content, 2),
        lambda found: all(isinstance(one, bytes) and len(one) <= 16 for one in found),
    )


# HSGD's parties


def schema(**changes: bool) -> Schema:
    return Schema(5, 4, 3, 6, 2, np.dtype(np.float32), **changes)


def blocks(**shapes: tuple[int, ...]) -> Any:
    return to_record({key: RNG.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()})


CODED = ConfigRecord({"head": bytes(5), "zeta1": [bytes(5)] * 3})
EXCHANGED = RecordDict({"arrays": blocks(head=(5,), zeta1=(3, 6))})
ENDED = RecordDict(
    {"arrays": blocks(head=(5,), hospital=(4,)), "metrics": MetricRecord({"num-examples": 3, "loss": 0.5})}
)
DEVICE = RecordDict({"arrays": blocks(device=(3,)), "metrics": MetricRecord({"num-examples": 1})})
PARTIES = [
    refuses(
        "hospital-exchange",
        EXCHANGED,
        lambda content: schema().hospital_exchange(content, 3, hosted=True),
        lambda value: finite(value[0], 5) and rows(value[1], 3, 6),
    ),
    refuses(
        "device-exchange",
        RecordDict({"arrays": blocks(zeta2=(3, 2))}),
        lambda content: schema().device_exchange(content, 3),
        lambda value: rows(value, 3, 2),
    ),
    refuses(
        "compressed-exchange",
        RecordDict({"payload": CODED}),
        lambda content: schema(compressed=True).hospital_exchange(content, 3, hosted=True),
        lambda value: isinstance(value[0], bytes) and rows(value[1], 3, 6),
    ),
    refuses(
        "hospital-update",
        ENDED,
        lambda content: schema().hospital_update(content, 3, True),
        lambda value: bool(np.isfinite(value[0])) and finite(value[1], 5) and finite(value[2], 4),
    ),
    refuses(
        "device-update",
        DEVICE,
        lambda content: schema().device_update(content, 1, True),
        lambda value: finite(value, 3),
    ),
]


# Models and their changes


def averaged(compressor: str) -> Decoder:
    """A worker's reply to the similarity-free family."""
    federation = Federation()
    federation.begin(60.0)
    ask = Ask([NODE.partition_id], federation.vector(to_record(STATE)))
    codec = parse_compressor(compressor)
    coding = Models() if compressor == "identity" else CompressedChanges(codec)
    exchange = Exchange("train", [ask], coding=coding)
    size, dense = 23, {"norm.num_batches_tracked": STATE["norm.num_batches_tracked"]}
    packed = pack_update(LAYOUT, codec.encode(RNG.standard_normal(size)), dense)
    arrays = to_record(STATE) if compressor == "identity" else packed
    return refuses(
        f"worker-{compressor}",
        RecordDict({"update": arrays, "metrics": METRICS}),
        lambda content: Reader(RoundContext(federation, 1, {}, [2], Parts()), exchange)(NODE, content),
        lambda value: finite(value.row, LAYOUT.size) and 0 < value.claimed <= MAX_EXAMPLES,
    )


def wrapped(compressor: str) -> Decoder:
    """A reply of any strategy's client under ``Compressed``."""
    uplink = Uplink(ErrorFeedback(parse_compressor(compressor), True))
    with flower_identity(1):
        (asked,) = uplink.ask(0, [Message(RecordDict({"arrays": to_record(STATE)}), 9, "train")], {})
    dense = {"norm.num_batches_tracked": STATE["norm.num_batches_tracked"]}
    packed = pack_update(LAYOUT, uplink.feedback.compressor.encode(RNG.standard_normal(23)), dense)
    identity = compressor == "identity"
    content = RecordDict({"arrays": to_record(STATE)} if identity else {"update": packed})
    return refuses(
        f"uplink-{compressor}",
        content,
        lambda reply: uplink._model(reply, asked),
        lambda value: finite(LAYOUT.flatten(next(iter(value.array_records.values()))), LAYOUT.size),
    )


def layered(strategy: Any, coded: dict[str, Any]) -> Decoder:
    """A reply to a method of the FedMUD family."""
    start = {layer.key: RNG.standard_normal(layer.shape).astype(np.float32) for layer in LAYERS}
    state = {**start, "last.bias": np.zeros(2, np.float32), "norm.num_batches_tracked": np.array(0)}
    model = strategy.federation.vector(to_record(state))
    run = RoundContext(strategy.federation, 1, {}, [0, 1], strategy.parts)
    exchange = next(strategy.round(strategy.begin(model), run)).prepared(run)
    rest = {key: value for key, value in state.items() if key not in COMPRESSED}
    metrics = {"num-examples": 7, "base-version": 0, "need-base": 0}
    return refuses(
        type(strategy).__name__,
        RecordDict({"arrays": to_record({**coded, **rest}), "metrics": MetricRecord(metrics)}),
        lambda content: Reader(run, exchange)(NODE, content),
        lambda value: finite(value.row, exchange.asks[0].model.size) and value.claimed > 0,
    )


def layered_decoders() -> list[Decoder]:
    mud = FedMUD(**MODEL, ratio=0.6, min_available_nodes=3)
    factors = {
        key: torch.randn(shape, generator=torch.Generator().manual_seed(1))
        for key, shape in mud.plan.shapes.items()
    }
    chosen = EF21P(**MODEL, ratio=0.25, budget="layer", min_available_nodes=3)
    values = RNG.standard_normal(22).astype(np.float32)
    signs = FedBAT(**MODEL, budget="layer", min_available_nodes=3)
    layers = [layer for layer in LAYERS if layer.key in COMPRESSED]
    bits = {f"{layer.key}:bits": np.packbits(RNG.random(layer.size) < 0.5) for layer in layers}
    alphas = {f"{layer.key}:alpha": np.ones(1, np.float32) for layer in layers}
    return [layered(mud, factors), layered(chosen, {"values": values}), layered(signs, bits | alphas)]


NAMES = ("identity", "topk(5)", "topk(0.3)", "sign", "ternary")
DECODERS = [
    *TOLD,
    routed(bytes(16), per_receiver=False),
    routed([bytes(16)] * 2, per_receiver=True),
    *PARTIES,
    *map(averaged, NAMES),
    *map(wrapped, NAMES),
    *layered_decoders(),
]
every_decoder = pytest.mark.parametrize("decoder", DECODERS, ids=str)


@every_decoder
def test_a_reply_of_anything_is_refused_with_its_reason_or_right(decoder: Decoder) -> None:
    hunt(decoder, 200)


@pytest.mark.slow
@every_decoder
def test_thousands_of_replies_are_refused_with_their_reason_or_right(decoder: Decoder) -> None:
    hunt(decoder, 5000, explore=True)


@every_decoder
def test_an_honest_reply_is_right(decoder: Decoder) -> None:
    assert decoder.right(decoder.decode(decoder.payload))


@pytest.mark.parametrize("told", [-1, MAX_EXAMPLES + 1, 2.0, True, "7", float("inf"), [7]], ids=repr)
@pytest.mark.parametrize("key", ["partition-id", "num-examples"])
def test_a_node_that_counts_wrongly_is_not_in_the_roster(key: str, told: Any) -> None:
    with pytest.raises(PayloadError):
        who(RecordDict({"whoami": ConfigRecord({**WHOAMI, key: told})}))


def test_a_payload_that_is_refused_leaves_no_trace_in_the_record() -> None:
    record = to_record(STATE)
    before = {key: values.copy() for key, values in record_payload(record).items()}
    for seed in range(50):
        Decoder("", RecordDict({"a": record}), lambda c: c, bool).spoilt(np.random.default_rng(seed))
    after = record_payload(record)
    assert all(np.array_equal(before[key], after[key]) for key in before)
