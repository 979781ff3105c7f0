"""Plans from a problem's constants, given or measured: steps, rounds and uplink to an accuracy.

Paper: A. Beikmohammadi, S. Khirirat, S. Magnússon, "On the Convergence of Federated Learning Algorithms
without Data Similarity": Theorems 1-3 and Propositions 1-4, implemented in ``theory.py``.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

import numpy as np

from hedgerow.strategies.schedules import Diminishing, Fixed, Schedule, StepDecay, theory_stage_len
from hedgerow.strategies.similarity_free.fewest_rounds import (
    fewest_diminishing,
    fewest_fixed,
    fewest_step_decay,
)
from hedgerow.strategies.similarity_free.theory import (
    AlgorithmName,
    Constants,
    Mode,
    best_c_fixed,
    bound_any,
    bound_diminishing,
    bound_fixed,
    bound_step_decay,
    max_step,
    rounds_diminishing,
    rounds_fixed,
    rounds_step_decay,
    system_constants,
    uplink_bits_to_accuracy,
)
from hedgerow.wire.checks import at_least, check_ordinary, not_negative, positive, require

_BITS_PER_PARAMETER = 32
# The bounds sum over the steps of all rounds; this many take 80 MB.
_MOST_ROUNDS = 10**7
# A complete stage takes decay_factor^2 rounds.
_MOST_DECAY = 3_000.0


class Source(StrEnum):
    """The source of a plan's input."""

    GIVEN = "given"
    MEASURED = "measured"
    ASSUMED = "assumed"


@dataclass(frozen=True)
class Estimate:
    """An input of a plan, its source, and the rule by which it was measured or assumed."""

    value: float
    source: Source
    rule: str = ""


@dataclass(frozen=True)
class ProblemEstimates:
    """The constants that the theory needs, each with its source."""

    L: Estimate  # Smoothness of every f_i, > 0.
    sigma2: Estimate  # Variance bound of a mini-batch gradient, >= 0; only its mean over nodes is used.
    delta_inf: Estimate  # Delta^inf, the mean over nodes of f^inf - f_i^inf, >= 0.
    V0: Estimate  # f(x^0) - f^inf, > 0.
    R: Estimate  # Upper bound on every V_k, >= V0; only the step-decay bound needs it.

    def __post_init__(self) -> None:
        positive(L=self.L.value, V0=self.V0.value)
        not_negative(sigma2=self.sigma2.value, delta_inf=self.delta_inf.value)
        check_ordinary(**{field.name: getattr(self, field.name).value for field in fields(self)})
        valid = f"a finite number >= V0, {self.V0.value!r}"
        require("R", self.R.value, valid, math.isfinite(self.R.value) and self.R.value >= self.V0.value)

    def assumed(self) -> dict[str, str]:
        """Return the assumed inputs: name to rule."""
        every = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: one.rule for name, one in every.items() if one.source is Source.ASSUMED}


def estimates(
    L: float,
    sigma2: float,
    *,
    initial_loss: float,
    delta_inf: float | None = None,
    V0: float | None = None,
    R: float | None = None,
) -> ProblemEstimates:
    """Return the given constants, and the missing (None) ones as a non-negative loss bounds them.

    ``initial_loss`` is f(x^0) > 0: it bounds V0 = f(x^0) - f^inf and Delta^inf <= f^inf. R is assumed to be
    V0, which no theorem guarantees. See ``ProblemEstimates`` for the others.
    """
    positive(initial_loss=initial_loss)
    gap = _given(V0) or Estimate(initial_loss, Source.ASSUMED, "V0 <= f(x^0), loss non-negative")
    dip = _given(delta_inf) or Estimate(
        initial_loss, Source.ASSUMED, "delta_inf <= f(x^0), loss non-negative"
    )
    return ProblemEstimates(
        L=Estimate(L, Source.GIVEN),
        sigma2=Estimate(sigma2, Source.GIVEN),
        delta_inf=dip,
        V0=gap,
        R=_given(R) or Estimate(gap.value, Source.ASSUMED, "no V_k above V_0"),
    )


def _given(value: float | None) -> Estimate | None:
    return None if value is None else Estimate(value, Source.GIVEN)


def estimates_from_rounds(
    rounds: Iterable[Mapping[str, Any]],
    *,
    L: float | None = None,
    sigma2: float | None = None,
    delta_inf: float | None = None,
    V0: float | None = None,
    R: float | None = None,
) -> ProblemEstimates:
    """Return the given constants, and the missing (None) ones as measured in a run with probing.

    L is the largest ``curvature`` and sigma2 the largest ``gradient-variance`` of all rounds. Both are
    estimates from below, valid where the run has been. The losses of the central evaluation bound the others:
    delta_inf by the smallest, V0 by that of round 0, R by the largest. ``rounds`` are the run's: ``round``,
    and the metrics ``train`` and ``central``, as in ``RoundEnd``; a ValueError names all that they lack.
    """
    rounds = list(rounds)
    curvatures = _recorded(rounds, "train", "curvature")
    variances = _recorded(rounds, "train", "gradient-variance")
    losses = _recorded(rounds, "central", "loss")
    first = _recorded([record for record in rounds if record["round"] == 0], "central", "loss")
    needs = (
        ("train 'curvature'", L is None and not curvatures),
        ("train 'gradient-variance'", sigma2 is None and not variances),
        ("central 'loss'", delta_inf is None and not losses),
        ("central 'loss' of round 0", V0 is None and not first),
    )
    if missing := [what for what, lacks in needs if lacks]:
        raise ValueError(
            f"the rounds lack {', '.join(missing)}: they must be of a run that was probed and evaluated "
            'centrally, made with -c "probe-rounds=5"'
        )
    if min(losses, default=0.0) < 0:
        raise ValueError(f"losses must never be negative, got {min(losses)!r}")
    gap = _given(V0) or Estimate(first[0], Source.ASSUMED, "V0 <= loss of round 0, loss non-negative")
    return ProblemEstimates(
        L=_given(L) or Estimate(_most(curvatures), Source.MEASURED, _probed("curvature", curvatures)),
        sigma2=_given(sigma2)
        or Estimate(_most(variances), Source.MEASURED, _probed("gradient variance", variances)),
        delta_inf=_given(delta_inf)
        or Estimate(min(losses), Source.ASSUMED, "delta_inf <= smallest loss, loss non-negative"),
        V0=gap,
        R=_given(R) or Estimate(max([gap.value, *losses]), Source.ASSUMED, "no V_k above the largest loss"),
    )


def _recorded(rounds: Sequence[Mapping[str, Any]], source: str, metric: str) -> list[float]:
    return [float(record[source][metric]) for record in rounds if metric in record.get(source, {})]


def _most(values: Sequence[float]) -> float:
    return float(np.max(values))  # NaN propagates, and is rejected.


def _probed(what: str, values: Sequence[float]) -> str:
    return f"largest {what} of {len(values)} probed rounds, a lower bound"


@dataclass(frozen=True)
class Guarantee:
    """The guarantee for one algorithm and one schedule."""

    algorithm: AlgorithmName
    schedule: Schedule  # The system's step: divide by T for the local step of the FedAvg family.
    max_step: float  # The largest admissible step of the system.
    max_local_step: float  # The same for a local iteration.
    constants: Constants
    bound: float  # ``bound_any`` after the planned rounds.
    theorem: float  # The bound of the schedule's own theorem.
    rounds: int | float  # Rounds to epsilon; inf if the formulas do not reach it.
    first_step: float  # The first step of these rounds, of the system, at most ``max_step``.
    uplink_bits: int | float | None  # Of all nodes, to epsilon; None if the bits per message are unknown.
    estimates: ProblemEstimates


def plan(
    known: ProblemEstimates,
    *,
    num_rounds: int = 400,
    epsilon: float = 0.1,
    local_iters: int = 1,
    contraction: float = 1.0,
    nu: float = 0.75,
    decay_factor: float = 2.0,
    num_nodes: int = 10,
    num_params: int | None = None,
    message_bits: int | None = None,
    mode: str = "corrected",
) -> list[Guarantee]:
    """Return the guarantee for each algorithm with each schedule, in the order of ``AlgorithmName``.

    No argument describes how dissimilar the nodes' data are: the paper's message is that no step size depends
    on it. Heterogeneity enters the bounds through Delta^inf alone.

    The fixed schedule uses the best c for K rounds, the others start at the largest admissible step; a stage
    of the step-decay schedule has ``theory_stage_len`` rounds. Rounds to epsilon are the fewest that
    ``bound_any`` guarantees, over all admissible first steps. With printed constants they are those of the
    theorems: of Theorem 1 with the best c for many rounds, of Theorem 2, and of ``rounds_step_decay``.

    ``local_iters`` is T of the FedAvg family, and ``contraction`` is for the error-feedback algorithms; both,
    ``num_rounds`` K, ``epsilon`` and ``mode`` are as in ``theory``. K must be at least max(2,
    decay_factor^2), so that step-decay has a complete stage. With nu = 0.51 as in the paper's experiments
    Theorem 2 is useless: e^{b1 s} is 10^9 for FedAvg. ``num_params`` are the trainable parameters, 32 bits
    each in an uncompressed message; ``message_bits`` is the size of a compressed one.
    """
    at_least(1, num_rounds=num_rounds, num_nodes=num_nodes)
    require("num_rounds", num_rounds, f"an integer up to {_MOST_ROUNDS}", num_rounds <= _MOST_ROUNDS)
    require("decay_factor", decay_factor, f"a number up to {_MOST_DECAY:g}", decay_factor <= _MOST_DECAY)
    positive(epsilon=epsilon)
    check_ordinary(epsilon=epsilon, contraction=contraction)
    stage_len = theory_stage_len(max(num_rounds, 2), decay_factor)
    least = max(2, math.ceil(decay_factor**2))
    require("num_rounds", num_rounds, f"an integer >= {least}", num_rounds >= least)
    dense_bits = None if num_params is None else _BITS_PER_PARAMETER * num_params
    V0, R = known.V0.value, known.R.value
    plans = []
    for algorithm in AlgorithmName:
        T = 1 if algorithm.proximal else local_iters
        limit = max_step(algorithm, known.L.value, contraction=contraction, mode=mode)
        constants = system_constants(
            algorithm,
            known.L.value,
            sigma2=known.sigma2.value,
            delta_inf=known.delta_inf.value,
            contraction=contraction,
            local_iters=T,
            mode=mode,
        )
        fixed = Fixed(best_c_fixed(constants, V0, max_step=limit, num_rounds=num_rounds), num_rounds)
        diminishing = Diminishing(limit, nu)
        decay = StepDecay(limit, decay_factor, stage_len)
        printed = Mode(mode) is Mode.PRINTED
        found: list[tuple[Schedule, float]] = [
            (fixed, bound_fixed(constants, V0, fixed)),
            (diminishing, bound_diminishing(constants, V0, diminishing, num_rounds)),
            (decay, bound_step_decay(constants, R, decay, num_rounds, printed=printed)),
        ]
        if printed:
            c = best_c_fixed(constants, V0)
            many = rounds_fixed(constants, V0, c=c, epsilon=epsilon, max_step=limit)
            fewest = [
                (many, c / math.sqrt(many)),
                (rounds_diminishing(constants, V0, diminishing, epsilon=epsilon, max_step=limit), limit),
                (
                    rounds_step_decay(constants, R, gamma0=limit, decay_factor=decay_factor, epsilon=epsilon),
                    limit,
                ),
            ]
        else:
            goal = {"epsilon": epsilon, "max_step": limit}
            fewest = [
                fewest_fixed(constants, V0, **goal),
                fewest_diminishing(constants, V0, nu=nu, **goal),
                fewest_step_decay(constants, V0, decay_factor=decay_factor, **goal),
            ]
        bits = message_bits if algorithm.error_feedback else dense_bits
        for (schedule, theorem), (rounds, first_step) in zip(found, fewest, strict=True):
            plans.append(
                Guarantee(
                    algorithm,
                    schedule,
                    limit,
                    limit / T,
                    constants,
                    bound_any(constants, V0, schedule.values(num_rounds)),
                    theorem,
                    rounds,
                    first_step,
                    None if bits is None else uplink_bits_to_accuracy(rounds, num_nodes, bits),
                    known,
                )
            )
    return plans
