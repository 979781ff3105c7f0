"""Rounds of training in which some layers travel compressed, both ways, and the rest as it is.

Paper: S. Li et al., "The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient Federated
Learning" (FedMUD), Section 3 and the set-up of its Section 5: what its method and the methods that it is
compared with have in common. Ours: real downlinks (see ``sync.py``), and sums in float64 in the order of
partition ids, cast once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from logging import INFO
from typing import Any, Required, Self, Unpack, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from numpy.typing import NDArray
from torch import nn

from hedgerow.strategies.federation import Federation, FederationOptions
from hedgerow.strategies.fedmud.init_width import init_width
from hedgerow.strategies.fedmud.layer_method import (
    CompressedModel,
    Compression,
    Method,
    Reconstructing,
    Scalar,
    Summable,
)
from hedgerow.strategies.fedmud.participants import Participants
from hedgerow.strategies.fedmud.replies import (
    UP,
    ReplyReader,
    Uplink,
    Weighting,
    check_base,
    mean_iterations,
)
from hedgerow.strategies.fedmud.sending import ALL, DOWN, Sending
from hedgerow.strategies.fedmud.split_model import SplitModel
from hedgerow.strategies.fedmud.sums import LayerSums
from hedgerow.strategies.fedmud.sync import Download, Sync
from hedgerow.strategies.inbox import Node, Reply
from hedgerow.strategies.robust import parse_aggregation
from hedgerow.strategies.secure_sums import SecureSum, parse_secure_sum
from hedgerow.strategies.strategy import FederatedStrategy
from hedgerow.strategies.vectors import WeightedMean
from hedgerow.wire.checks import in_range, int_at_least
from hedgerow.wire.checksum import checksum
from hedgerow.wire.compress import record_payload
from hedgerow.wire.lowrank import LayerShape, layers_of
from hedgerow.wire.records import PayloadError, to_record

__all__ = [
    "DOWN",
    "UP",
    "CompressedLayers",
    "TrainingOptions",
]


class TrainingOptions(FederationOptions, total=False):
    """Options that every method of the family takes, by keyword; see ``CompressedLayers``."""

    layers: Required[Sequence[LayerShape]]
    num_parameters: Required[int]
    skip_front: int
    skip_back: int
    sync: Sync
    weighting: Weighting
    num_clients_per_round: int | None
    learning_rate: float | None
    local_epochs: int
    batch_size: int
    aggregation: str
    secure_sum: bool | SecureSum
    seeded_base: bool


class CompressedLayers(FederatedStrategy):
    """Rounds in which a method codes the weights of some layers, and the rest is FedAvg's.

    **The ClientApp must know the method: this suite's, or one that answers the same messages.**

    Parameters
    ----------
    compression : Compression
        How far layers are compressed; nodes are told.
    method : Callable[[CompressedModel], Method]
        Makes what codes them.
    usual_rate : float
        The method's step size where none is given, > 0.
    layers : Sequence[LayerShape]
        The model's layers, ``layers_of(model)``; ``for_model`` fills in this and the next.
    num_parameters : int
        Trainable scalars of the model.
    skip_front, skip_back : int (default: 1, 1)
        Layers at either end that travel as they are, >= 0.
    sync : {"catchup", "dense", "broadcast"} (default: "catchup")
        How nodes come by the current base; without effect on methods that have none. ``dense`` is for
        large simulations: nodes keep nothing, and ``traffic`` tells what the others would have sent. All
        three train the same models.
    weighting : {"num-examples", "num-batches", "uniform"} (default: "num-examples")
        Weights of the mean: local examples, local batches, or 1/K as in eq. (4).
    num_clients_per_round : int or None (default: None)
        Nodes K that train in a round, drawn uniformly without replacement, 1 to N; None for all.
    learning_rate : float or None (default: None)
        Of local SGD, > 0; None for ``usual_rate``.
    local_epochs : int (default: 3)
        Local epochs a round, >= 1.
    batch_size : int (default: 64)
        Examples of a mini-batch, >= 1.
    aggregation : str (default: "mean")
        What the server takes of the replies: the mean, as in the paper, or a rule that some lying nodes
        cannot ruin, see ``parse_aggregation``. A rule is taken of whole updates, those that the coded layers'
        replies stand for and that of the rest as one vector: K of them are in memory, 8 bytes a parameter
        each. In a round of too few replies for it their median is taken.
    secure_sum : bool or SecureSum (default: False)
        Whether the server sees the sum of the participants' updates alone (``SecureSum`` for other settings
        than the defaults), as in SD-FEEL: for methods whose factors are averaged one by one, and for the
        dense one. The base that a node holds is part of what its masks are made of: who replays merges to
        other bits than the server is left out, for which ``sync="dense"`` is the remedy. With
        ``SecureSum(noise=...)`` all nodes weigh the same.
    seeded_base : bool (default: False)
        Whether nodes can draw the initial weights themselves, as those of this suite's apps do by the run's
        seed (``LocalTask.initial``): then a newcomer is sent the updates since the start, where they are
        fewer bits than the base. It checks what it has drawn, and asks for the base where bits differ.
    **options
        See ``FederationOptions``; ``min_available_nodes`` is the number of nodes N.

    Raises
    ------
    ValueError
        If a parameter is out of range, naming it, its value and what is valid.
    """

    def __init__(
        self,
        compression: Compression,
        method: Callable[[CompressedModel], Method],
        usual_rate: float,
        *,
        layers: Sequence[LayerShape],
        num_parameters: int,
        skip_front: int = 1,
        skip_back: int = 1,
        sync: Sync = "catchup",
        weighting: Weighting = "num-examples",
        num_clients_per_round: int | None = None,
        learning_rate: float | None = None,
        local_epochs: int = 3,
        batch_size: int = 64,
        aggregation: str = "mean",
        secure_sum: bool | SecureSum = False,
        seeded_base: bool = False,
        **options: Unpack[FederationOptions],
    ) -> None:
        self.seeded_base = seeded_base
        self.aggregation = parse_aggregation(aggregation)
        learning_rate = usual_rate if learning_rate is None else learning_rate
        in_range("learning_rate", learning_rate, 0.0, float(np.finfo(np.float32).max), open_below=True)
        int_at_least(1, local_epochs=local_epochs, batch_size=batch_size)
        federation = Federation(**options)
        if (seed := federation.settings.seed) >= 2**63:
            raise ValueError(f"seed is {seed!r}; valid is an integer < 2^63, as messages hold")
        self.compression = replace(compression, skip_front=skip_front, skip_back=skip_back)
        if self.compression.init_a is None:
            # Sizes do not depend on a.
            sized = replace(self.compression, init_a=1.0)
            plan = CompressedModel(sized, layers, num_parameters, seed).plan
            self.compression = replace(sized, init_a=init_width(plan, learning_rate))
        model = CompressedModel(self.compression, layers, num_parameters, seed)
        self.plan = model.plan
        self.method = method(model)
        if self.method.only_mean and not self.aggregation.is_mean:
            raise ValueError(f"aggregation is {aggregation!r}; valid is 'mean': {self.method.only_mean}")
        self.sync = sync
        self.learning_rate = learning_rate
        self.local_epochs = local_epochs
        self.batch_size = batch_size
        self.reader = ReplyReader(federation, weighting)
        self.chosen = Participants(federation, num_clients_per_round)
        most = num_clients_per_round or federation.places or federation.quorum
        if self.aggregation.least > most:
            raise ValueError(
                f"aggregation is {aggregation!r}; valid is one of at most {most} updates, the nodes of a "
                f"round, and it needs {self.aggregation.least}"
            )
        if (summed := parse_secure_sum(secure_sum)) is not None:
            self._check_sums(summed, most)
            self.sums = LayerSums(summed, federation, weighting, batch_size)
        super().__init__(federation)

    def _check_sums(self, settings: SecureSum, most: int) -> None:
        if not self.aggregation.is_mean:
            raise ValueError(
                f"aggregation is '{self.aggregation}'; valid with secure_sum is 'mean': a sum gives no other"
            )
        if self.method.no_sums:
            raise ValueError(f"secure_sum is set; valid is False with this method: {self.method.no_sums}")
        if most < settings.min_nodes:
            raise ValueError(f"secure_sum needs {settings.min_nodes} nodes in a round; there are {most}")

    @classmethod
    def for_model(cls, model: nn.Module, **parameters: Any) -> Self:
        """Return the strategy for a model: ``layers`` and ``num_parameters`` are its own."""
        trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        make: Any = cls
        strategy: Self = make(layers=layers_of(model), num_parameters=trainable, **parameters)
        return strategy

    # State.

    @property
    def num_clients(self) -> int:
        """Nodes N."""
        return self.federation.num_clients

    @property
    def iterations(self) -> int:
        """Local iterations of the mean node since the start."""
        return round(self._iterations)

    @property
    def uplink_bits(self) -> int:
        """Nominal bits of a reply, 32 (C + E_unc) for factors: values, indices and signs, without headers."""
        return self.method.uplink_bits + self._rest_bits

    @property
    def downlink_bits(self) -> int:
        """Nominal bits of an instruction: of one update of the base, as the paper counts."""
        return self.method.downlink_bits + self._rest_bits

    @property
    def uplink_ratio(self) -> float:
        """``uplink_bits`` as a share of the dense model's: what the ratio that was asked for came to."""
        return self.uplink_bits / (32 * self.plan.num_parameters)

    @property
    def downlink_ratio(self) -> float:
        """``downlink_bits`` as a share of the dense model's."""
        return self.downlink_bits / (32 * self.plan.num_parameters)

    @property
    def _rest_bits(self) -> int:
        return 32 * (self.plan.num_parameters - sum(layer.size for layer in self.method.layers))

    def traffic(self) -> dict[Sync, Download]:
        """Return what the downlinks have carried so far, or would have, by the value of ``sync``.

        For the two that are not in use every node is taken to be there and every message to arrive.
        """
        return dict(self._sending.downlink.traffic)

    def participants(self, server_round: int, there: Sequence[int] | None = None) -> list[int]:
        """Return the K partition ids that train in a round, ascending; of all, or of those there."""
        return self.chosen.drawn(server_round, there)

    def current_arrays(self) -> ArrayRecord | None:
        """Return the dense effective model under the plain model's keys; None before the first round."""
        return None if self._model.rest is None else self._model.dense()

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
        super().load_state_dict(state)

    def _forget(self) -> None:
        self.method.log.reset()
        self._model = SplitModel(self.federation, self.method)
        self._sending = Sending(self.federation, self._model, self.sync)
        self._iterations = 0.0
        # Of the initial base, where nodes draw it.
        self._checksum = ""
        if self.sums is not None:
            self.sums.forget()

    def _state(self) -> dict[str, Any]:
        return {
            "fingerprint": self.plan.fingerprint,
            "rest": self._model.known_rest(),
            "method": self.method.state_dict(),
            "downlink": self._sending.downlink.state_dict(),
            "iterations": self._iterations,
            "base-checksum": self._checksum,
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._model.rest = np.array(state["rest"])
        self._draw_base_by(str(state.get("base-checksum", "")))
        self._sending.downlink.load_state_dict(state["downlink"])
        self.method.load_state_dict(state["method"])
        self._iterations = float(state["iterations"])

    def _set_up(self, arrays: ArrayRecord, grid: Grid) -> ArrayRecord:
        """Take the model apart; the method's own start is, for FedLMT and FedPara, another model."""
        if self._model.rest is None:
            self._begin(arrays)
        return self._model.dense()

    # Flower's interface.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send each participant what it lacks; nodes that lack the same share one content.

        ``arrays`` are read before the first round only: then the strategy's own state holds.
        """
        self._begin_round(server_round)
        if self._model.rest is None:
            self._begin(arrays)
        told = {**config, **self._instructions(server_round)}
        check = partial(self._read, server_round)
        chosen = partial(self.participants, server_round)
        summed = (self.sums, self._start()) if self.sums is not None else ()
        return self._sending.messages(server_round, grid, chosen, told, self.downlink_bits, check, *summed)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Move by the weighted mean of what the participants sent, or by what a robust rule takes of it.

        The model does not change, and None is returned, if fewer than ``min_train_nodes`` replies are valid.
        """
        if self.sums is not None:
            return self._summed(cast(LayerSums, self.sums), server_round, replies)
        contents = list[RecordDict]()

        def uplinks() -> Iterator[tuple[float, Uplink]]:
            for reply in self.federation.accept(self._sending.of_participants(replies)):
                contents.append(reply.metrics)
                self.reader.book(server_round, reply, self.uplink_bits)
                yield self.reader.weight(reply), reply.value

        take = self._means if self.aggregation.is_mean else self._robust_means
        rest_mean, mean = take(uplinks())
        self._sending.note_listeners(server_round)
        if not self.federation.enough():
            return None, None
        self._iterations += mean_iterations(contents, self.local_epochs)
        metrics = self.reader.metrics(contents)
        self._tell_ratios(metrics)
        if rest_mean is not None:
            for key, value in self._model.move(server_round, rest_mean, mean).items():
                metrics[key] = value
        self.federation.completed = server_round
        return self.current_arrays(), metrics

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t├──> Method: %s", self.method.describe())
        shares = self.uplink_ratio, self.downlink_ratio
        log(INFO, "\t├──> Sent up: %.4f of the dense model | down: %.4f, each update once", *shares)
        log(INFO, "\t├──> Downlink: %s | weights: %s", self.sync, self.reader.weighting)
        log(INFO, "\t├──> Aggregation: %s", self.aggregation)
        if self.sums is not None:
            log(INFO, "\t├──> Secure sums: %s", self.sums.settings)
        log(INFO, "\t├──> Nodes a round: %d of %d", self.chosen.count or self.num_clients, self.num_clients)
        log(
            INFO,
            "\t├──> Local epochs: %d | batch size: %d | learning rate: %g",
            self.local_epochs,
            self.batch_size,
            self.learning_rate,
        )
        self.federation.log_keys()

    # Mechanics.

    def _begin(self, arrays: ArrayRecord) -> None:
        self._model.begin(arrays)
        if self.seeded_base and self.method.log.base_bits:
            self._draw_base_by(checksum(to_record(self.method.base())))

    def _draw_base_by(self, found: str) -> None:
        """Take nodes to draw the initial base of this checksum, or none where it is empty."""
        self._checksum = found
        self._sending.downlink.set_initial(0 if found else None)

    def _means(self, uplinks: Iterable[tuple[float, Uplink]]) -> tuple[NDArray[np.float64] | None, Any]:
        """Return the means of what is not coded (d,), None of no replies, and of what is, as it is coded."""
        rest = WeightedMean()

        def coded() -> Iterator[tuple[float, Any]]:
            for weight, uplink in uplinks:
                rest.add(weight, uplink.rest)
                yield weight, uplink.coded

        mean = self.method.mean(coded())
        return rest.value, mean

    def _robust_means(
        self, uplinks: Iterable[tuple[float, Uplink]]
    ) -> tuple[NDArray[np.float64] | None, Any]:
        """Return what a rule takes of the replies' whole updates, as ``_means`` does."""
        method, before = cast(Reconstructing, self.method), self._model.known_rest().astype(np.float64)
        updates, weights = list[NDArray[np.float64]](), list[float]()
        for weight, uplink in uplinks:
            updates.append(np.concatenate([uplink.rest - before, method.update(uplink.coded)]))
            weights.append(weight)
        if not updates:
            return None, None
        moved = self.federation.combined(self.aggregation, np.stack(updates), np.array(weights))
        return before + moved[: before.size], method.taken(moved[before.size :])

    def _start(self) -> ArrayRecord:
        """Return what replies to a sum are changes of, in the order of the keys."""
        start = {**cast(Summable, self.method).start(), **record_payload(self._model.rest_record())}
        return to_record(dict(sorted(start.items())))

    def _summed(
        self, sums: LayerSums, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Move by the mean of the participants' changes, of which the sum alone is known."""

        def booked() -> Iterator[Reply]:
            for reply in self.federation.accept(self._sending.of_participants(replies)):
                self.reader.book(server_round, reply, self.uplink_bits)
                sums.book_shares(server_round, reply)
                yield reply

        update = sums.unmask(server_round, booked()).get(ALL)
        self._sending.note_listeners(server_round)
        metrics = MetricRecord()
        if update is not None:
            change, at = dict[str, NDArray[np.float64]](), 0
            for key, array in record_payload(self._start()).items():
                change[key] = update.mean[at : at + array.size]
                at += array.size
            rest = self._model.known_rest()
            moves = [change[key] for key in self._model.rest_layout.keys]
            rest_mean = rest + np.concatenate([np.zeros(0), *moves])
            mean = cast(Summable, self.method).summed(change)
            try:
                self._hold(rest_mean, mean)
            except PayloadError as error:
                sums.lose(update, error.reason)
                update = None
        if not sums.enough():
            return None, None
        if update is not None:
            self._iterations += self.local_epochs * sums.mean_batches(update.survivors)
            metrics = self.reader.metrics([update.metrics])
            for name, value in self._model.move(server_round, rest_mean, mean).items():
                metrics[name] = value
        metrics.update(sums.metrics())
        self._tell_ratios(metrics)
        self.federation.completed = server_round
        return self.current_arrays(), metrics

    def _hold(self, rest: NDArray[np.float64], mean: Any) -> None:
        """Raise PayloadError for a mean that moves too far."""
        self.federation.check_update(rest, self._model.known_rest(), "rest")
        moved, coded = self.method.moved(mean[0])
        if coded.size and self.settings.max_update_norm_ratio:
            self.federation.bound("coded").check(moved, coded)

    def _tell_ratios(self, metrics: MetricRecord) -> None:
        metrics["uplink-ratio"], metrics["downlink-ratio"] = self.uplink_ratio, self.downlink_ratio

    def _instructions(self, server_round: int) -> dict[str, Scalar]:
        return {
            **self.compression.instructions(),
            "server-round": server_round,
            "fingerprint": self.plan.fingerprint,
            "version": self.method.log.version,
            "run-seed": self.settings.seed,
            "seed": self.settings.seed,
            **({"base-checksum": self._checksum} if self._checksum else {}),
            "keep-base": self.method.log.base_bits > 0 and self.sync != "dense",
            "learning-rate": self.learning_rate,
            "local-epochs": self.local_epochs,
            "batch-size": self.batch_size,
            **self.method.instructions(),
        }

    def _read(self, server_round: int, node: Node, content: RecordDict) -> Any:
        if self.sums is not None:
            check_base(self._sending.downlink, node, content)
            masked = self.sums.checked(node, content)
            self._sending.downlink.acknowledge(node.partition_id)
            return masked
        uplink = self.reader.read(self._model, self._sending.downlink, server_round, node, content)
        if not self.aggregation.is_mean:
            # Finite factors may have a product that is not.
            update = cast(Reconstructing, self.method).update(uplink.coded)
            if not np.isfinite(update).all():
                raise PayloadError("non-finite", "the update that the reply stands for overflows")
        return uplink
