"""From training to the reply: training, mods, compression, encoding and masks, in this order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from hedgerow.clients.frozen import check_unchanged
from hedgerow.clients.handlers import Answer, outcome
from hedgerow.clients.local_layers import each_its_own, keep_layers, kept_here
from hedgerow.clients.mods.compress import asks_for_compression, encoded
from hedgerow.clients.mods.mask import PlainMetrics, StartOf, masked_sum_handlers, whole_model
from hedgerow.clients.mods.update import Trainer, TrainingMod, TrainResult, changed
from hedgerow.clients.sent_models import only_arrays, state_rows
from hedgerow.wire.calls import BatchHandler, Call, Delivery, InColumns
from hedgerow.wire.frozen import FROZEN_CHECKSUM


@dataclass(frozen=True)
class TrainHandler:
    """Training whose replies are updates; ``BatchClientApp`` takes it in place of a handler.

    A message whose config has ``compressor`` gets a compressed update with error feedback, see
    ``compress_updates``; one with the record ``masked-sum`` is answered within a secure sum, see
    ``masked_sum_handlers``; any other gets ``arrays`` and ``metrics``.

    Parameters
    ----------
    learn : Callable[[Sequence[Call]], Sequence[TrainResult or RecordDict or Exception]]
        Trains nodes.
    start_of : Callable[[Call], Mapping[str, NDArray]] (default: the instruction's one ArrayRecord)
        Returns the arrays that a secure sum adds up the changes of.
    plain_metrics : Callable[[Call], Mapping[str, int]] (default: nothing)
        Returns the metrics sent in plain next to a secure sum.
    home_of : Callable[[Call], Mapping[str, Tensor]] (default: nothing)
        Returns the frozen arrays of ``learn``'s states, see ``clients/frozen.py``.
    at_once : bool (default: True)
        Whether to answer the engine's exchanges in columns; false if nodes fail one by one, or report
        different metrics.
    """

    learn: Trainer
    start_of: StartOf = whole_model
    plain_metrics: PlainMetrics = lambda _: {}
    home_of: Callable[[Call], Mapping[str, Tensor]] = lambda _: {}
    at_once: bool = True

    def handlers(self, message_type: str, mods: Sequence[TrainingMod]) -> dict[str, BatchHandler]:
        """Return the handlers of messages."""
        answer = partial(encoded, changed(mods, self._learn))
        return masked_sum_handlers(answer, message_type, self.start_of, self.plain_metrics)

    def _learn(self, calls: Sequence[Call]) -> Sequence[TrainResult | Answer]:
        """Train nodes; what they learnt has no frozen array, and no layer that they keep."""
        if not any(FROZEN_CHECKSUM in record for call in calls for record in call.content.values()):
            return self.learn(calls)
        return [
            outcome(self._travelling, call, one) if isinstance(one, TrainResult) else one
            for call, one in zip(calls, self.learn(each_its_own(calls)), strict=True)
        ]

    def _travelling(self, call: Call, learnt: TrainResult) -> TrainResult:
        return learnt.without(self._stays(call, learnt))

    def _stays(self, call: Call, learnt: TrainResult) -> Mapping[str, Tensor]:
        """Return the arrays that stay at a node: check the frozen ones, and keep its own layers."""
        home = self.home_of(call)
        if own := kept_here(call, home):
            keep_layers(call, {key: learnt.state[key] for key in own})
        check_unchanged({key: value for key, value in home.items() if key not in own}, learnt.state)
        return home

    def in_columns(self, message_type: str, deliveries: Sequence[Delivery]) -> InColumns:
        """Answer for all nodes at once.

        ValueError if that needs messages: for compressed replies, or a model that is not one ArrayRecord. Any
        error of a node's training is raised.
        """
        keys = [list(only_arrays(group.content)) for group in deliveries]
        if any(asks_for_compression(group.content) for group in deliveries):
            raise ValueError("compressed updates need messages")
        calls = [
            Call(group.content, context, message_type) for group in deliveries for context in group.contexts
        ]
        frozen = any(FROZEN_CHECKSUM in record for group in deliveries for record in group.content.values())
        learnt: list[TrainResult] = []
        for one in self.learn(each_its_own(calls) if frozen else calls):
            if not isinstance(one, TrainResult):
                raise one if isinstance(one, Exception) else ValueError("a node has learnt nothing")
            learnt.append(one)
        if frozen:
            for call, one in zip(calls, learnt, strict=True):
                self._stays(call, one)
        metrics = {key: np.array([one.metrics[key] for one in learnt]) for key in learnt[0].metrics}
        rows = state_rows([one.state for one in learnt], keys[0], [one.start for one in learnt])
        return InColumns(rows if rows.is_cuda else rows.numpy(), metrics)
