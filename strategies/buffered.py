"""Buffered asynchronous rounds: the second driver of methods, in which exchanges outlive rounds.

Paper: J. Nguyen, K. Malik, H. Zhan, A. Yousefpour, M. Rabbat, M. Malek, D. Huba, "Federated Learning with
Buffered Asynchronous Aggregation" (AISTATS 2022), FedBuff, Algorithm 1.
Differs: the mean of an update has the method's weights in place of 1 / K; a server step takes the place of
eta_g. A message that fails or expires costs its row, and its node gets new work.

Notation: version v of the model has taken v updates. A node that was sent version v', of the row x_{v'} (M,),
replies with x_i; its update is Delta_i = x_i - x_{v'}, of staleness tau = v - v' where version v takes it.
The method's own round does the rest: it is given x_v + s(tau) Delta_i as the K replies to its one exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from hedgerow.strategies.buffer import Buffer
from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Columns, Exchange, Steps, Vector
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.inbox import Inbox, Reply
from hedgerow.strategies.messenger import Messenger, Reader
from hedgerow.strategies.node import Node
from hedgerow.strategies.parts.engine_time import follow_engine
from hedgerow.strategies.parts.part import Parts
from hedgerow.strategies.whoami import grid_clock
from hedgerow.wire.records import to_record, view
from hedgerow.wire.seeds import Purpose, generator

S = TypeVar("S")
_POLL_SECONDS = 0.1
TOO_STALE = "too stale"


@dataclass(frozen=True, eq=False)
class Flight:
    """A message in flight: to a node, from a version of the model, with the number of the node's round.

    ``timing`` has the simulated times of the push, of the end of its node's earlier work, and of the reply;
    None where time is real.
    """

    node: Node
    version: int
    number: int
    exchange: Exchange
    message: Message
    message_id: str
    expires: float
    timing: tuple[float, float, float] | None


@dataclass(frozen=True, eq=False)
class Held:
    """A valid reply in the buffer: its row (M,), and the row that its node was sent."""

    node: int
    version: int
    row: Vector
    sent: Vector
    changes: bool  # The row is a change already.
    claimed: float
    reply: Reply

    def moved(self, start: Vector, factor: float, changes: bool, others: Vector) -> Vector:
        """Return the row of a reply to an exchange of the model ``start``: the update times a factor.

        ``others`` are the positions of statistics, which are values and no sums of updates: a variance could
        become negative. They are those of the reply.
        """
        if changes == self.changes and start is self.sent and factor == 1.0:
            return self.row
        row = self.row.astype(np.float64)
        update = factor * (row if self.changes else row - self.sent)
        if others.size:
            update[others] = ((row + self.sent) if self.changes else row)[others] - start[others]
        return update if changes else start + update


def refusal(method: Any, base: type) -> str | None:
    """Return why a method with its parts cannot have a buffer; None if it can, as far as its settings tell.

    ``base`` is the class ``Method``.
    """
    own = type(method)
    why: str | None = method.unbuffered()
    if why is not None:
        return why
    if method.sums is not None:
        return "masks of a secure sum cancel among nodes that are asked together"
    if alone := [type(part).__name__ for part in method.parts if not part.with_buffer]:
        return f"{', '.join(alone)} needs all replies of a round at once"
    if any(getattr(own, hook) is not getattr(base, hook) for hook in ("configure_train", "aggregate_train")):
        return "its class handles the messages of a round itself"
    return None


class Buffered:
    """Runs a method's rounds by a buffer.

    Parameters
    ----------
    method : Method
        Its round must make one training exchange, with one model for all nodes, and depend on its mean alone.
    buffer : Buffer
        The settings.
    """

    def __init__(self, method: Any, buffer: Buffer) -> None:
        self.method, self.buffer = method, buffer
        self.federation: Federation = method.federation
        self.forget()

    def forget(self) -> None:
        """Forget the run."""
        # By partition id.
        self.flights: dict[int, Flight] = {}
        self.held: list[Held] = []
        # The states of the versions in flight; each node's last round; instructions sent so far.
        self._states: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self._sent = 0
        # Replies lost since the last valid one.
        self._lost = 0
        self._loaded: Mapping[str, Any] = {}
        self._grid: Grid | None = None

    # Rounds.

    def train(
        self, current: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Make an update of the model; if too many replies are lost, return None and keep the buffer."""
        method, federation = self.method, self.federation
        if method.finished:
            return None, None
        self._grid, self._lost = grid, 0
        roster = federation.open_round(grid)
        if method.state is None:
            method.state = method.begin(federation.vector(arrays))
        inbox = federation.open_exchange(current, [], lambda node, content: None)
        self._context = RoundContext(federation, current, dict(config), roster.present, method.parts, grid)
        self._messenger = Messenger(self._context)
        # Books a reply; what counts and observes it does so once an update takes it.
        alone = replace(self._context, parts=Parts(), contents=[], absorbed=[])
        self._receipts = Messenger(alone)
        if self._loaded:
            self._resume()
        for flight in self.flights.values():
            self._expect(inbox, flight)
        federation.busy = self.flights.keys()
        while len(self.held) < self.buffer.size:
            self._send_to_free()
            if not self.flights or self._lost >= self.buffer.size + len(self.flights):
                return None, None
            self._receive(wait=True)
        return self._update(current, arrays, config)

    def settle(self) -> None:
        """Take what came while nodes evaluated, so that what is in flight at a checkpoint is not due.

        Every ``idle_every`` rounds wait for all nodes at work.
        """
        every = self.method.idle_every
        wait = bool(every) and self._context.round % every == 0
        if self.flights:
            self._receive(wait=False)
        while wait and self.flights:
            self._receive(wait=True)

    def _update(
        self, current: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the method's round take the first K replies of the buffer."""
        K, method = self.buffer.size, self.method
        taken, self.held = sorted(self.held[:K], key=lambda one: one.node), self.held[K:]
        assert self._grid is not None
        method._to_training(current, arrays, config, self._grid)
        assert method._pending is not None
        (messenger, steps, exchange), method._pending = method._pending, None
        assert isinstance(exchange, Exchange)
        run, changes = messenger.context, exchange.coding.changes
        stale = [current - 1 - one.version for one in taken]
        start = exchange.sent(pool := exchange.asks[0].pool)
        others = exchange.statistics(self.federation)
        rows = [
            one.moved(one.sent if not tau else start, self.buffer.factor(tau), changes, others)
            for one, tau in zip(taken, stale, strict=True)
        ]
        nodes, replies = [one.node for one in taken], [one.reply for one in taken]
        columns = Columns(nodes, [pool] * K, rows, [one.claimed for one in taken], replies)
        # A node that is not in the buffer is none that a round misses.
        run.online, run.buffered = sorted(set(nodes)), True
        run.contents = [reply.metrics for reply in replies]
        run.metrics |= {"staleness-mean": float(np.mean(stale)), "staleness-max": max(stale)}
        # It was booked when it came.
        counted = messenger.taken(replace(exchange, links=("", ""), booked=False), columns, 0, [], [])
        follow_engine(self.federation.clock, self._grid)
        ended: tuple[ArrayRecord | None, MetricRecord | None]
        ended = method._finished(messenger, _last(steps, type(method).__name__), iter([counted]))
        self._states = {one.version: self._states[one.version] for one in self.flights.values()}
        return ended

    # Instructions.

    def _opened(self, state: S, number: int, online: Sequence[int]) -> Exchange:
        """Return the exchange of a method's round, which is begun for its instructions alone."""
        method, context = self.method, self._context
        run = replace(
            context, round=number, online=online, contents=[], absorbed=[], metrics={},
            model=partial(method.model, state),
        )  # fmt: skip
        steps = method._steps(state, run)
        exchange = next(steps)
        steps.close()
        one = isinstance(exchange, Exchange) and exchange.trains and exchange.reads is None
        if not (one and isinstance(exchange, Exchange) and len(exchange.asks) <= 1):
            raise _refused(
                type(method).__name__, "a round must begin with one training exchange, with one model"
            )
        return exchange

    def _send_to_free(self) -> None:
        """Send the newest model to nodes without work that the method asks, drawn uniformly if too many."""
        assert self._grid is not None
        method, federation, version = self.method, self.federation, self._context.round - 1
        present = federation.gather(self._grid).present
        asked = self._opened(method.state, version + 1, present)
        limit = self.buffer.concurrency or len(asked.asked)
        once = getattr(method.aggregator, "each_once", False)
        if once and self.buffer.size > len(asked.asked):
            most = f"at most {len(asked.asked)}, the nodes of a round, with a rule over nodes"
            raise ValueError(f"buffer must have a size of {most}, got {self.buffer.size}")
        out = {*self.flights, *((one.node for one in self.held) if once else ())}
        free = [i for i in asked.asked if i not in out]
        slots = max(0, limit - len(self.flights))
        if len(free) > slots:
            stream = generator(method.settings.seed, round=self._sent, purpose=Purpose.BUFFER)
            free = sorted(free[k] for k in stream.choice(len(free), slots, replace=False))
        by_number: dict[int, list[int]] = {}
        for i in free:
            # A node's rounds are in sequence: they seed its draws, and tell what it keeps apart.
            by_number.setdefault(max(version + 1, self._numbers.get(i, 0) + 1), []).append(i)
        for number, nodes in sorted(by_number.items()):
            exchange = asked
            if number != version + 1:
                exchange = self._opened(method.state, number, nodes)
            self._send(exchange, number, [i for i in exchange.asked if i in nodes])

    def _send(self, exchange: Exchange, number: int, nodes: Sequence[int]) -> None:
        """Send instructions to nodes, booked."""
        asks = [replace(ask, nodes=nodes) for ask in exchange.asks if nodes]
        exchange = replace(exchange, asks=asks)
        sending = self._messenger.to_send(exchange)
        if not sending.nodes:
            return
        self._messenger.book_sent(exchange, sending)
        version = self._context.round - 1
        self._states[version] = self.method.state
        group = f"{self._context.round}-{self._sent}"
        self._push(
            sending.messages(exchange.kind, group, self.federation.timeout),
            [(node, version, number, exchange) for node in sending.nodes],
        )
        self._sent += len(sending.nodes)
        self.federation.report.sent += len(sending.nodes)

    def _push(
        self,
        messages: Sequence[Message],
        whose: Sequence[tuple[Node, int, int, Exchange]],
        again: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        """Push messages, those of a restored run at the simulated times at which they were pushed before."""
        grid = self._grid
        assert grid is not None
        push_again = None if again is None else getattr(grid, "push_again", None)
        push, timing = grid.push_messages, getattr(grid, "timing", lambda message_id: None)
        ids = list(push(messages) if push_again is None else push_again(messages, again))
        now, _ = grid_clock(grid)
        for at, (message, about) in enumerate(zip(messages, whose, strict=True)):
            node, version, number, exchange = about
            self._numbers[node.partition_id] = number
            # Flower's simulation omits the ids of messages that it could not send.
            known = timing(ids[at]) if len(ids) == len(messages) and ids[at] else None
            if len(ids) != len(messages) or not ids[at]:
                self._lose("not sent")
                continue
            begun = now() if known is None else known[0]
            expires = begun + self.federation.timeout
            flight = Flight(node, version, number, exchange, message, ids[at], expires, known)
            self.flights[node.partition_id] = flight
            self._expect(self.federation.inbox, flight)

    def _expect(self, inbox: Inbox, flight: Flight) -> None:
        inbox.expect(flight.node, flight.message.metadata.group_id, Reader(self._context, flight.exchange))

    # Replies.

    def _receive(self, *, wait: bool) -> None:
        """Take all replies that have come, in the order of simulated time and partition ids; wait for one."""
        assert self._grid is not None
        now, sleep = grid_clock(self._grid)
        while not (came := self._pulled()):
            expired = [one for one in self.flights.values() if one.timing is None and now() >= one.expires]
            for flight in expired:
                del self.flights[flight.node.partition_id]
                self._lose("no reply")
            if expired or not wait:
                return
            due = min((one.timing[2] for one in self.flights.values() if one.timing), default=None)
            sleep(_POLL_SECONDS if due is None else max(0.0, due - now()))
        for flight, message in came:
            del self.flights[flight.node.partition_id]
            self._take(flight, message)

    def _pulled(self) -> list[tuple[Flight, Message]]:
        """Return the replies that have come, in order."""
        assert self._grid is not None
        of = {flight.message_id: flight for flight in self.flights.values()}
        came = list[tuple[Flight, Message]]()
        while of and (pulled := list(self._grid.pull_messages(list(of)))):
            for message in pulled:
                if (flight := of.pop(message.metadata.reply_to_message_id, None)) is not None:
                    came.append((flight, message))
            if any(flight.timing is None for flight, _ in came):
                break  # On devices more may come at any time.
        return sorted(
            came, key=lambda one: (one[0].timing[2] if one[0].timing else 0.0, one[0].node.partition_id)
        )

    def _take(self, flight: Flight, message: Message) -> None:
        """Check and book a reply, and put it into the buffer."""
        federation, exchange, node = self.federation, flight.exchange, flight.node
        inbox = federation.inbox
        if message.has_error():
            # The SuperLink is the sender of its errors; attribute them to the node that they concern.
            message = Message(message.error, reply_to=flight.message)
            if federation.frozen:
                federation.lacking.add(node.partition_id)
        reply = inbox.taken(message)
        federation.members.judge(inbox.refused, inbox.used, federation.completed)
        inbox.refused, inbox.used = set(), set()
        if reply is None:
            self._lost += 1
            return
        tau = federation.completed + len(self.held) // self.buffer.size - flight.version
        if self.buffer.max_staleness is not None and tau > self.buffer.max_staleness:
            inbox.report.accepted -= 1
            self._lose(TOO_STALE)
            return
        self._lost = 0
        for hook in ("take", "buffered"):
            for part in self.method.parts.hooks[hook]:
                getattr(part, hook)(exchange, reply, self._context)
        columns = self._receipts.booked(exchange, [reply])
        sent = exchange.asks[0].model
        assert sent is not None, "the exchange has models"
        kept = Reply(node, reply.metrics, None)
        changes = exchange.coding.changes
        self.held.append(
            Held(node.partition_id, flight.version, columns.rows[0], sent, changes, columns.claimed[0], kept)
        )

    def _lose(self, reason: str) -> None:
        self.federation.report.rejected[reason] += 1
        self._lost += 1

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return messages in flight and replies in the buffer, each array once."""
        arrays: list[dict[str, Any]] = []
        seen: dict[int, int] = {}

        def number_of(record: ArrayRecord) -> int:
            if id(record) not in seen:
                seen[id(record)] = len(arrays)
                arrays.append({key: view(array) for key, array in record.items()})
            return seen[id(record)]

        flights = []
        for one in self.flights.values():
            content = one.message.content
            flights.append(
                {
                    "node": one.node.partition_id,
                    "version": one.version,
                    "number": one.number,
                    "timing": None if one.timing is None else list(one.timing),
                    "arrays": {key: number_of(record) for key, record in content.array_records.items()},
                    "config": {key: dict(record) for key, record in content.config_records.items()},
                }
            )
        held = [
            {
                "node": one.node, "version": one.version, "row": one.row, "sent": one.sent,
                "changes": one.changes, "claimed": one.claimed,
                "metrics": {key: dict(record) for key, record in one.reply.content.metric_records.items()},
            }
            for one in self.held
        ]  # fmt: skip
        states = {str(v): self.method.saved(state) for v, state in self._states.items() if flights}
        numbers = {str(i): number for i, number in sorted(self._numbers.items())}
        return {
            "sent": self._sent, "numbers": numbers, "states": states, "arrays": arrays, "flights": flights,
            "held": held,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint; its messages are sent again in the next round."""
        self.forget()
        self._loaded = state
        self._sent = int(state["sent"])
        self._numbers = {int(i): int(number) for i, number in state["numbers"].items()}

    def _resume(self) -> None:
        """Send what was in flight again, as it was, and restore the buffer."""
        state, self._loaded = self._loaded, {}
        nodes = self.federation.members.roster
        assert nodes is not None
        self._states = {int(v): self.method.restored(saved) for v, saved in state["states"].items()}
        for one in state["held"]:
            metrics = RecordDict({key: MetricRecord(record) for key, record in one["metrics"].items()})
            node = nodes.nodes[int(one["node"])]
            where = int(one["node"]), int(one["version"]), one["row"], one["sent"], one["changes"]
            self.held.append(Held(*where, one["claimed"], Reply(node, metrics, None)))
        records = [to_record(arrays) for arrays in state["arrays"]]
        key = self.federation.settings.configrecord_key
        for one in state["flights"]:
            node, version, number = nodes.nodes[int(one["node"])], int(one["version"]), int(one["number"])
            if node.node_id not in nodes.online:
                self._lose("offline")
                continue
            exchange = self._opened(self._states[version], number, [node.partition_id])
            config = {name: ConfigRecord(record) for name, record in one["config"].items()}
            exchange = replace(
                exchange,
                asks=[replace(ask, nodes=[node.partition_id]) for ask in exchange.asks],
                # As parts changed it then.
                config=dict(config[key]),
            )
            content = RecordDict({name: records[at] for name, at in one["arrays"].items()} | config)
            ttl, group = self.federation.timeout, f"{self._context.round}-again-{node.partition_id}"
            message = Message(content, node.node_id, exchange.kind, ttl=ttl, group_id=group)
            timing = one["timing"]
            again = None if timing is None else [(float(timing[0]), float(timing[1]))]
            self._push([message], [(node, version, number, exchange)], again)


def _last(steps: Steps[S], name: str) -> Steps[S]:
    """Return a round that takes the replies to its exchange, and must then end."""

    def taking() -> Steps[S]:
        replies = yield  # type: ignore[misc]
        try:
            steps.send(replies)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        raise _refused(name, "a round must make one exchange")

    made = taking()
    next(made)
    return made


def _refused(name: str, why: str) -> ValueError:
    return ValueError(f"buffer must be None with {name}: {why}")
