"""From training to the reply: learn, then mods, compression, encoding and masks, in this order."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from hedgerow.clients.instructions import only_arrays, state_rows
from hedgerow.clients.mods.compress import asks_for_compression, encoded
from hedgerow.clients.mods.mask import Beside, PartOf, masked_sum_handlers, whole_instruction
from hedgerow.clients.mods.update import Learn, Learnt, UpdateMod, changed
from hedgerow.wire.calls import BatchHandler, Call, InColumns, Told

__all__ = ["Learning"]


@dataclass(frozen=True)
class Learning:
    """Training whose replies are updates: what ``BatchClientApp`` takes in place of a handler.

    A message whose config has ``compressor`` is answered with a compressed change and error feedback, see
    ``compress_updates``; one with the record ``masked-sum`` within a secure sum, see ``masked_sum_handlers``;
    any other with ``arrays`` and ``metrics``.

    Parameters
    ----------
    learn : Callable[[Sequence[Call]], Sequence[Learnt or RecordDict or Exception]]
        Trains nodes.
    part_of : Callable[[Call], SumPart] (default: the whole instruction, and its one ArrayRecord)
        What a node's part in a secure sum is of.
    beside : Callable[[Call], Mapping[str, int]] (default: nothing)
        The metrics that are told beside such a sum.
    at_once : bool (default: True)
        Whether the engine's exchanges in columns are answered too. Not where nodes fail one by one, or tell
        different metrics.
    """

    learn: Learn
    part_of: PartOf = whole_instruction
    beside: Beside = lambda _: {}
    at_once: bool = True

    def handlers(self, message_type: str, mods: Sequence[UpdateMod]) -> dict[str, BatchHandler]:
        """Return the handlers of messages."""
        answer = partial(encoded, changed(mods, self.learn))
        return masked_sum_handlers(answer, message_type, self.part_of, self.beside)

    def in_columns(self, message_type: str, told: Sequence[Told]) -> InColumns:
        """Answer for all nodes at once.

        Raises
        ------
        ValueError
            If messages must go: replies are to be compressed, or a model is not one ArrayRecord.
        Exception
            Whatever a node's training raises.
        """
        keys = [list(only_arrays(group.content)) for group in told]
        if any(asks_for_compression(group.content) for group in told):
            raise ValueError("compressed changes go in messages")
        calls = [Call(group.content, context, message_type) for group in told for context in group.contexts]
        learnt: list[Learnt] = []
        for one in self.learn(calls):
            if not isinstance(one, Learnt):
                raise one if isinstance(one, Exception) else ValueError("a node has learnt nothing")
            learnt.append(one)
        metrics = {key: np.array([one.metrics[key] for one in learnt]) for key in learnt[0].metrics}
        rows = state_rows([one.state for one in learnt], keys[0])
        return InColumns(rows if rows.is_cuda else rows.numpy(), metrics)
