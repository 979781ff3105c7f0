"""Rounds of training with some layers compressed, both ways, and the rest sent as it is.

Paper: S. Li et al., "The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient Federated
Learning" (FedMUD), Section 3 and the set-up of its Section 5: the common part of FedMUD and its baselines.
Ours: real downlinks (see ``parts/downlink.py``), and sums in float64 in the order of partition ids, cast
once.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from logging import INFO
from math import ceil, floor
from typing import Any, ClassVar, Literal, Required, Self, TypeVar, Unpack

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from numpy.typing import NDArray
from torch import Tensor, nn

from hedgerow.strategies.aggregate import Aggregator, Choice, MeanByMetric, WeightedMean
from hedgerow.strategies.aggregate.secure_sums import SecureSum, SecureSums, parse_secure_sum
from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Ask, Exchange, Vector
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.fedmud.codings import Coded
from hedgerow.strategies.fedmud.init_width import init_width
from hedgerow.strategies.method import Method
from hedgerow.strategies.options import FederationOptions
from hedgerow.strategies.parts import Downlink, Download, Followed, LocalIterations, Sync, UpdateLog
from hedgerow.strategies.vectors import joined, split
from hedgerow.wire.checks import in_range, int_at_least, one_of
from hedgerow.wire.layers import LayerShape, layers_of, trained_numbers
from hedgerow.wire.lowrank import Factorisation, between, check_reachable
from hedgerow.wire.records import Layout
from hedgerow.wire.robust_means import Aggregation

DOWN, UP = "server->client", "client->server"
S = TypeVar("S")
Scalar = str | int | float | bool
Weighting = Literal["num-examples", "num-batches", "uniform"]
# Step size of FedHM, FedBAT and EF21-P. Not published for this set-up; chosen as in ``strategy.py``.
BASELINE_RATE = 0.03
# Metrics about a node's base, which must not be averaged.
_BOOKKEEPING = ("base-version", "need-base")
# The config keys that a ClientApp must follow.
_INSTRUCTIONS = ("method", "learning-rate", "local-epochs")


@dataclass(frozen=True)
class Compression:
    """The arguments of ``Factorisation.plan``, which server and nodes both call.

    ``variant`` is ``"dense"`` for methods without factors; ``init_a`` None stands for ``init_width``.
    """

    variant: str
    ratio: float = 1 / 32
    budget: str = "model"
    init_a: float | None = None
    layout: str = "flat"
    tight: bool = False
    view: str = "buffer"

    def plan(self, layers: Sequence[LayerShape], num_parameters: int, **skipped: int) -> Factorisation:
        """Return the factors of a model; ValueError if an argument is out of range."""
        arguments: dict[str, Any] = self.__dict__ | skipped
        return Factorisation.plan(layers, num_parameters=num_parameters, **arguments)


class TrainingOptions(FederationOptions, total=False):
    """Keyword options of every method of the family; see ``CompressedLayers``."""

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
    aggregation: str | Aggregation | Aggregator
    secure_sum: bool | SecureSum
    seeded_base: bool


class CompressedLayers(Method[S]):
    """Rounds in which a method codes the weights of some layers; the rest is averaged as in FedAvg.

    **The ClientApp must know the method: this suite's, or one that answers the same messages.**

    Parameters
    ----------
    compression : Compression
        The degree of compression, which is sent to the nodes.
    usual_rate : float
        The method's default step size, > 0.
    layers : Sequence[LayerShape]
        Weights of the model, by default ``layers_of(model)``; ``for_model`` sets this and the next. Nodes
        are sent the keys of those that are compressed.
    num_parameters : int
        Scalars that dense training changes, ``trained_numbers(model, layers)``.
    skip_front, skip_back : int (default: 1, 1)
        Uncompressed layers at either end, >= 0.
    sync : {"catchup", "dense", "broadcast"} (default: "catchup")
        How nodes get the current base; without effect on methods without one. ``dense`` is for large
        simulations: nodes store nothing, and ``traffic`` reports what the other two would have sent. All
        three train the same models.
    weighting : {"num-examples", "num-batches", "uniform"} (default: "num-examples")
        Weights of the mean: local examples, local batches, or 1/K as in eq. (4).
    num_clients_per_round : int or None (default: None)
        Nodes K per round, drawn uniformly without replacement, 1 to N; None for all.
    learning_rate : float or None (default: None)
        Of local SGD, > 0; None for ``usual_rate``.
    local_epochs : int (default: 3)
        Local epochs per round, >= 1.
    batch_size : int (default: 64)
        Examples per mini-batch, >= 1.
    aggregation : str, Aggregation or Aggregator (default: "mean")
        How the server combines the replies: the mean, as in the paper, a Byzantine-robust rule, see
        ``parse_aggregation``, or your own aggregator. A rule is applied to whole updates, reconstructed from
        the coded layers and joined with the rest: K of them are in memory, 8 bytes per parameter each. With
        too few replies for the rule their median is used.
    secure_sum : bool or SecureSum (default: False)
        Whether the server sees only the sum of the participants' updates, as in SD-FEEL; a ``SecureSum``
        changes the default settings. Only for methods with factors that are averaged one by one, and for the
        dense one. A method whose base moves needs ``sync="dense"``, because members of a sum must get the
        same instruction; one whose base stays (LoRA without merges) needs that, or ``seeded_base``. With
        ``SecureSum(noise=...)`` all nodes have the same weight.
    seeded_base : bool (default: False)
        Whether nodes can draw the initial weights themselves from the run's seed, as those of this suite's
        apps do (``LocalTask.initial``). A new node is then sent the updates since the start, if they are
        fewer bits than the base. It checks the weights it drew, and requests the base if bits differ.
    **options
        See ``FederationOptions``; ``min_available_nodes`` is the number of nodes N.
    """

    # The ArrayRecord of the base's updates.
    updates: ClassVar[str] = "merges"
    # Why only the mean is possible, and why secure sums are not; empty if they are.
    only_mean: str = ""
    no_sums: str = ""

    def __init__(
        self,
        compression: Compression,
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
        aggregation: str | Aggregation | Aggregator = "mean",
        secure_sum: bool | SecureSum = False,
        seeded_base: bool = False,
        **options: Unpack[FederationOptions],
    ) -> None:
        self.aggregation = Choice.of(aggregation)
        learning_rate = usual_rate if learning_rate is None else learning_rate
        in_range("learning_rate", learning_rate, 0.0, float(np.finfo(np.float32).max), open_below=True)
        int_at_least(1, local_epochs=local_epochs, batch_size=batch_size)
        one_of("weighting", weighting, ("num-examples", "num-batches", "uniform"))
        federation = Federation(**options)
        if (seed := federation.settings.seed) >= 2**63:
            raise ValueError(f"seed must be an integer < 2^63, got {seed!r}")
        self.compression, self._skipped = compression, {"skip_front": skip_front, "skip_back": skip_back}
        if self.compression.init_a is None:
            # Sizes do not depend on a.
            sized = replace(self.compression, init_a=1.0)
            self.compression = replace(
                sized,
                init_a=init_width(sized.plan(layers, num_parameters, **self._skipped), learning_rate),
            )
        # The layout of the model and of its uncoded part.
        self._rest: tuple[Layout, Layout] | None = None
        self.plan, self.seed = self.compression.plan(layers, num_parameters, **self._skipped), seed
        self.coded = self._coded(layers)
        federation.trained = frozenset(layer.key for layer in self.coded)
        if self.only_mean and not self.aggregation.rule.is_mean:
            raise ValueError(f"aggregation must be 'mean', got '{self.aggregation}': {self.only_mean}")
        self.sync, self.weighting = sync, weighting
        self.learning_rate, self.local_epochs, self.batch_size = learning_rate, local_epochs, batch_size
        self.num_clients_per_round = num_clients_per_round
        if num_clients_per_round is not None:
            int_at_least(1, num_clients_per_round=num_clients_per_round)
            places = federation.members.places
            if places is not None and num_clients_per_round > places:
                raise ValueError(
                    f"num_clients_per_round must be from 1 to {places}, the number of clients, "
                    f"got {num_clients_per_round!r}"
                )
        # The most replies of a round, as far as is known.
        self.most = most = num_clients_per_round or federation.members.places or federation.members.quorum
        self.aggregation.check(most, "the nodes of a round")
        if (summed := parse_secure_sum(secure_sum, self.aggregation)) is not None:
            if self.no_sums:
                raise ValueError(f"secure_sum must be False with this method: {self.no_sums}")
            if sync != "dense" and self.log().base_bits and not (self.keeps_base and seeded_base):
                raise ValueError(
                    f"sync must be 'dense' with secure_sum, got {sync!r}: members of a sum must get the same "
                    "instruction, and otherwise each is sent the updates that it lacks"
                )
            if most < summed.min_nodes:
                raise ValueError(f"secure_sum needs {summed.min_nodes} nodes in a round; there are {most}")
            self.sums = _Sums(summed, federation, weighting, batch_size)
        self.downlink = Downlink(
            federation, sync, self.log(), record=self.updates, link=DOWN, seeded=seeded_base
        )
        self.local = LocalIterations(
            federation, local_epochs, batch_size, required=weighting == "num-batches"
        )
        followed = Followed(("base-version", "num-batches"), _INSTRUCTIONS, "fedmud_client()")
        mean = WeightedMean(by_examples=weighting == "num-examples")
        if weighting == "num-batches":
            mean = MeanByMetric(metric=weighting)
        parts = [self.downlink, self.local, followed]
        super().__init__(federation, aggregator=self._aggregator(mean), parts=parts, mean=mean)

    def _aggregator(self, mean: WeightedMean) -> Aggregator:
        return self.sums or self.aggregation.aggregator(mean)

    @classmethod
    def for_model(cls, model: nn.Module, layers: str = "", **parameters: Any) -> Self:
        """Return the strategy for a model.

        ``layers`` are the patterns of ``layers_of``. With them no layer is skipped by default.
        """
        chosen = layers_of(model, layers)
        skipped = {"skip_front": 0, "skip_back": 0} if layers else {}
        make: Any = cls
        strategy: Self = make(
            layers=chosen, num_parameters=trained_numbers(model, chosen), **{**skipped, **parameters}
        )
        return strategy

    # Defaults for methods with factors.

    def _coded(self, layers: Sequence[LayerShape]) -> Sequence[LayerShape]:
        """Return the coded layers."""
        return self.plan.layers

    @property
    def keeps_base(self) -> bool:
        """Whether the base stays as it is at the start."""
        return False

    def log(self) -> UpdateLog:
        """Return an empty log of updates of the base."""
        return UpdateLog(32 * self.plan.count, 32 * self.plan.dense_count if self.plan.has_base else 0)

    @property
    def coded_bits(self) -> tuple[int, int]:
        """The nominal bits of the coded layers in a reply, and of one of their updates in an instruction."""
        return 32 * self.plan.count, 32 * self.plan.count

    def describe(self) -> str:
        """Return the method's settings in one line."""
        return f"{self.plan.variant} of {len(self.coded)} layers, C = {self.plan.count}"

    @property
    def num_clients(self) -> int:
        """The number of nodes N."""
        return self.federation.num_clients

    @property
    def iterations(self) -> int:
        """Mean number of local iterations per node since the start."""
        return round(self.local.count)

    @property
    def uplink_bits(self) -> int:
        """Nominal bits of a reply, 32 (C + E_unc) for factors: values, indices and signs, without headers."""
        return self.coded_bits[0] + self._rest_bits

    @property
    def downlink_bits(self) -> int:
        """Nominal bits of an instruction: of one update of the base, as the paper counts."""
        return self.coded_bits[1] + self._rest_bits

    @property
    def uplink_ratio(self) -> float:
        """``uplink_bits`` as a share of the dense model's: the achieved ratio."""
        return self.uplink_bits / (32 * self.plan.num_parameters)

    @property
    def downlink_ratio(self) -> float:
        """``downlink_bits`` as a share of the dense model's."""
        return self.downlink_bits / (32 * self.plan.num_parameters)

    @property
    def _rest_bits(self) -> int:
        return 32 * (self.plan.num_parameters - sum(layer.size for layer in self.coded))

    def traffic(self) -> dict[Sync, Download]:
        """Return the downlink traffic so far, actual or hypothetical, by the value of ``sync``."""
        return dict(self.downlink.traffic)

    def participants(self, server_round: int, there: Sequence[int] | None = None) -> list[int]:
        """Return the K partition ids of a round, ascending, drawn from all nodes or from the online ones."""
        everyone = range(self.federation.num_clients)
        if self.num_clients_per_round is None:
            return list(everyone)
        there = everyone if there is None else there
        return self.federation.members.scheduled(server_round, there, self.num_clients_per_round)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; ValueError if it has another compression."""
        if (found := state["fingerprint"]) != self.plan.fingerprint:
            raise ValueError(f"fingerprint must be {self.plan.fingerprint!r}, got {found!r} in the state")
        super().load_state_dict(state)

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "fingerprint": self.plan.fingerprint}

    def _set_up(self, arrays: ArrayRecord, grid: Grid) -> ArrayRecord:
        """Split the model; FedLMT and FedPara start from another model."""
        if self.state is None:
            self.federation.gather(grid)
            self.state = self.begin(self.federation.vector(arrays))
        return self.current_arrays() or arrays

    def train_metrics(self, contents: list[RecordDict]) -> MetricRecord:
        """Aggregate the metrics, and report the achieved ratios."""
        metrics = super().train_metrics(contents)
        if self.settings.train_metrics_aggr_fn is None:
            for key in _BOOKKEEPING:
                metrics.pop(key, None)
        metrics["uplink-ratio"], metrics["downlink-ratio"] = self.uplink_ratio, self.downlink_ratio
        return metrics

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t├──> Method: %s", self.describe())
        shares = self.uplink_ratio, self.downlink_ratio
        log(INFO, "\t├──> Sent up: %.4f of the dense model | down: %.4f, each update once", *shares)
        log(INFO, "\t├──> Downlink: %s | weights: %s", self.sync, self.weighting)
        log(INFO, "\t├──> Aggregation: %s", self.aggregation)
        if self.sums is not None:
            log(INFO, "\t├──> Secure sums: %s", self.sums.settings)
        count = self.num_clients_per_round or self.num_clients
        log(INFO, "\t├──> Nodes a round: %d of %d", count, self.num_clients)
        training = self.local_epochs, self.batch_size, self.learning_rate
        log(INFO, "\t├──> Local epochs: %d | batch size: %d | learning rate: %g", *training)
        self.log_keys()

    # The model as vectors: (M,) in all, (d,) for the uncoded part, (D,) for the coded layers one by one.

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the coded layers by key."""
        return {layer.key: layer.shape for layer in self.coded}

    @cached_property
    def _coded_layout(self) -> Layout:
        shapes = self.shapes
        return Layout(tuple(shapes), tuple(shapes.values()), ("float32",) * len(shapes))

    @property
    def rest(self) -> Layout:
        """The layout of the uncoded part."""
        layout = self.federation.known_layout()
        if self._rest is None or self._rest[0] is not layout:
            self._rest = layout, layout.part(set(layout.keys) - set(self.shapes))
        return self._rest[1]

    def parted(self, model: Vector) -> tuple[Vector, NDArray[np.float32]]:
        """Return theta (d,) and the coded layers' weights (D,); ValueError if a layer is missing."""
        whole, rest = self.federation.known_layout(), self.rest
        found = dict(zip(whole.keys, whole.shapes, strict=True))
        for key, shape in self.shapes.items():
            if found.get(key) != shape:
                raise ValueError(
                    f"{key} must have the shape {shape}, got {found.get(key)} in the initial arrays"
                )
        theta = np.concatenate([np.zeros(0), *(model[whole.slices[key]] for key in rest.keys)])
        weights = np.concatenate([np.zeros(0), *(model[whole.slices[key]] for key in self.shapes)])
        return theta.astype(rest.float_type), weights.astype(np.float32)

    def whole(self, theta: Vector, weights: Vector) -> Vector:
        """Return the model (M,) from theta and the coded layers' weights."""
        layout = self.federation.known_layout()
        model = np.empty(layout.size, np.result_type(theta, weights))
        for key, where in self.rest.slices.items():
            model[layout.slices[key]] = theta[where]
        for key, where in self._coded_layout.slices.items():
            model[layout.slices[key]] = weights[where]
        return model

    def by_layer(self, weights: Vector) -> dict[str, Tensor]:
        """Return weights (D,) by the coded layers' keys; nothing for no weights."""
        return split(weights, self.shapes) if weights.size else {}

    def flat(self, weights: Mapping[str, Tensor]) -> NDArray[np.float32]:
        """Return the coded layers' weights as one vector (D,)."""
        return joined(weights, self.shapes)

    def halved(self, row: NDArray[np.float64]) -> tuple[Vector, NDArray[np.float64]]:
        """Return theta, in the type it is stored in, and the coded part of a mean."""
        theta = row[: self.rest.size].astype(self.rest.float_type)
        return theta, row[self.rest.size :]

    def training(
        self,
        run: RoundContext,
        theta: Vector,
        start: Vector,
        coding: Coded,
        *,
        keys: Mapping[str, Scalar],
        records: Mapping[str, ArrayRecord] | None = None,
        base: Vector | None = None,
        near: Vector | None = None,
    ) -> Exchange:
        """Return the training exchange of a round.

        ``theta`` (d,) is sent as it is, and the coding's rows start at ``start`` (c,). ``keys`` are the
        method's instructions, and ``records`` are sent along. ``base`` (D,) is the nodes' copy of the coded
        layers; None or empty if they keep none. The norm of ``near`` is the scale for changes of ``start``.
        """
        d = theta.size
        ask = Ask(
            self.participants(run.round, run.online),
            np.concatenate([theta, start]),
            arrays=self.rest.unflatten(theta),
            records=records or {},
            bits=self.downlink_bits,
            held={} if base is None or not base.size else {"base": self._coded_layout.unflatten(base)},
        )
        # A counter's change says nothing of the parameters beside it.
        floats = self.rest.floats
        bounded: dict[str, tuple[slice | NDArray[np.intp], Vector]] = {"rest": (floats, theta[floats])}
        if start.size:
            bounded["coded"] = slice(d, d + start.size), start if near is None else near
        config: dict[str, Scalar | list[str]] = {
            **{key.replace("_", "-"): value for key, value in self.compression.__dict__.items()},
            "layers": [layer.key for layer in self.coded],
            "server-round": run.round,
            "fingerprint": self.plan.fingerprint,
            "run-seed": run.seed,
            "seed": run.seed,
            "learning-rate": self.learning_rate,
            "local-epochs": self.local_epochs,
            "batch-size": self.batch_size,
            **keys,
        }
        return Exchange("train", [ask], config, (DOWN, UP), coding, bounded=bounded)


class WithoutFactors(CompressedLayers[S]):
    """Methods without factors: their budget is the bits of the coded layers, ``ratio`` in (0, 1].

    A ValueError if the shortest message has more bits than the budget.
    """

    updates = "updates"

    def __init__(self, ratio: float, budget: str, **options: Unpack[TrainingOptions]) -> None:
        in_range("ratio", ratio, 0.0, 1.0, open_below=True)
        super().__init__(Compression("dense", ratio, budget), BASELINE_RATE, **options)
        if self.budget_bits < (least := self.least_bits):
            rest, whole = self._rest_bits, 32 * self.plan.num_parameters
            smallest = ceil(least / 32) / self.size if budget == "layer" else (rest + least) / whole
            check_reachable(ratio, smallest, "the shortest message")

    @property
    @abstractmethod
    def least_bits(self) -> int:
        """The bits of the coded layers in the shortest message."""

    def _coded(self, layers: Sequence[LayerShape]) -> Sequence[LayerShape]:
        """Return the layers between the skipped ones; ValueError if there are none."""
        return between(layers, **self._skipped)

    @property
    def size(self) -> int:
        """The number of weights D in the coded layers."""
        return sum(layer.size for layer in self.coded)

    @property
    def budget_bits(self) -> int:
        """The bits that a message may spend on the coded layers.

        With the budget ``"model"`` these are what ``ratio`` leaves of the model's 32 bits per parameter after
        the rest is paid for, as in the planning of factors; with ``"layer"`` they are that share of the
        layers' own bits.
        """
        ratio, parameters = self.compression.ratio, self.plan.num_parameters
        if self.compression.budget == "layer":
            return 32 * ceil(ratio * self.size)
        return floor(32 * ratio * parameters) - 32 * (parameters - self.size)


class _Sums(SecureSums):
    """Secure sums in which a node's weight may be its number of batches."""

    def __init__(
        self, settings: SecureSum, federation: Federation, weighting: Weighting, batch_size: int
    ) -> None:
        self.batch_size = batch_size if weighting == "num-batches" else 0
        by = {"num-examples": None, "num-batches": weighting, "uniform": ""}[weighting]
        super().__init__(settings, federation, down_link=DOWN, up_link=UP, weighted_by=by)

    def weight_of(self, member: int) -> float:
        """Return a member's largest weight: its examples, or its batches."""
        examples = super().weight_of(member)
        return float(ceil(examples / self.batch_size)) if self.batch_size else examples
