"""The numbers of examples that nodes claim, and the weights that follow from them.

No server can verify a claim of a device. Weights are limited, and impossible claims refused, by multiples of
the median claim, which fewer than half of the nodes cannot move. Sizes that the suite dealt itself are no
claims: they are not limited.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from logging import WARNING
from statistics import median_low
from typing import Any

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from hedgerow.strategies.known_nodes import KnownSizes
from hedgerow.wire.limits import MAX_EXAMPLES
from hedgerow.wire.records import PayloadError

__all__ = ["OVERSTATED", "Claims"]

# The reason for refusing a claim, and the largest accepted multiple of the median: a hospital among phones of
# ten examples each has at most 10^5 times their size, while 2^53, the largest claim that a message may hold,
# is 10^6 times any median up to nine billion.
OVERSTATED, _MAX_CLAIM_RATIO = "claimed size too large", 1e6
# Fewest claims for a median that a minority of false ones cannot move.
_LEAST_CLAIMS = 3


class Claims:
    """The first claim of each client, |S_i|, by partition id.

    Parameters
    ----------
    max_ratio : float
        Limits weights to this multiple of the median claim, >= 1; 0 for no limit.
    dealt : Sequence[int] or None (default: None)
        The sizes that the server dealt, by partition id. There is no limit if all claims are these.
    """

    def __init__(self, max_ratio: float, dealt: Sequence[int] | None = None) -> None:
        self.max_ratio, self.dealt = max_ratio, dealt
        self.sizes: MutableMapping[int, float] = {}
        # Whether this process counted the examples of simulated nodes itself.
        self.counted = False
        # The number of claims, and the limits that follow from them.
        self._cap: tuple[int, float] = 0, float("inf")
        self._largest: tuple[int, float] = 0, float("inf")
        self._logged = False

    def largest(self) -> float:
        """Return the largest size that may be claimed; infinite without a limit or with too few claims."""
        if not self.max_ratio:
            return float("inf")
        if self._largest[0] != (known := len(self.sizes)):
            most = (
                _MAX_CLAIM_RATIO * median_low(self.sizes.values()) if known >= _LEAST_CLAIMS else float("inf")
            )
            self._largest = known, most
        return self._largest[1]

    def cap(self) -> float:
        """Return the largest weight of a client; the first claim above it is logged, as it may be honest."""
        if self.counted:
            return float("inf")
        if self._cap[0] == (known := len(self.sizes)):
            return self._cap[1]
        limited = self.max_ratio and known and not self._as_dealt()
        most = self.max_ratio * median_low(self.sizes.values()) if limited else float("inf")
        self._cap = known, most
        cut = sorted(client for client, size in self.sizes.items() if size > most)
        if cut and not self._logged:
            self._logged = True
            log(
                WARNING,
                "Partitions %s claim more than max_weight_ratio = %g times the median of the examples that "
                "nodes claim: they count with %g.",
                cut[:8],
                self.max_ratio,
                most,
            )
        return most

    @property
    def metrics_ratio(self) -> float:
        """The limit on the weights of metrics, as ``max_ratio``."""
        return 0.0 if self.cap() == float("inf") else self.max_ratio

    def _as_dealt(self) -> bool:
        dealt = self.dealt
        return dealt is not None and all(
            client < len(dealt) and size == dealt[client] for client, size in self.sizes.items()
        )

    def check(self, claimed: float) -> float:
        """Return a claim; raise PayloadError if it is too large."""
        if claimed > (most := self.largest()):
            raise PayloadError(OVERSTATED, f"{claimed:g} examples, expected at most {most:g}")
        return claimed

    def valid(self, claimed: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which claims are positive and not too large."""
        return (claimed > 0) & (claimed <= min(MAX_EXAMPLES, self.largest()))

    def state_dict(self) -> Any:
        """Return the claims, for a checkpoint."""
        if isinstance(self.sizes, KnownSizes):
            return self.sizes.array
        return {str(client): size for client, size in sorted(self.sizes.items())}

    def load_state_dict(self, state: NDArray[np.float64] | Mapping[str, float]) -> None:
        """Restore a checkpoint."""
        if isinstance(state, np.ndarray):
            self.sizes = KnownSizes(state)
        else:
            self.sizes = {int(client): float(size) for client, size in state.items()}
