"""One communication event of a gossip method.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", Algorithm 1, with
synchronous nodes: everything at iteration k uses the state at the start of iteration k.
Differs: the server proceeds from event to event. Nodes need each other only at iterations at which one of
them communicates; a node makes the local steps in between when it gets its next message.
"""

from collections.abc import Mapping
from functools import partial
from logging import INFO

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.common import log

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Ask, Exchange, Steps, Vector
from hedgerow.strategies.gossip.links import OpenLinks
from hedgerow.strategies.gossip.looks import Looks
from hedgerow.strategies.gossip.method import GossipMethod, Scalar
from hedgerow.strategies.gossip.state import (
    Appointment,
    State,
    check_wanted,
    introduced,
    next_communication,
)
from hedgerow.strategies.inbox import checked_metrics
from hedgerow.strategies.method import Method
from hedgerow.strategies.node import Node
from hedgerow.strategies.round_end import TooFewRepliesError
from hedgerow.strategies.router import Router
from hedgerow.wire.message_types import HELLO, UPDATE
from hedgerow.wire.records import PayloadError, records_of

# Longest wait (s) of an event for a new node's answer to a hello.
_PATIENCE = 60.0


class Algorithm(Method[State]):
    """Algorithm 1 as the server sees it; ``Gossip`` adds the user's options."""

    state_class = State
    method: GossipMethod
    node_settings: Mapping[str, Scalar]
    num_iterations: int | None
    carrier: Router
    links: OpenLinks
    looks: Looks

    def begin(self, model: Vector) -> State:
        """Return the state without any node's answer; W^0 is on the nodes."""
        if model.size:
            raise ValueError("the model must be an empty ArrayRecord: models live on the nodes")
        return State()

    def unstepped(self) -> str | None:
        """Return why no server step can act: the server has no model."""
        return "models live on the nodes, and the server averages none"

    def round(self, state: State, run: RoundContext) -> Steps[State]:
        """Let the neighbours of the communicating nodes publish, and relay their payloads."""
        state = yield from self._greeted(state, run)
        # The smallest k in K_i = {kappa_i, 2 kappa_i, …} of any node i, and N_i^k of the nodes due at k.
        ready, own = self.ready(state, run), self.next_own(state)
        due = [] if own is None else state.due(own)
        online = set(ready)
        wants = {i: self._wanted(state, i) for i in due if i in online}
        k = self.carrier.agreed(own, wants)
        if k is None:
            return state
        yield from self.looks.until(k, ready, run, may_stop=self.all_communicated(state))
        log(INFO, "[EVENT %d] iteration %d", run.round, k)
        if k != own:  # An event of other sites' nodes.
            due, wants = [], {}
        # A node whose last update failed may be alone with this event: the others do not lose it.
        sound = {i for i in ready if not run.federation.members.fails(i)}
        # z_j^k: all publishing of iteration k ends before any update of it begins.
        first = {i: t for i in wants if (t := self.method.first(i)) is not None}
        bundles = yield from self.carrier.bundles(k, wants, run, first)
        # (3), at the nodes; they reply with their next k, and N_i^k.
        asks = [self._update(i, k, bundles[i]) for i in wants]
        missing = len(due) - len(wants)
        update = Exchange(UPDATE, asks, {"iteration": k}, offline=missing, reads=partial(self._read, k))
        replies: dict[int, tuple[int, list[int]]] = {}
        for columns in (yield update.prepared(run)):
            replies.update(zip(columns.nodes, columns.rows, strict=True))
            run.contents += [reply.metrics for reply in columns.replies]
        # An event is not lost if all nodes due are offline or failing, and others are not.
        is_theirs = sound.isdisjoint(wants) and (sound or not due)
        lost = state.lost if is_theirs and not replies else self._lost_in_a_row(state, run)
        deprived = {i for i in wants if wants[i] and not bundles[i]}
        state = state.after(k, replies, deprived, run.federation.report.errors, lost)
        run.metrics |= {"iteration": k, "receivers": len(replies)}
        run.metrics |= {"missed": state.missed, "restarted": state.restarted}
        return state

    def model(self, state: State) -> Vector:
        """Return an empty model: models live on the nodes."""
        return np.empty(0, np.float32)

    # Online nodes, and their communications.

    def ready(self, state: State, run: RoundContext) -> list[int]:
        """Return the online nodes that know their settings."""
        return state.knowing(run.federation.members.nodes_of(run.online))

    def all_communicated(self, state: State) -> bool:
        """Return whether all nodes have communicated, and have not restarted since."""
        return len(state.communicated) == self.method.num_nodes

    def next_own(self, state: State) -> int | None:
        """Return the next iteration at which a node of this server communicates; None after the last one."""
        k = state.next_event
        return k if self.num_iterations is None or k < self.num_iterations else None

    def _wanted(self, state: State, i: int) -> list[int]:
        appointment = state.appointments[i]
        wanted = self.method.wants(i, appointment.next)
        return list(appointment.want if wanted is None else wanted)

    def _greeted(self, state: State, run: RoundContext) -> Steps[State]:
        """Send new nodes their settings; they reply with their next communication."""
        ready = self.ready(state, run)
        unknown = set(run.online).difference(ready).union(self.links.unmet(ready))
        asks = [Ask([i], None, self.method.instructions(i), pool=i) for i in sorted(unknown)]
        config = {"method": self.method.name, "run-seed": run.seed, **self.node_settings}
        hello = Exchange(HELLO, asks, config, reads=self._appointed, group="hello", timeout=_PATIENCE)
        answers: dict[int, Appointment] = {}
        for columns in (yield hello.prepared(run)):
            answers.update(zip(columns.nodes, columns.rows, strict=True))
        state = state.introduced(answers)
        if not state.appointments:
            raise TooFewRepliesError(f"No node answered '{HELLO}': its ClientApp must know this method.")
        return state

    def _appointed(self, node: Node, content: RecordDict) -> Appointment:
        """Return a node's answer to a hello, held against the run's settings; else PayloadError."""
        told = introduced(node, content)
        told.check({**self.node_settings, **self.method.instructions(node.partition_id)})
        check_wanted(told.next, told.want, node.partition_id, self.method)
        return told

    # An update, and whether the event was lost.

    def _update(self, i: int, k: int, bundle: Mapping[int, bytes]) -> Ask:
        event = self.method.event(i, k, self.carrier.report.readers.get(i, []))
        records = {"bundle": ConfigRecord({str(j): payload for j, payload in bundle.items()})}
        bits = len(bundle) * self.method.sizes.message_bits
        return Ask([i], None, event, records=records, pool=i, bits=bits)

    def _read(self, k: int, node: Node, content: RecordDict) -> tuple[int, list[int]]:
        """Return a valid update's next communication: the iteration, and the wanted neighbours."""
        if records_of(content, ArrayRecord):
            raise PayloadError("bad arrays", "an update must hold only scalars")
        checked_metrics(content, self.settings.weighted_by_key)
        told = next_communication(content, "next", after=k)
        check_wanted(*told, node.partition_id, self.method)
        return told

    def _lost_in_a_row(self, state: State, run: RoundContext) -> int:
        """Return the number of lost events in a row; TooFewRepliesError if there are too many."""
        report = run.federation.report
        if report.accepted and run.federation.enough():
            return 0
        if state.lost >= self.max_repeats:
            reasons = ", ".join(f"{n} x {reason}" for reason, n in sorted(report.rejected.items()))
            raise TooFewRepliesError(
                f"Event {run.round}: {report.accepted} valid updates of {report.sent}, and the "
                f"{self.max_repeats} events before it were lost as well ({reasons or 'nothing was lost'})."
            )
        return state.lost + 1
