"""Run an app's server until it sends its first train message."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, UserConfig

from hedgerow.sim.engine.grid import InProcessGrid
from hedgerow.sim.runs.app import LoadedApp
from hedgerow.sim.runs.plan import Plan
from hedgerow.sim.runs.serverapp import records_itself
from hedgerow.sim.runs.simulate import server_context
from hedgerow.sim.runs.watch import Watch

# A server that queries the node ids more often than this, for more seconds than this, without sending a
# message, waits for more nodes.
_PATIENCE = 5


class NoTrainError(RuntimeError):
    """An app's server sent no train message."""


@dataclass(frozen=True)
class FirstTrain:
    """The first train message of a run.

    Parameters
    ----------
    message : Message
        The message.
    started : Mapping[str, Any]
        Arguments of the ``Strategy.start`` that sent it, with the strategy as ``self``; empty if no strategy
        did.
    replies : tuple of Message
        Replies to this message and to the next one of the same exchange.
    """

    message: Message
    started: Mapping[str, Any]
    replies: tuple[Message, ...]

    @property
    def arrays(self) -> ArrayRecord:
        """The initial model: the strategy's, else the message's; empty if there is none."""
        initial = self.started.get("initial_arrays")
        if isinstance(initial, ArrayRecord):
            return initial
        return next(iter(self.message.content.array_records.values()), ArrayRecord())

    @property
    def config(self) -> ConfigRecord:
        """The message's only ConfigRecord; empty if there is none or more than one."""
        found = list(self.message.content.config_records.values())
        return ConfigRecord(dict(found[0])) if len(found) == 1 else ConfigRecord()


def first_train(app: LoadedApp, plan: Plan, node_config: UserConfig | None = None) -> FirstTrain:
    """Run an app's server in this process until its first train message, and return that message.

    The app's nodes reply to messages of other types. The suite's apps write their run folder to a temporary
    place. ``node_config`` is added to every node's config.

    Raises
    ------
    NoTrainError
        If the server ends before, or waits for more nodes than there are.
    Exception
        Whatever the ServerApp raises before.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        _Until(
            app.client_app,
            plan.num_nodes,
            run_config=plan.run_config,
            node_configs=[dict(node_config or {}) for _ in range(plan.num_nodes)],
        ) as grid,
    ):
        own = records_itself(app.server_app)
        config: UserConfig = {**plan.run_config, **({"output-dir": folder, "quiet": True} if own else {})}
        with Watch(grid, on_start=lambda _: None, on_round_end=(), count=not own) as watch:
            try:
                app.server_app(watch.grid, server_context(grid, config))
            except _Reached as reached:
                return FirstTrain(reached.message, dict(watch.started), reached.replies)
            except _Waiting:
                raise NoTrainError(
                    f"the ServerApp waits for more than {plan.num_nodes} nodes; start more with --nodes"
                ) from None
    raise NoTrainError("the ServerApp ended without a train message")


class _Reached(BaseException):
    """Ends the run at the message; a BaseException, which an app's ``except Exception`` does not catch."""

    def __init__(self, message: Message, replies: tuple[Message, ...]) -> None:
        self.message, self.replies = message, replies


class _Waiting(BaseException):
    """Ends a run that waits for more nodes."""


class _Until(InProcessGrid):
    """A grid that ends the run at the first train message."""

    _queries, _since = 0, 0.0

    def get_node_ids(self) -> list[int]:
        """Return the node ids; raise _Waiting after too many queries without a message."""
        if not self._queries:
            self._since = time.monotonic()
        self._queries += 1
        if self._queries > _PATIENCE and time.monotonic() > self._since + _PATIENCE:
            raise _Waiting
        return super().get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Deliver messages; of train messages only two, and then raise _Reached."""
        messages = list(messages)
        if trains := [message for message in messages if _trains(message)]:
            pending = super().push_messages(trains[:2])
            raise _Reached(trains[0], tuple(_all_of(self, pending)))
        self._queries = 0
        return super().push_messages(messages)


def _all_of(grid: InProcessGrid, pending: list[str]) -> Iterator[Message]:
    """Yield all replies; without faults each arrives."""
    while pulled := grid.pull_messages(pending):
        yield from pulled


def _trains(message: Message) -> bool:
    category = message.metadata.message_type.partition(".")[0]
    # An introduction may also have the category ``train``.
    return category == MessageType.TRAIN and "whoami" not in message.content.config_records
