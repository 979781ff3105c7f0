"""What is believed of replies: claimed sizes, update norms and losses, all relative to this run's median.

No server can verify a claim of a device. A limit is a multiple of a median over the run itself, which fewer
than half of the nodes cannot move, so that a single reply cannot ruin the model; robust means (``robust.py``)
handle errors within the limits. Sizes that the suite dealt itself are no claims: they are not limited.
"""

from collections.abc import ItemsView, Iterable, Iterator, Mapping, MutableMapping, Sequence, ValuesView
from logging import WARNING
from math import isfinite, sqrt
from statistics import median, median_low
from typing import Any

import numpy as np
from flwr.app import MetricRecord, RecordDict
from flwr.common import log
from numpy.typing import NDArray

from hedgerow.strategies.inbox import TOO_LARGE, checked_metrics
from hedgerow.strategies.options import FederationSettings
from hedgerow.wire.limits import MAX_EXAMPLES
from hedgerow.wire.records import PayloadError

# The reason for refusing a claim, and the largest accepted multiple of the median: a hospital among phones of
# ten examples each has at most 10^5 times their size, while 2^53, the largest claim that a message may hold,
# is 10^6 times any median up to nine billion.
OVERSTATED, _MAX_CLAIM_RATIO = "claimed size too large", 1e6
# Fewest claims for a median that a minority of false ones cannot move.
_LEAST_CLAIMS = 3


class KnownSizes(MutableMapping[int, float]):
    """The sizes (N,) of all clients, by partition id."""

    def __init__(self, sizes: Sequence[int] | NDArray[Any]) -> None:
        self.array = np.array(sizes, np.float64)

    def __getitem__(self, client: int) -> float:
        if not 0 <= client < len(self.array):
            raise KeyError(client)
        return float(self.array[client])

    def __setitem__(self, client: int, size: float) -> None:
        self.array[client] = size

    def __delitem__(self, client: int) -> None:
        raise TypeError(f"the size of client {client} is known, and stays")

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.array)))

    def __len__(self) -> int:
        return len(self.array)

    def items(self) -> ItemsView[int, float]:
        """Return clients and sizes."""
        return _Items(self)

    def values(self) -> ValuesView[float]:
        """Return the sizes."""
        return _Sizes(self)


class _Items(ItemsView[int, float]):
    def __init__(self, sizes: KnownSizes) -> None:
        super().__init__(sizes)
        self._array = sizes.array

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return iter(enumerate(self._array.tolist()))


class _Sizes(ValuesView[float]):
    def __init__(self, sizes: KnownSizes) -> None:
        super().__init__(sizes)
        self._array = sizes.array

    def __iter__(self) -> Iterator[float]:
        return iter(self._array.tolist())


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


class Limits:
    """The limits of a run, and how often the current exchange needed them.

    Parameters
    ----------
    settings : FederationSettings
        The strategy's options.
    """

    def __init__(self, settings: FederationSettings) -> None:
        self._settings = settings
        self.reset()

    def reset(self) -> None:
        """Forget the run."""
        self.claims = Claims(self._settings.max_weight_ratio, self._settings.dealt_sizes)
        self.losses = LossBound(self._settings.max_loss_ratio)
        # The largest size that a registry allows each client, if it sets one.
        self.registered: dict[int, float] = {}
        self._bounds: dict[str, UpdateBound] = {}
        self.begin(0)

    def begin(self, server_round: int) -> None:
        """Begin a round's training exchange."""
        self._round = server_round
        for bound in self._bounds.values():
            bound.begin(server_round)
        # Clients with a weight below their claim, and means of too few updates for their rule.
        self.capped: set[int] = set()
        self.fell_back = 0

    # Claimed sizes.

    def overstated(self) -> list[int]:
        """Forget the impossible claims and return their clients: capped, they would count ten medians."""
        most = self.claims.largest()
        clients = [client for client, size in self.claims.sizes.items() if size > most]
        for client in clients:
            del self.claims.sizes[client]
        return clients

    def checked_weight(self, content: RecordDict) -> float:
        """Return the weight that a reply claims; raise PayloadError if it is not valid."""
        metrics = checked_metrics(content, self._settings.weighted_by_key)
        return self.claims.check(float(metrics[self._settings.weighted_by_key]))  # type: ignore[arg-type]

    def weight_of(self, client: int) -> float:
        """Return the weight of a client of known size: its size, up to ``max_weight_ratio`` medians."""
        size, cap = self.claims.sizes[client], self.claims.cap()
        if size > cap:
            self.capped.add(client)
        return min(size, cap, self.registered.get(client, size))

    def weights_of(self, clients: Sequence[int], claimed: Sequence[float]) -> Sequence[float]:
        """Return the weights of clients (K,), see ``weight_of``; one of unknown size has what it claims."""
        if isinstance(self.claims.sizes, KnownSizes) and not self.registered:
            sizes, cap = self.claims.sizes.array[list(clients)], self.claims.cap()
            self.capped.update(np.asarray(clients)[sizes > cap].tolist())
            return np.minimum(sizes, cap).tolist()  # type: ignore[no-any-return]
        weights = []
        for client, size in zip(clients, claimed, strict=True):
            self.claims.sizes.setdefault(client, size)
            weights.append(self.weight_of(client))
        return weights

    def weights(self, clients: int) -> NDArray[np.float64]:
        """Return the weights of the first clients (C,); a client of unknown size has the mean weight."""
        if isinstance(self.claims.sizes, KnownSizes):
            return np.minimum(self.claims.sizes.array[:clients], self.claims.cap())
        known = {client: self.weight_of(client) for client in self.claims.sizes}
        typical = sum(known.values()) / len(known) if known else 1.0
        return np.array([known.get(client, typical) for client in range(clients)])

    def counted(self, metrics: MetricRecord) -> MetricRecord:
        """Add to a round's metrics how often its means needed a limit."""
        if self.fell_back:
            metrics["rule-fell-back"] = self.fell_back
        metrics.pop("weights-capped", None)
        if self.capped:  # In the mean of the models; the metrics' own weights do not count.
            metrics["weights-capped"] = len(self.capped)
        return metrics

    # Norms of updates.

    def bound(self, part: str = "model") -> UpdateBound:
        """Return the bound on the updates of a part of the model."""
        if part not in self._bounds:
            self._bounds[part] = UpdateBound(self._settings.max_update_norm_ratio)
            self._bounds[part].begin(self._round)
        return self._bounds[part]

    def check_update(self, vector: NDArray[Any], sent: NDArray[Any], part: str, noise: float) -> None:
        """Record a node's update from ``sent`` to ``vector``, both (d,); PayloadError if it is too large.

        ``noise`` is the standard deviation of the noise that the run adds to each number.
        """
        if self._settings.max_update_norm_ratio:
            with np.errstate(over="ignore"):
                self.bound(part).check(vector - sent, sent, noise)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return sizes, update norms and first losses, for a checkpoint."""
        norms = {part: bound.state_dict() for part, bound in sorted(self._bounds.items())}
        kept = {"update-norms": norms, "first-losses": self.losses.state_dict()}
        return {"sizes": self.claims.state_dict(), **{key: value for key, value in kept.items() if value}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        for part, norms in state.get("update-norms", {}).items():
            self.bound(str(part)).load_state_dict(norms)
        self.losses.load_state_dict(state.get("first-losses", {}))
        self.claims.load_state_dict(state["sizes"])
