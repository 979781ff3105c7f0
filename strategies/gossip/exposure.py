"""How much of the nodes' data the messages of a run may have told: noisy gradients, and paths without noise.

What counts is what nodes were asked for, whether an answer came or not, and what their own ledgers say where
they keep any. A server cannot know more: a node that lost its state says so only when it is next asked, and
a run that goes on from a checkpoint does not know what was asked after it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flwr.app import RecordDict

from hedgerow.strategies.gossip.appointments import Appointment
from hedgerow.strategies.gossip.method import GossipMethod
from hedgerow.wire.records import config_in

__all__ = ["Asked", "Exposure"]

_RELEASES = "releases"
# More is no node's count: a release a millisecond for a month.
_MOST_TOLD = 2**31 - 1


@dataclass
class Asked:
    """What one node was asked for.

    Parameters
    ----------
    begun : int
        How often it may have begun at W^0.
    updates : int
        Updates that were sent to it.
    earlier : int
        Iterations that it may have made before it began for the last time.
    told : int
        Releases by its own ledger, at least those of this run; 0 where it tells none.
    covered : bool
        Whether that is all of them, of the runs too that this one goes back to.
    """

    begun: int = 0
    updates: int = 0
    earlier: int = 0
    told: int = 0
    covered: bool = False


class Exposure:
    """What the nodes of one run were asked for, and what they say that they released.

    Attributes
    ----------
    of : dict[int, Asked]
        By partition id.
    """

    def __init__(self) -> None:
        self.of: dict[int, Asked] = {}
        self._resumed = False
        # Ids of the run, the one at hand the last; a resumed run of Flower's engines has a new one.
        self._runs: list[str] = []

    def begin(self, run: int) -> None:
        """Take the id of the run at hand."""
        if str(run) in self._runs:
            self._runs.remove(str(run))
        self._runs.append(str(run))

    def greet(self, i: int, iterations: int) -> None:
        """Count a node that is told its settings after so many iterations: it may begin anew."""
        asked = self.of.setdefault(i, Asked())
        asked.earlier += iterations if asked.begun else 0
        asked.begun += 1

    def keep(self, i: int, iterations: int, appointment: Appointment) -> None:
        """Take back what ``greet`` counted where the node, by its answer, is past its first communication."""
        asked = self.of[i]
        if appointment.next > appointment.kappa and asked.begun > 1:
            asked.begun -= 1
            asked.earlier -= iterations

    def update(self, i: int) -> None:
        """Count an update that is sent."""
        self.of.setdefault(i, Asked()).updates += 1

    def tell(self, i: int, content: RecordDict, key: str) -> None:
        """Take from a valid reply what the node's ledger has; anything else there is none."""
        told = config_in(content, key).get(_RELEASES)
        numbers = [one for one in told if isinstance(one, int)] if isinstance(told, list) else []
        if len(numbers) != 2 or not 0 <= numbers[0] <= _MOST_TOLD:
            return
        made, earlier_runs = numbers
        asked = self.of.setdefault(i, Asked())
        asked.told = max(asked.told, made)
        asked.covered = earlier_runs >= len(self._runs) - 1

    def most(self, method: GossipMethod, iterations: int) -> int:
        """Return the most releases of any node after so many iterations; at least one."""
        counts = [
            max(asked.told, method.releases(asked.begun, asked.updates, asked.earlier + iterations))
            for asked in self.of.values()
        ]
        return max(1, *counts) if counts else 1

    def lost_rounds(self, num_nodes: int) -> bool:
        """Return whether the run was resumed, and not every node's ledger has what came before."""
        covered = sum(asked.covered for asked in self.of.values())
        return self._resumed and covered < num_nodes

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, for a checkpoint."""
        return {"nodes": {str(i): asdict(one) for i, one in sorted(self.of.items())}, "runs": self._runs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts of a checkpoint: what nodes were asked for after it is lost."""
        self.of = {int(i): Asked(**{**one, "covered": False}) for i, one in state["nodes"].items()}
        self._runs = [str(run) for run in state["runs"]]
        self._resumed = True

    @staticmethod
    def unknown() -> dict[str, Any]:
        """Return the state of a checkpoint that has none: of the run before nobody knows what it asked."""
        return {"nodes": {}, "runs": [""]}
