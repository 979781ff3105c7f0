"""Calls of a ClientApp's handlers: one call for many nodes if the app supports it, else node by node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from logging import ERROR, INFO, WARNING
from time import perf_counter
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict, UserConfig
from flwr.common import log

from hedgerow.global_draws import GlobalDraws, seed_global_draws
from hedgerow.sim.engine._compat import (
    SUPERLINK_NODE_ID,
    ErrorCode,
    copy_records,
    delivered,
    has_handler,
    has_wrappers,
    through_the_wire,
)
from hedgerow.sim.engine.faults import Fate
from hedgerow.sim.engine.nodes import SimulatedNode
from hedgerow.wire.calls import (
    AnswersColumns,
    Batched,
    BatchHandler,
    Call,
    Delivery,
    InColumns,
    LocalDataError,
)
from hedgerow.wire.message_types import WHOAMI
from hedgerow.wire.printable import shown, traced
from hedgerow.wire.process import one_blas_thread, simulated

# The type of a ClientApp.
App = Callable[[Message, Context], Message]


@dataclass(slots=True)
class NodeJob:
    """One message in flight. Its fate is drawn when it is pushed; its work is done when it is due."""

    message: Message
    node: SimulatedNode | None
    due: float
    deadline: float
    runs: bool = False
    verdict: Error | None = None  # replaces the node's answer
    fate: Fate = field(default_factory=Fate)
    size: int = 0
    # Seeds the global generators for its handler.
    key: int = 0
    answer: RecordDict | Error | None = None  # the node's answer, if its reply is not due yet
    # When it was pushed, and until when its node was then busy.
    pushed: float = 0.0
    busy: float = 0.0

    @property
    def id(self) -> str:
        """The message's id."""
        return self.message.metadata.message_id


class Handlers:
    """Calls an app's handlers with copies of the nodes' states, and keeps a state only after a reply.

    ``strict`` serialises each node's state, as a deployment does. Each handler finds the global generators
    seeded by its message's key; the server's are put back afterwards. If a batched handler draws from them,
    its answers are dropped and the nodes called one by one: draws never depend on the nodes of a call.
    """

    def __init__(self, app: App, run_config: UserConfig, *, strict: bool, seed: int = 0) -> None:
        self.seed = seed
        self._app = app
        self._run_config = dict(run_config)
        self._strict = strict
        self._seconds = 0.0
        self.name = uuid4().hex  # of the simulation; runs have the same id in all
        self._contexts: dict[int, Context] = {}
        # Message types whose batched handlers have drawn from the global generators.
        self._drawing: set[str] = set()

    @property
    def run_config(self) -> UserConfig:
        """The run config, of which each handler gets a copy."""
        return self._run_config

    def answers(
        self, message_type: str, jobs: Sequence[NodeJob], run_id: int
    ) -> Iterator[tuple[NodeJob, RecordDict | Error]]:
        """Yield each job, all with messages of one type, with its node's answer."""
        with GlobalDraws.restored():
            handler = self._batch_handler(message_type)
            batch, contexts = None, list[Context]()
            if handler is not None:
                states = [copy_records(job.node.state) for job in jobs if job.node is not None]
                contexts = [
                    self._context(job, state, run_id) for job, state in zip(jobs, states, strict=True)
                ]
                # Of a batched handler that draws the answers are dropped: any seed shows that it does.
                seed_global_draws(jobs[0].key, later=True)
                before = GlobalDraws.now()
                batch = _batch(handler, message_type, jobs, contexts, self.name)
                if batch is not None and before.moved:
                    self._drawing.add(message_type)
                    log(
                        INFO, "Batched %s draws from global generators: using one call per node", message_type
                    )
                    batch = None
            if batch is None:
                for job in jobs:
                    yield job, self._one(job, run_id)
                return
            for job, context, answer in zip(jobs, contexts, batch, strict=True):
                if isinstance(answer, RecordDict):
                    self._keep(job, context)
                    yield job, answer
                elif isinstance(answer, Exception):
                    yield job, _exception(job, answer)
                else:
                    yield job, _raised(f"the batch handler answered with a {type(answer).__name__}")

    def columns(self, message_type: str, deliveries: Sequence[Delivery], key: int) -> InColumns:
        """Return the answer in columns of an app that ``AnswersColumns``; its errors are raised."""
        assert isinstance(self._app, AnswersColumns)
        handler = self._app.column_handler(message_type)
        assert handler is not None
        with simulated(self.name), one_blas_thread(), GlobalDraws.restored():
            seed_global_draws(key, later=True)
            return handler(deliveries)

    def seen(self, node: SimulatedNode, run_id: int) -> Context:
        """Return a node's context for column handlers, cached."""
        known = self._contexts.get(node.partition_id)
        is_same = known is not None and (known.run_id, known.node_id) == (run_id, node.node_id)
        if known is None or not is_same or known.state is not node.state:
            known = self._contexts[node.partition_id] = Context(
                run_id=run_id,
                node_id=node.node_id,
                node_config=node.config,
                state=node.state,
                run_config=self._run_config,
            )
        return known

    def timed(self, job: NodeJob, run_id: int) -> tuple[RecordDict | Error, float]:
        """Return a node's answer and its handler's real seconds."""
        with GlobalDraws.restored():
            return self._one(job, run_id), self._seconds

    def _batch_handler(self, message_type: str) -> BatchHandler | None:
        if not isinstance(self._app, Batched) or has_wrappers(self._app, message_type):
            return None
        if message_type in self._drawing:
            return None
        return self._app.batch_handler(message_type)

    def _one(self, job: NodeJob, run_id: int) -> RecordDict | Error:
        assert job.node is not None
        context = self._context(job, copy_records(job.node.state), run_id)
        # Copied, because a handler may pop records (keep_input=False) and other nodes share the content.
        message = delivered(job.message, copy_records(job.message.content))
        seed_global_draws(job.key, later=True)
        began = perf_counter()
        try:
            with simulated(self.name):
                reply = self._app(message, context)
        except Exception as error:
            kind = job.message.metadata.message_type
            # Mods run only before handlers: an app that introduces itself by a mod is asked again.
            return _exception(job, error, expected=kind == WHOAMI and not has_handler(self._app, kind))
        finally:
            self._seconds = perf_counter() - began
        if not isinstance(reply, Message):
            return _raised(f"the handler returned a {type(reply).__name__}, not a Message")
        if reply.metadata.reply_to_message_id != job.id or reply.metadata.dst_node_id != SUPERLINK_NODE_ID:
            return _raised("the handler returned a Message that is no reply to the one it got")
        self._keep(job, context)
        return reply.error if reply.has_error() else reply.content

    def _context(self, job: NodeJob, state: RecordDict, run_id: int) -> Context:
        node = job.node
        assert node is not None
        return Context(
            run_id=run_id,
            node_id=node.node_id,
            node_config=node.config.copy(),
            state=state,
            run_config=self._run_config.copy(),
        )

    def _keep(self, job: NodeJob, context: Context) -> None:
        assert job.node is not None
        state = context.state
        if self._strict:
            state = through_the_wire(state, f"state of partition {job.node.partition_id}")
        job.node.state = state


def _batch(
    handler: BatchHandler, message_type: str, jobs: Sequence[NodeJob], contexts: Sequence[Context], name: str
) -> list[object] | None:
    """Return a batch handler's answers, one per job; None if the call itself fails."""
    calls = [
        Call(job.message.content, context, message_type) for job, context in zip(jobs, contexts, strict=True)
    ]
    try:
        with simulated(name):
            answers: list[object] = list(handler(calls))
        if len(answers) != len(calls):
            raise ValueError(f"{len(answers)} answers for {len(calls)} calls")
    except Exception as error:
        reason = shown(f"{type(error).__name__}: {error}", 300)
        text = "Batched %s of %d nodes failed (%s): using one call per node"
        log(WARNING, text, message_type, len(calls), reason)
        return None
    return answers


def _exception(job: NodeJob, error: Exception, *, expected: bool = False) -> Error:
    partition_id = job.node.partition_id if job.node else "?"
    reason = f"{type(error).__name__}: {error}"
    if expected:
        return _raised(reason)
    kind = job.message.metadata.message_type
    trace = "" if isinstance(error, LocalDataError) else "\n" + traced(error)
    log(ERROR, "Partition %s, %s: %s%s", partition_id, kind, shown(reason, 300), trace)
    return _raised(reason)


def _raised(reason: str) -> Error:
    return Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason)
