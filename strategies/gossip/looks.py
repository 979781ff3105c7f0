"""How a monitor gets to see all models of a simulated run: an exchange for each iteration, booked nowhere."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from logging import INFO, WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from hedgerow.strategies.federation import Federation
from hedgerow.strategies.gossip.monitor import Monitor, Sight
from hedgerow.strategies.gossip.replies import seen
from hedgerow.strategies.inbox import RAISED, Inbox, Node, collect
from hedgerow.wire.message_types import MONITOR, NO_MESSAGE, NO_MONITOR
from hedgerow.wire.records import lazy_array

__all__ = ["Looks"]


class Looks:
    """The looks of one run, each iteration once; without a monitor there are none.

    Parameters
    ----------
    monitor : Monitor or None
        Who looks.
    federation : Federation
        Deadline and keys of records.
    dim : int
        Model dimension n.

    Attributes
    ----------
    refused : int
        Nodes that answer no monitor, where they are most of those that were asked: nobody is asked again.
    answered : bool
        Whether any node may have told what it was asked: one did not refuse, nor fail.
    """

    def __init__(self, monitor: Monitor | None, federation: Federation, dim: int) -> None:
        self.monitor = monitor
        self.federation = federation
        self.dim = dim
        self.refused = 0
        self.answered = False
        self._refusing: set[int] = set()
        self._failing: set[int] = set()
        self._looked = -1
        if monitor is not None:
            monitor.reset()

    @property
    def stopped(self) -> bool:
        """Whether the stopping rule is met."""
        return self.monitor is not None and self.monitor.stopped_at is not None

    def until(
        self,
        last: int | None,
        grid: Grid,
        server_round: int,
        nodes: Sequence[Node],
        *,
        may_stop: bool,
        ended: int | None = None,
    ) -> None:
        """Look at the iterations not seen yet, up to one at which nobody has communicated; None for none.

        ``ended`` is the first iteration after the event that the round's record is of, if that has ended.
        """
        if self.monitor is None or last is None or self.refused:
            return
        if ended is not None:
            self.monitor.after_event = None
        for iteration in range(self._looked + 1, last + 1):
            self._looked = iteration
            seen = self._ask(grid, server_round, nodes, iteration)
            if 2 * len(self._refusing) > len(nodes):
                self.refused = len(self._refusing)
                log(
                    WARNING,
                    "%d of %d nodes answer no monitor: nobody looks at the models in this run.",
                    self.refused,
                    len(nodes),
                )
                return
            if not seen:
                continue
            sights = self.monitor.believed(seen)
            if left_out := sorted(seen.keys() - sights.keys()):
                log(
                    WARNING,
                    "Iteration %d: no look at %s, whose models are out of bounds.",
                    iteration,
                    left_out,
                )
            told = sights
            if self.monitor.measures_loss:
                mean = ArrayRecord({"mean": lazy_array(self.monitor.mean(sights))})
                told = self._ask(grid, server_round, nodes, iteration, mean)
                told = {i: one for i, one in told.items() if i in sights}
            look = self.monitor.look(iteration, sights, told, may_stop=may_stop)
            if iteration == ended and self.monitor.models is not None:
                self.monitor.after_event = look, self.monitor.models
            if self.stopped:
                log(INFO, "The stopping rule is met at iteration %d.", iteration)
                return

    def metrics(self, iteration: int) -> MetricRecord | None:
        """Return what was seen at an iteration; None if nobody looked."""
        history = [] if self.monitor is None else self.monitor.history
        return next((look.metrics() for look in reversed(history) if look.iteration == iteration), None)

    def state_dict(self) -> dict[str, Any]:
        """Return where the looks are, and the monitor's own state."""
        own = None if self.monitor is None else self.monitor.state_dict()
        return {"looked": self._looked, "monitor": own, "answered": self.answered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        self._looked = int(state["looked"])
        # A checkpoint of an earlier version does not say.
        self.answered = bool(state.get("answered", self._looked >= 0))
        if self.monitor is not None and state["monitor"] is not None:
            self.monitor.load_state_dict(state["monitor"])

    def _ask(
        self,
        grid: Grid,
        server_round: int,
        nodes: Sequence[Node],
        iteration: int,
        mean: ArrayRecord | None = None,
    ) -> dict[int, Sight]:
        """Return what the monitor sees of each node that answers; with the mean, what they tell of that."""
        group, timeout = f"{server_round}-look", self.federation.timeout
        config = ConfigRecord({"iteration": iteration})
        content = RecordDict({self.federation.settings.configrecord_key: config})
        if mean is not None:
            content["arrays"] = mean
        messages = [Message(content, node.node_id, MONITOR, ttl=timeout, group_id=group) for node in nodes]
        exchange = Inbox(nodes, group, lambda _, reply: seen(reply, self.dim))
        self._refusing.clear()
        self._failing.clear()
        replies = exchange.accept(self._noting_refusals(collect(grid, messages, timeout)))
        sights = {reply.node.partition_id: reply.value for reply in replies}
        # A reply that did not come may have been made.
        self.answered |= len(self._failing) < len(nodes)
        return sights

    def _noting_refusals(self, replies: Iterable[Message]) -> Iterator[Message]:
        """Yield the replies, and note whose nodes' owners want no monitor, and who raised."""
        for message in replies:
            if message.has_error() and message.error.code == RAISED:
                self._failing.add(message.metadata.src_node_id)
            reason = (message.error.reason or "") if message.has_error() else ""
            if NO_MONITOR in reason or NO_MESSAGE in reason:
                self._refusing.add(message.metadata.src_node_id)
            yield message
