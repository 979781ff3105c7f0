"""The mechanics that SD-FEEL and its baselines share: clients in clusters, a server to each cluster.

One strategy round is one intra-cluster round. Unless a method has nodes for them, the edge servers are
entries of the strategy's state ("emulated"): client-server messages are real, what servers tell each other is
linear algebra here. On either level the ledger has it as the transfers of the modelled system.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from logging import INFO, WARNING
from typing import Any, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from numpy.typing import NDArray

from hedgerow.strategies.federation import Federation, FederationOptions, only_arrays
from hedgerow.strategies.inbox import ExchangeReport, Node, Reply, RosterError
from hedgerow.strategies.robust import parse_aggregation
from hedgerow.strategies.rounds import Progress
from hedgerow.strategies.sd_feel.relayed import EdgeFederation
from hedgerow.strategies.sd_feel.servers import ServerModels, ServerTransfer
from hedgerow.strategies.sd_feel.theory import Scheme, System, inter_seconds, preset, round_seconds
from hedgerow.strategies.secure_sums import SecureSum, SecureSums, parse_secure_sum
from hedgerow.strategies.strategy import FederatedStrategy
from hedgerow.wire.checks import in_range, int_at_least
from hedgerow.wire.edge_servers import cluster_means
from hedgerow.wire.printable import quoted
from hedgerow.wire.records import PayloadError, only_record, payload_bytes

__all__ = [
    "BY_GROUP",
    "ClusteredOptions",
    "ClusteredStrategy",
    "Clusters",
    "cluster_means",
    "contiguous_clusters",
    "whole_blocks",
]


# What says which server a client belongs to.
Clusters = Sequence[int] | str | None
# Each node's group says it.
BY_GROUP = "group"
# The server of a client that has not come yet.
_NO_SERVER = -1
# The metric by which a reply tells how many iterations its node took.
_NUM_STEPS = "num-steps"


class ClusteredOptions(FederationOptions, total=False):
    """Options that every strategy of the family takes, by keyword; see ``ClusteredStrategy``."""

    participation: float
    system: System | None
    aggregation: str
    secure_sum: bool | SecureSum


def contiguous_clusters(num_clients: int, num_servers: int) -> tuple[int, ...]:
    """Return each client's server, floor(i D / C) for client i: clusters as equal as can be."""
    if num_servers > num_clients:
        raise ValueError(f"num_servers is {num_servers}; valid is 1 to the {num_clients} clients")
    return tuple(i * num_servers // num_clients for i in range(num_clients))


def _servers_of(groups: Sequence[str], num_servers: int) -> dict[str, int]:
    """Return each group's server, its place among those groups that are larger than all others.

    So a few nodes that name a group which there is not do not keep the others from their work.
    """
    sizes = Counter(groups)
    names = [name for name, _ in sizes.most_common(num_servers)]
    smallest = min((sizes[name] for name in names), default=0)
    if len(names) < num_servers or any(sizes[name] >= smallest for name in sizes.keys() - set(names)):
        raise RosterError(
            f"clusters is {BY_GROUP!r}, and the nodes' configs name the groups {sorted(sizes)}; valid is one "
            f"for each of the {num_servers} edge servers: --node-config 'group=\"north\"'"
        )
    numbers = all(name.isdecimal() for name in names)
    return {name: server for server, name in enumerate(sorted(names, key=int if numbers else str))}


def whole_blocks(num_rounds: int, tau2: int) -> None:
    """Raise ValueError unless tau2 divides the number of rounds."""
    if num_rounds % tau2:
        raise ValueError(f"num_rounds is {num_rounds}; valid is a multiple of tau2 = {tau2}")


class ClusteredStrategy(FederatedStrategy):
    """Rounds of local training, a weighted mean in each cluster, and an exchange between servers.

    Subclasses say who takes part, how many local iterations a round has, and what the servers do.
    **The ClientApp must take ``config["local-steps"]`` local iterations (mini-batch steps) from
    ``config["first-step"]`` on, and reply with one ArrayRecord of the model's keys and one MetricRecord with
    ``"num-examples"``, its number of local training examples** (not of samples processed), **and
    ``"num-steps"``, how many iterations it took.** A reply that tells another number than was asked for is
    lost as ``num-steps is not local-steps``. From the first reply on that tells none, ``iterations`` and
    simulated seconds are unknown: None in what callbacks are told and in records, with one warning.

    Nodes say which partition they have (``hedgerow.clients.introduce``); where they do not, partition ids are
    ranks of node ids, which are random, and clusters cannot be chosen.

    Parameters
    ----------
    clusters : Sequence[int], "group" or None
        The server of each client, by partition id; ``"group"`` for a server to each ``group`` that the
        nodes' configs name, in the order of the names (of the numbers, where all are numbers); None for equal
        contiguous clusters. With the last two there are ``num_clients`` clients. A node that comes later
        joins its group's server, or the one with fewest clients where as many take part as come.
    num_servers : int
        Servers D, >= 1.
    local_steps : int
        Local iterations a round, >= 1.
    participation : float (default: 1.0)
        Probability beta in (0, 1] that a client takes part in a round (independent draws; the same
        uniform whatever beta, so that a lower beta takes nested subsets).
    system : System or None (default: None)
        Sizes and rates of the simulated clock; None is the paper's rates and compute with the size of
        the model that is trained.
    aggregation : str (default: "mean")
        What an edge server takes of its clients' models: ``mean``, eq. (3), or a rule that some lying nodes
        cannot ruin, see ``parse_aggregation``. Under a rule every client counts as one, whatever number of
        examples it claims, and clusters weigh by their clients. A server that got too few models for its
        rule takes their median.
    secure_sum : bool or SecureSum (default: False)
        Whether the server sees of each cluster the sum of its clients' updates alone (``SecureSum`` for other
        settings than the defaults): clients must answer ``query.sum_keys`` and ``query.sum_shares``, as those
        of ``hedgerow.clients.sd_feel_client`` do. A round is one exchange longer. A cluster with too few
        clients for a sum, or too few that survive, keeps its model. With ``SecureSum(noise=...)`` clients of
        a cluster weigh the same. ``max_update_norm_ratio`` is then held
        against a cluster's mean, ``max_weight_ratio`` kept by the clients themselves.
    edge_nodes : bool (default: False)
        Whether the servers are nodes; a method that says so gives ``exchanged`` for them.
    **options
        See ``FederationOptions``; ``num_clients`` is the number of clients C.

    Raises
    ------
    ValueError
        If a parameter is out of range, naming it, its value and what is valid.
    RosterError
        Once the nodes are there, if clusters are chosen and no node says which partition it has, or if the
        nodes' groups are not ``num_servers``.

    Notes
    -----
    With ``"group"`` a node without one, or whose group has no server, is left out as ``no group`` or
    ``unknown group``. Which groups there are is settled when the run starts.

    Flower's differential-privacy wrappers can be around a method with one server. With more they are refused:
    they compare replies with the arrays of the round, and each cluster trains on its own server's model.
    """

    scheme: Scheme
    up_link = "client->edge"
    down_link = "edge->client"

    def __init__(
        self,
        *,
        clusters: Clusters,
        num_servers: int,
        local_steps: int,
        participation: float = 1.0,
        system: System | None = None,
        aggregation: str = "mean",
        secure_sum: bool | SecureSum = False,
        edge_nodes: bool = False,
        **options: Unpack[FederationOptions],
    ) -> None:
        int_at_least(1, num_servers=num_servers, local_steps=local_steps)
        self.aggregation = parse_aggregation(aggregation)
        summed = parse_secure_sum(secure_sum)
        if summed is not None and not self.aggregation.is_mean:
            raise ValueError(
                f"aggregation is {aggregation!r}; valid with secure_sum is 'mean': a sum gives no other"
            )
        if summed is not None and edge_nodes:
            raise ValueError("secure_sum is set; valid is False where edge servers are nodes")
        in_range("participation", participation, 0.0, 1.0, open_below=True)
        self.num_servers = num_servers
        self.local_steps = local_steps
        self.participation = participation
        self.system = system
        self._chosen_clusters = clusters
        num_clients = None if clusters is None or isinstance(clusters, str) else len(clusters)
        # Where edge servers are nodes of their own; None where they are emulated.
        self.edges = (
            EdgeFederation(num_clients, num_servers, self.aggregation, **options) if edge_nodes else None
        )
        federation = self.edges or Federation(num_clients, **options)
        links = {"down_link": self.down_link, "up_link": self.up_link}
        self.sums = None if summed is None else SecureSums(summed, federation, **links)
        super().__init__(federation)
        self.clusters = self._checked_clusters(clusters)
        smallest = min(Counter(self.clusters).values(), default=self.aggregation.least)
        if smallest < self.aggregation.least:
            raise ValueError(
                f"aggregation is {aggregation!r}, which needs {self.aggregation.least} clients; the smallest "
                f"cluster has {smallest}"
            )
        if summed is not None and smallest < summed.min_nodes and self.clusters:
            raise ValueError(
                f"secure_sum needs {summed.min_nodes} clients in each cluster; the smallest has {smallest}"
            )
        if clusters == BY_GROUP:
            admits = self.federation.admits
            self.federation.admits = lambda node: (admits and admits(node)) or self._with_group(node)

    def _forget(self) -> None:
        self._models: ServerModels | None = None
        # Whether every reply told how many iterations its node took.
        self._steps_told = True
        # Samples of each cluster, with the clusters and of how many clients the sizes were known.
        self._sizes: tuple[tuple[int, ...], int, NDArray[np.float64]] | None = None
        # The server of each group.
        self._groups: dict[str, int] = {}
        if self.sums is not None:
            self.sums.forget()

    def _checked_clusters(self, clusters: Clusters) -> tuple[int, ...]:
        if isinstance(clusters, str) and clusters != BY_GROUP:
            raise ValueError(f"clusters is {clusters!r}; valid is a server for each client, or {BY_GROUP!r}")
        if clusters is None or isinstance(clusters, str):
            places = self.federation.places
            contiguous = contiguous_clusters(
                (places or self.federation.quorum) - self._num_edges, self.num_servers
            )
            return contiguous if places is not None else ()
        if set(clusters) != set(range(self.num_servers)):
            raise ValueError(
                f"clusters names the servers {sorted(set(clusters))}; "
                f"valid is each of 0 to {self.num_servers - 1}"
            )
        return tuple(int(server) for server in clusters)

    # What a method of the family decides.

    def participants(self, server_round: int) -> list[int]:
        """Return the partition ids that take part in a round: Bernoulli(beta) draws, a stream a client."""
        return self._taking_part(server_round, range(self.num_clients))

    def _taking_part(self, server_round: int, clients: Iterable[int]) -> list[int]:
        """Return those of some partitions that have a server, and take part by their draw."""
        beta = self.participation
        clients = [i for i in clients if self.clusters[i] != _NO_SERVER]
        if beta == 1.0:  # Every draw is below it, and a round of many clients would make as many streams.
            return clients
        return [i for i in clients if self.federation.uniform(server_round, i) < beta]

    def work_of(self, server: int, server_round: int) -> dict[str, int]:
        """Return what a server asks of its clients in a round, for their configs."""
        return {
            "server-round": server_round,
            "local-steps": self.local_steps,
            "first-step": (server_round - 1) * self.local_steps,
        }

    def exchange_due(self, server_round: int) -> bool:
        """Return whether the servers exchange their models at the end of a round."""
        return False

    def between_servers(self, models: NDArray[Any]) -> NDArray[Any]:
        """Return the servers' models (D, M) after their exchange."""
        return models

    def server_links(self, models: ServerModels) -> list[ServerTransfer]:
        """Return the transfers of one exchange between servers that have these models."""
        return []

    def exchanged(self, server_round: int, models: ServerModels) -> tuple[NDArray[Any], list[ServerTransfer]]:
        """Return the servers' models (D, M) after their exchange, and the transfers that it took."""
        return models.after(self.between_servers), self.server_links(models)

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
    def iterations(self) -> int | None:
        """Local iterations since the start; None where a reply did not tell them."""
        return self.completed_rounds * self.local_steps if self._steps_told else None

    def progress(self) -> Progress:
        """Return iterations, traffic and simulated seconds since the start; None for what is not known."""
        progress = super().progress()
        return progress if self._steps_told else replace(progress, sim_seconds=None)

    @property
    def report(self) -> ExchangeReport:
        """What the last training exchange sent, got and lost, with those with edge servers that are nodes."""
        if self.edges is None:
            return self.federation.report
        clients, edges = self.edges.report, self.edges.edge_report
        return ExchangeReport(
            clients.sent + edges.sent, clients.accepted + edges.accepted, clients.rejected + edges.rejected
        )

    @property
    def cluster_sizes(self) -> NDArray[np.float64]:
        """Samples of each cluster (D,); a client whose size is not known yet counts as the mean client.

        Under a robust rule, which believes no claim of samples, clients of each cluster.
        """
        known_of = len(self.federation.sizes)
        if self._sizes is None or self._sizes[0] is not self.clusters or self._sizes[1] != known_of:
            self._sizes = self.clusters, known_of, self._sum_sizes()
        return self._sizes[2]

    def _sum_sizes(self) -> NDArray[np.float64]:
        clusters = np.array(self.clusters, np.int64)
        of_any = clusters != _NO_SERVER
        weights = self.federation.weights(len(clusters))[of_any] if self.aggregation.is_mean else None
        sums = np.bincount(clusters[of_any], weights, minlength=self.num_servers)
        return sums.astype(np.float64)

    @property
    def server_weights(self) -> NDArray[np.float64]:
        """The clusters' shares of all samples (D,)."""
        sizes = self.cluster_sizes
        weights: NDArray[np.float64] = sizes / sizes.sum()
        return weights

    def server_models(self) -> list[ArrayRecord]:
        """Return the servers' models."""
        return self._trained().records()

    def current_arrays(self) -> ArrayRecord | None:
        """Return u, the data-weighted mean of the servers' models; None before the first round.

        No single server owns u unless the servers agree. Of servers that are nodes and may lie it is what the
        rule takes of their models.
        """
        if self._models is None:
            return None
        if self.edges is None or self.aggregation.is_mean:
            return self._models.layout.unflatten(self._models.mean(self.server_weights))
        return self._models.layout.unflatten(self._models.robust_mean(self.server_weights, self.aggregation))

    def adopt(self, arrays: ArrayRecord) -> None:
        """Give a single server these arrays; ValueError where there are several."""
        models = self._models
        if models is None:  # The round begins with its arrays.
            return
        if self.unwrapped() is not None:
            super().adopt(arrays)
        vector = models.layout.flatten(arrays, models.vectors.dtype)
        self._models = replace(models, vectors=vector[None])

    def unwrapped(self) -> str | None:
        """Return that clusters have models of their own, where there are several."""
        if self.num_servers == 1 and self.edges is None:
            return None
        return f"each of its {self.num_servers} edge servers has a model of its own, and nodes train on that"

    def consensus_error(self) -> float:
        """Return the data-weighted mean squared distance of the servers' models to u."""
        return self._trained().consensus_error(self.server_weights)

    def _state(self) -> dict[str, Any]:
        found = {"clusters": list(self.clusters), "groups": self._groups} if self._finds_clusters else {}
        untold = {} if self._steps_told else {"steps-told": False}
        return {"models": self._trained().vectors, **found, **untold}

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._models = ServerModels(self.federation.known_layout(), np.array(state["models"]))
        self.clusters = tuple(int(server) for server in state.get("clusters", self.clusters))
        self._groups = {str(name): int(server) for name, server in state.get("groups", {}).items()}
        self._steps_told = bool(state.get("steps-told", True))

    # Flower's interface.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send each participant its server's model; one shared record a cluster."""
        self._begin_round(server_round)
        models = self._initialised(arrays)
        self._know_clusters(grid)
        nodes, offline = self.federation.online(grid, partial(self._drawn, server_round))
        if self.sums is not None:
            nodes = self.sums.members(server_round, grid, self._by_server(nodes))
        contents = {
            server: RecordDict(
                {
                    self.settings.arrayrecord_key: models.layout.unflatten(models.vectors[server]),
                    self.settings.configrecord_key: ConfigRecord(
                        {**config, **self.work_of(server, server_round)}
                    ),
                }
            )
            for server in sorted({self.clusters[node.partition_id] for node in nodes})
        }
        if self.sums is not None:
            contents = {server: self.sums.announce(server, one) for server, one in contents.items()}
        self._book_downlinks(server_round, nodes, contents)
        addressed = [(node, contents[self.clusters[node.partition_id]]) for node in nodes]
        messages = self.federation.instruct(server_round, addressed, self._checked, offline=offline)
        if self.sums is not None:
            self.sums.note_left_out()
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average each cluster, eq. (3), let the servers exchange if due, and return u.

        Nothing changes, and None is returned, if fewer than ``min_train_nodes`` replies are valid, or if no
        edge server answers where they are nodes.
        """
        contents: list[RecordDict] = []
        arriving = self.federation.accept(replies)
        if self.sums is None:
            averaged = self._averaged(server_round, self._weighed(server_round, arriving, contents))
        else:
            averaged = self._summed(self.sums, server_round, arriving, contents)
        if averaged is None:
            return None, None
        models = replace(self._trained(), vectors=averaged)
        if self.exchange_due(server_round):
            vectors, transfers = self.exchanged(server_round, models)
            models = replace(models, vectors=vectors)
            for transfer in transfers:
                self.ledger.book(
                    server_round, transfer.link, transfer.source, transfer.target,
                    self.federation.model_bits, transfer.payload_bytes,
                )  # fmt: skip
        self._models = models
        self.federation.completed = server_round
        if self._steps_told:
            self.clock.advance(self._round_seconds(server_round))
        metrics = self.federation.train_metrics(contents)
        metrics["consensus-error"] = self.consensus_error()
        if self.sums is not None:
            metrics.update(self.sums.metrics())
        return self.current_arrays(), metrics

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t├──> Federation:")
        log(INFO, "\t│\t├── Clients: %d | servers: %d", self.num_clients, self.num_servers)
        log(INFO, "\t│\t├── Local iterations a round: %d", self.local_steps)
        log(INFO, "\t│\t├── Aggregation: %s", self.aggregation)
        if self.sums is not None:
            log(INFO, "\t│\t├── Secure sums: %s", self.sums.settings)
        log(INFO, "\t│\t└── Participation: %.3g", self.participation)
        self.federation.log_keys()

    # Mechanics.

    def _know_clusters(self, grid: Grid) -> None:
        """Find the clusters of a run that begins, and a server for nodes that came since.

        RosterError where the nodes cannot be told apart.
        """
        begins, found = self.federation.introduced is None, self._finds_clusters
        if not found and (self._chosen_clusters is None or not begins):
            return
        nodes = [node for node in self.federation.gather(grid).nodes if not node.vacant]
        if self._chosen_clusters is not None and not self.federation.introduced:
            raise RosterError(
                "clusters says which edge server each partition belongs to, but no node says which partition "
                "it has: use ClientApp(mods=[introduce]), with 'from hedgerow.clients import introduce', or "
                "leave clusters out"
            )
        if not found:
            return
        if begins and not self.completed_rounds:
            self.clusters = ()
            if self._chosen_clusters == BY_GROUP:
                self._groups = _servers_of([node.group for node in nodes], self.num_servers)
            else:
                servers = contiguous_clusters(len(nodes), self.num_servers)
                self._place({node.partition_id: s for node, s in zip(nodes, servers, strict=True)})
        self._welcome(nodes)

    @property
    def _finds_clusters(self) -> bool:
        """Whether it is the nodes that come of which the clusters are made."""
        return self._chosen_clusters == BY_GROUP or self.federation.places is None

    def _welcome(self, nodes: Sequence[Node]) -> None:
        """Give clients without a server one: that of their group, else the one with fewest clients."""
        for node in nodes:
            if node.partition_id < self.num_clients and self.clusters[node.partition_id] != _NO_SERVER:
                continue
            if self._chosen_clusters != BY_GROUP:
                counts = Counter(self.clusters)
                self._place({node.partition_id: min(range(self.num_servers), key=lambda d: counts[d])})
            elif node.group in self._groups:
                self._place({node.partition_id: self._groups[node.group]})
            else:
                self.federation.refuse(node, "unknown group")
        self._place({})

    def _place(self, servers: Mapping[int, int]) -> None:
        """Note the servers of some clients, by partition id."""
        clients = max(
            [self.num_clients, *(i + 1 for i in servers), self.federation.num_clients - self._num_edges]
        )
        known = dict(enumerate(self.clusters)) | dict(servers)
        self.clusters = tuple(known.get(i, _NO_SERVER) for i in range(clients))

    @property
    def _num_edges(self) -> int:
        """Edge servers that are nodes of the federation."""
        return self.num_servers if self.edges is not None else 0

    def _with_group(self, node: Node) -> str | None:
        """Return why a node cannot belong to a cluster; None if it can, or is an edge server itself."""
        places = self.federation.places
        if places is not None and node.partition_id >= places - self._num_edges:
            return None
        if not node.group:
            return "no group"
        return "unknown group" if self._groups and node.group not in self._groups else None

    def _drawn(self, server_round: int, there: Sequence[int]) -> list[int]:
        """Return who takes part in a round, of whom only those that are there are sent anything."""
        return self.participants(server_round)

    def _trained(self) -> ServerModels:
        if self._models is None:
            raise RuntimeError("No model yet: configure_train or start comes first.")
        return self._models

    def _initialised(self, arrays: ArrayRecord) -> ServerModels:
        if self._models is None:
            vectors = np.tile(self.federation.vector(arrays), (self.num_servers, 1))  # (D, M)
            self._models = ServerModels(self.federation.known_layout(), vectors)
        return self._models

    def _by_server(self, nodes: Sequence[Node]) -> dict[int, list[Node]]:
        """Return the nodes of each server that has some."""
        clusters: dict[int, list[Node]] = {}
        for node in nodes:
            clusters.setdefault(self.clusters[node.partition_id], []).append(node)
        return dict(sorted(clusters.items()))

    def _checked(self, node: Node, content: RecordDict) -> Any:
        models = self._trained()
        if self.sums is not None:
            self._check_steps(only_record(content, MetricRecord, "bad metrics").get(_NUM_STEPS))
            return self.sums.checked(node, content)
        arrays = only_arrays(content)
        weight = self.federation.checked_weight(content)
        vector = models.layout.flatten(arrays, models.vectors.dtype)
        sent = models.vectors[self.clusters[node.partition_id]]
        self.federation.check_update(vector, sent)
        self._check_steps(only_record(content, MetricRecord, "bad metrics").get(_NUM_STEPS))
        return weight, vector

    def _check_steps(self, told: object) -> None:
        """Raise PayloadError where a node took another number of iterations; note where it is not told."""
        if told is not None and told != self.local_steps:
            detail = f"took {quoted(told)} steps; config['local-steps'] was {self.local_steps}"
            raise PayloadError("num-steps is not local-steps", detail)
        if told is None and self._steps_told:
            self._steps_told = False
            log(
                WARNING,
                "Replies do not tell 'num-steps' in their MetricRecord: whether config['local-steps'] = %d "
                "was honoured is not known, and iterations and simulated seconds are recorded as unknown.",
                self.local_steps,
            )

    def _weighed(
        self, server_round: int, replies: Iterable[Reply], contents: list[RecordDict]
    ) -> Iterator[tuple[int, float, NDArray[Any]]]:
        """Yield (server, |S_i|, model) of each reply, booking it; keep its metrics for later."""
        bits = self.federation.model_bits
        for reply in replies:
            client = reply.node.partition_id
            server = self.clusters[client]
            told, vector = reply.value
            weight = self.federation.size_of(reply, told)
            arrays = only_arrays(reply.content)
            self.federation.book_up(server_round, self.up_link, client, server, bits, arrays, reply)
            contents.append(reply.metrics)
            yield server, weight, vector

    def _averaged(
        self, server_round: int, accepted: Iterator[tuple[int, float, NDArray[Any]]]
    ) -> NDArray[Any] | None:
        """Return the servers' means, eq. (3); None if there were too few replies."""
        previous = self._trained().vectors
        if self.edges is None:
            take = cluster_means if self.aggregation.is_mean else self._robust_means
            models = take(accepted, previous)
            return models if self.federation.enough() else None
        bundles = list(accepted)
        return self.edges.averaged(server_round, bundles, previous) if self.federation.enough() else None

    def _summed(
        self, sums: SecureSums, server_round: int, replies: Iterable[Reply], contents: list[RecordDict]
    ) -> NDArray[Any] | None:
        """Return the servers' means, eq. (3), of sums; None if too few replies are in one.

        A server without a sum keeps its own model.
        """
        models = self._trained().vectors.copy()
        updates = sums.unmask(server_round, self._booked(sums, server_round, replies))
        for server, update in sorted(updates.items()):
            mean = models[server] + update.mean
            try:
                self.federation.check_update(mean, models[server])
            except PayloadError as error:
                sums.lose(update, error.reason)
                continue
            models[server] = mean
            contents.append(update.metrics)
        return models if sums.enough() else None

    def _booked(self, sums: SecureSums, server_round: int, replies: Iterable[Reply]) -> Iterator[Reply]:
        """Yield the replies, booking them."""
        for reply in replies:
            client, arrays = reply.node.partition_id, only_arrays(reply.content)
            bits, server = self.federation.model_bits, self.clusters[client]
            self.federation.book_up(server_round, self.up_link, client, server, bits, arrays, reply)
            sums.book_shares(server_round, reply)
            yield reply

    def _robust_means(
        self, accepted: Iterable[tuple[int, float, NDArray[Any]]], previous: NDArray[Any]
    ) -> NDArray[Any]:
        """Return the servers' models after what their rule takes of the updates of each cluster."""
        replies: dict[int, list[tuple[float, NDArray[Any]]]] = {}
        for server, weight, model in accepted:
            replies.setdefault(server, []).append((weight, model))
        models = previous.copy()
        for server, told in sorted(replies.items()):
            before = previous[server].astype(np.float64)
            updates = np.stack([model - before for _, model in told])
            weights = np.array([weight for weight, _ in told])
            models[server] = before + self.federation.combined(self.aggregation, updates, weights)
        return models

    def _round_seconds(self, server_round: int) -> float:
        system = self._system()
        tau1 = self.local_steps
        seconds = round_seconds(self.scheme, system, tau1=tau1)
        if self.exchange_due(server_round):
            seconds += inter_seconds(self.scheme, system, alpha=self.gossip_steps)
        return seconds

    def _system(self) -> System:
        if self.system is not None:
            return self.system
        return System(self.federation.num_parameters, preset("paper-text").compute)

    def _book_downlinks(
        self, server_round: int, nodes: list[Node], contents: Mapping[int, RecordDict]
    ) -> None:
        bits = self.federation.model_bits
        # The model, and the plan of its sum where there is one: all but the config.
        told = {
            s: {k: r for k, r in c.items() if k != self.settings.configrecord_key}
            for s, c in contents.items()
        }
        model = {s: sum(map(payload_bytes, records.values())) for s, records in told.items()}
        message = {s: payload_bytes(c) for s, c in contents.items()}
        for node in nodes:
            client, server = node.partition_id, self.clusters[node.partition_id]
            sizes = (model[server], message[server])
            self.federation.book_down(server_round, self.down_link, server, client, bits, sizes)
