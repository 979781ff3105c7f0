"""The mechanics of methods whose nodes send each other messages along a graph, one event after the other.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", Algorithm 1, whose
nodes are synchronous: everything at iteration k uses the state at the start of iteration k.
Differs: time goes from event to event. Nodes need each other only at the iterations at which one of them
communicates; local steps in between are made by a node when it is next asked for anything.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from logging import INFO, WARNING
from statistics import median
from typing import Any, Unpack

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from hedgerow.strategies.federation import Federation, FederationOptions
from hedgerow.strategies.gossip.appointments import Appointments
from hedgerow.strategies.gossip.exposure import Exposure
from hedgerow.strategies.gossip.looks import Looks
from hedgerow.strategies.gossip.method import GossipMethod, GossipOptions, Scalar
from hedgerow.strategies.gossip.monitor import DIVERGED, DivergenceError, Monitor
from hedgerow.strategies.gossip.relay import Relay
from hedgerow.strategies.gossip.replies import next_communication
from hedgerow.strategies.gossip.sites import Site, Sites
from hedgerow.strategies.gossip.work import Work
from hedgerow.strategies.inbox import Node, Roster, checked_metrics
from hedgerow.strategies.privacy import LOST_ROUNDS, MONITOR, REASONS, PrivacyReport
from hedgerow.strategies.roster import placed
from hedgerow.strategies.rounds import TooFewRepliesError
from hedgerow.strategies.strategy import FederatedStrategy
from hedgerow.wire.checks import int_at_least
from hedgerow.wire.message_types import HELLO, UPDATE
from hedgerow.wire.records import Layout, PayloadError, only_record, records_of

__all__ = ["Gossip", "GossipMethod", "GossipOptions", "Scalar"]

# Lost events in a row that end a run unless something else is asked for: an event may have one receiver.
_MAX_LOST = 10


class Gossip(FederatedStrategy):
    """A strategy that relays payloads from node to node and holds no model.

    **A round is one communication event**: the iteration k at which some nodes are due.

    1. The neighbours that they chose publish their state at the start of iteration k, ``query.publish``.
    2. Each node that is due gets exactly those payloads (ConfigRecord ``bundle``, sender: bytes) in a
       ``train.update``, makes its communication step, and replies when it communicates next and whom it
       then wants to hear (ConfigRecord ``next``: ``next``, ``want``), and scalars (MetricRecord).

    All publishing for k ends before any update for k begins: the iteration is Jacobi, whatever the order of
    messages. Before its first event each node is told its settings (``query.hello``) and replies with its
    ``kappa``, ``next`` and ``want`` (ConfigRecord ``hello``).

    A payload that is lost is left out of its receivers' bundles. A node that is away is a straggler: the
    graph stays as it is, its neighbours go on with what the others sent, it misses the communications at
    which it is due, and one that comes, or comes back, is told its settings and joins in at its next one. No
    event is repeated. An event with fewer than ``min_train_nodes`` valid updates is lost, unless all that are
    due are away and others are there; more than ``max_repeats`` lost events in a row end the run. A monitor's
    rule ends a run only once all m nodes have communicated.

    A node whose ClientApp refused an update may have lost its state: it is told its settings again before
    the next event, which changes nothing at a node that knows them. One that had communicated and is back at
    its first communication began anew, at W^0.

    A round's training metrics are ``iteration`` (k), ``receivers``, ``deliveries``, ``lost-payloads``,
    ``refused`` and, since the start, ``missed`` communications and nodes that ``restarted``; where there is
    noise, what ``PrivacyReport.metrics`` says of the node that released most; and the weighted means of what
    the nodes tell. ``gradients`` and ``communications`` are what a node spent so far, in the mean of all.

    ``start`` takes an **empty** ArrayRecord and returns one: models live on the nodes. Its ``num_rounds`` is
    the largest number of events, its ``evaluate_fn`` gets the empty arrays, after the monitor has looked. It
    raises ValueError for other arrays, TooFewRepliesError also if no node answers a hello, and
    DivergenceError if the nodes' models grow without bound.

    Parameters
    ----------
    method : GossipMethod
        What sets the methods apart.
    num_iterations : int or None (default: None)
        The run ends with W^K after so many iterations K, >= 1; None leaves the end to ``num_rounds``.
    monitor : Monitor or None (default: None)
        Looks at all models after every iteration, which only a simulation can, and may end the run. Where
        most nodes refuse, nobody is asked again.
    sealed : bool (default: False)
        Whether what a node publishes, and the seed of its sensing matrices, travel sealed from neighbour to
        neighbour (``hedgerow.wire.sealed``). Metrics then tell, besides, how many nodes are ``pinning`` their
        neighbours' keys and what was refused: ``withheld`` payloads, and ``unopened`` ones, with
        ``unopened-<reason>`` for each reason.
    site : Site or None (default: None)
        Which of several sites this is, whose nodes alone take part here; what passes between sites goes from
        ServerApp to ServerApp. Nodes have the models that they have with one hub, bit for bit, where all
        sites and nodes are there all along. Events are those in which this site's nodes communicate or
        publish, payloads are booked where they are sent, metrics and the privacy report are of this site's
        nodes, and there is no monitor, as nobody sees all models. Metrics tell, besides, how many
        neighbouring sites took no part (``lost-sites``) and how long sites were waited for
        (``site-seconds``).
    **options
        See ``FederationOptions``. ``num_clients`` is the number of nodes m, ``min_available_nodes`` all of
        them unless given; ``max_repeats`` is 10 unless given; ``fraction_evaluate`` has no meaning here.

    Raises
    ------
    ValueError
        If a parameter is out of range, as a seed is that no message holds; it names value and valid range.
    """

    def __init__(
        self,
        method: GossipMethod,
        *,
        num_iterations: int | None = None,
        monitor: Monitor | None = None,
        sealed: bool = False,
        site: Site | None = None,
        **options: Unpack[FederationOptions],
    ) -> None:
        if num_iterations is not None:
            int_at_least(1, num_iterations=num_iterations)
        options.setdefault("max_repeats", _MAX_LOST)
        here = range(method.num_nodes) if site is None else site.nodes(method.num_nodes)
        options.setdefault("min_available_nodes", len(here))
        if options["min_available_nodes"] > len(here):
            raise ValueError(
                f"min_available_nodes is {options['min_available_nodes']!r}; valid is 1 to {len(here)}, the "
                "nodes that there are here"
            )
        if site is not None and monitor is not None:
            raise ValueError("monitor is given; valid with a site is None: nobody sees all models")
        options["num_clients"] = method.num_nodes
        self.method = method
        self._here = here
        self.num_iterations = num_iterations
        self.monitor = monitor
        self.sealed = sealed
        self.site = site
        self._sites: Sites | None = None
        self._open = ExitStack()
        super().__init__(Federation(**options))
        self.federation.admits = self._admits
        if self.settings.seed >= 2**63:
            raise ValueError(f"seed is {self.settings.seed!r}; valid is an integer < 2^63, as messages hold")
        if site is not None:  # To find what is wrong with it before a run.
            self._among(site)

    def _admits(self, node: Node) -> str | None:
        here = self.site is None or self.site.of(node.partition_id, self.method.num_nodes) == self.site.own
        return placed(node) or (None if here else "another site's")

    def _among(self, site: Site) -> Sites:
        return Sites(
            site,
            self.method,
            {"seed": self.settings.seed, "sealed": self.sealed, "num-iterations": self.num_iterations},
            max_payload=self._relay.max_payload,
            num_iterations=self.num_iterations,
            iterations=self._appointments.iterations,
        )

    # State.

    def _forget(self) -> None:
        self._appointments = Appointments()
        self._relay = Relay(
            self.method, self.federation, monitored=self.monitor is not None, sealed=self.sealed
        )
        self._looks = Looks(self.monitor, self.federation, self.method.dim)
        self._exposure = Exposure()
        self._work = Work(len(self._here))
        self._lost_in_a_row = 0
        # Whether all that are due at the event at hand are away, and others are there.
        self._nobody_due = False
        # The iteration of the event at hand, from ``configure_train`` to ``aggregate_evaluate``.
        self._event: int | None = None

    def _state(self) -> dict[str, Any]:
        own: dict[str, Any] = {"lost-in-a-row": self._lost_in_a_row}
        if self._relay.introductions is not None:
            own["introductions"] = self._relay.introductions.state_dict()
        own["exposure"] = self._exposure.state_dict()
        own["work"] = self._work.state_dict()
        return {**self._appointments.state_dict(), **self._looks.state_dict(), **own}

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._appointments.load_state_dict(state)
        self._looks.load_state_dict(state)
        self._lost_in_a_row = int(state["lost-in-a-row"])
        self._exposure.load_state_dict(state.get("exposure", Exposure.unknown()))
        if "work" in state:
            self._work.load_state_dict(state["work"])
        if self._relay.introductions is not None and "introductions" in state:
            self._relay.introductions.load_state_dict(state["introductions"])

    def _set_up(self, arrays: ArrayRecord, grid: Grid) -> ArrayRecord:
        _check_empty(arrays)
        if self.site is not None:
            self._sites = self._relay.sites = self._open.enter_context(self._among(self.site))
            self._sites.join()
        return arrays

    @property
    def iterations(self) -> int:
        """k + 1 after the event of iteration k."""
        return self._appointments.iterations

    @property
    def total_iterations(self) -> int | None:
        """K, ``num_iterations``; the stopping rule may end the run before."""
        return self.num_iterations

    def current_arrays(self) -> ArrayRecord:
        """Return no arrays: models live on the nodes."""
        return ArrayRecord()

    @property
    def finished(self) -> bool:
        """Whether the run is at its end: its iterations are done, or the stopping rule is met.

        An event that has begun is ended first.
        """
        if self._event is not None:
            return False
        if self._looks.stopped:
            return True
        ended = bool(self._appointments.of) and self._next_event() is None
        return ended and (self._sites is None or self._sites.over)

    def _next_event(self) -> int | None:
        """Return the next iteration at which a node is due, or wanted elsewhere; None past the last."""
        own = self._next_own()
        return own if self._sites is None else self._sites.next_event(own)

    def _next_own(self) -> int | None:
        """Return the next iteration at which a node is due; None past the last iteration."""
        k = self._appointments.next_event()
        return k if self.num_iterations is None or k < self.num_iterations else None

    def start(self, *args: Any, **options: Any) -> Result:
        """Run the strategy, see ``FederatedStrategy``, and log what the run cost in privacy.

        A site listens for the others all the while; OSError if its address cannot be listened on.
        """
        with self._open:
            result = super().start(*args, **options)
        if self.method.privacy.mode != "none":
            log(INFO, "Privacy: %s", self.privacy_report())
        return result

    def privacy_report(self, delta: float | None = None) -> PrivacyReport:
        """Account for the node that released most so far, at a total delta (None: that of one release).

        Counted is what the node was asked for, or what its ledger says where that is more. The nodes' data
        are disjoint, so that their number does not enter.

        Raises
        ------
        ValueError
            If there is no noise.
        """
        count = self._exposure.most(self.method, self.iterations)
        return self.method.privacy.report(count, delta, numerical=True, unprotected=self._unprotected())

    def _unprotected(self) -> list[str]:
        """Return the paths by which this run tells what no noise covers, or nobody counts."""
        paths = [MONITOR] if self._looks.answered else []
        # Noise of a seed comes out the same again.
        seeded = self.method.privacy.noise_source == "seed"
        if not seeded and self._exposure.lost_rounds(self.method.num_nodes):
            paths.append(LOST_ROUNDS)
        return paths

    # Flower's interface.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Route the payloads of the next event and return its updates; none once the run has finished."""
        self._begin_round(server_round)
        _check_empty(arrays)
        self._event = None
        if self.finished:
            return []
        self.federation.layout = Layout.of(arrays)
        roster = self.federation.gather(grid)
        self._greet(grid, roster, server_round, config)
        if self._sites is not None:
            self._agree(self._sites, roster)
        k = self._next_event()
        if k is None:
            return []
        self._look(grid, roster, server_round, until=k)
        self._event = k
        log(INFO, "[EVENT %d] iteration %d", server_round, k)
        due = self._appointments.due(k)
        ready = {node.partition_id for node in self._appointments.ready(roster)}
        wants = {i: self._wanted(i, k) for i in due if i in ready}
        # At a site an event may be others' alone.
        self._nobody_due = not wants and (bool(ready) or not due)
        contents = self._relay.updates(grid, roster, server_round, k, wants, config)
        for node, _ in contents:
            self._exposure.update(node.partition_id)
        return self.federation.instruct(
            server_round, contents, self._checked, offline=len(due) - len(wants), message_type=UPDATE
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Note who communicates when. There is nothing to aggregate: the arrays are empty, or None."""
        if (k := self._event) is None:
            return None, None
        contents: list[RecordDict] = []
        for reply in self.federation.accept(self._appointments.noting_refusals(replies)):
            self._appointments.renew(reply.node.partition_id, reply.value)
            self._exposure.tell(reply.node.partition_id, reply.content, "next")
            self._relay.take_reply(reply.node.partition_id, reply.content)
            self._relay.book_reply(server_round, reply)
            contents.append(reply.metrics)
            self._work.tell(reply.node.partition_id, only_record(reply.metrics, MetricRecord, "bad metrics"))
        self._appointments.end(k, self._relay.deprived)
        if self._sites is not None:
            self._sites.book(self.ledger, server_round)
        self.federation.completed = server_round
        self._end_if_lost(server_round)
        return ArrayRecord(), self._train_metrics(k, contents)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Let the monitor look at every iteration until the next event; nothing else is evaluated.

        The round's record is of the first of them, ``iterations``; ``Monitor.after_event`` has its models.
        """
        if self.monitor is not None and self._event is not None:
            until = self._next_event()
            until = self.num_iterations if until is None else until
            roster = self.federation.gather(grid)
            self._look(grid, roster, server_round, until=until, ended=self.iterations)
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return what the monitor saw right after the event, which ends here."""
        ended, self._event = self._event, None
        return None if ended is None else self._looks.metrics(self.iterations)

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t├──> Method: %s on %d nodes", self.method.name, self.method.num_nodes)
        if self._sites is not None:
            self._sites.summary()
        for line in self.method.describe():
            log(INFO, "\t├──> %s", line)
        if (privacy := self.method.privacy).mode != "none" and not (report := privacy.report(1)).guaranteed:
            reasons = "; ".join(REASONS[path] for path in report.unprotected)
            log(WARNING, "Privacy mode '%s' guarantees nothing: %s.", privacy.mode, reasons)
        log(INFO, "\t└──> Message: %d bits", self.method.sizes.message_bits)

    # Mechanics.

    def _greet(self, grid: Grid, roster: Roster, server_round: int, config: ConfigRecord) -> None:
        """Tell nodes that do not know them their settings, and hear when they communicate."""
        self._exposure.begin(grid.run.run_id)
        strangers = self._appointments.strangers(roster)
        if (introductions := self._relay.introductions) is not None:
            introductions.begin(grid.run.run_id)
            ready = self._appointments.ready(roster)
            strangers += [node for node in ready if node.partition_id not in introductions.of]
        first = introductions is not None and not introductions.of
        for node in strangers:
            self._exposure.greet(node.partition_id, self.iterations)
        for reply in self._relay.hello(grid, server_round, config, strangers):
            i = reply.node.partition_id
            self._exposure.keep(i, self.iterations, reply.value)
            self._exposure.tell(i, reply.content, "hello")
            if self._appointments.introduce(i, reply.value):
                self._relay.book_set_up(server_round, i)
            self._relay.book_reply(server_round, reply)
        if introductions is not None and first:
            pinning, all_of = len(introductions.pinning), len(introductions.of)
            log(
                INFO,
                "Links are sealed: %d of %d nodes pin their neighbours' keys, the others",
                pinning,
                all_of,
            )
            log(INFO, "trust the first that they are told.")
        if not self._appointments.of:
            raise TooFewRepliesError(f"No node answered '{HELLO}': its ClientApp must know this method.")

    def _agree(self, sites: Sites, roster: Roster) -> None:
        """Agree with the other sites on what comes next."""
        own = self._next_own()
        ready = {node.partition_id for node in self._appointments.ready(roster)}
        due = [] if own is None else [i for i in self._appointments.due(own) if i in ready]
        wants = {i: self._wanted(i, own) for i in due if own is not None}
        sites.agree(own, wants, self._relay.introductions)

    def _wanted(self, i: int, k: int) -> list[int]:
        wanted = self.method.wants(i, k)
        return list(self._appointments.of[i].want if wanted is None else wanted)

    def _look(
        self, grid: Grid, roster: Roster, server_round: int, *, until: int | None, ended: int | None = None
    ) -> None:
        everyone = self._appointments.all_communicated(self.method.num_nodes)
        nodes = self._appointments.ready(roster)
        self._looks.until(until, grid, server_round, nodes, may_stop=everyone, ended=ended)

    def _checked(self, node: Node, content: RecordDict) -> tuple[int, list[int]]:
        """Return when the node of a valid update communicates next, and with whom."""
        if records_of(content, ArrayRecord):
            raise PayloadError("bad arrays", "an update tells scalars alone")
        checked_metrics(content, self.settings.weighted_by_key)
        assert self._event is not None
        return next_communication(content, "next", after=self._event)

    def _end_if_lost(self, server_round: int) -> None:
        """Raise TooFewRepliesError if this event and too many before it were lost."""
        if self._nobody_due:
            return
        if self.report.accepted and self.federation.enough():
            self._lost_in_a_row = 0
            return
        self._lost_in_a_row += 1
        if self._lost_in_a_row > self.max_repeats:
            reasons = ", ".join(f"{n} x {reason}" for reason, n in sorted(self.report.rejected.items()))
            raise TooFewRepliesError(
                f"Event {server_round}: {self.report.accepted} valid updates of {self.report.sent}, and the "
                f"{self.max_repeats} events before it were lost as well ({reasons or 'nothing was lost'})."
            )

    def _train_metrics(self, k: int, contents: list[RecordDict]) -> MetricRecord:
        """Return the means of what the nodes told, and the event's counts; the guard without a monitor."""
        records = [only_record(content, MetricRecord, "bad metrics") for content in contents]
        told = [value for r in records if isinstance(value := r.get("disagreement"), float)]
        # The median, for a single node that lies must not end the run.
        if told and median(told) > DIVERGED:
            raise DivergenceError(f"The nodes' local disagreement exceeds {DIVERGED:g}: the run diverges.")
        metrics, event, book = self.federation.train_metrics(contents), self._relay.report, self._appointments
        metrics.update(self._work.metrics())
        metrics["iteration"] = k
        metrics["receivers"] = len(contents)
        metrics["deliveries"] = event.deliveries
        metrics["lost-payloads"] = sum(event.lost.values())
        metrics["refused"] = event.refused
        metrics["missed"] = book.missed
        metrics["restarted"] = book.restarted
        if self._sites is not None:
            metrics["lost-sites"] = len(self._sites.absent)
            metrics["site-seconds"] = self._sites.seconds
        if self._looks.refused:
            metrics["monitor-refused"] = self._looks.refused
        if self._relay.introductions is not None:
            metrics["pinning"] = len(self._relay.introductions.pinning)
            metrics["withheld"] = event.withheld
            metrics["unopened"] = sum(self._relay.unopened.values())
            for reason, count in sorted(self._relay.unopened.items()):
                metrics[f"unopened-{reason.replace(' ', '-')}"] = count
        released = self._exposure.most(self.method, k + 1)
        metrics.update(self.method.privacy.metrics(released, self._unprotected()))
        return metrics


def _check_empty(arrays: ArrayRecord) -> None:
    if len(arrays):
        raise ValueError(
            f"initial_arrays has the keys {sorted(arrays)}; valid is an empty ArrayRecord: "
            "models live on the nodes"
        )
