"""The constants of bound (15), measured at a run's own clients, for the planner.

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data", Assumption 1; the paper does not give its constants. Ours: before a round each
client reports grad F_i(u), and the curvature and mini-batch variance of its samples. The estimates hold at
the models that a run visits: they are estimates from below. They never affect the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from logging import WARNING

import numpy as np
from flwr.app import RecordDict
from flwr.common import log
from numpy.typing import NDArray

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.edges.clusters import Clusters
from hedgerow.strategies.exchange import Ask, Exchange, Row, Steps
from hedgerow.strategies.federation import Federation, only_arrays
from hedgerow.strategies.inbox import checked_metrics
from hedgerow.strategies.node import Node
from hedgerow.strategies.parts.part import Part
from hedgerow.wire.message_types import GRADIENT
from hedgerow.wire.printable import quoted
from hedgerow.wire.records import PayloadError

CURVATURE, VARIANCE = "curvature", "gradient-variance"


@dataclass(frozen=True)
class ProbeAnswer:
    """One client's report at u: grad F_i(u) (M,), and estimates of L and sigma^2 from below, >= 0."""

    gradient: NDArray[np.float64]
    curvature: float
    variance: float


class Probes(Part):
    """Asks all online clients for their gradients at u, once before each of the first rounds.

    The messages are booked beside the modelled links; ``others`` returns the planner's other inputs.
    """

    name = "probes"

    def __init__(
        self,
        rounds: int,
        clusters: Clusters,
        links: tuple[str, str],
        others: Callable[[Federation], Mapping[str, float]],
    ) -> None:
        self.rounds, self._clusters, self._others = rounds, clusters, others
        self._links = f"{links[0]} probe", f"{links[1]} probe"
        self.forget()

    @property
    def with_buffer(self) -> bool:
        """False: it asks all nodes before a round."""
        return False

    def forget(self) -> None:
        """Forget all reports."""
        self._before, self._shown = 0, dict[str, float]()

    def opened(self, run: RoundContext) -> Steps[None]:
        """Ask the clients for their reports, once per round."""
        if self._before < run.round <= self.rounds:
            self._before = run.round
            self._shown = yield from self._probed(run)

    def ended(self, run: RoundContext) -> None:
        """Report the estimates made before the round."""
        if self._before == run.round:
            run.metrics.update(self._shown)

    def _probed(self, run: RoundContext) -> Steps[dict[str, float]]:
        assert run.model is not None
        federation, u = run.federation, run.model()
        there = self._clusters.among(i for i in run.online if i < len(self._clusters.of))
        asks = [Ask(clients, u, pool=d, bits=0) for d, clients in self._clusters.members(there).items()]
        config = {**run.config, "server-round": run.round}
        reads = partial(_read, federation)
        exchange = Exchange(GRADIENT, asks, config, self._links, reads=reads, group=GRADIENT, over_grid=True)
        sizes = federation.limits.weights(len(self._clusters.of))
        answers: list[tuple[float, ProbeAnswer]] = []
        for columns in (yield exchange):
            answers += [(float(sizes[i]), row) for i, row in zip(columns.nodes, columns.rows, strict=True)]
        lost: dict[str, float] = {"probe-lost": len(there) - len(answers)}
        if not answers:
            log(WARNING, "No client told its gradient before round %d: nothing is estimated.", run.round)
            return lost
        shares = sizes / sizes.sum()
        return {**lost, **_shown(answers), "sum-m2": float(shares @ shares), **self._others(federation)}


def _read(federation: Federation, node: Node, content: RecordDict) -> Row:
    gradient = federation.known_layout().flatten(only_arrays(content), np.float64)
    metrics, estimates = checked_metrics(content, federation.settings.weighted_by_key), []
    for key in (CURVATURE, VARIANCE):
        value = metrics.get(key)
        if not (isinstance(value, int | float) and value >= 0):
            raise PayloadError("bad metrics", f"{key} must be a number >= 0, got {quoted(value)}")
        estimates.append(float(value))
    return Row(ProbeAnswer(gradient, *estimates), 0)


def _shown(answers: Sequence[tuple[float, ProbeAnswer]]) -> dict[str, float]:
    """Return estimates of the constants at u, by metric name, from (|S_i|, report) pairs."""
    weights = np.array([weight for weight, _ in answers])
    gradients = np.stack([one.gradient for _, one in answers])  # (clients, M)
    mean = (weights / weights.sum()) @ gradients
    apart = gradients - mean
    return {
        CURVATURE: max(one.curvature for _, one in answers),
        VARIANCE: max(one.variance for _, one in answers),
        "gradient-dissimilarity": float(np.einsum("ij,ij->i", apart, apart).max()),  # For kappa^2.
        "gradient2": float(mean @ mean),  # (15) bounds its mean over rounds.
        "probed-clients": len(answers),
    }
