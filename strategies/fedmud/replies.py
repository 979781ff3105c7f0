"""What a reply must hold: the current base's version, a weight, the coded layers, and the rest."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from flwr.app import MetricRecord, RecordDict
from numpy.typing import NDArray

from hedgerow.strategies.federation import Federation, only_arrays
from hedgerow.strategies.fedmud.split_model import SplitModel
from hedgerow.strategies.fedmud.sync import Downlink
from hedgerow.strategies.inbox import Node, Reply, checked_metrics
from hedgerow.wire.checks import one_of
from hedgerow.wire.printable import quoted
from hedgerow.wire.records import PayloadError, only_record

__all__ = ["UP", "ReplyReader", "Uplink", "Weighting", "check_base", "mean_iterations"]

UP = "client->server"

Weighting = Literal["num-examples", "num-batches", "uniform"]
_WEIGHTINGS: tuple[Weighting, ...] = get_args(Weighting)

# What a reply tells of its node's base: no quantity to average.
_BATCHES = "num-batches"
_BOOKKEEPING = ("base-version", "need-base")


@dataclass(frozen=True)
class Uplink:
    """What a reply holds: its weight, its uncompressed part (d,), and what the method read of the rest."""

    weight: float
    rest: NDArray[Any]
    coded: Any


def check_base(downlink: Downlink, node: Node, content: RecordDict) -> None:
    """Refuse a reply from another base than the current one; its node is sent the base next time.

    Raises
    ------
    PayloadError
        With reason ``bad metrics``, ``need base`` or ``wrong base``.
    """
    if not downlink.log.base_bits:
        return
    metrics = only_record(content, MetricRecord, "bad metrics")
    lost, version = metrics.get("need-base"), metrics.get("base-version")
    if lost or version != downlink.log.version:
        downlink.forget(node.partition_id)
        if lost:
            raise PayloadError("need base", f"node {node.node_id} has lost its base")
        raise PayloadError("wrong base", f"base-version={version!r}, expected {downlink.log.version}")


class ReplyReader:
    """Takes a participant's reply apart, and says what it counts and costs.

    Parameters
    ----------
    federation : Federation
        Knows what clients told of their sizes first.
    weighting : {"num-examples", "num-batches", "uniform"}
        What a reply counts.

    Raises
    ------
    ValueError
        If ``weighting`` is none of the three.
    """

    def __init__(self, federation: Federation, weighting: Weighting) -> None:
        one_of("weighting", weighting, _WEIGHTINGS)
        self.federation = federation
        self.weighting = weighting

    def read(
        self, model: SplitModel, downlink: Downlink, server_round: int, node: Node, content: RecordDict
    ) -> Uplink:
        """Return what a reply holds; PayloadError for one that is not valid."""
        check_base(downlink, node, content)
        metrics = checked_metrics(content, self.federation.settings.weighted_by_key)
        if self.weighting != "uniform":
            metrics = checked_metrics(content, self.weighting)
        coded, rest = model.parts(only_arrays(content))
        uplink = Uplink(
            1.0 if self.weighting == "uniform" else float(metrics[self.weighting]),  # type: ignore[arg-type]
            rest,
            model.method.read(server_round, node.partition_id, coded),
        )
        self._hold(model, metrics, uplink)
        downlink.acknowledge(node.partition_id)
        return uplink

    def _hold(self, model: SplitModel, metrics: MetricRecord, uplink: Uplink) -> None:
        """Raise PayloadError for a reply that moves too far, or tells batches that nobody can have made."""
        batches, examples = metrics.get(_BATCHES, 0), metrics[self.federation.settings.weighted_by_key]
        if not isinstance(batches, int | float) or not 0 <= batches <= examples:  # type: ignore[operator]
            raise PayloadError("bad metrics", f"{_BATCHES}={quoted(batches)} of {quoted(examples)} examples")
        if not self.federation.settings.max_update_norm_ratio:
            return
        with np.errstate(over="ignore", invalid="ignore"):
            moved, coded = model.method.moved(uplink.coded)
        self.federation.check_update(uplink.rest, model.known_rest(), "rest")
        if coded.size:
            self.federation.bound("coded").check(moved, coded)

    def weight(self, reply: Reply) -> float:
        """Return what an accepted reply counts."""
        told: float = reply.value.weight
        if self.weighting == "uniform":
            return told
        key = self.federation.settings.weighted_by_key
        metrics = only_record(reply.content, MetricRecord, "bad metrics")
        # A batch holds an example at least, of those that the node claimed first.
        examples = self.federation.size_of(reply, float(metrics[key]))  # type: ignore[arg-type]
        return examples if self.weighting == "num-examples" else min(told, examples)

    def book(self, server_round: int, reply: Reply, nominal_bits: int) -> None:
        """Book an accepted reply; ``nominal_bits`` is the paper's count of it."""
        client, arrays = reply.node.partition_id, only_arrays(reply.content)
        self.federation.book_up(server_round, UP, client, 0, nominal_bits, arrays, reply)

    def metrics(self, contents: list[RecordDict]) -> MetricRecord:
        """Aggregate the metrics of accepted replies, as asked for."""
        metrics = self.federation.train_metrics(contents)
        if self.federation.settings.train_metrics_aggr_fn is None:
            for key in _BOOKKEEPING:
                metrics.pop(key, None)
        return metrics


def mean_iterations(contents: list[RecordDict], local_epochs: int) -> float:
    """Return the local iterations of the mean participant in a round; 0 where nobody replied."""
    records = [only_record(content, MetricRecord, "bad metrics") for content in contents]
    batches = [float(record.get(_BATCHES, 0)) for record in records]  # type: ignore[arg-type]
    return local_epochs * sum(batches) / max(1, len(batches))
