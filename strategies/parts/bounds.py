"""What a well-formed reply may be at most: its update's norm, its weight, and the loss of what comes of it.

A bound is a multiple of what is usual in the run itself, taken as a median: fewer than half of the nodes
cannot move it. It keeps one node from ruining a model at a stroke; what stays within it is for a robust mean
(``robust.py``).
"""

from collections.abc import Iterable, Mapping
from math import isfinite, sqrt
from statistics import median, median_low
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hedgerow.wire.records import PayloadError

__all__ = ["OVERSTATED", "TOO_LARGE", "LossBound", "UpdateBound", "capped", "norm_of", "overstated"]

# The reason of a reply whose update is refused.
TOO_LARGE = "update too large"
# The reason of a node, or a reply, that claims a size which none has, and the multiple of the median beyond
# which that is so: a hospital beside phones of ten examples each has 10^5 times theirs at most, while 2^53,
# the most that a message may say, is 10^6 times any median up to nine billion.
OVERSTATED, _MAX_CLAIM_RATIO = "claimed size too large", 1e6
# Claims of which fewer than half may lie, and still the median is an honest one.
_LEAST_CLAIMS = 3
# Rounds whose medians say what is usual.
_ROUNDS = 16
# Of the model's own norm: an update that is no larger is usual in any round.
_SMALL = 1e-3


def norm_of(vector: NDArray[Any]) -> float:
    """Return the Euclidean norm of a vector; infinity where it exceeds what its type holds."""
    flat = vector.ravel()
    # As ``np.linalg.norm`` does, which takes longer to ask what it was given.
    with np.errstate(over="ignore"):
        return float(np.sqrt(flat.dot(flat)))


class UpdateBound:
    """Holds the norms of updates against those that were accepted in rounds before.

    The bound is ``max_ratio`` times the median, over the last 16 rounds, of each round's median norm, and no
    less than ``max_ratio`` thousandths of the model's norm, so that a run which has all but converged
    takes what is new. In the first round it is ``max_ratio`` times the norm of the model, or the root of its
    size where it is zero. ``max_ratio`` >= 0; 0 is no bound.
    """

    def __init__(self, max_ratio: float) -> None:
        self.max_ratio = max_ratio
        self._usual: list[float] = []
        self._here: list[float] = []
        self._round = 0

    def begin(self, server_round: int) -> None:
        """Begin a round; one that is begun again forgets what it accepted."""
        if server_round != self._round:
            self._usual = self._known()
        self._here, self._round = [], server_round

    def check(self, update: NDArray[Any], model: NDArray[Any], noise: float = 0.0) -> None:
        """Note an update of a model, arrays of any shape; PayloadError with reason ``update too large``.

        ``noise`` is the standard deviation of what the run has a node add to each number, by which the bound
        is wider: the norm of such noise exceeds sigma (sqrt(d) + 6) once in 10^7 updates.
        """
        if self.max_ratio:
            self.check_norm(norm_of(update), model, noise)

    def check_norm(self, norm: float, model: NDArray[Any], noise: float = 0.0) -> None:
        """Note the norm of an update of a whole model, as ``check`` does; ``max_ratio`` is not 0."""
        usual = median(self._usual) if self._usual else 0.0
        if norm > self.max_ratio * usual:
            small = (_SMALL if self._usual else 1.0) * (norm_of(model) or sqrt(model.size))
            usual = max(usual, small)  # What is small is usual in any case.
            most = self.max_ratio * usual + noise * (sqrt(model.size) + 6)
            if not norm <= most:
                raise PayloadError(TOO_LARGE, f"norm {norm:.3g}, expected at most {most:.3g}")
        self._here.append(norm)

    def _known(self) -> list[float]:
        return [*self._usual, *([median_low(self._here)] if self._here else [])][-_ROUNDS:]

    def state_dict(self) -> list[float]:
        """Return the rounds' medians, for a checkpoint at the end of a round."""
        return self._known()

    def load_state_dict(self, state: Iterable[float]) -> None:
        """Restore a checkpoint."""
        self._usual, self._here, self._round = [float(norm) for norm in state], [], 0


class LossBound:
    """Holds the losses of evaluations against the first of their kind.

    A loss diverges that is not finite, or exceeds ``max_ratio`` times the first, or times 1 where that is
    less; with ``max_ratio`` = 0 none does.
    """

    def __init__(self, max_ratio: float) -> None:
        self.max_ratio = max_ratio
        self._first: dict[str, float] = {}

    def problem(self, kind: str, loss: Any) -> str | None:
        """Return what is wrong with a loss of a kind (central, federated), if anything."""
        if not self.max_ratio or isinstance(loss, bool) or not isinstance(loss, int | float):
            return None
        if not isfinite(loss):
            return f"the loss is {loss}"
        first = self._first.setdefault(kind, float(loss))
        if loss > self.max_ratio * max(first, 1.0):
            return f"the loss is {loss:.3g}, more than {self.max_ratio:g} times the {first:.3g} of the start"
        return None

    def state_dict(self) -> dict[str, float]:
        """Return the first losses, for a checkpoint."""
        return dict(self._first)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a checkpoint."""
        self._first = {str(kind): float(loss) for kind, loss in state.items()}


def capped(weights: Mapping[int, float], max_ratio: float) -> float:
    """Return the most that one of these weights counts: ``max_ratio`` times their median; infinity for 0."""
    return max_ratio * median_low(weights.values()) if max_ratio and weights else float("inf")


def overstated(sizes: Mapping[int, float]) -> float:
    """Return the size above which a claim is refused, given those of all; infinity where they are too few."""
    return _MAX_CLAIM_RATIO * median_low(sizes.values()) if len(sizes) >= _LEAST_CLAIMS else float("inf")
