"""Byzantine-robust rules in place of the mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from logging import WARNING

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from hedgerow.strategies.aggregate.mean import Mean, ServerUpdate
from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Exchange, Steps
from hedgerow.wire.robust_means import Aggregation


@dataclass(frozen=True)
class Robust:
    """A rule over the replies' updates, each of weight 1, whatever size its node claims.

    Parameters
    ----------
    rule : Aggregation
        From ``parse_aggregation``, or any object with ``least``, ``for_count`` and ``combined``.
    """

    rule: Aggregation
    # The rule's guarantee counts nodes, so a node has at most one update in a buffer.
    each_once = True

    def means(self, exchange: Exchange, run: RoundContext) -> Steps[Mapping[int, Mean]]:
        """Return the rule's aggregate of each pool's updates; of too few of them the median, counted."""
        found: dict[int, tuple[list[int], list[NDArray[np.float64]]]] = {}
        for columns in (yield exchange):
            for node, pool, row in zip(columns.nodes, columns.pools, columns.rows, strict=True):
                start = 0.0 if exchange.coding.changes else exchange.sent(pool).astype(np.float64)
                nodes, updates = found.setdefault(pool, ([], []))
                nodes.append(node)
                updates.append(row - start)
        means = {}
        for pool, (nodes, updates) in sorted(found.items()):
            weights = np.ones(len(nodes))
            stacked = np.stack(updates).astype(np.float64)
            move = self._for_count(len(nodes), run).combined(stacked, weights)
            means[pool] = ServerUpdate(nodes, float(len(nodes)), exchange.sent(pool), move)
        return means

    def _for_count(self, updates: int, run: RoundContext) -> Aggregation:
        """Return the rule; the coordinate-wise median, counted and logged, if it needs more updates."""
        taken = self.rule.for_count(updates)
        if taken is not self.rule:
            run.federation.limits.fell_back += 1
            log(
                WARNING,
                "%d updates are left for %s, which needs %d: the coordinate-wise median is used.",
                updates,
                self.rule,
                self.rule.least,
            )
        return taken
