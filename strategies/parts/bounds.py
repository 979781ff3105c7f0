"""Bounds on well-formed replies: the update's norm, and the resulting loss.

A bound is a multiple of a median over the run itself, which fewer than half of the nodes cannot move. It
keeps a single reply from ruining the model; robust means (``robust.py``) handle errors within the bound.
"""

from collections.abc import Iterable, Mapping
from math import isfinite, sqrt
from statistics import median, median_low
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hedgerow.wire.records import PayloadError

__all__ = ["TOO_LARGE", "LossBound", "UpdateBound", "norm_of"]

# The reason for refusing an update.
TOO_LARGE = "update too large"
# Number of rounds in the median.
_ROUNDS = 16
# Share of the model's own norm up to which an update is usual in any round.
_SMALL = 1e-3


def norm_of(vector: NDArray[Any]) -> float:
    """Return the Euclidean norm of a vector; infinity on overflow."""
    flat = vector.ravel()
    # As ``np.linalg.norm``, without its overhead.
    with np.errstate(over="ignore"):
        return float(np.sqrt(flat.dot(flat)))


class UpdateBound:
    """Bounds the norms of updates by those accepted in earlier rounds.

    The bound is ``max_ratio`` times the median, over the last 16 rounds, of each round's median norm, and at
    least ``max_ratio`` thousandths of the model's norm, so that an almost converged run accepts new nodes'
    updates. In the first round it is ``max_ratio`` times the norm of the model, or times the square root of
    its size if it is zero. ``max_ratio`` >= 0; 0 for no bound.
    """

    def __init__(self, max_ratio: float) -> None:
        self.max_ratio = max_ratio
        self._usual: list[float] = []
        self._here: list[float] = []
        self._round = 0

    def begin(self, server_round: int) -> None:
        """Begin a round; a repeated round forgets the updates that it accepted."""
        if server_round != self._round:
            self._usual = self._known()
        self._here, self._round = [], server_round

    def check(self, update: NDArray[Any], model: NDArray[Any], noise: float = 0.0) -> None:
        """Record an update of a model, arrays of any shape; PayloadError (``update too large``) if refused.

        ``noise`` is the standard deviation sigma of the noise that the run adds to each number. It widens the
        bound by sigma (sqrt(d) + 6), which the noise's norm exceeds once in 10^7 updates.
        """
        if self.max_ratio:
            self.check_norm(norm_of(update), model, noise)

    def check_norm(self, norm: float, model: NDArray[Any], noise: float = 0.0) -> None:
        """Record the norm of an update of a whole model, as ``check`` does; ``max_ratio`` is not 0."""
        usual = median(self._usual) if self._usual else 0.0
        if norm > self.max_ratio * usual:
            small = (_SMALL if self._usual else 1.0) * (norm_of(model) or sqrt(model.size))
            usual = max(usual, small)
            most = self.max_ratio * usual + noise * (sqrt(model.size) + 6)
            if not norm <= most:
                raise PayloadError(TOO_LARGE, f"norm {norm:.3g}, expected at most {most:.3g}")
        self._here.append(norm)

    def too_large(
        self, norms: Mapping[int, float], models: Mapping[int, NDArray[Any]]
    ) -> dict[int, PayloadError]:
        """Record the norms of updates of whole models, by position; return the errors of those refused."""
        errors = {}
        for at, norm in norms.items():
            try:
                self.check_norm(norm, models[at])
            except PayloadError as error:
                errors[at] = error
        return errors

    def _known(self) -> list[float]:
        return [*self._usual, *([median_low(self._here)] if self._here else [])][-_ROUNDS:]

    def state_dict(self) -> list[float]:
        """Return the rounds' medians, for a checkpoint at the end of a round."""
        return self._known()

    def load_state_dict(self, state: Iterable[float]) -> None:
        """Restore a checkpoint."""
        self._usual, self._here, self._round = [float(norm) for norm in state], [], 0


class LossBound:
    """Bounds losses by the first one of their kind.

    A loss diverges if it is not finite, or exceeds ``max_ratio`` times the larger of 1 and the first loss;
    ``max_ratio`` = 0 for no bound.
    """

    def __init__(self, max_ratio: float) -> None:
        self.max_ratio = max_ratio
        self._first: dict[str, float] = {}

    def problem(self, kind: str, loss: Any) -> str | None:
        """Return what is wrong with a loss of a kind (central, federated, training), if anything."""
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
