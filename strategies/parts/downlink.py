"""The versioned base that nodes hold between rounds, and the downloads that keep it current.

Updates lead the base, a set of arrays, from version to version. A node that missed updates is sent them, or
the whole base, in one of three ways; the traffic of the other two ways is counted for comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import INFO
from typing import Any, Literal, get_args

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log as to_log
from numpy.typing import NDArray
from torch import Tensor

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Ask, Exchange
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.inbox import Inbox, Reply, collect
from hedgerow.strategies.messenger import instruction
from hedgerow.strategies.node import Node
from hedgerow.strategies.parts.part import Part
from hedgerow.wire.checks import one_of
from hedgerow.wire.ledger import HUB_TO_NODE, NODE_TO_HUB
from hedgerow.wire.message_types import MERGE
from hedgerow.wire.records import (
    PayloadError,
    checksum,
    data_bytes,
    only_record,
    payload_bytes,
    to_record,
    view,
)

Sync = Literal["catchup", "dense", "broadcast"]
SYNCS: tuple[Sync, ...] = get_args(Sync)


@dataclass(frozen=True)
class Download:
    """Traffic from the server to nodes.

    ``bits`` counts the arrays' contents, without headers and keys: 32 per parameter, 64 with its index, 1 per
    sign. ``payload_bytes`` counts the serialised arrays, with headers and keys.
    """

    messages: int = 0
    bits: int = 0
    payload_bytes: int = 0

    @classmethod
    def of(cls, *records: ArrayRecord) -> Download:
        """Return the size of some records."""
        bits = 8 * sum(data_bytes(record) for record in records)
        return cls(0, bits, sum(payload_bytes(record) for record in records))

    @property
    def parameters(self) -> float:
        """The bits as float32 parameters."""
        return self.bits / 32

    def __add__(self, other: Download) -> Download:
        return Download(
            self.messages + other.messages, self.bits + other.bits, self.payload_bytes + other.payload_bytes
        )

    def __mul__(self, times: int) -> Download:
        return Download(self.messages * times, self.bits * times, self.payload_bytes * times)


_MESSAGE = Download(messages=1)


class UpdateLog:
    """The updates of the base by version, as far back as they have fewer bits than the base.

    ``base_bits`` is 0 if there is no base, and nodes keep nothing between rounds.
    """

    def __init__(self, update_bits: int, base_bits: int) -> None:
        self.update_bits = update_bits
        self.base_bits = base_bits
        self.reset()

    def reset(self) -> None:
        """Forget the run."""
        self.version = 0
        self._updates: dict[int, ArrayRecord] = {}

    def __len__(self) -> int:
        return len(self._updates)

    def append(self, arrays: Mapping[str, Tensor | NDArray[Any]]) -> None:
        """Log the update to the next version, and drop those that no node will be sent."""
        self._updates[self.version] = to_record({f"{self.version}/{key}": a for key, a in arrays.items()})
        self.version += 1
        reach = self.base_bits // max(1, self.update_bits)
        for version in [v for v in self._updates if v < self.version - reach]:
            del self._updates[version]

    def covers(self, version: int) -> bool:
        """Return whether the updates since a version have fewer bits than the base."""
        return (self.version - version) * self.update_bits < self.base_bits

    def since(self, version: int) -> ArrayRecord:
        """Return the updates that lead from a version to the current one, as one record."""
        merged = ArrayRecord()
        for step in range(version, self.version):
            for key, array in self._updates[step].items():
                merged[key] = array
        return merged

    def state_dict(self) -> dict[str, Any]:
        """Return version and updates, for a checkpoint."""
        updates = {str(v): {k: view(a) for k, a in record.items()} for v, record in self._updates.items()}
        return {"version": self.version, "updates": updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        self.version = int(state["version"])
        self._updates = {int(v): to_record(arrays) for v, arrays in state["updates"].items()}


class Downlink(Part):
    """Keeps the base of every training node current; an exchange's asks have it as ``held["base"]``.

    A round updates the base by ``run.update``. Instructions hold the ``version`` that nodes must have,
    ``from-version``, where their updates start, and whether to ``keep-base``.

    Parameters
    ----------
    sync : {"catchup", "dense", "broadcast"}
        ``catchup`` sends a node the updates since the version that it acknowledged, ``dense`` sends the base
        every time, ``broadcast`` sends every update to every node, also to those that do not train. A node
        that holds nothing, or has missed updates with more bits than the base, is sent the base.
    record, link : str
        The ArrayRecord of updates, and the link of the modelled system.
    seeded : bool (default: False)
        Whether nodes can draw version 0 themselves; instructions then hold its ``base-checksum``.
    """

    name = "downlink"

    def __init__(
        self,
        federation: Federation,
        sync: Sync,
        log: UpdateLog,
        *,
        record: str,
        link: str,
        seeded: bool = False,
    ) -> None:
        one_of("sync", sync, SYNCS)
        self.federation, self.sync, self.log = federation, sync, log
        self.record, self.link, self.seeded = record, link, seeded
        self.forget()

    def forget(self) -> None:
        """Reset log, versions and traffic."""
        self.log.reset()
        self.traffic = dict.fromkeys(SYNCS, Download())
        # The versions that nodes hold; None for a node that is known to hold nothing.
        self._held: dict[Sync, dict[int, int | None]] = {way: {} for way in SYNCS}
        # For a hypothetical broadcast: a version, and how many nodes hold it, except those in ``_held``.
        self._others: tuple[int | None, int] = None, 0
        # Of version 0, if nodes draw it.
        self._checksum = ""
        # Of the round: the records since a version, the nodes that may be answered again, and the replies and
        # node ids of those that only get updates.
        self._lacking: dict[int | None, dict[str, ArrayRecord]] = {}
        self._unanswered: dict[int, Node] = {}
        self._listening = Inbox([], "", lambda node, content: None)
        self._listeners: set[int] = set()

    # Which version a node holds.

    @property
    def initial(self) -> int | None:
        """The version that a new node holds: 0 if it draws it, None for nothing."""
        return 0 if self._checksum else None

    def start(self, client: int) -> int | None:
        """Return the version from which a node is sent updates, or None if it is sent the base."""
        return self._start_of(self.sync, self._holds(self.sync, client))

    @property
    def with_buffer(self) -> bool:
        """Whether each node is sent what it lacks with its instruction."""
        return self.sync != "broadcast"

    def acknowledge(self, client: int, version: int | None = None) -> None:
        """Record that a training node holds a version, None for the current one, in every way."""
        for held in self._held.values():
            held[client] = self.log.version if version is None else version

    def lose(self, client: int) -> None:
        """Record that a node has lost its base; it holds ``initial``, or nothing if it failed from that."""
        failed = self.start(client) in (None, self.initial)
        for held in self._held.values():
            held[client] = None if failed else self.initial

    def _start_of(self, way: Sync, held: int | None) -> int | None:
        if not self.log.base_bits:
            return self.log.version
        return None if way == "dense" or held is None or not self.log.covers(held) else held

    def _holds(self, way: Sync, client: int) -> int | None:
        version, count = self._others
        unheard = version if way == "broadcast" and client < count else self.initial
        return self._held[way].get(client, unheard)

    # A round's messages.

    def ask(self, exchange: Exchange, run: RoundContext) -> Exchange:
        """Add the version that nodes must hold, and the records that each lacks."""
        if not exchange.trains:
            return exchange
        base = exchange.asks[0].held.get("base")
        if self.seeded and base is not None and not (self._checksum or self.log.version):
            self._checksum = checksum(base)
            self._others = 0, 0
        self._lacking = {} if base is None else {None: {"base": base}}
        config: dict[str, Any] = {
            "version": self.log.version,
            "keep-base": self.log.base_bits > 0 and self.sync != "dense",
        }
        if self._checksum:
            config["base-checksum"] = self._checksum
        asks = [self._supplied(ask, ask.nodes) for ask in exchange.asks]
        return replace(exchange, asks=asks, config={**exchange.config, **config})

    def extra_messages(self, exchange: Exchange, nodes: Sequence[Node], run: RoundContext) -> list[Message]:
        """Return the messages of a broadcast to nodes that do not train and lack updates."""
        assert run.grid is not None
        # A node takes part in a secure sum once, so one without a base is excluded from it.
        self._unanswered = {} if exchange.reads is not None else {node.node_id: node for node in nodes}
        listeners = self._behind(run, nodes) if self.sync == "broadcast" else []
        self._count(exchange, nodes, listeners)
        contents: dict[int | None, RecordDict] = {}
        messages = []
        for node in listeners:
            if (start := self.start(node.partition_id)) not in contents:
                config = ConfigRecord({**exchange.config, "from-version": self._first(start)})
                key = self.federation.settings.configrecord_key
                contents[start] = RecordDict({**self._lacks(start), key: config})
            self._book(run, node, contents[start], 0)
            messages.append(self._message(run, node, contents[start], MERGE))
        self._listening = Inbox(listeners, str(run.round), self._heard)
        self._listeners = {node.node_id for node in listeners}
        return messages

    def arrived(
        self, messages: Iterable[Message], exchange: Exchange, run: RoundContext
    ) -> Iterator[Message]:
        """Yield the participants' replies, and check those of nodes that only got updates.

        A participant without a base is sent one, or the updates from a version that it can draw, and its next
        reply counts: it has a round's time again, once the others have replied.
        """
        lost, heard = list[Node](), list[Message]()
        for reply in messages:
            if reply.metadata.src_node_id in self._listeners:
                heard.append(reply)
            elif (node := self._without_base(reply, run)) is not None:
                lost.append(node)
            else:
                yield reply
        if lost:
            yield from self._answered_again(lost, exchange, run)
        for one in self._listening.accept(heard):
            size = payload_bytes(one.content)
            self.federation.ledger.book(run.round, NODE_TO_HUB, one.node.partition_id, 0, 0, size)

    def check(self, node: Node, content: RecordDict, exchange: Exchange, run: RoundContext) -> None:
        """Refuse a reply from another version than the one sent; its node is sent the base next time."""
        if exchange.trains:
            self._check_base(node, content, exchange.config["version"])

    def take(self, exchange: Exchange, reply: Reply, run: RoundContext) -> None:
        """Record that a node holds the version that it was sent."""
        if exchange.trains:
            self.acknowledge(reply.node.partition_id, exchange.config["version"])

    def ended(self, run: RoundContext) -> None:
        """Log the round's update."""
        if run.update is not None:
            self.log.append(run.update)

    def _check_base(self, node: Node, content: RecordDict, asked: int) -> None:
        if not self.log.base_bits:
            return
        metrics = only_record(content, MetricRecord, "bad metrics")
        lost, version = metrics.get("need-base"), metrics.get("base-version")
        if lost or version != asked:
            self.lose(node.partition_id)
            if lost:
                raise PayloadError("need base", f"node {node.node_id} has lost its base")
            raise PayloadError("wrong base", f"base-version={version!r}, expected {asked}")

    def _supplied(self, ask: Ask, nodes: Sequence[int]) -> Ask:
        """Return an ask with the records that each of some nodes lacks."""
        own: dict[str, dict[int, Any]] = {"from-version": {}}
        for at in nodes:
            start = self.start(at)
            own["from-version"][at] = self._first(start)
            for name, record in self._lacks(start).items():
                own.setdefault(name, {})[at] = record
        return replace(ask, own={**ask.own, **own})

    def _first(self, start: int | None) -> int:
        return self.log.version if start is None else start

    def _lacks(self, start: int | None) -> dict[str, ArrayRecord]:
        """Return the records to send from a version on: one object for all nodes at that version."""
        if start not in self._lacking:
            if start is None or start == self.log.version:
                return {}
            self._lacking[start] = {self.record: self.log.since(start)}
        return self._lacking[start]

    def _behind(self, run: RoundContext, training: Sequence[Node]) -> list[Node]:
        assert run.grid is not None
        roster = self.federation.gather(run.grid)
        others = set(range(self.federation.num_clients)) - {node.partition_id for node in training}
        behind = [roster.nodes[at] for at in sorted(others) if self.start(at) != self.log.version]
        return [node for node in behind if node.node_id in roster.online]

    def _heard(self, node: Node, content: RecordDict) -> None:
        """Check the reply of a node that does not train; it then holds the current version."""
        self._check_base(node, content, self.log.version)
        self._held["broadcast"][node.partition_id] = self.log.version

    def _without_base(self, reply: Message, run: RoundContext) -> Node | None:
        """Return the reply's node if it reports, for the first time in the round, that it has no base."""
        if not self.log.base_bits or not reply.has_content() or reply.metadata.group_id != str(run.round):
            return None
        metrics = next(iter(reply.content.metric_records.values()), None)
        if metrics is None or metrics.get("need-base") != 1:
            return None
        return self._unanswered.pop(reply.metadata.src_node_id, None)

    def _answered_again(
        self, nodes: Sequence[Node], exchange: Exchange, run: RoundContext
    ) -> Iterator[Message]:
        assert run.grid is not None
        messages = list[Message]()
        for node in sorted(nodes, key=lambda node: node.partition_id):
            at = node.partition_id
            self.lose(at)
            ask = self._supplied(exchange.asked[at], [at])
            content = instruction(run, replace(exchange, asks=[replace(ask, nodes=[at])]), at)
            self.traffic[self.sync] += self._missing(self.sync, at) + self._own(exchange) + _MESSAGE
            self._book(run, node, content, ask.bits or 0)
            messages.append(self._message(run, node, content, MessageType.TRAIN))
        to_log(INFO, "\t> %d nodes have no base, and are sent one.", len(messages))
        yield from collect(run.grid, messages, self.federation.timeout)

    def _message(self, run: RoundContext, node: Node, content: RecordDict, kind: str) -> Message:
        ttl = self.federation.timeout
        return Message(content, node.node_id, kind, ttl=ttl, group_id=str(run.round))

    def _book(self, run: RoundContext, node: Node, content: RecordDict, bits: int) -> None:
        at, ledger = node.partition_id, self.federation.ledger
        ledger.book(
            run.round, self.link, 0, at, bits, sum(map(payload_bytes, content.array_records.values()))
        )
        ledger.book(run.round, HUB_TO_NODE, 0, at, bits, payload_bytes(content))

    # The traffic of each way.

    def _count(self, exchange: Exchange, nodes: Sequence[Node], listeners: Sequence[Node]) -> None:
        """Count one round's messages for each way; in the hypothetical ways nothing is lost or offline."""
        trainers, own = [node.partition_id for node in nodes], self._own(exchange)
        for way in SYNCS:
            total = self.traffic[way]
            for client in trainers:
                total += self._missing(way, client) + own + _MESSAGE
            if way == "broadcast" != self.sync:
                total += self._inform_all(trainers)
            elif way == "broadcast":
                for node in listeners:
                    total += self._missing(way, node.partition_id) + _MESSAGE
            self.traffic[way] = total

    def _own(self, exchange: Exchange) -> Download:
        """Return the size of an instruction's other arrays."""
        ask = exchange.asks[0] if exchange.asks else None
        records = [] if ask is None else [ask.arrays, *ask.records.values()]
        return Download.of(*(record for record in records if isinstance(record, ArrayRecord)))

    def _inform_all(self, trainers: Sequence[int]) -> Download:
        """Count a broadcast to all nodes that do not train; those at a common version without a loop."""
        held, (version, count) = self._held["broadcast"], self._others
        clients = self.federation.num_clients
        if version != self.initial:  # Nodes that have joined since hold the initial version.
            held |= dict.fromkeys(range(count, clients), self.initial)
        training = {client: self._holds("broadcast", client) for client in trainers}
        listening = [(held[client], 1) for client in held.keys() - training.keys()]
        total = Download()
        for holds, number in [*listening, (version, clients - len(held.keys() | training.keys()))]:
            if (start := self._start_of("broadcast", holds)) != self.log.version:
                total += (Download.of(*self._lacks(start).values()) + _MESSAGE) * number
        self._held["broadcast"], self._others = training, (self.log.version, clients)
        return total

    def _missing(self, way: Sync, client: int) -> Download:
        return Download.of(*self._lacks(self._start_of(way, self._holds(way, client))).values())

    # For checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Return log, versions held and traffic."""
        return {
            "log": self.log.state_dict(),
            "held": {way: {str(c): v for c, v in sorted(held.items())} for way, held in self._held.items()},
            "others": list(self._others),
            "traffic": {way: [t.messages, t.bits, t.payload_bytes] for way, t in self.traffic.items()},
            "base-checksum": self._checksum,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        self.log.load_state_dict(state["log"])
        self._checksum = str(state["base-checksum"])
        version, count = state["others"]
        self._others = None if version is None else int(version), int(count)
        for way in SYNCS:
            held = state["held"][way].items()
            self._held[way] = {int(c): None if v is None else int(v) for c, v in held}
            self.traffic[way] = Download(*map(int, state["traffic"][way]))
