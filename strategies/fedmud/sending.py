"""What a round sends: to participants what they lack, and to nodes that only listen the updates."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from logging import INFO
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from hedgerow.strategies.federation import Chosen, Federation
from hedgerow.strategies.fedmud.replies import check_base
from hedgerow.strategies.fedmud.split_model import SplitModel
from hedgerow.strategies.fedmud.sync import Downlink, Download, Post, Sync
from hedgerow.strategies.inbox import Inbox, Node, collect
from hedgerow.strategies.secure_sums import SecureSums
from hedgerow.wire.ledger import NODE_TO_HUB
from hedgerow.wire.masked_sums import MASKED_SUM
from hedgerow.wire.message_types import MERGE
from hedgerow.wire.records import payload_bytes, to_record

__all__ = ["ALL", "DOWN", "Sending"]

DOWN = "server->client"
# The server's one sum.
ALL = 0
# Sent to nodes that do not train, where every node hears every update.

Check = Callable[[Node, RecordDict], Any]


class Sending:
    """The messages of one run's rounds.

    Parameters
    ----------
    federation : Federation
        The nodes, and the ledger in which messages are booked.
    model : SplitModel
        What there is to send.
    sync : {"catchup", "dense", "broadcast"}
        How nodes come by the current base, see ``Downlink``.
    """

    def __init__(self, federation: Federation, model: SplitModel, sync: Sync) -> None:
        self.federation = federation
        self.model = model
        self.downlink = Downlink(sync, federation.num_clients, model.method.log)
        # Of the round: its number, grid, contents and nominal bits, and who may still be answered again.
        self._round: tuple[int, Grid, Post, int] | None = None
        self._unanswered: dict[int, Node] = {}
        self._listening = Inbox([], "", lambda node, content: None)
        self._listeners: set[int] = set()
        self._heard: list[Message] = []

    def messages(
        self,
        server_round: int,
        grid: Grid,
        participants: Chosen,
        config: Mapping[str, Any],
        nominal_bits: int,
        check: Check,
        sums: SecureSums | None = None,
        start: ArrayRecord | None = None,
    ) -> list[Message]:
        """Return a round's messages, and book them; nodes that lack the same share one content.

        Parameters
        ----------
        server_round : int
            The round, from 1.
        grid : Grid
            Knows who is there.
        participants : Chosen
            The partition ids of those that train, or what draws them from those that are there.
        config : Mapping[str, Any]
            What they are told.
        nominal_bits : int
            The paper's count of an instruction; it does not count nodes that only listen.
        check : Callable[[Node, RecordDict], Any]
            Reads a participant's reply.
        sums : SecureSums or None (default: None)
            What adds the replies up.
        start : ArrayRecord or None (default: None)
            Of a sum: what replies are changes of.
        """
        nodes, offline = self.federation.online(grid, participants)
        if sums is not None:
            nodes = sums.members(server_round, grid, {ALL: nodes} if nodes else {})
        self.downlink.num_clients = self.federation.num_clients
        listeners = self._behind(grid, nodes)
        plan = None
        if sums is not None and start is not None and nodes:
            plan = sums.plan_for(ALL, self._common(config), start)
        post, first = self._post(config, plan), self.downlink.start
        contents = [(node, post.instruction(first(node.partition_id))) for node in nodes]
        news = [(node, post.news(first(node.partition_id))) for node in listeners]
        trained, informed = ([node.partition_id for node in group] for group in (nodes, listeners))
        self.downlink.book(trained, informed, Download.of(*post.arrays), Download.of(post.base))
        self._book(server_round, contents, nominal_bits)
        self._book(server_round, news, 0)
        # A node takes part in a sum once: whoever has no base is left out of it.
        self._unanswered = {} if sums is not None else {node.node_id: node for node in nodes}
        self._round = server_round, grid, post, nominal_bits
        messages = self.federation.instruct(server_round, contents, check, offline=offline)
        if sums is not None:
            sums.note_left_out()
        return [*messages, *self._broadcast(server_round, news)]

    def of_participants(self, replies: Iterable[Message]) -> Iterator[Message]:
        """Yield what participants replied; put aside what nodes replied that only listened.

        A participant that has no base is sent one, or what it can make one of, and its next reply counts: it
        has a round's time again, once the others have replied.
        """
        lost = list[Node]()
        for reply in replies:
            if reply.metadata.src_node_id in self._listeners:
                self._heard.append(reply)
            elif (node := self._without_base(reply)) is not None:
                lost.append(node)
            else:
                yield reply
        if lost:
            yield from self._answered_again(lost)

    def _without_base(self, reply: Message) -> Node | None:
        """Return the participant that says, for the first time in the round, that it has no base."""
        if self._round is None or not self.downlink.log.base_bits or not reply.has_content():
            return None
        if reply.metadata.group_id != str(self._round[0]):
            return None
        told = next(iter(reply.content.metric_records.values()), None)
        if told is None or told.get("need-base") != 1:
            return None
        return self._unanswered.pop(reply.metadata.src_node_id, None)

    def _answered_again(self, nodes: Sequence[Node]) -> Iterator[Message]:
        server_round, grid, post, bits = cast(tuple[int, Grid, Post, int], self._round)
        own, base = Download.of(*post.arrays), Download.of(post.base)
        contents = list[tuple[Node, RecordDict]]()
        for node in sorted(nodes, key=lambda node: node.partition_id):
            self.downlink.forget(node.partition_id)
            self.downlink.again(node.partition_id, own, base)
            contents.append((node, post.instruction(self.downlink.start(node.partition_id))))
        self._book(server_round, contents, bits)
        log(INFO, "\t> %d nodes have no base, and are sent one.", len(contents))
        group, ttl = str(server_round), self.federation.timeout
        messages = [
            Message(content, node.node_id, MessageType.TRAIN, ttl=ttl, group_id=group)
            for node, content in contents
        ]
        yield from collect(grid, messages, self.federation.timeout)

    def note_listeners(self, server_round: int) -> None:
        """Note which of the nodes that only listened hold the current version, and book what they replied."""
        for reply in self._listening.accept(self._heard):
            client, size = reply.node.partition_id, payload_bytes(reply.content)
            self.federation.ledger.book(server_round, NODE_TO_HUB, client, 0, 0, size)
            self.downlink.heard(client)

    def _common(self, config: Mapping[str, Any]) -> RecordDict:
        """Return what participants have in common: with the base that each comes by in its own way."""
        settings, method = self.federation.settings, self.model.method
        base = {"base": to_record(method.base())} if method.base() else {}
        told = {settings.configrecord_key: ConfigRecord({**config})}
        return RecordDict(
            {settings.arrayrecord_key: self.model.rest_record(), **method.down(), **base, **told}
        )

    def _post(self, config: Mapping[str, Any], plan: ConfigRecord | None) -> Post:
        settings, method = self.federation.settings, self.model.method
        own: dict[str, ArrayRecord | ConfigRecord] = {settings.arrayrecord_key: self.model.rest_record()}
        own |= method.down() | ({} if plan is None else {MASKED_SUM: plan})
        told = (settings.configrecord_key, config)
        return Post(own, to_record(method.base()), method.update_record, method.log, told)

    def _behind(self, grid: Grid, training: Sequence[Node]) -> list[Node]:
        """Return who hears the updates without training: all that lack some, or none."""
        if self.downlink.sync != "broadcast":
            return []
        roster = self.federation.gather(grid)
        others = set(range(self.federation.num_clients)) - {node.partition_id for node in training}
        behind = [roster.nodes[client] for client in self.downlink.behind(sorted(others))]
        return [node for node in behind if node.node_id in roster.online]

    def _broadcast(self, server_round: int, news: Sequence[tuple[Node, RecordDict]]) -> list[Message]:
        group, ttl = str(server_round), self.federation.timeout
        self._listening = Inbox([node for node, _ in news], group, partial(check_base, self.downlink))
        self._listeners = {node.node_id for node, _ in news}
        self._heard = []
        return [Message(content, node.node_id, MERGE, ttl=ttl, group_id=group) for node, content in news]

    def _book(self, server_round: int, contents: Sequence[tuple[Node, RecordDict]], bits: int) -> None:
        sizes: dict[int, tuple[int, int]] = {}
        for node, content in contents:
            if id(content) not in sizes:
                arrays = sum(payload_bytes(record) for record in content.array_records.values())
                # The plan of a sum travels on the modelled link too.
                plan = payload_bytes(content[MASKED_SUM]) if MASKED_SUM in content else 0
                sizes[id(content)] = arrays + plan, payload_bytes(content)
            size = sizes[id(content)]
            self.federation.book_down(server_round, DOWN, 0, node.partition_id, bits, size)
