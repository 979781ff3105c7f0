"""Compressed replies with error feedback, the server's side.

Paper: A. Beikmohammadi, S. Khirirat, S. Magnússon, "On the Convergence of Federated Learning Algorithms
without Data Similarity", Algorithms 2 and 4, step 5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Coding, Exchange, Models, Row, Vector
from hedgerow.strategies.parts.acknowledgements import Acknowledgements
from hedgerow.wire.compress import (
    Compressor,
    Identity,
    compressed_part,
    dense_part,
    in_round,
    record_payload,
    summed_arrays,
    unpack_update,
)
from hedgerow.wire.printable import quoted
from hedgerow.wire.records import Layout, to_record


@dataclass(frozen=True)
class CompressedChanges:
    """Replies are compressed changes of the model; running statistics and counters are not compressed.

    Parameters
    ----------
    codec : Compressor
        The round's codec.
    """

    codec: Compressor
    changes = True

    def read(self, record: ArrayRecord, sent: Vector, layout: Layout, node: int) -> Row:
        """Return the change (M,), and the bits of its payload."""
        update, dense, bits = self.unpacked(record, layout)
        part = compressed_part(layout)
        change = np.zeros_like(sent)
        for key, where in part.slices.items():
            change[layout.slices[key]] = update[where]
        for key, values in dense.items():
            change[layout.slices[key]] = layout.entries(key, values, sent.dtype) - sent[layout.slices[key]]
        return Row(change, bits)

    def unpacked(
        self, record: ArrayRecord, layout: Layout
    ) -> tuple[NDArray[np.float32], dict[str, NDArray[Any]], int]:
        """Return Q(m) (d,), the uncompressed arrays by key, and the payload's bits."""
        update, dense = unpack_update(self.codec, layout, record)
        payload = {key: values for key, values in record_payload(record).items() if key not in dense}
        return update, dense, self.codec.bits(compressed_part(layout).size, payload)

    def bits(self, layout: Layout) -> int:
        """Return the bits of a payload."""
        return self.codec.bits(compressed_part(layout).size)

    def summed(self, model: Vector, layout: Layout) -> ArrayRecord:
        """Return the entries that all nodes send."""
        return to_record(summed_arrays(self.codec, record_payload(layout.unflatten(model))))

    def change(self, numbers: NDArray[np.float64], layout: Layout) -> NDArray[np.float64]:
        """Return the change (M,) from its coded numbers."""
        part, rest = compressed_part(layout), dense_part(layout)
        change, kept = np.zeros(layout.size), numbers.size - rest.size
        update = self.codec.decode({"values": numbers[:kept].astype(np.float32)}, part.size)
        for key, where in part.slices.items():
            change[layout.slices[key]] = update[where]
        for key, where in rest.slices.items():
            change[layout.slices[key]] = numbers[kept:][where]
        return change


class ErrorFeedback(Acknowledgements):
    """Asks nodes for compressed replies; with error feedback, nodes keep what was cut off.

    Parameters
    ----------
    compressor : Compressor
        ``Identity`` for whole models.
    error_feedback : bool
        Whether nodes keep the compression error and add it to their next reply.
    """

    name = "error-feedback"

    def __init__(self, compressor: Compressor, error_feedback: bool) -> None:
        if isinstance(compressor, type) or not callable(getattr(compressor, "encode_stack", None)):
            raise ValueError(
                "compressor must be an object such as parse_compressor('topk(0.01)') of hedgerow.wire, got "
                f"{quoted(compressor)}"
            )
        self.compressor, self.error_feedback = compressor, error_feedback
        super().__init__()

    def coding(self, round_index: int) -> Coding:
        """Return the coding of the replies of a round (from 0)."""
        codec = in_round(self.compressor, round_index)
        return Models() if isinstance(codec, Identity) else CompressedChanges(codec)

    def ask(self, exchange: Exchange, run: RoundContext) -> Exchange:
        """Ask for compressed replies to a training exchange."""
        if exchange.kind != "train":
            return exchange
        k, exchange = run.round - 1, super().ask(exchange, run)
        return replace(exchange, config={**exchange.config, **self.asked(k)}, coding=self.coding(k))

    @property
    def keeps_state(self) -> bool:
        """Whether nodes keep an error memory."""
        return self.error_feedback and not isinstance(self.compressor, Identity)

    def asked(self, round_index: int) -> dict[str, str | bool | int]:
        """Return the config entries that ask for a round's compressed replies."""
        compressor = str(in_round(self.compressor, round_index))
        return {"compressor": compressor, "error-feedback": self.error_feedback, "round-index": round_index}

    def describe(self) -> list[str]:
        """Describe the compression of replies."""
        kept = "error feedback" if self.keeps_state else "no error feedback"
        return [f"ErrorFeedback: {self.compressor}, {kept}"]
