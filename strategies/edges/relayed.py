"""SD-FEEL's edge servers as nodes: the ServerApp only relays their messages.

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data", Algorithm 1, eqs. (3) and (5). Differs: edge servers' messages go through
Flower's hub, in one exchange for the clients' models and one for each gossip step; an edge server that is
lost in a round does not take part in its gossip (the paper leaves this open); edge servers may use robust
means.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from typing import Any, Unpack

import networkx as nx
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import DTypeLike, NDArray

from hedgerow.strategies.aggregate.mean import FixedResult, Mean
from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.edges.mixers import GossipMixer, directed, mixed_entries, robust_mean, sent_bytes
from hedgerow.strategies.exchange import Exchange, Question, RoundFailedError, Steps, Vector
from hedgerow.strategies.federation import Federation, only_arrays
from hedgerow.strategies.inbox import TOO_LARGE, ExchangeReport, Inbox
from hedgerow.strategies.limits import norm_of
from hedgerow.strategies.node import Node, placed
from hedgerow.strategies.options import FederationOptions
from hedgerow.strategies.roster import Roster
from hedgerow.strategies.topology import Mixing
from hedgerow.strategies.whoami import RosterError
from hedgerow.wire.edge_servers import CLIENT, EDGE, LACKS, MODEL, MODELS, OWN, RULE, WEIGHTS, Column, columns
from hedgerow.wire.message_types import GOSSIP, INTRA
from hedgerow.wire.records import Layout, PayloadError, lazy_array
from hedgerow.wire.robust_means import NEIGHBOURHOOD_RULES, Aggregation, neighbourhood_rule

# Tolerances for rounding in the bound on an edge server's move, relative to the bound and to the model.
_ROUNDING, _MODEL_ROUNDING = 1e-3, 1e-6


class EdgeFederation(Federation):
    """A federation whose edge servers are nodes beside its clients.

    Partitions 0 to C - 1 are the clients, C to C + D - 1 the edge servers. All of them introduce themselves
    (``query.whoami``); the run waits for the clients' quorum and D more nodes. A node with a role that does
    not match its partition is excluded.

    A round's deadline applies to each of its exchanges. ``edge_report`` has the message counts of the round's
    exchanges with edge servers; reasons begin with ``edge``, and ``edge no state`` counts edge servers that
    were then sent their model.
    """

    def __init__(
        self, clients: int | None, num_servers: int, /, **options: Unpack[FederationOptions]
    ) -> None:
        super().__init__(clients, **options)
        if self.members.places is None:
            raise ValueError("num_clients must be the number of clients where edge servers are nodes, got 0")
        # C.
        self.num_trained = self.members.places
        self.members.places += num_servers
        self.members.quorum += num_servers
        self.members.admits = self._in_its_role

    def reset(self) -> None:
        """Forget the run."""
        super().reset()
        self.edge_report = ExchangeReport()
        self.token = 0
        # The edge servers that hold the same model as the relay, with the token of its instruction.
        self.held: dict[int, int] = {}
        self.edges: list[Node] = []
        # Edge servers that are lost for this round.
        self.lost: set[int] = set()

    def gather(self, grid: Grid) -> Roster:
        """Return the clients' roster, from that of all nodes: gathered on the first call, refreshed later."""
        everyone = super().gather(grid)
        if not everyone.introduced:
            raise RosterError("Edge servers that are nodes need nodes that answer 'query.whoami'; none does.")
        clients = Roster(everyone.nodes[: self.num_trained], everyone.introduced)
        clients.online = everyone.online
        self.edges = list(everyone.nodes[self.num_trained :])
        self.lost |= {d for d, node in enumerate(self.edges) if node.node_id not in everyone.online}
        for node in self.edges:
            self.limits.claims.sizes.pop(node.partition_id, None)
        return clients

    def open_round(self, grid: Grid) -> Roster:
        """Begin an attempt of a round, in which only offline edge servers are lost."""
        self.edge_report, self.lost = ExchangeReport(), set()
        clients = super().open_round(grid)
        if self.lost:
            self.edge_report.rejected["edge offline"] = len(self.lost)
        return clients

    @property
    def whole_report(self) -> ExchangeReport:
        """Message counts of the last training exchange and the exchanges with edge servers."""
        clients, edges = self.report, self.edge_report
        return ExchangeReport(
            clients.sent + edges.sent, clients.accepted + edges.accepted, clients.rejected + edges.rejected
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the federation's state, and the models that edge servers hold, for a checkpoint."""
        held = {str(d): token for d, token in sorted(self.held.items())}
        return {**super().state_dict(), "edges": {"token": self.token, "held": held}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint; edge servers that lack the assumed state will report this."""
        super().load_state_dict(state)
        edges = state["edges"]
        self.token = int(edges["token"])
        self.held = {int(d): int(token) for d, token in edges["held"].items()}

    def _in_its_role(self, node: Node) -> str | None:
        due = CLIENT if node.partition_id < self.num_trained else EDGE
        if node.role in ("", due):
            return placed(node)
        return f"role is not {due}"


class EdgeNodes:
    """Edge servers that are nodes: they average their clients' models, and gossip.

    Edge servers keep their models and compute all sums. The relay forwards vectors, keeps the last one of
    each edge server, and sends an edge server its own model only if that one lacks it. The legs through the
    hub are booked as such, with 32 bits per parameter of every model in a message.

    An edge server without a valid reply in time is lost for the round: it keeps its previous model, and the
    weights of its edges move to their ends (``Mixing.without_edge``), which preserves consensus and the
    weighted mean. A gossip step in which one is lost is repeated without it.

    A Byzantine edge server's move is bounded by the largest one that its input allows under the rule: the
    updates of its clients, or the differences of its neighbours' models from its own. A larger one is refused
    (``edge update too large``); ``max_update_norm_ratio`` = 0 removes the bound. Weights and cluster sizes
    are the strategy's, capped and sent with each message. Against errors within the bound, each edge server
    applies the rule ``aggregation`` to its clients' updates, as where it is emulated, and in gossip to its
    own and its neighbours' models. Only the rules of ``neighbourhood_rule`` are valid.
    """

    def __init__(self, federation: EdgeFederation, gossip: GossipMixer, aggregation: Aggregation) -> None:
        try:
            neighbourhood_rule(str(aggregation))
        except ValueError:
            raise ValueError(
                f"aggregation where edge servers are nodes must be {NEIGHBOURHOOD_RULES}, got "
                f"{str(aggregation)!r}: in gossip each has few models, and no majority of them to follow"
            ) from None
        self.federation, self._gossip, self.aggregation = federation, gossip, aggregation
        # Edge servers that reported to lack their model.
        self._forgetful: set[int] = set()

    # As an aggregator.

    def means(self, exchange: Exchange, run: RoundContext) -> Steps[Mapping[int, Mean]]:
        """Return the edge servers' means of their clients' models, eq. (3); RoundFailedError without any."""
        federation = self.federation
        bundles: dict[int, list[tuple[float, Vector]]] = {}
        nodes: dict[int, list[int]] = {}
        for replies in (yield exchange):
            weights = run.sizes(replies.nodes, replies.claimed)
            for node, d, row, weight in zip(replies.nodes, replies.pools, replies.rows, weights, strict=True):
                bundles.setdefault(d, []).append((weight, row))
                nodes.setdefault(d, []).append(node)
        federation.token += 1
        alive = {d: models for d, models in sorted(bundles.items()) if d not in federation.lost}
        before = {d: exchange.sent(d) for d in alive}
        contents = {
            d: _content(ConfigRecord({"token": federation.token}), dict(enumerate(models)))
            for d, models in alive.items()
        }
        if not self.aggregation.is_mean:
            for d, content in contents.items():
                content.config_records["config"][RULE] = str(self.aggregation)
                self._add_own(d, content, before[d])
        # No mean is further from the start model than the furthest of the models.
        most = {
            d: self._furthest(norm_of(model - before[d]) for _, model in models)
            for d, models in alive.items()
        }
        dtype = next(iter(before.values())).dtype if before else np.dtype(np.float32)
        answers = yield from self._ask_twice(run, INTRA, contents, before, most, dtype)
        federation.lost |= contents.keys() - answers.keys()
        if bundles and not answers:
            raise RoundFailedError
        federation.held |= dict.fromkeys(answers, federation.token)
        return {
            d: FixedResult(nodes[d], sum(weight for weight, _ in bundles[d]), model)
            for d, model in answers.items()
        }

    # As a mixer.

    @property
    def steps(self) -> int:
        """Alpha."""
        return self._gossip.steps

    def mix(self, servers: Vector, sizes: NDArray[np.float64], run: RoundContext) -> Steps[Vector]:
        """Return the models (D, M) after ``alpha`` gossip steps, eq. (5); book their transfers.

        Between two steps models are sent in float64, so that the result is rounded once.
        """
        federation, mixed = self.federation, mixed_entries(run.federation.known_layout())
        bounds = np.flatnonzero(np.diff(mixed.astype(np.int8), prepend=0, append=0)).tolist()
        now: list[Vector] = list(servers)
        whole = slice(None) if mixed.all() else mixed
        mixing = _without(self._gossip.mixing(sizes), federation.lost)
        for step in range(1, self.steps + 1):
            dtype = servers.dtype if step == self.steps else np.dtype(np.float64)
            while alive := [d for d in range(len(now)) if d not in federation.lost]:
                receivers = columns(mixing.matrix)
                most = {d: self._most_of_step(d, now, receivers[d], whole) for d in alive}
                answers = yield from self._step(run, now, receivers, most, bounds, dtype)
                if gone := set(alive) - answers.keys():
                    federation.lost |= gone
                    mixing = _without(mixing, gone)
                    continue
                ends = directed(mixing.graph)
                run.book("edge->edge", ends, [sent_bytes(i, now[i].size, now[i].dtype) for i, _ in ends])
                for d, model in answers.items():
                    now[d] = model
                    federation.held[d] = federation.token
                break
        after = np.empty_like(servers)
        for d, model in enumerate(now):
            after[d] = model
        return after

    def mean(self, servers: Vector, shares: NDArray[np.float64]) -> Vector:
        """Return u (M,), or the rule's robust mean."""
        return robust_mean(servers, shares, self.aggregation)

    def _step(
        self,
        run: RoundContext,
        now: Sequence[Vector],
        receivers: Sequence[Column],
        most: Mapping[int, float],
        bounds: list[int],
        dtype: np.dtype[Any],
    ) -> Steps[dict[int, Vector]]:
        """Take one gossip step at the edge servers of ``most``, the bounds on their moves."""
        self.federation.token += 1
        contents = {}
        for d in most:
            config = ConfigRecord(
                {"token": self.federation.token, "server": d, "dtype": str(dtype), "columns": bounds}
            )
            contents[d] = _content(config, {j: (p, now[j] if j != d else None) for j, p in receivers[d]})
            self._add_own(d, contents[d], now[d])
            if not self.aggregation.is_mean:
                config[RULE] = str(self.aggregation)
        before = dict(enumerate(now))
        return (yield from self._ask_twice(run, GOSSIP, contents, before, most, dtype))

    def _add_own(self, d: int, content: RecordDict, own: Vector) -> None:
        """Add an edge server's start model to its instruction: by token if it has the model, else whole."""
        if (token := self.federation.held.get(d)) is None:
            content[OWN] = _vectors({MODEL: own})
        else:
            content.config_records["config"]["builds-on"] = token

    def _most_of_step(self, d: int, now: Sequence[Vector], receiver: Column, mixed: Any) -> float:
        """Return the largest move of an edge server's model in a gossip step."""
        apart = {j: norm_of((now[j] - now[d])[mixed]) for j, _ in receiver if j != d}
        if self.aggregation.name not in ("mean", "clipped"):
            return self._furthest(apart.values())
        return sum(abs(p) * self._furthest([apart[j]]) for j, p in receiver if j != d)

    def _furthest(self, norms: Iterable[float]) -> float:
        """Return the largest norm of the rule's aggregate of vectors with these norms."""
        norms = list(norms)
        if self.aggregation.name in ("median", "trimmed-mean"):  # Each entry is within theirs.
            return sqrt(sum(norm**2 for norm in norms))
        longest = max(norms, default=0.0)
        return min(longest, *self.aggregation.arguments) if self.aggregation.arguments else longest

    def _ask_twice(
        self,
        run: RoundContext,
        message_type: str,
        contents: Mapping[int, RecordDict],
        models: Mapping[int, Vector],
        most: Mapping[int, float],
        dtype: DTypeLike,
    ) -> Steps[dict[int, Vector]]:
        """Return the edge servers' replies (M,); those that lack their start model are sent it."""
        answers = yield from self._ask(run, message_type, contents, models, most, dtype)
        again = {
            d: RecordDict({**contents[d], OWN: _vectors({MODEL: models[d]})}) for d in sorted(self._forgetful)
        }
        if not again:
            return answers
        return answers | (yield from self._ask(run, message_type, again, models, most, dtype))

    def _ask(
        self,
        run: RoundContext,
        message_type: str,
        contents: Mapping[int, RecordDict],
        before: Mapping[int, Vector],
        most: Mapping[int, float],
        dtype: DTypeLike,
    ) -> Steps[dict[int, Vector]]:
        """Make an exchange with edge servers; return the valid models (M,)."""
        federation, first = self.federation, self.federation.num_trained
        layout = Layout((MODEL,), ((run.federation.known_layout().size,),), (str(np.dtype(dtype)),))
        self._forgetful = set()

        def check(node: Node, content: RecordDict) -> Vector:
            d = node.partition_id - first
            if any(LACKS in config for config in content.config_records.values()):
                self._forgetful.add(d)
                raise PayloadError("no state", "the edge server lacks its start model")
            model = layout.flatten(only_arrays(content), dtype)
            self._check_move(model, before[d], most[d])
            return model

        for d in contents:  # Even without a valid reply, the edge server may have changed its model.
            federation.held.pop(d, None)
        question = Question(
            message_type,
            f"{run.round}-{message_type}-{federation.token}",
            {federation.edges[d]: content for d, content in contents.items()},
            check,
            bits=lambda content: (
                32 * federation.num_parameters * sum(map(len, content.array_records.values()))
            ),
            ended=self._ended,
        )
        return {reply.node.partition_id - first: reply.value for reply in (yield question)}

    def _ended(self, inbox: Inbox) -> None:
        report = self.federation.edge_report
        report.sent += inbox.report.sent
        report.accepted += inbox.report.accepted
        for reason, count in inbox.report.rejected.items():
            report.rejected[f"edge {reason}"] += count

    def _check_move(self, model: Vector, before: Vector, most: float) -> None:
        """Raise PayloadError if an edge server's model moved further than its input allows."""
        if not self.federation.settings.max_update_norm_ratio:
            return
        moved, most = norm_of(model - before), most * (1 + _ROUNDING)
        if not moved <= most + _MODEL_ROUNDING * (norm_of(before) + most):
            raise PayloadError(TOO_LARGE, f"norm {moved:.3g}, expected at most {most:.3g}")


def check_edge_rule(aggregation: Aggregation, graph: nx.Graph) -> None:
    """Raise ValueError if a median rule excludes no model in a graph's smallest neighbourhood."""
    if aggregation.is_mean or aggregation.name == "clipped" or len(graph) == 1:
        return
    models = 1 + min(degree for _, degree in graph.degree)
    share = 0.5 if aggregation.name == "median" else aggregation.arguments[0]
    if models < 3 or int(share * models) < 1:
        raise ValueError(
            f"aggregation must be clipped(tau), or the topology have more edges, got {str(aggregation)!r}: "
            f"it leaves no Byzantine model out of the {models} models that an edge server of this topology "
            "has in gossip"
        )


def _content(config: ConfigRecord, terms: Mapping[int, tuple[float, Vector | None]]) -> RecordDict:
    """Return an instruction: weights by sender, and the models that are not None."""
    models = _vectors({str(sender): model for sender, (_, model) in terms.items() if model is not None})
    weights = MetricRecord({str(sender): weight for sender, (weight, _) in terms.items()})
    return RecordDict({"config": config, MODELS: models, WEIGHTS: weights})


def _vectors(models: Mapping[str, Vector]) -> ArrayRecord:
    record = ArrayRecord()
    for key, model in models.items():
        record[key] = lazy_array(model)
    return record


def _without(mixing: Mixing, servers: Iterable[int]) -> Mixing:
    """Return the mixing without the edges of some servers; the edges' ends keep their weights."""
    for d in sorted(servers):
        for j in sorted(mixing.graph.neighbors(d)):
            mixing = mixing.without_edge(d, j)
    return mixing
