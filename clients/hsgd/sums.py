"""What a node of HSGD tells within a secure sum: what its steps made, kept since, and told masked.

All members of a sum are sent one content. So an update, which hands each node what is its own alone, is
answered without a model, and ``train.upload`` asks for that. ``clients/masking.py`` has the protocol.
"""

from collections.abc import Callable

import numpy as np
from flwr.app import Context, MetricRecord, RecordDict

from hedgerow.clients.app import each
from hedgerow.clients.hsgd.messages import Memory, ProtectedUpload, Vector, config_of, reply
from hedgerow.clients.hsgd.party import Party
from hedgerow.clients.hsgd.sealing import is_sealed
from hedgerow.clients.instructions import whole
from hedgerow.clients.masking import masked_sum_handlers
from hedgerow.wire.calls import BatchHandler, Call
from hedgerow.wire.message_types import UPLOAD

__all__ = ["mean_of_rows", "sum_handlers"]


def sum_handlers(load: Callable[[Context], Party]) -> dict[str, BatchHandler]:
    """Return the handlers of secure sums; ``load`` finds a node's party."""
    return masked_sum_handlers(each(lambda call: _uploaded(call, load(call.context))), UPLOAD)


def _uploaded(call: Call, party: Party) -> RecordDict:
    """Answer with what the steps made: of JFL's pairs the mean."""
    config = config_of(call)
    is_sealed(call, config)
    memory = Memory.at(call.context, whole(config, "t", 0))
    hospital = party.role == "hospital"
    arrays = {key: memory.arrays[key] for key in (("head", "hospital") if hospital else ("device",))}
    if not hospital:
        arrays = {key: mean_of_rows(rows) if rows.ndim > 1 else rows for key, rows in arrays.items()}
    if (protected := ProtectedUpload.of(config)) is not None:
        if set(memory.start) != set(arrays):
            raise ValueError("upload-clip is in the message's config, and was not when the round began")
        arrays = protected(arrays, memory.start, memory.t, call)
    arrays = {key: mean_of_rows(rows) if rows.ndim > 1 else rows for key, rows in arrays.items()}
    told = MetricRecord({"num-examples": len(party.ids)})
    if memory.loss is not None and protected is None:
        told["loss"] = memory.loss
    Memory.forget(call.context)
    return RecordDict({**reply(arrays), "metrics": told})


def mean_of_rows(rows: Vector) -> Vector:
    """Return (1), summed in the order of ids, which is the order of whoever averages devices elsewhere."""
    total = np.zeros(rows.shape[1:])
    for own in rows:
        total += own
    mean: Vector = (total / len(rows)).astype(rows.dtype)
    return mean
