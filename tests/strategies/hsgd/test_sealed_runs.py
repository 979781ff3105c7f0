"""Runs of HSGD whose hospitals and devices seal what they tell each other, and a server that tampers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.serde import recorddict_to_proto
from tests.strategies.hsgd.real_nodes import (
    GROUPS,
    PEOPLE,
    Server,
    World,
    arrays_of,
    run,
    strategy,
    total,
)

from hedgerow.sim import FaultModel
from hedgerow.strategies import Adaptive, EmbeddingNoise, Probing
from hedgerow.strategies.hsgd.exchange import LinkIntroduction, PartyLinks
from hedgerow.wire import HUB_TO_NODE, LINKS_RECORD, NODE_TO_HUB, SEAL_BYTES, SECRET_RECORD, SealingKey
from hedgerow.wire.sealed import HEAD_KEY_BYTES, NodeIdentity

SLOW = pytest.mark.slow


def cases(names: Iterable[str], *quick: tuple[str, str], more: Sequence[str] = ("devices", "edges")) -> Any:
    """Return all pairs of the two, those that are not among the quick ones as slow ones."""
    every = product(names, more)
    return [pytest.param(*one, marks=() if one in quick else SLOW, id="-".join(one)) for one in every]


OF_LINKS = ("pinning", "withheld", "unopened")

RUNS: dict[str, dict[str, Any]] = {
    "hsgd": {},
    "c-hsgd": {"method": "c-hsgd"},
    "jfl": {"method": "jfl"},
    "apart": {"method": "tdcd", "aggregate": False},
    "noise": {"noise": EmbeddingNoise(1.0, 2.0, source="seed")},
    "probes": {"adaptive": Adaptive(8, 0, apply=False, probing=Probing(steps=1, batches=1))},
}


@pytest.mark.parametrize(
    ("name", "layout"), cases(RUNS, ("hsgd", "devices"), ("c-hsgd", "edges"), ("jfl", "edges"))
)
def test_sealing_moves_no_bit(name: str, layout: str) -> None:
    world, options = World(layout), {"participation": 0.5, **RUNS[name]}
    plain, before, _ = run(strategy(world, 4, 2, **options), world)
    sealed, after, _ = run(strategy(world, 4, 2, sealed=True, **options), world)
    assert np.array_equal(plain, sealed)
    for one, other in zip(before, after, strict=True):
        # A plain run with noise tells that heads and encodings are seen; a sealed one that they are not.
        paths = ("unprotected-heads",)
        left = {key: value for key, value in one.train.items() if key not in paths}
        assert left == {key: value for key, value in other.train.items() if key not in OF_LINKS}
    assert total(after, "unopened") == total(after, "withheld") == 0


@pytest.mark.parametrize("layout", [pytest.param("devices", marks=SLOW), "edges"])
def test_sealing_moves_no_bit_where_parties_fail(layout: str) -> None:
    world, faults = World(layout), FaultModel(dropout=0.1)
    finals = [
        run(strategy(world, 4, 2, sealed=sealed, max_repeats=20), world, 3, Server(world, faults=faults))[:2]
        for sealed in (False, True)
    ]
    assert np.array_equal(finals[0][0], finals[1][0])
    assert sum(sum(end.rejected.values()) for end in finals[1][1]) > 0
    assert total(finals[1][1], "unopened") == 0


@pytest.mark.parametrize(
    ("method", "layout"),
    cases(["hsgd", "jfl", "c-hsgd"], ("hsgd", "devices"), ("jfl", "edges"), ("c-hsgd", "edges")),
)
def test_only_what_is_sealed_grows_in_the_books(method: str, layout: str) -> None:
    world = World(layout)
    plain, sealed = (strategy(world, 2, 1, sealed=one, method=method) for one in (False, True))
    for one in (plain, sealed):
        run(one, world, 1)
    a, intervals, hosted = PEOPLE, 2, layout == "edges"
    shares = 1 if hosted else a
    heads = 0 if method == "jfl" else 1
    due = {
        "device->edge": 0 if hosted else a * SEAL_BYTES,
        "edge->hospital": shares * SEAL_BYTES,
        "hospital->edge": shares * (SEAL_BYTES + heads * HEAD_KEY_BYTES) + heads * SEAL_BYTES,
        "edge->device": 0 if hosted else a * (SEAL_BYTES * (1 + heads) + heads * HEAD_KEY_BYTES),
    }
    links = plain.ledger.by_link().keys()
    assert links == sealed.ledger.by_link().keys()
    for link in links - {HUB_TO_NODE, NODE_TO_HUB}:
        before, after = plain.ledger.by_link()[link], sealed.ledger.by_link()[link]
        assert after.nominal_bits == before.nominal_bits
        assert after.payload_bytes - before.payload_bytes == GROUPS * intervals * due.get(link, 0)


# What the server sees


@pytest.mark.parametrize(("method", "layout"), cases(["hsgd", "jfl"], ("hsgd", "devices"), ("jfl", "edges")))
def test_no_head_and_no_encoding_is_in_what_the_server_sees(method: str, layout: str, devices: Path) -> None:
    world = World(layout)
    told: dict[bool, bytes] = {}
    for sealed in (False, True):
        _, _, server = run(strategy(world, 2, 1, sealed=sealed, method=method), world, 1)
        rows = [content for kind, _, content in server.replies if kind == "train.exchange"]
        told[sealed] = b"".join(
            recorddict_to_proto(one).SerializeToString()
            for one in rows + [content for _, _, content in server.sent]
        )
        if not sealed:
            plain = [array for one in rows for key, array in arrays_of(one).items() if "zeta" in key]
    rows_of = [row.tobytes() for rows in plain for row in rows if row.any()]
    assert len(rows_of) > GROUPS * PEOPLE * 3
    assert all(row in told[False] for row in rows_of)
    assert not [row for row in rows_of if row in told[True]]


def test_no_secret_leaves_a_node(devices: Path) -> None:
    world = World("edges")
    _, _, server = run(strategy(world, 2, 1, sealed=True), world)
    seen = b"".join(
        recorddict_to_proto(content).SerializeToString() for _, _, content in server.sent + server.replies
    )
    keys = [SealingKey.at(path).private for path in (devices / "hedgerow-keys").iterdir()]
    keys += [state.config_records[SECRET_RECORD]["link-session"] for state in server.states().values()]  # type: ignore[misc]
    assert len({*keys}) == 2 * len(world.parties)
    assert not any(key in seen for key in keys)
    assert all(LINKS_RECORD in state for state in server.states().values())


# What the server changes


@dataclass
class Tamper:
    """Changes the payloads of one update for some parties; keeps those of before."""

    change: Callable[["Tamper", int, ConfigRecord], None]
    victims: tuple[int, ...]
    at: int = 2
    seen: dict[int, list[ConfigRecord]] = field(default_factory=dict)
    changed: int = 0

    def __call__(self, kind: str, partition: int, content: RecordDict) -> RecordDict | None:
        if kind != "train.update":
            return None
        payload = ConfigRecord({**content.config_records["payload"]})
        before = self.seen.setdefault(partition, [])
        before.append(ConfigRecord({**payload}))
        if partition not in self.victims or len(before) != self.at:
            return None
        self.change(self, partition, payload)
        self.changed += payload != before[-1]
        return RecordDict({**content, "payload": payload})


def shares_of(payload: ConfigRecord) -> tuple[str, list[bytes]]:
    key = "zeta1" if "zeta1" in payload else "zeta2"
    return key, list(payload[key])  # type: ignore[arg-type]


def altered(tamper: Tamper, partition: int, payload: ConfigRecord) -> None:
    key, shares = shares_of(payload)
    payload[key] = [bytes([shares[0][0] ^ 1]) + shares[0][1:], *shares[1:]]


def replayed(tamper: Tamper, partition: int, payload: ConfigRecord) -> None:
    key, shares = shares_of(payload)
    payload[key] = [shares_of(tamper.seen[partition][-2])[1][0], *shares[1:]]


def of_somebody_else(tamper: Tamper, partition: int, payload: ConfigRecord) -> None:
    key, shares = shares_of(payload)
    others = [seen[-1] for i, seen in tamper.seen.items() if i != partition and key in seen[-1]]
    payload[key] = [shares_of(others[0])[1][0] if len(shares) == 1 else shares[1], *shares[1:]]


def emptied(tamper: Tamper, partition: int, payload: ConfigRecord) -> None:
    key, shares = shares_of(payload)
    payload[key] = [b"", *shares[1:]]


def another_head(tamper: Tamper, partition: int, payload: ConfigRecord) -> None:
    payload["head"] = tamper.seen[partition][-2]["head"]


TAMPERING = {
    "altered": altered,
    "replayed": replayed,
    "swapped": of_somebody_else,
    "emptied": emptied,
}


@pytest.mark.parametrize(
    "name",
    ["replayed", "another head", *(pytest.param(n, marks=SLOW) for n in ("altered", "swapped", "emptied"))],
)
def test_a_device_that_cannot_open_is_left_out_of_the_average_and_counted(name: str, devices: Path) -> None:
    world, victim = World("devices"), GROUPS + 3
    tamper = Tamper(TAMPERING.get(name, another_head), (victim,))
    _, ends, server = run(strategy(world, 2, 1, sealed=True), world, 2, Server(world, tamper))
    assert tamper.changed == 1
    assert [end.train["unopened"] for end in ends] == [1, 0]
    assert ends[0].train["unopened-altered-or-replayed"] == 1
    assert [end.train["groups"] for end in ends] == [GROUPS, GROUPS]
    told = [content for kind, i, content in server.replies if kind == "train.update" and i == victim]
    assert len(told) == 4
    assert ["arrays" in content for content in told] == [True, False, True, True]


@pytest.mark.parametrize(
    ("name", "method"),
    cases(TAMPERING, ("altered", "jfl"), ("swapped", "hsgd"), more=["hsgd", "jfl"]),
)
def test_a_hospital_works_without_the_device_whose_row_it_cannot_open(
    name: str, method: str, devices: Path
) -> None:
    world = World("devices")
    tamper = Tamper(TAMPERING[name], (0,), at=1 if name != "replayed" else 2)
    hsgd = strategy(world, 3, 1, sealed=True, method=method)
    _, ends, server = run(hsgd, world, 2, Server(world, tamper))
    assert tamper.changed == 1
    assert [end.train["unopened"] for end in ends] == [1, 0]
    assert [end.train["groups"] for end in ends] == [GROUPS, GROUPS]
    counts = [
        content.metric_records["metrics"]["num-examples"]
        for kind, i, content in server.replies
        if kind == "train.update" and i == 0
    ]
    at, later = tamper.at - 1, PEOPLE - 1 if method == "jfl" else PEOPLE
    assert counts[:at] == [PEOPLE] * at
    assert counts[at] == PEOPLE - 1
    assert counts[at + 1 : 3] == [later] * (2 - at)  # A pair is out for the round.
    assert counts[3:] == [PEOPLE] * 3


@pytest.mark.parametrize(("victim", "name"), [(0, "emptied"), (GROUPS, "altered")], ids=["hospital", "edge"])
def test_an_edge_or_hospital_that_cannot_open_costs_its_group_the_round(
    victim: int, name: str, devices: Path
) -> None:
    world = World("edges")
    tamper = Tamper(TAMPERING[name], (victim,))
    _, ends, _ = run(strategy(world, 2, 1, sealed=True), world, 2, Server(world, tamper))
    assert [end.train["unopened"] for end in ends] == [1, 0]
    assert [end.train["lost-groups"] for end in ends] == [1, 0]


def test_a_server_that_hands_on_keys_of_its_own_later_is_refused(devices: Path) -> None:
    world, forged = World("devices"), SealingKey.drawn()

    def forge(kind: str, partition: int, content: RecordDict) -> RecordDict | None:
        if kind != "train.exchange" or content.config_records["config"]["t"] != 2 or partition != GROUPS:
            return None
        new = ConfigRecord({"0": forged.public + SealingKey.drawn().public})
        return RecordDict({**content, "introductions": new})

    _, ends, _ = run(strategy(world, 2, 1, sealed=True), world, 2, Server(world, forge))
    assert [end.train["withheld"] for end in ends] == [0, 1]
    assert [end.train["groups"] for end in ends] == [GROUPS, GROUPS]


# Who forgets, and who is strict


def test_a_party_that_forgot_its_keys_is_greeted_again(devices: Path) -> None:
    world, forgot = World("devices"), [0, GROUPS + 1]
    rounds: list[int] = []

    def forget(kind: str, partition: int, content: RecordDict) -> None:
        if kind == "train.exchange" and content.config_records["config"]["t"] == 2 and partition in forgot:
            rounds.append(partition)
            node = next(n for n in server._nodes.values() if n.partition_id == partition)
            for name in (LINKS_RECORD, SECRET_RECORD):
                node.state.pop(name, None)

    server = Server(world, forget)
    _, ends, _ = run(strategy(world, 2, 1, sealed=True), world, 4, server)
    assert rounds == forgot
    lost = [end.train["lost-groups"] for end in ends]
    assert lost == [0, 1, 0, 0]
    assert total(ends[2:], "unopened") == total(ends[2:], "withheld") == 0
    assert all(end.accepted == end.sent for end in ends[2:])


def test_a_node_that_pins_keys_takes_part_in_no_plain_run(devices: Path) -> None:
    world = World("edges")
    pins = devices / "pins.toml"
    pins.write_text("")
    configs = [{"neighbour-keys": str(pins)} if i == 0 else {} for i in range(len(world.parties))]
    _, ends, _ = run(strategy(world), world, 1, Server(world, node_configs=configs))
    assert ends[0].train["left-out-no-introduction"] == ends[0].train["left-out-no-group"] == 1
    # Sealed, it tells nobody anything whom it does not pin, and the run goes on without its group.
    _, ends, _ = run(strategy(world, sealed=True), world, 1, Server(world, node_configs=configs))
    assert (ends[0].train["pinning"], ends[0].train["withheld"]) == (1, 1)
    assert ends[0].train["lost-groups"] == 1


def lying(world: World, liar: int, **told: Any) -> Server:
    """Return a grid on which a partition tells something else of itself when it is paired."""

    def lie(kind: str, partition: int, reply: Message) -> None:
        if (kind, partition) == ("query.pair", liar):
            reply.content["pair"].update(told)

    return Server(world, pull=lie)


def test_who_tells_anothers_name_takes_no_part(devices: Path) -> None:
    world = World("devices")
    liar = lying(world, GROUPS + 2, name=str(GROUPS + 1))
    _, ends, _ = run(strategy(world, sealed=True), world, 1, liar)
    assert ends[0].train["groups"] == GROUPS
    assert ends[0].sent == 2 * (len(world.parties) - 1)


@pytest.mark.parametrize("liar", [0, GROUPS], ids=["hospital", "edge"])
def test_of_encodings_that_as_many_tell_those_go_first_that_fit_the_head(liar: int) -> None:
    world = World("edges")
    hsgd = strategy(world)
    _, ends, _ = run(hsgd, world, 1, lying(world, liar, encoding=3))
    assert [group.number for group in hsgd.groups] == [1]
    assert (ends[0].train["left-out-other-form"], ends[0].train["left-out-no-group"]) == (1, 1)


def test_nobody_is_called_by_anothers_place() -> None:
    """Who told the hospital's name first would have its group left out."""
    links = PartyLinks(True, 0)
    told = LinkIntroduction("0", NodeIdentity(SealingKey.drawn(), SealingKey.drawn()).introduction, False)
    links.introductions.begin(1)
    links.introduced(3, told)
    assert links.names == {}
    links.introduced(0, told)
    named = LinkIntroduction(
        str(2**61), NodeIdentity(SealingKey.drawn(), SealingKey.drawn()).introduction, False
    )
    links.introduced(3, named)
    assert links.names == {0: "0", 3: str(2**61)}
