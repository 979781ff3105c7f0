"""Workers: the nodes' work on all cores, with the same handlers and the same bits.

A worker is forked, so that it has the parent's ClientApp without importing torch again. Forking is unsafe
once threads exist. The grid therefore forks one process on construction (the *forker*), before the ServerApp
starts threads, and the forker forks the workers when there is work. ``multiprocessing`` has no such process:
its fork server imports everything anew, it forks from a process with threads, and its daemons may have no
children, which a user's data loader may need. Contents and replies travel in shared memory (``parcels.py``).

A node's state is kept by its worker and by the grid, which receives the changes with each reply. So the grid
can write and restore checkpoints, move a node to another worker, and restart a dead worker with each node's
state after its last reply.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import selectors
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from logging import ERROR
from pathlib import Path

import numpy as np
from flwr.app import Error, RecordDict
from flwr.common import log

from hedgerow.sim.engine._compat import ErrorCode
from hedgerow.sim.engine.handlers import App, Handlers, NodeJob
from hedgerow.sim.engine.nodes import SimulatedNode
from hedgerow.sim.engine.parcels import Address, Parcel, receive
from hedgerow.sim.engine.shards import Answer, Asked, Request, Shard, ShardReply, node_of
from hedgerow.wire.calls import Batched, InColumns

MOST_WORKERS = 1024
# By default workers get calls whose messages hold at least this many bytes of arrays, after this many bytes
# of such calls: a local step on so many parameters takes several times as long as sending them, and starting
# workers takes as long as a few rounds. No timing is used, so that a run's bits do not depend on the load.
_LEAST_CALL = 2 << 20
_LEAST_RUN = 16 << 20
_PR_SET_PDEATHSIG = 1


class WorkersLostError(RuntimeError):
    """No further worker can be started."""


def check_workers(workers: int, *, real_time: bool) -> None:
    """Raise ValueError if a number of workers is invalid."""
    if isinstance(workers, bool) or not isinstance(workers, int) or not 0 <= workers <= MOST_WORKERS:
        raise ValueError(
            f"workers must be an integer in [0, {MOST_WORKERS}] (0: one per core if the work is large "
            f"enough; 1: no extra process), got {workers!r}"
        )
    if workers < 2:
        return
    if real_time:
        raise ValueError(
            f"workers must be 1 with real time, which takes nodes' seconds one after another, got {workers}"
        )
    if not _can_fork():
        raise ValueError(
            f"workers must be 1 on {sys.platform}, where no process can be forked, got {workers}"
        )


def default_workers(app: App) -> int:
    """Return an app's default number of workers: 1, or the physical cores that it may use.

    It is at most torch's number of threads (``OMP_NUM_THREADS``), so that concurrent runs share the cores. It
    is 1 for an app without batched handlers, which may use global generators or module state; if this process
    has other threads, because forking is then unsafe; and with a GPU, which one stack uses better than
    several.
    """
    torch = sys.modules.get("torch")
    if not isinstance(app, Batched) or not _can_fork() or torch is None or threading.active_count() > 1:
        return 1
    return 1 if torch.cuda.is_available() else min(_physical_cores(), torch.get_num_threads(), MOST_WORKERS)


def _can_fork() -> bool:
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def _physical_cores() -> int:
    """Return the number of physical cores that this process may use."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            cores.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


@dataclass(slots=True)
class Dealt:
    """The rule for which calls go to the workers."""

    always: bool  # whether all do, because the user asked for workers
    # Bytes of arrays in large calls so far. It is part of a checkpoint, because with some models the bits of
    # a run depend on which nodes are called together.
    bytes: int = 0

    def worth(self, message_type: str, jobs: Sequence[NodeJob]) -> bool:
        """Return whether a call goes to the workers, and count it."""
        if self.always:
            return True
        size = sum(job.size for job in jobs)
        if not self._counts(message_type, len(jobs), size):
            return False
        self.bytes += size
        return self.bytes > _LEAST_RUN

    def keeps(self, message_type: str, nodes: int, size: int) -> bool:
        """Return whether a call of so many nodes and bytes stays in this process, and count it if it does."""
        counts = self._counts(message_type, nodes, size)
        if self.always or (counts and self.bytes + size > _LEAST_RUN):
            return False
        self.bytes += size if counts else 0
        return True

    def count(self, size: int) -> None:
        """Count a call without messages that workers answered."""
        if not self.always:
            self.bytes += size

    def _counts(self, message_type: str, nodes: int, size: int) -> bool:
        return nodes >= 2 and size >= _LEAST_CALL and message_type.partition(".")[0] != "query"


@dataclass(slots=True, eq=False)
class _Worker:
    """The parent's end of one worker, which is not running if it has no link."""

    link: socket.socket | None = None
    # The worker's copies of nodes' states, by partition id.
    states: dict[int, RecordDict] = field(default_factory=dict)

    def end(self) -> None:
        if self.link is not None:
            _hang_up(self.link)
        self.link = None
        self.states.clear()


@dataclass(slots=True, eq=False)
class _Share:
    """One worker's part of a call: its nodes, their contents, and the request."""

    worker: _Worker
    nodes: list[SimulatedNode]
    contents: list[RecordDict]
    asked: Asked


class Workers:
    """Processes for the nodes' work, which end with this object, with ``close`` and with this process.

    Parameters
    ----------
    handlers : Handlers
        The handlers that they call.
    count : int
        Number of processes, >= 1, each on one thread.
    """

    def __init__(self, handlers: Handlers, count: int) -> None:
        self._forker, forker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = _fork(_fork_workers, forker, handlers, closing=self._forker)
        self._workers = [_Worker() for _ in range(count)]
        self.close = weakref.finalize(self, _end, os.getpid(), pid, self._forker, self._workers)

    def answers(self, groups: Mapping[str, Sequence[NodeJob]], run_id: int) -> list[tuple[NodeJob, Answer]]:
        """Return each job, by message type and in the given order, with its node's answer; keep new states.

        A call holds at most one job per node. If a worker dies, the answers of its nodes are errors.

        Raises
        ------
        WorkersLostError
            If no process can be started; nothing was done.
        ValueError
            As ``Handlers.answers`` in strict mode.
        """
        self._revive()
        shares, dealt = [], []
        for worker, mine in self._deal(groups):
            jobs = [job for group in mine.values() for job in group]
            asked: Asked = [
                (kind, [(node_of(job).partition_id, job.message, job.key) for job in group])
                for kind, group in mine.items()
            ]
            shares.append(
                _Share(worker, list(map(node_of, jobs)), [job.message.content for job in jobs], asked)
            )
            dealt.append(jobs)
        answers: dict[int, Answer] = {}
        for jobs, reply in zip(dealt, self._exchange(shares, run_id), strict=True):
            if reply is None:
                log(
                    ERROR,
                    "A worker process died: the replies of its %d nodes are lost. Another one continues with "
                    "their last states.",
                    len(jobs),
                )
                lost = Error(ErrorCode.CLIENT_APP_CRASHED, "the worker process of this node died")
                answers |= {id(job): lost for job in jobs}
            else:
                answers |= {id(job): answer for job, answer in zip(jobs, reply.answers, strict=True)}
        return [(job, answers[id(job)]) for jobs in groups.values() for job in jobs]

    def columns(
        self,
        message_type: str,
        asked: Sequence[tuple[RecordDict, Sequence[SimulatedNode]]],
        run_id: int,
        key: int,
    ) -> InColumns:
        """Answer an exchange without messages, as ``InProcessGrid.columns`` does; no state changes.

        Any error, from a node or because a worker died or cannot be started, means that messages are needed.
        """
        self._revive()
        nodes = [(group, node) for group, (_, members) in enumerate(asked) for node in members]
        shares, places = [], []
        for worker, lot in self._lots([node.partition_id for _, node in nodes]):
            by_group: dict[int, list[int]] = {}
            for at in lot:
                by_group.setdefault(nodes[at][0], []).append(at)
            own = [asked[group][0] for group in by_group]
            members = [[nodes[at][1].partition_id for at in ats] for ats in by_group.values()]
            places.append([at for ats in by_group.values() for at in ats])
            told = list(zip(own, members, strict=True))
            shares.append(_Share(worker, [nodes[at][1] for at in places[-1]], own, (message_type, key, told)))
        found = []
        for reply in self._exchange(shares, run_id):
            if reply is None:
                raise RuntimeError("a worker process died")
            found.append(reply.columns)
        first = found[0]
        assert first is not None
        rows = np.empty((len(nodes), first.on_host.shape[1]), first.on_host.dtype)
        metrics = {key: np.empty(len(nodes), values.dtype) for key, values in first.metrics.items()}
        for lot, part in zip(places, found, strict=True):
            assert part is not None
            if part.on_host.dtype != rows.dtype or part.metrics.keys() != metrics.keys():
                raise ValueError("nodes reply in different types, or with different metrics")
            rows[lot] = part.on_host
            for name, values in part.metrics.items():
                metrics[name] = metrics[name].astype(np.result_type(metrics[name], values), copy=False)
                metrics[name][lot] = values
        return InColumns(rows, metrics)

    def _revive(self) -> None:
        """Start workers that are missing or died while idle, which loses nothing."""
        for worker in self._workers:
            # An idle worker sends nothing, so anything readable is the end of the connection.
            if worker.link is not None and select.select([worker.link], [], [], 0)[0]:
                worker.end()
            if worker.link is not None:
                continue
            try:
                self._forker.send(b"+", socket.MSG_NOSIGNAL)
                _, files, _, _ = socket.recv_fds(self._forker, 1, 1)
            except OSError as error:
                raise WorkersLostError(str(error)) from error
            if not files:
                raise WorkersLostError("the process that starts workers is gone")
            worker.link = socket.socket(fileno=files[0])

    def _deal(
        self, groups: Mapping[str, Sequence[NodeJob]]
    ) -> list[tuple[_Worker, dict[str, list[NodeJob]]]]:
        """Give each worker its share of each group."""
        shares: dict[_Worker, dict[str, list[NodeJob]]] = {}
        for message_type, jobs in groups.items():
            for worker, lot in self._lots([node_of(job).partition_id for job in jobs]):
                shares.setdefault(worker, {})[message_type] = [jobs[at] for at in lot]
        return list(shares.items())

    def _lots(self, partitions: Sequence[int]) -> list[tuple[_Worker, list[int]]]:
        """Distribute nodes, by position; a node always goes to the same worker unless that has enough."""
        count = len(self._workers)
        most = -(-len(partitions) // count)
        lots: list[list[int]] = [[] for _ in range(count)]
        rest: list[int] = []
        for at, partition_id in enumerate(partitions):
            lot = lots[partition_id % count]
            (lot if len(lot) < most else rest).append(at)
        for at in rest:
            min(lots, key=len).append(at)
        return [(worker, lot) for worker, lot in zip(self._workers, lots, strict=True) if lot]

    def _exchange(self, shares: Sequence[_Share], run_id: int) -> list[ShardReply | None]:
        """Return each worker's reply; None for one that died."""
        try:
            replies = self._replies(shares, run_id)
        except BaseException:
            # Discard answers that may still arrive.
            for share in shares:
                share.worker.end()
            raise
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return [None if isinstance(reply, Exception) else reply for reply in replies]

    def _replies(self, shares: Sequence[_Share], run_id: int) -> list[ShardReply | Exception | None]:
        out: list[ShardReply | Exception | None] = [None] * len(shares)
        with selectors.DefaultSelector() as waiting:
            with Parcel() as parcel:
                addresses = [_request(parcel, share, run_id) for share in shares]
                for at, (share, address) in enumerate(zip(shares, addresses, strict=True)):
                    assert share.worker.link is not None
                    try:
                        parcel.send(share.worker.link, address)
                    except OSError:
                        share.worker.end()
                    else:
                        waiting.register(share.worker.link, selectors.EVENT_READ, at)
            while waiting.get_map():
                for key, _ in waiting.select():
                    waiting.unregister(key.fileobj)
                    out[key.data] = _take(shares[key.data])
        return out


def _request(parcel: Parcel, share: _Share, run_id: int) -> Address:
    new, states = [], share.worker.states
    for node in share.nodes:
        if states.get(node.partition_id) is not node.state:
            new.append((node.partition_id, node.node_id, node.config, node.state))
            states[node.partition_id] = node.state
    return parcel.add(Request(run_id, parcel.add(new), share.asked))


def _take(share: _Share) -> ShardReply | Exception | None:
    """Wait for a worker's reply, store its nodes' states and return the reply; None if it died."""
    worker = share.worker
    assert worker.link is not None
    received = receive(worker.link)
    if received is None:
        worker.end()
        return None
    at, parcel = received
    reply: ShardReply | Exception = parcel.read(at)
    if isinstance(reply, Exception):
        return reply
    for record in reply.logged:
        logging.getLogger(record.name).handle(record)
    nodes = {node.partition_id: node for node in share.nodes}

    def find(name: tuple[int, str, str]) -> object:
        partition_id, record, key = name
        return nodes[partition_id].state.array_records[record][key]

    for partition_id, state in parcel.read(reply.states, copy=True, find=find).items():
        nodes[partition_id].state = worker.states[partition_id] = state
    return reply


def _hang_up(link: socket.socket) -> None:
    # Closing is not enough, because processes forked in the meantime have copies.
    with suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
    link.close()


def _end(owner: int, pid: int, forker: socket.socket, workers: Sequence[_Worker]) -> None:
    """End all workers; only their owner's process does so."""
    if os.getpid() != owner:
        return
    for worker in workers:
        worker.end()
    _hang_up(forker)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


# The forked processes


def _fork(work: Callable[..., None], link: socket.socket, *arguments: object, closing: socket.socket) -> int:
    """Fork a process for ``work(link, ...)``, without this end of its link; return its id.

    It exits without this process's exit handlers.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        link.close()
        return pid
    code = 1
    try:
        closing.close()
        work(link, *arguments)
        code = 0
    except BaseException:
        logging.getLogger("flwr").exception("A worker process failed")
    finally:
        os._exit(code)


def _fork_workers(link: socket.socket, handlers: Handlers) -> None:
    """Start a worker for each byte received, and answer with a link to it, until the link closes."""
    # Ctrl-C reaches every process of a terminal; the parent decides how to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    forker = os.getpid()
    while link.recv(1):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _fork(_serve, theirs, link, handlers, forker, closing=ours)
        with ours:
            socket.send_fds(link, [b"+"], [ours.fileno()])


def _serve(link: socket.socket, request: socket.socket, handlers: Handlers, forker: int) -> None:
    request.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Ends even during work when the forker ends, which ends with its own parent.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != forker:
        return
    shard = Shard(handlers)
    while (received := receive(link)) is not None:
        address, out = shard.reply(*received)
        try:
            with out:
                out.send(link, address)
        except OSError:
            return
