"""How much of the nodes' data the messages of a run may have told: noisy gradients, and paths without noise.

What counts is what nodes were asked for, whether an answer came or not, and what their own ledgers say where
they keep any. A server cannot know more: a node that lost its state says so only when it is next asked, and
a run that goes on from a checkpoint does not know what was asked after it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flwr.app import RecordDict

from hedgerow.strategies.exchange import Exchange, Steps
from hedgerow.strategies.gossip.looks import Looks
from hedgerow.strategies.gossip.method import GossipMethod
from hedgerow.strategies.gossip.state import Appointment
from hedgerow.strategies.inbox import Reply
from hedgerow.strategies.parts import Part
from hedgerow.strategies.parts.privacy import LOST_ROUNDS, MONITOR, PrivacyReport
from hedgerow.strategies.run import Run
from hedgerow.wire.message_types import HELLO, UPDATE
from hedgerow.wire.records import config_in

__all__ = ["Exposure", "Requested"]

_RELEASES = "releases"
# More is no node's count: a release a millisecond for a month.
_MOST_TOLD = 2**31 - 1


@dataclass
class Requested:
    """What one node was asked for."""

    # How often it may have begun at W^0, and the iterations that it may have made before the last time.
    begun: int = 0
    updates: int = 0
    earlier: int = 0
    # Releases by its own ledger, at least those of this run; 0 where it tells none. And whether that is all
    # of them, of the runs too that this one goes back to.
    told: int = 0
    covered: bool = False


class Exposure(Part):
    """What the nodes of one run were asked for, by partition id, and what they say that they released."""

    name = "exposure"

    def __init__(self, method: GossipMethod, looks: Looks) -> None:
        self.method, self.looks = method, looks
        self.forget()

    def forget(self) -> None:
        """Have asked for nothing."""
        self.of: dict[int, Requested] = {}
        self.iterations = 0
        self._resumed = False
        # Ids of the run, the one at hand the last; a resumed run of Flower's engines has a new one.
        self._runs: list[str] = []

    def opened(self, run: Run) -> Steps[None]:
        """Take the id of the run at hand."""
        if str(run.id) in self._runs:
            self._runs.remove(str(run.id))
        self._runs.append(str(run.id))
        yield from ()

    def ask(self, exchange: Exchange, run: Run) -> Exchange:
        """Count who is told its settings, and may begin anew, and who is sent an update."""
        for i in exchange.asked:
            if exchange.kind == HELLO:
                self.greet(i)
            elif exchange.kind == UPDATE:
                self.of.setdefault(i, Requested()).updates += 1
        return exchange

    def greet(self, i: int) -> None:
        """Count a node that is told its settings: it may begin anew."""
        asked = self.of.setdefault(i, Requested())
        asked.earlier += self.iterations if asked.begun else 0
        asked.begun += 1

    def take(self, exchange: Exchange, reply: Reply, run: Run) -> None:
        """Take what nodes say of themselves."""
        if exchange.kind == HELLO:
            self.keep(reply.node.partition_id, reply.value.row)
            self.tell(reply.node.partition_id, reply.content, "hello")
        elif exchange.kind == UPDATE:
            self.tell(reply.node.partition_id, reply.content, "next")

    def keep(self, i: int, appointment: Appointment) -> None:
        """Take back what ``greet`` counted where the node, by its answer, is past its first communication."""
        asked = self.of[i]
        if appointment.next > appointment.kappa and asked.begun > 1:
            asked.begun -= 1
            asked.earlier -= self.iterations

    def tell(self, i: int, content: RecordDict, key: str) -> None:
        """Take from a valid reply what the node's ledger has; anything else there is none."""
        told = config_in(content, key).get(_RELEASES)
        numbers = [one for one in told if isinstance(one, int)] if isinstance(told, list) else []
        if len(numbers) != 2 or not 0 <= numbers[0] <= _MOST_TOLD:
            return
        made, earlier_runs = numbers
        asked = self.of.setdefault(i, Requested())
        asked.told = max(asked.told, made)
        asked.covered = earlier_runs >= len(self._runs) - 1

    def ended(self, run: Run) -> None:
        """Tell the privacy of the node that released most."""
        self.iterations = int(run.told["iteration"]) + 1
        run.told |= self.method.privacy.metrics(self.most(), self._unprotected())

    def report(self, delta: float | None) -> PrivacyReport:
        """Account for the node that released most so far, at a total delta (None: that of one release)."""
        count, unprotected = self.most(), self._unprotected()
        return self.method.privacy.report(count, delta, numerical=True, unprotected=unprotected)

    def most(self) -> int:
        """Return the most releases of any node so far; at least one."""
        counts = [
            max(asked.told, self.method.releases(asked.begun, asked.updates, asked.earlier + self.iterations))
            for asked in self.of.values()
        ]
        return max(1, *counts) if counts else 1

    def _unprotected(self) -> list[str]:
        """Return the paths by which this run tells what no noise covers, or nobody counts."""
        paths = [MONITOR] if self.looks.answered else []
        # Of a run that was resumed not every node's ledger has what came before.
        lost = self._resumed and sum(asked.covered for asked in self.of.values()) < self.method.num_nodes
        # Noise of a seed comes out the same again.
        return [*paths, LOST_ROUNDS] if lost and self.method.privacy.noise_source != "seed" else paths

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, for a checkpoint."""
        nodes = {str(i): asdict(one) for i, one in sorted(self.of.items())}
        return {"nodes": nodes, "runs": self._runs, "iterations": self.iterations}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts of a checkpoint: what nodes were asked for after it is lost."""
        self.of = {int(i): Requested(**{**one, "covered": False}) for i, one in state["nodes"].items()}
        self._runs = [str(run) for run in state["runs"]]
        self.iterations = int(state["iterations"])
        self._resumed = True
