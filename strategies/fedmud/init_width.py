"""The default half width a of U(-a, a): one rule for each form of factors.

Paper: S. Li et al., "The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient Federated
Learning" (FedMUD) tunes a per method, and its authors publish one pair: a = 5 with a step of 0.01 for
FedMUD+BKD+AAD. Ours: for updates, a is such that the first step after a reset is as long as with that pair
(``step_gain``). For factors of the weight itself, a is such that the weight has the initial variance of He et
al., "Delving Deep into Rectifiers", 2015: 2 / fan-in.
"""

import math

from hedgerow.wire.checks import at_least, one_of, positive
from hedgerow.wire.lowrank import FactoredLayer, Factorisation

# eta gamma of the published pair: 0.01 * 2 * 5^2 / 3.
PUBLISHED_GAIN = 1 / 6
# LoRA's adapters are not drawn anew: their first step is that of dense training with FedAvg's step size.
LORA_GAIN = 0.03
# Significant digits, for a number that is easy to write down; the rules are no more precise.
_DIGITS = 4


def init_width(plan: Factorisation, learning_rate: float) -> float:
    """Return a to four digits, for SGD's step eta > 0; 1 if nothing is compressed. The plan's a is unused.

    For an update, eta times the mean of the layers' gains is ``PUBLISHED_GAIN``, or ``LORA_GAIN`` for LoRA's.
    For FedLMT and FedPara it is the geometric mean of the layers' widths that give each weight He's variance.
    """
    if not plan.layers:
        return 1.0
    if plan.has_base:
        gains = [step_gain(plan.variant, 1.0, max(1, layer.rank)) for layer in plan.layers]  # gamma / a^2
        wanted = LORA_GAIN if plan.variant.startswith("lora") else PUBLISHED_GAIN
        a = math.sqrt(wanted * len(gains) / (learning_rate * math.fsum(gains)))
    else:
        a = math.exp(math.fsum(math.log(_he_width(layer)) for layer in plan.layers) / len(plan.layers))
    return float(f"{a:.{_DIGITS}g}")


def _he_width(layer: FactoredLayer) -> float:
    """Return the a with which U V, or (X1 Y1) * (X2 Y2), has entries of variance 2 / fan-in.

    An entry of U V is a sum of r products: its variance is r (a^2 / 3)^2, that of FedPara the square of it.
    """
    of_product = 2 / (layer.size / layer.shape[0])
    if layer.variant == "para":
        of_product = math.sqrt(of_product)
    return math.sqrt(3 * math.sqrt(of_product / layer.rank))


def step_gain(variant: str, init_a: float, rank: int = 1) -> float:
    """Return gamma: the first SGD step after a reset moves the weights by -eta gamma G in expectation.

    G is the gradient of the weights; the expectation is over the random factors, drawn from U(-a, a) with a =
    ``init_a`` > 0. The gain of the matrix forms grows with the rank, r or r_F of the freezing variant, and
    differs between layers; that of the Kronecker forms does not.
    """
    known = ("mud", "mud+f", "mud+aad", "mud+bkd", "mud+bkd+f", "mud+bkd+aad", "lora", "lora+f")
    one_of("variant", variant, known)
    positive(init_a=init_a)
    at_least(1, rank=rank)
    parts, variance = variant.split("+"), init_a**2 / 3
    return variance * (1 if "bkd" in parts else rank) * (2 if "aad" in parts else 1)
