"""Rounds of training in which some layers travel compressed, both ways, and the rest as it is.

Paper: Y. Li et al., "The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient Federated
Learning" (FedMUD), Section 3 and the set-up of its Section 6: what its method and the methods that it is
compared with have in common. Ours: real downlinks (see ``sync.py``), and sums in float64 in the order of
partition ids, cast once.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from logging import INFO
from typing import Any, Literal, Self, Unpack, get_args

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray
from torch import Tensor, nn

from hedgerow.strategies.exchange import Exchange, ExchangeReport, Node, Reply, checked_metrics
from hedgerow.strategies.federation import Federation, FederationOptions, only_arrays
from hedgerow.strategies.fedmud.layer_method import Compression, Method, Scalar
from hedgerow.strategies.fedmud.sync import Downlink, Download, Post, Sync
from hedgerow.strategies.rounds import EvaluateFn, Progress, run_rounds
from hedgerow.strategies.vectors import WeightedMean
from hedgerow.wire.checks import in_range, int_at_least, one_of
from hedgerow.wire.ledger import Ledger
from hedgerow.wire.lowrank import Factorisation, layers_of
from hedgerow.wire.records import Layout, PayloadError, lazy_array, payload_bytes, to_record, view
from hedgerow.wire.seeds import Purpose, generator

__all__ = [
    "DOWN",
    "LISTEN",
    "UP",
    "CompressedLayers",
    "TrainingOptions",
]

DOWN, UP = "server->client", "client->server"
# Sent to nodes that do not train, where every node hears every update.
LISTEN = "query.merge"

Weighting = Literal["num-examples", "num-batches", "uniform"]
_WEIGHTINGS: tuple[Weighting, ...] = get_args(Weighting)

# What a reply tells of its node's base: no quantity to average.
_BOOKKEEPING = ("base-version", "need-base")


class TrainingOptions(FederationOptions, total=False):
    """Options that every method of the family takes, by keyword; see ``CompressedLayers``."""

    sync: Sync
    weighting: Weighting
    num_clients_per_round: int | None
    learning_rate: float
    local_epochs: int
    batch_size: int


class CompressedLayers(Strategy):
    """Rounds in which a method codes the weights of some layers, and the rest is FedAvg's.

    **The ClientApp must know the method: this suite's, or one that answers the same messages.**

    Parameters
    ----------
    method : Method
        How the compressed layers are coded.
    compression : Compression
        What the nodes are told of it.
    plan : Factorisation
        What it comes to.
    sync : {"catchup", "dense", "broadcast"} (default: "catchup")
        How nodes come by the current base; without effect on methods that have none. ``dense`` is for
        large simulations: nodes keep nothing, and ``traffic`` tells what the others would have sent. All
        three train the same models.
    weighting : {"num-examples", "num-batches", "uniform"} (default: "num-examples")
        Weights of the mean: local examples, local batches, or 1/K as in eq. (4).
    num_clients_per_round : int or None (default: None)
        Nodes K that train in a round, drawn uniformly without replacement, 1 to N; None for all.
    learning_rate : float (default: 0.03)
        Of local SGD, > 0.
    local_epochs : int (default: 3)
        Local epochs a round, >= 1.
    batch_size : int (default: 64)
        Examples of a mini-batch, >= 1.
    **options
        See ``FederationOptions``; ``min_available_nodes`` is the number of nodes N.

    Raises
    ------
    ValueError
        If a parameter is out of range, naming it, its value and what is valid.
    """

    def __init__(
        self,
        method: Method,
        compression: Compression,
        plan: Factorisation,
        *,
        sync: Sync = "catchup",
        weighting: Weighting = "num-examples",
        num_clients_per_round: int | None = None,
        learning_rate: float = 0.03,
        local_epochs: int = 3,
        batch_size: int = 64,
        **options: Unpack[FederationOptions],
    ) -> None:
        in_range("learning_rate", learning_rate, 0.0, float(np.finfo(np.float32).max), open_below=True)
        int_at_least(1, local_epochs=local_epochs, batch_size=batch_size)
        one_of("weighting", weighting, _WEIGHTINGS)
        self.method = method
        self.compression = compression
        self.plan = plan
        self.sync = sync
        self.weighting = weighting
        self.learning_rate = learning_rate
        self.local_epochs = local_epochs
        self.batch_size = batch_size
        self.federation = Federation(**options)
        self.settings = self.federation.settings
        self.on_round_end = self.settings.on_round_end
        self.max_repeats = self.settings.max_repeats
        self.num_clients_per_round = self._checked_count(num_clients_per_round)
        if self.settings.seed >= 2**63:
            raise ValueError(f"seed is {self.settings.seed!r}; valid is an integer < 2^63, as messages hold")
        self._rest: NDArray[Any] | None = None
        self._forget()

    @classmethod
    def for_model(cls, model: nn.Module, **parameters: Any) -> Self:
        """Return the strategy for a model: ``layers`` and ``num_parameters`` are its own."""
        trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        make: Any = cls
        strategy: Self = make(layers=layers_of(model), num_parameters=trainable, **parameters)
        return strategy

    def _checked_count(self, count: int | None) -> int:
        if count is None:
            return self.num_clients
        int_at_least(1, num_clients_per_round=count)
        if count > self.num_clients:
            raise ValueError(
                f"num_clients_per_round is {count!r}; valid is 1 to the {self.num_clients} clients"
            )
        return count

    # State.

    @property
    def num_clients(self) -> int:
        """Nodes N."""
        return self.federation.num_clients

    @property
    def completed_rounds(self) -> int:
        """Rounds aggregated so far."""
        return self.federation.completed

    @property
    def report(self) -> ExchangeReport:
        """What the last training exchange sent, got and lost; nodes that only listen are not in it."""
        return self.federation.report

    @property
    def ledger(self) -> Ledger:
        """Every transfer so far. Nominal bits are the paper's: it does not count nodes that only listen."""
        return self.federation.ledger

    @property
    def nominal_bits(self) -> int:
        """The paper's count of one message in either direction, 32 (C + E_unc) for factors."""
        compressed = sum(layer.size for layer in self.method.layers)
        return self.method.bits + 32 * (self.plan.num_parameters - compressed)

    @property
    def ratio(self) -> float:
        """The paper's count as a share of the dense model's: what the ratio that was asked for came to."""
        return self.nominal_bits / (32 * self.plan.num_parameters)

    def traffic(self) -> dict[Sync, Download]:
        """Return what the downlinks have carried so far, or would have, by the value of ``sync``.

        For the two that are not in use every node is taken to be there and every message to arrive.
        """
        return dict(self._downlink.traffic)

    def participants(self, server_round: int) -> list[int]:
        """Return the K partition ids that train in a round, ascending."""
        stream = generator(self.settings.seed, round=server_round, purpose=Purpose.SCHEDULE)
        chosen = stream.choice(self.num_clients, self.num_clients_per_round, replace=False)
        return sorted(int(client) for client in chosen)

    def current_arrays(self) -> ArrayRecord | None:
        """Return the dense effective model under the plain model's keys; None before the first round."""
        if self._rest is None:
            return None
        weights, rest, layout = self.method.weights(), self._rest_record(), self.federation.known_layout()
        record = ArrayRecord()
        for key, dtype in zip(layout.keys, layout.dtypes, strict=True):
            if key in weights:
                record[key] = lazy_array(weights[key].numpy().astype(dtype, copy=False))
            else:
                record[key] = rest[key]
        return record

    def progress(self) -> Progress:
        """Return local iterations (of the mean node) and traffic since the start; no time is modelled."""
        total = self.ledger.total()
        return Progress(
            iterations=round(self._iterations),
            bits=total.nominal_bits,
            payload_bytes=total.payload_bytes,
            sim_seconds=0.0,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next round depends on."""
        return {
            **self.federation.state_dict(),
            "fingerprint": self.plan.fingerprint,
            "rest": self._known_rest(),
            "method": self.method.state_dict(),
            "downlink": self._downlink.state_dict(),
            "iterations": self._iterations,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; the next ``start`` goes on after its round.

        Raises
        ------
        ValueError
            If the state is of another compression.
        """
        if state["fingerprint"] != self.plan.fingerprint:
            raise ValueError(
                f"fingerprint is {state['fingerprint']!r} in the state; valid is {self.plan.fingerprint!r}"
            )
        self._forget()
        self.federation.load_state_dict(state)
        self._rest = np.array(state["rest"])
        self._downlink.load_state_dict(state["downlink"])
        self.method.load_state_dict(state["method"])
        self._iterations = float(state["iterations"])

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
        ValueError
            If the arrays lack a compressed layer, or have another shape for it.
        """
        int_at_least(0, num_rounds=num_rounds)
        if not self.federation.begin(timeout):
            self._forget()
            self._begin(initial_arrays)
        # The first evaluation sees the method's own start, which for FedLMT and FedPara is another model.
        arrays = self.current_arrays() or initial_arrays
        return run_rounds(self, grid, arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send each participant what it lacks; nodes that lack the same share one content.

        ``arrays`` are read before the first round only: then the strategy's own state holds.
        """
        if server_round == 1 and self.completed_rounds:
            self.federation.reset()
            self._forget()
        if self._rest is None:
            self._begin(arrays)
        nodes, offline = self.federation.online(grid, self.participants(server_round))
        listeners = self._listeners(grid, nodes)
        post = self._post({**config, **self._instructions(server_round)})
        contents = [(node, post.instruction(self._downlink.start(node.partition_id))) for node in nodes]
        news = [(node, post.news(self._downlink.start(node.partition_id))) for node in listeners]
        trained, informed = ([node.partition_id for node in group] for group in (nodes, listeners))
        self._downlink.book(trained, informed, Download.of(*post.own.values()), Download.of(post.base))
        self._book_down(server_round, contents, self.nominal_bits)
        self._book_down(server_round, news, 0)
        check = partial(self._checked, server_round)
        return [
            *self.federation.instruct(server_round, contents, check, offline=offline),
            *self._broadcast(server_round, news),
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Move by the weighted mean of what the participants sent.

        The model does not change, and None is returned, if fewer than ``min_train_nodes`` replies are valid.
        """
        rest, contents = WeightedMean(), list[RecordDict]()
        heard: list[Message] = []

        def uplinks() -> Iterator[tuple[float, Any]]:
            for reply in self.federation.accept(self._training_only(replies, heard)):
                weight = self._weight(reply)
                rest.add(weight, reply.value.rest)
                contents.append(RecordDict(dict(reply.content.metric_records)))
                self._book_up(server_round, reply)
                yield weight, reply.value.coded

        mean = self.method.mean(uplinks())
        for reply in self._listening.accept(heard):
            self._downlink.heard(reply.node.partition_id)
        if not self.federation.enough():
            return None, None
        metrics = self._train_metrics(contents)
        if (rest_mean := rest.value) is not None:
            self._rest = rest_mean.astype(self._known_rest().dtype)
            for key, value in self.method.move(server_round, mean).items():
                metrics[key] = value
        self.federation.completed = server_round
        return self.current_arrays(), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send the dense effective model to a share of the nodes."""
        return self.federation.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the nodes' metrics."""
        return self.federation.aggregate_evaluate(replies)

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t├──> Method: %s", self.method.describe())
        log(INFO, "\t├──> Sent each way: %.4f of the dense model", self.ratio)
        log(INFO, "\t├──> Downlink: %s | weights: %s", self.sync, self.weighting)
        log(INFO, "\t├──> Nodes a round: %d of %d", self.num_clients_per_round, self.num_clients)
        log(
            INFO,
            "\t├──> Local epochs: %d | batch size: %d | learning rate: %g",
            self.local_epochs,
            self.batch_size,
            self.learning_rate,
        )
        self.federation.log_keys()

    # Mechanics: before.

    def _forget(self) -> None:
        self.method.log.reset()
        self._downlink = Downlink(self.sync, self.num_clients, self.method.log)
        self._rest = None
        self._iterations = 0.0
        self._listening = Exchange([], "", lambda node, content: None)
        self._listeners_asked: set[int] = set()

    def _begin(self, arrays: ArrayRecord) -> None:
        """Take the model apart: the compressed layers are the method's, the rest is one vector."""
        self.federation.layout = Layout.of(arrays)
        weights: dict[str, Tensor] = {}
        for layer in self.method.layers:
            found = view(arrays[layer.key]).shape if layer.key in arrays else None
            if found != layer.shape:
                raise ValueError(
                    f"{layer.key} has the shape {found} in the initial arrays; valid is {layer.shape}"
                )
            weights[layer.key] = torch.tensor(view(arrays[layer.key]), dtype=torch.float32)
        rest = ArrayRecord({key: arrays[key] for key in self._rest_layout.keys})
        floats = (d for d in self._rest_layout.dtypes if np.dtype(d).kind == "f")
        self._rest = self._rest_layout.flatten(rest, np.result_type(np.float32, *floats))
        self.method.begin(weights)

    @property
    def _rest_layout(self) -> Layout:
        return _without(self.federation.known_layout(), frozenset(layer.key for layer in self.method.layers))

    def _known_rest(self) -> NDArray[Any]:
        if self._rest is None:
            raise RuntimeError("No model yet: configure_train or start comes first.")
        return self._rest

    def _rest_record(self) -> ArrayRecord:
        return self._rest_layout.unflatten(self._known_rest())

    # Mechanics: down.

    def _instructions(self, server_round: int) -> dict[str, Scalar]:
        return {
            **self.compression.instructions(),
            "server-round": server_round,
            "fingerprint": self.plan.fingerprint,
            "version": self.method.log.version,
            "run-seed": self.settings.seed,
            "seed": self.settings.seed,
            "keep-base": self.method.log.base_bits > 0 and self.sync != "dense",
            "learning-rate": self.learning_rate,
            "local-epochs": self.local_epochs,
            "batch-size": self.batch_size,
            **self.method.instructions(),
        }

    def _post(self, config: Mapping[str, Any]) -> Post:
        own = {self.settings.arrayrecord_key: self._rest_record(), **self.method.down()}
        base, told = to_record(self.method.base()), (self.settings.configrecord_key, config)
        return Post(own, base, self.method.update_record, self.method.log, told)

    def _listeners(self, grid: Grid, training: Sequence[Node]) -> list[Node]:
        """Return who hears the updates without training: all that lack some, or none."""
        if self.sync != "broadcast":
            return []
        roster = self.federation.gather(grid)
        others = set(range(self.num_clients)) - {node.partition_id for node in training}
        behind = [roster.nodes[client] for client in self._downlink.behind(sorted(others))]
        return [node for node in behind if node.node_id in roster.online]

    def _broadcast(self, server_round: int, news: Sequence[tuple[Node, RecordDict]]) -> list[Message]:
        group, ttl = str(server_round), self.federation.timeout
        self._listening = Exchange([node for node, _ in news], group, self._checked_base)
        self._listeners_asked = {node.node_id for node, _ in news}
        return [Message(content, node.node_id, LISTEN, ttl=ttl, group_id=group) for node, content in news]

    def _book_down(self, server_round: int, contents: Sequence[tuple[Node, RecordDict]], bits: int) -> None:
        sizes: dict[int, tuple[int, int]] = {}
        for node, content in contents:
            if id(content) not in sizes:
                arrays = sum(payload_bytes(record) for record in content.array_records.values())
                sizes[id(content)] = arrays, payload_bytes(content)
            size = sizes[id(content)]
            self.federation.book_down(server_round, DOWN, 0, node.partition_id, bits, size)

    # Mechanics: up.

    def _training_only(self, replies: Iterable[Message], heard: list[Message]) -> Iterator[Message]:
        """Yield what participants replied; put aside what nodes replied that only listened."""
        for reply in replies:
            if reply.metadata.src_node_id in self._listeners_asked:
                heard.append(reply)
            else:
                yield reply

    def _checked(self, server_round: int, node: Node, content: RecordDict) -> "_Uplink":
        """Take a reply apart: what the method coded, and the rest as one vector."""
        self._checked_base(node, content)
        metrics = checked_metrics(content, self.settings.weighted_by_key)
        if self.weighting != "uniform":
            metrics = checked_metrics(content, self.weighting)
        rest, coded, layout = ArrayRecord(), ArrayRecord(), self._rest_layout
        for key, array in only_arrays(content).items():
            (rest if key in layout.slices else coded)[key] = array
        uplink = _Uplink(
            1.0 if self.weighting == "uniform" else float(metrics[self.weighting]),  # type: ignore[arg-type]
            layout.flatten(rest, self._known_rest().dtype),
            self.method.read(server_round, node.partition_id, coded),
        )
        self._downlink.acknowledge(node.partition_id)
        return uplink

    def _checked_base(self, node: Node, content: RecordDict) -> None:
        """Refuse replies from another base than the current one; their nodes are sent the base next time."""
        if not self.method.log.base_bits:
            return
        if len(content.metric_records) != 1:
            raise PayloadError("bad metrics", f"{len(content.metric_records)} MetricRecords, expected one")
        (metrics,) = content.metric_records.values()
        lost, version = metrics.get("need-base"), metrics.get("base-version")
        if lost or version != self.method.log.version:
            self._downlink.forget(node.partition_id)
            if lost:
                raise PayloadError("need base", f"node {node.node_id} has lost its base")
            raise PayloadError("wrong base", f"base-version={version!r}, expected {self.method.log.version}")

    def _weight(self, reply: Reply) -> float:
        told: float = reply.value.weight
        return self.federation.size_of(reply, told) if self.weighting == "num-examples" else told

    def _book_up(self, server_round: int, reply: Reply) -> None:
        client, arrays = reply.node.partition_id, only_arrays(reply.content)
        self.federation.book_up(server_round, UP, client, 0, self.nominal_bits, arrays, reply)

    def _train_metrics(self, contents: list[RecordDict]) -> MetricRecord:
        """Aggregate as asked for; count what the mean participant has computed."""
        records = [next(iter(content.metric_records.values())) for content in contents]
        batches = [float(record.get("num-batches", 0)) for record in records]  # type: ignore[arg-type]
        self._iterations += self.local_epochs * sum(batches) / max(1, len(batches))
        metrics = self.federation.train_metrics(contents)
        if self.settings.train_metrics_aggr_fn is None:
            for key in _BOOKKEEPING:
                metrics.pop(key, None)
        return metrics


@dataclass(frozen=True)
class _Uplink:
    """What a reply holds: its weight, its uncompressed part (d,), and what the method read of the rest."""

    weight: float
    rest: NDArray[Any]
    coded: Any


@lru_cache(maxsize=64)
def _without(layout: Layout, keys: frozenset[str]) -> Layout:
    rows = zip(layout.keys, layout.shapes, layout.dtypes, strict=True)
    kept = [row for row in rows if row[0] not in keys]
    return Layout(tuple(r[0] for r in kept), tuple(r[1] for r in kept), tuple(r[2] for r in kept))
