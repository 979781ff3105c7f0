"""A ClientApp whose handlers process many nodes at once.

A handler takes a list of calls. Flower's engines (simulation, SuperNodes) pass one message at a time, so the
list has one entry; an engine that holds a whole round uses ``batch_handler`` and passes the round.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict, UserConfig
from flwr.clientapp import ClientApp

from hedgerow.clients.frozen import stored
from hedgerow.clients.handlers import Answer, each
from hedgerow.clients.mods.guard import Reveals, guarded, reveals, reveals_of
from hedgerow.clients.mods.learning import TrainHandler
from hedgerow.clients.mods.update import Mod, TrainingMod, received_by
from hedgerow.clients.node_state import restore_state, send_state
from hedgerow.clients.policy import POLICY_VARIABLE
from hedgerow.wire.calls import BatchHandler, Call, ColumnHandler
from hedgerow.wire.frozen import FROZEN
from hedgerow.wire.message_types import MESSAGE_FORMAT, RESTORE, STATE, WHOAMI
from hedgerow.wire.packed import PACKED, is_packed, packed, unpacked
from hedgerow.wire.process import one_blas_thread

Scalar = bool | float | int | str | None
# What a node reports about itself beside its number of examples, by key.
Introduction = Mapping[str, Any]
# All nodes' numbers of examples for a run config, or None, see ``KnowsSizes``.
Sizes = Callable[[UserConfig], Sequence[int] | None]


class BatchClientApp(ClientApp):
    """Flower's ClientApp over batched handlers, behind the node owner's guard (``guard.py``).

    Parameters
    ----------
    handlers : Mapping[str, BatchHandler or Learning]
        Handlers by message type (``"train"``, ``"evaluate"``, ``"query.whoami"``, …). Each declares what its
        answers reveal (``guard.reveals``); nodes with a strict policy refuse one that does not. Handlers of
        ``query.state`` and ``query.restore``, which checkpoints need, are added if missing.
    mods : Sequence[TrainingMod or Mod] (default: none)
        Each ``TrainingMod``, in order, changes what nodes train on and evaluate, and what they have learned
        (an ``UpdateMod``: their updates), before it is compressed and masked. A Flower mod sees messages, as
        in any ClientApp; nodes are then answered one by one.

    Raises
    ------
    ValueError
        If Flower does not know a message type, or there are update mods but no handler that sends updates.
    """

    def __init__(
        self, handlers: Mapping[str, BatchHandler | TrainHandler], mods: Sequence[TrainingMod | Mod] = ()
    ) -> None:
        ours = [mod for mod in mods if isinstance(mod, TrainingMod)]
        flowers = [mod for mod in mods if not isinstance(mod, TrainingMod)]
        super().__init__(mods=flowers)
        self._by_messages = bool(flowers)
        learning = {key: one for key, one in handlers.items() if isinstance(one, TrainHandler)}
        if ours and not learning:
            raise ValueError(
                f"mods has {type(ours[0]).__name__}, which changes updates; this ClientApp sends none "
                f"({', '.join(sorted(handlers))}): use the method's own privacy settings"
            )
        self._columns: dict[str, ColumnHandler] = {}
        if not mods:
            at_once = {key: one for key, one in learning.items() if one.at_once}
            self._columns = {key: partial(one.in_columns, key) for key, one in at_once.items()}
        own: dict[str, BatchHandler] = {
            STATE: reveals(Reveals.NOTHING, each(send_state)),
            RESTORE: reveals(Reveals.NOTHING, each(restore_state)),
        }
        for key, one in handlers.items():
            own |= one.handlers(key, ours) if isinstance(one, TrainHandler) else {key: one}
        if ours and (evaluate := own.get(MessageType.EVALUATE)) is not None:
            own[MessageType.EVALUATE] = reveals(reveals_of(evaluate), received_by(ours, evaluate))
        self._introduction = own.get(WHOAMI)
        if isinstance(self._introduction, Whoami):
            own[WHOAMI] = reveals(Reveals.NOTHING, self._introduction)
        types = tuple(sorted(own))
        self._handlers = {key: guarded(key, _of_app(types, handler)) for key, handler in own.items()}
        for message_type, handler in self._handlers.items():
            category, _, action = message_type.partition(".")
            registers = {"train": self.train, "evaluate": self.evaluate, "query": self.query}
            if category not in registers:
                raise ValueError(
                    "message type must be train, evaluate or query, or one of them with an action "
                    f"('query.whoami'), got {message_type!r}"
                )
            register = registers[category]
            (register(action) if action else register())(_one_by_one(handler))

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message; one that is packed (``wire/packed.py``) with one that is, too."""
        if not is_packed(message.content):
            return super().__call__(message, context)
        message.content = unpacked(message.content)
        reply = super().__call__(message, context)
        if reply.has_content():
            reply.content = packed(reply.content)
        return reply

    def batch_handler(self, message_type: str) -> BatchHandler | None:
        """Return the handler of a message type; None if there is none, or the app has Flower mods."""
        return None if self._by_messages else self._handlers.get(message_type)

    def column_handler(self, message_type: str) -> ColumnHandler | None:
        """Return the column handler of a message type; None if there is none, or a policy is set."""
        return None if os.environ.get(POLICY_VARIABLE) else self._columns.get(message_type)

    def sizes(self, run_config: UserConfig) -> Sequence[int] | None:
        """Return the sizes that all nodes would report, see ``hedgerow.wire.calls.KnowsSizes``."""
        if not isinstance(self._introduction, Whoami) or self._by_messages or os.environ.get(POLICY_VARIABLE):
            return None
        sizes = self._introduction.sizes(run_config)
        return sizes if sizes is None or all(sizes) else None

    def counts_examples(self, run_config: UserConfig) -> bool:
        """Return whether nodes report the number of samples of the task that they train on, not own data."""
        return isinstance(self._introduction, Whoami) and self._introduction.counted(run_config)


def _of_app(types: tuple[str, ...], handler: BatchHandler) -> BatchHandler:
    """Return the handler on one BLAS thread, with the app's message types added to its calls.

    Frozen arrays that a message has are stored first.
    """

    def handle(calls: Sequence[Call]) -> Sequence[RecordDict | Exception]:
        with one_blas_thread():
            known = [stored(call) if FROZEN in call.content else call for call in calls]
            return handler([replace(call, app=types) for call in known])

    return reveals(reveals_of(handler), handle)


def _one_by_one(handler: BatchHandler) -> Callable[[Message, Context], Message]:
    def handle(message: Message, context: Context) -> Message:
        (answer,) = handler([Call(message.content, context, message.metadata.message_type)])
        if isinstance(answer, Exception):
            raise answer
        return Message(answer, reply_to=message)

    return handle


@dataclass(frozen=True)
class Whoami:
    """A handler that introduces nodes, and all nodes' sizes where they are known in advance."""

    handler: BatchHandler
    sizes: Sizes  # as ``KnowsSizes.sizes``
    # Whether the number is counted from the samples that the run's settings deal.
    counted: Callable[[UserConfig], bool]

    def __call__(self, calls: Sequence[Call]) -> Sequence[Answer]:
        """Introduce nodes."""
        return self.handler(calls)


def whoami(
    num_examples: Callable[[Context], int],
    more: Callable[[Context], Introduction] = lambda _: {},
    sizes: Sizes = lambda _: None,
    counted: Callable[[UserConfig], bool] = lambda _: False,
) -> BatchHandler:
    """Return the handler that introduces a node to the strategy.

    The answer has ``message-format``, ``partition-id`` and ``num-examples``, and ``name``, ``role`` and
    ``group`` if the node config sets them; and ``packed`` if the query asks for it (``wire/packed.py``).

    Parameters
    ----------
    num_examples : Callable[[Context], int]
        Returns a node's number of training examples.
    more : Callable[[Context], Mapping[str, Any]] (default: nothing)
        Returns further entries: ``input-shape``, ``num-classes`` and ``dtype`` of the node's own data.
    sizes : Callable[[UserConfig], Sequence[int] or None] (default: not known)
        Returns ``num_examples`` of all nodes whose node config holds only their partition and for which
        ``more`` returns nothing, so that an engine need not query a million nodes one by one.
    counted : Callable[[UserConfig], bool] (default: never)
        Returns whether ``num_examples`` counts samples that were split across nodes. In a simulation these
        numbers are then no claims, and a strategy does not limit them.
    """

    def introduced(call: Call) -> RecordDict:
        reads = {PACKED: True} if PACKED in call.content else {}
        return _introduction(call.context, num_examples(call.context), {**more(call.context), **reads})

    return Whoami(each(introduced), sizes, counted)


def introduce(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Introduce the node, as a Flower mod of any ClientApp: ``ClientApp(mods=[introduce])``.

    Strategies of this suite then identify each node by the ``partition-id`` of its node config instead of a
    rank that changes with every run. The node config's ``num-examples`` (else sizes come from replies),
    ``name``, ``role`` and ``group`` are reported with it. Put it first among the mods; other messages pass.

    Flower runs mods only for functions that the app registers. One node therefore logs "No query function
    registered with name 'whoami'" before the query is repeated as a ``train`` message, which this mod answers
    without training. ``introduced(app)`` avoids that.

    Raises
    ------
    ValueError
        If ``partition-id`` is missing in the node config, or it or ``num-examples`` is not an integer >= 0.
    """
    kind, content = message.metadata.message_type, message.content
    if kind != WHOAMI and (kind != MessageType.TRAIN or "whoami" not in content.config_records):
        return call_next(message, context)
    size = context.node_config.get("num-examples")
    return Message(_introduction(context, size), reply_to=message)


def introduced(app: ClientApp, num_examples: Callable[[Context], int] | None = None) -> ClientApp:
    """Add a ``query.whoami`` function, which introduces the node, to a ClientApp and return the app.

    Parameters
    ----------
    app : ClientApp
        Its functions are registered by ``@app.train()`` and the like; it has no ``query.whoami`` yet.
    num_examples : Callable[[Context], int] or None (default: None)
        Returns a node's number of training examples; None for the node config's ``num-examples``, if set.
    """

    @app.query("whoami")
    def answer(message: Message, context: Context) -> Message:
        size = context.node_config.get("num-examples") if num_examples is None else num_examples(context)
        return Message(_introduction(context, size), reply_to=message)

    return app


def _introduction(context: Context, num_examples: Scalar, more: Introduction | None = None) -> RecordDict:
    node_config = context.node_config
    # The server may assign a partition id to a node that has a name.
    named = bool(node_config.get("name")) and "partition-id" not in node_config
    numbers: dict[str, Scalar] = {} if named else {"partition-id": node_config.get("partition-id")}
    if num_examples is not None:
        numbers["num-examples"] = num_examples
    for key, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(
                f"{key} of this node must be an integer >= 0, got {value!r}: set it with a SuperNode's "
                "--node-config 'partition-id=0 num-examples=100'"
            )
    me = ConfigRecord({key: value for key, value in numbers.items() if value is not None})
    me["message-format"] = MESSAGE_FORMAT
    me.update({key: str(node_config.get(key, "")) for key in ("role", "group")})
    if "name" in node_config:
        me["name"] = str(node_config["name"])
    me.update(dict(more or {}))
    return RecordDict({"whoami": me})
