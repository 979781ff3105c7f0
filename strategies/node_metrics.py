"""The nodes' own evaluations of a model, summed up: means, the worst nodes, and each node's."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import MessageType, RecordDict
from flwr.serverapp import Grid

from hedgerow.strategies.exchange import Question, answered
from hedgerow.strategies.inbox import Reply, checked_metrics
from hedgerow.strategies.node import Node
from hedgerow.strategies.strategy import FederatedStrategy
from hedgerow.wire.limits import MAX_EXAMPLES, MAX_METRIC
from hedgerow.wire.records import PayloadError, to_record


class NodeEvaluation:
    """Evaluates the model of a run at all nodes that are online, each with its own layers.

    Parameters
    ----------
    grid : Grid
        Flower's grid.
    strategy : FederatedStrategy
        The run's.
    """

    def __init__(self, grid: Grid, strategy: FederatedStrategy) -> None:
        self._grid, self._federation = grid, strategy.federation

    def __call__(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``node_metrics`` of a model's state dict, with the spread; empty if no node answers."""
        federation, arrays = self._federation, to_record(state)
        roster = federation.gather(self._grid)
        if federation.layout is None:
            federation.vector(arrays)
        # A node at work in a buffered round would answer late.
        nodes = [roster.nodes[i] for i in roster.present if i not in federation.busy]
        question = Question(
            MessageType.EVALUATE,
            "evaluate",
            dict.fromkeys(nodes, federation.evaluated({}, arrays)),
            measured,
            ended=lambda inbox: None,
            booked=False,
        )
        replies = answered(federation, self._grid, federation.completed, question)
        return node_metrics([*replies], spread=True)


def node_metrics(replies: Sequence[Reply], *, spread: bool = False) -> dict[str, Any]:
    """Return what nodes have measured, as one record; empty without replies.

    Means weighted by samples: ``loss``, ``accuracy``, for two classes ``auc``, and ``held-out``, the
    share of the samples on which no node trains. Of the worst node: ``worst-loss``,
    ``worst-accuracy``. Of each node, in the order of partition ids: ``node-ids``,
    ``node-examples``, ``node-loss``, ``node-accuracy``.
    With ``spread``: ``worst-tenth-accuracy``, the mean of the worst tenth of the nodes, at least one, and
    ``accuracy-spread``, the standard deviation over nodes.
    """
    if not replies:
        return {}
    found = [reply.value for reply in replies]
    weights = [float(one["num-examples"]) for one in found]

    def mean(key: str) -> float:
        there = [(one[key], weight) for one, weight in zip(found, weights, strict=True) if key in one]
        values, of = zip(*there, strict=True)
        return float(np.average(values, weights=of))

    metrics: dict[str, Any] = {"loss": mean("loss"), "accuracy": mean("accuracy")}
    metrics |= {key: mean(key) for key in ("auc", "held-out") if any(key in one for one in found)}
    if spread:
        tenth = -(-len(found) // 10)
        metrics["worst-tenth-accuracy"] = float(np.mean(sorted(one["accuracy"] for one in found)[:tenth]))
        metrics["accuracy-spread"] = float(np.std([one["accuracy"] for one in found]))
    return {
        **metrics,
        "worst-loss": max(one["loss"] for one in found),
        "worst-accuracy": min(one["accuracy"] for one in found),
        "node-ids": [reply.node.partition_id for reply in replies],
        "node-examples": [int(weight) for weight in weights],
        "node-loss": [one["loss"] for one in found],
        "node-accuracy": [one["accuracy"] for one in found],
    }


def measured(_: Node, content: RecordDict) -> dict[str, float]:
    """Read the metrics of a node's evaluation; PayloadError for any out of range."""
    metrics = checked_metrics(content, "num-examples")
    found: dict[str, float] = {}
    shares = dict.fromkeys(("accuracy", "auc", "held-out"), 1.0)
    for key, most in {"num-examples": MAX_EXAMPLES, "loss": MAX_METRIC, **shares}.items():
        value = metrics.get(key)
        if value is None and key in ("auc", "held-out"):
            continue
        least = 0.0 if key in shares else -MAX_METRIC
        if not isinstance(value, int | float) or not least <= value <= most:
            raise PayloadError("bad metrics", f"{key} is out of range")
        found[key] = float(value)
    return found
