"""The possible disclosure of nodes' data by a run's messages: noisy gradients, and paths without noise.

All requested releases count, answered or not, and those of the nodes' own ledgers if they keep any. The
server cannot know more: it learns of a node's lost state only from its next answer, and a resumed run does
not know the requests after its checkpoint.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flwr.app import RecordDict

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Exchange, Steps
from hedgerow.strategies.gossip.monitor import Looks
from hedgerow.strategies.gossip.state import Appointment
from hedgerow.strategies.inbox import Reply
from hedgerow.strategies.parts import Part
from hedgerow.strategies.parts.privacy import LOST_ROUNDS, MONITOR, NodeNoise, PrivacyReport
from hedgerow.wire.message_types import HELLO, UPDATE
from hedgerow.wire.records import config_in

_RELEASES = "releases"
# Largest valid count: a release per millisecond for almost a month.
_MOST_TOLD = 2**31 - 1


@dataclass(frozen=True)
class NoisyReleases:
    """The noise on a method's gradients, and how many of them a node releases.

    Parameters
    ----------
    noise : NodeNoise
        The noise and its accounting.
    count : Callable[[int, int, int], int]
        Returns a node's releases at most, given how often it started from W^0, the number of updates that it
        was sent, and of its iterations, including those before a restart.
    """

    noise: NodeNoise
    count: Callable[[int, int, int], int]


@dataclass
class Requested:
    """The requests to one node."""

    # How often it may have started from W^0, and its possible iterations before the last start.
    begun: int = 0
    updates: int = 0
    earlier: int = 0
    # Releases in its own ledger, at least those of this run; 0 if it reports none. And whether the ledger
    # also covers the runs that this one resumes.
    told: int = 0
    covered: bool = False


class Exposure(Part):
    """The requests to the nodes of a run, by partition id, and the releases that they report."""

    name = "exposure"

    def __init__(self, privacy: NoisyReleases, num_nodes: int, looks: Looks | None) -> None:
        self.noise, self.count, self.num_nodes, self.looks = privacy.noise, privacy.count, num_nodes, looks
        self.forget()

    def forget(self) -> None:
        """Reset the counts."""
        self.of: dict[int, Requested] = {}
        self.iterations = 0
        # Whether a node may have answered a monitor in the runs that this one resumes.
        self._monitored = False
        self._resumed = False
        # Ids of the run, the current one last; a resumed run of Flower's engines has a new one.
        self._runs: list[str] = []

    def opened(self, run: RoundContext) -> Steps[None]:
        """Record the current run's id."""
        if str(run.id) in self._runs:
            self._runs.remove(str(run.id))
        self._runs.append(str(run.id))
        yield from ()

    def ask(self, exchange: Exchange, run: RoundContext) -> Exchange:
        """Count settings, after which a node may restart, and updates."""
        for i in exchange.asked:
            if exchange.kind == HELLO:
                self.greet(i)
            elif exchange.kind == UPDATE:
                self.of.setdefault(i, Requested()).updates += 1
        return exchange

    def greet(self, i: int) -> None:
        """Count a node that is sent its settings: it may start from W^0."""
        asked = self.of.setdefault(i, Requested())
        asked.earlier += self.iterations if asked.begun else 0
        asked.begun += 1

    def take(self, exchange: Exchange, reply: Reply, run: RoundContext) -> None:
        """Take the releases that a node reports."""
        if exchange.kind == HELLO:
            self.keep(reply.node.partition_id, reply.value.row)
            self.tell(reply.node.partition_id, reply.content, "hello")
        elif exchange.kind == UPDATE:
            self.tell(reply.node.partition_id, reply.content, "next")

    def keep(self, i: int, appointment: Appointment) -> None:
        """Undo ``greet`` if the node's answer shows that it is past its first communication."""
        asked = self.of[i]
        if appointment.next > appointment.kappa and asked.begun > 1:
            asked.begun -= 1
            asked.earlier -= self.iterations

    def tell(self, i: int, content: RecordDict, key: str) -> None:
        """Take the releases in the node's ledger from a valid reply; ignore invalid values."""
        value = config_in(content, key).get(_RELEASES)
        numbers = [one for one in value if isinstance(one, int)] if isinstance(value, list) else []
        if len(numbers) != 2 or not 0 <= numbers[0] <= _MOST_TOLD:
            return
        made, earlier_runs = numbers
        asked = self.of.setdefault(i, Requested())
        asked.told = max(asked.told, made)
        asked.covered = earlier_runs >= len(self._runs) - 1

    def ended(self, run: RoundContext) -> None:
        """Report the privacy of the node with the most releases."""
        self.iterations = int(run.metrics["iteration"]) + 1
        run.metrics |= self.noise.metrics(self.most(), self._unprotected())

    def report(self, delta: float | None) -> PrivacyReport:
        """Account for the node with the most releases so far, see ``Gossip.privacy_report``."""
        count, unprotected = self.most(), self._unprotected()
        return self.noise.report(count, delta, numerical=True, unprotected=unprotected)

    def most(self) -> int:
        """Return the largest number of releases of any node so far; at least one."""
        counts = [
            max(asked.told, self.count(asked.begun, asked.updates, asked.earlier + self.iterations))
            for asked in self.of.values()
        ]
        return max(1, *counts) if counts else 1

    @property
    def monitored(self) -> bool:
        """Whether a node may have answered a monitor, in this run or those that it resumes."""
        return self._monitored or (self.looks is not None and self.looks.answered)

    def _unprotected(self) -> list[str]:
        """Return the paths on which this run discloses data without noise, or without being counted."""
        paths = [MONITOR] if self.monitored else []
        # In a resumed run, not every node's ledger may cover the releases before.
        lost = self._resumed and sum(asked.covered for asked in self.of.values()) < self.num_nodes
        # Seeded noise is the same in repeated rounds.
        return [*paths, LOST_ROUNDS] if lost and self.noise.noise_source != "seed" else paths

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, for a checkpoint."""
        nodes = {str(i): asdict(one) for i, one in sorted(self.of.items())}
        counts = {"nodes": nodes, "runs": self._runs, "iterations": self.iterations}
        return {**counts, "monitored": self.monitored}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts of a checkpoint; requests after it are unknown."""
        self.of = {int(i): Requested(**{**one, "covered": False}) for i, one in state["nodes"].items()}
        self._runs = [str(run) for run in state["runs"]]
        self.iterations, self._monitored = int(state["iterations"]), bool(state.get("monitored", False))
        self._resumed = True
