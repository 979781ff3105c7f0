"""The exchanges that show a monitor all models of a simulated run; they do not count as traffic."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from logging import INFO, WARNING
from statistics import median
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.common import log

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Ask, Exchange, Steps
from hedgerow.strategies.federation import only_arrays
from hedgerow.strategies.gossip.monitor import DIVERGED, Monitor, Sight
from hedgerow.strategies.node import Node
from hedgerow.strategies.parts import Part
from hedgerow.strategies.round_end import DivergenceError
from hedgerow.strategies.whoami import RAISED
from hedgerow.wire.message_types import HELLO, MONITOR, NO_MESSAGE, NO_MONITOR
from hedgerow.wire.records import PayloadError, lazy_array, only_record, records_of, view


class Looks(Part):
    """Shows the monitor, if there is one, the models of each iteration once.

    ``refused`` is the number of nodes that refuse the monitor if they are the majority; no node is queried
    again then. ``left_out`` counts models out of bounds since the last report. ``answered`` is True if any
    node may have disclosed its model, that is, did not raise an error.
    """

    name = "looks"

    def __init__(self, monitor: Monitor | None, dim: int) -> None:
        self.monitor, self.dim = monitor, dim
        self.forget()

    def forget(self) -> None:
        """Reset the state, and the monitor's."""
        self.refused = self.left_out = 0
        self.answered = False
        self._looked = -1
        if self.monitor is not None:
            self.monitor.reset()

    @property
    def stopped(self) -> bool:
        """Whether the stopping rule is met."""
        return self.monitor is not None and self.monitor.stopped_at is not None

    def ask(self, exchange: Exchange, run: RoundContext) -> Exchange:
        """Add to the nodes' settings that there is a monitor."""
        if exchange.kind != HELLO or self.monitor is None:
            return exchange
        return replace(exchange, config={**exchange.config, "monitor": True})

    def until(
        self,
        last: int | None,
        nodes: Sequence[int],
        run: RoundContext,
        *,
        may_stop: bool,
        ended: int | None = None,
    ) -> Steps[None]:
        """Look at the iterations that were not seen yet, up to ``last``, the next event; None for none.

        ``ended`` is the first iteration after the event of the round's record, if that event has ended.
        """
        if self.monitor is None or last is None or self.refused:
            return
        if ended is not None:
            self.monitor.after_event = None
        for iteration in range(self._looked + 1, last + 1):
            self._looked = iteration
            seen = yield from self._sights(iteration, nodes, run)
            reasons = [error.reason or "" for error in run.report.errors.values()]
            refusing = sum(NO_MONITOR in reason or NO_MESSAGE in reason for reason in reasons)
            if 2 * refusing > len(nodes):
                self.refused = refusing
                refusals = f"{refusing} of {len(nodes)} nodes refuse the monitor"
                log(WARNING, "%s: it does not look at the models in this run.", refusals)
                return
            if not seen:
                continue
            sights = self.monitor.believed(seen)
            if left_out := sorted(seen.keys() - sights.keys()):
                self.left_out += len(left_out)
                log(WARNING, "Iteration %d: the models of %s are out of bounds.", iteration, left_out)
            at_mean = sights
            if self.monitor.measures_loss:
                mean = ArrayRecord({"mean": lazy_array(self.monitor.mean(sights))})
                at_mean = yield from self._sights(iteration, nodes, run, {"arrays": mean})
                at_mean = {i: one for i, one in at_mean.items() if i in sights}
            look = self.monitor.look(iteration, sights, at_mean, may_stop=may_stop)
            if iteration == ended and self.monitor.models is not None:
                self.monitor.after_event = look, self.monitor.models
            if self.stopped:
                log(INFO, "The stopping rule is met at iteration %d.", iteration)
                return

    def _sights(
        self,
        iteration: int,
        nodes: Sequence[int],
        run: RoundContext,
        records: Mapping[str, ArrayRecord] | None = None,
    ) -> Steps[dict[int, Sight]]:
        """Query the nodes' models, and with the mean in ``records`` their objectives at the mean."""
        ask = Ask(nodes, None, {"iteration": iteration}, records=records or {})
        sights: dict[int, Sight] = {}
        reads = partial(seen, n=self.dim)
        for columns in (yield Exchange(MONITOR, [ask], reads=reads, group="look", booked=False)):
            sights.update(zip(columns.nodes, columns.rows, strict=True))
        # A lost reply may have disclosed the model, too.
        self.answered |= sum(error.code == RAISED for error in run.report.errors.values()) < len(nodes)
        return sights

    def metrics(self, iteration: int) -> MetricRecord | None:
        """Return the metrics of an iteration, with ``left-out`` if it is not 0; None if it was not seen."""
        history = [] if self.monitor is None else self.monitor.history
        found = next((look.metrics() for look in reversed(history) if look.iteration == iteration), None)
        if found is not None and self.left_out:
            found["left-out"], self.left_out = self.left_out, 0
        return found

    def ended(self, run: RoundContext) -> None:
        """Report the number of refusals; DivergenceError if the nodes' reported disagreement is too large."""
        records = [only_record(content, MetricRecord, "bad metrics") for content in run.contents]
        reported = [value for one in records if isinstance(value := one.get("disagreement"), float)]
        # The median: a single Byzantine node must not end the run.
        if reported and median(reported) > DIVERGED:
            raise DivergenceError(f"The nodes' local disagreement exceeds {DIVERGED:g}: the run diverges.")
        if self.refused:
            run.metrics["monitor-refused"] = self.refused

    def state_dict(self) -> dict[str, Any]:
        """Return the last seen iteration, and the monitor's own state."""
        own = None if self.monitor is None else self.monitor.state_dict()
        return {"looked": self._looked, "monitor": own, "answered": self.answered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        self._looked, self.answered = int(state["looked"]), bool(state["answered"])
        if self.monitor is not None and state["monitor"] is not None:
            self.monitor.load_state_dict(state["monitor"])


def seen(node: Node, content: RecordDict, n: int) -> Sight:
    """Return a node's model (n,) and objectives; the monitor handles values that are not finite."""
    arrays = only_arrays(content)
    if len(arrays) != 1:
        raise PayloadError("bad arrays", f"{len(arrays)} arrays, expected the model alone")
    model = view(next(iter(arrays.values())))
    if model.shape != (n,):
        raise PayloadError("wrong shape", f"the model has {model.shape}, expected ({n},)")
    metrics = next(iter(records_of(content, MetricRecord).values()), MetricRecord())
    objective, at_mean = (metrics.get(key) for key in ("objective", "mean-objective"))
    return Sight(
        model.astype(np.float64),
        float(objective) if isinstance(objective, int | float) else math.nan,
        float(at_mean) if isinstance(at_mean, int | float) else math.nan,
    )
