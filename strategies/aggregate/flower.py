"""A strategy of Flower's as the aggregator of a method: any that averages whole models.

The method sends, books and bounds as ever; Flower's strategy gets the valid replies, and what it returns is
the new model. So a baseline of Flower's has the data, batches, ledger and records of the suite's methods.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from inspect import signature
from logging import ERROR, WARNING, getLogger
from typing import Any

import flwr.serverapp.strategy as flower
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp.strategy import FedAvg, Strategy

from hedgerow.strategies.aggregate.mean import FixedResult, Mean
from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Exchange, RoundFailedError, Steps, Vector
from hedgerow.strategies.options import check_options
from hedgerow.strategies.parts.part import Part
from hedgerow.wire.carried import Carried
from hedgerow.wire.checks import did_you_mean, named_call
from hedgerow.wire.records import Layout, PayloadError, to_record

_LOGGER = getLogger("flwr")
# How a method's setting names one: ``flwr:FedYogi(eta=0.01)``.
PREFIX = "flwr:"
# Arguments of Flower's FedAvg, which the method decides: who trains, which keys records have.
_DECIDED = frozenset(signature(FedAvg).parameters)


class FlowerAggregation(Part):
    """Aggregates replies by a strategy of Flower's, such as FedYogi, Krum or your own.

    It sees each reply as a model with metrics, whose ``num-examples`` is the node's weight in the method. It
    chooses no nodes. Where it skips a round, the model stays; where it raises an error, the round is repeated
    and then ends the run. Its attributes are in checkpoints, and a failed round leaves them unchanged.

    Parameters
    ----------
    strategy : flwr.serverapp.strategy.Strategy
        A new strategy. It must be content with a single node (``min_available_nodes=1``).
    reads : Collection[str] (default: ())
        Keys of instructions that it may add, because the method's nodes read them.
    """

    name = "flower"
    # It needs each node's metrics.
    sees_columns = False
    # In a buffer: rules such as Krum count nodes.
    each_once = True
    with_sums = False

    def __init__(self, strategy: Strategy, reads: Collection[str] = ()) -> None:
        self._first, self.strategy, self._reads = strategy, deepcopy(strategy), frozenset(reads)
        # An attempt of a round, and the strategy after it.
        self._next: tuple[RoundContext | None, Strategy] = None, strategy
        self._checked = False

    @classmethod
    def parse(cls, text: str, reads: Collection[str] = ()) -> FlowerAggregation:
        """Return the aggregator of a text such as ``FedYogi(eta=0.01)``; ValueError if it is not valid."""
        name, values = named_call(text)
        known = {key: kind for key in flower.__all__ if issubclass(kind := getattr(flower, key), FedAvg)}
        if (kind := known.get(name)) is None:
            near = did_you_mean(name, known)
            raise ValueError(f"no strategy of Flower's that averages models is {name!r}; {near}".rstrip("; "))
        valid = [key for key in signature(kind).parameters if key not in _DECIDED]
        if other := next((key for key in values if key not in valid), None):
            takes = f"takes {', '.join(valid)}" if valid else "takes no values"
            raise ValueError(f"{name} {takes} here, got {other}; {did_you_mean(other, valid)}".rstrip("; "))
        try:
            check_options(kind, values)
            with _unnoticed():
                strategy = kind(**values, min_train_nodes=1, min_available_nodes=1)
        except (TypeError, ValueError) as error:
            raise ValueError(str(error)) from None
        return cls(strategy, reads)

    def means(self, exchange: Exchange, run: RoundContext) -> Steps[Mapping[int, Mean]]:
        """Return what the strategy makes of the replies of the one pool."""
        if len(exchange.asks) != 1:
            raise ValueError(f"a strategy of Flower's averages one pool of replies, got {len(exchange.asks)}")
        (ask,) = exchange.asks
        assert ask.model is not None, "the exchange has models"
        self.try_out(len(ask.nodes))
        strategy = deepcopy(self.strategy)
        self._next = run, strategy
        layout = exchange.layout(run.federation)
        # Counters are no part of Flower's means: they would come back as fractions.
        floats = layout.part(set(layout.keys) - layout.integers.keys())
        nodes, contents, weights, models = list[int](), list[RecordDict](), list[float](), list[Vector]()
        for columns in (yield exchange):
            nodes += columns.nodes
            own = exchange.weigh(run, columns) if exchange.weigh else columns.claimed
            weights += own
            for row, reply, weight in zip(columns.rows, columns.replies, own, strict=True):
                model = ask.model + row if exchange.coding.changes else row
                (metrics,) = reply.metrics.metric_records.values()
                key = run.federation.settings.weighted_by_key
                contents.append(_reply(floats.unflatten(model[layout.floats]), {**metrics, key: weight}))
                models.append(model)
        if not nodes:
            return {}
        try:
            found = _aggregated(strategy, run.round, floats.unflatten(ask.model[layout.floats]), contents)
        except Exception as error:
            log(WARNING, "%s: %s", type(strategy).__name__, error)
            raise RoundFailedError from error
        if found is None:
            log(WARNING, "%s skips round %d: the model stays.", type(strategy).__name__, run.round)
            return {}
        new = np.empty(layout.size)
        new[layout.floats] = floats.flatten(found, np.float64)
        for where in layout.integers.values():
            new[where] = np.average([model[where] for model in models], axis=0, weights=weights)
        return {ask.pool: FixedResult(nodes, sum(weights), new)}

    def forget(self) -> None:
        """Start anew."""
        self.strategy = deepcopy(self._first)

    def ended(self, run: RoundContext) -> None:
        """Keep the strategy of a completed round."""
        if self._next[0] is run:
            self.strategy = self._next[1]

    def state_dict(self) -> dict[str, Any]:
        """Return the strategy's attributes that the run has changed."""
        return Carried(self._first).state_dict(self.strategy)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        self.forget()
        Carried(self.strategy).load_state_dict(state)

    def describe(self) -> list[str]:
        """Return a line for the log."""
        return [f"Aggregation: {type(self.strategy).__name__} of Flower"]

    def try_out(self, replies: int) -> None:
        """Try the strategy on some models, before the first round sends any; within a run, or its identity.

        Raises
        ------
        ValueError
            If it makes no model of this number of models, adds instructions for its nodes, chooses among
            them, or keeps what a checkpoint cannot hold.
        """
        if self._checked:
            return
        self._checked, replies = True, max(1, replies)
        who, tried = type(self._first).__name__, deepcopy(self._first)
        start = to_record({"w": np.zeros((2, 3), np.float32), "b": np.zeros(2, np.float32)})
        layout, config = Layout.of(start), ConfigRecord()
        draws = np.random.default_rng(0).normal(size=(replies, layout.size)).astype(np.float32)
        metrics = {"num-examples": 1.0, "train-loss": 1.0}
        contents = [_reply(layout.unflatten(row), metrics) for row in draws]
        try:
            found = _aggregated(tried, 1, start, contents, config)
            valid = found is not None and layout.flatten(found, np.float32) is not None
        except PayloadError:
            valid = False
        except Exception as error:
            raise ValueError(f"{who} cannot aggregate {replies} models: {error}") from error
        if not valid:
            raise ValueError(f"{who} makes no model of {replies} models")
        if added := sorted(config.keys() - {"server-round"} - self._reads):
            raise ValueError(
                f"{who} adds {added[0]!r} to its messages, which the nodes of this method do not read"
            )
        if lost := Carried(tried).cannot():
            raise ValueError(f"{who} keeps what a checkpoint cannot hold: {', '.join(lost)}")


def _reply(arrays: ArrayRecord, metrics: Mapping[str, Any]) -> RecordDict:
    return RecordDict({"arrays": arrays, "metrics": MetricRecord({**metrics})})


def _aggregated(
    strategy: Strategy,
    server_round: int,
    arrays: ArrayRecord,
    contents: Sequence[RecordDict],
    config: ConfigRecord | None = None,
) -> ArrayRecord | None:
    """Let a strategy send a model, and return the one that it makes of the replies."""
    config, nodes = ConfigRecord() if config is None else config, _Nodes(len(contents))
    with _unnoticed():
        sent = list(strategy.configure_train(server_round, arrays, config, nodes))  # type: ignore[arg-type]
        to = {message.metadata.dst_node_id: message for message in sent}
        if len(to) != len(contents):
            raise ValueError(f"it sends messages to {len(to)} of {len(contents)} nodes")
        replies = [Message(content, reply_to=to[at]) for at, content in enumerate(contents, 1)]
        # Flower collects garbage for every reply: what is frozen is not searched each time.
        # What the program froze itself stays frozen.
        if own := gc.get_freeze_count() == 0:
            gc.freeze()
        try:
            return strategy.aggregate_train(server_round, replies)[0]
        finally:
            if own:
                gc.unfreeze()


class _Nodes:
    """A grid of nodes for ``configure_train``, numbered from 1."""

    def __init__(self, count: int) -> None:
        self._ids, self._asked = range(1, count + 1), 0

    def get_node_ids(self) -> Sequence[int]:
        """Return the ids; ValueError for a strategy that waits for more."""
        self._asked += 1
        if self._asked > 2:
            raise ValueError(f"it waits for more than {len(self._ids)} nodes")
        return self._ids


@contextmanager
def _unnoticed() -> Iterator[None]:
    """Leave Python's generator, from which Flower draws the order of nodes, and its log without its own."""
    state, level = random.getstate(), _LOGGER.level
    _LOGGER.setLevel(max(level, ERROR))
    try:
        yield
    finally:
        random.setstate(state)
        _LOGGER.setLevel(level)


# The values of a setting that name one of Flower's strategies: prefix, words, check.
FLOWER_TEXT = PREFIX, "a strategy of Flower, such as 'flwr:FedYogi(eta=0.01)'", FlowerAggregation.parse
