"""The mechanics that SD-FEEL and its baselines share: clients in clusters, a server to each cluster.

One strategy round is one intra-cluster round. The edge servers are entries of the strategy's state
("emulated"): client-server messages are real, what servers tell each other is linear algebra here and is
booked in the ledger as the transfers it stands for.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO
from typing import Any, TypedDict, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from hedgerow.strategies.exchange import (
    Exchange,
    ExchangeReport,
    Node,
    Reply,
    Roster,
    checked_metrics,
    weighted_metrics,
)
from hedgerow.strategies.rounds import EvaluateFn, Progress, RoundCallback, run_rounds
from hedgerow.strategies.sd_feel_theory import Scheme, System, inter_seconds, preset, round_seconds
from hedgerow.wire.clock import Clock
from hedgerow.wire.ledger import HUB_TO_NODE, NODE_TO_HUB, Ledger
from hedgerow.wire.records import Layout, PayloadError, payload_bytes
from hedgerow.wire.seeds import Purpose, generator

__all__ = ["ClusteredStrategy", "FederationOptions", "cluster_means", "contiguous_clusters"]

MetricsAggregator = Callable[[list[RecordDict], str], MetricRecord]
_RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class FederationOptions(TypedDict, total=False):
    """Options that every strategy of the family takes, by keyword; see ``ClusteredStrategy``."""

    participation: float
    seed: int
    fraction_evaluate: float
    min_train_nodes: int
    min_available_nodes: int
    weighted_by_key: str
    arrayrecord_key: str
    configrecord_key: str
    train_metrics_aggr_fn: MetricsAggregator | None
    evaluate_metrics_aggr_fn: MetricsAggregator | None
    system: System | None
    on_round_end: Sequence[RoundCallback]
    max_repeats: int
    max_wait: float


@dataclass(frozen=True)
class _Settings:
    participation: float = 1.0
    seed: int = 0
    fraction_evaluate: float = 1.0
    min_train_nodes: int = 1
    min_available_nodes: int = 2
    weighted_by_key: str = "num-examples"
    arrayrecord_key: str = "arrays"
    configrecord_key: str = "config"
    train_metrics_aggr_fn: MetricsAggregator | None = None
    evaluate_metrics_aggr_fn: MetricsAggregator | None = None
    system: System | None = None
    on_round_end: Sequence[RoundCallback] = ()
    max_repeats: int = 2
    max_wait: float = 120.0

    def __post_init__(self) -> None:
        _in_range("participation", self.participation, 0.0, 1.0, open_below=True)
        _in_range("fraction_evaluate", self.fraction_evaluate, 0.0, 1.0)
        at_least("seed", self.seed, 0)
        at_least("min_train_nodes", self.min_train_nodes, 0)
        at_least("min_available_nodes", self.min_available_nodes, 1)
        at_least("max_repeats", self.max_repeats, 0)


def at_least(key: str, value: int, least: int) -> None:
    """Raise ValueError unless ``value`` is an integer >= ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{key} is {value!r}; valid is an integer >= {least}")


def _in_range(key: str, value: float, low: float, high: float, open_below: bool = False) -> None:
    if not (math.isfinite(value) and (low < value if open_below else low <= value) and value <= high):
        raise ValueError(f"{key} is {value!r}; valid is {'(' if open_below else '['}{low:g}, {high:g}]")


def contiguous_clusters(num_clients: int, num_servers: int) -> tuple[int, ...]:
    """Return each client's server, floor(i D / C) for client i: clusters as equal as can be."""
    if num_servers > num_clients:
        raise ValueError(f"num_servers is {num_servers}; valid is 1 to the {num_clients} clients")
    return tuple(i * num_servers // num_clients for i in range(num_clients))


def cluster_means(replies: Iterable[tuple[int, float, NDArray[Any]]], previous: NDArray[Any]) -> NDArray[Any]:
    """Return each server's weighted mean of the models that it got, eq. (3), renormalised over them.

    Parameters
    ----------
    replies : Iterable[tuple[int, float, NDArray]]
        (server, weight |S_i|, model (M,)) in a fixed order; sums are float64 in that order.
    previous : NDArray
        The servers' models so far (D, M); a server that got nothing keeps its own.
    """
    totals: dict[int, NDArray[np.float64]] = {}
    weights: dict[int, float] = {}
    term = np.empty(previous.shape[1], np.float64)
    for server, weight, model in replies:
        np.multiply(model, weight, out=term, dtype=np.float64)
        if server in totals:
            totals[server] += term
            weights[server] += weight
        else:
            totals[server], weights[server] = term.copy(), weight
    models = previous.copy()
    for server, total in totals.items():
        models[server] = total / weights[server]
    return models


class ClusteredStrategy(Strategy):
    """Rounds of local training, a weighted mean in each cluster, and an exchange between servers.

    Subclasses say who takes part, how many local iterations a round has, and what the servers do.
    **The ClientApp must take ``config["local-steps"]`` local iterations from ``config["first-step"]``
    on, and reply with one ArrayRecord of the model's keys and one MetricRecord with
    ``"num-examples"``, its number of local training examples** (not of samples processed).

    Parameters
    ----------
    clusters : Sequence[int] or None
        The server of each client, by partition id; None for equal contiguous clusters of
        ``min_available_nodes`` clients.
    num_servers : int
        Servers D, >= 1.
    local_steps : int
        Local iterations a round, >= 1.
    participation : float (default: 1.0)
        Probability beta in (0, 1] that a client takes part in a round (independent draws; the same
        uniform whatever beta, so that a lower beta takes nested subsets).
    seed : int (default: 0)
        Keys the draws of participants.
    fraction_evaluate : float (default: 1.0)
        Share of nodes that evaluate the global model each round, in [0, 1]; 0 for none.
    min_train_nodes : int (default: 1)
        A round with fewer valid replies (of the nodes that were asked) is repeated.
    min_available_nodes : int (default: 2)
        The number of clients C; the run waits for all of them.
    weighted_by_key, arrayrecord_key, configrecord_key : str
        As in Flower's FedAvg: ``"num-examples"``, ``"arrays"``, ``"config"``.
    train_metrics_aggr_fn, evaluate_metrics_aggr_fn : callable or None (default: None)
        As in Flower's FedAvg; None is the mean weighted by ``weighted_by_key``.
    system : System or None (default: None)
        Sizes and rates of the simulated clock; None is the paper's rates and compute with the size of
        the model that is trained.
    on_round_end : Sequence[Callable[[RoundEnd], None]] (default: ())
        Called after each round, and once before the first.
    max_repeats : int (default: 2)
        How often a round below its minimum is repeated before the run stops.
    max_wait : float (default: 120.0)
        Seconds to wait for the nodes at the start.

    Notes
    -----
    Flower's differential-privacy wrappers compare replies with the arrays of the round; here each
    cluster trains on its server's model, so under them the clipping norm is not what they assume.
    """

    scheme: Scheme
    up_link = "client->edge"
    down_link = "edge->client"

    def __init__(
        self,
        *,
        clusters: Sequence[int] | None,
        num_servers: int,
        local_steps: int,
        **options: Unpack[FederationOptions],
    ) -> None:
        self.settings = _Settings(**options)
        at_least("num_servers", num_servers, 1)
        at_least("local_steps", local_steps, 1)
        self.num_servers = num_servers
        self.local_steps = local_steps
        self.clusters = self._checked_clusters(clusters)
        self.on_round_end = self.settings.on_round_end
        self.max_repeats = self.settings.max_repeats
        self._timeout = 3600.0
        self._reset()

    def _checked_clusters(self, clusters: Sequence[int] | None) -> tuple[int, ...]:
        if clusters is None:
            return contiguous_clusters(self.settings.min_available_nodes, self.num_servers)
        if set(clusters) != set(range(self.num_servers)):
            raise ValueError(
                f"clusters names the servers {sorted(set(clusters))}; "
                f"valid is each of 0 to {self.num_servers - 1}"
            )
        return tuple(int(server) for server in clusters)

    def _reset(self) -> None:
        self.ledger = Ledger()
        self.clock = Clock()
        self._completed = 0
        self._layout: Layout | None = None
        self._models: NDArray[Any] | None = None
        self._roster: Roster | None = None
        self._sizes: dict[int, float] = {}
        self._exchange = self._evaluation = Exchange([], "", lambda node, content: None)
        self._resumed = False

    # What a method of the family decides.

    def participants(self, server_round: int) -> list[int]:
        """Return the partition ids that take part in a round: Bernoulli(beta) draws, a stream a client."""
        beta = self.settings.participation
        return [i for i in range(len(self.clusters)) if self._uniform(server_round, i) < beta]

    def exchange_due(self, server_round: int) -> bool:
        """Return whether the servers exchange their models at the end of a round."""
        return False

    def between_servers(self, models: NDArray[Any]) -> NDArray[Any]:
        """Return the servers' models (D, M) after their exchange."""
        return models

    def server_links(self) -> list[tuple[str, int, int]]:
        """Return the transfers of one exchange between servers: (link, from, to)."""
        return []

    @property
    def gossip_steps(self) -> int:
        """Sequential transfers of one exchange between servers, for the clock."""
        return 1

    # State.

    @property
    def num_clients(self) -> int:
        """Clients C."""
        return len(self.clusters)

    @property
    def completed_rounds(self) -> int:
        """Rounds aggregated so far."""
        return self._completed

    @property
    def report(self) -> ExchangeReport:
        """What the last training exchange sent, got and lost."""
        return self._exchange.report

    @property
    def cluster_sizes(self) -> NDArray[np.float64]:
        """Samples of each cluster (D,); a client whose size is not known yet counts as the mean client."""
        known = list(self._sizes.values())
        typical = sum(known) / len(known) if known else 1.0
        sizes = np.zeros(self.num_servers)
        for client, server in enumerate(self.clusters):
            sizes[server] += self._sizes.get(client, typical)
        return sizes

    @property
    def server_weights(self) -> NDArray[np.float64]:
        """The clusters' shares of all samples (D,)."""
        sizes = self.cluster_sizes
        weights: NDArray[np.float64] = sizes / sizes.sum()
        return weights

    def server_models(self) -> list[ArrayRecord]:
        """Return the servers' models."""
        layout, models = self._trained()
        return [layout.unflatten(model) for model in models]

    def current_arrays(self) -> ArrayRecord | None:
        """Return u, the data-weighted mean of the servers' models; None before the first round.

        No single server owns u unless the servers agree.
        """
        if self._models is None or self._layout is None:
            return None
        return self._layout.unflatten(self._mean())

    def consensus_error(self) -> float:
        """Return the data-weighted mean squared distance of the servers' models to u."""
        _, models = self._trained()
        mean = self._mean()
        squares = [float(np.sum((model - mean) ** 2, dtype=np.float64)) for model in models]
        return float(np.dot(self.server_weights, squares))

    def progress(self) -> Progress:
        """Return iterations, traffic of the modelled links and simulated seconds since the start."""
        total = self.ledger.total()
        return Progress(
            iterations=self._completed * self.local_steps,
            bits=total.nominal_bits,
            payload_bytes=total.payload_bytes,
            sim_seconds=self.clock.seconds,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next round depends on: models (D, M), layout, sizes, ledger, clock."""
        layout, models = self._trained()
        return {
            "round": self._completed,
            "models": models,
            "layout": {
                "keys": list(layout.keys),
                "shapes": [list(shape) for shape in layout.shapes],
                "dtypes": list(layout.dtypes),
            },
            "sizes": {str(client): size for client, size in sorted(self._sizes.items())},
            "ledger": self.ledger.state_dict(),
            "clock": self.clock.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; the next ``start`` goes on after its round."""
        self._reset()
        layout = state["layout"]
        self._layout = Layout(
            tuple(layout["keys"]), tuple(tuple(s) for s in layout["shapes"]), tuple(layout["dtypes"])
        )
        self._models = np.array(state["models"])
        self._sizes = {int(client): float(size) for client, size in state["sizes"].items()}
        self._completed = int(state["round"])
        self.ledger.load_state_dict(state["ledger"])
        self.clock.load_state_dict(state["clock"])
        self._resumed = True

    # Flower's interface.

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run the strategy; parameters as in Flower's ``Strategy.start``, ``timeout`` a round's deadline.

        Raises
        ------
        RosterError
            If the nodes do not come, or do not make up the federation.
        TooFewRepliesError
            If a round stays under ``min_train_nodes`` however often it is repeated.
        """
        self.check_num_rounds(num_rounds)
        if not self._resumed:
            self._reset()
        self._resumed = False
        self._timeout = timeout
        return run_rounds(
            self, grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn
        )

    def check_num_rounds(self, num_rounds: int) -> None:
        """Raise ValueError if a run of that many rounds would end in the middle of a block."""
        at_least("num_rounds", num_rounds, 0)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send each participant its server's model; one shared record a cluster."""
        if server_round == 1 and self._completed:
            self._reset()
        layout, models = self._initialised(arrays)
        roster = self._gathered(grid)
        chosen = [roster.nodes[i] for i in self.participants(server_round)]
        online = [node for node in chosen if node.node_id in roster.online]
        work = {
            "server-round": server_round,
            "local-steps": self.local_steps,
            "first-step": (server_round - 1) * self.local_steps,
        }
        config = ConfigRecord({**config, **work})
        contents = {
            server: RecordDict(
                {
                    self.settings.arrayrecord_key: layout.unflatten(models[server]),
                    self.settings.configrecord_key: config,
                }
            )
            for server in sorted({self.clusters[node.partition_id] for node in online})
        }
        self._exchange = Exchange(online, str(server_round), self._checked)
        if len(online) < len(chosen):
            self._exchange.report.rejected["offline"] = len(chosen) - len(online)
        log(INFO, "configure_train: Sampled %d nodes (out of %d)", len(online), len(roster))
        self._book_downlinks(server_round, online, contents)
        return [
            Message(
                contents[self.clusters[node.partition_id]],
                node.node_id,
                MessageType.TRAIN,
                ttl=self._timeout,
                group_id=str(server_round),
            )
            for node in online
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average each cluster, eq. (3), let the servers exchange if due, and return u.

        Nothing changes, and None is returned, if fewer than ``min_train_nodes`` replies are valid.
        """
        _, previous = self._trained()
        contents: list[RecordDict] = []
        accepted = self._weighed(server_round, self._exchange.accept(replies), contents)
        models = cluster_means(accepted, previous)
        report = self._exchange.report
        if report.accepted < min(self.settings.min_train_nodes, report.sent):
            return None, None
        if self.exchange_due(server_round):
            models = self._mixed(models)
            self._book_server_links(server_round)
        self._models = models
        self._completed = server_round
        self.clock.advance(self._round_seconds(server_round))
        return self.current_arrays(), self._train_metrics(contents)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send u to a share of the nodes."""
        if self.settings.fraction_evaluate == 0.0:
            return []
        roster = self._gathered(grid)
        count = max(1, int(len(roster) * self.settings.fraction_evaluate))
        stream = generator(self.settings.seed, round=server_round, purpose=Purpose.EVALUATION)
        chosen = sorted(stream.choice(len(roster), count, replace=False).tolist())
        nodes = [roster.nodes[i] for i in chosen if roster.nodes[i].node_id in roster.online]
        config = ConfigRecord({**config, "server-round": server_round})
        content = RecordDict({self.settings.arrayrecord_key: arrays, self.settings.configrecord_key: config})
        self._evaluation = Exchange(
            nodes,
            str(server_round),
            lambda node, reply: checked_metrics(reply, self.settings.weighted_by_key),
        )
        return [
            Message(
                content, node.node_id, MessageType.EVALUATE, ttl=self._timeout, group_id=str(server_round)
            )
            for node in nodes
        ]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the nodes' metrics."""
        if self.settings.fraction_evaluate == 0.0:
            return None
        contents = [reply.content for reply in self._evaluation.accept(replies)]
        aggregate = self.settings.evaluate_metrics_aggr_fn or weighted_metrics
        return aggregate(contents, self.settings.weighted_by_key) if contents else None

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t├──> Federation:")
        log(INFO, "\t│\t├── Clients: %d | servers: %d", self.num_clients, self.num_servers)
        log(INFO, "\t│\t├── Local iterations a round: %d", self.local_steps)
        log(INFO, "\t│\t└── Participation: %.3g", self.settings.participation)
        log(INFO, "\t└──> Keys in records:")
        log(INFO, "\t\t├── Weighted by: '%s'", self.settings.weighted_by_key)
        log(INFO, "\t\t├── ArrayRecord key: '%s'", self.settings.arrayrecord_key)
        log(INFO, "\t\t└── ConfigRecord key: '%s'", self.settings.configrecord_key)

    # Mechanics.

    def _uniform(self, server_round: int, client: int) -> float:
        stream = generator(
            self.settings.seed, round=server_round, partition_id=client, purpose=Purpose.PARTICIPATION
        )
        return float(stream.random())

    def _trained(self) -> tuple[Layout, NDArray[Any]]:
        if self._layout is None or self._models is None:
            raise RuntimeError("No model yet: configure_train or start comes first.")
        return self._layout, self._models

    def _initialised(self, arrays: ArrayRecord) -> tuple[Layout, NDArray[Any]]:
        if self._models is None:
            self._layout = Layout.of(arrays)
            dtype = np.result_type(np.float32, *(d for d in self._layout.dtypes if np.dtype(d).kind == "f"))
            self._models = np.tile(self._layout.flatten(arrays, dtype), (self.num_servers, 1))  # (D, M)
        return self._trained()

    def _gathered(self, grid: Grid) -> Roster:
        if self._roster is None:
            self._roster = Roster.gather(grid, self.num_clients, self.settings.max_wait)
            for node in self._roster.nodes:
                if node.num_examples is not None:
                    self._sizes[node.partition_id] = float(node.num_examples)
        else:
            self._roster.refresh(grid, self._timeout)
        return self._roster

    def _checked(self, node: Node, content: RecordDict) -> tuple[float, NDArray[Any]]:
        layout, models = self._trained()
        if len(content.array_records) != 1:
            raise PayloadError("bad arrays", f"{len(content.array_records)} ArrayRecords, expected one")
        metrics = checked_metrics(content, self.settings.weighted_by_key)
        vector = layout.flatten(next(iter(content.array_records.values())), models.dtype)
        return float(metrics[self.settings.weighted_by_key]), vector  # type: ignore[arg-type]

    def _weighed(
        self, server_round: int, replies: Iterable[Reply], contents: list[RecordDict]
    ) -> Iterable[tuple[int, float, NDArray[Any]]]:
        """Yield (server, |S_i|, model) of each reply, booking it; keep its metrics for later."""
        bits = self._model_bits()
        for reply in replies:
            client = reply.node.partition_id
            told, vector = reply.value
            # |S_i| is fixed: what a client told first holds, or a run of unequal epochs would reweigh it.
            weight = self._sizes.setdefault(client, told)
            server = self.clusters[client]
            record = next(iter(reply.content.array_records.values()))
            self.ledger.book(server_round, self.up_link, client, server, bits, payload_bytes(record))
            self.ledger.book(server_round, NODE_TO_HUB, client, 0, bits, payload_bytes(reply.content))
            contents.append(RecordDict(dict(reply.content.metric_records)))
            yield server, weight, vector

    def _mean(self) -> NDArray[Any]:
        _, models = self._trained()
        total = np.zeros(models.shape[1], np.float64)
        for weight, model in zip(self.server_weights, models, strict=True):
            total += weight * model
        return total.astype(models.dtype)

    def _mixed(self, models: NDArray[Any]) -> NDArray[Any]:
        """Let the servers exchange; running statistics stay out of it.

        A mixing matrix with a negative self-weight could make a variance negative.
        """
        columns = self._gossiped_columns()
        if columns.all():
            return self.between_servers(models)
        mixed = models.copy()
        mixed[:, columns] = self.between_servers(np.ascontiguousarray(models[:, columns]))
        return mixed

    def _gossiped_columns(self) -> NDArray[np.bool_]:
        layout, models = self._trained()
        columns = np.ones(models.shape[1], bool)
        for (key, where), dtype in zip(layout.slices.items(), layout.dtypes, strict=True):
            if key.endswith(_RUNNING_STATISTICS) or np.dtype(dtype).kind != "f":
                columns[where] = False
        return columns

    def _train_metrics(self, contents: list[RecordDict]) -> MetricRecord:
        aggregate = self.settings.train_metrics_aggr_fn or weighted_metrics
        metrics = aggregate(contents, self.settings.weighted_by_key) if contents else MetricRecord()
        metrics["consensus-error"] = self.consensus_error()
        return metrics

    def _round_seconds(self, server_round: int) -> float:
        system = self._system()
        tau1 = self.local_steps
        seconds = round_seconds(self.scheme, system, tau1=tau1)
        if self.exchange_due(server_round):
            seconds += inter_seconds(self.scheme, system, alpha=self.gossip_steps)
        return seconds

    def _system(self) -> System:
        if self.settings.system is not None:
            return self.settings.system
        layout, _ = self._trained()
        return System(layout.size, preset("paper-text").compute)

    def _model_bits(self) -> int:
        layout, _ = self._trained()
        return 32 * layout.size

    def _book_downlinks(
        self, server_round: int, nodes: list[Node], contents: Mapping[int, RecordDict]
    ) -> None:
        bits = self._model_bits()
        model = {
            s: payload_bytes(c.array_records[self.settings.arrayrecord_key]) for s, c in contents.items()
        }
        message = {s: payload_bytes(c) for s, c in contents.items()}
        for node in nodes:
            client, server = node.partition_id, self.clusters[node.partition_id]
            self.ledger.book(server_round, self.down_link, server, client, bits, model[server])
            self.ledger.book(server_round, HUB_TO_NODE, 0, client, bits, message[server])

    def _book_server_links(self, server_round: int) -> None:
        layout, models = self._trained()
        bits, size = self._model_bits(), payload_bytes(layout.unflatten(models[0]))
        for link, source, target in self.server_links():
            self.ledger.book(server_round, link, source, target, bits, size)
