"""A ClientApp whose handlers take many nodes at once.

A handler is written once over a list of calls. Flower's engines (simulation, SuperNodes) call the app
with one message and the handler sees a list of one; an engine that holds a whole round asks for
``batch_handler`` and hands over the round.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict, UserConfig
from flwr.clientapp import ClientApp

from hedgerow.clients.handlers import Answer, each
from hedgerow.clients.mods.guard import Reveals, guarded, reveals, reveals_of
from hedgerow.clients.mods.learning import Learning
from hedgerow.clients.mods.update import Mod, UpdateMod
from hedgerow.clients.node_state import restore_state, tell_state
from hedgerow.clients.policy import POLICY_VARIABLE
from hedgerow.wire.blas import one_blas_thread
from hedgerow.wire.calls import BatchHandler, Call, ColumnHandler
from hedgerow.wire.message_types import MESSAGE_FORMAT, RESTORE, STATE, WHOAMI

__all__ = ["BatchClientApp", "Sizes", "Whoami", "introduce", "introduced", "whoami"]

Scalar = bool | float | int | str | None
# What a node tells of itself beside its number of examples, by key.
Told = Mapping[str, Any]
# All nodes' numbers of examples by the run config, or None, see ``TellsSizes``.
Sizes = Callable[[UserConfig], Sequence[int] | None]


class BatchClientApp(ClientApp):
    """Flower's ClientApp over batched handlers, behind the guard of the node's owner (``guard.py``).

    Parameters
    ----------
    handlers : Mapping[str, BatchHandler or Learning]
        Message type (``"train"``, ``"evaluate"``, ``"query.whoami"``, …) to handler, with what its answers
        reveal (``guard.reveals``): a handler that declares nothing is refused by nodes with a strict policy.
        ``query.state`` and ``query.restore``, by which a run's checkpoint holds what nodes keep, are added
        where missing.
    mods : Sequence[UpdateMod or Mod] (default: none)
        An ``UpdateMod`` changes what nodes learnt, in their order here, before it is compressed and masked. A
        mod of Flower's sees messages, as in any ClientApp: nodes are then answered one by one.

    Raises
    ------
    ValueError
        If a message type is of no kind that Flower knows, or mods change updates and there are none.
    """

    def __init__(
        self, handlers: Mapping[str, BatchHandler | Learning], mods: Sequence[UpdateMod | Mod] = ()
    ) -> None:
        updates = [mod for mod in mods if isinstance(mod, UpdateMod)]
        flowers = [mod for mod in mods if not isinstance(mod, UpdateMod)]
        super().__init__(mods=flowers)
        self._by_messages = bool(flowers)
        learning = {key: one for key, one in handlers.items() if isinstance(one, Learning)}
        if updates and not learning:
            raise ValueError(
                f"mods has {type(updates[0]).__name__}, which changes updates; this ClientApp sends none "
                f"({', '.join(sorted(handlers))}): they protect what they send by settings of their own"
            )
        self._columns: dict[str, ColumnHandler] = {}
        if not mods:
            at_once = {key: one for key, one in learning.items() if one.at_once}
            self._columns = {key: partial(one.in_columns, key) for key, one in at_once.items()}
        own: dict[str, BatchHandler] = {
            STATE: reveals(Reveals.NOTHING, each(tell_state)),
            RESTORE: reveals(Reveals.NOTHING, each(restore_state)),
        }
        for key, one in handlers.items():
            own |= one.handlers(key, updates) if isinstance(one, Learning) else {key: one}
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

    def batch_handler(self, message_type: str) -> BatchHandler | None:
        """Return the handler of a message type; None if there is none, or Flower's mods stand before it."""
        return None if self._by_messages else self._handlers.get(message_type)

    def column_handler(self, message_type: str) -> ColumnHandler | None:
        """Return what answers a message type in columns; None if nothing does, or a policy is to be asked."""
        return None if os.environ.get(POLICY_VARIABLE) else self._columns.get(message_type)

    def sizes(self, run_config: UserConfig) -> Sequence[int] | None:
        """Return what all nodes would tell of their sizes, see ``hedgerow.wire.calls.TellsSizes``."""
        if not isinstance(self._introduction, Whoami) or self._by_messages or os.environ.get(POLICY_VARIABLE):
            return None
        sizes = self._introduction.sizes(run_config)
        return sizes if sizes is None or all(sizes) else None


def _of_app(types: tuple[str, ...], handler: BatchHandler) -> BatchHandler:
    """Return a handler that declares the same, on one BLAS thread, whose calls say which app they are of."""

    def handle(calls: Sequence[Call]) -> Sequence[RecordDict | Exception]:
        with one_blas_thread():
            return handler([replace(call, app=types) for call in calls])

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
    """A handler that introduces nodes, and what it would tell of all of them."""

    handler: BatchHandler  # Introduces nodes.
    sizes: Sizes  # As ``TellsSizes.sizes``.

    def __call__(self, calls: Sequence[Call]) -> Sequence[Answer]:
        """Introduce nodes."""
        return self.handler(calls)


def whoami(
    num_examples: Callable[[Context], int],
    more: Callable[[Context], Told] = lambda _: {},
    sizes: Sizes = lambda _: None,
) -> BatchHandler:
    """Return the handler that introduces a node to the strategy.

    The answer carries ``message-format``, ``partition-id``, ``num-examples``, and ``name``, ``role`` and
    ``group`` where the node's config sets them.

    Parameters
    ----------
    num_examples : Callable[[Context], int]
        Returns a node's number of training examples.
    more : Callable[[Context], Mapping[str, Any]] (default: nothing)
        Returns what else it tells: of data of its own ``input-shape``, ``num-classes`` and ``dtype``.
    sizes : Callable[[UserConfig], Sequence[int] or None] (default: not known)
        Returns what ``num_examples`` returns for all nodes whose node config has nothing but their partition,
        if ``more`` returns nothing then: an engine need not ask a million nodes one by one.
    """
    return Whoami(
        each(lambda call: _introduction(call.context, num_examples(call.context), more(call.context))), sizes
    )


def introduce(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Say who the node is, as a Flower mod of any ClientApp: ``ClientApp(mods=[introduce])``.

    A strategy of this suite then knows each node by its ``partition-id`` from the node config, not by a rank
    that is another one in every run. Told beside it are the node config's ``num-examples`` (else sizes are
    learnt from the replies), ``name``, ``role`` and ``group``. It stands first among the mods. All other
    messages pass.

    Mods stand only before functions that the app has, so that one node's log has an error "No query function
    registered with name 'whoami'" before the question comes as a ``train`` message, which is answered here
    and trains nothing. With ``introduced(app)`` there is none.

    Raises
    ------
    ValueError
        If the node config has no ``partition-id``, or it or ``num-examples`` is no integer >= 0.
    """
    kind, content = message.metadata.message_type, message.content
    if kind != WHOAMI and (kind != MessageType.TRAIN or "whoami" not in content.config_records):
        return call_next(message, context)
    size = context.node_config.get("num-examples")
    return Message(_introduction(context, size), reply_to=message)


def introduced(app: ClientApp, num_examples: Callable[[Context], int] | None = None) -> ClientApp:
    """Return the ClientApp with an answer to who its nodes are, a ``query.whoami`` function.

    Parameters
    ----------
    app : ClientApp
        Any whose functions are registered by ``@app.train()`` and the like, and that has no such function.
    num_examples : Callable[[Context], int] or None (default: None)
        Returns a node's number of training examples; None for its node config's ``num-examples``, if set.
    """

    @app.query("whoami")
    def answer(message: Message, context: Context) -> Message:
        size = context.node_config.get("num-examples") if num_examples is None else num_examples(context)
        return Message(_introduction(context, size), reply_to=message)

    return app


def _introduction(context: Context, num_examples: Scalar, more: Told | None = None) -> RecordDict:
    node_config = context.node_config
    # A node that has a name may leave its place to the server.
    named = bool(node_config.get("name")) and "partition-id" not in node_config
    told: dict[str, Scalar] = {} if named else {"partition-id": node_config.get("partition-id")}
    if num_examples is not None:
        told["num-examples"] = num_examples
    for key, value in told.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(
                f"{key} of this node must be an integer >= 0, got {value!r}: a SuperNode has it from "
                "--node-config 'partition-id=0 num-examples=100'"
            )
    me = ConfigRecord({key: value for key, value in told.items() if value is not None})
    me["message-format"] = MESSAGE_FORMAT
    me.update({key: str(node_config.get(key, "")) for key in ("role", "group")})
    if "name" in node_config:
        me["name"] = str(node_config["name"])
    me.update(dict(more or {}))
    return RecordDict({"whoami": me})
