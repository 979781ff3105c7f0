"""SD-FEEL's edge servers as nodes: the ServerApp only carries what they are told and tell each other.

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data", Algorithm 1, eqs. (3) and (5). Differs: what an edge server gets goes through
Flower's hub, one exchange for the clients' models and one for each gossip step; an edge server that is lost
in a round sits the round's gossip out, which the paper leaves open; edge servers may take robust means.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from typing import Any, Unpack

import networkx as nx
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import DTypeLike, NDArray

from hedgerow.strategies.bounds import TOO_LARGE, norm_of
from hedgerow.strategies.federation import Chosen, Federation, FederationOptions, only_arrays
from hedgerow.strategies.inbox import ExchangeReport, Inbox, Node, Roster, RosterError, collect
from hedgerow.strategies.roster import placed
from hedgerow.strategies.sd_feel.servers import ServerTransfer
from hedgerow.strategies.topology import Mixing
from hedgerow.wire.edge_servers import (
    CLIENT,
    EDGE,
    LACKS,
    MODEL,
    MODELS,
    OWN,
    RULE,
    WEIGHTS,
    Column,
    columns,
)
from hedgerow.wire.ledger import HUB_TO_NODE, NODE_TO_HUB
from hedgerow.wire.message_types import GOSSIP, INTRA
from hedgerow.wire.records import Layout, PayloadError, lazy_array, payload_bytes
from hedgerow.wire.robust_means import NEIGHBOURHOOD_RULES, Aggregation, neighbourhood_rule

__all__ = ["EdgeFederation", "check_edge_rule", "gossip_transfers"]

Vector = NDArray[Any]
# Of what an edge server's model may move by: what its rounding takes, relative to that and to the model.
_ROUNDING, _MODEL_ROUNDING = 1e-3, 1e-6


class EdgeFederation(Federation):
    """A federation whose edge servers are nodes beside its clients, and the relay between them.

    Partitions 0 to C - 1 are the clients, C to C + D - 1 the edge servers; all of them introduce themselves
    (``query.whoami``), and the run waits for as many of them as the options say and D more; one whose role is
    not that of its partition is left out. Edge servers keep their models and do all sums; the relay
    passes on vectors, keeps the last that each edge server told, and sends an edge server its own model only
    if that one does not have it. The legs through the hub are booked as such, 32 bits a parameter of every
    model that a message carries.

    An edge server that does not answer in time, or answers with garbage, is lost for the round: it keeps its
    model of before, and its edges move their weight to their ends (``Mixing.without_edge``), which leaves
    consensus and the weighted mean alone. A gossip step in which one is lost is taken again without it.

    One that lies is bounded by what it was sent: its model moves no further than the updates of its clients,
    or the differences of its neighbours' models from its own, allow by the rule that it was to take. A reply
    beyond is refused, as ``edge update too large``; ``max_update_norm_ratio`` = 0 takes the bound away.
    Weights and clusters' sizes are the strategy's, capped and told with each message. What stays within is
    for a rule: ``aggregation`` is then what each edge server takes of its clients' updates, as where it is
    emulated, and of its own and its neighbours' models in gossip.

    Parameters
    ----------
    clients : int or None
        C; None for what the options say.
    num_servers : int
        D, >= 1.
    aggregation : Aggregation (default: the mean)
        Of ``neighbourhood_rule``; others raise ValueError with the reason.
    **options
        See ``FederationOptions``. A round's deadline is that of each of its exchanges.

    Attributes
    ----------
    edge_report : ExchangeReport
        The round's exchanges with edge servers; reasons begin with ``edge``. ``edge no state`` is one that
        was then sent its model.
    """

    def __init__(
        self,
        clients: int | None,
        num_servers: int,
        aggregation: Aggregation | None = None,
        /,
        **options: Unpack[FederationOptions],
    ) -> None:
        super().__init__(clients, **options)
        self.aggregation = aggregation or Aggregation("mean")
        _check_rule(self.aggregation)
        if self.places is None:
            raise ValueError("num_clients is 0; valid with edge servers that are nodes is how many clients")
        self._clients = self.places
        self._servers = num_servers
        self.places += num_servers
        self.quorum += num_servers
        self.admits = self._in_its_role

    def reset(self) -> None:
        """Forget the run."""
        super().reset()
        self.edge_report = ExchangeReport()
        self._grid: Grid | None = None
        self._token = 0
        # Which edge servers have the model that the relay has of them, and of which instruction it came.
        self._held: dict[int, int] = {}
        self._edges: list[Node] = []
        self._lost: set[int] = set()
        self._forgetful: set[int] = set()

    def gather(self, grid: Grid) -> Roster:
        """Return the roster of the clients; that of all nodes is waited for at first, refreshed later.

        Raises
        ------
        RosterError
            If nodes do not come, or do not introduce themselves.
        """
        everyone = super().gather(grid)
        if not everyone.introduced:
            raise RosterError("Edge servers that are nodes need nodes that answer 'query.whoami'; none does.")
        clients = Roster(everyone.nodes[: self._clients], everyone.introduced)
        clients.online = everyone.online
        self._edges = list(everyone.nodes[self._clients :])
        self._lost |= {d for d, node in enumerate(self._edges) if node.node_id not in everyone.online}
        for node in self._edges:
            self.sizes.pop(node.partition_id, None)
        return clients

    def online(self, grid: Grid, chosen: Chosen = None) -> tuple[list[Node], int]:
        """Begin a round: return as ``Federation`` does which of the chosen clients are there."""
        self._grid, self.edge_report, self._lost = grid, ExchangeReport(), set()
        there = super().online(grid, chosen)
        if self._lost:
            self.edge_report.rejected["edge offline"] = len(self._lost)
        return there

    def averaged(
        self, server_round: int, replies: Iterable[tuple[int, float, Vector]], previous: Vector
    ) -> Vector | None:
        """Return the edge servers' means of their clients' models, eq. (3); None if none answered.

        Parameters
        ----------
        server_round : int
            The round.
        replies : Iterable[tuple[int, float, NDArray]]
            (server, weight |S_i|, model (M,)) in a fixed order, which is that of the sums.
        previous : NDArray
            The servers' models so far (D, M); one that got nothing is not asked, and keeps its own.
        """
        bundles: dict[int, list[tuple[float, Vector]]] = {}
        for server, weight, model in replies:
            bundles.setdefault(server, []).append((weight, model))
        self._token += 1
        contents = {
            d: _content(ConfigRecord({"token": self._token}), dict(enumerate(models)))
            for d, models in sorted(bundles.items())
            if d not in self._lost
        }
        if not self.aggregation.is_mean:
            for d, content in contents.items():
                self._add_rule(d, content, previous[d])
        most = {d: self._most_of_mean(bundles[d], previous[d]) for d in contents}
        answers = self._ask_twice(server_round, INTRA, contents, previous, most, previous.dtype)
        self._lost |= contents.keys() - answers.keys()
        if bundles and not answers:
            return None
        self._held |= dict.fromkeys(answers, self._token)
        models = previous.copy()
        for d, model in answers.items():
            models[d] = model
        return models

    def gossiped(
        self, server_round: int, models: Vector, mixing: Mixing, alpha: int, mixed: NDArray[np.bool_]
    ) -> tuple[Vector, list[ServerTransfer]]:
        """Return the models (D, M) after ``alpha`` gossip steps, eq. (5), and the transfers that they took.

        Between two steps models travel in float64, so that the result is rounded once.

        Parameters
        ----------
        server_round : int
            The round.
        models : NDArray
            The servers' models (D, M).
        mixing : Mixing
            The matrix and the graph of all servers.
        alpha : int
            Steps, >= 0.
        mixed : NDArray[bool]
            Which columns take part (M,).
        """
        bounds = np.flatnonzero(np.diff(mixed.astype(np.int8), prepend=0, append=0)).tolist()
        now: list[Vector] = list(models)
        whole = slice(None) if mixed.all() else mixed
        mixing = _without(mixing, self._lost)
        sent: list[ServerTransfer] = []
        for step in range(1, alpha + 1):
            dtype = models.dtype if step == alpha else np.dtype(np.float64)
            while alive := [d for d in range(self._servers) if d not in self._lost]:
                receivers = columns(mixing.matrix)
                most = {d: self._most_of_step(d, now, receivers[d], whole) for d in alive}
                answers = self._step(server_round, now, receivers, most, bounds, dtype)
                if gone := set(alive) - answers.keys():
                    self._lost |= gone
                    mixing = _without(mixing, gone)
                    continue
                sent += gossip_transfers(mixing.graph, now)
                for d, model in answers.items():
                    now[d] = model
                    self._held[d] = self._token
                break
        after = np.empty_like(models)
        for d, model in enumerate(now):
            after[d] = model
        return after, sent

    def state_dict(self) -> dict[str, Any]:
        """Return the federation's state, and which models edge servers have, for a checkpoint."""
        held = {str(d): token for d, token in sorted(self._held.items())}
        return {**super().state_dict(), "edges": {"token": self._token, "held": held}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint. Edge servers without the state that it takes them to have say so."""
        super().load_state_dict(state)
        edges = state["edges"]
        self._token = int(edges["token"])
        self._held = {int(d): int(token) for d, token in edges["held"].items()}

    def _step(
        self,
        server_round: int,
        now: Sequence[Vector],
        receivers: Sequence[Column],
        most: Mapping[int, float],
        bounds: list[int],
        dtype: np.dtype[Any],
    ) -> dict[int, Vector]:
        """Take one gossip step at the edge servers, those of ``most``, which says what each may move by."""
        self._token += 1
        contents = {}
        for d in most:
            config = ConfigRecord({"token": self._token, "server": d, "dtype": str(dtype), "columns": bounds})
            contents[d] = _content(config, {j: (p, now[j] if j != d else None) for j, p in receivers[d]})
            self._add_own(d, contents[d], now[d])
            if not self.aggregation.is_mean:
                config[RULE] = str(self.aggregation)
        return self._ask_twice(server_round, GOSSIP, contents, now, most, dtype)

    def _add_rule(self, d: int, content: RecordDict, own: Vector) -> None:
        content.config_records["config"][RULE] = str(self.aggregation)
        self._add_own(d, content, own)

    def _add_own(self, d: int, content: RecordDict, own: Vector) -> None:
        """Let an edge server begin with a model: by name where it has it, else it is sent."""
        if (token := self._held.get(d)) is None:
            content[OWN] = _vectors({MODEL: own})
        else:
            content.config_records["config"]["builds-on"] = token

    def _most_of_mean(self, models: Sequence[tuple[float, Vector]], before: Vector) -> float:
        """Return how far a mean of models can be from the one that they were learnt from."""
        return self._furthest([norm_of(model - before) for _, model in models])

    def _most_of_step(self, d: int, now: Sequence[Vector], receiver: Column, mixed: Any) -> float:
        """Return how far a gossip step can move the model of an edge server."""
        apart = {j: norm_of((now[j] - now[d])[mixed]) for j, _ in receiver if j != d}
        if self.aggregation.name not in ("mean", "clipped"):
            return self._furthest(apart.values())
        return sum(abs(p) * self._furthest([apart[j]]) for j, p in receiver if j != d)

    def _furthest(self, norms: Iterable[float]) -> float:
        """Return the largest norm that some vectors of such norms can have together under the rule."""
        norms = list(norms)
        if self.aggregation.name in ("median", "trimmed-mean"):  # Each entry is within theirs.
            return sqrt(sum(norm**2 for norm in norms))
        longest = max(norms, default=0.0)
        return min(longest, *self.aggregation.arguments) if self.aggregation.arguments else longest

    def _ask_twice(
        self,
        server_round: int,
        message_type: str,
        contents: Mapping[int, RecordDict],
        models: Sequence[Vector] | Vector,
        most: Mapping[int, float],
        dtype: DTypeLike,
    ) -> dict[int, Vector]:
        """Return the edge servers' replies (M,); those that lost the model to begin with are sent it."""
        answers = self._ask(server_round, message_type, contents, models, most, dtype)
        again = {
            d: RecordDict({**contents[d], OWN: _vectors({MODEL: models[d]})}) for d in sorted(self._forgetful)
        }
        if not again:
            return answers
        return answers | self._ask(server_round, message_type, again, models, most, dtype)

    def _ask(
        self,
        server_round: int,
        message_type: str,
        contents: Mapping[int, RecordDict],
        before: Sequence[Vector] | Vector,
        most: Mapping[int, float],
        dtype: DTypeLike,
    ) -> dict[int, Vector]:
        """Make an exchange with edge servers, and return the valid models (M,) of their replies."""
        if self._grid is None:
            raise RuntimeError("No round is open: configure_train comes first.")
        bits, group = self.model_bits, f"{server_round}-{message_type}-{self._token}"
        layout = Layout((MODEL,), ((before[0].size,),), (str(np.dtype(dtype)),))
        self._forgetful = set()

        def check(node: Node, content: RecordDict) -> Vector:
            if any(LACKS in config for config in content.config_records.values()):
                self._forgetful.add(node.partition_id - self._clients)
                raise PayloadError("no state", "the edge server has not the model to go on from")
            model = layout.flatten(only_arrays(content), dtype)
            d = node.partition_id - self._clients
            self._check_move(model, before[d], most[d])
            return model

        exchange = Inbox([self._edges[d] for d in contents], group, check)
        messages = []
        for d, content in contents.items():
            node, models = self._edges[d], sum(map(len, content.array_records.values()))
            carried = payload_bytes(content)
            self.ledger.book(server_round, HUB_TO_NODE, 0, node.partition_id, models * bits, carried)
            messages.append(Message(content, node.node_id, message_type, ttl=self.timeout, group_id=group))
            # Whatever comes back, the edge server may have gone on.
            self._held.pop(d, None)
        answers = {}
        for reply in exchange.accept(collect(self._grid, messages, self.timeout) if messages else ()):
            partition = reply.node.partition_id
            answers[partition - self._clients] = reply.value
            self.ledger.book(server_round, NODE_TO_HUB, partition, 0, bits, payload_bytes(reply.content))
        self.edge_report.sent += exchange.report.sent
        self.edge_report.accepted += exchange.report.accepted
        for reason, count in exchange.report.rejected.items():
            self.edge_report.rejected[f"edge {reason}"] += count
        return answers

    def _check_move(self, model: Vector, before: Vector, most: float) -> None:
        """Raise PayloadError where an edge server's model moved further than what it was sent allows."""
        if not self.settings.max_update_norm_ratio:
            return
        moved, most = norm_of(model - before), most * (1 + _ROUNDING)
        if not moved <= most + _MODEL_ROUNDING * (norm_of(before) + most):
            raise PayloadError(TOO_LARGE, f"norm {moved:.3g}, expected at most {most:.3g}")

    def _in_its_role(self, node: Node) -> str | None:
        due = CLIENT if node.partition_id < self._clients else EDGE
        if node.role in ("", due):
            return placed(node)
        return f"role is not {due}"


def _check_rule(aggregation: Aggregation) -> None:
    try:
        neighbourhood_rule(str(aggregation))
    except ValueError:
        raise ValueError(
            f"aggregation is {str(aggregation)!r}; valid where edge servers are nodes is "
            f"{NEIGHBOURHOOD_RULES}: in gossip each has few models, and no majority of them to follow"
        ) from None


def check_edge_rule(aggregation: Aggregation, graph: nx.Graph) -> None:
    """Raise ValueError where a rule of medians cuts nothing of the smallest neighbourhood of a graph."""
    if aggregation.is_mean or aggregation.name == "clipped" or len(graph) == 1:
        return
    models = 1 + min(degree for _, degree in graph.degree)
    share = 0.5 if aggregation.name == "median" else aggregation.arguments[0]
    if models < 3 or int(share * models) < 1:
        raise ValueError(
            f"aggregation is {str(aggregation)!r}, which leaves no liar out of the {models} models that an "
            "edge server of this topology has in gossip; valid is clipped(tau), or a graph with more edges"
        )


def gossip_transfers(graph: nx.Graph, models: Sequence[Vector]) -> list[ServerTransfer]:
    """Return the transfers of one gossip step: each edge server's vector to all of its neighbours."""
    sizes = [payload_bytes(_vectors({str(d): model})) for d, model in enumerate(models)]
    directed = sorted([*graph.edges, *((j, i) for i, j in graph.edges)])
    return [ServerTransfer("edge->edge", i, j, sizes[i]) for i, j in directed]


def _content(config: ConfigRecord, terms: Mapping[int, tuple[float, Vector | None]]) -> RecordDict:
    """Return an instruction: models and their weights by sender; a model that is None is not sent."""
    models = _vectors({str(sender): model for sender, (_, model) in terms.items() if model is not None})
    weights = MetricRecord({str(sender): weight for sender, (weight, _) in terms.items()})
    return RecordDict({"config": config, MODELS: models, WEIGHTS: weights})


def _vectors(models: Mapping[str, Vector]) -> ArrayRecord:
    record = ArrayRecord()
    for key, model in models.items():
        record[key] = lazy_array(model)
    return record


def _without(mixing: Mixing, servers: Iterable[int]) -> Mixing:
    """Return the mixing without all edges of some servers, whose weight their ends take."""
    for d in sorted(servers):
        for j in sorted(mixing.graph.neighbors(d)):
            mixing = mixing.without_edge(d, j)
    return mixing
