"""What HSGD's cloud holds: the global model of (2), or each group's own where groups are kept apart.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", (2) and the baseline TDCD without a merger.
"""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from hedgerow.strategies.hsgd.aggregators import Combine, Theta, mean_of, moved

__all__ = ["Cloud"]


class Cloud:
    """The model that a round starts from, and what becomes of the groups' models at its end.

    Parameters
    ----------
    theta : Theta
        The initial model.
    aggregate : bool
        False: every group goes on from its own model.
    combine : Combine or None (default: None)
        The rule in place of the weighted mean of groups, whose three blocks it takes as one vector; None for
        that mean. Groups that are kept apart have none.
    """

    def __init__(self, theta: Theta, aggregate: bool, combine: Combine | None = None) -> None:
        # The global model; of groups that are kept apart, the mean weighted by their people.
        self.theta = theta
        self.aggregate = aggregate
        self._combine = combine if aggregate else None
        self._first = theta
        self._own: dict[int, Theta] = {}
        self._sizes: dict[int, int] = {}

    @property
    def groups(self) -> list[int]:
        """The groups that are kept apart, as far as they have come."""
        return sorted(self._own)

    def start(self, m: int) -> Theta:
        """Return what group m starts its round from."""
        return self.theta if self.aggregate else self._own.get(m, self._first)

    def take(self, models: Mapping[int, Theta], sizes: Mapping[int, int]) -> None:
        """Aggregate by (2) the models of the groups that are there, one at least.

        Groups are weighted by all of their people K_m, ``sizes``. Those that are kept apart stay as they were
        where they are not there.
        """
        if not self.aggregate:
            self._sizes |= sizes
            self._own |= {m: models.get(m, self.start(m)) for m in sizes}
            models, sizes = self._own, self._sizes
        if self._combine is not None:
            whole = [np.concatenate(models[m]) for m in sorted(models)]
            self.theta = self._split(moved(self._combine, np.concatenate(self.theta), whole))
            return
        mean = mean_of({m: (sizes[m], model) for m, model in models.items()})
        assert mean is not None
        self.theta = mean

    def take_sums(self, head_and_hospital: NDArray[Any], device: NDArray[Any]) -> None:
        """Take the means of groups whose models only they know: head and hospital's encoder, and theta_2."""
        self.theta = self._split(np.concatenate([head_and_hospital, device]))

    def _split(self, flat: NDArray[Any]) -> Theta:
        ends = np.cumsum([len(block) for block in self.theta])[:-1]
        parts = zip(np.split(flat, ends), self.theta, strict=True)
        return Theta(*(part.astype(block.dtype) for part, block in parts))

    def state_dict(self) -> dict[str, Any]:
        """Return the models, for a checkpoint."""
        own = {str(m): model._asdict() for m, model in sorted(self._own.items())}
        state: dict[str, Any] = {"theta": self.theta._asdict(), "models": own}
        if not self.aggregate:
            state["first"] = self._first._asdict()
            state["model-sizes"] = {str(m): size for m, size in sorted(self._sizes.items())}
        return state

    @classmethod
    def restored(cls, state: Mapping[str, Any], aggregate: bool, combine: Combine | None = None) -> Self:
        """Return what ``state_dict`` was of."""
        cloud = cls(_theta(state["theta"]), aggregate, combine)
        cloud._own = {int(m): _theta(model) for m, model in state["models"].items()}
        if not aggregate:
            cloud._first = _theta(state.get("first", state["theta"]))
            known = state.get("model-sizes", dict(enumerate(state["group-sizes"])))
            cloud._sizes = {int(m): int(size) for m, size in known.items()}
        return cloud


def _theta(blocks: Mapping[str, Any]) -> Theta:
    return Theta(**{key: np.asarray(block) for key, block in blocks.items()})
