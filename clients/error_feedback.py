"""Error feedback: what compression drops is kept by the node, and added to its next message.

Paper: A. Beikmohammadi, S. Khirirat, S. Magnússon, "On the Convergence of Federated Learning Algorithms
without Data Similarity", Algorithm 2, steps 3 and 4: m = x_i^k - x^k + e_i^k, q = Q(m) travels, e_i^{k+1} =
m - q stays. In the paper no message is lost. Here the server says which update it absorbed last, and a node
whose message was lost takes it back, e + q, so that nothing is ever dropped; where the round itself is
repeated, its update is in that sum already and is not added again.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from numpy.typing import NDArray
from torch import Tensor

from hedgerow.clients.app import BatchClientApp
from hedgerow.clients.guard import reveals, reveals_of
from hedgerow.clients.instructions import flag, only_config, whole
from hedgerow.clients.node_state import keep, kept
from hedgerow.wire.calls import BatchHandler, Call
from hedgerow.wire.compress import (
    UNSOUND,
    Compressor,
    Identity,
    Payload,
    compressed_part,
    dense_part,
    pack_payload,
    parse_compressor,
    payload_record,
)
from hedgerow.wire.message_types import WHOAMI
from hedgerow.wire.records import Layout, lazy_array, to_state_dict

__all__ = ["Metrics", "Update", "compress_reply", "compress_updates", "compressed", "feed_back"]

Metrics = dict[str, int | float]

# Flower's key of the norm to which nodes clip their updates.
_CLIPPING_NORM = "clipping_norm"
_RECORD = "error-feedback"  # in context.state
_MEMORY, _PENDING = "memory", "pending."  # keys of the arrays
# Floats that one encoding holds at once, beside the updates themselves.
_CHUNK = 1 << 26


@dataclass(frozen=True)
class Update:
    """What a node learnt in a round.

    Parameters
    ----------
    layout : Layout
        The layout of the state dict.
    vector : Tensor
        x_i^k - x^k (d,) over the compressed keys, on any device.
    dense : Mapping[str, Tensor]
        The new values of the keys that are not compressed.
    """

    layout: Layout
    vector: Tensor
    dense: Mapping[str, Tensor]

    @classmethod
    def between(cls, start: Mapping[str, Tensor], end: Mapping[str, Tensor]) -> "Update":
        """Return the update from one state dict to another.

        Raises
        ------
        ValueError
            If their keys or shapes differ, or nothing in them is compressed.
        """
        before, after = ({key: tuple(value.shape) for key, value in state.items()} for state in (start, end))
        if before != after:
            raise ValueError(f"the model has the arrays {after}; valid is those that were sent, {before}")
        dtypes = tuple(str(value.dtype).removeprefix("torch.") for value in start.values())
        layout = Layout(tuple(before), tuple(before.values()), dtypes)
        changes = [(end[key] - start[key]).flatten() for key in compressed_part(layout).keys]
        if not changes:
            raise ValueError(f"the arrays {before} hold no floating-point values; valid is some to compress")
        return cls(layout, torch.cat(changes), {key: end[key] for key in dense_part(layout).keys})


def feed_back(compressor: Compressor, messages: Tensor) -> tuple[list[Payload], Tensor]:
    """Return q = Q(m) of each row and e = m - q, Algorithm 2, steps 3 and 4.

    Parameters
    ----------
    compressor : Compressor
        Encodes the messages as float32.
    messages : Tensor
        m (nodes, d), of any floating-point dtype, which e keeps.

    Returns
    -------
    tuple[list[Payload], Tensor]
        A payload each, and the memories (nodes, d) on the messages' device. q + e is m exactly where the
        compressor keeps entries as they are, else to rounding.
    """
    payloads = compressor.encode_stack(messages)
    memories = messages.clone()
    for row, payload in enumerate(payloads):
        memories[row] -= torch.from_numpy(compressor.decode(payload, messages.shape[1])).to(messages.device)
    return payloads, memories


def compress_updates(
    calls: Sequence[Call], updates: Sequence[Update]
) -> list[tuple[ArrayRecord, Metrics] | Exception]:
    """Return what each node sends of its update, and keep the rest in its context.

    Read from each call's config: ``compressor``; ``error-feedback`` (absent: true); with error feedback
    ``round-index`` k >= 0 and ``acknowledged``, the ``round-index`` of the node's last update that the server
    absorbed (-1 for none). A memory counts only within its run; at round 0 it is zero.

    Parameters
    ----------
    calls : Sequence[Call]
        One call a node.
    updates : Sequence[Update]
        What each learnt. Nodes of one compressor and size are encoded together.

    Returns
    -------
    list[tuple[ArrayRecord, dict] or Exception]
        A record of ``pack_update`` and the metrics ``message-norm``, ``memory-norm``, ``payload-bits`` and
        ``memory-lost``: 1 if the server absorbed updates of this node of which it remembers nothing. A
        ValueError in place of both, and a state that has not changed, where a node's config is wrong or its
        update is not finite.
    """
    answers: dict[int, tuple[ArrayRecord, Metrics] | Exception] = {}
    alike: dict[tuple[object, ...], dict[int, _Sending]] = {}
    for position, (call, update) in enumerate(zip(calls, updates, strict=True)):
        try:
            sending = _Sending.of(call, update)
        except ValueError as error:  # One node's bad config or update must not fail the others.
            answers[position] = error
            continue
        key = (sending.compressor, sending.message.numel(), sending.message.device)
        alike.setdefault(key, {})[position] = sending
    for sendings in alike.values():
        positions = list(sendings)
        step = max(1, _CHUNK // sendings[positions[0]].message.numel())
        for first in range(0, len(positions), step):
            chunk = positions[first : first + step]
            for position, answer in zip(chunk, _sent([sendings[p] for p in chunk]), strict=True):
                answers[position] = answer
    return [answers[position] for position in range(len(calls))]


def compressed(app: BatchClientApp) -> BatchClientApp:
    """Return the app with replies to ``train`` compressed where a message's config asks for it.

    A reply's one ArrayRecord becomes ``update``, and its MetricRecord gains the metrics of
    ``compress_updates``. A message without ``compressor``, or with ``identity``, is answered as before.

    Parameters
    ----------
    app : BatchClientApp
        Any; a reply to ``train`` must hold one ArrayRecord, of the keys and shapes that were sent.
    """
    handlers = {
        message_type: reveals(reveals_of(handler), _compressing(handler))
        if message_type.partition(".")[0] == "train"
        else handler
        for message_type, handler in app._handlers.items()
    }
    # As it is: it says how large all nodes are, so that a million need not be asked one by one.
    introduction = {} if app._introduction is None else {WHOAMI: app._introduction}
    return BatchClientApp({**handlers, **introduction})


def compress_reply(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
    """Compress the reply of any ClientApp, as a Flower mod: ``ClientApp(mods=[compress_reply])``.

    Acts on ``train`` messages whose config asks for a compressor, as ``Compressed`` makes a strategy ask;
    all others pass. The reply's one ArrayRecord becomes its compressed difference to the arrays that were
    received, with error feedback.

    It stands before all other mods that look at arrays: those after it see models, those before it updates.

    Raises
    ------
    ValueError
        If updates are clipped or noised for differential privacy, which the memory of error feedback would
        undo: by a mod of Flower's after this one, or where the message's config has ``clipping_norm``; and
        whatever the memory, by one before this one, which would clip what is coded.
    """
    call = Call(message.content.copy(), context, message.metadata.message_type)
    if message.metadata.message_type.partition(".")[0] != "train" or not _asks(call):
        return call_next(message, context)
    if (outer := next(filter(None, map(_privacy, _preceding())), None)) is not None:
        raise ValueError(
            f"{outer} stands before compress_reply and sees what is coded; valid is "
            f"mods=[compress_reply, {outer}], without error feedback: {UNSOUND}"
        )
    feeds_back = flag(only_config(call), "error-feedback", default=True)
    if feeds_back and (private := next(filter(None, map(_privacy, _following(call_next))), None)):
        raise ValueError(f"{private} stands after compress_reply: {UNSOUND}")
    start = _only_state(call.content)  # Read first: the app may empty the record as it reads it.
    reply = call_next(message, context)
    if reply.has_content():
        _only_metrics(reply.content)
        (sent,) = compress_updates([call], [Update.between(start, _only_state(reply.content))])
        if isinstance(sent, Exception):
            raise sent
        reply.content = _replied(reply.content, sent)
    return reply


# One node's round.


@dataclass(frozen=True)
class _Sending:
    """One node's message m and what must be known to send it."""

    call: Call
    update: Update
    compressor: Compressor
    message: Tensor
    feeds_back: bool
    memory_lost: bool = False

    @classmethod
    def of(cls, call: Call, update: Update) -> "_Sending":
        config = only_config(call)
        compressor = parse_compressor(str(config.get("compressor")))
        message, memory_lost = update.vector.to(torch.float32), False
        feeds_back = flag(config, "error-feedback", default=True)
        if feeds_back:
            current, acknowledged = whole(config, "round-index", 0), whole(config, "acknowledged", -1)
            own = _Memory.of(call.context, message.numel())
            if own is not None and own.precedes(current, acknowledged):
                memory = torch.from_numpy(own.vector(acknowledged)).to(message.device)
                repeated = own.round_index == current and acknowledged < current
                message = memory if repeated else message + memory
            else:
                memory_lost = acknowledged >= 0
        if not torch.isfinite(message).all():
            raise ValueError("the update holds NaN or infinity; valid are finite values")
        return cls(call, update, compressor, message, feeds_back, memory_lost)


@dataclass(frozen=True)
class _Memory:
    """What ``context.state`` holds: e, and the message q of the round after which it was kept."""

    error: NDArray[np.float32]
    pending: Payload
    compressor: Compressor
    round_index: int

    @classmethod
    def of(cls, context: Context, size: int) -> "_Memory | None":
        """Return the memory of this run and size, or None; one that is damaged is none."""
        arrays, status = kept(context, _RECORD)
        error, round_index = arrays.pop(_MEMORY, np.zeros(0)), status.get("round-index")
        if error.shape != (size,) or error.dtype != np.float32 or not isinstance(round_index, int):
            return None
        try:
            compressor = parse_compressor(str(status.get("compressor")))
        except ValueError:
            return None
        pending = {key.removeprefix(_PENDING): array for key, array in arrays.items()}
        return cls(error, pending, compressor, round_index)

    def precedes(self, current: int, acknowledged: int) -> bool:
        """Return whether this is what the node knew last, for a server that is where it says it is."""
        return current > 0 and acknowledged <= self.round_index <= current

    def vector(self, acknowledged: int) -> NDArray[np.float32]:
        """Return e, or e + q if the server never absorbed q."""
        if acknowledged == self.round_index:
            return self.error.copy()
        return self.error + self.compressor.decode(self.pending, self.error.size)

    def keep(self, context: Context) -> None:
        """Write to the node's state."""
        record = payload_record({_PENDING + key: array for key, array in self.pending.items()})
        record[_MEMORY] = lazy_array(self.error)
        compressor = str(self.compressor)
        keep(context, _RECORD, record, {"round-index": self.round_index, "compressor": compressor})


def _sent(sendings: Sequence[_Sending]) -> list[tuple[ArrayRecord, Metrics] | Exception]:
    """Encode messages of one compressor and size, and let each node remember what was left."""
    compressor = sendings[0].compressor
    messages = torch.stack([sending.message for sending in sendings])  # (nodes, d)
    payloads, errors = feed_back(compressor, messages)
    message_norms = torch.linalg.vector_norm(messages, dim=1, dtype=torch.float64).tolist()
    memory_norms = torch.linalg.vector_norm(errors, dim=1, dtype=torch.float64).tolist()
    answers: list[tuple[ArrayRecord, Metrics] | Exception] = []
    for row, (sending, payload, error) in enumerate(zip(sendings, payloads, errors, strict=True)):
        try:
            record = pack_payload(sending.update.layout, payload, sending.update.dense)
        except ValueError as problem:
            answers.append(problem)
            continue
        metrics: Metrics = {
            "message-norm": message_norms[row],
            "memory-norm": memory_norms[row] if sending.feeds_back else 0.0,
            "payload-bits": compressor.bits(messages.shape[1], payload),
            "memory-lost": int(sending.memory_lost),
        }
        if sending.feeds_back:
            current = whole(only_config(sending.call), "round-index", 0)
            # A row's own copy: a view would keep the whole stack in memory.
            memory = _Memory(np.array(error.cpu().numpy()), payload, compressor, current)
            memory.keep(sending.call.context)
        answers.append((record, metrics))
    return answers


# Replies.


def _compressing(handler: BatchHandler) -> BatchHandler:
    def handle(calls: Sequence[Call]) -> list[RecordDict | Exception]:
        answers = list(handler(calls))
        starts: dict[int, dict[str, Tensor]] = {}
        learnt: dict[int, tuple[RecordDict, Update]] = {}
        for position, (call, answer) in enumerate(zip(calls, answers, strict=True)):
            try:
                if not isinstance(answer, Exception) and _asks(call):
                    # Nodes that were sent the same object share its tensors.
                    if (key := id(call.content)) not in starts:
                        starts[key] = _only_state(call.content)
                    learnt[position] = answer, Update.between(starts[key], _only_state(answer))
                    _only_metrics(answer)
            except ValueError as error:
                answers[position] = error
                learnt.pop(position, None)
        sent = compress_updates([calls[p] for p in learnt], [update for _, update in learnt.values()])
        for (position, (answer, _)), message in zip(learnt.items(), sent, strict=True):
            answers[position] = message if isinstance(message, Exception) else _replied(answer, message)
        return answers

    return handle


def _replied(reply: RecordDict, sent: tuple[ArrayRecord, Metrics]) -> RecordDict:
    """Return the reply with its arrays replaced by what is sent."""
    record, metrics = sent
    _only_metrics(reply).update(metrics)
    others = {name: other for name, other in reply.items() if not isinstance(other, ArrayRecord)}
    return RecordDict({"update": record, **others})


def _only_metrics(reply: RecordDict) -> MetricRecord:
    if len(reply.metric_records) != 1:
        raise ValueError(f"the reply has {len(reply.metric_records)} MetricRecords; valid is exactly one")
    return next(iter(reply.metric_records.values()))


def _only_state(content: RecordDict) -> dict[str, Tensor]:
    if len(content.array_records) != 1:
        raise ValueError(
            f"message or reply has {len(content.array_records)} ArrayRecords; valid here is exactly one"
        )
    return to_state_dict(next(iter(content.array_records.values())))


def _asks(call: Call) -> bool:
    """Return whether the message asks for a compressor that changes the reply."""
    configs = list(call.content.config_records.values())
    if len(configs) != 1 or "compressor" not in configs[0]:
        return False
    if parse_compressor(str(configs[0]["compressor"])) == Identity():
        return False
    if _CLIPPING_NORM in configs[0] and flag(configs[0], "error-feedback", default=True):
        raise ValueError(f"the message's config has {_CLIPPING_NORM!r}: {UNSOUND}")
    return True


def _following(call_next: Callable[..., Message]) -> Iterator[object]:
    """Yield the mods that stand between one and the app's function, which Flower keeps in closures."""
    while inspect.isfunction(call_next) and (names := call_next.__code__.co_freevars):
        cells = dict(zip(names, (cell.cell_contents for cell in call_next.__closure__ or ()), strict=True))
        if not {"_mod", "_ffn"} <= cells.keys():
            return
        yield cells["_mod"]
        call_next = cells["_ffn"]


def _preceding() -> Iterator[object]:
    """Yield what is being called, and the objects whose methods are: mods before one are among them."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame.f_locals.get("self")
        yield frame.f_globals.get(frame.f_code.co_name)
        frame = frame.f_back


def _privacy(mod: object) -> str | None:
    """Return the name of a mod that clips or noises what it sees."""
    if isinstance(mod, LocalDpMod):
        return "LocalDpMod"
    return next((known.__name__ for known in (fixedclipping_mod, adaptiveclipping_mod) if mod is known), None)
