"""What HSGD's cloud holds: the global model of (2), or each group's own where groups are kept apart.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", (2) and the baseline TDCD without a merger.
"""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from hedgerow.strategies.hsgd.aggregators import Theta, mean_of

__all__ = ["Cloud"]


class Cloud:
    """The model that a round starts from, and what becomes of the groups' models at its end.

    Parameters
    ----------
    theta : Theta
        The initial model.
    aggregate : bool
        False: every group goes on from its own model.
    """

    def __init__(self, theta: Theta, aggregate: bool) -> None:
        # The global model; of groups that are kept apart, the mean weighted by their people.
        self.theta = theta
        self.aggregate = aggregate
        self._own: dict[int, Theta] = {}

    def start(self, m: int) -> Theta:
        """Return what group m starts its round from."""
        return self._own.get(m, self.theta)

    def take(self, models: Mapping[int, Theta], sizes: Mapping[int, int]) -> None:
        """Aggregate by (2) the models of the groups that are there, one at least.

        Groups are weighted by all of their people K_m, ``sizes``.
        """
        if not self.aggregate:
            self._own = models = {m: models.get(m, self.start(m)) for m in sizes}
        mean = mean_of({m: (sizes[m], model) for m, model in models.items()})
        assert mean is not None
        self.theta = mean

    def state_dict(self) -> dict[str, Any]:
        """Return the models, for a checkpoint."""
        own = {str(m): model._asdict() for m, model in sorted(self._own.items())}
        return {"theta": self.theta._asdict(), "models": own}

    @classmethod
    def restored(cls, state: Mapping[str, Any], aggregate: bool) -> Self:
        """Return what ``state_dict`` was of."""
        cloud = cls(_theta(state["theta"]), aggregate)
        cloud._own = {int(m): _theta(model) for m, model in state["models"].items()}
        return cloud


def _theta(blocks: Mapping[str, Any]) -> Theta:
    return Theta(**{key: np.asarray(block) for key, block in blocks.items()})
