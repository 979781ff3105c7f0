"""What a node does not send it keeps, and what was lost it takes back: Beikmohammadi et al., Algorithm 2."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hedgerow.clients import BatchClientApp, TrainHandler, TrainResult, compress_reply
from hedgerow.clients.mods.compress import Metrics, Update, compress_updates, feed_back
from hedgerow.sim import InProcessGrid
from hedgerow.wire import (
    Call,
    Compressor,
    TopK,
    index_bits,
    parse_compressor,
    to_record,
    to_state_dict,
    unpack_update,
)

NAMES = ("identity", "topk(0.2)", "topk(3)", "sign", "ternary")
EACH = pytest.mark.parametrize("name", NAMES)
SHAPES = {"layer.weight": (3, 5), "layer.bias": (5,)}
SIZE = 20
ZEROS = {key: torch.zeros(shape) for key, shape in SHAPES.items()}


class Node:
    """A node and the server's side of its link: what it absorbed, and the sum of it."""

    def __init__(self, partition_id: int = 0, run_id: int = 1) -> None:
        self.partition_id = partition_id
        self.state = RecordDict()
        self.run_id = run_id
        self.acknowledged = -1
        self.learnt: list[Tensor] = []
        self.absorbed = np.zeros(SIZE)

    def call(self, name: str, round_index: int, **config: Any) -> Call:
        config = {
            "compressor": name,
            "error-feedback": True,
            "round-index": round_index,
            "acknowledged": self.acknowledged,
            **config,
        }
        config = {key: value for key, value in config.items() if value is not None}
        context = Context(self.run_id, 7, {"partition-id": self.partition_id}, self.state, {})
        return Call(RecordDict({"config": ConfigRecord(config)}), context, "train")

    def round(
        self, name: str, k: int, update: Tensor, lost: bool = False, **config: Any
    ) -> tuple[np.ndarray[Any, Any], Metrics]:
        """Run one round of this node alone; return q and the metrics."""
        (answer,) = compress_updates([self.call(name, k, **config)], [Update.between(ZEROS, state(update))])
        assert not isinstance(answer, Exception), answer
        record, metrics = answer
        q, _ = unpack_update(parse_compressor(name), UPDATE_LAYOUT, record)
        if not lost:
            self.absorbed += q
            self.acknowledged = k
        return q, metrics

    @property
    def memory(self) -> np.ndarray[Any, Any]:
        return self.state.array_records["error-feedback"]["after.memory"].numpy()


def state(vector: Tensor) -> dict[str, Tensor]:
    parts = vector.split([15, 5])
    return {key: part.reshape(shape) for (key, shape), part in zip(SHAPES.items(), parts, strict=True)}


UPDATE_LAYOUT = Update.between(ZEROS, ZEROS).layout


def update(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def total(updates: Sequence[Tensor]) -> np.ndarray[Any, Any]:
    return torch.stack(list(updates)).double().sum(0).numpy()


# The law in float64

FLOAT64 = st.integers(0, 2**32).map(
    lambda seed: torch.from_numpy(np.random.default_rng(seed).standard_t(2, (3, 4, SIZE)))
)


def dense(compressor: Compressor, payloads: Sequence[Any], size: int = SIZE) -> Tensor:
    return torch.stack([torch.from_numpy(compressor.decode(p, size)) for p in payloads]).double()


@EACH
@settings(deadline=None, max_examples=30)
@given(rounds=FLOAT64)
def test_what_is_sent_and_what_is_kept_make_up_the_message_of_which_the_memory_is_a_contraction(
    name: str, rounds: Tensor
) -> None:
    compressor = parse_compressor(name)
    memory, sent = torch.zeros(4, SIZE, dtype=torch.float64), torch.zeros(4, SIZE, dtype=torch.float64)
    for learnt in rounds:
        message = learnt + memory
        payloads, memory = feed_back(compressor, message)
        assert memory.dtype == torch.float64
        torch.testing.assert_close(dense(compressor, payloads) + memory, message, rtol=0, atol=1e-13)
        bound = (1 - compressor.contraction(SIZE) + 1e-6) * message.square().sum(1)
        assert (memory.square().sum(1) <= bound).all()
        sent += dense(compressor, payloads)
    torch.testing.assert_close(sent + memory, rounds.sum(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["identity", "topk(0.2)", "topk(3)"])
@settings(deadline=None, max_examples=30)
@given(rounds=FLOAT64)
def test_nothing_is_rounded_away_where_entries_are_kept_as_they_are(name: str, rounds: Tensor) -> None:
    compressor = parse_compressor(name)
    message = rounds[0].float()
    payloads, memory = feed_back(compressor, message)
    assert torch.equal(dense(compressor, payloads).float() + memory, message)


# Through the messages


@EACH
def test_a_node_keeps_its_memory_from_round_to_round_and_says_what_it_sends(name: str) -> None:
    node, memory = Node(), np.zeros(SIZE, np.float32)
    for k in range(5):
        node.learnt.append(update(k))
        _, metrics = node.round(name, k, node.learnt[-1])
        assert metrics["message-norm"] == pytest.approx(float(np.linalg.norm(memory + update(k).numpy())))
        memory = node.memory
        assert metrics["memory-norm"] == pytest.approx(float(np.linalg.norm(memory)))
        np.testing.assert_allclose(node.absorbed + memory, total(node.learnt), atol=1e-5)
    assert (metrics["memory-norm"] == 0) == (name == "identity")
    assert metrics["memory-lost"] == 0
    assert Node().round("topk(0.1)", 0, update(0))[1]["payload-bits"] == TopK(0.1).bits(SIZE)


@pytest.mark.parametrize("chunk", [2**30, 2 * SIZE])
def test_nodes_of_one_call_send_what_each_would_send_alone_in_chunks_too(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hedgerow.clients.mods.compress._CHUNK", chunk)
    names = ["topk(2)", "sign", "topk(2)", "sign", "sign", "ternary"]
    together, alone = [Node(i) for i in range(6)], [Node(i) for i in range(6)]
    for k in range(3):
        updates = [Update.between(ZEROS, state(update(10 * k + i))) for i in range(6)]
        for nodes, batches in ((together, [slice(0, 6)]), (alone, [slice(i, i + 1) for i in range(6)])):
            for batch in batches:
                chosen = zip(nodes[batch], names[batch], strict=True)
                calls = [node.call(name, k, acknowledged=k - 1) for node, name in chosen]
                answers = compress_updates(calls, updates[batch])
                assert not any(isinstance(answer, Exception) for answer in answers)
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_array_equal(a.memory, b.memory)


def test_without_error_feedback_nothing_is_kept() -> None:
    node = Node()
    for k in range(2):
        q, metrics = node.round("topk(0.1)", k, update(k), **{"error-feedback": False, "acknowledged": None})
        alone, _ = Node().round("topk(0.1)", 0, update(k))
        np.testing.assert_array_equal(q, alone)
        assert metrics["memory-norm"] == 0
    assert not node.state


# Acknowledgement


@EACH
@pytest.mark.parametrize("losses", [[False, True, True, False, True, False], [True, False]])
def test_a_lost_message_is_taken_back(losses: list[bool], name: str) -> None:
    node = Node()
    for k, lost in enumerate(losses):
        node.learnt.append(update(k))
        _, metrics = node.round(name, k, node.learnt[-1], lost)
        assert metrics["memory-lost"] == 0
    # What was absorbed and what is remembered are all that was ever learnt.
    np.testing.assert_allclose(node.absorbed + node.memory, total(node.learnt), atol=1e-5)


@EACH
def test_a_repeated_round_moves_the_node_once(name: str) -> None:
    repeated, straight = Node(), Node()
    for k in range(4):
        for _ in range(3 if k == 2 else 0):
            repeated.round(name, k, update(k), lost=True)
        repeated.round(name, k, update(k))
        straight.round(name, k, update(k))
    np.testing.assert_allclose(repeated.absorbed, straight.absorbed, atol=1e-6)
    np.testing.assert_allclose(repeated.memory, straight.memory, atol=1e-6)


def test_a_repeated_first_round_starts_from_zero_again() -> None:
    node = Node()
    node.round("topk(2)", 0, update(0), lost=True)
    # A second run on the same grid looks alike, and learns something else.
    q, _ = node.round("topk(2)", 0, update(1))
    np.testing.assert_array_equal(q + node.memory, update(1))


def test_a_node_that_was_not_asked_for_some_rounds_still_remembers_and_a_late_one_lost_nothing() -> None:
    node = Node()
    node.round("topk(1)", 0, update(0))
    before = node.memory
    q, metrics = node.round("topk(1)", 5, update(5))
    np.testing.assert_allclose(q + node.memory, before + update(5).numpy(), atol=1e-6)
    assert metrics["memory-lost"] == Node().round("topk(1)", 4, update(0))[1]["memory-lost"] == 0


@pytest.mark.parametrize(("run_id", "k"), [(1, 0), (2, 0), (2**64 - 1, 3)])
def test_a_new_run_starts_at_zero_whenever_it_first_asks_the_node(run_id: int, k: int) -> None:
    node = Node()
    for earlier in range(3):
        node.round("topk(1)", earlier, update(earlier))
    node.run_id, node.acknowledged = run_id, -1
    q, metrics = node.round("topk(1)", k, update(9))
    np.testing.assert_array_equal(q + node.memory, update(9))
    assert metrics["memory-lost"] == 0


@pytest.mark.parametrize(
    "what", ["state gone", "state older", "state newer", "model changed", "codec damaged"]
)
def test_a_memory_that_was_lost_is_told(what: str) -> None:
    node = Node()
    node.round("topk(1)", 3, update(0))
    k, node.acknowledged = 4, 3
    if what == "state gone":
        node.state = RecordDict()
    elif what == "state older":
        node.acknowledged, k = 7, 8
    elif what == "state newer":
        node.acknowledged, k = 1, 2
    elif what == "damaged":  # of a reply that was lost
        node.acknowledged = 2
        node.state["error-feedback-status"] = ConfigRecord(
            {**node.state.config_records["error-feedback-status"], "compressor": "zip"}
        )
    else:
        node.state["error-feedback"] = ArrayRecord({"after.memory": Array(np.ones(3, np.float32))})
    q, metrics = node.round("topk(1)", k, update(1))
    assert metrics["memory-lost"] == 1
    np.testing.assert_array_equal(q + node.memory, update(1))


# What is wrong with one node


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"compressor": "zip"}, ", got 'zip'"),
        ({"round-index": None}, "round-index must be an integer >= 0, got None"),
        ({"acknowledged": -2}, "acknowledged must be an integer >= -1, got -2"),
        ({"error-feedback": 1}, "error-feedback must be true or false, got 1"),
    ],
)
def test_a_wrong_config_fails_its_node_alone(config: dict[str, Any], message: str) -> None:
    good, bad = Node(0), Node(1)
    updates = [Update.between(ZEROS, state(update(i))) for i in range(2)]
    calls = [bad.call("topk(1)", 0, **config), good.call("topk(1)", 0)]
    failed, answered = compress_updates(calls, updates)
    assert isinstance(failed, ValueError)
    assert message in str(failed)
    assert isinstance(answered, tuple)
    assert not bad.state


def test_an_update_that_is_not_finite_fails_its_node_alone_and_leaves_its_memory() -> None:
    nodes = [Node(0), Node(1)]
    nodes[1].round("topk(1)", 0, update(5))
    before = nodes[1].memory
    updates = [update(0), update(1)]
    updates[1][3] = torch.nan
    answers = compress_updates(
        [node.call("topk(1)", 1) for node in nodes], [Update.between(ZEROS, state(u)) for u in updates]
    )
    assert isinstance(answers[0], tuple)
    assert isinstance(answers[1], ValueError)
    np.testing.assert_array_equal(nodes[1].memory, before)


@pytest.mark.parametrize(
    ("start", "end", "words"),
    [
        (ZEROS, {"layer.weight": torch.zeros(3, 5)}, "must have the arrays that were sent"),
        (ZEROS, {**ZEROS, "layer.bias": torch.zeros(4)}, "must have the arrays that were sent"),
        ({"n": torch.tensor(1)}, {"n": torch.tensor(2)}, "must hold floating-point values"),
    ],
)
def test_an_update_is_between_floats_of_the_same_arrays(start: Any, end: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Update.between(start, end)


# A batched app, and any app with the mod

pytestmark = pytest.mark.usefixtures("flower_identity")
SENT = {
    "w": torch.arange(6.0).reshape(2, 3),
    "bn.running_mean": torch.zeros(2),
    "bn.num_batches_tracked": torch.tensor(4),
}


def learnt_from(sent: dict[str, Tensor], partition_id: int) -> dict[str, Tensor]:
    step = torch.tensor([[1.0, -2, 3], [0.25, -5, partition_id]])
    return {
        "w": sent["w"] + step,
        "bn.running_mean": sent["bn.running_mean"] + 0.5,
        "bn.num_batches_tracked": sent["bn.num_batches_tracked"] + 1,
    }


def batched_app() -> BatchClientApp:
    def learn(calls: Sequence[Call]) -> list[TrainResult | RecordDict | Exception]:
        return [learnt(call) for call in calls]

    def learnt(call: Call) -> TrainResult | Exception:
        if call.partition_id == 2:
            return RuntimeError("broken")
        start = to_state_dict(call.content.array_records["arrays"])
        return TrainResult(learnt_from(start, call.partition_id), {"num-examples": 5}, start)

    def evaluate(calls: Sequence[Call]) -> list[RecordDict | Exception]:
        return [one if isinstance(one := learnt(call), Exception) else one.reply() for call in calls]

    return BatchClientApp(
        {"train": TrainHandler(learn), "train.local": TrainHandler(learn), "evaluate": evaluate}
    )


def third_party_app() -> ClientApp:
    app = ClientApp(mods=[compress_reply])

    def work(message: Message, context: Context) -> Message:
        # keep_input=False empties the record that was received.
        sent = message.content.array_records["arrays"].to_torch_state_dict(keep_input=False)
        partition_id = int(context.node_config["partition-id"])
        if partition_id == 2:
            raise RuntimeError("broken")
        context.state["own"] = MetricRecord({"calls": 1})
        arrays = ArrayRecord(learnt_from(sent, partition_id))
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 5})})
        return Message(content, reply_to=message)

    app.train()(work)
    app.train("local")(work)
    app.evaluate()(work)
    return app


ASKED = {"compressor": "topk(2)", "error-feedback": True, "round-index": 0, "acknowledged": -1}
APPS = pytest.mark.parametrize("app", [batched_app(), third_party_app()], ids=["batched", "third-party"])


def replies(
    app: ClientApp, config: dict[str, Any], message_type: str = "train", grid: InProcessGrid | None = None
) -> list[Message]:
    """Return the replies by partition id."""
    grid = grid or InProcessGrid(app, 3, strict=True)
    content = RecordDict({"arrays": to_record(SENT), "config": ConfigRecord(config)})
    ids = [node_id for node_id in grid._nodes]
    arrived = grid.send_and_receive([Message(content, node_id, message_type) for node_id in ids])
    return sorted(arrived, key=lambda reply: ids.index(reply.metadata.src_node_id))


@APPS
@pytest.mark.parametrize("message_type", ["train", "train.local"])
def test_an_app_that_is_asked_sends_the_compressed_difference_and_keeps_the_rest(
    app: ClientApp, message_type: str
) -> None:
    grid = InProcessGrid(app, 3, strict=True)
    first, second, broken = replies(app, ASKED, message_type, grid)
    assert broken.has_error()
    for reply in (first, second):
        assert list(reply.content) == ["update", "metrics"]
        layout = Update.between(SENT, SENT).layout
        q, rest = unpack_update(parse_compressor("topk(2)"), layout, reply.content.array_records["update"])
        np.testing.assert_array_equal(q, [0, 0, 3, 0, -5, 0])
        np.testing.assert_array_equal(rest["bn.running_mean"], [0.5, 0.5])
        assert rest["bn.num_batches_tracked"] == 5
        metrics = reply.content.metric_records["metrics"]
        assert metrics["num-examples"] == 5
        assert metrics["payload-bits"] == 2 * 32 + index_bits(6, 2)
    later = replies(app, {**ASKED, "round-index": 1, "acknowledged": 0}, message_type, grid)
    # 2 (1, -2, 3, 0.25, -5, 0) less the 3 and -5 that were sent
    assert later[0].content.metric_records["metrics"]["message-norm"] == pytest.approx(
        np.linalg.norm([2, -4, 3, 0.5, -5, 0])
    )


@APPS
@pytest.mark.parametrize("config", [{}, {**ASKED, "compressor": "identity"}])
def test_an_app_that_is_not_asked_answers_as_it_would_and_so_it_evaluates(
    app: ClientApp, config: dict[str, Any]
) -> None:
    for reply in (*replies(app, config)[:2], replies(app, ASKED, "evaluate")[0]):
        assert list(reply.content) == ["arrays", "metrics"]
        assert dict(reply.content.metric_records["metrics"]) == {"num-examples": 5}


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ({"arrays": to_record(SENT)}, "exactly one MetricRecord, got 0"),
        ({"metrics": MetricRecord({"n": 1})}, "exactly one ArrayRecord each, got 0"),
        (
            {"arrays": to_record({"w": SENT["w"]}), "metrics": MetricRecord({"n": 1})},
            "the arrays that were sent",
        ),
    ],
)
def test_a_reply_that_cannot_be_compressed_is_the_nodes_error(records: dict[str, Any], message: str) -> None:
    third = ClientApp(mods=[compress_reply])
    third.train()(lambda instruction, context: Message(RecordDict(records), reply_to=instruction))
    grid = InProcessGrid(third, 3)
    for reply in replies(third, ASKED, grid=grid):
        assert message in reply.error.reason
    assert not any(node.state for node in grid._nodes.values())


def test_error_feedback_is_refused_where_a_message_asks_for_clipped_updates() -> None:
    for reply in replies(third_party_app(), {**ASKED, "clipping_norm": 1.0}):
        assert "guarantee is void" in reply.error.reason
