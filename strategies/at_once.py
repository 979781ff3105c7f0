"""An exchange without messages, if the grid answers it in columns; bits, traffic and counts are the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from hedgerow.strategies.exchange import Columns, Exchange, Models, RoundFailedError, Vector
from hedgerow.strategies.messenger import Messenger, Reader, Sending
from hedgerow.strategies.vectors import DeviceRows
from hedgerow.wire.calls import InColumns
from hedgerow.wire.limits import MAX_METRIC
from hedgerow.wire.records import Layout, PayloadError, payload_bytes

Rows = NDArray[Any] | Tensor


def at_once(messenger: Messenger, exchange: Exchange, sending: Sending) -> Iterator[Columns] | None:
    """Make the training exchange without messages, with equal results; None if it needs messages."""
    run = messenger.context
    answer = getattr(run.grid, "columns", None)
    simple = exchange.reads is None and type(exchange.coding) is Models and not exchange.bounded
    simple = simple and run.parts.see_columns
    bare = all(ask.model is not None and not (ask.arrays or ask.held or ask.records) for ask in exchange.asks)
    if answer is None or not simple or not bare or run.federation.settings.train_metrics_aggr_fn:
        return None
    groups: dict[int, tuple[RecordDict, list[int]]] = {}
    for node, content in zip(sending.nodes, sending.contents, strict=True):
        groups.setdefault(id(content), (content, []))[1].append(node.partition_id)
    asked = list(groups.values())
    # A node's own arrays, or the frozen ones that it lacks, are sent to it alone.
    if any(len(content.array_records) > 1 for content, _ in asked):
        return None
    found, layout = answer(exchange.kind, asked), exchange.layout(run.federation)
    if found is None or found.rows.shape != (len(sending.nodes), layout.size):
        return None
    if any(part.check_columns(exchange, found.metrics, run) for part in run.parts.hooks["check_columns"]):
        return None
    return _checked(messenger, exchange, sending, asked, found, layout)


def _checked(
    messenger: Messenger,
    exchange: Exchange,
    sending: Sending,
    asked: Sequence[tuple[RecordDict, Sequence[int]]],
    found: InColumns,
    layout: Layout,
) -> Iterator[Columns]:
    run, nodes = messenger.context, sending.nodes
    read = Reader(run, exchange)
    federation = run.federation
    messenger.book_sent(exchange, sending)
    inbox = federation.open_exchange(run.round, nodes, read, offline=sending.offline)
    partitions = np.array([i for _, members in asked for i in members])
    pools = [exchange.asked[node.partition_id].pool for node in nodes]
    sent = {ask.pool: ask.model for ask in exchange.asks if ask.model is not None}
    dtype = next(iter(sent.values())).dtype
    rows = _as_type(found.rows, dtype)
    if layout.integers:
        _add_integers(rows, [exchange.asked[i].model for i in partitions.tolist()], layout)
    metrics = {key: np.asarray(values) for key, values in found.metrics.items()}
    if (np.diff(partitions) < 0).any():
        order = np.argsort(partitions)
        rows, metrics = rows[order], {key: values[order] for key, values in metrics.items()}
    weights = np.asarray(metrics[federation.settings.weighted_by_key], np.float64)
    norms = _norms(rows, pools, sent)
    # A row at a finite distance is finite; the others are read as a message is.
    likely = np.isfinite(norms)
    for values in metrics.values():
        likely &= np.abs(values) <= MAX_METRIC
    errors: dict[int, PayloadError] = {}
    for k in np.flatnonzero(~(likely & federation.limits.claims.valid(weights))).tolist():
        try:
            own = {key: values[k] for key, values in metrics.items()}
            read(nodes[k], _reply(layout, rows[k], own))
        except PayloadError as error:
            errors[k] = error
    for bound, where, _ in read.bounds:
        of = {pool: model[where] for pool, model in sent.items()}
        sizes = norms if exchange.blocks is None else _norms(rows[:, where], pools, of)
        unread = {k: norm for k, norm in enumerate(sizes.tolist()) if k not in errors}
        errors |= bound.too_large(unread, {k: of[pools[k]] for k in unread})
    inbox.settle(nodes, errors)
    federation.judge(inbox)
    accepted = [k for k in range(len(nodes)) if k not in errors]
    kept, pools = [nodes[k].partition_id for k in accepted], [pools[k] for k in accepted]
    arrays, whole = _reply_size(layout, rows, metrics)
    run.table = {key: values[accepted] for key, values in metrics.items()}
    taken = rows if len(accepted) == len(rows) else rows[accepted]
    vectors = DeviceRows(taken) if isinstance(taken, Tensor) else list(taken)
    columns = Columns(kept, pools, vectors, weights[accepted].tolist(), [])
    bits = exchange.coding.bits(layout)
    messenger.taken(exchange, columns, bits, [arrays] * len(kept), [whole] * len(kept))
    if kept:
        yield columns
    if not federation.enough():
        raise RoundFailedError


def _as_type(rows: Rows, dtype: np.dtype[Any]) -> Rows:
    if isinstance(rows, Tensor):
        return rows.to(torch.tensor(np.empty(0, dtype)).dtype)
    with np.errstate(over="ignore"):
        return rows.astype(dtype, copy=False)


def _add_integers(rows: Rows, sent: Sequence[Vector | None], layout: Layout) -> None:
    """Add the integers that nodes were sent to their changes."""
    for where in layout.integers.values():
        for k, model in enumerate(sent):
            assert model is not None, "the exchange has models"
            if isinstance(rows, Tensor):
                rows[k, where] += torch.tensor(model[where], device=rows.device)
            else:
                rows[k, where] += model[where]


def _norms(rows: Rows, pools: Sequence[int], sent: Mapping[int, Vector]) -> NDArray[Any]:
    """Return the norm of each row's update (K,)."""
    if isinstance(rows, Tensor):
        norms = np.empty(len(rows))
        for pool, model in sent.items():
            own = np.flatnonzero(np.equal(pools, pool))
            moves = rows[own] - torch.tensor(model, device=rows.device)
            norms[own] = torch.linalg.vector_norm(moves, dim=1, dtype=torch.float64).numpy(force=True)
        return norms
    with np.errstate(over="ignore", invalid="ignore"):
        moved = (row - sent[pool] for row, pool in zip(rows, pools, strict=True))
        # As ``norm_of``, of all rows at once.
        found: NDArray[Any] = np.sqrt(np.array([move.dot(move) for move in moved]))
        return found


def _reply(layout: Layout, row: Vector | Tensor, metrics: Mapping[str, Any]) -> RecordDict:
    """Return a row as a reply's content."""
    record = MetricRecord({key: value.item() for key, value in metrics.items()})
    row = row.numpy(force=True) if isinstance(row, Tensor) else row
    return RecordDict({"arrays": layout.unflatten(row), "metrics": record})


def _reply_size(layout: Layout, rows: Rows, metrics: Mapping[str, NDArray[Any]]) -> tuple[int, int]:
    """Return the bytes of a reply's arrays, and of a whole reply: a number takes 8 bytes, whatever it is."""
    if not len(rows):
        return 0, 0
    content = _reply(layout, rows[0], {key: values[0] for key, values in metrics.items()})
    return payload_bytes(content["arrays"]), payload_bytes(content)
