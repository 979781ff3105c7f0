"""The server's side of nodes with their own data; the server has none.

The nodes' introductions report the shape of a sample and the number of classes, from which the model is
built. One exchange pools the moments of the features; another sends all nodes the mean and deviation for
their standardisation. Nodes evaluate the model, each on its held-out samples.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import INFO, WARNING
from math import isfinite
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from numpy.typing import NDArray

from hedgerow.strategies.inbox import Inbox, Reply, collect
from hedgerow.strategies.node import Node
from hedgerow.strategies.node_metrics import measured, node_metrics
from hedgerow.strategies.registry import Registry
from hedgerow.strategies.roster import Roster
from hedgerow.strategies.round_end import RoundEnd
from hedgerow.strategies.strategy import FederatedStrategy
from hedgerow.strategies.whoami import RosterError, raised_words
from hedgerow.wire.ledger import HUB_TO_NODE, NODE_TO_HUB
from hedgerow.wire.limits import MAX_EXAMPLES, MAX_METRIC
from hedgerow.wire.message_types import STANDARDISE, STATISTICS
from hedgerow.wire.records import PayloadError, only_record, payload_bytes, to_record

Floats = NDArray[np.float64]
Moments = tuple[int, Floats, Floats]

# Seconds to wait for the nodes at the start; the default of ``FederationOptions``.
_MAX_WAIT = 120.0
# How often a node's statistics are asked for, if no reply comes.
_ATTEMPTS = 2
# Nodes named in an error.
_MOST_NAMED = 5
# A deviation below this share of the mean is rounding of a constant in float64.
_RESOLUTION = 1e-14
# The reason for sending a node the standardisation again: its ClientApp raised.
_LOST = "error 2"


class OwnNodes:
    """The nodes of a run that have their own data.

    Parameters
    ----------
    grid : Grid
        Flower's grid.
    roster : Roster
        The nodes; RosterError unless they have reported their data's shapes.
    timeout : float
        Seconds to wait for replies.

    Attributes
    ----------
    input_shape, num_classes, dtype
        Of the nodes' data.
    """

    def __init__(self, grid: Grid, roster: Roster, timeout: float) -> None:
        self.grid, self.roster, self.timeout = grid, roster, timeout
        shape, classes = roster.shapes.input_shape, roster.shapes.num_classes
        if shape is None or classes is None:
            raise RosterError(
                "No node has reported the shape of its data. With partition = 'own' node configs must name "
                "the data: --node-config 'data=\"/srv/x.npz\"'."
            )
        self.input_shape, self.num_classes = shape, classes
        self.dtype = roster.shapes.dtype or ""
        # ``mean`` and ``std`` of each feature.
        self._standardisation: dict[str, list[float]] | None = None
        self._informed: set[int] = set()
        # The names of the nodes whose statistics it is made of.
        self._covered: set[str | None] = set()
        self._transfers: list[tuple[str, int, int, int]] = []
        self._strategy: FederatedStrategy | None = None

    @classmethod
    def gather(
        cls,
        grid: Grid,
        expected: int,
        timeout: float,
        *,
        quorum: int | None = None,
        features: Callable[[tuple[int, ...]], int] | None = None,
        earlier: Mapping[str, Any] | None = None,
        registry: Registry | None = None,
    ) -> "OwnNodes":
        """Wait for the nodes, query the shapes of their data, and standardize these.

        Parameters
        ----------
        grid, timeout
            As above.
        expected : int
            Number of places, >= 1.
        quorum : int or None (default: None)
            How many nodes are enough, >= 1; None for all.
        features : Callable[[tuple[int, ...]], int] or None (default: None)
            Returns the number of separately standardized features for a sample shape; None for no
            standardization.
        earlier : Mapping[str, Any] or None (default: None)
            The result of ``about`` in a resumed run.
        registry : Registry or None (default: None)
            The nodes that may take part; None accepts any node.

        Raises
        ------
        RosterError
            If too few nodes come, none reports its data's shapes, or one does not report its moments.
        """
        roster = Roster.gather(grid, expected, _MAX_WAIT, quorum=quorum, registry=registry)
        nodes = cls(grid, roster, timeout)
        if features is not None:
            nodes.standardise(features(nodes.input_shape), earlier)
        return nodes

    @property
    def sizes(self) -> list[int]:
        """The numbers of training samples of the nodes that have any."""
        return [node.num_examples for node in self._present() if node.num_examples]

    def about(self) -> dict[str, Any]:
        """Return the description of the nodes' data for a run's record."""
        return {
            "input-shape": list(self.input_shape),
            "num-classes": self.num_classes,
            "nodes": {str(node.partition_id): node.name for node in self._present()},
            **(self._standardisation or {}),
        }

    @property
    def samples(self) -> dict[str, str]:
        """On what ``evaluate`` measures, for a run's record; ``held-out`` is the share of nodes' samples."""
        return {"*": "by the nodes, mean weighted by samples"}

    # Standardisation.

    def standardise(self, features: int, earlier: Mapping[str, Any] | None = None) -> None:
        """Pool the moments of all nodes' features, and send the result to them; book both.

        ``features`` is the number of separately standardized ones, >= 1; integers have none. A resumed run
        sends the values of ``earlier``, the result of ``about``. RosterError if a node does not report its
        moments: it would train with the constants of others.
        """
        if self.dtype.startswith("int"):
            log(INFO, "The nodes' samples are integers, which are not standardised.")
            return
        if earlier is not None and "mean" in earlier:
            self._standardisation = {key: list(earlier[key]) for key in ("mean", "std")}
            self._covered = {*earlier["nodes"].values()}
        else:
            content = RecordDict({"config": ConfigRecord()})
            nodes, lost = self._present(), dict[int, str]()
            replies: list[Reply] = []
            for _ in range(_ATTEMPTS):  # a message may be lost
                there = {reply.node.partition_id for reply in replies} | lost.keys()
                left = [node for node in nodes if node.partition_id not in there]
                replies += self._ask(
                    left, content, STATISTICS, "0", lambda _, reply: _moments(reply, features), lost
                )
            replies.sort(key=lambda reply: reply.node.partition_id)
            if len(replies) < len(nodes):
                there = {reply.node.partition_id for reply in replies}
                raise RosterError(_unpooled([node for node in nodes if node.partition_id not in there], lost))
            mean, std = pooled([reply.value for reply in replies])
            self._standardisation = {"mean": mean.tolist(), "std": std.tolist()}
            self._covered = {node.name for node in nodes}
        self._send_standardisation([node.node_id for node in self._present()])

    def _send_standardisation(self, node_ids: Iterable[int]) -> None:
        content = RecordDict({"standardise": ConfigRecord({**(self._standardisation or {})})})
        nodes = [node for node in self._present() if node.node_id in set(node_ids)]
        if late := [str(node.name) for node in nodes if node.name not in self._covered]:
            log(WARNING, "Standardised by statistics that do not include their data: %s", ", ".join(late))
            self._covered |= {*late}
        replies = self._ask(nodes, content, STANDARDISE, "0", lambda _, reply: reply)
        self._informed |= {reply.node.node_id for reply in replies}

    def _on_round_end(self, end: RoundEnd) -> None:
        """Book transfers; send the standardisation to nodes that are new or have lost it."""
        strategy = self._strategy
        if strategy is None:
            return
        for link, source, target, size in self._transfers:
            strategy.ledger.book(end.round, link, source, target, 8 * size, size)
        self._transfers.clear()
        if self._standardisation is not None:
            online = {node.node_id for node in self._present()}
            self._send_standardisation(online if end.rejected.get(_LOST) else online - self._informed)

    def strategy(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Return a factory of these nodes' strategy that wraps ``make``; both take ``on_round_end``."""

        def made(on_round_end: Sequence[Callable[[RoundEnd], None]] = ()) -> Any:
            strategy = make(on_round_end=[self._on_round_end, *on_round_end])
            self._strategy = strategy
            return strategy

        return made

    # Evaluation.

    def evaluate(self, arrays: ArrayRecord) -> dict[str, Any]:
        """Return a model's metrics on the held-out samples of the nodes that answer; empty if none does.

        See ``node_metrics``.
        """
        strategy, content = self._strategy, RecordDict({"arrays": arrays, "config": ConfigRecord()})
        own_layers = strategy is not None and bool(strategy.settings.local_layers)
        if strategy is not None and own_layers:
            content = strategy.federation.evaluated({}, arrays)
        replies = self._ask(self._present(), content, MessageType.EVALUATE, "evaluate", measured)
        return node_metrics(replies, spread=own_layers)

    def measure(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Evaluate a model's state dict, see ``evaluate``."""
        return self.evaluate(to_record(state))

    # Messages.

    def _present(self) -> list[Node]:
        """Return the online nodes with data, in the order of partition ids."""
        roster = self.roster
        if self._strategy is not None:
            roster = self._strategy.federation.gather(self.grid)
        return [
            node for node in roster.nodes if node.node_id in roster.online and node.input_shape is not None
        ]

    def _ask(
        self,
        nodes: Sequence[Node],
        content: RecordDict,
        message_type: str,
        group: str,
        check: Callable[[Node, RecordDict], Any],
        lost: dict[int, str] | None = None,
    ) -> list[Reply]:
        """Return the valid replies; ``lost`` gets the reasons of the others, by partition id."""
        if not nodes:
            return []
        exchange = Inbox(nodes, group, check)
        messages = [
            Message(content, node.node_id, message_type, ttl=self.timeout, group_id=group) for node in nodes
        ]
        replies = list(exchange.accept(collect(self.grid, messages, self.timeout)))
        if message_type != MessageType.EVALUATE:
            size = payload_bytes(content)
            self._transfers += [(HUB_TO_NODE, 0, node.partition_id, size) for node in nodes]
            self._transfers += [
                (NODE_TO_HUB, reply.node.partition_id, 0, payload_bytes(reply.content)) for reply in replies
            ]
        if lost is not None:
            errors = {i: raised_words(str(e.reason or "")) for i, e in exchange.report.errors.items()}
            lost |= dict.fromkeys(exchange.refused, "its statistics are not valid") | errors
        return replies


def pooled(moments: Sequence[Moments]) -> tuple[Floats, Floats]:
    """Return mean and standard deviation of each feature over all nodes; a constant feature has deviation 1.

    Each node reports its count >= 1, the means (features,), and the sums of squared deviations, which are
    combined by Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances".
    """
    count, mean, squares = moments[0]
    for n, m, s in moments[1:]:
        total, delta = count + n, m - mean
        mean = mean + delta * (n / total)
        squares = squares + s + delta**2 * (count / total * n)
        count = total
    std = np.sqrt(squares / count)
    constant = std <= np.maximum(_RESOLUTION * np.abs(mean), 1 / MAX_METRIC)
    return mean, np.where(constant, 1.0, std)


def _unpooled(nodes: Sequence[Node], lost: Mapping[int, str]) -> str:
    reasons = [
        f"node {node.name!r}: {lost.get(node.partition_id, 'no reply')}" for node in nodes[:_MOST_NAMED]
    ]
    more = f", and {len(nodes) - _MOST_NAMED} more" if len(nodes) > _MOST_NAMED else ""
    return (
        "standardise = 'federated' needs the statistics of every node that trains with them, and "
        f"{len(nodes)} reported none ({'; '.join(reasons)}{more}). A node's owner may change "
        "the key that the reason names, or the run may have constants, standardise = '0.13,0.31', or 'none'."
    )


def _moments(content: RecordDict, features: int) -> Moments:
    metrics = only_record(content, MetricRecord, "bad statistics")
    count = metrics.get("count")
    if not isinstance(count, int) or not 1 <= count <= MAX_EXAMPLES:
        raise PayloadError("bad statistics", "count is not from 1 to 2^53")
    mean, squares = (_numbers(metrics, key, features) for key in ("mean", "squares"))
    if (
        (np.abs(mean) > MAX_METRIC).any()
        or (squares < 0).any()
        or (np.sqrt(squares / count) > MAX_METRIC).any()
    ):
        raise PayloadError("bad statistics", "a mean or a deviation is out of range")
    return count, mean, squares


def _numbers(metrics: MetricRecord, key: str, features: int) -> Floats:
    values = metrics.get(key)
    if not isinstance(values, list) or len(values) != features or not all(map(isfinite, values)):
        raise PayloadError("bad statistics", f"{key} is not {features} finite numbers")
    return np.array(values, np.float64)
