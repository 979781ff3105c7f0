"""LoRA adapters: with the mean of each factor (FedIT), with one side frozen (FFA-LoRA), with the exact mean
(FedEx-LoRA).

Papers: J. Zhang et al., "Towards Building the Federated GPT: Federated Instruction Tuning" (FedIT), 2023:
clients train A and B of Delta = B A, and the server averages A and B one by one. Y. Sun et al., "Improving
LoRA in Privacy-preserving Federated Learning" (FFA-LoRA), ICLR 2024: A stays as it was drawn. R. Singhal et
al., "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Foundation Models", 2024: the
difference between the mean product and the product of means is added to the frozen weights of all nodes.
Here B is the factor U, zero at the start, and A is V, drawn from U(-a, a). Differs: Delta has no factor
alpha / r, which the step size and ``init_a`` stand for.
"""

from dataclasses import replace
from typing import Unpack

import numpy as np
from torch import Tensor

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Steps, Vector
from hedgerow.strategies.fedmud.algorithm import State
from hedgerow.strategies.fedmud.codings import Factors, with_updates
from hedgerow.strategies.fedmud.compressed_layers import Compression, TrainingOptions
from hedgerow.strategies.fedmud.fedhm import truncated
from hedgerow.strategies.fedmud.strategy import UPDATE_RATE, Averaged
from hedgerow.strategies.parts import UpdateLog
from hedgerow.wire.checks import int_at_least


class LoRA(Averaged):
    """Low-rank adapters of frozen weights, each factor averaged on its own.

    Parameters
    ----------
    ratio, budget, init_a, measure_bias
        As in ``FedMUD``; FFA-LoRA sends one factor, which may have twice the rank.
    freeze : bool (default: False)
        Keep A as it was drawn (FFA-LoRA): the mean of B is then the mean of the updates.
    reset_interval : int or None (default: None)
        Rounds s between two merges of the adapters into the weights, >= 1; None for none, as in the papers.
    **options
        See ``CompressedLayers``.
    """

    def __init__(
        self,
        *,
        ratio: float = 1 / 32,
        budget: str = "model",
        init_a: float | None = None,
        measure_bias: bool = False,
        freeze: bool = False,
        reset_interval: int | None = None,
        **options: Unpack[TrainingOptions],
    ) -> None:
        if reset_interval is not None:
            int_at_least(1, reset_interval=reset_interval)
        self.reset_interval = reset_interval
        compression = Compression("lora+f" if freeze else "lora", ratio, budget, init_a)
        super().__init__(compression, UPDATE_RATE, measure_bias, **options)


class FedExLoRA(LoRA):
    """LoRA whose mean update is exact: the server sends what the mean of the factors misses.

    The residual of K replies of rank r has at most rank (K - 1) r, and is sent as the factors of its singular
    value decomposition. It is counted in ``downlink_bits``. ``residual-norm`` reports its norm each round.

    Parameters
    ----------
    ratio, budget, init_a
        As in ``LoRA``.
    **options
        See ``CompressedLayers``.
    """

    no_sums = "the server multiplies the factors of each reply"
    only_mean = "the residual is that of the mean"

    def __init__(
        self,
        *,
        ratio: float = 1 / 32,
        budget: str = "model",
        init_a: float | None = None,
        **options: Unpack[TrainingOptions],
    ) -> None:
        super().__init__(ratio=ratio, budget=budget, init_a=init_a, **options)

    @property
    def keeps_base(self) -> bool:
        """Whether the base stays: no, residuals are added to it."""
        return False

    def unstepped(self) -> str | None:
        """Return why no server step can act."""
        return "the residual belongs to the mean of one round's replies"

    def unbuffered(self) -> str | None:
        """Return why no buffer can hold replies: the same reason."""
        return self.unstepped()

    @property
    def _residual_bits(self) -> int:
        ranks = [min((self.most - 1) * layer.rank, layer.m, layer.n) for layer in self.plan.layers]
        sizes = [rank * (layer.m + layer.n) for rank, layer in zip(ranks, self.plan.layers, strict=True)]
        return 32 * sum(sizes)

    @property
    def coded_bits(self) -> tuple[int, int]:
        """The nominal bits of the factors in a reply, and of factors and residual in an instruction."""
        up, down = super().coded_bits
        return up, down + self._residual_bits

    def log(self) -> UpdateLog:
        """Return an empty log of residuals."""
        return UpdateLog(self._residual_bits, 32 * self.plan.dense_count)

    def round(self, state: State, run: RoundContext) -> Steps[State]:
        """Average A, B and B A; add mean(B A) - mean(B) mean(A) to W."""
        train = self.factor_training(state, run, "fedex")
        coding = train.coding
        assert isinstance(coding, Factors)
        mean = (yield from self.means(with_updates(train), run)).get(0)
        if mean is None:
            return state
        row = mean.model()
        sent, C = row.size - self.plan.dense_count, self.plan.count
        theta, factors = self.halved(row[:sent])
        factors = factors.astype(np.float32)
        averaged = replace(state, theta=theta, factors=factors, age=state.age + 1)
        missed = row[sent:] - coding.update(np.concatenate([row[: sent - C], factors]))
        run.metrics["residual-norm"] = float(np.linalg.norm(missed))
        residual = self._residual(missed, len(mean.nodes))
        if not residual:
            return averaged
        run.update = residual
        merged = self.plan.of_ranks(residual).merge(self.by_layer(state.base), residual, {})
        return replace(averaged, base=self.flat(merged), resets=state.resets + 1)

    def _residual(self, missed: Vector, replies: int) -> dict[str, Tensor]:
        factors: dict[str, Tensor] = {}
        updates = self.by_layer(missed.astype(np.float32)).values()
        for layer, weight in zip(self.plan.layers, updates, strict=True):
            rank = min((replies - 1) * layer.rank, layer.m, layer.n)
            if not rank:
                return {}
            u, v = truncated(layer.as_matrix(weight), rank)
            factors |= {f"{layer.key}:U": u, f"{layer.key}:V": v}
        return factors
