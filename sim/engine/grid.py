"""A federation in one process: the same ServerApp and ClientApp objects, without Ray or serialisation.

``InProcessGrid`` is a Flower Grid. It is faster than Flower's own two (one batched call for all nodes that
received a message of the same type) and has a virtual clock (nobody waits for late replies). The class's
notes list the behaviour that it shares with them.
"""

from __future__ import annotations

import heapq
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from logging import WARNING
from math import inf, prod
from shutil import rmtree
from time import perf_counter
from typing import Any, Self

import numpy as np
from flwr.app import ArrayRecord, Context, Error, Message, RecordDict, UserConfig
from flwr.common import log
from flwr.serverapp import Grid

from hedgerow.sim.engine._compat import (
    ErrorCode,
    NodeInfo,
    Record,
    Run,
    copy_records,
    delivered,
    empty_run,
    give_identity_back,
    has_wrappers,
    lend_identity,
    set_message_ids,
    set_sender,
    through_the_wire,
)
from hedgerow.sim.engine.faults import Fate, FaultModel, corrupted
from hedgerow.sim.engine.handlers import App, Handlers, NodeJob
from hedgerow.sim.engine.nodes import SimulatedNode, SimulatedNodes, draw_node_ids, wait_for_nodes
from hedgerow.sim.engine.workers import Dealt, Workers, WorkersLostError, check_workers, default_workers
from hedgerow.wire.calls import AnswersColumns, Delivery, InColumns, KnownNodes, KnowsSizes
from hedgerow.wire.checks import at_least, not_negative
from hedgerow.wire.message_types import WHOAMI
from hedgerow.wire.printable import shown
from hedgerow.wire.process import simulation_folder

# Bytes of arrays in the messages processed at once, unless max_in_flight is given.
MEMORY_BUDGET = 1 << 30
# A deployment notices a dead node after two missed heartbeats of 30 s.
HEARTBEAT_LAPSE = 60.0
_ROUND = re.compile(r"\d{1,18}")
_EXPIRED = "TTL ended before a reply"


@dataclass(frozen=True, slots=True)
class _Turn:
    """Which of a node's messages one is."""

    kind: str  # Its type.
    number: int  # The round.
    count: int  # From 1, among the node's messages of this type in this round.
    received: int  # From 1, among all of the node's messages.
    repeats: bool  # Whether it repeats the set-up of a restored run.


class InProcessGrid(Grid):
    """Run a ClientApp's nodes in this process.

    Parameters
    ----------
    client_app : ClientApp
        Any Flower ClientApp. One that is ``hedgerow.wire.calls.Batched`` gets one call for all messages
        of a type, unless its handler has mods or a lifespan.
    num_nodes : int
        Number of nodes, >= 1.
    run_config : dict or None (default: None)
        The run config that handlers see in ``context.run_config``; each call gets a copy.
    node_configs : sequence of dict or None (default: None)
        Each partition's node config, without ``partition-id`` and ``num-partitions``.
    faults : FaultModel, mapping of int to FaultModel, or None (default: None)
        One model for all nodes, or one for each listed partition id.
    strict : bool (default: False)
        Serialize every message and every node's state, as a deployment does. A record that would not survive
        is named in a ValueError, at the push (server's) or at the pull (client's).
    seed : int (default: 0)
        Keys the node ids, the faults, and the global generators of handlers, see the notes.
    max_in_flight : int or None (default: None)
        Nodes processed at once, >= 1; None for as many as keep the arrays of their messages within 1 GiB.
    real_time : bool (default: False)
        Count the real seconds of handlers and server, see the notes. All handlers are then called node by
        node.
    workers : int (default: 1)
        Processes for the nodes' work, each on one thread. 1 is this process, on all of torch's threads. 0 is
        as many as there are physical cores and threads, for batched apps with enough work; see
        ``workers.py``. Linux only.

    Raises
    ------
    ValueError
        If an argument is not valid.

    Notes
    -----
    - Work is done when replies are pulled, one chunk of nodes per pull, which bounds memory. A node handles
      its messages in the order of their pushes.
    - Both sides get copies of the keys, values and lists of records. Arrays are shared and must not be
      written. A batched handler's ``content`` is one object for all nodes that received the same content.
    - A handler works on a copy of the node's state, which is kept only if it returns a reply: an exception
      rolls the state back. (A deployment keeps what was written before the exception.)
    - An exception, ``None``, or anything that is not a reply to the message becomes an error reply with code
      2; an unknown node or an expired TTL, one with code 3; a dead node, one with code 5.
    - Time is virtual, starts at 0, and passes only in ``sleep`` and ``send_and_receive``. A message's TTL
      counts from its push, in virtual time. Handlers take no virtual time, so one that sleeps is never late.
    - Each handler finds the global generators of Python, NumPy and torch seeded for (seed, round, node,
      message type); the server's are put back afterwards. A batched handler that draws from them is
      called node by node. The round is ``server-round`` in the message's config, else the number at the
      start of its group id, else ``round``; where there is none, the node's messages are counted.
    - With ``real_time`` a reply is due after its handler's real seconds (times a straggler's ``slowdown``,
      plus the delay of ``faults``), and the server's real seconds between its calls count too. Handlers still
      run one after another, but are timed as if all nodes ran in parallel. The late replies then depend on
      the machine.
    - ``flwr.app.Message(...)`` needs a process identity, which a script does not have. A grid provides one
      from its construction until ``close``, the end of its ``with`` block or its own end; using the grid
      again provides it again. An identity that Flower set is kept. A message belongs to the run of the grid
      that it is pushed to.
    - Not thread-safe.

    Examples
    --------
    ::

        grid = InProcessGrid(client_app, num_nodes=10)
        result = FedAvg().start(grid=grid, initial_arrays=arrays, num_rounds=3)
    """

    def __init__(
        self,
        client_app: App,
        num_nodes: int,
        *,
        run_config: UserConfig | None = None,
        node_configs: Sequence[UserConfig] | None = None,
        faults: FaultModel | Mapping[int, FaultModel] | None = None,
        strict: bool = False,
        seed: int = 0,
        max_in_flight: int | None = None,
        real_time: bool = False,
        workers: int = 1,
    ) -> None:
        at_least(1, num_nodes=num_nodes)
        check_workers(workers, real_time=real_time)
        if node_configs is not None and len(node_configs) != num_nodes:
            raise ValueError(
                f"node_configs must have one config for each of {num_nodes} nodes, got {len(node_configs)}"
            )
        if max_in_flight is not None:
            at_least(1, max_in_flight=max_in_flight)
        self._run = empty_run(run_id=1 + seed)
        self._handlers = Handlers(client_app, run_config or {}, strict=strict, seed=seed)
        weakref.finalize(self, rmtree, simulation_folder(self._handlers.name), ignore_errors=True)
        self._faults = faults
        self._app = client_app
        self._run_config = dict(run_config or {})
        self._strict = strict
        self._seed = seed
        self._max_in_flight = max_in_flight
        self.real_time = real_time
        # The round of messages that name none, set by who observes the run; 0 before its first.
        self.round: int | None = None
        # The last round of each (node, message type), and its number of messages.
        self._counts: dict[tuple[int, str], tuple[int, int]] = {}
        # Whether a restored run repeats its set-up, which its nodes have done already.
        self._repeats = False
        self._clock = 0.0
        # For real_time: when the last call returned to the server, and the depth of nested calls.
        self._left: float | None = None
        self._depth = 0
        self._pushed = 0
        self._queue: list[tuple[float, int, NodeJob]] = []
        self._replies: dict[str, tuple[Message, NodeJob]] = {}
        self._waiting: dict[str, NodeJob] = {}
        configs = list(node_configs) if node_configs and any(node_configs) else None
        self._all = SimulatedNodes(draw_node_ids(num_nodes, seed), configs)
        lend_identity(self, self._run.run_id)
        self._dealt = Dealt(always=workers > 1)
        count = workers or (1 if real_time else default_workers(client_app))
        count = min(count, num_nodes)
        self._workers = Workers(self._handlers, count) if count > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Withdraw the identity that the grid provided to this process, and end its workers."""
        give_identity_back(self)
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    @classmethod
    def inside(
        cls,
        grid: Grid,
        client_app: App,
        context: Context,
        *,
        num_nodes: int | None = None,
        timeout: float = 60.0,
        strict: bool = False,
        max_in_flight: int | None = None,
        workers: int = 1,
    ) -> InProcessGrid:
        """Replace the grid that Flower passed to the ServerApp, with the same run and node ids.

        Parameters
        ----------
        grid : Grid
            Flower's grid; nothing is sent over it. An InProcessGrid is returned unchanged.
        client_app : ClientApp
            The nodes' app.
        context : Context
            The ServerApp's context. Its run config is also the nodes', and has ``seed`` and ``fault-*``.
        num_nodes : int or None (default: None)
            Nodes to wait for; None for the run-config key ``num-clients`` or, without it, the number that has
            not changed for a second.
        timeout : float (default: 60.0)
            Seconds to wait for them.
        strict, max_in_flight, workers
            As in the class.

        Raises
        ------
        ValueError
            If the nodes are not online in time.
        """
        if isinstance(grid, cls):
            return grid
        if num_nodes is None:
            num_nodes = int(context.run_config.get("num-clients", 0)) or None
        node_ids = wait_for_nodes(grid, num_nodes, timeout)
        out = cls(
            client_app,
            len(node_ids),
            run_config=context.run_config,
            faults=FaultModel.from_run_config(context.run_config),
            strict=strict,
            seed=int(context.run_config.get("seed", 0)),
            max_in_flight=max_in_flight,
            workers=workers,
        )
        out.set_run(grid.run)
        out._all = SimulatedNodes(np.array(node_ids, np.uint64))
        return out

    @property
    def _nodes(self) -> dict[int, SimulatedNode]:
        return self._all.by_id()

    @property
    def _is_plain(self) -> bool:
        """Whether nodes differ only in their partitions, and no message is lost, serialised or timed."""
        disturbed = self._faults is not None or self._strict or self.real_time
        return type(self) is InProcessGrid and self._all.configs is None and not disturbed

    def known_nodes(self) -> KnownNodes | None:
        """Return the nodes if they need not be queried, else None.

        That is the case if every node would answer and the answers are known: nodes differ only in their
        partitions (no ``node_configs``), the app gives all sizes (``wire.calls.KnowsSizes``) and has no mod
        for this message, no message is lost, serialized or timed, and the grid is not a subclass.
        """
        if not self._is_plain or self._all.all_made:
            return None
        if not isinstance(self._app, KnowsSizes) or has_wrappers(self._app, WHOAMI):
            return None
        sizes = self._app.sizes(self._run_config.copy())
        if sizes is None or len(sizes) != len(self._all):
            return None
        # The caller builds messages to these nodes next.
        lend_identity(self, self._run.run_id)
        return KnownNodes(self._all.ids, sizes)

    def counts_examples(self) -> bool:
        """Return whether nodes report numbers of examples that this suite's own clients have counted."""
        counts = getattr(self._app, "counts_examples", None)
        return bool(counts and counts(self._run_config)) and not has_wrappers(self._app, WHOAMI)

    # Flower's Grid

    def set_run(self, run: Run) -> None:
        """Set the run that messages belong to."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run that messages belong to."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Build a message of this run (Flower prefers its ``Message`` constructor)."""
        lend_identity(self, self._run.run_id)
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Return the ids of online nodes, ascending, which is not the order of partitions."""
        # The caller builds messages to these nodes next.
        lend_identity(self, self._run.run_id)
        return self._all.online(self.now())

    def get_nodes(self) -> list[NodeInfo]:
        """Return the online nodes; only their ids are known."""
        return [NodeInfo(node_id=node_id, status="online") for node_id in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Accept messages for delivery and return their ids, in the same order.

        Raises
        ------
        TypeError
            If given an iterator, because Flower's deployment grid reads the messages twice.
        ValueError
            If a message is a reply or has no TTL; in strict mode, if it cannot be serialized.
        """
        if isinstance(messages, Iterator):
            raise TypeError(
                f"messages must be a list, got a {type(messages).__name__}: Flower's grid for deployments "
                "reads the messages twice"
            )
        messages = list(messages)
        for message in messages:
            _check_instruction(message)
        with self._called():
            return self._push(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the available replies, each once; if there is none, process one chunk of nodes first.

        Unknown ids, and those whose reply was already returned, are ignored.
        """
        wanted = list(message_ids)
        with self._called():
            while True:
                ready = [message_id for message_id in wanted if message_id in self._replies]
                if ready or not self._due():
                    return [self._collect(message_id) for message_id in ready]
                self._work()

    def timing(self, message_id: str) -> tuple[float, float, float] | None:
        """Return when a waiting message was pushed, until when its node was busy, and when it is answered.

        None with ``real_time``, in which nobody knows.
        """
        job = self._waiting[message_id]
        return None if self.real_time else (job.pushed, job.busy, job.due)

    def push_again(self, messages: Sequence[Message], times: Sequence[tuple[float, float]]) -> list[str]:
        """Push messages that were in flight at the restored checkpoint, at the first two times of ``timing``.

        Each has the fate that it had, and is answered and expires when it would have been.
        """
        now, message_ids = self._clock, list[str]()
        for message, (pushed, busy) in zip(messages, times, strict=True):
            (node,) = self._all.addressed([message.metadata.dst_node_id])
            if node is not None:
                node.busy_until, node.received = busy, node.received - 1  # It was counted.
            self._clock = pushed
            message_ids += self.push_messages([message])
        self._clock = now
        return message_ids

    def columns(
        self, message_type: str, asked: Sequence[tuple[RecordDict, Sequence[int]]]
    ) -> InColumns | None:
        """Answer an exchange, contents with the partitions that receive each, without messages.

        The replies equal those to messages, bit for bit. The result is None if messages are needed: if they
        are serialized, lost, delayed or timed, if the handler has wrappers, if the app has no column handler,
        or if a node fails or a worker dies.
        """
        if not self._is_plain or not isinstance(self._app, AnswersColumns):
            return None
        handler = self._app.column_handler(message_type)
        count, size = (
            sum(len(nodes) for _, nodes in asked),
            sum(len(nodes) * _array_bytes(content) for content, nodes in asked),
        )
        if handler is None or not count or has_wrappers(self._app, message_type) or size > MEMORY_BUDGET:
            return None
        if self._queue or self._max_in_flight is not None:
            return None
        groups = [(content, [self._all.at(i) for i in partitions]) for content, partitions in asked]
        stays = self._workers is None or self._dealt.keeps(message_type, count, size)
        key = message_key(self._seed, _round_of(asked[0][0]) or 0, -1, message_type)
        try:
            if self._workers is None or stays:
                deliveries = [
                    Delivery(content, [self._handlers.seen(node, self._run.run_id) for node in members])
                    for content, members in groups
                ]
                found = self._handlers.columns(message_type, deliveries, key)
            else:
                found = self._workers.columns(message_type, groups, self._run.run_id, key)
        except Exception as error:
            reason = shown(f"{type(error).__name__}: {error}", 300)
            log(WARNING, "%s of %d nodes at once failed (%s): using messages", message_type, count, reason)
            return None
        if not stays:
            self._dealt.count(size)
        for _, members in groups:
            for node in members:
                node.received += 1
            self._all.note_changes(members)
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Push messages and return their replies; the virtual clock runs until the last one or the timeout.

        Later replies can still be pulled.
        """
        with self._called():
            pending = dict.fromkeys(self.push_messages(messages))
            end = inf if timeout is None else self._clock + timeout
            replies: list[Message] = []
            while pending:
                pulled = self.pull_messages(pending)
                for reply in pulled:
                    del pending[reply.metadata.reply_to_message_id]
                replies += pulled
                if not pulled:
                    next_due = min(self._waiting[message_id].due for message_id in pending)
                    self._clock = min(next_due, end)
                    if next_due > end:
                        break
            return replies

    # Virtual time

    def now(self) -> float:
        """Return the virtual time in seconds."""
        with self._called():
            return self._clock

    def sleep(self, seconds: float) -> None:
        """Advance virtual time; takes no real time."""
        not_negative(seconds=seconds)
        with self._called():
            self._clock += seconds

    @contextmanager
    def _called(self) -> Iterator[None]:
        """With real_time, advance the clock by the real seconds since the server's last call."""
        if not self.real_time:
            yield
            return
        if not self._depth and self._left is not None:
            self._clock += perf_counter() - self._left
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._left = perf_counter()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the nodes' states, messages received and virtual time, between two rounds.

        Nodes that received nothing are omitted. So are messages in flight: a reply that is late at a
        checkpoint is lost, unless its message is pushed again (``push_again``).
        """
        return {"clock": self._clock, "dealt": self._dealt.bytes, **self._all.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the nodes of a checkpoint; ValueError if it has another number of nodes."""
        self._all.load_state_dict(state)
        self._clock = float(state["clock"])
        self._repeats = True
        self._dealt.bytes = int(state.get("dealt", 0))

    # Delivery of a message

    def _push(self, messages: Sequence[Message]) -> list[str]:
        """Accept valid messages and return their ids."""
        # Copies, because the server may change a record after the push; shared contents stay shared, and
        # so do shared records unless they are deserialised.
        originals, records = {id(message.content): message for message in messages}, dict[int, Record]()
        contents = {
            key: self._through_the_wire(m) if self._strict else copy_records(m.content, records)
            for key, m in originals.items()
        }
        copies = {key: (copy, _array_bytes(copy), _round_of(copy)) for key, copy in contents.items()}
        run_id, first = self._run.run_id, self._pushed + 1
        self._pushed += len(messages)
        message_ids = [f"{run_id:x}-{first + i:x}" for i in range(len(messages))]
        set_message_ids(messages, message_ids)
        set_sender(messages, run_id)
        nodes = self._all.addressed([message.metadata.dst_node_id for message in messages])
        found = [copies[id(message.content)] for message in messages]
        turns = [
            None if node is None else self._turn(node, message, number)
            for node, message, (_, _, number) in zip(nodes, messages, found, strict=True)
        ]
        keys = [
            message_key(self._seed, turn.number, node.partition_id, turn.kind, turn.count)
            if turn is not None and node is not None
            else 0
            for turn, node in zip(turns, nodes, strict=True)
        ]
        sent = [delivered(m, content) for m, (content, _, _) in zip(messages, found, strict=True)]
        for at, message in enumerate(sent):
            busy = 0.0 if (node := nodes[at]) is None else node.busy_until
            job = self._schedule(message, node, turns[at], keys[at])
            job.size, job.pushed, job.busy = found[at][1], self._clock, busy
            self._waiting[message_ids[at]] = job
            heapq.heappush(self._queue, (job.due, first + at, job))
        return message_ids

    def _through_the_wire(self, message: Message) -> RecordDict:
        what = f"message {message.metadata.message_type} to node {message.metadata.dst_node_id}"
        return through_the_wire(message.content, what)

    def _schedule(
        self, message: Message, node: SimulatedNode | None, turn: _Turn | None, key: int
    ) -> NodeJob:
        """Decide when a message is answered, and whether its node processes it."""
        deadline = self._clock + message.metadata.ttl
        if node is None or turn is None:
            return NodeJob(message, None, self._clock, deadline, verdict=_unavailable("unknown node"))
        fate = self._fate(node, turn, key)
        start = self._clock if turn.repeats else max(self._clock, node.busy_until)
        if fate.crashed:
            node.offline_at = min(node.offline_at, start + HEARTBEAT_LAPSE)
            noticed = max(self._clock, node.offline_at)
            if noticed <= deadline:
                dead = Error(ErrorCode.NODE_UNAVAILABLE, f"node {node.node_id} is dead")
                return NodeJob(message, node, noticed, deadline, verdict=dead)
        if fate.crashed or fate.dropped or start >= deadline:
            return NodeJob(message, node, deadline, deadline, verdict=_unavailable(_EXPIRED))
        if self.real_time or turn.repeats:
            return NodeJob(message, node, start, deadline, runs=True, fate=fate, key=key)
        node.busy_until = start + fate.delay
        if node.busy_until > deadline:
            # The node still processes it and updates its state; only the reply is late.
            late = _unavailable(_EXPIRED)
            return NodeJob(message, node, deadline, deadline, runs=True, verdict=late, key=key)
        return NodeJob(message, node, node.busy_until, deadline, runs=True, fate=fate, key=key)

    def _turn(self, node: SimulatedNode, message: Message, named: int | None) -> _Turn:
        """Count a message of a round, ``named`` by its content or not."""
        kind = message.metadata.message_type
        number = self._round_of(message, named)
        if self._repeats and number != 0 and not _introduces(message):
            self._repeats = False
        if not self._repeats:
            node.received += 1
        if number is None:
            return _Turn(kind, 0, node.received, node.received, self._repeats)
        last, count = self._counts.get((node.partition_id, kind), (number, 0))
        count = count + 1 if last == number else 1
        self._counts[node.partition_id, kind] = number, count
        return _Turn(kind, number, count, node.received, self._repeats)

    def _fate(self, node: SimulatedNode, turn: _Turn, key: int) -> Fate:
        """Return the fate of a message at a node."""
        model = self._faults.get(node.partition_id) if isinstance(self._faults, Mapping) else self._faults
        if model is None:
            return Fate()
        fate = model.draw(key, node.partition_id, turn.received)
        return Fate(crashed=fate.crashed) if turn.repeats else fate

    def _round_of(self, message: Message, named: int | None) -> int | None:
        """Return a message's round, ``named`` by its content or not; None if nobody knows it."""
        if named is not None:
            return named
        group = _ROUND.match(message.metadata.group_id or "")
        return int(group[0]) if group else self.round

    def _due(self) -> bool:
        return bool(self._queue) and self._queue[0][0] <= self._clock

    def _work(self) -> None:
        """Answer one chunk of due messages, those of one type together."""
        by_type: dict[str, list[NodeJob]] = {}
        for job in self._chunk():
            if job.answer is not None:
                self._reply([(job, job.answer)])
            elif job.runs and self.real_time:
                self._work_in_real_time(job)
            elif job.runs:
                by_type.setdefault(job.message.metadata.message_type, []).append(job)
            elif job.verdict is not None:
                self._reply([(job, job.verdict)])
        if self._workers is not None:
            by_type = self._not_dealt(by_type, self._workers)
        for message_type, jobs in by_type.items():
            self._reply(list(self._handlers.answers(message_type, jobs, self._run.run_id)))

    def _not_dealt(self, by_type: dict[str, list[NodeJob]], workers: Workers) -> dict[str, list[NodeJob]]:
        """Let workers answer the calls that are large enough, and return the rest."""
        dealt = {kind: jobs for kind, jobs in by_type.items() if self._dealt.worth(kind, jobs)}
        if not dealt:
            return by_type
        try:
            answers = workers.answers(dealt, self._run.run_id)
        except WorkersLostError as error:
            log(WARNING, "No worker processes left (%s): continuing in this process.", error)
            workers.close()
            self._workers = None
            return by_type
        self._reply(answers, unshared=True)
        return {kind: jobs for kind, jobs in by_type.items() if kind not in dealt}

    def _work_in_real_time(self, job: NodeJob) -> None:
        """Process a message, and make its reply due after the handler's real seconds."""
        node = job.node
        assert node is not None
        if node.busy_until > job.due:  # pushed while the node was busy with another message
            job.due = min(node.busy_until, job.deadline)
            if job.due == job.deadline:
                job.runs, job.verdict = False, _unavailable(_EXPIRED)
        else:
            job.answer, seconds = self._handlers.timed(job, self._run.run_id)
            node.busy_until = job.due + job.fate.delay + job.fate.slowdown * seconds
            job.due = min(node.busy_until, job.deadline)
            if node.busy_until > job.deadline:
                job.verdict = _unavailable(_EXPIRED)
        self._pushed += 1
        heapq.heappush(self._queue, (job.due, self._pushed, job))

    def _chunk(self) -> list[NodeJob]:
        chunk: list[NodeJob] = []
        nodes: set[int] = set()
        size = 0
        while self._due():
            job = self._queue[0][2]
            node_id = job.message.metadata.dst_node_id
            # A node's second message waits for its first.
            if chunk and (node_id in nodes or self._is_full(len(chunk), size + job.size)):
                break
            heapq.heappop(self._queue)
            chunk.append(job)
            nodes.add(node_id)
            size += job.size
        return chunk

    def _is_full(self, count: int, size: int) -> bool:
        if self._max_in_flight is not None:
            return count >= self._max_in_flight
        return size > MEMORY_BUDGET

    def _reply(
        self, answered: Sequence[tuple[NodeJob, RecordDict | Error]], *, unshared: bool = False
    ) -> None:
        """Turn answers into replies; ``unshared`` ones come from another process."""
        self._all.note_changes([job.node for job, _ in answered if job.node is not None])
        jobs, answers = [job for job, _ in answered], [job.verdict or answer for job, answer in answered]
        if not unshared:
            # Separate a reply from what the node also keeps in its state.
            answers = [copy_records(a) if isinstance(a, RecordDict) else a for a in answers]
        if self._strict or any(job.fate.corrupt for job in jobs):
            answers = [self._received(job, answer) for job, answer in zip(jobs, answers, strict=True)]
        replies = [Message(a, reply_to=job.message) for job, a in zip(jobs, answers, strict=True)]
        message_ids = [job.message.metadata.message_id for job in jobs]
        set_message_ids(replies, [f"{message_id}-reply" for message_id in message_ids])
        for job, reply, message_id in zip(jobs, replies, message_ids, strict=True):
            self._replies[message_id] = (reply, job)
            del self._waiting[message_id]

    def _received(self, job: NodeJob, answer: RecordDict | Error) -> RecordDict | Error:
        """Return an answer as the server receives it."""
        if not isinstance(answer, RecordDict):
            return answer
        if job.fate.corrupt is not None:
            answer = corrupted(answer, job.fate.corrupt)
        if self._strict:
            node = job.node.partition_id if job.node else "?"
            answer = through_the_wire(
                answer, f"reply {job.message.metadata.message_type} of partition {node}"
            )
        return answer

    def _collect(self, message_id: str) -> Message:
        reply, job = self._replies.pop(message_id)
        if self._clock <= job.deadline or reply.has_error():
            return reply
        late = Message(_unavailable("the reply was pulled after the message's TTL"), reply_to=job.message)
        set_message_ids([late], [f"{message_id}-reply"])
        return late


def _check_instruction(message: Message) -> None:
    metadata = message.metadata
    if metadata.reply_to_message_id:
        raise ValueError(f"the message to node {metadata.dst_node_id} must not be a reply")
    if not metadata.ttl > 0:
        raise ValueError(f"ttl of the message to node {metadata.dst_node_id} must be > 0, got {metadata.ttl}")
    if not message.has_content():
        raise ValueError(f"the message to node {metadata.dst_node_id} must have content")


def _introduces(message: Message) -> bool:
    return message.metadata.message_type == WHOAMI or "whoami" in message.content.config_records


def message_key(seed: int, round: int, partition_id: int, kind: str, count: int = 0) -> int:
    """Return the key in [0, 2^63) of a message's draws: those of its fate, and those of its handler.

    ``count`` numbers the messages of one kind to one node in one round.
    """
    text = f"{seed} {round} {partition_id} {count} {kind}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _round_of(content: RecordDict) -> int | None:
    """Return the round that a message's config names; None if it names none."""
    numbers = (record.get("server-round") for record in content.config_records.values())
    return next((number for number in numbers if type(number) is int and number >= 0), None)


def _array_bytes(content: RecordDict) -> int:
    """Return the bytes of a message's arrays, from dtypes and shapes: lazy arrays are not serialised."""
    arrays = (a for record in content.values() if isinstance(record, ArrayRecord) for a in record.values())
    return sum(prod(array.shape) * _itemsize(array.dtype) for array in arrays)


def _itemsize(dtype: str) -> int:
    try:
        return np.dtype(dtype).itemsize
    except TypeError:
        return 4


def _unavailable(reason: str) -> Error:
    return Error(ErrorCode.MESSAGE_UNAVAILABLE, reason)
