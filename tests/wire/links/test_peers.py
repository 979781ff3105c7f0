"""The channel between orchestrators: who may say what and when, and that nobody else's nonsense stops it."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.wire.links.addresses import addresses

from hedgerow.sim import EdgeCredentials, make_edge_credentials
from hedgerow.strategies import PeerCredentials
from hedgerow.wire.links.peers import Exchanged, PeerChannel, Topic

LARGEST = 1 << 12
# Nothing here takes so long unless it hangs.
LONG = 20.0
FIRST = Topic(1, 0)


def proof(made: EdgeCredentials) -> PeerCredentials:
    return PeerCredentials(made.superlink.ca, made.peer_certificate, made.peer_key)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[EdgeCredentials]:
    """Of three servers."""
    return make_edge_credentials(tmp_path_factory.mktemp("ours"), [[0], [1], [2]])


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> list[EdgeCredentials]:
    """Of the same names and another CA."""
    return make_edge_credentials(tmp_path_factory.mktemp("theirs"), [[0], [1], [2]])


@contextmanager
def opened(
    keys: Sequence[EdgeCredentials] | None, *, who: Sequence[int] = (0, 1), **options: Any
) -> Iterator[list[PeerChannel]]:
    """Open the channels of a path 0 - 1 - 2 of which ``who`` is there."""
    where = addresses(3)
    near = {0: [1], 1: [0, 2], 2: [1]}
    said: dict[str, Any] = {"run": "r", "layout": "l", "largest": LARGEST, "lost_after": 1.0, **options}
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                PeerChannel(i, where, near[i], credentials=proof(keys[i]) if keys else None, **said)
            )
            for i in who
        ]


def both(channels: Sequence[PeerChannel], topic: Topic, payload: bytes = b"from ") -> list[Exchanged]:
    """Let 0 and 1 tell each other who they are."""

    def tell(channel: PeerChannel) -> Exchanged:
        return channel.exchange(topic, {1 - channel.me: payload + b"%d" % channel.me}, LONG)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(tell, channels[:2]))


def test_peers_on_this_machine_use_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(key, "http://127.0.0.1:9")  # nothing listens there
    for key in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(key, raising=False)
    with opened(None) as channels:
        check_honest(channels, FIRST)


def check_honest(channels: Sequence[PeerChannel], topic: Topic) -> None:
    """The honest exchange goes on."""
    found = both(channels, topic)
    assert [one.received for one in found] == [{1: b"from 1"}, {0: b"from 0"}]
    assert [one.both_ways for one in found] == [{1}, {0}]


def caller(channel: PeerChannel, made: PeerCredentials | None, name: str = "edge-0") -> grpc.Channel:
    """Return a raw connection to a channel, by which anything can be said."""
    address = channel.addresses[channel.me]
    if made is None:
        return grpc.insecure_channel(address)
    _, certificate, key = made.read()
    trusted = grpc.ssl_channel_credentials(channel.credentials.ca.read_bytes(), key, certificate)  # type: ignore[union-attr]
    return grpc.secure_channel(address, trusted, options=[("grpc.ssl_target_name_override", name)])


def header(**changes: Any) -> bytes:
    said = {"run": "r", "layout": "l", "from": 1, "topic": [1, 0], "length": 4, **changes}
    return json.dumps(said).encode()


def deliver(connection: grpc.Channel, parts: Iterator[bytes] | Sequence[bytes], timeout: float = 5.0) -> str:
    """Return with what a message is refused; empty if it was taken."""
    send = connection.stream_unary("/hedgerow.Peers/Deliver")
    try:
        send(iter(parts), timeout=timeout)
    except grpc.RpcError as error:
        return str(error.details() if error.code() == grpc.StatusCode.FAILED_PRECONDITION else error.code())
    return ""


def test_three_that_prove_who_they_are_exchange_over_a_path(keys: list[EdgeCredentials]) -> None:
    with opened(keys, who=(0, 1, 2)) as channels, ThreadPoolExecutor(3) as pool:

        def tell(channel: PeerChannel, number: int) -> Exchanged:
            payloads = {peer: b"%d to %d" % (channel.me, peer) for peer in channel.neighbours}
            return channel.exchange(Topic(number, 0), payloads, LONG)

        for number in range(1, 4):
            found = list(pool.map(tell, channels, [number] * 3))
            assert [one.received for one in found] == [
                {1: b"1 to 0"},
                {0: b"0 to 1", 2: b"2 to 1"},
                {1: b"1 to 2"},
            ]
        assert [sum(one.refused.values()) for one in channels] == [0, 0, 0]
        assert channels[1].traffic[2].messages == 3
        assert channels[1].traffic[2].bytes > 3 * len(b"1 to 2")


REFUSED = {
    "another run": [header(run="other"), b"abcd"],
    "another layout": [header(layout="other"), b"abcd"],
    "not a neighbour": [header(**{"from": 2}), b"abcd"],
    "wrong size: truncated": [header(), b"abc"],
    "wrong size: too long": [header(), b"abcd", b"e"],
    "wrong size: oversized": [header(length=LARGEST + 1), b"a" * (LARGEST + 1)],
    "wrong size: a text": [header(length="4"), b"abcd"],
    "wrong size: negative": [header(length=-1), b""],
    "unreadable: no JSON": [b"\xff\x00garbage", b"abcd"],
    "unreadable: a list": [b"[1]", b"abcd"],
    "unreadable: nested": [b"[" * 4000, b"abcd"],
    "unreadable: long": [header(run="r" * 5000), b"abcd"],
    "unreadable: nothing": [],
    "unreadable: topic": [header(topic=[1, -1]), b"abcd"],
    "unreadable: no topic": [header(topic="1"), b"abcd"],
    "unreadable: endless": [header(topic=[1, 1e999]), b"abcd"],
}


def test_what_a_neighbour_may_not_say_is_refused_and_counted_and_the_exchange_goes_on(
    keys: list[EdgeCredentials],
) -> None:
    with opened(keys) as channels, caller(channels[0], proof(keys[1])) as neighbour:
        for counted, (name, parts) in enumerate(REFUSED.items(), 1):
            reason = name.partition(":")[0]
            assert deliver(neighbour, parts) == reason, name
            assert sum(channels[0].refused.values()) == counted
        assert channels[0].refused["wrong size"] == 5
        check_honest(channels, FIRST)


def test_what_is_late_or_comes_twice_is_refused(keys: list[EdgeCredentials]) -> None:
    with opened(keys) as channels, caller(channels[0], proof(keys[1])) as neighbour:
        check_honest(channels, FIRST)
        assert deliver(neighbour, [header(), b"abcd"]) == "late"
        early = header(topic=[2, 0])
        assert deliver(neighbour, [early, b"abcd"]) == ""
        assert deliver(neighbour, [early, b"efgh"]) == "repeated"
        assert channels[0].refused == {"late": 1, "repeated": 1}
        assert channels[0].exchange(Topic(2, 0), {1: b""}, 0.5).received == {1: b"abcd"}


@pytest.mark.parametrize("who", ["another CA's", "another edge's", "the SuperLink's", "nobody's"])
def test_who_does_not_prove_to_be_a_neighbour_is_refused(
    who: str, keys: list[EdgeCredentials], strangers: list[EdgeCredentials]
) -> None:
    superlink = keys[1].superlink
    shown = {
        "another CA's": proof(strangers[1]),
        "another edge's": proof(keys[2]),
        "the SuperLink's": PeerCredentials(superlink.ca, superlink.server_certificate, superlink.server_key),
        "nobody's": None,
    }[who]
    with opened(keys) as channels, caller(channels[0], shown) as stranger:
        answer = deliver(stranger, [header(), b"abcd"], timeout=2.0)
        if who == "another edge's":
            # 2 is no neighbour of 0, whoever it says that it is; a neighbour that says it is another is not.
            assert answer == "not a neighbour"
            with caller(channels[1], proof(keys[2]), "edge-1") as other:
                assert deliver(other, [header(**{"from": 0}), b"abcd"]) == "another certificate"
            assert channels[1].refused == {"another certificate": 1}
        else:
            assert answer in ("StatusCode.UNAVAILABLE", "not a neighbour")
        check_honest(channels, FIRST)


def test_a_server_that_is_not_who_it_should_be_is_told_nothing(
    keys: list[EdgeCredentials], strangers: list[EdgeCredentials]
) -> None:
    for other in (strangers[1], keys[2]):
        where = addresses(2)
        said: dict[str, Any] = {"run": "r", "layout": "l", "largest": LARGEST, "lost_after": 0.5}
        with (
            PeerChannel(0, where, [1], credentials=proof(keys[0]), **said) as mine,
            PeerChannel(1, where, [0], credentials=proof(other), **said) as impostor,
        ):
            started = time.monotonic()
            assert mine.exchange(FIRST, {1: b"secret"}, LONG) == Exchanged({}, set())
            assert time.monotonic() - started < LONG / 2
            assert not impostor._boxes[0].messages


def test_a_sender_that_is_ahead_is_held_until_there_is_room(keys: list[EdgeCredentials]) -> None:
    with opened(keys) as channels, caller(channels[0], proof(keys[1])) as neighbour:
        answers: list[tuple[int, str]] = []

        def run_ahead() -> None:
            for number in range(1, 6):
                answer = deliver(neighbour, [header(topic=[number, 0]), b"%04d" % number], LONG)
                answers.append((number, answer))

        ahead = threading.Thread(target=run_ahead)
        ahead.start()
        time.sleep(0.5)
        assert answers == [(1, ""), (2, "")]
        assert len(channels[0]._boxes[1].messages) == 2
        for number in range(1, 6):
            found = channels[0].exchange(Topic(number, 0), {1: b""}, 0.4)
            assert found.received == {1: b"%04d" % number}
        ahead.join()
        assert [answer for _, answer in answers] == [""] * 5


def test_a_sender_that_drips_or_falls_silent_is_refused(keys: list[EdgeCredentials]) -> None:
    def drip() -> Iterator[bytes]:
        yield header(topic=[9, 0])
        while True:
            yield b""
            time.sleep(0.05)

    def silent(first: Sequence[bytes]) -> Iterator[bytes]:
        yield from first
        time.sleep(2.0)

    with opened(keys, lost_after=0.4) as channels, caller(channels[0], proof(keys[1])) as neighbour:
        # No more at once than leave room for what is honest.
        for number, senders in enumerate([[drip(), silent([header(topic=[9, 1])])], [silent([])]], 1):
            with ThreadPoolExecutor(2) as pool:
                answers = [pool.submit(deliver, neighbour, one) for one in senders]
                check_honest(channels, Topic(number, 0))
                assert all(answer.result() for answer in answers)
        assert channels[0].refused == {"too slow": 3}
        check_honest(channels, Topic(3, 0))


def test_a_neighbour_cannot_take_the_threads_of_the_others(keys: list[EdgeCredentials]) -> None:
    over = threading.Event()

    def held(number: int) -> Iterator[bytes]:
        yield header(topic=[5, number], **{"from": 2})
        over.wait(LONG)
        yield b"abcd"

    with (
        opened(keys, who=(0, 1), lost_after=LONG) as channels,
        caller(channels[1], proof(keys[2]), "edge-1") as neighbour,
        ThreadPoolExecutor(12) as pool,
    ):
        answers = [pool.submit(deliver, neighbour, held(number), LONG) for number in range(12)]
        end = time.monotonic() + 5.0
        while channels[1].refused["too many at once"] < 8 and time.monotonic() < end:
            time.sleep(0.05)
        assert channels[1].refused["too many at once"] == 8
        check_honest(channels, FIRST)
        over.set()
        # Two are buffered; two wait for room, and are let go with their connection.
        neighbour.close()
        assert len([answer for answer in answers if answer.exception() or answer.result()]) >= 8


def test_nobody_waits_for_a_neighbour_that_does_not_listen_or_means_to_send_nothing(
    keys: list[EdgeCredentials],
) -> None:
    with opened(keys, lost_after=0.4) as channels:
        started = time.monotonic()
        # 2 is not there at all; 0 has left 1 out of the round, and says so when it is asked.
        channels[0].leave_out(1, Topic(1, 100))
        found = channels[1].exchange(FIRST, {0: b"a", 2: b"b"}, LONG)
        assert found == Exchanged({}, set())
        assert time.monotonic() - started < 5.0
        assert channels[0].refused == {"late": 1}
        # A neighbour that has the message and says that it will not answer.
        channels[0]._comes = lambda peer, topic: False
        started = time.monotonic()
        assert channels[1].exchange(Topic(2, 0), {0: b"a"}, LONG) == Exchanged({}, {0})
        assert time.monotonic() - started < 5.0
        check_honest(channels, Topic(3, 0))


class _Liar(grpc.GenericRpcHandler):
    """Answers every question with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer

    def service(self, details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: self.answer)


def test_answers_that_cannot_be_read_are_none() -> None:
    where = addresses(2)
    for answer in (b"[" * 50_000, b"\xff", b"[]", b'{"begun": ' + b"9" * 5000 + b"}", b"a" * (1 << 18)):
        server = grpc.server(ThreadPoolExecutor(2))
        server.add_generic_rpc_handlers((_Liar(answer),))
        server.add_insecure_port(where[1])
        server.start()
        with PeerChannel(0, where, [1], run="r", layout="l", largest=1) as channel:
            assert channel.call(1, {}, 5.0) is None, answer[:20]
        server.stop(None).wait()


def test_a_question_that_cannot_be_answered_is_refused() -> None:
    def answer(peer: int, request: dict[str, Any]) -> dict[str, Any]:
        return {"twice": 2 * int(request["number"]), "who": peer}

    with opened(None, answer=answer) as channels:
        assert channels[1].call(0, {"number": 4}, 5.0) == {"twice": 8, "who": 1}
        for number in ("many", None, float("inf")):
            assert channels[1].call(0, {"number": number}, 5.0) is None
        assert channels[1].call(0, {}, 5.0) is None
        assert channels[0].refused == {"unreadable": 4}


def test_an_address_that_is_taken_and_files_that_are_no_certificates_are_errors(
    keys: list[EdgeCredentials], tmp_path: Path
) -> None:
    said: dict[str, Any] = {"run": "r", "layout": "l", "largest": 1}
    with opened(None, who=(0,)) as (first,):
        taken = PeerChannel(0, first.addresses, [1], **said)
        with pytest.raises(OSError, match="cannot listen for peers"), taken:
            pass
    (tmp_path / "bad.pem").write_text("no certificate")
    good = proof(keys[0])
    for bad in (tmp_path / "bad.pem", tmp_path / "none.pem"):
        wrong = PeerCredentials(good.ca, bad, good.key)
        with (
            pytest.raises(OSError, match=r"none\.pem|cannot listen for"),
            PeerChannel(0, addresses(2), [1], credentials=wrong, **said),
        ):
            pass
