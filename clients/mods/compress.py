"""Error feedback: a node keeps the compression error and adds it to its next message.

Paper: A. Beikmohammadi, S. Khirirat, S. Magnússon, "On the Convergence of Federated Learning Algorithms
without Data Similarity", Algorithm 2, steps 3 and 4: m = x_i^k - x^k + e_i^k, the node sends q = Q(m) and
keeps e_i^{k+1} = m - q. The paper loses no message. Here the server names the last update that it absorbed,
and a node whose message was lost restores e + q. If the round itself is repeated, that sum already contains
its update, which is not added again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from hedgerow.clients.handlers import Answer, outcome, together
from hedgerow.clients.instructions import flag, only_config, whole
from hedgerow.clients.mods.update import Trainer, TrainResult
from hedgerow.clients.node_state import NodeState
from hedgerow.wire.calls import Call
from hedgerow.wire.codec import Seed
from hedgerow.wire.compress import (
    UNSOUND,
    Compressor,
    Identity,
    Payload,
    compressed_part,
    dense_part,
    pack_update,
    parse_compressor,
)
from hedgerow.wire.records import Layout, dtype_of, to_state_dict

Metrics = dict[str, int | float]

# Flower's config key for the clipping norm of updates.
_CLIPPING_NORM = "clipping_norm"
_RECORD = "error-feedback"  # in context.state
_MEMORY = "memory"  # the key of e in it; q is there as long as nobody has acknowledged it
# Floats that one encoding holds at a time, beside the updates themselves.
_CHUNK = 1 << 26


@dataclass(frozen=True)
class Update:
    """A node's update in a round."""

    layout: Layout  # of the state dict
    vector: Tensor  # x_i^k - x^k (d,) over the compressed keys, on any device
    dense: Mapping[str, Tensor]  # the new values of the keys that are not compressed

    @classmethod
    def of(cls, learnt: TrainResult) -> "Update":
        """Return a node's update; ValueError if its result is not a change of the model."""
        if learnt.start is None:
            raise ValueError("this message asks for signs or chosen entries, which are not compressed again")
        return cls.between(learnt.start, learnt.state)

    @classmethod
    def between(cls, start: Mapping[str, Tensor], end: Mapping[str, Tensor]) -> "Update":
        """Return the update from one state dict to another.

        ValueError if keys or shapes differ, or there are no floating-point values to compress.
        """
        before, after = ({key: tuple(value.shape) for key, value in state.items()} for state in (start, end))
        if before != after:
            raise ValueError(f"the model must have the arrays that were sent, {before}, got {after}")
        dtypes = tuple(dtype_of(value.dtype) for value in start.values())
        layout = Layout(tuple(before), tuple(before.values()), dtypes)
        changes = [(end[key] - start[key]).flatten() for key in compressed_part(layout).keys]
        if not changes:
            raise ValueError(f"the arrays must hold floating-point values to compress, got {before}")
        change = torch.cat(changes)
        if change.dtype.itemsize < 4:  # What compression leaves over is kept in float32.
            change = change.float()
        return cls(layout, change, {key: end[key] for key in dense_part(layout).keys})


def feed_back(
    compressor: Compressor, messages: Tensor, seeds: Sequence[Seed] = ()
) -> tuple[list[Payload], Tensor]:
    """Return q = Q(m) of each row and e = m - q, Algorithm 2, steps 3 and 4.

    - ``compressor``: Encodes the messages as float32.
    - ``messages``: m (nodes, d), of any floating-point dtype; e has the same.
    - ``seeds``: One per row, for a stochastic compressor.

    Returns
    -------
    tuple[list[Payload], Tensor]
        A payload per row, and the memories e (nodes, d) on the messages' device. q + e equals m exactly if
        the compressor keeps entries unchanged, else up to rounding.
    """
    payloads = compressor.encode_stack(messages, seeds)
    memories = messages.clone()
    for row, payload in enumerate(payloads):
        memories[row] -= torch.from_numpy(compressor.decode(payload, messages.shape[1])).to(messages.device)
    return payloads, memories


def compress_updates(
    calls: Sequence[Call], updates: Sequence[Update]
) -> list[tuple[ArrayRecord, Metrics] | Exception]:
    """Return each node's compressed update, and keep the error in its context.

    Each call's config has ``compressor``, ``error-feedback`` (default: true) and, with error feedback,
    ``round-index`` k >= 0 and ``acknowledged``, the ``round-index`` of the node's last update that the server
    absorbed (-1 for none). A memory is valid only within its run and zero at round 0. Nodes with the same
    compressor and size are encoded together.

    Returns
    -------
    list[tuple[ArrayRecord, dict] or Exception]
        A record of ``pack_update`` and the metrics ``message-norm``, ``memory-norm``, ``payload-bits`` and
        ``memory-lost``, 1 if the server absorbed updates that this node has no memory of. For an invalid
        config or an update that is not finite, a ValueError; the node's state is then unchanged.
    """
    answers: dict[int, tuple[ArrayRecord, Metrics] | Exception] = {}
    alike: dict[tuple[object, ...], dict[int, _Sending]] = {}
    for position, (call, update) in enumerate(zip(calls, updates, strict=True)):
        try:
            sending = _Sending.of(call, update)
        except ValueError as error:  # one node's bad config or update must not fail the others
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


def asks_for_compression(content: RecordDict) -> bool:
    """Return whether an instruction asks for a compressor that changes the reply.

    ValueError for an unknown compressor, or if error feedback would undo the clipping that the message asks
    for.
    """
    configs = list(content.config_records.values())
    if len(configs) != 1 or "compressor" not in configs[0]:
        return False
    if parse_compressor(str(configs[0]["compressor"])) == Identity():
        return False
    if _CLIPPING_NORM in configs[0] and flag(configs[0], "error-feedback", default=True):
        raise ValueError(f"the message's config has {_CLIPPING_NORM!r}: {UNSOUND}")
    return True


def encoded(learn: Trainer, calls: Sequence[Call]) -> list[Answer]:
    """Train nodes and return their replies, compressed as ``update`` if a message asks for it."""
    asked: dict[int, bool] = {}  # by content, which many nodes share

    def read(call: Call) -> bool:
        if id(call.content) not in asked:
            asked[id(call.content)] = asks_for_compression(call.content)
        return asked[id(call.content)]

    def work(calls: Sequence[Call], jobs: Mapping[int, bool]) -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        changes: dict[int, tuple[TrainResult, Update]] = {}
        for at, one in zip(jobs, learn([calls[at] for at in jobs]), strict=True):
            if not isinstance(one, TrainResult):
                answers[at] = one
            elif not jobs[at]:
                answers[at] = one.reply()
            elif isinstance(update := outcome(Update.of, one), Exception):
                answers[at] = update
            else:
                changes[at] = one, update
        sent = compress_updates([calls[at] for at in changes], [update for _, update in changes.values()])
        for (at, (one, _)), found in zip(changes.items(), sent, strict=True):
            if isinstance(found, Exception):
                answers[at] = found
            else:
                record, metrics = found
                answers[at] = RecordDict(
                    {"update": record, "metrics": MetricRecord({**one.metrics, **metrics})}
                )
        return answers

    return together(read, work)(calls)


def compress_reply(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
    """Compress the reply of any ClientApp, as a Flower mod: ``ClientApp(mods=[compress_reply])``.

    It acts on ``train`` messages whose config names a compressor, as a strategy wrapped in ``Compressed``
    sends them; other messages pass. The reply's one ArrayRecord is replaced by its compressed difference from
    the received arrays, with error feedback.

    List it before all other mods that read arrays: mods after it see models; Flower's mods before it would
    get the arrays of an update and fail.

    Raises
    ------
    ValueError
        If the message's config asks for clipping (``clipping_norm``), which error feedback would undo.
    """
    call = Call(message.content.copy(), context, message.metadata.message_type)
    if message.metadata.message_type.partition(".")[0] != "train" or not asks_for_compression(call.content):
        return call_next(message, context)
    start = _only_state(call.content)  # read first, because the app may empty the record
    reply = call_next(message, context)
    if reply.has_content():
        own_metrics = _only_metrics(reply.content)
        (sent,) = compress_updates([call], [Update.between(start, _only_state(reply.content))])
        if isinstance(sent, Exception):
            raise sent
        record, metrics = sent
        own_metrics.update(metrics)
        others = {key: one for key, one in reply.content.items() if not isinstance(one, ArrayRecord)}
        reply.content = RecordDict({"update": record, **others})
    return reply


# One node's round.


@dataclass(frozen=True)
class _Sending:
    """One node's message m, and where it keeps its error; None without error feedback."""

    update: Update
    compressor: Compressor
    message: Tensor
    kept: NodeState | None
    memory_lost: bool
    seed: Seed

    @classmethod
    def of(cls, call: Call, update: Update) -> "_Sending":
        config, node = only_config(call), call.context.node_config
        seed = cast(int, config.get("round-index", 0)), int(node.get("partition-id", 0))
        compressor = parse_compressor(str(config.get("compressor")))
        message, kept, memory_lost = update.vector.to(torch.float32), None, False
        if flag(config, "error-feedback", default=True):
            acknowledged = whole(config, "acknowledged", -1)
            kept = NodeState.of(call, _RECORD)
            memory = _memory(kept, message.numel())
            memory_lost = memory is None and acknowledged >= 0
            if memory is not None:
                own = torch.from_numpy(memory).to(message.device)
                message = own if kept.repeated else message + own
        if not torch.isfinite(message).all():
            raise ValueError("the update must be finite, got NaN or infinity")
        return cls(update, compressor, message, kept, memory_lost, seed)


def _memory(kept: NodeState, size: int) -> NDArray[np.float32] | None:
    """Return e, or e + q if the server never absorbed q; None if the node has none of this size."""
    error = kept.after.get(_MEMORY, np.zeros(0))
    if error.shape != (size,) or error.dtype != np.float32:
        return None
    if kept.absorbed:
        return error.copy()
    try:
        compressor = parse_compressor(str(kept.about.get("compressor")))
    except ValueError:  # damaged
        return None
    return error + compressor.decode(dict(kept.otherwise), size)


def _sent(sendings: Sequence[_Sending]) -> list[tuple[ArrayRecord, Metrics] | Exception]:
    """Encode messages of one compressor and size, and store each node's error."""
    compressor = sendings[0].compressor
    messages = torch.stack([sending.message for sending in sendings])  # (nodes, d)
    payloads, errors = feed_back(compressor, messages, [sending.seed for sending in sendings])
    message_norms = torch.linalg.vector_norm(messages, dim=1, dtype=torch.float64).tolist()
    memory_norms = torch.linalg.vector_norm(errors, dim=1, dtype=torch.float64).tolist()
    answers: list[tuple[ArrayRecord, Metrics] | Exception] = []
    for row, (sending, payload, error) in enumerate(zip(sendings, payloads, errors, strict=True)):
        try:
            record = pack_update(sending.update.layout, payload, sending.update.dense)
        except ValueError as problem:
            answers.append(problem)
            continue
        metrics: Metrics = {
            "message-norm": message_norms[row],
            "memory-norm": 0.0 if sending.kept is None else memory_norms[row],
            "payload-bits": compressor.bits(messages.shape[1], payload),
            "memory-lost": int(sending.memory_lost),
        }
        if sending.kept is not None:
            # Copy the row, because a view would keep the whole stack in memory.
            own = {_MEMORY: np.array(error.cpu().numpy())}
            sending.kept.keep(own, payload, compressor=str(compressor))
        answers.append((record, metrics))
    return answers


# Replies.


def _only_metrics(reply: RecordDict) -> MetricRecord:
    if len(reply.metric_records) != 1:
        raise ValueError(f"the reply must have exactly one MetricRecord, got {len(reply.metric_records)}")
    return next(iter(reply.metric_records.values()))


def _only_state(content: RecordDict) -> dict[str, Tensor]:
    if len(content.array_records) != 1:
        raise ValueError(
            f"message and reply must have exactly one ArrayRecord each, got {len(content.array_records)}"
        )
    return to_state_dict(next(iter(content.array_records.values())))
