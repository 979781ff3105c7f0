"""Who communicates when: what nodes said of their next communication, and who was away, or began anew.

Nodes need each other only at the iterations at which one of them communicates, so that this book of
appointments is all that takes a run from one event to the next.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from logging import WARNING
from typing import Any

from flwr.app import Message
from flwr.common import log

from hedgerow.strategies.inbox import RAISED, Node, Roster

__all__ = ["Appointment", "Appointments"]


@dataclass
class Appointment:
    """When a node communicates next, how often, and whom it then wants to hear.

    Parameters
    ----------
    node_id : int
        The node that said so; another one under the same partition id knows nothing of it.
    kappa : int
        Iterations between its communications, >= 1.
    next : int
        The iteration of the next one, >= 0.
    want : list[int]
        Partition ids.
    """

    node_id: int
    kappa: int
    next: int
    want: list[int]

    def move_past(self, k: int) -> None:
        """Skip the communications up to iteration k, which were missed; whom it wants to hear stays."""
        if self.next <= k:
            self.next += ((k - self.next) // self.kappa + 1) * self.kappa


class Appointments:
    """The appointments of all nodes that have introduced themselves, and what became of earlier ones.

    Attributes
    ----------
    of : dict[int, Appointment]
        By partition id.
    iterations : int
        k + 1 after the event of iteration k.
    missed, restarted : int
        Communications that were missed, and nodes that began anew, since the start.
    """

    def __init__(self) -> None:
        self.of: dict[int, Appointment] = {}
        self.iterations = self.missed = self.restarted = 0
        self._communicated: set[int] = set()
        self._refusing: set[int] = set()

    def next_event(self) -> int:
        """Return the next iteration at which a node is due; some node must have introduced itself."""
        return min(appointment.next for appointment in self.of.values())

    def due(self, k: int) -> list[int]:
        """Return the partition ids of those that communicate at iteration k, ascending."""
        return [i for i, appointment in sorted(self.of.items()) if appointment.next == k]

    def ready(self, roster: Roster) -> list[Node]:
        """Return the nodes that are there, were told their settings, and still know them."""
        return [node for node in roster.nodes if node.node_id in roster.online and self._knows(node)]

    def strangers(self, roster: Roster) -> list[Node]:
        """Return the nodes that are there and must be told their settings."""
        return [node for node in roster.nodes if node.node_id in roster.online and not self._knows(node)]

    def all_communicated(self, num_nodes: int) -> bool:
        """Return whether each of the nodes has communicated, and not begun anew since."""
        return len(self._communicated) == num_nodes

    def noting_refusals(self, replies: Iterable[Message]) -> Iterator[Message]:
        """Yield the replies, and note who raised: a restarted node under its old id looks like any other."""
        for message in replies:
            if message.has_error() and message.error.code == RAISED:
                self._refusing.add(message.metadata.src_node_id)
            yield message

    def introduce(self, i: int, appointment: Appointment) -> bool:
        """Take a node's answer to a hello; return whether this node had not introduced itself before.

        A node that is behind has missed its communications so far. One that had communicated and is back at
        its first communication began anew.
        """
        before = self.of.get(i)
        self._refusing.discard(appointment.node_id)
        if i in self._communicated and appointment.next == appointment.kappa:
            log(WARNING, "Partition %d has lost its state: it starts from W^0.", i)
            self._communicated.discard(i)
            self.restarted += 1
        appointment.move_past(self.iterations - 1)
        self.of[i] = appointment
        return before is None or before.node_id != appointment.node_id

    def renew(self, i: int, following: tuple[int, list[int]]) -> None:
        """Take from a valid update when the node communicates next, and whom it then wants to hear."""
        self.of[i].next, self.of[i].want = following
        self._communicated.add(i)

    def end(self, k: int, deprived: Iterable[int]) -> None:
        """End the event of iteration k; who got no payload, or did not reply, has missed it."""
        for i, appointment in self.of.items():
            self.missed += appointment.next == k or i in deprived
            appointment.move_past(k)
        self.iterations = k + 1

    def state_dict(self) -> dict[str, Any]:
        """Return appointments and counts, for a checkpoint."""
        return {
            "appointments": {str(i): asdict(one) for i, one in sorted(self.of.items())},
            "communicated": sorted(self._communicated),
            "iterations": self.iterations,
            "missed": self.missed,
            "restarted": self.restarted,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        self.of = {int(i): Appointment(**one) for i, one in state["appointments"].items()}
        self.iterations = int(state["iterations"])
        self.missed = int(state["missed"])
        self.restarted = int(state["restarted"])
        self._communicated = set(state["communicated"])

    def _knows(self, node: Node) -> bool:
        appointment = self.of.get(node.partition_id)
        known = appointment is not None and appointment.node_id == node.node_id
        return known and node.node_id not in self._refusing
