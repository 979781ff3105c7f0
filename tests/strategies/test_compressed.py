"""Any strategy takes compressed uplinks: Flower's own, this suite's, with what arrives and what is lost."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, arrays_size_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedMedian,
    FedTrimmedAvg,
    Krum,
    MultiKrum,
    Strategy,
)
from torch import nn

from hedgerow.clients import compress_reply
from hedgerow.sim import FaultModel, InProcessGrid, load_checkpoint, save_checkpoint
from hedgerow.strategies import Compressed, SDFeel, TooFewRepliesError
from hedgerow.wire import TopK, payload_bytes, to_record

pytestmark = pytest.mark.usefixtures("flower_identity")

NODES = 4
# What becomes of a reply after it was compressed: (partition id, round index, content) -> content.
Sabotage = Callable[[int, int, RecordDict], RecordDict]


class Classifier(nn.Module):
    """Small, with running statistics and a counter, which are not compressed."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.hidden(x)).relu())


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Classifier()


def initial() -> ArrayRecord:
    return ArrayRecord(model().state_dict())


STREAM = torch.Generator().manual_seed(4)
X = torch.randn(NODES, 40, 6, generator=STREAM)
Y = (X @ torch.randn(6, 3, generator=STREAM)).argmax(-1)


class App:
    """A ClientApp as Flower's quickstart writes it; it knows of this suite only the mod."""

    def __init__(self, mod: bool = True, sabotage: Sabotage | None = None) -> None:
        # (partition id, round index, acknowledged) of every train message
        self.seen: list[tuple[int, int, int]] = []
        self.memory_lost = 0
        self.sabotage = sabotage
        self.app = ClientApp(mods=[self._outside, compress_reply] if mod else [])
        self.app.train()(self._train)
        self.app.evaluate()(self._evaluate)
        self.app.query("whoami")(self._introduce)

    def grid(self, faults: Any = None, seed: int = 0, nodes: int = NODES) -> InProcessGrid:
        return InProcessGrid(self.app, nodes, faults=faults, seed=seed)

    def _train(self, message: Message, context: Context) -> Message:
        i = int(context.node_config["partition-id"])
        net = model()
        net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(X[i]), Y[i])
            loss.backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": 10 * (i + 1), "train_loss": loss.item()})
        return Message(
            RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message
        )

    def _evaluate(self, message: Message, context: Context) -> Message:
        net = model()
        net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        loss = accuracy_and_loss(net)[1]
        return Message(
            RecordDict({"metrics": MetricRecord({"num-examples": 1, "loss": loss})}), reply_to=message
        )

    def _introduce(self, message: Message, context: Context) -> Message:
        i = int(context.node_config["partition-id"])
        me = ConfigRecord({"partition-id": i, "num-examples": 10 * (i + 1)})
        return Message(RecordDict({"whoami": me}), reply_to=message)

    def _outside(self, message: Message, context: Context, call_next: Any) -> Message:
        if message.metadata.message_type != "train":
            return call_next(message, context)  # type: ignore[no-any-return]
        config = message.content.config_records["config"]
        i, k = int(context.node_config["partition-id"]), int(config["round-index"])  # type: ignore[arg-type]
        self.seen.append((i, k, int(config["acknowledged"])))  # type: ignore[arg-type]
        reply: Message = call_next(message, context)
        self.memory_lost += int(reply.content.metric_records["metrics"].get("memory-lost", 0))  # type: ignore[arg-type]
        if self.sabotage is not None:
            reply.content = self.sabotage(i, k, reply.content)
        return reply


def accuracy_and_loss(net: nn.Module) -> tuple[float, float]:
    net.eval()
    with torch.no_grad():
        outputs = net(X.reshape(-1, 6))
    target = Y.reshape(-1)
    return float((outputs.argmax(1) == target).float().mean()), float(
        nn.functional.cross_entropy(outputs, target)
    )


def flowers(kind: Callable[..., Strategy] = FedAvg, **options: Any) -> Strategy:
    return kind(min_available_nodes=NODES, fraction_evaluate=0.0, **options)


def sd_feel(**options: Any) -> SDFeel:
    return SDFeel(num_servers=2, min_available_nodes=NODES, fraction_evaluate=0.0, **options)


def run(strategy: Strategy, grid: InProcessGrid, num_rounds: int = 3, timeout: float = 60.0) -> ArrayRecord:
    # Flower draws the order of the nodes, and so of its sums, from the global generator.
    random.seed(0)
    return strategy.start(grid, initial(), num_rounds=num_rounds, timeout=timeout).arrays


def assert_same_bits(a: ArrayRecord, b: ArrayRecord) -> None:
    assert list(a) == list(b)
    for key in a:
        assert a[key].numpy().tobytes() == b[key].numpy().tobytes(), key


STRATEGIES = pytest.mark.parametrize(
    "make", [flowers, lambda: flowers(FedAdam), lambda: flowers(FedMedian), sd_feel],
    ids=["FedAvg", "FedAdam", "FedMedian", "SDFeel"],
)  # fmt: skip


# What is aggregated


@STRATEGIES
def test_identity_gives_the_strategys_own_arrays_bit_for_bit(make: Callable[[], Strategy]) -> None:
    plain = run(make(), App(mod=False).grid())
    assert_same_bits(run(Compressed(make(), "identity"), App().grid()), plain)


@pytest.mark.parametrize(
    ("make", "compressor"),
    [*((flowers, name) for name in ("topk(0.1)", "sign", "ternary")), (sd_feel, "sign")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_it_learns(make: Callable[[], Strategy], compressor: str) -> None:
    net = model()
    before, _ = accuracy_and_loss(net)
    net.load_state_dict(run(Compressed(make(), compressor), App().grid(), 40).to_torch_state_dict())
    after, _ = accuracy_and_loss(net)
    assert before < 0.5
    assert after > 0.8


def test_each_cluster_is_decoded_onto_its_own_servers_model() -> None:
    # With all entries kept the clusters of a run without gossip drift apart as uncompressed ones do.
    plain, whole = sd_feel(alpha=0), Compressed(sd_feel(alpha=0), "topk(1.0)")
    run(plain, App(mod=False).grid())
    run(whole, App().grid())
    for a, b in zip(plain.server_models(), whole.server_models(), strict=True):
        np.testing.assert_allclose(a["out.weight"].numpy(), b["out.weight"].numpy(), atol=1e-5)
    assert whole.consensus_error() > 0


def test_nodes_that_are_sent_the_same_share_one_content() -> None:
    strategy, grid = Compressed(flowers()), App().grid()
    messages = strategy.configure_train(1, initial(), ConfigRecord({"lr": 0.1}), grid)
    assert len({id(message.content) for message in messages}) == 1
    assert dict(messages[0].content.config_records["config"]) == {
        "lr": 0.1,
        "server-round": 1,
        "compressor": "topk(0.01)",
        "error-feedback": True,
        "round-index": 0,
        "acknowledged": -1,
    }


# What is counted


def test_the_uplink_is_counted_as_it_travelled() -> None:
    sizes: list[int] = []

    def measure(i: int, k: int, content: RecordDict) -> RecordDict:
        sizes.append(content.array_records["update"].count_bytes())
        return content

    strategy = Compressed(flowers(), "topk(0.1)")
    run(strategy, App(sabotage=measure).grid(), num_rounds=2)
    state = model().state_dict()
    # Running statistics and counters travel beside the update, and no paper counts them.
    size = sum(v.numel() for k, v in state.items() if "running" not in k and "tracked" not in k)
    assert strategy.uplink_payload_bytes == sum(sizes)
    assert strategy.uplink_bits == 2 * NODES * TopK(0.1).bits(size)
    assert strategy.dense_uplink_payload_bytes == 2 * NODES * payload_bytes(initial())
    assert strategy.dense_uplink_bits == 2 * NODES * 32 * size


# What is lost


def changed(content: RecordDict, **arrays: Any) -> RecordDict:
    record = content.array_records["update"].copy()
    for key, array in arrays.items():
        record[key] = Array(array)
    return RecordDict({**content, "update": record})


# Payloads that are none are tests/wire/test_compress.py's, metrics tests/strategies/test_inbox.py's.
GARBAGE: dict[str, tuple[Sabotage, str]] = {
    "nothing": (lambda i, k, content: RecordDict(), "bad metrics"),
    "NaN": (lambda i, k, content: changed(content, values=np.full(9, np.nan, np.float32)), "non-finite"),
    "dense": (
        lambda i, k, content: RecordDict({"arrays": initial(), **content.metric_records}),
        "not compressed",
    ),
    "two records": (lambda i, k, content: RecordDict({**content, "more": initial()}), "bad arrays"),
}


@pytest.mark.parametrize("make", [flowers, sd_feel], ids=["FedAvg", "SDFeel"])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_reply_that_does_not_decode_is_lost_and_counted(make: Callable[[], Strategy], garbage: str) -> None:
    spoil, reason = GARBAGE[garbage]
    bad = App(sabotage=lambda i, k, content: spoil(i, k, content) if i == 2 else content)
    strategy = Compressed(make(), "topk(0.1)")
    arrays = run(strategy, bad.grid(), num_rounds=2)
    assert all(np.isfinite(array.numpy()).all() for array in arrays.values())
    assert (strategy.report.sent, strategy.report.accepted) == (NODES, NODES - 1)
    assert dict(strategy.report.rejected) == {reason: 1}
    # The node that is not heard takes its update back; the others know that theirs arrived.
    assert {seen for seen in bad.seen if seen[1] == 1} == {(i, 1, -1 if i == 2 else 0) for i in range(NODES)}
    assert bad.memory_lost == 0


@pytest.mark.parametrize("make", [flowers, sd_feel], ids=["FedAvg", "SDFeel"])
def test_a_model_that_overflows_is_lost(make: Callable[[], Strategy]) -> None:
    def largest(i: int, k: int, content: RecordDict) -> RecordDict:
        count = content.array_records["update"]["values"].shape[0]
        return changed(content, values=np.full(count, 3.4e38, np.float32)) if i == 2 else content

    strategy = Compressed(make(), "topk(1.0)", error_feedback=False)
    state = {
        key: torch.full_like(v, 3e38) if key == "out.bias" else v for key, v in model().state_dict().items()
    }
    random.seed(0)
    messages = strategy.configure_train(
        1, to_record(state), ConfigRecord(), grid := App(sabotage=largest).grid()
    )
    strategy.aggregate_train(1, grid.send_and_receive(messages))
    assert strategy.report.rejected["non-finite"] >= 1


@pytest.mark.parametrize(("make", "message"), [(flowers, 1), (sd_feel, 2)], ids=["FedAvg", "SDFeel"])
def test_errors_and_silence_are_counted_too(make: Callable[[], Strategy], message: int) -> None:
    # SD-FEEL's first message asks who is there.
    faults = {1: FaultModel(crash_at={1: message}), 3: FaultModel(corrupt="nan")}
    strategy = Compressed(make(), "sign")
    run(strategy, App().grid(faults), num_rounds=1, timeout=5.0)
    lost = dict(strategy.report.rejected)
    assert strategy.report.accepted == NODES - 2
    assert lost.pop("wrong dtype") == 1  # NaN in place of packed bits
    (reason,) = lost
    assert reason in ("error 3", "error 5", "no reply")


def test_a_node_is_told_which_of_its_updates_was_absorbed_last() -> None:
    def silent(i: int, k: int, content: RecordDict) -> RecordDict:
        return RecordDict() if (i, k) in ((0, 1), (3, 1), (3, 2)) else content

    app = App(sabotage=silent)
    run(Compressed(flowers(), "topk(0.1)"), app.grid(), num_rounds=5)
    told = {i: [a for j, k, a in sorted(app.seen) if j == i] for i in range(NODES)}
    assert told == {0: [-1, 0, 0, 2, 3], 1: [-1, 0, 1, 2, 3], 2: [-1, 0, 1, 2, 3], 3: [-1, 0, 0, 0, 3]}
    assert app.memory_lost == 0


def test_a_round_that_is_repeated_has_absorbed_nothing() -> None:
    tries: list[int] = []

    def first_try_fails(i: int, k: int, content: RecordDict) -> RecordDict:
        tries.append(k)
        return RecordDict() if k == 1 and i < 2 and tries.count(1) <= NODES else content

    app = App(sabotage=first_try_fails)
    strategy = Compressed(sd_feel(min_train_nodes=NODES), "topk(0.1)")
    repeated = run(strategy, app.grid())
    assert sorted(a for _, k, a in app.seen if k == 1) == [0] * 2 * NODES
    # Each node's update of the repeated round counts once.
    straight = run(Compressed(sd_feel(), "topk(0.1)"), App().grid())
    for key in straight:
        np.testing.assert_allclose(repeated[key].numpy(), straight[key].numpy(), atol=1e-6, err_msg=key)


def test_a_reply_that_the_wrapped_strategy_does_not_take_is_not_absorbed() -> None:
    class First(SDFeel):
        """Hears two replies and no more."""

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            heard = (reply for reply, _ in zip(replies, range(2), strict=False))
            return super().aggregate_train(server_round, heard)

    app = App()
    first = First(num_servers=2, min_available_nodes=NODES, fraction_evaluate=0.0)
    strategy = Compressed(first, "topk(0.1)")
    run(strategy, app.grid(), num_rounds=2)
    assert sorted(a for _, k, a in app.seen if k == 1) == [-1, -1, 0, 0]


def exchanged(strategy: Compressed, grid: InProcessGrid) -> list[Message]:
    messages = strategy.configure_train(1, initial(), ConfigRecord(), grid)
    return grid.send_and_receive(messages)


def test_replies_keep_their_metadata() -> None:
    strategy, grid = Compressed(flowers(), "topk(0.1)"), App().grid()
    replies = exchanged(strategy, grid)
    replies[0].content.array_records["update"].pop("values")
    before = [reply.metadata for reply in replies]
    handed_on: list[Message] = []
    strategy.strategy.aggregate_train = lambda n, r: (handed_on.extend(r), (None, None))[1]  # type: ignore[method-assign]
    strategy.aggregate_train(1, replies)
    assert handed_on[0].has_error()
    assert "values" in handed_on[0].error.reason
    for metadata, reply in zip(before, handed_on, strict=True):
        for name in (
            "src_node_id",
            "dst_node_id",
            "reply_to_message_id",
            "group_id",
            "message_type",
            "run_id",
        ):
            assert getattr(reply.metadata, name) == getattr(metadata, name)


@pytest.mark.parametrize("make", [flowers, sd_feel], ids=["FedAvg", "SDFeel"])
def test_strangers_and_echoes_are_not_heard(make: Callable[[], Strategy]) -> None:
    strategy = Compressed(make(), "topk(0.1)")
    grid = App().grid()
    replies = exchanged(strategy, grid)
    instruction = Message(RecordDict(), 99, "train")
    stranger = Message(replies[0].content, reply_to=instruction)
    arrays, _ = strategy.aggregate_train(1, iter([*replies, replies[0], stranger]))
    assert arrays is not None
    assert strategy.report.accepted == NODES
    assert dict(strategy.report.rejected) == {"duplicate": 1, "unknown node": 1}


def test_a_reply_to_another_round_is_stale() -> None:
    strategy, grid = Compressed(sd_feel(), "topk(0.1)"), App().grid()
    late = exchanged(strategy, grid)
    messages = strategy.configure_train(2, initial(), ConfigRecord(), grid)
    strategy.aggregate_train(2, iter([late[0], *grid.send_and_receive(messages)]))
    assert strategy.report.accepted == NODES
    assert dict(strategy.report.rejected) == {"stale": 1}


# A strategy among strategies


def test_what_is_not_its_own_is_the_wrapped_strategys() -> None:
    inner = sd_feel(tau1=3)
    strategy: Any = Compressed(inner)
    assert strategy.local_steps == 3
    strategy.max_repeats = 7
    assert inner.max_repeats == 7
    with pytest.raises(AttributeError, match="no_such_thing"):
        strategy.no_such_thing  # noqa: B018


def test_callbacks_are_told_of_the_replies_that_did_not_decode() -> None:
    ends: list[Any] = []
    inner = sd_feel(on_round_end=[ends.append])
    app = App(sabotage=lambda i, k, content: RecordDict() if i == 0 else content)
    run(Compressed(inner, "topk(0.1)"), app.grid(), num_rounds=2)
    assert [end.round for end in ends] == [0, 1, 2]
    assert [end.rejected for end in ends[1:]] == [{"bad metrics": 1}] * 2


def test_evaluation_is_the_wrapped_strategys() -> None:
    strategy = Compressed(FedAvg(min_available_nodes=NODES), "topk(0.1)")
    result = strategy.start(App().grid(), initial(), num_rounds=2)
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2]
    assert "loss" in result.evaluate_metrics_clientapp[2]
    assert "memory-norm" in result.train_metrics_clientapp[2]


@pytest.mark.parametrize("make", [flowers, sd_feel], ids=["FedAvg", "SDFeel"])
def test_a_second_run_starts_anew(make: Callable[[], Strategy]) -> None:
    strategy, app = Compressed(make(), "topk(0.1)"), App()
    first = run(strategy, app.grid())
    bits = strategy.uplink_bits
    assert_same_bits(run(strategy, app.grid()), first)
    assert strategy.uplink_bits == bits
    # The nodes' memories of the first run are there, and do not count.
    grid = app.grid()
    run(strategy, grid)
    assert_same_bits(run(strategy, grid), first)


def test_a_run_that_was_stopped_and_resumed_ends_as_one_that_was_not(tmp_path: Any) -> None:
    straight, other = Compressed(sd_feel(), "topk(0.1)"), Compressed(sd_feel(), "topk(0.1)")
    expected = run(straight, App().grid(), num_rounds=4)
    grid = App().grid()
    run(other, grid, num_rounds=2)
    save_checkpoint(tmp_path / "checkpoint", {"strategy": other.state_dict(), "nodes": grid.state_dict()})
    stored = load_checkpoint(tmp_path / "checkpoint")
    resumed, app = Compressed(sd_feel(), "topk(0.1)"), App()
    again = app.grid(seed=5)  # Other node ids, the same run.
    again.set_run(grid.run)
    assert set(again.get_node_ids()).isdisjoint(grid.get_node_ids())
    again.load_state_dict(stored["nodes"])
    resumed.load_state_dict(stored["strategy"])
    assert_same_bits(run(resumed, again, num_rounds=4), expected)
    assert app.memory_lost == 0
    assert (resumed.uplink_bits, resumed.uplink_payload_bytes) == (
        straight.uplink_bits,
        straight.uplink_payload_bytes,
    )
    assert resumed.state_dict()["uplink"] == straight.state_dict()["uplink"]


# What it wraps, and what is wrapped around it


def krum(**options: Any) -> Strategy:
    return flowers(MultiKrum, num_malicious_nodes=1, num_nodes_to_select=2, **options)


ROBUST = pytest.mark.parametrize(
    "make",
    [lambda: flowers(FedMedian), lambda: flowers(FedTrimmedAvg, beta=0.25), lambda: flowers(Krum), krum],
    ids=["FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum"],
)


@ROBUST
def test_a_robust_strategy_learns_from_entries_that_all_nodes_tell(make: Callable[[], Strategy]) -> None:
    net = model()
    net.load_state_dict(run(Compressed(make(), "randk(0.2)"), App().grid(), 40).to_torch_state_dict())
    assert accuracy_and_loss(net)[0] > 0.8


@ROBUST
@pytest.mark.parametrize("compressor", ["topk(0.1)", "topk(100)", "ternary"])
def test_a_robust_strategy_refuses_entries_that_each_node_chooses(
    make: Callable[[], Strategy], compressor: str
) -> None:
    words = r"compressor must be .* 'randk\(0.1\)' with smaller local steps for .*got .*most want no change"
    with pytest.raises(ValueError, match=words):
        Compressed(make(), compressor)


def test_all_nodes_are_asked_for_the_same_entries_and_others_in_each_round() -> None:
    strategy, app = Compressed(flowers(), "randk(0.2)"), App()
    asked = [
        {
            str(m.content["config"]["compressor"])
            for m in strategy.configure_train(r, initial(), ConfigRecord(), grid)
        }
        for grid in [app.grid()]
        for r in (1, 2)
    ]
    assert asked == [{"randk(0.2,round=0)"}, {"randk(0.2,round=1)"}]


def test_only_the_updates_that_krum_selects_are_absorbed() -> None:
    app = App()
    run(Compressed(krum(), "randk(0.2)"), app.grid(), num_rounds=2)
    assert sorted(a for _, k, a in app.seen if k == 1) == [-1, -1, 0, 0]


def test_without_the_mod_a_strategy_of_flowers_stops_after_the_first_round() -> None:
    with pytest.raises(TooFewRepliesError, match=r"Round 1: .*4 x not compressed.*mods=\[compress_reply\]"):
        run(Compressed(flowers(), "topk(0.1)"), App(mod=False).grid())


class Clipped(App):
    """An App whose updates are clipped: before they are compressed, or by a mod in front of that."""

    def __init__(self, mods: list[Any]) -> None:
        super().__init__(mod=False)
        self.app = ClientApp(mods=mods)
        self.app.train()(self._train)


LOCAL_NOISE = LocalDpMod(clipping_norm=1.0, sensitivity=1e-3, epsilon=1.0, delta=1e-5)


def test_local_noise_may_be_compressed_with_error_feedback() -> None:
    """Whatever is made of an update that a node has noised costs no more of its privacy."""
    app = Clipped([compress_reply, arrays_size_mod, LOCAL_NOISE])
    strategy = Compressed(flowers(), "topk(0.1)")
    run(strategy, app.grid(), num_rounds=2)
    assert strategy.report.accepted == NODES


@pytest.mark.parametrize("mod", [fixedclipping_mod, adaptiveclipping_mod])
def test_a_clip_in_front_of_compression_is_told_the_order(mod: Any) -> None:
    with pytest.raises(TooFewRepliesError, match=r"4 x error 6.*compress_reply comes before"):
        run(Compressed(flowers(), "topk(0.1)"), Clipped([mod, compress_reply]).grid())


def test_local_noise_in_front_of_compression_loses_all_replies_and_the_order_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("WARNING", "flwr"):
        run(Compressed(flowers(), "topk(0.1)"), Clipped([LOCAL_NOISE, compress_reply]).grid())
    assert "compress_reply is first" in caplog.text


CLIENT = [DifferentialPrivacyClientSideFixedClipping, DifferentialPrivacyClientSideAdaptiveClipping]
SERVER = [DifferentialPrivacyServerSideFixedClipping, DifferentialPrivacyServerSideAdaptiveClipping]


def private(kind: Any, strategy: Strategy) -> Strategy:
    if "Fixed" in kind.__name__:
        return kind(strategy, noise_multiplier=1e-6, clipping_norm=5.0, num_sampled_clients=NODES)  # type: ignore[no-any-return]
    return kind(strategy, noise_multiplier=1e-6, num_sampled_clients=NODES, initial_clipping_norm=5.0)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", CLIENT)
def test_a_strategy_whose_nodes_clip_refuses_error_feedback(kind: Any) -> None:
    with pytest.raises(ValueError, match=f"strategy is {kind.__name__}.*guarantee is void"):
        Compressed(private(kind, flowers()), "topk(0.1)")


@pytest.mark.parametrize("kind", CLIENT)
def test_what_is_clipped_may_be_compressed_without_error_feedback(kind: Any) -> None:
    mod = fixedclipping_mod if "Fixed" in kind.__name__ else adaptiveclipping_mod
    norms: list[float] = []

    def measure(message: Message, context: Context, call_next: Any) -> Message:
        reply: Message = call_next(message, context)
        norms.append(float(reply.content["metrics"]["message-norm"]))
        return reply

    run(
        Compressed(private(kind, flowers()), "topk(0.5)", error_feedback=False),
        Clipped([measure, compress_reply, mod]).grid(),
        num_rounds=2,
    )
    assert len(norms) == 2 * NODES
    assert max(norms) <= 5.0 * (1 + 1e-5)


@pytest.mark.parametrize("kind", [*SERVER, *CLIENT])
def test_a_clip_around_compression_is_refused_when_the_run_begins(kind: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"must not be Compressed.*write Compressed\({kind.__name__}\(\.\.\.\)\)"
    ):
        run(private(kind, Compressed(flowers(), "topk(0.1)")), App().grid())


def test_a_name_that_is_no_compressor_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"compressor must be 'identity', .*got 'zip'"):
        Compressed(flowers(), "zip")


def test_messages_of_several_models_are_refused() -> None:
    class TwoModels(FedAvg):
        def configure_train(self, *args: Any) -> Sequence[Message]:
            messages = list(super().configure_train(*args))
            messages[0].content["more"] = initial()
            return messages

    strategy = Compressed(flowers(TwoModels))
    with pytest.raises(ValueError, match=r"must hold one ArrayRecord .*got 2 and 1"):
        strategy.configure_train(1, initial(), ConfigRecord(), App().grid())


def test_the_summary_names_the_compressor(caplog: pytest.LogCaptureFixture) -> None:
    Compressed(flowers(), "topk(0.1)").summary()
    assert "topk(0.1)" in caplog.text
    assert "Sampling" in caplog.text
