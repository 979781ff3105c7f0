"""The strategies whose factors are averaged: FedMUD and its forms, FedLMT and FedPara.

The papers' lines are in ``algorithm.py``; here is what a user sets.
"""

from typing import ClassVar, Unpack

from hedgerow.strategies.aggregate import Aggregator
from hedgerow.strategies.fedmud.algorithm import FactorAveraging
from hedgerow.strategies.fedmud.codings import Reconstructing
from hedgerow.strategies.fedmud.compressed_layers import Compression, TrainingOptions
from hedgerow.wire.checks import int_at_least, one_of

__all__ = ["UPDATE_VARIANTS", "FedLMT", "FedMUD", "FedPara"]

# Step sizes of the authors' published runs: of FedAvg, and of FedMUD+BKD+AAD, which all forms have here.
DENSE_RATE, UPDATE_RATE = 0.03, 0.01
# Nobody published FedLMT's and FedPara's for this set-up: of 0.3, 0.1, 0.03 and 0.01 the smallest whose
# training loss after ten rounds of the app's default run, with another seed, is within a tenth of the lowest.
FACTORS_RATE = 0.1
UPDATE_VARIANTS = ("mud", "mud+f", "mud+aad", "mud+bkd", "mud+bkd+f", "mud+bkd+aad", "dense")


class _Averaged(FactorAveraging):
    def __init__(
        self, compression: Compression, rate: float, measure_bias: bool, **options: Unpack[TrainingOptions]
    ) -> None:
        self.measure_bias, variant = measure_bias, compression.variant
        if measure_bias:
            self.no_sums = "measure_bias reconstructs what each reply stands for"
        if not variant.endswith(("+f", "+aad", "dense")):
            self.only_mean = (
                f"both factors of {variant!r} are trained, and what a rule takes of their products is no "
                "such product; other rules are for variants with +f or +aad"
            )
        super().__init__(compression, rate, **options)

    def _aggregator(self) -> Aggregator:
        rows, robust = super()._aggregator(), not self.aggregation.rule.is_mean
        return Reconstructing(rows, robust, self.measure_bias) if robust or self.measure_bias else rows


class FedMUD(_Averaged):
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
        Tell the aggregation bias each round; see ``Reconstructing``.
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
        self.reset_interval = reset_interval
        rate = DENSE_RATE if variant == "dense" else UPDATE_RATE
        compression = Compression(variant, ratio, budget, init_a, layout, tight)
        super().__init__(compression, rate, measure_bias, **options)


class TrainedFactors(_Averaged):
    """Clients train factors of the weights themselves, which are averaged; a subclass says of which form.

    The run starts from random factors: what the initial arrays hold of the compressed layers is not used. A
    convolution is the same matrix as in FedMUD, the weight's buffer row by row, unless FedLMT's own view is
    asked for. No node keeps anything between rounds.

    Parameters
    ----------
    ratio, budget, init_a, measure_bias
        As in ``FedMUD``.
    view : {"buffer", "convolutions"} (default: "buffer")
        The matrix of a convolution: FedMUD's, or that of FedLMT's and FedHM's authors, for whom V and U are
        two convolutions, the first of one row and the second of one column.
    **options
        See ``CompressedLayers``, also for what is raised.
    """

    variant: ClassVar[str]

    def __init__(
        self,
        *,
        ratio: float = 1 / 32,
        budget: str = "model",
        init_a: float | None = None,
        measure_bias: bool = False,
        view: str = "buffer",
        **options: Unpack[TrainingOptions],
    ) -> None:
        compression = Compression(self.variant, ratio, budget, init_a, view=view)
        super().__init__(compression, FACTORS_RATE, measure_bias, **options)


class FedLMT(TrainedFactors):
    """FedLMT (J. Liu et al., 2024): each compressed weight is U V from the start, and both are averaged.

    Parameters are those of ``TrainedFactors``.
    """

    variant = "lmt"


class FedPara(TrainedFactors):
    """FedPara (N. Hyeon-Woo et al., 2022): each compressed weight is (X1 Y1) * (X2 Y2) entrywise.

    Parameters are those of ``TrainedFactors``; there is no personalised form.
    """

    variant = "para"
