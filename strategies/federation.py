"""The state that every strategy shares: its nodes, the current exchange, traffic and simulated time."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from logging import INFO, WARNING
from statistics import median_low
from typing import Any, Self, TypedDict, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from numpy.typing import NDArray

from hedgerow.strategies.claims import OVERSTATED, Claims
from hedgerow.strategies.inbox import (
    ExchangeReport,
    Inbox,
    Node,
    Reply,
    checked_metrics,
    mean_metrics,
    weighted_metrics,
)
from hedgerow.strategies.known_nodes import KnownSizes
from hedgerow.strategies.node import Shapes
from hedgerow.strategies.parts.bounds import LossBound, UpdateBound
from hedgerow.strategies.registry import Registry
from hedgerow.strategies.roster import Admits, Roster
from hedgerow.strategies.rounds import RoundCallback
from hedgerow.wire.checks import in_range, int_at_least, is_real, require
from hedgerow.wire.clock import Clock
from hedgerow.wire.compress import compressed_part
from hedgerow.wire.frozen import FROZEN, FROZEN_CHECKSUM
from hedgerow.wire.ledger import Ledger
from hedgerow.wire.records import Layout, checksum, only_record, to_record, view
from hedgerow.wire.robust_means import Aggregation
from hedgerow.wire.seeds import Purpose, generator

__all__ = ["Chosen", "Federation", "FederationOptions", "only_arrays"]

# The metric names of a loss: hedgerow's, and those of Flower's examples.
_LOSSES = ("train-loss", "train_loss", "loss")
# Partition ids, or a function that chooses them from the online ones, ascending.
Chosen = Iterable[int] | Callable[[Sequence[int]], Iterable[int]] | None
MetricsAggregator = Callable[[list[RecordDict], str], MetricRecord]


class FederationOptions(TypedDict, total=False):
    """Options that every strategy takes, by keyword.

    Parameters
    ----------
    seed : int (default: 0)
        Seed of the server's random draws, >= 0.
    fraction_evaluate : float (default: 1.0)
        Share of nodes that evaluate the global model each round, in [0, 1]; 0 for none.
    min_train_nodes : int (default: 1)
        A round with fewer valid replies is repeated; if fewer nodes take part, all of them must reply.
    min_available_nodes : int (default: 2)
        The quorum: how many nodes must be online when the run starts, >= 1. Others may join later.
    num_clients : int or None (default: None)
        Number of places, at least ``min_available_nodes``; partition ids are below it. 0 for no limit, if the
        method supports that; None for ``min_available_nodes``: the run waits for all nodes.
    roster : Roster or None (default: None)
        The nodes, if they were queried before (``Roster.gather``), for example to build a model.
    registry : Registry or None (default: None)
        The nodes that may take part (``Registry.read("nodes.toml")``); None accepts any node.
    frozen : Collection[str] or None (default: None)
        Keys of the arrays that no training changes (``frozen_keys(model)``). Messages have
        their checksum only, and a node that lacks them is sent them once. () for none; None for those that
        all nodes name when they introduce themselves, as this suite's clients do with a task of yours.
    weighted_by_key, arrayrecord_key, configrecord_key : str
        As in Flower's FedAvg: ``"num-examples"``, ``"arrays"``, ``"config"``.
    train_metrics_aggr_fn, evaluate_metrics_aggr_fn : callable or None (default: None)
        As in Flower's FedAvg; None is the mean weighted by ``weighted_by_key``.
    on_round_end : Sequence[Callable[[RoundEnd], None]] (default: ())
        Called after each round, and once before the first.
    parts : Sequence[Part] (default: ())
        Your own parts, see ``Part``.
    max_repeats : int (default: 2)
        How often a round below its minimum is repeated before the run stops.
    max_wait : float (default: 120.0)
        Seconds to wait for the nodes at the start.
    max_weight_ratio : float (default: 10.0)
        Bound on a node's weight, in multiples of the median of the claimed sizes, >= 1; 0 for no bound. The
        first cut is logged, and the round's metric ``weights-capped`` counts them. A claim above 10^6 medians
        is refused (``claimed size too large``). Not for sizes that the suite dealt itself: ``dealt_sizes``,
        and in simulations on Hedgerow's engine those that this suite's clients count.
    dealt_sizes : Sequence[int] or None (default: None)
        The number of examples of each client, by partition id, if the server deals the data.
    max_update_norm_ratio : float (default: 100.0)
        Bound on an update's norm, in multiples of the usual norm of the rounds before, >= 1; 0 for no bound.
        A larger update is refused (``update too large``), see ``UpdateBound``.
    quarantine_after : int (default: 3)
        A node is quarantined for 2, 4, … 64 rounds after this many refused replies or errors in a row, >= 1;
        0 for never.
    max_loss_ratio : float (default: 1e6)
        The run ends with DivergenceError if a loss is not finite, or exceeds this multiple of its first value
        (or of 1, if that is larger), >= 1; 0 for no bound. The losses are the server's evaluation loss and
        the medians of the nodes' training and evaluation losses.
    """

    seed: int
    fraction_evaluate: float
    min_train_nodes: int
    min_available_nodes: int
    num_clients: int | None
    roster: Roster | None
    registry: Registry | None
    weighted_by_key: str
    arrayrecord_key: str
    configrecord_key: str
    train_metrics_aggr_fn: MetricsAggregator | None
    evaluate_metrics_aggr_fn: MetricsAggregator | None
    on_round_end: Sequence[RoundCallback]
    parts: Sequence[Any]
    max_repeats: int
    max_wait: float
    max_weight_ratio: float
    dealt_sizes: Sequence[int] | None
    frozen: Collection[str] | None
    max_update_norm_ratio: float
    quarantine_after: int
    max_loss_ratio: float


@dataclass(frozen=True)
class _Settings:
    seed: int = 0
    fraction_evaluate: float = 1.0
    min_train_nodes: int = 1
    min_available_nodes: int = 2
    num_clients: int | None = None
    roster: Roster | None = None
    registry: Registry | None = None
    weighted_by_key: str = "num-examples"
    arrayrecord_key: str = "arrays"
    configrecord_key: str = "config"
    train_metrics_aggr_fn: MetricsAggregator | None = None
    evaluate_metrics_aggr_fn: MetricsAggregator | None = None
    on_round_end: Sequence[RoundCallback] = ()
    parts: Sequence[Any] = ()
    max_repeats: int = 2
    max_wait: float = 120.0
    max_weight_ratio: float = 10.0
    dealt_sizes: Sequence[int] | None = None
    frozen: Collection[str] | None = None
    max_update_norm_ratio: float = 100.0
    quarantine_after: int = 3
    max_loss_ratio: float = 1e6

    def __post_init__(self) -> None:
        for name in ("max_weight_ratio", "max_update_norm_ratio", "max_loss_ratio"):
            ratio = getattr(self, name)
            valid = is_real(ratio) and (ratio == 0 or ratio >= 1)
            require(name, ratio, "a number >= 1, or 0 for no bound", valid)
        in_range("fraction_evaluate", self.fraction_evaluate, 0.0, 1.0)
        for name in ("seed", "min_train_nodes", "quarantine_after", "max_repeats"):
            int_at_least(0, **{name: getattr(self, name)})
        int_at_least(1, min_available_nodes=self.min_available_nodes)
        if self.num_clients is None:
            return
        int_at_least(0, num_clients=self.num_clients)
        if 0 < self.num_clients < self.min_available_nodes:
            raise ValueError(
                "num_clients must be 0 (accept any client), or at least min_available_nodes = "
                f"{self.min_available_nodes}, got {self.num_clients!r}"
            )


def only_arrays(content: RecordDict) -> ArrayRecord:
    """Return a reply's one ArrayRecord; raise PayloadError (``bad arrays``) otherwise."""
    return only_record(content, ArrayRecord, "bad arrays")


def _median_loss(contents: Iterable[RecordDict]) -> float | None:
    """Return the lower median of the reported losses; None if there is none."""
    losses = list[float]()
    for content in contents:
        metrics = only_record(content, MetricRecord, "bad metrics")
        loss = next((metrics[key] for key in _LOSSES if key in metrics), None)
        if isinstance(loss, int | float):
            losses.append(loss)
    return median_low(losses) if losses else None


class Federation:
    """The nodes of a run, the current exchange, traffic and simulated time.

    Parameters
    ----------
    clients : int or None (default: None)
        Number of clients; None for ``num_clients`` of the options.
    **options
        See ``FederationOptions``.
    """

    def __init__(self, clients: int | None = None, /, **options: Unpack[FederationOptions]) -> None:
        self.settings = _Settings(**options)
        wanted = self.settings.num_clients if clients is None else clients
        if wanted != self.settings.num_clients is not None:
            raise ValueError(f"num_clients must be {wanted}, got {self.settings.num_clients!r}")
        # Number of places; None for no limit.
        self.places: int | None = self.settings.min_available_nodes if wanted is None else wanted or None
        self.quorum = self.settings.min_available_nodes
        if wanted is None or (clients is not None and self.settings.num_clients is None):
            self.quorum = self.places or self.quorum
        # Returns why a node is excluded (the reason is counted), or None.
        self.admits: Admits | None = None
        self.timeout = 3600.0
        self._loaded = False
        self.reset()

    @classmethod
    def of(cls, roster: Roster, ledger: Ledger, timeout: float) -> Self:
        """Return a federation of gathered nodes, for exchanges outside a run."""
        federation = cls(len(roster), min_available_nodes=1)
        federation._roster, federation.ledger, federation.timeout = roster, ledger, timeout
        federation.layout = Layout((), (), ())
        return federation

    def reset(self) -> None:
        """Forget the run."""
        self.ledger = Ledger()
        self.clock = Clock()
        self.completed = 0
        self.layout: Layout | None = None
        # All keys of the model, and the frozen arrays; the clients that are sent them next.
        self._keys: tuple[str, ...] = ()
        self.frozen = ArrayRecord()
        self.lacking: set[int] = set()
        self.claims = Claims(self.settings.max_weight_ratio, self.settings.dealt_sizes)
        # Places of nodes that claimed more; a round does not wait for them.
        self._barred: set[int] = set()
        self.losses = LossBound(self.settings.max_loss_ratio)
        # Median losses that nodes reported in the last evaluation, and in the last training.
        self.evaluated_loss: float | None = None
        self.trained_loss: float | None = None
        self._bounds: dict[str, UpdateBound] = {}
        self._bound_round = 0
        # Means of the round that had too few updates for the rule, see ``combined``.
        self.fell_back = 0
        # Clients of the round with a weight below their claim.
        self.capped: set[int] = set()
        self._frozen_checksum: tuple[ArrayRecord | None, str] = None, ""
        self._roster: Roster | None = None
        # From a checkpoint: names, shapes, and quarantined nodes.
        self._names: dict[str, int] = {}
        self._shapes: Shapes | None = None
        self._rested: dict[str, list[int]] = {}
        # Refused replies in a row, by client.
        self._strikes: Counter[int] = Counter()
        # A round, and the nodes excluded in it, by reason.
        self._left_out: tuple[int, Counter[str]] = 0, Counter()
        self._exchange = self._evaluation = Inbox([], "", lambda node, content: None)

    @property
    def sizes(self) -> MutableMapping[int, float]:
        """The examples that each client claimed first, by partition id."""
        return self.claims.sizes

    @property
    def num_clients(self) -> int:
        """Number of clients; without a limit, of those that have come so far."""
        if self.places is not None:
            return self.places
        return len(self._roster) if self._roster is not None else max(self._names.values(), default=-1) + 1

    def begin(self, timeout: float) -> bool:
        """Begin a run with a round's deadline in seconds; return whether it resumes from a loaded state."""
        resumed, self._loaded = self._loaded, False
        if not resumed:
            self.reset()
        self.timeout = timeout
        return resumed

    @property
    def report(self) -> ExchangeReport:
        """Message counts of the last training exchange."""
        return self._exchange.report

    @property
    def whole_report(self) -> ExchangeReport:
        """``report``, with the other exchanges that count with the training exchange."""
        return self.report

    @property
    def introduced(self) -> bool | None:
        """Whether the nodes introduce themselves; None before they were queried."""
        return None if self._roster is None else self._roster.introduced

    def enough(self) -> bool:
        """Return whether the training exchange got its minimum, or all replies if fewer nodes take part."""
        chosen = self.report.sent + self.report.rejected["offline"]
        return self.report.accepted >= min(self.settings.min_train_nodes, chosen)

    # Exchanges.

    def open_round(self, grid: Grid) -> Roster:
        """Begin an attempt of a round; return the roster, see ``gather``."""
        return self.gather(grid)

    @property
    def nodes(self) -> Sequence[Node]:
        """The nodes with a place, as of the last ``gather``."""
        return [] if self._roster is None else [node for node in self._roster.nodes if not node.vacant]

    def gather(self, grid: Grid) -> Roster:
        """Return the roster: gathered on the first call, refreshed later. First reported sizes count."""
        if self._roster is None:
            self._roster = self._gathered(grid)
            self.claims.counted = getattr(grid, "counts_examples", lambda: False)()
            if self._rested:
                self._roster.put_to_rest(self._rested)
                self._roster.refresh(grid, self.timeout, self.completed)
            if self._roster.known is not None:
                self.claims.sizes = KnownSizes(self._roster.known.sizes)
                return self._roster
            claims = {node.partition_id: node.num_examples for node in self._roster.nodes if not node.vacant}
            sizes = {client: float(size) for client, size in claims.items() if size}
            self.claims.sizes = {**self.sizes, **sizes}
        else:
            self._roster.refresh(grid, self.timeout, self.completed)
            if self._roster.known is not None:
                return self._roster
            for node in self._roster.nodes:
                if node.num_examples and node.partition_id not in self.sizes:
                    self.sizes[node.partition_id] = float(node.num_examples)
        self._leave_out_overstated(self._roster)
        return self._roster

    def _leave_out_overstated(self, roster: Roster) -> None:
        """Exclude nodes that claim an impossible size: capped, they would still count ten medians."""
        most = self.claims.largest()
        for client in [client for client, size in self.sizes.items() if size > most]:
            del self.sizes[client]
            for node in roster.nodes[client : client + 1]:
                if not node.vacant:
                    self._barred.add(client)
                    roster.refuse(node.node_id, OVERSTATED, self.completed)

    def _gathered(self, grid: Grid) -> Roster:
        if self.settings.roster is not None:
            roster = self.settings.roster.continued(self._names, self._shapes, self.admits)
            roster.refresh(grid, self.timeout, self.completed)
            return roster
        if self.settings.registry is None and not self._names and self._shapes is None:
            known = Roster.of_known(grid, self.places, self.admits)
            if known is not None:
                return known
        return Roster.gather(
            grid,
            self.places,
            self.settings.max_wait,
            quorum=self.quorum,
            names=self._names,
            shapes=self._shapes,
            admits=self.admits,
            registry=self.settings.registry,
        )

    def refuse(self, node: Node, reason: str) -> None:
        """Exclude a node that has a place; the reason is counted."""
        if self._roster is not None:
            self._roster.refuse(node.node_id, reason, self.completed)

    def shapes(self) -> Shapes:
        """Return the shapes of the nodes' data; unknown before they were queried."""
        return Shapes() if self._roster is None else self._roster.shapes

    def left_out(self, server_round: int) -> Counter[str]:
        """Return how many nodes were excluded since the round began, by reason."""
        began, reasons = self._left_out
        reasons = reasons if began == server_round else Counter()
        if self._roster is not None:
            reasons = reasons + self._roster.take_refusals()
        self._left_out = server_round, reasons
        return reasons

    def scheduled(self, server_round: int, pool: Sequence[int], count: int) -> list[int]:
        """Return ``count`` of a pool's partitions, ascending, drawn uniformly, or all if there are fewer."""
        count = min(count, len(pool))
        stream = generator(self.settings.seed, round=server_round, purpose=Purpose.SCHEDULE)
        return sorted(pool[i] for i in stream.choice(len(pool), count, replace=False)) if count else []

    def uniform(self, server_round: int, client: int) -> float:
        """Return a client's draw in [0, 1) for its participation in a round."""
        stream = generator(
            self.settings.seed, round=server_round, partition_id=client, purpose=Purpose.PARTICIPATION
        )
        return float(stream.random())

    def node(self, client: int) -> Node:
        """Return the node of a partition."""
        assert self._roster is not None, "the nodes were gathered"
        return self._roster.nodes[client]

    def there(self, chosen: Chosen = None) -> tuple[list[Node], int]:
        """Return the chosen nodes that were online at the last ``gather``, and how many were not."""
        roster = self._roster
        assert roster is not None
        if callable(chosen):
            chosen = chosen(roster.present)
        places, online = roster.nodes, roster.online
        nodes = [places[i] for i in (range(len(roster)) if chosen is None else chosen)]
        if self.places is None:  # Vacant places do not count as offline.
            nodes = [node for node in nodes if not node.vacant]
        elif self._barred:
            nodes = [node for node in nodes if not (node.vacant and node.partition_id in self._barred)]
        there = [node for node in nodes if node.node_id in online]
        log(INFO, "configure_train: Sampled %d nodes (out of %d)", len(there), len(roster))
        return there, len(nodes) - len(there)

    def instruct(
        self,
        server_round: int,
        contents: Sequence[tuple[Node, RecordDict]],
        check: Callable[[Node, RecordDict], Any],
        *,
        offline: int = 0,
        message_type: str = MessageType.TRAIN,
        group: str = "",
    ) -> list[Message]:
        """Open a training exchange and return its messages; ``check`` converts a valid reply to a value."""
        group = f"{server_round}-{group}" if group else str(server_round)
        nodes = [node for node, _ in contents]
        self.open_exchange(server_round, nodes, check, offline=offline, group=group)
        return [
            Message(content, node.node_id, message_type, ttl=self.timeout, group_id=group)
            for node, content in contents
        ]

    def open_exchange(
        self,
        server_round: int,
        nodes: Sequence[Node],
        check: Callable[[Node, RecordDict], Any],
        *,
        offline: int = 0,
        group: str = "",
    ) -> Inbox:
        """Open a round's training exchange and return the inbox for its replies."""
        self._bound_round = server_round
        for bound in self._bounds.values():
            bound.begin(server_round)
        self.fell_back = 0
        self.capped = set()
        self.trained_loss = None
        self._exchange = Inbox(nodes, group or str(server_round), check)
        if offline:
            self._exchange.report.rejected["offline"] = offline
        self._exchange.report.rejected += self.left_out(server_round)
        return self._exchange

    def accept(self, replies: Iterable[Message]) -> Iterator[Reply]:
        """Yield the valid replies of the training exchange in the order of partition ids."""
        yield from self._exchange.accept(replies)
        self.judge(self._exchange)

    def judge(self, exchange: Inbox) -> None:
        """Quarantine nodes after repeatedly refused replies or errors, but never half of the online nodes.

        A node that failed may lack the frozen arrays, and is sent them with its next message.
        """
        if self.frozen:
            self.lacking |= exchange.report.errors.keys()
        for client in exchange.used:
            self._strikes.pop(client, None)
        self._strikes.update(exchange.refused)
        if not self.settings.quarantine_after:
            return
        for client in sorted(exchange.refused):
            struck = self._strikes[client] >= self.settings.quarantine_after
            if struck and self._roster is not None and self._roster.rest(client, self.completed):
                del self._strikes[client]

    def fails(self, client: int) -> bool:
        """Return whether a node's last reply was refused, or an error of its own."""
        return self._strikes[client] > 0

    def checked_weight(self, content: RecordDict) -> float:
        """Return the weight that a reply claims; raise PayloadError if it is not valid."""
        metrics = checked_metrics(content, self.settings.weighted_by_key)
        return self.claims.check(float(metrics[self.settings.weighted_by_key]))  # type: ignore[arg-type]

    def weight_of(self, client: int) -> float:
        """Return the weight of a client of known size: its size, up to ``max_weight_ratio`` medians."""
        here: Sequence[Node] = []
        if self._roster is not None and self.settings.registry is not None:
            here = self._roster.nodes[client : client + 1]
        registered = [float(node.max_examples) for node in here if node.max_examples is not None]
        size, cap = self.sizes[client], self.claims.cap()
        if size > cap:
            self.capped.add(client)
        return min(size, cap, *registered)

    def weights_of(self, clients: Sequence[int], claimed: Sequence[float]) -> Sequence[float]:
        """Return the weights of clients (K,), see ``weight_of``; one of unknown size has what it claims."""
        if isinstance(self.sizes, KnownSizes) and self.settings.registry is None:
            sizes, cap = self.sizes.array[list(clients)], self.claims.cap()
            self.capped.update(np.asarray(clients)[sizes > cap].tolist())
            return np.minimum(sizes, cap).tolist()  # type: ignore[no-any-return]
        weights = []
        for client, size in zip(clients, claimed, strict=True):
            self.sizes.setdefault(client, size)
            weights.append(self.weight_of(client))
        return weights

    def weights(self, clients: int) -> NDArray[np.float64]:
        """Return the weights of the first clients (C,); a client of unknown size has the mean weight."""
        if isinstance(self.sizes, KnownSizes):
            return np.minimum(self.sizes.array[:clients], self.claims.cap())
        known = {client: self.weight_of(client) for client in self.sizes}
        typical = sum(known.values()) / len(known) if known else 1.0
        return np.array([known.get(client, typical) for client in range(clients)])

    def bound(self, part: str = "model") -> UpdateBound:
        """Return the bound on the updates of a part of the model."""
        if part not in self._bounds:
            self._bounds[part] = UpdateBound(self.settings.max_update_norm_ratio)
            self._bounds[part].begin(self._bound_round)
        return self._bounds[part]

    def check_update(self, vector: NDArray[Any], sent: NDArray[Any], part: str, noise: float) -> None:
        """Record a node's update from ``sent`` to ``vector``, both (d,); PayloadError if it is too large.

        ``noise`` is the standard deviation of the noise that the run adds to each number.
        """
        if self.settings.max_update_norm_ratio:
            with np.errstate(over="ignore"):
                self.bound(part).check(vector - sent, sent, noise)

    def combined(
        self, rule: Aggregation, updates: NDArray[np.float64], weights: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the aggregate of updates (n, d) with weights (n,), n >= 1, by a rule.

        If there are fewer updates than the rule needs, returns their coordinate-wise median; the round's
        metric ``rule-fell-back`` counts such means.
        """
        taken = rule.for_count(len(updates))
        if taken is not rule:
            self.fell_back += 1
            log(
                WARNING,
                "%d updates are left for %s, which needs %d: the coordinate-wise median is used.",
                len(updates),
                rule,
                rule.least,
            )
        return taken.combined(updates, weights)

    def train_metrics(self, contents: list[RecordDict]) -> MetricRecord:
        """Aggregate the replies' metrics, by ``train_metrics_aggr_fn`` or the weighted mean."""
        self.trained_loss = _median_loss(contents)
        aggregate = self.settings.train_metrics_aggr_fn or self._mean_metrics
        metrics = aggregate(contents, self.settings.weighted_by_key) if contents else MetricRecord()
        return self._with_fallbacks(metrics)

    def table_metrics(self, table: Mapping[str, NDArray[Any]]) -> MetricRecord:
        """Return the weighted mean of metrics in columns (K,), by name."""
        losses = next((table[key] for key in _LOSSES if key in table), None)
        self.trained_loss = None if losses is None else median_low(losses.tolist())
        key, most = self.settings.weighted_by_key, self.claims.metrics_ratio
        return self._with_fallbacks(mean_metrics(table, key, most) if len(table[key]) else MetricRecord())

    def _with_fallbacks(self, metrics: MetricRecord) -> MetricRecord:
        if self.fell_back:
            metrics["rule-fell-back"] = self.fell_back
        metrics.pop("weights-capped", None)
        if self.capped:  # In the mean of the models, beside which the metrics' own weights do not count.
            metrics["weights-capped"] = len(self.capped)
        return metrics

    def _mean_metrics(self, contents: list[RecordDict], weighted_by_key: str) -> MetricRecord:
        return weighted_metrics(contents, weighted_by_key, self.claims.metrics_ratio)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send the global model to a share of the online nodes."""
        if self.settings.fraction_evaluate == 0.0:
            return []
        roster = self.gather(grid)
        there = roster.present
        if not there:
            return []
        count = max(1, int(len(there) * self.settings.fraction_evaluate))
        stream = generator(self.settings.seed, round=server_round, purpose=Purpose.EVALUATION)
        drawn = stream.choice(len(there), count, replace=False).tolist()
        nodes = [roster.nodes[there[i]] for i in sorted(drawn)]
        frozen = self.frozen_config if self.frozen else {}
        config = ConfigRecord({**config, **frozen, "server-round": server_round})
        names = self.settings.arrayrecord_key, self.settings.configrecord_key
        content = RecordDict({names[0]: self.travelling(arrays), names[1]: config})
        group = str(server_round)
        self._evaluation = Inbox(
            nodes, group, lambda node, reply: checked_metrics(reply, self.settings.weighted_by_key)
        )
        return [
            Message(content, node.node_id, MessageType.EVALUATE, ttl=self.timeout, group_id=group)
            for node in nodes
        ]

    def aggregate_evaluate(self, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the nodes' metrics."""
        if self.settings.fraction_evaluate == 0.0:
            return None
        contents = [reply.content for reply in self._evaluation.accept(replies)]
        self.evaluated_loss = _median_loss(contents)
        aggregate = self.settings.evaluate_metrics_aggr_fn or self._mean_metrics
        return aggregate(contents, self.settings.weighted_by_key) if contents else None

    def log_keys(self) -> None:
        """Log the keys in records, the last lines of a strategy's summary."""
        log(INFO, "\t└──> Keys in records:")
        log(INFO, "\t\t├── Weighted by: '%s'", self.settings.weighted_by_key)
        log(INFO, "\t\t├── ArrayRecord key: '%s'", self.settings.arrayrecord_key)
        log(INFO, "\t\t└── ConfigRecord key: '%s'", self.settings.configrecord_key)

    # Models as vectors.

    def vector(self, arrays: ArrayRecord) -> NDArray[Any]:
        """Store the model's layout; return the arrays as a vector (M,): float64 if any is, else float32."""
        if self.layout is None:
            frozen = self._frozen_keys()
            self.frozen = ArrayRecord({key: arrays[key] for key in arrays if key in frozen})
            self._keys = tuple(arrays)
        travelling = self.travelling(arrays)
        if self.layout != (found := Layout.of(travelling)):  # Else it keeps the run's first integers.
            self.layout = found
        return self.known_layout().flatten(travelling, found.float_type)

    def _frozen_keys(self) -> frozenset[str]:
        """Return the keys of the settings, or those that all nodes name."""
        if self.settings.frozen is not None:
            return frozenset(self.settings.frozen)
        if self._roster is None or self._roster.known is not None:
            return frozenset()
        named = [frozenset(node.frozen) for node in self._roster.nodes if not node.vacant]
        return frozenset.intersection(*named) if named else frozenset()

    def travelling(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the arrays without the frozen ones."""
        if not self.frozen:
            return arrays
        return ArrayRecord({key: array for key, array in arrays.items() if key not in self.frozen})

    def whole(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return a model's arrays with the frozen ones."""
        return ArrayRecord({k: self.frozen[k] if k in self.frozen else arrays[k] for k in self._keys})

    @property
    def frozen_config(self) -> dict[str, str]:
        """The config entry of messages with a model; nothing if no array is frozen."""
        if not self.frozen:
            return {}
        if self._frozen_checksum[0] is not self.frozen:
            ordered = ArrayRecord({key: self.frozen[key] for key in sorted(self.frozen)})
            self._frozen_checksum = self.frozen, checksum(ordered)
        return {FROZEN_CHECKSUM: self._frozen_checksum[1]}

    def frozen_for(self, client: int) -> dict[str, ArrayRecord]:
        """Return the record of frozen arrays of a client's next message, if it lacks them."""
        return {FROZEN: self.frozen} if client in self.lacking else {}

    def known_layout(self) -> Layout:
        """Return the model's layout; RuntimeError before the first round."""
        if self.layout is None:
            raise RuntimeError("No model yet: configure_train or start comes first.")
        return self.layout

    @property
    def num_parameters(self) -> int:
        """The model's parameters as papers count them: without running statistics and counters."""
        return compressed_part(self.known_layout()).size

    @property
    def model_bits(self) -> int:
        """The nominal bits of a whole model: 32 per parameter."""
        return 32 * self.num_parameters

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return round, layout, sizes, places, ledger and clock, for a checkpoint."""
        layout = self.known_layout()
        return {
            **self._places_taken(),
            **self._seen(),
            "round": self.completed,
            "layout": {
                "keys": list(layout.keys),
                "shapes": [list(shape) for shape in layout.shapes],
                "dtypes": list(layout.dtypes),
                **({"origin": dict(layout.origin)} if layout.origin else {}),
            },
            **({"frozen": self._frozen_state()} if self.frozen else {}),
            "sizes": self.claims.state_dict(),
            "ledger": self.ledger.state_dict(),
            "clock": self.clock.state_dict(),
        }

    def _frozen_state(self) -> dict[str, Any]:
        arrays = {key: view(array) for key, array in self.frozen.items()}
        return {"keys": list(self._keys), "arrays": arrays, "lacking": sorted(self.lacking)}

    def _places_taken(self) -> dict[str, Any]:
        """Return the nodes' names, unless each is ``partition-i``, and their data shapes, if known."""
        names = self._names if self._roster is None else self._roster.names
        shapes = self._shapes if self._roster is None else self._roster.shapes
        plain = all(name == f"partition-{at}" for name, at in names.items())
        taken: dict[str, Any] = {} if plain else {"names": dict(sorted(names.items()))}
        if shapes is not None and shapes != Shapes():
            taken["shapes"] = asdict(shapes)
        return taken

    def _seen(self) -> dict[str, Any]:
        """Return the update norms, the first losses, and the refused and quarantined nodes."""
        seen = {
            "update-norms": {part: bound.state_dict() for part, bound in sorted(self._bounds.items())},
            "first-losses": self.losses.state_dict(),
            "strikes": {str(client): count for client, count in sorted(self._strikes.items())},
            "resting": self._rested if self._roster is None else self._roster.resting(),
        }
        return {key: value for key, value in seen.items() if value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint; the next ``begin`` resumes after its round."""
        self.reset()
        for part, norms in state.get("update-norms", {}).items():
            self.bound(str(part)).load_state_dict(norms)
        self.losses.load_state_dict(state.get("first-losses", {}))
        self._strikes = Counter({int(client): int(n) for client, n in state.get("strikes", {}).items()})
        self._rested = {str(at): list(since) for at, since in state.get("resting", {}).items()}
        self._names = {str(name): int(at) for name, at in state.get("names", {}).items()}
        if (shapes := state.get("shapes")) is not None:
            axes = shapes["input_shape"]
            self._shapes = Shapes(**{**shapes, "input_shape": None if axes is None else tuple(axes)})
        layout = state["layout"]
        shapes = tuple(tuple(s) for s in layout["shapes"])
        self.layout = Layout(tuple(layout["keys"]), shapes, tuple(layout["dtypes"]), layout.get("origin", {}))
        if frozen := state.get("frozen"):
            self._keys, self.frozen = tuple(frozen["keys"]), to_record(frozen["arrays"])
            self.lacking = {int(client) for client in frozen["lacking"]}
        self.claims.load_state_dict(state["sizes"])
        self.completed = int(state["round"])
        self.ledger.load_state_dict(state["ledger"])
        self.clock.load_state_dict(state["clock"])
        self._loaded = True
