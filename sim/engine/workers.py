"""Worker processes: the engine's nodes on all cores, with the same handlers, and the same bits.

A worker is forked, so that it has any ClientApp as its parent has it, without another import of torch.
Forking beside threads is unsafe; therefore the grid forks one process when it is made (the *forker*), before
the ServerApp starts any, and the forker forks the workers when there is work. Contents and replies travel
through shared memory (``parcels.py``), what many nodes are sent once for all.

A node's state lives in the worker that works for it, and in the grid, which gets what changed with each
reply. So the grid can write a checkpoint, restore one, deal a node to another worker, and start a worker that
died again, with the state as of each node's last reply.
"""

from __future__ import annotations

import ctypes
import logging
import os
import random
import select
import selectors
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from logging import ERROR
from logging.handlers import QueueHandler
from math import inf
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from flwr.app import ArrayRecord, Error, Message, RecordDict
from threadpoolctl import threadpool_limits

from hedgerow.sim.engine._compat import ErrorCode, lend_identity, log
from hedgerow.sim.engine.handlers import App, Handlers, Job, Node
from hedgerow.sim.engine.parcels import Address, Parcel, Received, receive, send
from hedgerow.wire.calls import Batched
from hedgerow.wire.records import LazyArray, lazy_array

__all__ = ["MOST_WORKERS", "Dealt", "Workers", "WorkersLostError", "check_workers", "default_workers"]

MOST_WORKERS = 1024
# Work is dealt by default where the arrays of one call's messages are so many bytes in all, and those of all
# calls before: a local step of so many parameters takes several times what sending them does, and starting
# workers takes what a few rounds do. Never by a clock: a run's bits must not depend on the machine's load.
_LEAST_CALL = 2 << 20
_LEAST_RUN = 16 << 20
_ANSWERS, _RAISED = 0, 1
_PR_SET_PDEATHSIG = 1

Answer = RecordDict | Error
Answers = list[tuple[int, Answer]]


class WorkersLostError(RuntimeError):
    """No worker can be started any more."""


def check_workers(workers: int, *, real_time: bool) -> None:
    """Raise ValueError where a number of workers is none, or cannot be had."""
    if isinstance(workers, bool) or not isinstance(workers, int) or not 0 <= workers <= MOST_WORKERS:
        raise ValueError(
            f"workers: {workers!r} is not an integer from 0 to {MOST_WORKERS} (0: as many as the machine has "
            "cores where the work is worth it; 1: this process alone)"
        )
    if workers > 1 and real_time:
        raise ValueError(
            f"workers: {workers} with real time, which takes nodes' seconds one after another; valid is 1"
        )
    if workers > 1 and not _can_fork():
        raise ValueError(f"workers: {workers}; on {sys.platform} there are none, valid is 1")


def default_workers(app: App) -> int:
    """Return how many workers an app gets where nobody says: 1, or the physical cores that it may use.

    As many as torch would use threads (``OMP_NUM_THREADS``), so that several runs at once do not crowd each
    other out. One for an app whose handlers are not batched, which may draw from global generators or keep
    things in its modules; beside other threads of this process, where forking is unsafe; and where there is
    a GPU, which one stack fills better than several.
    """
    torch = sys.modules.get("torch")
    if not isinstance(app, Batched) or not _can_fork() or torch is None or threading.active_count() > 1:
        return 1
    return 1 if torch.cuda.is_available() else min(_physical_cores(), torch.get_num_threads(), MOST_WORKERS)


def _can_fork() -> bool:
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def _physical_cores() -> int:
    """Return the cores that this process may use, hyperthreads of one core as one."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            cores.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


@dataclass(slots=True)
class Dealt:
    """Which calls go to the workers; ``always`` where the user asked for workers.

    Parameters
    ----------
    always : bool
        Whether all do.
    bytes : int (default: 0)
        Arrays of the calls so far that were large enough: part of a checkpoint, since on some models the bits
        of a run tell who was called with whom.
    """

    always: bool
    bytes: int = 0

    def worth(self, message_type: str, jobs: Sequence[Job]) -> bool:
        """Return whether a call is worth dealing."""
        if self.always:
            return True
        size = sum(job.size for job in jobs)
        if len(jobs) < 2 or size < _LEAST_CALL or message_type.partition(".")[0] == "query":
            return False
        self.bytes += size
        return self.bytes > _LEAST_RUN


@dataclass(slots=True, eq=False)
class _Worker:
    """The parent's end of one worker; without a link it is to be started."""

    link: socket.socket | None = None
    # The state that it has of each node, by partition id.
    states: dict[int, RecordDict] = field(default_factory=dict)

    def end(self) -> None:
        if self.link is not None:
            _hang_up(self.link)
        self.link = None
        self.states.clear()


@dataclass(slots=True)
class _Request:
    """What a worker is asked: where the states of nodes are that it has not, and its jobs by message type."""

    run_id: int
    nodes: Address
    groups: list[tuple[str, list[tuple[int, Message]]]]


@dataclass(slots=True)
class _Reply:
    answers: list[Answers]
    states: Address
    logged: list[logging.LogRecord]


class Workers:
    """Processes that do the nodes' work. They end with this object, with ``close``, and with this process.

    Parameters
    ----------
    handlers : Handlers
        What they do.
    count : int
        How many, >= 1. Each computes on one thread.
    """

    def __init__(self, handlers: Handlers, count: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        sys.stderr.flush()
        seeded = random.getstate()  # Python draws another one in a forked process.
        pid = os.fork()
        if pid == 0:
            ours.close()
            random.setstate(seeded)
            _run_and_exit(_fork_workers, theirs, handlers)
        theirs.close()
        self._forker = ours
        self._workers = [_Worker() for _ in range(count)]
        self.close = weakref.finalize(self, _end, os.getpid(), pid, ours, self._workers)

    def __len__(self) -> int:
        return len(self._workers)

    def answers(self, groups: Mapping[str, Sequence[Job]], run_id: int) -> list[tuple[Job, Answer]]:
        """Return each job, by message type and in the given order, with its node's answer; keep what changed.

        Jobs of one node are not allowed in one call. A worker that dies costs the answers of its nodes.

        Raises
        ------
        WorkersLostError
            If no worker can be started; nothing was done.
        ValueError
            What ``Handlers.answers`` raises in strict mode.
        """
        for worker in self._workers:
            if worker.link is not None and _is_gone(worker.link):
                worker.end()  # It died with nothing to do: nothing is lost.
            if worker.link is None:
                worker.link = self._start()
        shares = self._deal(groups)
        try:
            answers = self._exchange(shares, run_id)
        except BaseException:
            # Answers may be under way that nobody waits for any more.
            for worker, _ in shares:
                worker.end()
            raise
        return [(job, answers[id(job)]) for jobs in groups.values() for job in jobs]

    def _start(self) -> socket.socket:
        try:
            self._forker.sendall(b"\1")
            _, files, _, _ = socket.recv_fds(self._forker, 1, 1)
        except OSError as error:
            raise WorkersLostError(str(error)) from error
        if not files:
            raise WorkersLostError("the process that starts workers is gone")
        return socket.socket(fileno=files[0])

    def _deal(self, groups: Mapping[str, Sequence[Job]]) -> list[tuple[_Worker, dict[str, list[Job]]]]:
        """Give each worker its share of each group: a node always to the same one, unless that has enough."""
        count = len(self._workers)
        shares: list[dict[str, list[Job]]] = [{} for _ in range(count)]
        for message_type, jobs in groups.items():
            most = -(-len(jobs) // count)
            lots: list[list[Job]] = [[] for _ in range(count)]
            rest: list[Job] = []
            for job in jobs:
                lot = lots[_node(job).partition_id % count]
                (lot if len(lot) < most else rest).append(job)
            for job in rest:
                min(lots, key=len).append(job)
            for share, lot in zip(shares, lots, strict=True):
                if lot:
                    share[message_type] = lot
        return [(worker, share) for worker, share in zip(self._workers, shares, strict=True) if share]

    def _exchange(
        self, shares: Sequence[tuple[_Worker, dict[str, list[Job]]]], run_id: int
    ) -> dict[int, Answer]:
        """Return the answers by the identity of the jobs."""
        parcel = Parcel()
        requests = [_request(parcel, worker, share, run_id) for worker, share in shares]
        out: dict[int, Answer] = {}
        file = parcel.close()
        with selectors.DefaultSelector() as waiting:
            try:
                for (worker, share), at in zip(shares, requests, strict=True):
                    assert worker.link is not None
                    try:
                        send(worker.link, _ANSWERS, at, file, parcel.size)
                    except OSError:
                        out |= _lost(worker, share)
                    else:
                        waiting.register(worker.link, selectors.EVENT_READ, (worker, share))
            finally:
                os.close(file)
            while waiting.get_map():
                for key, _ in waiting.select():
                    waiting.unregister(key.fileobj)
                    out |= _take(*key.data)
        return out


def _node(job: Job) -> Node:
    assert job.node is not None
    return job.node


def _request(parcel: Parcel, worker: _Worker, share: Mapping[str, Sequence[Job]], run_id: int) -> Address:
    new = []
    for jobs in share.values():
        for node in map(_node, jobs):
            if worker.states.get(node.partition_id) is not node.state:
                new.append((node.partition_id, node.node_id, node.config, node.state))
                worker.states[node.partition_id] = node.state
    groups = [
        (message_type, [(_node(job).partition_id, job.message) for job in jobs])
        for message_type, jobs in share.items()
    ]
    return parcel.add(_Request(run_id, parcel.add(new), groups))


def _take(worker: _Worker, share: Mapping[str, Sequence[Job]]) -> dict[int, Answer]:
    """Return what a worker answered, once it did, and keep its nodes' states."""
    assert worker.link is not None
    received = receive(worker.link)
    if received is None:
        return _lost(worker, share)
    kind, at, parcel = received
    if kind == _RAISED:
        name, text = parcel.read(at)
        raise ValueError(text) if name == "ValueError" else RuntimeError(f"{name}: {text}")
    reply: _Reply = parcel.read(at)
    for record in reply.logged:
        logging.getLogger(record.name).handle(record)
    nodes = {node.partition_id: node for jobs in share.values() for node in map(_node, jobs)}

    def find(name: tuple[int, str, str]) -> object:
        partition_id, record, key = name
        return nodes[partition_id].state.array_records[record][key]

    for partition_id, state in parcel.read(reply.states, copy=True, find=find).items():
        nodes[partition_id].state = worker.states[partition_id] = state
    return {
        id(job): answer
        for jobs, answers in zip(share.values(), reply.answers, strict=True)
        for job, (_, answer) in zip(jobs, answers, strict=True)
    }


def _lost(worker: _Worker, share: Mapping[str, Sequence[Job]]) -> dict[int, Answer]:
    worker.end()
    count = sum(map(len, share.values()))
    log(
        ERROR,
        "A worker process died: the replies of its %d nodes are lost. Another one takes its place, with what "
        "they kept before.",
        count,
    )
    lost = Error(ErrorCode.CLIENT_APP_CRASHED, "the worker process of this node died")
    return {id(job): lost for jobs in share.values() for job in jobs}


def _is_gone(link: socket.socket) -> bool:
    # An idle worker says nothing: what can be read is the end.
    return bool(select.select([link], [], [], 0)[0])


def _hang_up(link: socket.socket) -> None:
    # Closing is not enough where a process that was forked meanwhile has a copy.
    with suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
    link.close()


def _end(owner: int, forker: int, link: socket.socket, workers: Sequence[_Worker]) -> None:
    """End all workers, by the process that had them made only."""
    if os.getpid() != owner:
        return
    for worker in workers:
        worker.end()
    _hang_up(link)
    with suppress(ChildProcessError):
        os.waitpid(forker, 0)


# The forker's side


def _run_and_exit(work: Any, *arguments: Any) -> NoReturn:
    """Do a forked process's work, and nothing of what its parent would do at its end."""
    code = 1
    try:
        work(*arguments)
        code = 0
    except BaseException:
        logging.getLogger("flwr").exception("A worker process failed")
    finally:
        os._exit(code)


def _fork_workers(link: socket.socket, handlers: Handlers) -> None:
    """Start a worker for each byte that comes, until nobody is there to send one."""
    # Ctrl-C reaches every process of a terminal; the parent says what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    forker = os.getpid()
    while link.recv(1):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # As seeded as the parent was, and another one for each worker.
        key = random.getrandbits(63)
        if os.fork() == 0:
            link.close()
            ours.close()
            _run_and_exit(_serve, theirs, handlers, key, forker)
        theirs.close()
        socket.send_fds(link, [b"\1"], [ours.fileno()])
        ours.close()


# A worker's side


class _Kept(QueueHandler):
    """Keeps what is logged, for the parent to tell."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.records: list[logging.LogRecord] = []

    def enqueue(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class _Borrower:
    """Who a worker's identity is lent to."""


def _serve(link: socket.socket, handlers: Handlers, key: int, forker: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _die_with(forker)
    _one_thread()
    _seed(key)
    kept = _Kept()
    for logger in (logging.getLogger(), logging.getLogger("flwr")):
        logger.handlers = [kept]
    borrower = _Borrower()
    nodes: dict[int, Node] = {}
    while (received := receive(link)) is not None:
        _, at, parcel = received
        out = Parcel()
        kind = _ANSWERS
        try:
            request: _Request = parcel.read(at)
            lend_identity(borrower, request.run_id)
            address = _answer(request, parcel, out, handlers, nodes, kept)
        except Exception as error:
            kind, address = _RAISED, out.add((type(error).__name__, str(error)))
        sys.stdout.flush()
        sys.stderr.flush()
        file = out.close()
        try:
            send(link, kind, address, file, out.size)
        except OSError:
            return
        finally:
            os.close(file)


def _answer(
    request: _Request, parcel: Received, out: Parcel, handlers: Handlers, nodes: dict[int, Node], kept: _Kept
) -> Address:
    for partition_id, node_id, config, state in parcel.read(request.nodes, copy=True):
        nodes[partition_id] = Node(node_id, partition_id, config, state)
    before: dict[int, RecordDict] = {}
    answers: list[Answers] = []
    for message_type, asked in request.groups:
        jobs = [Job(message, nodes[partition_id], 0.0, inf, runs=True) for partition_id, message in asked]
        before |= {_node(job).partition_id: _node(job).state for job in jobs}
        answers.append(
            [
                (_node(job).partition_id, answer)
                for job, answer in handlers.answers(message_type, jobs, request.run_id)
            ]
        )
    states = {
        partition_id: _owned(nodes[partition_id].state, parcel)
        for partition_id, state in before.items()
        if not _same(state, nodes[partition_id].state)
    }
    known = {
        id(array): (partition_id, name, key)
        for partition_id in states
        for name, record in before[partition_id].items()
        if isinstance(record, ArrayRecord)
        for key, array in record.items()
    }
    at = out.add(states, (lambda thing: known.get(id(thing))) if known else lambda _: None)
    logged, kept.records = kept.records, []
    try:
        return out.add(_Reply(answers, at, logged))
    except Exception:
        return out.add(_Reply([[(i, _sendable(a)) for i, a in group] for group in answers], at, logged))


def _same(old: RecordDict, new: RecordDict) -> bool:
    """Return whether a node's state is what it was: values are compared, arrays are known by identity."""
    if old.keys() != new.keys():
        return False
    for name, record in new.items():
        other = old[name]
        if type(record) is not type(other) or list(record) != list(other):
            return False
        if isinstance(record, ArrayRecord):
            if any(array is not other[key] for key, array in record.items()):
                return False
        elif any(not _same_value(value, other[key]) for key, value in record.items()):
            return False
    return True


def _same_value(new: object, old: object) -> bool:
    # Equal floats may differ in their sign, and a whole number may be of another type.
    return new == old if isinstance(new, bytes) else repr(new) == repr(old)


def _owned(state: RecordDict, parcel: Received) -> RecordDict:
    """Give arrays that a node keeps of what it was sent memory of their own; the parcel's is given back."""
    for record in state.values():
        if isinstance(record, ArrayRecord):
            for key, array in list(record.items()):
                if isinstance(array, LazyArray) and parcel.holds(array._frozen):
                    record[key] = lazy_array(array._frozen.copy())
    return state


def _sendable(answer: Answer) -> Answer:
    try:
        Parcel().add(answer)
    except Exception as error:
        return Error(
            ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
            f"the reply cannot leave its worker process: {type(error).__name__}: {error}",
        )
    return answer


def _die_with(forker: int) -> None:
    """End when the forker does, which ends with its own parent, in the midst of work too."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != forker:
        os._exit(0)


def _one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    threadpool_limits(1)


def _seed(key: int) -> None:
    """Seed the global generators: forked ones would draw the same in every worker."""
    random.seed(key)
    np.random.seed(key % 2**32)  # noqa: NPY002  # The one that apps draw from which have no key.
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(key)
