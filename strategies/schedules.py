"""Step sizes as functions of the communication round: fixed, diminishing, step-decay.

Paper: A. Beikmohammadi, S. Khirirat, S. Magnússon, "On the Convergence of Federated Learning Algorithms
without Data Similarity": the schedules of Theorems 1 to 3. Rounds count from 0.
Differs: a stage of the step-decay schedule may have any length; Theorem 3 requires ``theory_stage_len``.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hedgerow.wire.checks import at_least, is_real, one_of, positive, require


@dataclass(frozen=True)
class Schedule(ABC):
    """A step size for every round k = 0, 1, ..., or for its local iterations: > 0, never increasing."""

    name: ClassVar[str]

    def __call__(self, k: int) -> float:
        """Return gamma_k, the same float64 as ``values``; ValueError if k < 0."""
        at_least(0, k=k)
        return float(self._steps(np.array([k]))[0])

    def values(self, num_rounds: int) -> NDArray[np.float64]:
        """Return gamma_0, ..., gamma_{K-1} (num_rounds,); ValueError if ``num_rounds`` < 1."""
        at_least(1, num_rounds=num_rounds)
        return self._steps(np.arange(num_rounds))

    def __str__(self) -> str:
        """Return name and parameters, as ``fixed(c=2, num_rounds=400)``."""
        params = (f"{field.name}={_plain(getattr(self, field.name))!r}" for field in fields(self))
        return f"{self.name}({', '.join(params)})"

    @abstractmethod
    def _steps(self, k: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return gamma_k for an array of rounds."""


@dataclass(frozen=True)
class Fixed(Schedule):
    """gamma_k = c / sqrt(K), so that the squares of a run's K steps sum to c^2.

    Rounds after K, if a run continues for longer than planned, take the same step.

    Parameters
    ----------
    c : float
        Finite, > 0.
    num_rounds : int
        K, >= 1.

    Examples
    --------
    >>> Fixed(c=2, num_rounds=400)(7)
    0.1
    """

    name = "fixed"
    c: float
    num_rounds: int

    def __post_init__(self) -> None:
        positive(c=self.c)
        at_least(1, num_rounds=self.num_rounds)

    def _steps(self, k: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.full(k.shape, self.c / math.sqrt(self.num_rounds))


@dataclass(frozen=True)
class Diminishing(Schedule):
    """gamma_k = c / (k + 1)^nu: sums to infinity, its squares to at most 2 nu c^2 / (2 nu - 1).

    Parameters
    ----------
    c : float
        The first step, finite, > 0.
    nu : float
        In the open interval (1/2, 1).

    Examples
    --------
    >>> [round(Diminishing(c=0.8, nu=0.51)(k), 6) for k in (0, 1, 399)]
    [0.8, 0.561778, 0.037674]
    """

    name = "diminishing"
    c: float
    nu: float

    def __post_init__(self) -> None:
        positive(c=self.c)
        require(
            "nu", self.nu, "a number in the open interval (0.5, 1)", is_real(self.nu) and 0.5 < self.nu < 1
        )

    def _steps(self, k: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.asarray(self.c / (k + 1.0) ** self.nu)


@dataclass(frozen=True)
class StepDecay(Schedule):
    """gamma_k = gamma0 / decay_factor^floor(k / stage_len): constant in stages, then cut.

    Parameters
    ----------
    gamma0 : float
        The first stage's step, finite, > 0.
    decay_factor : float
        Divides the step after each stage, finite, > 1.
    stage_len : int
        Rounds of a stage, >= 1.

    Examples
    --------
    >>> [StepDecay(gamma0=0.8, decay_factor=2, stage_len=50)(k) for k in (0, 49, 50, 399)]
    [0.8, 0.8, 0.4, 0.00625]
    """

    name = "step-decay"
    gamma0: float
    decay_factor: float
    stage_len: int

    def __post_init__(self) -> None:
        positive(gamma0=self.gamma0)
        _decaying(self.decay_factor)
        at_least(1, stage_len=self.stage_len)

    def _steps(self, k: NDArray[np.int64]) -> NDArray[np.float64]:
        # The power overflows only if the quotient underflows.
        with np.errstate(over="ignore"):
            return np.asarray(self.gamma0 / float(self.decay_factor) ** (k // self.stage_len))


_KINDS: dict[str, type[Schedule]] = {kind.name: kind for kind in (Diminishing, Fixed, StepDecay)}
SCHEDULES = tuple(_KINDS)


def schedule(kind: str, **params: float) -> Schedule:
    """Return a schedule by its name, one of ``SCHEDULES``, with exactly its parameters.

    Examples
    --------
    >>> schedule("fixed", c=2, num_rounds=400)
    Fixed(c=2, num_rounds=400)
    """
    one_of("schedule", kind, SCHEDULES)
    needed = [field.name for field in fields(_KINDS[kind])]
    if sorted(params) != sorted(needed):
        got = ", ".join(params) or "nothing"
        raise ValueError(f"schedule {kind!r} must have exactly {', '.join(needed)}, got {got}")
    return _KINDS[kind](**params)


def theory_stage_len(num_rounds: int, decay_factor: float) -> int:
    """Return ceil(2 K / log_a K), the stage length of Theorem 3 for K >= 2 rounds and decay factor a > 1.

    A stage is longer than the whole run if K < a^2.

    Examples
    --------
    >>> theory_stage_len(256, 2), theory_stage_len(400, 2)
    (64, 93)
    """
    at_least(2, num_rounds=num_rounds)
    _decaying(decay_factor)
    length = 2 * num_rounds * math.log2(decay_factor) / math.log2(num_rounds)
    # Rounding of the logarithms must not push an exact integer to the next one.
    return math.ceil(length * (1 - 1e-12))


def _plain(value: float) -> float:
    return value.item() if isinstance(value, np.generic) else value


def _decaying(decay_factor: float) -> None:
    holds = is_real(decay_factor) and decay_factor > 1
    require("decay_factor", decay_factor, "a finite number > 1", holds)
