"""Algorithm 1 as the server sees it: one communication event of a gossip method.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning"; the nodes are
synchronous: everything at iteration k uses the state at the start of iteration k. Line by line, each with its
function here and what a node does then (CEPS's nodes: ``clients/ceps/algorithm.py``)::

    Initialise W^0 = 0; node i picks kappa_i, sigma_i, gamma_i, Phi_i        ``_initialised``; a node begins
    for k = 0, 1, 2, ... do                                                  ``round``, of a k in some K_i
        for every node i with k in K_i = {kappa_i, 2 kappa_i, ...} do
            draw N_i^k, and request z_j^k from each other j in it            ``_requests``; the node draws
            z_j^k = 1BCS(w_j^k, Phi, gamma), Algorithm 2    ``Router.bundles``; nodes j encode, i decodes
            draw xi; m_i, mean, u_i, and w_i^{k+1} by (3)                    ``_updates``; the node updates
        for every other node i do
            w_i^{k+1} by (4)                        not here: a node catches up when it gets a message

Differs: the server proceeds from event to event. Nodes need each other only at iterations at which one of
them communicates; a node makes the local steps in between when it gets its next message. Other gossip methods
have other steps in place of (3) and (4). The carrier of payloads is a ``Router``, with one server as hub of
all nodes, or ``Sites``, servers that exchange payloads directly.
"""

from collections.abc import Collection, Mapping
from functools import partial
from logging import INFO

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.common import log

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Ask, Exchange, Steps, Vector
from hedgerow.strategies.gossip.links import OpenLinks
from hedgerow.strategies.gossip.method import GossipMethod, Scalar
from hedgerow.strategies.gossip.monitor import DIVERGED, Looks
from hedgerow.strategies.gossip.state import (
    Appointment,
    Communicated,
    State,
    check_wanted,
    introduced,
    next_communication,
)
from hedgerow.strategies.inbox import checked_metrics
from hedgerow.strategies.method import Method
from hedgerow.strategies.node import Node
from hedgerow.strategies.round_end import DivergenceError, TooFewRepliesError
from hedgerow.strategies.router import Bundles, Router
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
    # The nodes of this server.
    num_here: int
    carrier: Router
    links: OpenLinks
    # None without a monitor.
    looks: Looks | None

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
        state = yield from self._initialised(state, run)
        # The smallest k in K_i = {kappa_i, 2 kappa_i, …} of any node i, and N_i^k of the nodes due at k.
        ready, own = self.ready(state, run), self.next_own(state)
        due = [] if own is None else state.due(own)
        wants = self._requests(state, set(ready).intersection(due))
        k = self.carrier.agreed(own, wants)
        if k is None:
            return state
        if self.looks is not None:
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
        replies = yield from self._updates(k, {i: bundles[i] for i in wants}, len(due) - len(wants), run)
        # An event is not lost if all nodes due are offline or failing, and others are not.
        is_theirs = sound.isdisjoint(wants) and (sound or not due)
        lost = state.lost if is_theirs and not replies else self._lost_in_a_row(state, run)
        deprived = {i for i in wants if wants[i] and not bundles[i]}
        state = state.after(k, replies, deprived, run.federation.report.errors, lost)
        if state.disagreement > DIVERGED:
            raise DivergenceError(f"The nodes' local disagreement exceeds {DIVERGED:g}: the run diverges.")
        run.metrics |= {"iteration": k, "receivers": len(replies), **state.counts(self.num_here)}
        return state

    def _initialised(self, state: State, run: RoundContext) -> Steps[State]:
        """Send new nodes their settings; they begin, and reply with their next communication."""
        ready = self.ready(state, run)
        unknown = set(run.online).difference(ready).union(self.links.unmet(ready))
        if state.appointments and not unknown:
            return state
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

    def _requests(self, state: State, due: Collection[int]) -> dict[int, list[int]]:
        """Return N_i^k without i of the nodes that are due and online: a node's own draw, or the method's."""
        wants = {}
        for i in sorted(due):
            appointment = state.appointments[i]
            chosen = self.method.wants(i, appointment.next)
            wants[i] = list(appointment.want if chosen is None else chosen)
        return wants

    def _updates(
        self, k: int, bundles: Bundles, offline: int, run: RoundContext
    ) -> Steps[dict[int, Communicated]]:
        """Send nodes their payloads of iteration k; return their valid updates, by partition id."""
        asks, readers = [], self.carrier.report.readers
        for i, bundle in bundles.items():
            event = self.method.event(i, k, readers.get(i, []))
            records = {"bundle": ConfigRecord({str(j): payload for j, payload in bundle.items()})}
            bits = len(bundle) * self.method.sizes.message_bits
            asks.append(Ask([i], None, event, records=records, pool=i, bits=bits))
        update = Exchange(UPDATE, asks, {"iteration": k}, offline=offline, reads=partial(self._read, k))
        replies: dict[int, Communicated] = {}
        for columns in (yield update.prepared(run)):
            replies.update(zip(columns.nodes, columns.rows, strict=True))
            run.contents += [reply.metrics for reply in columns.replies]
        return replies

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

    def _appointed(self, node: Node, content: RecordDict) -> Appointment:
        """Return a node's answer to a hello, held against the run's settings; else PayloadError."""
        told = introduced(node, content)
        told.check({**self.node_settings, **self.method.instructions(node.partition_id)})
        check_wanted(told.next, told.want, node.partition_id, self.method)
        return told

    def _read(self, k: int, node: Node, content: RecordDict) -> Communicated:
        """Return a valid update; else PayloadError."""
        if records_of(content, ArrayRecord):
            raise PayloadError("bad arrays", "an update must hold only scalars")
        metrics = checked_metrics(content, self.settings.weighted_by_key)
        told = next_communication(content, "next", after=k)
        check_wanted(*told, node.partition_id, self.method)
        return Communicated(*told, metrics)

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
