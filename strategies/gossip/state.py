"""The server's state of a gossip run: the nodes' next communications, missed ones, and restarts.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", Algorithm 1: node i
communicates at the iterations kappa_i, 2 kappa_i, … Nodes need each other only then, so these appointments
are all the state between two events: models stay on the nodes.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from logging import WARNING
from statistics import median_low
from typing import Any, Self

from flwr.app import Error, MetricRecord, RecordDict
from flwr.common import log

from hedgerow.strategies.gossip.method import GossipMethod, Scalar
from hedgerow.strategies.node import Node
from hedgerow.strategies.whoami import RAISED
from hedgerow.wire.records import PayloadError, config_in

# Fewest reports for a median that a single false one cannot move.
_LEAST = 3


@dataclass(frozen=True)
class Appointment:
    """A node's next communication, its period, and the neighbours that it then wants payloads from.

    It is valid only for this ``node_id``, not for another node with the same partition id.
    """

    node_id: int
    kappa: int
    next: int
    want: list[int]

    def past(self, k: int) -> Self:
        """Return the first one after iteration k, with the same neighbours; those up to k were missed."""
        if self.next > k:
            return self
        return replace(self, next=self.next + ((k - self.next) // self.kappa + 1) * self.kappa)

    def check(self, settings: Mapping[str, Scalar]) -> None:
        """Raise PayloadError unless the period is one of the node's settings, and k a multiple of it."""
        steps = settings.get("local-steps", self.kappa)
        low, high = settings.get("kappa-low", steps), settings.get("kappa-high", steps)
        if not low <= self.kappa <= high:  # type: ignore[operator]
            raise PayloadError("bad hello", f"kappa={self.kappa}, expected {low} to {high}")
        if self.next % self.kappa:
            raise PayloadError("bad next", f"next={self.next}, expected a multiple of kappa = {self.kappa}")


@dataclass(frozen=True)
class Communicated:
    """A node's valid update: its next communication, the neighbours that it then wants, and its metrics."""

    next: int
    want: list[int]
    metrics: MetricRecord

    def metric(self, key: str) -> float | None:
        """Return a number among the metrics; None if there is none of that name."""
        value = self.metrics.get(key)
        return float(value) if isinstance(value, int | float) else None


@dataclass(frozen=True)
class State:
    """The appointments of all nodes that have answered a hello, and counts of missed ones."""

    appointments: Mapping[int, Appointment] = field(default_factory=dict)
    # k + 1 after the event of iteration k.
    iterations: int = 0
    # Nodes that have communicated, and have not restarted since.
    communicated: frozenset[int] = frozenset()
    # Nodes with a ClientApp that refused an update; they may have lost their state.
    refusing: frozenset[int] = frozenset()
    # Missed communications and restarts of nodes since the start.
    missed: int = 0
    restarted: int = 0
    # Lost events in a row.
    lost: int = 0
    # The gradients that nodes last reported, by partition id, and all communications since the start.
    gradients: Mapping[int, float] = field(default_factory=dict)
    communications: int = 0
    # The disagreement with its neighbours that each node last reported.
    disagreements: Mapping[int, float] = field(default_factory=dict)

    @property
    def disagreement(self) -> float:
        """The lower median of the nodes' last reports, which no single one moves; 0 with too few."""
        enough = len(self.disagreements) >= min(_LEAST, len(self.appointments))
        return median_low(self.disagreements.values()) if enough and self.disagreements else 0.0

    @property
    def next_event(self) -> int:
        """The next iteration at which a node communicates; requires an appointment."""
        return min(one.next for one in self.appointments.values())

    def due(self, k: int) -> list[int]:
        """Return the partition ids of the nodes that communicate at iteration k, ascending."""
        return [i for i, one in sorted(self.appointments.items()) if one.next == k]

    def knowing(self, nodes: Sequence[Node]) -> list[int]:
        """Return the partition ids of those of the nodes that know their settings."""
        ids = {i: one.node_id for i, one in self.appointments.items() if i not in self.refusing}
        return [node.partition_id for node in nodes if ids.get(node.partition_id) == node.node_id]

    def introduced(self, answers: Mapping[int, Appointment]) -> Self:
        """Return the state after nodes' answers to a hello.

        A node that is behind skips its communications up to now. One that has communicated and is at its
        first communication again has restarted.
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
        replies: Mapping[int, "Communicated"],
        deprived: Collection[int],
        errors: Mapping[int, Error],
        lost: int,
    ) -> Self:
        """Return the state after the event of iteration k.

        ``replies`` are the valid updates, by partition id. Nodes without one, and those that got none of the
        wanted payloads (``deprived``), have missed the event. A node with a ClientApp that raised
        (``errors``) may have lost its state. ``lost`` is the number of lost events in a row.
        """
        missed = {i for i in self.due(k) if i not in replies}.union(deprived)
        renewed = {
            i: replace(self.appointments[i], next=one.next, want=one.want) for i, one in replies.items()
        }
        told = {i: value for i, one in replies.items() if (value := one.metric("gradients")) is not None}
        apart = {i: value for i, one in replies.items() if (value := one.metric("disagreement")) is not None}
        return replace(
            self,
            appointments={i: one.past(k) for i, one in {**self.appointments, **renewed}.items()},
            iterations=k + 1,
            communicated=self.communicated | replies.keys(),
            refusing=self.refusing.union(i for i, error in errors.items() if error.code == RAISED),
            missed=self.missed + len(missed),
            lost=lost,
            gradients={**self.gradients, **{i: value for i, value in told.items() if value >= 0}},
            communications=self.communications + len(replies),
            disagreements={**self.disagreements, **apart},
        )

    def counts(self, num_nodes: int) -> dict[str, float]:
        """Return the counts since the start as metrics; gradients and communications as means over all nodes.

        An event has only some of the nodes; for the others the last report of their gradients counts.
        """
        gradients = sum(self.gradients.values()) / num_nodes
        means = {"gradients": gradients, "communications": self.communications / num_nodes}
        return {"missed": self.missed, "restarted": self.restarted, **means}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        saved = asdict(self)
        for key in ("appointments", "gradients", "disagreements"):
            saved[key] = {str(i): one for i, one in sorted(saved[key].items())}
        return {**saved, "communicated": sorted(self.communicated), "refusing": sorted(self.refusing)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """Return the state of a checkpoint."""
        appointments = {int(i): Appointment(**one) for i, one in saved["appointments"].items()}
        sets = {key: frozenset(saved[key]) for key in ("communicated", "refusing")}
        reports = {
            key: {int(i): float(number) for i, number in saved.get(key, {}).items()}
            for key in ("gradients", "disagreements")
        }
        return cls(**{**saved, **sets, "appointments": appointments, **reports})


def introduced(node: Node, content: RecordDict) -> Appointment:
    """Return a node's answer to a hello; PayloadError with reason ``bad hello`` or ``bad next``."""
    kappa = config_in(content, "hello").get("kappa")
    if not isinstance(kappa, int) or kappa < 1:
        raise PayloadError("bad hello", f"kappa={kappa!r}, expected an integer >= 1")
    return Appointment(node.node_id, kappa, *next_communication(content, "hello", after=kappa - 1))


def next_communication(content: RecordDict, key: str, after: int) -> tuple[int, list[int]]:
    """Return iteration and neighbours of the next communication after ``after``; else PayloadError."""
    record = config_in(content, key)
    k, want = record.get("next"), record.get("want", [])
    if not isinstance(k, int) or k <= after:
        raise PayloadError("bad next", f"next={k!r}, expected an iteration after {after}")
    if not isinstance(want, list):
        raise PayloadError("bad next", f"want={want!r}, expected a list of partition ids")
    if not all(isinstance(j, int) for j in want):
        raise PayloadError("bad next", f"want={want!r}, expected a list of partition ids")
    return k, want  # type: ignore[return-value]


def check_wanted(k: int, want: Sequence[int], i: int, method: GossipMethod) -> None:
    """Raise PayloadError if node i wants at iteration k what none of its neighbours sends."""
    if method.wants(i, k) is None and (len(set(want)) < len(want) or not set(want) <= set(method.peers(i))):
        raise PayloadError("bad next", f"want={want}, expected different neighbours")
