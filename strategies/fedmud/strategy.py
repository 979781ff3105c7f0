"""FedMUD: clients train low-rank updates of a frozen base, whose factors are averaged and merged.

Paper: S. Li et al., "The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient Federated
Learning", eqs. (3) to (9): model updates as factors, merged every s rounds; with Kronecker blocks (BKD) and
with one frozen factor to each trained one (AAD).
Differs: the server merges right after it has averaged, and nodes replay its merges; in the authors' code they
merge at the start of the next round. The two are equal up to rounding.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from hedgerow.strategies.fedmud.compressed_layers import CompressedLayers, TrainingOptions
from hedgerow.strategies.fedmud.layer_method import Compression, Scalar
from hedgerow.strategies.fedmud.projection import nearest_factors
from hedgerow.strategies.fedmud.sync import UpdateLog
from hedgerow.strategies.vectors import WeightedMean, arrays, joined, split, tensors
from hedgerow.wire.checks import int_at_least, one_of
from hedgerow.wire.lowrank import Factorisation, LayerShape
from hedgerow.wire.records import Layout, to_record

__all__ = ["UPDATE_VARIANTS", "FactorAveraging", "FedMUD", "read_factors"]

# Step sizes of the authors' published runs: of FedAvg, and of FedMUD+BKD+AAD, which all forms have here.
DENSE_RATE, UPDATE_RATE = 0.03, 0.01
UPDATE_VARIANTS = ("mud", "mud+f", "mud+aad", "mud+bkd", "mud+bkd+f", "mud+bkd+aad", "dense")


def read_factors(plan: Factorisation, coded: ArrayRecord) -> NDArray[np.float32]:
    """Return a record of trained factors as one vector (C,); PayloadError if it is none."""
    shapes = plan.shapes
    layout = Layout(tuple(shapes), tuple(shapes.values()), ("float32",) * len(shapes))
    return layout.flatten(coded, np.float32)


class FactorAveraging:
    """Factors that are averaged one by one, eq. (4), and merged into a base if there is one.

    Parameters
    ----------
    plan : Factorisation
        The factors.
    run_seed : int
        Keys all that is drawn.
    reset_interval : int or None (default: None)
        Rounds s between two merges, >= 1; None for never.
    measure_bias : bool (default: False)
        Tell ``aggregation-bias`` each round: the largest entry of W* - W, what eq. (7) misses of eq. (6),
        which costs the reconstruction of every reply.

    Notes
    -----
    A robust rule is taken of the updates that the replies' factors give, and what comes of it is no such
    update: the factors become those whose update is nearest to it. Where one factor of each product is frozen
    (F and AAD) the updates that factors can give are a linear space. Every valid reply, and any mean of them,
    is in it, and the nearest point of that space is no further from any of them than the rule's own result:
    what the rule promises still holds, merges stay as small as they were, and a mean of factors would have
    come out as itself. Where both factors are trained there is no such space, and only the mean is valid.
    """

    update_record = "merges"

    def __init__(
        self,
        plan: Factorisation,
        run_seed: int,
        reset_interval: int | None = None,
        measure_bias: bool = False,
    ) -> None:
        self.plan = plan
        self.layers: Sequence[LayerShape] = plan.layers
        self.run_seed = run_seed
        self.reset_interval = reset_interval
        self.measure_bias = measure_bias
        self.uplink_bits = self.downlink_bits = 32 * plan.count
        self.log = UpdateLog(self.downlink_bits, 32 * plan.dense_count if plan.has_base else 0)
        self.only_mean = (
            ""
            if all(layer.is_linear for layer in plan.layers)
            else f"both factors of {plan.variant!r} are trained, and what a rule takes of their products is "
            "no such product; other rules are for variants with +f or +aad"
        )
        self.no_sums = "measure_bias reconstructs what each reply stands for" if measure_bias else ""
        self._keys = tuple(layer.key for layer in plan.layers)
        self._base: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}
        self._age = 0

    def begin(self, weights: Mapping[str, Tensor]) -> None:
        """Start from these bases, where there are any."""
        self._base = dict(weights) if self.plan.has_base else {}
        self._reset()

    def instructions(self) -> dict[str, Scalar]:
        """Return the method's keys of a message's config."""
        return {"method": "factored" if self.plan.layers else "dense"}

    def down(self) -> dict[str, ArrayRecord]:
        """Return the factors, unless they are fresh from a reset: then nodes draw them."""
        drawn = self.plan.has_base and not self._age
        return {} if drawn or not self._factors else {"factors": to_record(self._factors)}

    def base(self) -> Mapping[str, Tensor]:
        """Return the bases W."""
        return self._base

    def read(self, server_round: int, client: int, coded: ArrayRecord) -> NDArray[np.float32]:
        """Return a node's factors as one vector (C,)."""
        return read_factors(self.plan, coded)

    def moved(self, read: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the change of the factors (C,), and the factors: not of the weights that they give."""
        factors = joined(self._factors, self.plan.shapes)
        return read - factors, factors

    def mean(
        self, uplinks: Iterable[tuple[float, NDArray[np.float32]]]
    ) -> tuple[NDArray[np.float64] | None, NDArray[np.float64] | None]:
        """Return the mean of the factors (C,), and that of the updates they give (D,) if bias is measured."""
        factors, updates = WeightedMean(), WeightedMean()
        for weight, vector in uplinks:
            factors.add(weight, vector)
            if self.measure_bias:
                updates.add(weight, self._update(split(vector, self.plan.shapes)))
        return factors.value, updates.value

    def start(self) -> Mapping[str, NDArray[Any]]:
        """Return the factors, those that nodes draw after a reset too."""
        return arrays(self._factors)

    def summed(self, change: Mapping[str, NDArray[np.float64]]) -> Any:
        """Return the factors (C,) after a mean change of them."""
        moves = [change[key] for key in self.plan.shapes]
        return joined(self._factors, self.plan.shapes) + np.concatenate([np.zeros(0), *moves]), None

    def update(self, read: NDArray[np.float32]) -> NDArray[Any]:
        """Return the change of the weights (D,) that a node's factors are for."""
        return self._update(split(read, self.plan.shapes)) - self._update(self._factors)

    def taken(self, update: NDArray[np.float64]) -> Any:
        """Return the factors nearest to a change of the weights (D,), and the update that they stand for."""
        wanted = self._update(self._factors) + update
        factors = nearest_factors(self.plan, self._frozen(), wanted)
        return factors, wanted if self.measure_bias else None

    def move(self, server_round: int, mean: Any) -> dict[str, float]:
        """Take the mean factors; merge them every ``reset_interval`` rounds that had a mean."""
        factors, updates = mean
        self._factors = split(factors, self.plan.shapes)  # eq. (4)
        metrics = {}
        if updates is not None:
            bias = np.abs(updates - self._update(self._factors))  # eq. (6) - eq. (7)
            metrics["aggregation-bias"] = float(bias.max(initial=0.0))
        self._age += 1
        if self._age == self.reset_interval:
            self._base = self._merged()  # eq. (5)
            self.log.append(self._factors)
            self._reset()
        return metrics

    def weights(self) -> Mapping[str, Tensor]:
        """Return W + Delta, or what the factors give where there is no base."""
        return self._merged() if self._age or not self.plan.has_base else self._base

    def describe(self) -> str:
        """Return the settings in one line."""
        every = f", merged every {self.reset_interval} rounds" if self.plan.has_base else ""
        return f"{self.plan.variant} of {len(self.layers)} layers, C = {self.plan.count}{every}"

    def state_dict(self) -> dict[str, Any]:
        """Return bases, factors and rounds since the reset, for a checkpoint."""
        return {"base": arrays(self._base), "factors": arrays(self._factors), "age": self._age}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        self._base = tensors(state["base"])
        self._factors = tensors(state["factors"])
        self._age = int(state["age"])

    def _reset(self) -> None:
        self._factors = self.plan.init(self.run_seed, self.log.version)
        self._age = 0

    def _frozen(self) -> dict[str, Tensor]:
        return self.plan.frozen(self.run_seed, self.log.version)

    def _merged(self) -> dict[str, Tensor]:
        return self.plan.merge(self._base, self._factors, self._frozen())

    def _update(self, factors: Mapping[str, Tensor]) -> NDArray[np.float32]:
        return joined(self.plan.deltas(factors, self._frozen()), self._keys)


class FedMUD(CompressedLayers):
    """FedMUD and its variants; ``dense`` is the family's FedAvg.

    Parameters
    ----------
    variant : str (default: "mud+bkd+aad")
        One of ``UPDATE_VARIANTS``; see ``Factorisation``.
    ratio : float (default: 1 / 32)
        Target of what is sent each way, in (0, 1]; 1 for updates as large as the weights.
    budget : {"model", "layer"} (default: "model")
        Whether the ratio is the whole model's, as in the authors' code, or each compressed layer's.
    reset_interval : int (default: 1)
        Rounds s between two merges, >= 1. Above the number of rounds: one factorisation for the whole run.
    init_a : float or None (default: None)
        Half width a of U(-a, a), > 0; None for what goes with the step size, see ``init_width``.
    layout : {"flat", "tiled"} (default: "flat")
        Kronecker blocks one after the other, as in the authors' code, or in a square, as in the text.
    tight : bool (default: False)
        Leave out the blocks that no weight reaches, which the authors' code transmits.
    measure_bias : bool (default: False)
        Tell the aggregation bias each round; see ``FactorAveraging``.
    **options
        See ``CompressedLayers``, also for what is raised.
    """

    def __init__(
        self,
        *,
        variant: str = "mud+bkd+aad",
        ratio: float = 1 / 32,
        budget: str = "model",
        reset_interval: int = 1,
        init_a: float | None = None,
        layout: str = "flat",
        tight: bool = False,
        measure_bias: bool = False,
        **options: Unpack[TrainingOptions],
    ) -> None:
        int_at_least(1, reset_interval=reset_interval)
        one_of("variant", variant, UPDATE_VARIANTS)
        super().__init__(
            Compression(variant, ratio, budget, init_a, layout, tight),
            lambda model: FactorAveraging(model.plan, model.seed, reset_interval, measure_bias),
            DENSE_RATE if variant == "dense" else UPDATE_RATE,
            **options,
        )
