"""Federated evaluation, and the means of the metrics that nodes report."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low
from typing import Any

from flwr.app import Message, MessageType, MetricRecord, RecordDict
from numpy.typing import NDArray

from hedgerow.strategies.inbox import Inbox, checked_metrics, mean_metrics, weighted_metrics
from hedgerow.strategies.node import Node
from hedgerow.strategies.options import FederationSettings
from hedgerow.wire.records import only_record
from hedgerow.wire.seeds import Purpose, generator

# The metric names of a loss: hedgerow's, and those of Flower's examples.
_LOSSES = ("train-loss", "train_loss", "loss")


class FederatedEvaluation:
    """The evaluation of the global model at nodes, and the median losses of the last replies.

    A ``ratio`` limits a reply's weight to this multiple of the median weight; 0 for no limit.

    Parameters
    ----------
    settings : FederationSettings
        The strategy's options.
    """

    def __init__(self, settings: FederationSettings) -> None:
        self._settings = settings
        # Median losses that nodes reported in the last evaluation, and in the last training.
        self.evaluated_loss: float | None = None
        self.trained_loss: float | None = None
        self._inbox = Inbox([], "", lambda node, content: None)

    def drawn(self, present: Sequence[int], server_round: int) -> list[int]:
        """Return the partitions that evaluate in a round, ascending: at least one if any is online."""
        count = max(1, int(len(present) * self._settings.fraction_evaluate)) if present else 0
        stream = generator(self._settings.seed, round=server_round, purpose=Purpose.EVALUATION)
        drawn = stream.choice(len(present), count, replace=False).tolist() if count else []
        return [present[i] for i in sorted(drawn)]

    def instruct(
        self, nodes: Sequence[Node], content: RecordDict, server_round: int, ttl: float
    ) -> list[Message]:
        """Return the messages that ask nodes to evaluate."""
        key, group = self._settings.weighted_by_key, str(server_round)
        self._inbox = Inbox(nodes, group, lambda node, reply: checked_metrics(reply, key))
        return [
            Message(content, node.node_id, MessageType.EVALUATE, ttl=ttl, group_id=group) for node in nodes
        ]

    def aggregate(self, replies: Iterable[Message], ratio: float) -> MetricRecord | None:
        """Average the metrics of the valid replies; None without any."""
        contents = [reply.content for reply in self._inbox.accept(replies)]
        self.evaluated_loss = _median_loss(contents)
        own, key = self._settings.evaluate_metrics_aggr_fn, self._settings.weighted_by_key
        if not contents:
            return None
        return weighted_metrics(contents, key, ratio) if own is None else own(contents, key)

    def of_training(self, contents: list[RecordDict], ratio: float) -> MetricRecord:
        """Average the metrics of training replies, by ``train_metrics_aggr_fn`` or the weighted mean."""
        self.trained_loss = _median_loss(contents)
        own, key = self._settings.train_metrics_aggr_fn, self._settings.weighted_by_key
        if not contents:
            return MetricRecord()
        return weighted_metrics(contents, key, ratio) if own is None else own(contents, key)

    def of_columns(self, table: Mapping[str, NDArray[Any]], ratio: float) -> MetricRecord:
        """Return the weighted mean of training metrics in columns (K,), by name."""
        losses = next((table[key] for key in _LOSSES if key in table), None)
        self.trained_loss = None if losses is None else median_low(losses.tolist())
        key = self._settings.weighted_by_key
        return mean_metrics(table, key, ratio) if len(table[key]) else MetricRecord()


def _median_loss(contents: Iterable[RecordDict]) -> float | None:
    """Return the lower median of the reported losses; None if there is none."""
    losses = list[float]()
    for content in contents:
        metrics = only_record(content, MetricRecord, "bad metrics")
        loss = next((metrics[key] for key in _LOSSES if key in metrics), None)
        if isinstance(loss, int | float):
            losses.append(loss)
    return median_low(losses) if losses else None
