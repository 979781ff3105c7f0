"""The strategies that average factors: FedMUD and its forms, FedLMT and FedPara.

The papers' algorithm is in ``algorithm.py``; here are the user's settings.
"""

from typing import ClassVar, Unpack

import numpy as np

from hedgerow.strategies.aggregate import Aggregator, WeightedMean
from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Steps
from hedgerow.strategies.fedmud.algorithm import FactorAveraging, State
from hedgerow.strategies.fedmud.codings import Factors, Reconstructing, as_updates
from hedgerow.strategies.fedmud.compressed_layers import Compression, TrainingOptions
from hedgerow.wire.checks import int_at_least, one_of

# Step sizes of the authors' published runs: of FedAvg, and of FedMUD+BKD+AAD, used for all forms here.
DENSE_RATE, UPDATE_RATE = 0.03, 0.01
# FedLMT's and FedPara's are not published for this set-up: of 0.3, 0.1, 0.03 and 0.01 the smallest with a
# training loss after ten rounds of the app's default run, with another seed, within a tenth of the lowest.
FACTORS_RATE = 0.1
UPDATE_VARIANTS = ("mud", "mud+f", "mud+aad", "mud+bkd", "mud+bkd+f", "mud+bkd+aad", "dense")


class Averaged(FactorAveraging):
    """Averages of factors with a user's settings; a subclass sets their form."""

    def __init__(
        self, compression: Compression, rate: float, measure_bias: bool, **options: Unpack[TrainingOptions]
    ) -> None:
        self.measure_bias, variant = measure_bias, compression.variant
        # Whether replies are kept in a buffer: factors that are drawn anew have no mean with earlier ones.
        self._of_updates = options.get("buffer") is not None and self.reset_interval is not None
        self._of_updates = self._of_updates and variant != "dense"
        if measure_bias:
            self.no_sums = "measure_bias reconstructs the update of each reply"
        if not variant.endswith(("+f", "+aad", "dense")):
            self.only_mean = (
                f"both factors of {variant!r} are trained, and a rule's result on products is in general no "
                "product; other rules are for variants with +f or +aad"
            )
        super().__init__(compression, rate, **options)

    def _aggregator(self, mean: WeightedMean) -> Aggregator:
        rows, robust = super()._aggregator(mean), not self.aggregation.rule.is_mean
        if self._of_updates:
            return rows
        return Reconstructing(rows, robust, self.measure_bias) if robust or self.measure_bias else rows

    def unbuffered(self) -> str | None:
        """Return why a buffer cannot hold the replies, if factors are drawn anew."""
        why = self.unstepped()
        if why is None or (self.reset_interval == 1 and self.sync == "dense" and not self.measure_bias):
            return None
        fails = {
            "reset-interval must be 1": self.reset_interval != 1,
            "sync must be 'dense' (nodes could not replay a mean of updates)": self.sync != "dense",
            "measure-bias must be False": self.measure_bias,
        }
        wanted = " and ".join(text for text, failed in fails.items() if failed)
        return f"{why}, so that a buffer holds updates in place of factors, eq. (6): {wanted}"

    def buffered_round(self, state: State, run: RoundContext) -> Steps[State]:
        """Add the mean of the replies' updates to the base, eq. (6), in place of the mean factors' update.

        Each reply's factors are multiplied as they were drawn for its node, so that all rows are updates.
        """
        if not self._of_updates:
            return (yield from self.round(state, run))
        coding = Factors(self.rest, self.uplink_bits, self.plan, self._frozen(state))
        train = self.training(
            run, state.theta, state.factors, coding, base=state.base, keys={"method": "factored"}
        )
        mean = (yield from self.means(as_updates(train), run)).get(0)
        if mean is None:
            return state
        theta, update = self.halved(mean.model())
        run.update = {}  # The next version; each node is sent the base.
        nu = state.resets + 1
        return State(theta, (state.base + update).astype(np.float32), self._drawn(nu), nu)


class FedMUD(Averaged):
    """FedMUD and its variants; ``dense`` is the family's FedAvg.

    Parameters
    ----------
    variant : str (default: "mud+bkd+aad")
        One of ``UPDATE_VARIANTS``; see ``Factorisation``.
    ratio : float (default: 1 / 32)
        Target size of messages each way, in (0, 1]; 1 for updates as large as the weights.
    budget : {"model", "layer"} (default: "model")
        Whether the ratio is of the whole model, as in the authors' code, or of each compressed layer.
    reset_interval : int (default: 1)
        Rounds s between two merges, >= 1. Above the number of rounds, there are no merges.
    init_a : float or None (default: None)
        Half width a of U(-a, a), > 0; None derives it from the step size, see ``init_width``.
    layout : {"flat", "tiled"} (default: "flat")
        Kronecker blocks in a row, as in the authors' code, or in a square, as in the text.
    tight : bool (default: False)
        Omit the blocks that no weight uses, which the authors' code transmits.
    measure_bias : bool (default: False)
        Report the aggregation bias each round; see ``Reconstructing``.
    **options
        See ``CompressedLayers``.
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


class TrainedFactors(Averaged):
    """Clients train factors of the weights themselves, which are averaged; a subclass sets their form.

    The run starts from random factors: the compressed layers of the initial arrays are unused. A convolution
    is the same matrix as in FedMUD, the weight's buffer row by row, unless FedLMT's own view is chosen. Nodes
    are stateless.

    Parameters
    ----------
    ratio, budget, init_a, measure_bias
        As in ``FedMUD``.
    view : {"buffer", "convolutions"} (default: "buffer")
        The matrix of a convolution: FedMUD's, or that of the authors of FedLMT and FedHM, with V and U as two
        convolutions, the first of one row and the second of one column.
    **options
        See ``CompressedLayers``.
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

    Parameters are those of ``TrainedFactors``; there is no personalized form.
    """

    variant = "para"
