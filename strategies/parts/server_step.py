"""A step of the server on the mean of replies, in place of taking the mean itself.

Paper: S. Reddi et al., "Adaptive Federated Optimization" (ICLR 2021), Algorithm 2: the server treats the mean
change Delta_t of a round as a gradient, and keeps memory of earlier ones.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hedgerow.strategies.aggregate.mean import Mean
from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Exchange, Vector
from hedgerow.strategies.parts.part import Part
from hedgerow.wire.blocks import MODEL

Memory = Mapping[str, NDArray[np.float64]]


class ServerStep(Part):
    """Moves each model by a step in place of the mean change; a subclass has ``step``.

    It needs the mean alone, with the method's weights, so it works with compression, robust rules and secure
    sums. Running statistics, counters and blocks next to the model take the mean. Each pool of replies, such
    as a cluster of SD-FEEL, has its own memory, which is in checkpoints. A failed round leaves it unchanged.
    """

    name = "server-step"

    def __init__(self) -> None:
        self.forget()

    @abstractmethod
    def step(self, change: NDArray[np.float64], memory: Memory) -> tuple[NDArray[np.float64], Memory]:
        """Return the change to make, and the memory of the next step.

        Parameters
        ----------
        change : NDArray
            The mean change Delta_t of the parameters that the method averages, (d,): weights, or factors.
        memory : Mapping[str, NDArray]
            What the previous step of this pool returned, empty at first. It must not be changed in place.
        """

    def forget(self) -> None:
        """Reset the memory."""
        self._memory: dict[int, Memory] = {}
        # An attempt of a round, and the memory after it, by pool.
        self._next: tuple[RoundContext | None, dict[int, Memory]] = None, {}

    def stepped(self, means: Mapping[int, Mean], exchange: Exchange, run: RoundContext) -> Mapping[int, Mean]:
        """Return the pools' models after a step, in place of their means."""
        if self._next[0] is not run:
            self._next = run, {}
        others = exchange.statistics(run.federation)

        def stepped(pool: int, mean: Mean) -> Mean:
            start = exchange.sent(pool)
            model = slice(0, start.size) if exchange.blocks is None else exchange.blocks.slices[MODEL]
            trained = np.delete(np.arange(model.stop), others) if others.size else model
            return _Stepped(self, pool, mean, start, trained)

        return {pool: stepped(pool, mean) for pool, mean in means.items()}

    def of_pool(self, pool: int, change: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return a pool's change; its memory counts once the round is complete."""
        moved, self._next[1][pool] = self.step(change, self._memory.get(pool, {}))
        if moved.shape != change.shape:
            raise ValueError(
                f"step of {type(self).__name__} must give a change of shape {change.shape}, got {moved.shape}"
            )
        return moved

    def ended(self, run: RoundContext) -> None:
        """Keep the memory of a completed round."""
        if self._next[0] is run:
            self._memory |= self._next[1]

    def state_dict(self) -> dict[str, Any]:
        """Return the memory by pool, for a checkpoint."""
        return {str(pool): dict(memory) for pool, memory in sorted(self._memory.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        self._memory = {
            int(pool): {name: np.asarray(value, np.float64) for name, value in memory.items()}
            for pool, memory in state.items()
        }

    def describe(self) -> list[str]:
        """Return a line for the log."""
        return [f"Server step: {type(self).__name__}"]


@dataclass(frozen=True, eq=False)
class _Stepped:
    by: ServerStep
    pool: int
    mean: Mean
    start: Vector
    where: NDArray[np.intp] | slice  # the entries that it steps on

    @property
    def nodes(self) -> Collection[int]:
        return self.mean.nodes

    @property
    def weight(self) -> float:
        return self.mean.weight

    def model(self, stayed: float = 0.0) -> NDArray[np.float64]:
        row, start = np.array(self.mean.model(stayed)), self.start[self.where]
        row[self.where] = start + self.by.of_pool(self.pool, row[self.where] - start)
        return row
