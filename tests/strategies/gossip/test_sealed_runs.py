"""Runs of CEPS and its baselines whose links are sealed, and a relay that attacks them.

Nodes are devices here, with keys of their own, unless a test says that they are simulated.
"""

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from tests.clients.ceps.federation import squares
from tests.strategies.gossip.nodes import payloads_within
from tests.strategies.recording_grid import RecordingGrid

from hedgerow.clients import ceps_client
from hedgerow.sim import FaultModel, flower_identity
from hedgerow.sim.engine.nodes import RemoteState
from hedgerow.strategies import CEPS, DCDPSGD, DPSGD, NODE_TO_NODE, SGP, Gossip, Monitor, OneBitCode, RoundEnd
from hedgerow.strategies.gossip import SET_UP
from hedgerow.wire import (
    HUB_TO_NODE,
    LINKS_RECORD,
    NODE_TO_HUB,
    SEAL_BYTES,
    SEALED_RECORD,
    SECRET_RECORD,
    Codec,
    PayloadError,
    Purpose,
    SealingKey,
    parse_codec,
    payload_bytes,
    view,
)
from hedgerow.wire.sealed import INTRODUCTION_BYTES, Link, NodeIdentity

M, N, S, D, SEED = 6, 60, 3, 90, 5
PROBLEMS = squares(2, M, N, S)
APP = ceps_client(lambda context: PROBLEMS[int(context.node_config["partition-id"])])

# Type of a message, the node it is for, its content: changed in place.
Attack = Callable[[str, int, RecordDict], None]


class Relay(RecordingGrid):
    """A server that keeps all that passes, and may change what it hands on."""

    def __init__(self, attack: Attack | None = None, **options: Any) -> None:
        super().__init__(APP, M, strict=True, push=attack, pull=self._told, **options)
        # What was published, as it was before anything was coded: sender, iteration, vector.
        self.published: list[tuple[int, int, Any, ConfigRecord]] = []

    def _told(self, kind: str, sender: int, reply: Message) -> None:
        if reply.has_content() and "payload" in reply.content:
            state = self.states()[sender]
            k = int(state.config_records["ceps-state"]["iteration"])  # type: ignore[arg-type]
            arrays = state.array_records["ceps"]
            vector = view(arrays["w" if "w" in arrays else "x"]).copy()
            self.published.append((sender, k, vector, reply.content.config_records["payload"]))

    def models(self) -> Any:
        return np.stack(
            [view(state.array_records["ceps"]["w"]) for _, state in sorted(self.states().items())]
        )


def ceps(**parameters: Any) -> CEPS:
    defaults: dict[str, Any] = {
        "dim": N, "sparsity": S, "measurements": D, "topology": "ring", "interval": (2, 3), "seed": SEED,
        "min_available_nodes": M, "num_iterations": 14, "participation": 1.0, "sealed": True,
    }  # fmt: skip
    return CEPS(**{**defaults, **parameters})


def run(strategy: Gossip, grid: Relay | None = None, num_rounds: int = 100) -> tuple[Relay, list[RoundEnd]]:
    grid, ends = grid or Relay(), []
    strategy.on_round_end = [ends.append]
    with flower_identity(1):
        strategy.start(grid, ArrayRecord(), num_rounds=num_rounds, timeout=60.0)
    return grid, [end for end in ends if end.round]


def total(ends: list[RoundEnd], key: str) -> float:
    return sum(end.train.get(key, 0) for end in ends)


# The same bits


STRATEGIES: dict[str, Callable[..., Gossip]] = {
    "one bit": ceps,
    "of the receivers' matrices": lambda **more: ceps(code=OneBitCode(phi_owner="receiver"), **more),
    "dense": lambda **more: ceps(codec="dense64", **more),
    "stragglers": lambda **more: ceps(stragglers=True, participation=0.5, **more),
    "dcd-psgd": lambda **more: DCDPSGD(
        dim=N, learning_rate=0.02, min_available_nodes=M, num_iterations=6, seed=SEED, **more
    ),
    "sgp": lambda **more: SGP(
        dim=N, learning_rate=0.02, topology="directed-out(2)", local_steps=2, min_available_nodes=M,
        num_iterations=8, seed=SEED, **more,
    ),
    "d-psgd-dn": lambda **more: DPSGD(
        dim=N, learning_rate=0.02, dynamic=True, local_steps=2, min_available_nodes=M, num_iterations=8,
        seed=SEED, **more,
    ),
}  # fmt: skip


def final(strategy: Gossip, grid: Relay) -> tuple[Any, list[RoundEnd]]:
    _, ends = run(strategy, grid)
    key = "w" if strategy.method.name == "ceps" else "x"
    arrays = [state.array_records["ceps"][key] for _, state in sorted(grid.states().items())]
    return np.stack([view(array) for array in arrays]), ends


@pytest.mark.parametrize("name", STRATEGIES)
def test_sealing_moves_no_bit_of_a_simulation(name: str) -> None:
    faults = FaultModel(dropout=0.15) if name == "one bit" else None
    plain, before = final(STRATEGIES[name](sealed=False), Relay(faults=faults))
    sealed, after = final(STRATEGIES[name](sealed=True), Relay(faults=faults))
    assert np.array_equal(plain, sealed)
    told = ("withheld", "unopened", "pinning")
    for one, other in zip(before, after, strict=True):
        assert one.train == {key: value for key, value in other.train.items() if key not in told}
    assert total(after, "unopened") == total(after, "withheld") == 0


# The relay that decodes


def guesses(codec: Codec, run_seed: int, sender: int, payload: bytes) -> list[Any]:
    """Return all that a payload, or a part of it, decodes to by what the server was told."""
    parts = {
        payload,
        payload[12:-16],
        payload[SEAL_BYTES:],
        payload[:-SEAL_BYTES],
        payload[44:],
        payload[28:-16],
    }
    decoded = []
    for part in parts:
        try:
            decoded.append(codec.decode(part, N, (run_seed, sender, int(Purpose.SENSING))))
        except PayloadError:
            continue
    return [vector for vector in decoded if vector is not None]


def read_back(grid: Relay) -> list[float]:
    """Return how like the model the relay's best guess is, for each payload of another than zero."""
    hello = next(content for kind, _, content in grid.sent if kind == "query.hello")["config"]
    code = {key: hello[key] for key in ("s", "d", "gamma", "expand", "compand", "decoder")}
    codec = parse_codec(hello["codec"], **code, phi_density=hello["phi-density"])
    likeness = []
    for sender, _, vector, record in grid.published:
        payloads = record["bytes"] if isinstance(record["bytes"], list) else [record["bytes"]]
        for payload in payloads if vector.any() else []:
            found = guesses(codec, hello["run-seed"], sender, payload)
            # Random bytes are numbers up to 1e308, whose squares would overflow.
            scaled = [one / np.abs(one).max() for one in found if one.any()]
            cosines = [
                abs(float(one @ vector)) / (np.linalg.norm(one) * np.linalg.norm(vector)) for one in scaled
            ]
            likeness.append(max(cosines, default=0.0))
    return likeness


@pytest.mark.parametrize("codec", ["1bcs", "dense64", "sparse32"])
def test_a_relay_reads_all_models_of_a_plain_run(codec: str, devices: Path) -> None:
    grid, _ = run(ceps(codec=codec, sealed=False))
    likeness = read_back(grid)
    assert len(likeness) > 20
    assert np.mean(np.array(likeness) > 0.9) > 0.95


@pytest.mark.parametrize("codec", ["1bcs", "dense64", "sparse32"])
def test_a_relay_reads_no_model_of_a_sealed_run(codec: str, devices: Path) -> None:
    grid, ends = run(ceps(codec=codec))
    assert total(ends, "deliveries") > 20
    assert total(ends, "unopened") == 0
    likeness = read_back(grid)
    assert len(likeness) > 20
    # A guess is right as often as one that knows nothing: sparse vectors at random places.
    rng = np.random.default_rng(0)
    truths = [vector for _, _, vector, _ in grid.published if vector.any()]
    blind = []
    for truth in truths:
        guess = np.zeros((6, N))
        for row in guess:
            row[rng.choice(N, S, replace=False)] = rng.standard_normal(S)
        blind.append(max(abs(guess @ truth) / np.linalg.norm(guess, axis=1) / np.linalg.norm(truth)))
    assert np.mean(likeness) <= np.mean(blind) + 0.1
    assert np.mean(np.array(likeness) > 0.9) <= 0.05


def test_nothing_that_the_server_sees_or_keeps_holds_a_secret(devices: Path) -> None:
    strategy = ceps()
    grid, _ = run(strategy)
    seen = payloads_within([grid.sent, grid.replies, strategy.state_dict(), vars(strategy)])
    haystack = b"|".join(seen) + json.dumps(strategy.state_dict()).encode()
    assert len(seen) > 50
    keys = [SealingKey.at(path).private for path in (devices / "hedgerow-keys").iterdir()]
    assert len(keys) == M
    for state in grid.states().values():
        keys.append(state.config_records[SECRET_RECORD]["link-session"])  # type: ignore[arg-type]
        _, told, _ = json.loads(state.config_records[LINKS_RECORD]["links"])  # type: ignore[arg-type]
        seeds = [bytes.fromhex(seed) for key, seed in told.items() if key.startswith("sensing/")]
        assert len(seeds) == 3  # Its own and its neighbours'.
        keys += seeds
    assert len({*keys}) == M + M + M
    for key in keys:
        for spelt in (key, base64.b64encode(key), key.hex().encode()):
            assert spelt not in haystack


# What the relay changes


@dataclass
class At:
    """Changes the payloads for some receivers from one event on, so often; keeps those of before."""

    change: Callable[["At", int, ConfigRecord], None]
    event: int = 4
    times: int = 1
    box: list[tuple[int, dict[str, bytes]]] = field(default_factory=list)
    events: set[int] = field(default_factory=set)
    changed: int = 0

    def __call__(self, kind: str, receiver: int, content: RecordDict) -> None:
        if kind != "train.update":
            return
        k, bundle = content.config_records["config"]["iteration"], content.config_records["bundle"]
        self.events.add(int(k))  # type: ignore[arg-type]
        before = {str(j): payload for j, payload in bundle.items()}
        if self.event <= len(self.events) < self.event + self.times and bundle:
            self.change(self, receiver, bundle)
            self.changed += sum(before[j] != payload for j, payload in bundle.items())
        self.box.append((receiver, before))  # type: ignore[arg-type]


def altered(at: At, receiver: int, bundle: ConfigRecord) -> None:
    for j, payload in bundle.items():
        bundle[j] = bytes([payload[0] ^ 1]) + payload[1:]  # type: ignore[index]


def replayed(at: At, receiver: int, bundle: ConfigRecord) -> None:
    for j in bundle:
        earlier = [box[j] for i, box in at.box if i == receiver and j in box]
        bundle[j] = earlier[-1] if earlier else bundle[j]


def swapped(at: At, receiver: int, bundle: ConfigRecord) -> None:
    senders = list(bundle)
    payloads = [bundle[j] for j in senders]
    for j, payload in zip(senders, payloads[1:] + payloads[:1], strict=True):
        bundle[j] = payload


def of_another_link(at: At, receiver: int, bundle: ConfigRecord) -> None:
    for j in bundle:
        others = [box[j] for i, box in at.box if i != receiver and j in box]
        bundle[j] = others[-1] if others else bundle[j]


def sent_back(at: At, receiver: int, bundle: ConfigRecord) -> None:
    for j in bundle:
        own = [box[str(receiver)] for i, box in at.box if str(i) == j and str(receiver) in box]
        bundle[j] = own[-1] if own else bundle[j]


def emptied(at: At, receiver: int, bundle: ConfigRecord) -> None:
    for j in bundle:
        bundle[j] = b""


@pytest.mark.parametrize("change", [altered, replayed, swapped, of_another_link, sent_back, emptied])
def test_what_a_relay_changes_is_refused_and_counted_and_the_run_goes_on(
    change: Callable[[At, int, ConfigRecord], None], devices: Path
) -> None:
    attack = At(change)
    grid, ends = run(ceps(), Relay(attack))
    assert attack.changed
    refused = [end.train["unopened"] for end in ends]
    assert refused[3] == attack.changed
    assert ends[3].train["unopened-altered-or-replayed"] == attack.changed
    # Before and after it all that is delivered is read.
    assert sum(refused) == attack.changed
    assert len(ends) == len(run(ceps())[1])
    assert np.isfinite(grid.models()).all()


def test_the_same_changes_go_unnoticed_in_a_plain_run(devices: Path) -> None:
    attack = At(swapped)
    _, ends = run(ceps(sealed=False, codec="dense64"), Relay(attack))
    assert attack.changed
    assert total(ends, "rejected") == 0


# The relay that stands between


class Between:
    """Tells senders that it is their receivers, from some request on, and reads what they seal for it."""

    def __init__(self, after: int = 0) -> None:
        self.me, self.after, self.requests = NodeIdentity(SealingKey.drawn(), SealingKey.drawn()), after, 0
        self.posed: list[tuple[int, int]] = []

    def __call__(self, kind: str, sender: int, content: RecordDict) -> None:
        if kind != "query.publish":
            return
        self.requests += 1
        if self.requests <= self.after:
            return
        request = content.config_records["config"]
        receivers: list[int] = request["receivers"]  # type: ignore[assignment]
        content["introductions"] = ConfigRecord({str(i): self.me.introduction for i in receivers})
        self.posed.append((sender, int(request["iteration"])))  # type: ignore[arg-type]

    def read(self, grid: Relay) -> list[tuple[Any, Any]]:
        """Return what it reads, each beside what was published."""
        introductions = {
            partition: content.config_records["hello"]["introduction"]
            for kind, partition, content in grid.replies
            if kind == "query.hello"
        }
        found = []
        receivers = {
            (partition, content["config"]["iteration"]): content["config"]["receivers"]
            for kind, partition, content in grid.sent
            if kind == "query.publish"
        }
        for sender, k, vector, record in grid.published:
            secret = self.me.secret_with(introductions[sender])  # type: ignore[arg-type]
            for i, payload in zip(receivers[sender, k], record["bytes"], strict=True):  # type: ignore[arg-type]
                try:
                    opened = Link(secret, str(grid.run.run_id), str(i), str(sender)).open(
                        payload, k, "seed and payload"
                    )
                except PayloadError:
                    continue
                found.append((parse_codec("dense64").decode(opened[16:], N, (0,)), vector))
        return found


def test_a_relay_between_nodes_that_know_no_key_reads_them(devices: Path) -> None:
    between = Between()
    grid, _ = run(ceps(codec="dense64"), Relay(between))
    found = between.read(grid)
    assert len(found) > 20
    assert all(np.array_equal(*one) for one in found)


def test_a_relay_that_comes_between_later_is_noticed_and_reads_nothing(devices: Path) -> None:
    between = Between(after=30)
    grid, ends = run(ceps(codec="dense64"), Relay(between))
    assert between.posed
    assert between.read(grid) == []
    assert total(ends, "withheld") >= len(between.posed)


def pinned(folder: Path, wrong: Mapping[int, int] | None = None) -> list[dict[str, Any]]:
    """Return node configs whose nodes know all keys; some nodes' are given as another node's."""
    keys = {i: SealingKey.at(folder / f"{i}.pem") for i in range(M)}
    named = {i: base64.b64encode(keys[(wrong or {}).get(i, i)].public).decode() for i in keys}
    pins = folder / "neighbours.toml"
    pins.write_text("".join(f'{i} = "{key}"\n' for i, key in named.items()))
    return [{"sealing-key": str(folder / f"{i}.pem"), "neighbour-keys": str(pins)} for i in keys]


def test_a_relay_never_stands_between_nodes_that_pin_their_neighbours(devices: Path) -> None:
    between = Between()
    grid, ends = run(ceps(codec="dense64"), Relay(between, node_configs=pinned(devices)), num_rounds=4)
    assert between.posed
    assert between.read(grid) == []
    assert total(ends, "deliveries") == 0
    assert total(ends, "withheld") >= len(between.posed)


def test_nodes_that_pin_their_neighbours_run_and_are_counted(devices: Path) -> None:
    _, ends = run(ceps(), Relay(node_configs=pinned(devices)))
    assert {end.train["pinning"] for end in ends} == {M}
    assert total(ends, "unopened") == total(ends, "withheld") == 0
    assert total(ends, "deliveries") > 20


def test_a_node_with_another_key_than_is_pinned_is_left_out(devices: Path) -> None:
    configs = pinned(devices, wrong={2: 3})
    _, ends = run(ceps(), Relay(node_configs=configs))
    assert total(ends, "withheld") > 0
    assert total(ends, "deliveries") > 0


@pytest.mark.parametrize("key", ["sealing-key", "neighbour-keys"])
def test_who_has_keys_publishes_nothing_in_a_plain_run(key: str, devices: Path) -> None:
    configs = [{key: config[key]} for config in pinned(devices)]
    grid = Relay(node_configs=configs)
    with pytest.raises(Exception, match="No node answered"):
        run(ceps(sealed=False), grid)
    assert grid.published == []


def test_a_state_that_the_server_made_up_is_refused(devices: Path) -> None:
    grid, _ = run(ceps(), Relay(node_configs=pinned(devices)), num_rounds=3)
    node = next(iter(grid._nodes.values()))
    config = ConfigRecord({**node.state.config_records["ceps-config"], "sealed": False})
    forged = RecordDict({**node.state, "ceps-config": config})
    forged["hedgerow.node"] = ConfigRecord({"partition-id": node.partition_id, "run": str(grid.run.run_id)})
    before = {name: dict(record) for name, record in node.state.items()}
    with flower_identity(1):
        ask = [Message(forged, node.node_id, "query.restore")]
        (reply,) = grid.send_and_receive(ask, timeout=10)
    assert reply.has_error()
    assert {name: dict(record) for name, record in node.state.items()} == before


# Nodes that begin anew, and runs that go on


def test_a_node_that_lost_its_state_is_introduced_again(devices: Path) -> None:
    grid = Relay()
    lost = {"done": False}

    def forget(kind: str, receiver: int, content: RecordDict) -> None:
        if kind == "train.update" and len(ends_of(grid)) > 6 and receiver == 2 and not lost["done"]:
            lost["done"] = True
            next(node for node in grid._nodes.values() if node.partition_id == 2).state = RecordDict()

    grid.push = forget
    _, ends = run(ceps(num_iterations=30), grid)
    assert lost["done"]
    assert ends[-1].train["restarted"] == 1
    assert [end.train["unopened"] + end.train["withheld"] for end in ends[-6:]] == [0] * 6
    hellos = [partition for kind, partition, _ in grid.sent if kind == "query.hello"]
    assert hellos.count(2) == 2


def ends_of(grid: Relay) -> set[Any]:
    return {content["config"]["iteration"] for kind, _, content in grid.sent if kind == "train.update"}


def test_devices_go_on_bit_for_bit_from_states_that_the_server_cannot_read(
    devices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A whole run and one in two parts draw other seeds of sensing matrices, unless these are given.
    monkeypatch.setattr("hedgerow.clients.gossip.stored_node.secrets.randbits", lambda bits: 7)
    whole, ends = run(ceps())
    first = ceps()
    before, _ = run(first, num_rounds=4)
    with flower_identity(1):
        told = RemoteState(before, 10.0).state_dict()

    # All that the server has: no model, no seed, no key is in it.
    assert all(set(state) == {SEALED_RECORD, "hedgerow.node"} for state in told.values())
    blobs = [state[SEALED_RECORD]["items"]["bytes"].tobytes() for state in told.values()]
    for state, blob in zip(before.states().values(), blobs, strict=True):
        assert len(blob) > state.array_records["ceps"].count_bytes()
        for word in (b"array", b"introduction", b"sensing", b"ceps"):
            assert word not in blob

    # A run that goes on has another id, and so other keys of the run.
    second, after = ceps(), Relay()
    after._run.run_id = 99
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    with flower_identity(99):
        RemoteState(after, 10.0).load_state_dict(told)
    _, rest = run(second, after, num_rounds=len(ends))
    assert total(rest, "unopened") == total(rest, "withheld") == 0
    assert np.array_equal(whole.models(), after.models())


def test_a_locked_state_of_another_node_is_not_taken(devices: Path) -> None:
    grid, _ = run(ceps(), num_rounds=3)
    with flower_identity(1):
        state = RemoteState(grid, 10.0)
        told = state.state_dict()
        crossed = {**told, "1": {**told["1"], SEALED_RECORD: told["2"][SEALED_RECORD]}}
        with pytest.raises(Exception, match="1 nodes did not restore their state"):
            state.load_state_dict(crossed)


# What it costs


def test_what_is_booked_is_what_travels(devices: Path) -> None:
    strategy = ceps()
    grid, _ = run(strategy)
    for link, contents in ((HUB_TO_NODE, grid.sent), (NODE_TO_HUB, grid.replies)):
        passed = [payload_bytes(content) for kind, _, content in contents if kind != "query.whoami"]
        booked = strategy.ledger.total(link)
        assert (link, booked.messages, booked.payload_bytes) == (link, len(passed), sum(passed))
    updates = [content for kind, _, content in grid.sent if kind == "train.update"]
    payloads = [payload for content in updates for payload in content["bundle"].values()]
    links = strategy.ledger.total(NODE_TO_NODE)
    assert (links.messages, links.payload_bytes) == (len(payloads), sum(map(len, payloads)))
    assert links.nominal_bits == (64 + D) * len(payloads)
    # 28 bytes each, and once for each sender and receiver a seed of 16.
    code, first = -(-(64 + D) // 8), 2 * M
    assert links.payload_bytes == len(payloads) * (code + SEAL_BYTES) + 16 * first
    introductions = strategy.ledger.total(SET_UP)
    asked = [content for kind, _, content in grid.sent if "introductions" in content]
    assert introductions.messages == sum(len(content["introductions"]) for content in asked) == 2 * first
    assert introductions.payload_bytes == INTRODUCTION_BYTES * introductions.messages


def test_a_node_that_cannot_seal_takes_no_part() -> None:
    # Its answer to a hello holds no introduction.
    def without(kind: str, partition: int, reply: Message) -> None:
        if (kind, partition) == ("query.hello", 4):
            reply.content["hello"].pop("introduction", None)

    grid = Relay()
    grid.pull = without
    _, ends = run(ceps(), grid)
    assert not any(kind == "train.update" and partition == 4 for kind, partition, _ in grid.sent)
    assert total(ends, "deliveries") > 0


# The monitor that most nodes refuse


def test_a_monitor_that_most_nodes_refuse_is_given_up_at_once(caplog: pytest.LogCaptureFixture) -> None:
    configs = [{"monitor": i == 0} for i in range(M)]
    grid, ends = run(ceps(monitor=Monitor(S)), Relay(node_configs=configs))
    asked = [partition for kind, partition, _ in grid.sent if kind == "query.monitor"]
    assert sorted(asked) == list(range(M))
    assert {end.train["monitor-refused"] for end in ends} == {M - 1}
    assert not any(end.evaluate for end in ends)
    assert caplog.text.count(f"{M - 1} of {M} nodes refuse the monitor: it does not look at the models") == 1


def test_a_monitor_that_few_nodes_refuse_looks_at_the_others() -> None:
    configs = [{"monitor": i > 1} for i in range(M)]
    monitor = Monitor(S)
    _, ends = run(ceps(monitor=monitor), Relay(node_configs=configs))
    assert {look.nodes for look in monitor.history} == {M - 2}
    assert not any("monitor-refused" in end.train for end in ends)
