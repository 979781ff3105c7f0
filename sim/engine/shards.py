"""The code that runs in a worker: its nodes, and the calls of their handlers."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from logging.handlers import QueueHandler
from math import inf

from flwr.app import ArrayRecord, Error, Message, RecordDict
from threadpoolctl import threadpool_limits

from hedgerow.sim.engine._compat import ErrorCode, lend_identity
from hedgerow.sim.engine.handlers import Handlers, NodeJob
from hedgerow.sim.engine.nodes import SimulatedNode
from hedgerow.sim.engine.parcels import Address, Parcel, Received
from hedgerow.wire.calls import Delivery, InColumns
from hedgerow.wire.records import LazyArray, lazy_array

Answer = RecordDict | Error
# With nodes by partition id: messages and their keys by type; or type, key, contents and nodes of an exchange
# in columns.
Messages = list[tuple[str, list[tuple[int, Message, int]]]]
Asked = Messages | tuple[str, int, list[tuple[RecordDict, list[int]]]]


@dataclass(slots=True)
class Request:
    """A request to a worker, with the address of the nodes' states that it lacks."""

    run_id: int
    nodes: Address
    asked: Asked


@dataclass(slots=True)
class ShardReply:
    """A worker's reply: answers in the messages' order, or columns; changed states; log records."""

    answers: list[Answer]
    columns: InColumns | None
    states: Address
    logged: list[logging.LogRecord]


def node_of(job: NodeJob) -> SimulatedNode:
    """Return the node of a job that runs."""
    assert job.node is not None
    return job.node


class _Kept(QueueHandler):
    """Keeps log records for the parent to handle."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.records: list[logging.LogRecord] = []

    def enqueue(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class Shard:
    """A worker's nodes and their handlers, alone in a process, on one thread."""

    def __init__(self, handlers: Handlers) -> None:
        _one_thread()
        self._handlers = handlers
        self._nodes: dict[int, SimulatedNode] = {}
        self._kept = _Kept()
        for logger in (logging.getLogger(), logging.getLogger("flwr")):
            logger.handlers = [self._kept]

    def reply(self, at: Address, parcel: Received) -> tuple[Address, Parcel]:
        """Return the reply to a request, a ShardReply or an exception: its address in a parcel."""
        out = Parcel()
        try:
            request: Request = parcel.read(at)
            lend_identity(self, request.run_id)
            address = self._answer(request, parcel, out)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            address = out.add(ValueError(str(error)) if type(error) is ValueError else RuntimeError(said))
        sys.stdout.flush()
        sys.stderr.flush()
        return address, out

    def _answer(self, request: Request, parcel: Received, out: Parcel) -> Address:
        for partition_id, node_id, config, state in parcel.read(request.nodes, copy=True):
            self._nodes[partition_id] = SimulatedNode(node_id, partition_id, config, state)
        if isinstance(request.asked, tuple):
            kind, key, groups = request.asked
            deliveries = [
                Delivery(content, [self._handlers.seen(self._nodes[i], request.run_id) for i in members])
                for content, members in groups
            ]
            found = self._handlers.columns(kind, deliveries, key)
            found = InColumns(found.on_host, found.metrics)
            return out.add(ShardReply([], found, out.add({}), self._logged()))
        before: dict[int, RecordDict] = {}
        answers: list[Answer] = []
        for message_type, asked in request.asked:
            jobs = [
                NodeJob(message, self._nodes[i], 0.0, inf, runs=True, key=own) for i, message, own in asked
            ]
            before |= {node_of(job).partition_id: node_of(job).state for job in jobs}
            done = self._handlers.answers(message_type, jobs, request.run_id)
            answers += [answer for _, answer in done]
        states = {
            partition_id: _owned(self._nodes[partition_id].state, parcel)
            for partition_id, state in before.items()
            if not _same(state, self._nodes[partition_id].state)
        }
        known = {
            id(array): (partition_id, name, key)
            for partition_id in states
            for name, record in before[partition_id].items()
            if isinstance(record, ArrayRecord)
            for key, array in record.items()
        }
        at = out.add(states, (lambda thing: known.get(id(thing))) if known else lambda _: None)
        logged = self._logged()
        try:
            return out.add(ShardReply(answers, None, at, logged))
        except Exception:
            return out.add(ShardReply(list(map(_sendable, answers)), None, at, logged))

    def _logged(self) -> list[logging.LogRecord]:
        logged, self._kept.records = self._kept.records, []
        return logged


def _same(old: RecordDict, new: RecordDict) -> bool:
    """Return whether a node's state is unchanged; values are compared, arrays by identity."""
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
    # By repr, because equal numbers may differ in type or in the sign of zero.
    return new == old if isinstance(new, bytes) else repr(new) == repr(old)


def _owned(state: RecordDict, parcel: Received) -> RecordDict:
    """Copy arrays of received contents that a node keeps, so that the parcel can be freed."""
    for record in state.values():
        if isinstance(record, ArrayRecord):
            for key, array in list(record.items()):
                if isinstance(array, LazyArray) and parcel.holds(array._frozen):
                    record[key] = lazy_array(array._frozen.copy())
    return state


def _sendable(answer: Answer) -> Answer:
    try:
        with Parcel() as parcel:
            parcel.add(answer)
    except Exception as error:
        return Error(
            ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
            f"the reply cannot leave its worker process: {type(error).__name__}: {error}",
        )
    return answer


def _one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    threadpool_limits(1)
