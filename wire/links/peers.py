"""A direct gRPC channel between orchestrators (ServerApps).

Flower connects a server with its nodes, but not with other servers. Here each orchestrator listens on its own
address and calls its neighbours over gRPC. A message carries its topic (round and stage), so both sides know
its exchange whenever it arrives: early messages wait in a buffer of two; late and repeated ones are refused.
With credentials both ends authenticate by certificate (mutual TLS). Nothing is unpickled; the sender is
authenticated before its message is read.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from ipaddress import ip_address
from logging import INFO, WARNING
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import grpc
from flwr.common import log

from hedgerow.wire.checks import int_at_least, int_between, positive
from hedgerow.wire.links.certificates import certified_name, ending
from hedgerow.wire.links.proxies import is_loopback, proxy_of

# The exceptions that parsing another orchestrator's message may raise.
UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_SERVICE = "hedgerow.Peers"
_CHUNK = 1 << 20
_LARGEST_HEADER = 1 << 12
_LARGEST_CALL = 1 << 16
# Buffered messages per neighbour: one for the current exchange, one for the next.
_BUFFERED = 2
# Concurrent calls per neighbour: a delivery held back, the one before it, and two queries.
_AT_ONCE = 4
# Seconds between two attempts to reach a neighbour.
_PAUSE = 0.1
# Slowest accepted upload, bytes/s; a slower one only blocks a thread.
_SLOWEST = 1 << 14
# Status for a duplicate: it shows the sender that the message has already arrived.
_REPEATED = "repeated"
_TOO_MANY = "too many at once"
_OPTIONS = [
    ("grpc.max_receive_message_length", _CHUNK + _LARGEST_CALL),
    ("grpc.max_send_message_length", _CHUNK + _LARGEST_CALL),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A host that disappears without closing its connection is noticed within 15 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]


class Topic(NamedTuple):
    """The exchange that a message belongs to; topics are ordered."""

    round: int
    stage: int


@dataclass(frozen=True)
class PeerCredentials:
    """The files with which an orchestrator authenticates.

    Parameters
    ----------
    ca : Path
        The CA certificate that signs all orchestrators' certificates.
    certificate, key : Path
        This orchestrator's; the certificate is for the name ``certified_name(me)``.
    """

    ca: Path
    certificate: Path
    key: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Return CA, certificate and key; OSError if one cannot be read."""
        return self.ca.read_bytes(), self.certificate.read_bytes(), self.key.read_bytes()


@dataclass
class LinkTraffic:
    """Traffic with one neighbour, measured at this end."""

    messages: int = 0
    bytes: int = 0
    # From the first byte of each message sent until its acknowledgement.
    seconds: float = 0.0
    # Bytes received and accepted.
    received: int = 0
    # Seconds from the acknowledgement of this end's message until the neighbour's arrived.
    waited: float = 0.0

    def since(self, before: LinkTraffic) -> LinkTraffic:
        """Return the traffic since an earlier measurement."""
        names = (one.name for one in fields(self))
        return LinkTraffic(*(getattr(self, name) - getattr(before, name) for name in names))


class Exchanged(NamedTuple):
    """An exchange's received messages, by neighbour, ascending; and the neighbours that acknowledged ours."""

    received: dict[int, bytes | bytearray]
    taken: set[int]

    @property
    def both_ways(self) -> set[int]:
        """The neighbours with a message received and one acknowledged."""
        return self.taken & self.received.keys()


class _RefusedError(Exception):
    """A refused message; the reason is counted and sent to the caller."""


class _Message(NamedTuple):
    """A message, and the time of its arrival."""

    payload: bytes | bytearray
    at: float


@dataclass
class _Box:
    """Messages from one neighbour that no exchange has collected yet."""

    messages: dict[Topic, _Message] = field(default_factory=dict)
    passed: Topic = field(default_factory=lambda: Topic(-1, -1))  # The last finished exchange.
    active: int = 0  # Its calls in progress.


class PeerChannel:
    """One orchestrator's end of the channel.

    Parameters
    ----------
    me : int
        This orchestrator's number, >= 0.
    addresses : Sequence[str]
        ``host:port`` of every orchestrator, by number.
    neighbours : Iterable[int]
        The orchestrators that it exchanges messages with; messages from others are refused.
    run, layout : str
        Equal at all orchestrators: the run's name, and an identifier of the models' entries and their order.
        Callers with other values are refused.
    largest : int
        Largest message in bytes, >= 1.
    credentials : PeerCredentials or None (default: None)
        None for plain text, allowed on loopback addresses only.
    listen : str (default: "")
        The listening address, if not its own one: ``0.0.0.0:9500`` behind a router.
    answer : Callable[[int, dict], dict] or None (default: None)
        Answers a neighbour's ``call``, in a thread of the channel.
    comes : Callable[[int, Topic], bool] or None (default: None)
        Returns, in such a thread, whether this orchestrator will send a neighbour a message of an unfinished
        topic; None for always. Waiting neighbours query it, so that they do not wait in vain.
    lost_after : float (default: 15.0)
        Seconds after which an exchange gives up an unreachable neighbour, > 0.

    Attributes
    ----------
    refused : Counter
        Refused messages, by reason.
    traffic : dict
        ``LinkTraffic`` by neighbour.
    """

    def __init__(
        self,
        me: int,
        addresses: Sequence[str],
        neighbours: Iterable[int],
        *,
        run: str,
        layout: str,
        largest: int,
        credentials: PeerCredentials | None = None,
        listen: str = "",
        answer: Callable[[int, dict[str, Any]], dict[str, Any]] | None = None,
        comes: Callable[[int, Topic], bool] | None = None,
        lost_after: float = 15.0,
    ) -> None:
        int_at_least(1, largest=largest)
        positive(lost_after=lost_after)
        int_between(0, len(addresses) - 1, me=me)
        for address in (*addresses, *([listen] if listen else ())):
            _check_address(address, plain=credentials is None)
        if twice := [address for address, count in Counter(addresses).items() if count > 1]:
            raise ValueError(f"addresses of peers must differ, got {twice[0]!r} twice")
        self.me = me
        self.addresses = list(addresses)
        self.neighbours = sorted(set(neighbours))
        if any(peer == me or not 0 <= peer < len(addresses) for peer in self.neighbours):
            raise ValueError(
                f"neighbours must be from 0 to {len(addresses) - 1}, without {me}, got {self.neighbours}"
            )
        self.run, self.layout, self.largest = run, layout, largest
        self.credentials, self.lost_after = credentials, lost_after
        self._listen = listen or addresses[me]
        self._answer, self._comes = answer, comes
        self.refused: Counter[str] = Counter()
        self.traffic = {peer: LinkTraffic() for peer in self.neighbours}
        self._boxes = {peer: _Box() for peer in self.neighbours}
        self._changed = threading.Condition()
        # Neighbours that the current exchange does not wait for.
        self._given_up: set[int] = set()
        self._server: grpc.Server | None = None
        self._channels: dict[int, grpc.Channel] = {}

    # Opening and closing.

    def __enter__(self) -> Self:
        """Listen; OSError if the address cannot be bound, or a credentials file cannot be read."""
        # A sender that is ahead holds a thread until there is room for its message.
        threads = ThreadPoolExecutor((_AT_ONCE + 1) * len(self.neighbours) + 1, thread_name_prefix="peers")
        server = grpc.server(threads, options=[*_OPTIONS, ("grpc.so_reuseport", 0)])
        handlers = {
            "Deliver": grpc.stream_unary_rpc_method_handler(self._deliver),
            "Call": grpc.unary_unary_rpc_method_handler(self._called),
            "Comes": grpc.unary_unary_rpc_method_handler(self._asked_whether),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        try:
            if self.credentials is None:
                server.add_insecure_port(self._listen)
            else:
                ca, certificate, key = self.credentials.read()
                with suppress(ValueError):  # gRPC says what is wrong with them.
                    for warning in ending([self.credentials.ca, self.credentials.certificate]):
                        log(WARNING, "%s", warning)
                proof = grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
                server.add_secure_port(self._listen, proof)
        except RuntimeError as error:
            raise OSError(f"cannot listen for peers on {self._listen}: {error}") from error
        server.start()
        self._server = server
        self._channels = {peer: self._channel(peer) for peer in self.traffic}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening, after messages in transfer have arrived or at most five seconds."""
        for channel in self._channels.values():
            channel.close()
        if self._server is not None:
            self._server.stop(grace=5.0).wait()

    def _channel(self, peer: int) -> grpc.Channel:
        address = self.addresses[peer]
        options = [*_OPTIONS, ("grpc.enable_http_proxy", int(not is_loopback(address)))]
        if proxy := proxy_of(address):
            log(INFO, "Edge server %d, %s, is reached through the proxy %s", peer, address, proxy)
        if self.credentials is None:
            return grpc.insecure_channel(address, options=options)
        ca, certificate, key = self.credentials.read()
        # The certificate identifies the peer, whatever its address.
        named = [*options, ("grpc.ssl_target_name_override", certified_name(peer))]
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, certificate), options=named)

    # Exchanges.

    def exchange(self, topic: Topic, payloads: Mapping[int, bytes | memoryview], timeout: float) -> Exchanged:
        """Send neighbours their payloads for a topic, and return what they sent for it.

        Sends first, then waits for the same neighbours: until the timeout for a reachable one that will send,
        ``lost_after`` seconds for an unreachable one. Afterwards the topic is over and later messages for it
        are refused. Topics ascend from call to call.
        """
        end = time.monotonic() + timeout
        taken: dict[int, float] = {}
        with self._changed:
            given_up = self._given_up = set()
            for peer in payloads:  # Drop messages of skipped exchanges, to make room.
                self._forget(peer, topic)
            self._changed.notify_all()

        def send(peer: int) -> None:
            sent = self._send(peer, topic, payloads[peer], end)
            with self._changed:
                if sent:
                    taken[peer] = time.monotonic()
                self._changed.notify_all()
            if not sent or not self._listens(peer, topic, end):
                with self._changed:
                    given_up.add(peer)
                    self._changed.notify_all()

        threads = [
            threading.Thread(target=send, args=(peer,), name=f"to peer {peer}", daemon=True)
            for peer in payloads
        ]
        for thread in threads:
            thread.start()
        with self._changed:

            def over() -> bool:
                return all(
                    peer in given_up or (peer in taken and self._settled(peer, topic)) for peer in payloads
                )

            self._changed.wait_for(over, max(end - time.monotonic(), 0.0))
            received: dict[int, bytes | bytearray] = {}
            for peer in sorted(payloads):
                box = self._boxes[peer]
                message = box.messages.pop(topic, None)
                if message is not None:
                    received[peer] = message.payload
                if peer in taken:
                    there = time.monotonic() if message is None else message.at
                    self.traffic[peer].waited += max(there - taken[peer], 0.0)
                box.passed = max(box.passed, topic)
            self._changed.notify_all()
            return Exchanged(received, set(taken))

    def leave_out(self, peer: int, until: Topic) -> None:
        """Refuse a neighbour's messages up to a topic; it learns this when it sends or queries."""
        with self._changed:
            self._forget(peer, until._replace(stage=until.stage + 1))
            self._boxes[peer].passed = max(self._boxes[peer].passed, until)
            self._changed.notify_all()

    def _forget(self, peer: int, before: Topic) -> None:
        box = self._boxes[peer]
        box.messages = {topic: kept for topic, kept in box.messages.items() if topic >= before}

    def forsake(self, peer: int) -> None:
        """Stop waiting for a neighbour in the current exchange, for example because it has restarted."""
        with self._changed:
            self._given_up.add(peer)
            self._changed.notify_all()

    def _send(self, peer: int, topic: Topic, payload: bytes | memoryview, end: float) -> bool:
        view = memoryview(payload).cast("B")
        header = json.dumps({**self._about(), "topic": topic, "length": len(view)}).encode()
        deliver = self._channels[peer].stream_unary(f"/{_SERVICE}/Deliver")
        lost = time.monotonic() + self.lost_after
        while (left := end - time.monotonic()) > 0:
            start = time.monotonic()
            try:
                deliver(_chunks(header, view), timeout=left)
            except grpc.RpcError as error:
                # If the acknowledgement was lost, the repeated message shows that the first one arrived.
                if error.details() != _REPEATED:
                    if error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() > lost:
                        return False
                    time.sleep(min(_PAUSE, max(end - time.monotonic(), 0.0)))
                    continue
            except ValueError:  # The channel was closed.
                return False
            one = self.traffic[peer]
            one.messages += 1
            one.bytes += len(header) + len(view)
            one.seconds += time.monotonic() - start
            return True
        return False

    def _settled(self, peer: int, topic: Topic) -> bool:
        """Return whether a neighbour's message has come, or none will because it is at a later topic."""
        box = self._boxes[peer]
        return box.passed >= topic or any(other >= topic for other in box.messages)

    def _listens(self, peer: int, topic: Topic, end: float) -> bool:
        """Wait for a neighbour's message; return False if it will not come before the end."""
        heard, pause = time.monotonic(), min(_PAUSE, self.lost_after / 4)
        while (now := time.monotonic()) < end:
            with self._changed:
                if self._changed.wait_for(lambda: self._settled(peer, topic), min(pause, end - now)):
                    return True
            pause = min(2 * pause, self.lost_after / 4)
            comes = self._asks_whether(peer, topic)
            if comes is False:
                # It may have sent the message just before this answer.
                with self._changed:
                    return self._settled(peer, topic)
            if comes:
                heard = time.monotonic()
            elif time.monotonic() - heard >= self.lost_after:
                return False
        return True

    def _asks_whether(self, peer: int, topic: Topic) -> bool | None:
        """Return whether a neighbour will send a message of a topic; None if it does not answer."""
        ask = self._channels[peer].unary_unary(f"/{_SERVICE}/Comes")
        try:
            return bool(ask(json.dumps({**self._about(), "topic": topic}).encode(), timeout=self.lost_after))
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.FAILED_PRECONDITION:
                return None
            return bool(error.details() == _TOO_MANY)
        except ValueError:  # The channel was closed.
            return False

    def call(self, peer: int, request: Mapping[str, Any], timeout: float) -> dict[str, Any] | None:
        """Send a neighbour a request outside any exchange; None if it does not answer, or refuses."""
        asked = json.dumps({**self._about(), "request": dict(request)}).encode()
        ask = self._channels[peer].unary_unary(f"/{_SERVICE}/Call")
        try:
            answer = json.loads(ask(asked, timeout=timeout))
        except (grpc.RpcError, ValueError, RecursionError):
            return None
        return answer if isinstance(answer, dict) else None

    def _about(self) -> dict[str, Any]:
        return {"run": self.run, "layout": self.layout, "from": self.me}

    # Handlers. Anyone who reaches the port may call them: every input is checked before it is used.

    def _deliver(self, chunks: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        with self._handled(context) as certified:
            with self._in_time(context, self.lost_after):
                first = next(chunks, b"")
                header = _read(first, _LARGEST_HEADER)
            peer = self._known(header, certified)
            topic, length = _topic(header.get("topic")), header.get("length")
            if not isinstance(length, int) or not 0 <= length <= self.largest:
                raise _RefusedError("wrong size")
            self._make_room(peer, topic, context)
            payload = bytearray()
            with self._in_time(context, self.lost_after + length / _SLOWEST):
                for chunk in chunks:
                    payload += chunk
                    if len(payload) > length:
                        break
            if len(payload) != length:
                raise _RefusedError("wrong size")
            with self._changed:
                self._check_due(peer, topic)
                self._boxes[peer].messages[topic] = _Message(payload, time.monotonic())
                self.traffic[peer].received += len(first) + length
                self._changed.notify_all()
        return b""

    @contextmanager
    def _in_time(self, context: grpc.ServicerContext, seconds: float) -> Iterator[None]:
        """Refuse a call that takes longer to send, including one that sends nothing."""
        late = threading.Event()

        def end() -> None:
            late.set()
            context.cancel()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        except grpc.RpcError:
            raise _RefusedError("too slow" if late.is_set() else "cut off") from None
        except _RefusedError:
            # A cancelled stream reads as empty.
            if late.is_set():
                raise _RefusedError("too slow") from None
            raise
        finally:
            timer.cancel()
        if late.is_set():
            raise _RefusedError("too slow")

    def _make_room(self, peer: int, topic: Topic, context: grpc.ServicerContext) -> None:
        """Block a sender that is more than two exchanges ahead, until there is room or it gives up."""
        with self._changed:
            box = self._boxes[peer]
            self._check_due(peer, topic)
            while len(box.messages) >= _BUFFERED:
                if not context.is_active():
                    raise _RefusedError("too early")
                self._changed.wait(1.0)
            self._check_due(peer, topic)

    def _check_due(self, peer: int, topic: Topic) -> None:
        box = self._boxes[peer]
        if topic <= box.passed:
            raise _RefusedError("late")
        if topic in box.messages:
            raise _RefusedError(_REPEATED)

    def _called(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        answer: dict[str, Any] = {}
        with self._handled(context) as certified:
            header = _read(request, _LARGEST_CALL)
            peer = self._known(header, certified)
            asked = header.get("request")
            if self._answer is None or not isinstance(asked, dict):
                raise _RefusedError("unreadable")
            try:
                answer = self._answer(peer, asked)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
                raise _RefusedError("unreadable") from None
        return json.dumps(answer).encode()

    def _asked_whether(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Answer a waiting neighbour: one byte if a message may come, none if not."""
        comes = False
        with self._handled(context) as certified:
            header = _read(request, _LARGEST_HEADER)
            peer, topic = self._known(header, certified), _topic(header.get("topic"))
            with self._changed:
                comes = topic > self._boxes[peer].passed
            comes = comes and (self._comes is None or self._comes(peer, topic))
        return b"\x01" if comes else b""

    def _known(self, header: Mapping[str, Any], certified: int | None) -> int:
        """Return the sender of a message."""
        peer = header.get("from")
        if not isinstance(peer, int) or peer not in self._boxes:
            raise _RefusedError("not a neighbour")
        if certified is not None and peer != certified:
            raise _RefusedError("another certificate")
        for key, own in (("run", self.run), ("layout", self.layout)):
            if header.get(key) != own:
                raise _RefusedError(f"another {key}")
        return peer

    @contextmanager
    def _handled(self, context: grpc.ServicerContext) -> Iterator[int | None]:
        """Count a refusal and send its reason; yield the certified peer, None without credentials."""
        peer = None
        try:
            if self.credentials is not None:
                names = context.auth_context().get("x509_subject_alternative_name", [])
                peer = next((one for one in self.neighbours if certified_name(one).encode() in names), None)
                if peer is None:
                    raise _RefusedError("not a neighbour")
            with self._limited(peer):
                yield peer
        except _RefusedError as error:
            with self._changed:
                self.refused[str(error)] += 1
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    @contextmanager
    def _limited(self, peer: int | None) -> Iterator[None]:
        """Limit a neighbour's concurrent calls, so that threads remain for the others."""
        if peer is None:
            yield
            return
        box = self._boxes[peer]
        with self._changed:
            if box.active >= _AT_ONCE:
                raise _RefusedError(_TOO_MANY)
            box.active += 1
        try:
            yield
        finally:
            with self._changed:
                box.active -= 1


def _chunks(header: bytes, payload: memoryview) -> Iterator[bytes]:
    yield header
    for start in range(0, len(payload), _CHUNK):
        yield bytes(payload[start : start + _CHUNK])


def _read(text: bytes, largest: int) -> dict[str, Any]:
    if len(text) > largest:
        raise _RefusedError("unreadable")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise _RefusedError("unreadable") from None
    if not isinstance(header, dict):
        raise _RefusedError("unreadable")
    return header


def _topic(value: object) -> Topic:
    match value:
        case [int(number), int(stage)] if 0 <= number < 2**53 and 0 <= stage < 2**53:
            return Topic(number, stage)
    raise _RefusedError("unreadable")


def _check_address(address: str, *, plain: bool) -> None:
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ValueError(f"an address of a peer must be host:port, got {address!r}")
    if plain and not _is_loopback(host.strip("[]")):
        raise ValueError(
            f"an address of a peer must be one of this machine without certificates, got {address!r}: give "
            "each peer a certificate"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
