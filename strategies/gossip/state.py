"""Who communicates when: what nodes said of their next communication, and who was away, or began anew.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", Algorithm 1: node i
communicates at the iterations kappa_i, 2 kappa_i, … Nodes need each other at those alone, so that this book
of appointments is all that takes a run from one event to the next: models stay on the nodes.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from logging import WARNING
from typing import Any, Self

from flwr.app import Error, RecordDict
from flwr.common import log

from hedgerow.strategies.inbox import RAISED, Node
from hedgerow.wire.records import PayloadError, config_in

__all__ = ["Appointment", "State", "introduced", "next_communication"]


@dataclass(frozen=True)
class Appointment:
    """When a node communicates next, how often, and whom it then wants to hear.

    Another node under the same partition id (``node_id``) knows nothing of it.
    """

    node_id: int
    kappa: int
    next: int
    want: list[int]

    def past(self, k: int) -> Self:
        """Return the first one after iteration k; those up to it were missed, whom it wants to hear stays."""
        if self.next > k:
            return self
        return replace(self, next=self.next + ((k - self.next) // self.kappa + 1) * self.kappa)


@dataclass(frozen=True)
class State:
    """The appointments of all nodes that have introduced themselves, and what became of earlier ones."""

    appointments: Mapping[int, Appointment] = field(default_factory=dict)
    # k + 1 after the event of iteration k.
    iterations: int = 0
    # Who has communicated, and not begun anew since; whose ClientApp refused an update, and may have lost its
    # state.
    communicated: frozenset[int] = frozenset()
    refusing: frozenset[int] = frozenset()
    # Communications that were missed, and nodes that began anew, since the start.
    missed: int = 0
    restarted: int = 0
    # Events in a row that were lost.
    lost: int = 0

    @property
    def next_event(self) -> int:
        """The next iteration at which a node is due; some node must have introduced itself."""
        return min(one.next for one in self.appointments.values())

    def due(self, k: int) -> list[int]:
        """Return the partition ids of those that communicate at iteration k, ascending."""
        return [i for i, one in sorted(self.appointments.items()) if one.next == k]

    def knows(self, node: Node) -> bool:
        """Return whether a node was told its settings, and still knows them."""
        i = node.partition_id
        one = self.appointments.get(i)
        return one is not None and one.node_id == node.node_id and i not in self.refusing

    def introduced(self, answers: Mapping[int, Appointment]) -> Self:
        """Return the state after nodes' answers to a hello.

        A node that is behind has missed its communications so far. One that had communicated and is back at
        its first communication began anew.
        """
        anew = {i for i in self.communicated & answers.keys() if answers[i].next == answers[i].kappa}
        for i in sorted(anew):
            log(WARNING, "Partition %d has lost its state: it starts from W^0.", i)
        new = {i: one.past(self.iterations - 1) for i, one in answers.items()}
        return replace(
            self,
            appointments={**self.appointments, **new},
            communicated=self.communicated - anew,
            refusing=self.refusing - answers.keys(),
            restarted=self.restarted + len(anew),
        )

    def after(
        self,
        k: int,
        told: Mapping[int, tuple[int, list[int]]],
        deprived: Collection[int],
        errors: Mapping[int, Error],
        lost: int,
    ) -> Self:
        """Return the state after the event of iteration k.

        ``told`` has when nodes with valid updates communicate next, and whom they then want to hear. Who is
        ``deprived``, of any payload, has missed the event, as who did not reply has. A node whose ClientApp
        raised (``errors``) may have lost its state. ``lost`` are the events in a row that were lost.
        """
        missed = {i for i in self.due(k) if i not in told}.union(deprived)
        renewed = {i: replace(self.appointments[i], next=at, want=want) for i, (at, want) in told.items()}
        return replace(
            self,
            appointments={i: one.past(k) for i, one in {**self.appointments, **renewed}.items()},
            iterations=k + 1,
            communicated=self.communicated | told.keys(),
            refusing=self.refusing.union(i for i, error in errors.items() if error.code == RAISED),
            missed=self.missed + len(missed),
            lost=lost,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, for a checkpoint."""
        one = asdict(self)
        one["appointments"] = {str(i): told for i, told in sorted(one["appointments"].items())}
        return {**one, "communicated": sorted(self.communicated), "refusing": sorted(self.refusing)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """Return the state of a checkpoint."""
        known = {int(i): Appointment(**told) for i, told in saved["appointments"].items()}
        told, refusing = frozenset(saved["communicated"]), frozenset(saved["refusing"])
        return cls(**{**saved, "appointments": known, "communicated": told, "refusing": refusing})


def introduced(node: Node, content: RecordDict) -> Appointment:
    """Return a node's answer to a hello; PayloadError with reason ``bad hello`` or ``bad next``."""
    kappa = config_in(content, "hello").get("kappa")
    if not isinstance(kappa, int) or kappa < 1:
        raise PayloadError("bad hello", f"kappa={kappa!r}, expected an integer >= 1")
    return Appointment(node.node_id, kappa, *next_communication(content, "hello", after=-1))


def next_communication(content: RecordDict, key: str, after: int) -> tuple[int, list[int]]:
    """Return the iteration, after ``after``, and the neighbours of a node's next communication.

    PayloadError with reason ``bad next`` if there is none.
    """
    record = config_in(content, key)
    k, want = record.get("next"), record.get("want", [])
    if not isinstance(k, int) or k <= after:
        raise PayloadError("bad next", f"next={k!r}, expected an iteration after {after}")
    if not isinstance(want, list):
        raise PayloadError("bad next", f"want={want!r}, expected a list of partition ids")
    return k, [j for j in want if isinstance(j, int)]
