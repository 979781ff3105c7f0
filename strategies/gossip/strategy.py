"""The mechanics of methods whose nodes send each other messages along a graph, one event after the other.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", Algorithm 1, whose
nodes are synchronous: everything at iteration k uses the state at the start of iteration k.
Differs: time goes from event to event. Nodes need each other only at the iterations at which one of them
communicates; local steps in between are made by a node when it is next asked for anything.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from logging import INFO, WARNING
from statistics import median
from typing import Any, Protocol, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from hedgerow.strategies.exchange import (
    RAISED,
    Exchange,
    ExchangeReport,
    Node,
    Reply,
    Roster,
    checked_metrics,
    collect,
)
from hedgerow.strategies.federation import Federation, FederationOptions, only_arrays
from hedgerow.strategies.gossip.monitor import DIVERGED, DivergenceError, Monitor, Sight
from hedgerow.strategies.gossip.payload_sizes import PayloadSizes
from hedgerow.strategies.rounds import EvaluateFn, Progress, RoundEnd, TooFewRepliesError
from hedgerow.strategies.router import GraphAt, Router
from hedgerow.wire.checks import int_at_least
from hedgerow.wire.ledger import HUB_TO_NODE, NODE_TO_HUB, Ledger
from hedgerow.wire.records import Layout, PayloadError, lazy_array, payload_bytes, view

__all__ = ["HELLO", "LOOK", "SET_UP", "UPDATE", "Gossip", "GossipMethod", "GossipOptions", "Scalar"]

HELLO, UPDATE, LOOK = "query.hello", "train.update", "query.monitor"
# What a node tells its neighbours once, before its first message: the seed of what both must draw.
SET_UP = "node->node set-up"

Scalar = bool | int | float | str | list[int] | list[float]

# Lost events in a row that end a run unless something else is asked for: an event may have one receiver.
_MAX_LOST = 10
# Seconds that an event waits at most for a new node to introduce itself.
_PATIENCE = 60.0


class GossipMethod(Protocol):
    """What sets a method apart: who may hear whom, who does, and how large a message is."""

    @property
    def name(self) -> str:
        """The method's name, as nodes know it."""

    @property
    def num_nodes(self) -> int:
        """Nodes m."""

    @property
    def graph(self) -> GraphAt:
        """Who may hear whom at an iteration."""

    @property
    def sizes(self) -> PayloadSizes:
        """How large a message is."""

    @property
    def set_up_bytes(self) -> int:
        """Bytes that a node tells each neighbour before its first message."""

    def instructions(self, node: int) -> Mapping[str, Scalar]:
        """Return the settings that a node is told once."""

    def event(self, node: int, k: int) -> Mapping[str, Scalar]:
        """Return what a node is told of its communication at iteration k alone."""

    def wants(self, node: int, k: int) -> Sequence[int] | None:
        """Return the neighbours that a node gets payloads of at iteration k; None leaves it to the node."""

    def first(self, node: int) -> int | None:
        """Return how many payloads a node takes, the first that arrive; None for all that it wants."""

    def metrics(self, iterations: int, restarts: int = 0) -> Mapping[str, float]:
        """Return what the method can tell of a run of so many iterations and nodes that began anew."""

    def describe(self) -> Iterable[str]:
        """Return the settings in a few lines."""


class GossipOptions(FederationOptions, total=False):
    """Options that every gossip strategy takes, by keyword; see ``Gossip``."""

    num_iterations: int | None
    monitor: Monitor | None


@dataclass
class _Appointment:
    """When a node communicates next, how often, and whom it then wants to hear."""

    node_id: int
    kappa: int
    next: int
    want: list[int]

    def move_past(self, k: int) -> None:
        """Skip the communications up to iteration k, which were missed; whom it wants to hear stays."""
        if self.next <= k:
            self.next += ((k - self.next) // self.kappa + 1) * self.kappa


class Gossip(Strategy):
    """A strategy that relays payloads from node to node and holds no model.

    **A round is one communication event**: the iteration k at which some nodes are due.

    1. The neighbours that they chose publish their state at the start of iteration k, ``query.publish``.
    2. Each node that is due gets exactly those payloads (ConfigRecord ``bundle``, sender: bytes) in a
       ``train.update``, makes its communication step, and replies when it communicates next and whom it
       then wants to hear (ConfigRecord ``next``: ``next``, ``want``), and scalars (MetricRecord).

    All publishing for k ends before any update for k begins: the iteration is Jacobi, whatever the order of
    messages. Before its first event each node is told its settings (``query.hello``) and replies with its
    ``kappa``, ``next`` and ``want`` (ConfigRecord ``hello``).

    A payload that is lost is left out of its receivers' bundles. A node that is away when it is due misses
    that communication; no event is repeated. An event with fewer than ``min_train_nodes`` valid updates is
    lost, and more than ``max_repeats`` lost events in a row end the run.

    A node whose ClientApp refused an update may have lost its state: it is told its settings again before
    the next event, which changes nothing at a node that knows them. One that had communicated and is back at
    its first communication began anew, at W^0.

    A round's training metrics are ``iteration`` (k), ``receivers``, ``deliveries``, ``lost-payloads``,
    ``refused`` and, since the start, ``missed`` communications and nodes that ``restarted``; what the method
    adds; and the weighted means of what the nodes tell.

    Parameters
    ----------
    method : GossipMethod
        What sets the methods apart.
    num_iterations : int or None (default: None)
        The run ends with W^K after so many iterations K, >= 1; None leaves the end to ``num_rounds``.
    monitor : Monitor or None (default: None)
        Looks at all models after every iteration, which only a simulation can, and may end the run.
    **options
        See ``FederationOptions``. ``min_available_nodes`` is the number of nodes m; ``max_repeats`` is 10
        unless given; ``fraction_evaluate`` has no meaning here.

    Raises
    ------
    ValueError
        If a parameter is out of range, naming it, its value and what is valid.
    """

    def __init__(
        self,
        method: GossipMethod,
        *,
        num_iterations: int | None = None,
        monitor: Monitor | None = None,
        **options: Unpack[FederationOptions],
    ) -> None:
        if num_iterations is not None:
            int_at_least(1, num_iterations=num_iterations)
        options.setdefault("max_repeats", _MAX_LOST)
        options["min_available_nodes"] = method.num_nodes
        self.method = method
        self.num_iterations = num_iterations
        self.monitor = monitor
        self.federation = Federation(**options)
        self.settings = self.federation.settings
        self.on_round_end = self.settings.on_round_end
        self.max_repeats = self.settings.max_repeats
        if self.settings.seed >= 2**63:
            raise ValueError(f"seed is {self.settings.seed!r}; valid is an integer < 2^63, as messages hold")
        self._forget()

    def _forget(self) -> None:
        self._appointments: dict[int, _Appointment] = {}
        self._communicated: set[int] = set()
        self._refusing: set[int] = set()
        self._event: int | None = None
        self._deprived: set[int] = set()
        self._iterations = self._missed = self._restarted = self._lost_in_a_row = 0
        self._looked = -1
        self._router = Router(self.method.graph, self.method.sizes, self.ledger)
        if self.monitor is not None:
            self.monitor.reset()

    # State.

    @property
    def completed_rounds(self) -> int:
        """Events so far."""
        return self.federation.completed

    @property
    def iterations(self) -> int:
        """k + 1 after the event of iteration k."""
        return self._iterations

    @property
    def finished(self) -> bool:
        """Whether the run is at its end: its iterations are done, or the stopping rule is met."""
        if self.monitor is not None and self.monitor.stopped_at is not None:
            return True
        return bool(self._appointments) and self._next_event() is None

    @property
    def report(self) -> ExchangeReport:
        """What the updates of the last event sent, got and lost."""
        return self.federation.report

    @property
    def ledger(self) -> Ledger:
        """Every transfer so far."""
        return self.federation.ledger

    def progress(self) -> Progress:
        """Return iterations and traffic since the start; the papers model no time."""
        total = self.ledger.total()
        return Progress(self.iterations, total.nominal_bits, total.payload_bytes, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next event depends on."""
        return {
            **self.federation.state_dict(),
            "appointments": {str(i): asdict(one) for i, one in sorted(self._appointments.items())},
            "communicated": sorted(self._communicated),
            "iterations": self._iterations,
            "looked": self._looked,
            "lost-in-a-row": self._lost_in_a_row,
            "missed": self._missed,
            "monitor": None if self.monitor is None else self.monitor.state_dict(),
            "restarted": self._restarted,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; the next ``start`` goes on after its event."""
        self.federation.load_state_dict(state)
        self._forget()
        self._appointments = {int(i): _Appointment(**one) for i, one in state["appointments"].items()}
        self._communicated = set(state["communicated"])
        self._iterations = int(state["iterations"])
        self._looked = int(state["looked"])
        self._lost_in_a_row = int(state["lost-in-a-row"])
        self._missed = int(state["missed"])
        self._restarted = int(state["restarted"])
        if self.monitor is not None and state["monitor"] is not None:
            self.monitor.load_state_dict(state["monitor"])

    # Flower's interface.

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run the strategy; parameters as in Flower's ``Strategy.start``.

        ``initial_arrays`` is an **empty** ArrayRecord, and so are the result's: models live on the nodes.
        ``num_rounds`` is the largest number of events, ``timeout`` the deadline of an exchange.
        ``evaluate_fn`` gets the empty arrays, after the monitor has looked.

        Raises
        ------
        ValueError
            If ``initial_arrays`` is not empty.
        RosterError
            If the nodes do not come, or do not make up the federation.
        TooFewRepliesError
            If more than ``max_repeats`` events in a row are lost, or no node answers a hello.
        DivergenceError
            If the nodes' models grow without bound.
        """
        int_at_least(0, num_rounds=num_rounds)
        _check_empty(initial_arrays)
        if not self.federation.begin(timeout):
            self._forget()
        log(INFO, "Starting %s strategy:", type(self).__name__)
        self.summary()
        result = Result()
        result.arrays = initial_arrays
        train_config = ConfigRecord() if train_config is None else train_config
        evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
        if self.completed_rounds == 0:
            self._tell(0, time.monotonic(), result, evaluate_fn)
        for current in range(self.completed_rounds + 1, num_rounds + 1):
            started = time.monotonic()
            messages = self.configure_train(current, initial_arrays, train_config, grid)
            if self._event is None:
                break
            _, metrics = self.aggregate_train(current, collect(grid, messages, timeout))
            if metrics is not None:
                result.train_metrics_clientapp[current] = metrics
            self.configure_evaluate(current, initial_arrays, evaluate_config, grid)
            if (seen := self.aggregate_evaluate(current, [])) is not None:
                result.evaluate_metrics_clientapp[current] = seen
            self._tell(current, started, result, evaluate_fn)
        self.conclude()
        return result

    def conclude(self) -> None:
        """Log what there is to say once all rounds are over; here nothing."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Route the payloads of the next event and return its updates; none once the run has finished."""
        if server_round == 1 and self.completed_rounds:
            self.federation.reset()
            self._forget()
        _check_empty(arrays)
        self._event = None
        if self.finished:
            return []
        self.federation.layout = Layout.of(arrays)
        roster = self.federation.gather(grid)
        new = [n for n in roster.nodes if n.node_id in roster.online and not self._is_ready(n, roster)]
        self._greet(grid, server_round, config, new)
        k = self._event = self._next_event()
        if k is None:
            return []
        self._look(grid, roster, server_round, until=k)
        log(INFO, "[EVENT %d] iteration %d", server_round, k)
        due = [i for i, appointment in sorted(self._appointments.items()) if appointment.next == k]
        there = [i for i in due if self._is_ready(roster.nodes[i], roster)]
        contents = self._updates(grid, roster, server_round, k, there, config)
        return self.federation.instruct(
            server_round, contents, self._checked, offline=len(due) - len(there), message_type=UPDATE
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Note who communicates when. There is nothing to aggregate: the arrays are always None."""
        if (k := self._event) is None:
            return None, None
        contents: list[RecordDict] = []
        for reply in self.federation.accept(self._noting_refusals(replies)):
            i = reply.node.partition_id
            self._appointments[i].next, self._appointments[i].want = reply.value
            self._communicated.add(i)
            self._book_reply(server_round, reply)
            contents.append(RecordDict(dict(reply.content.metric_records)))
        for i, appointment in self._appointments.items():
            self._missed += appointment.next == k or i in self._deprived
            appointment.move_past(k)
        self._iterations = k + 1
        self.federation.completed = server_round
        self._end_if_lost(server_round)
        return None, self._train_metrics(k, contents)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Let the monitor look at every iteration until the next event; nothing else is evaluated."""
        if self.monitor is not None and self._event is not None:
            until = self._next_event()
            until = self.num_iterations if until is None else until
            self._look(grid, self.federation.gather(grid), server_round, until=until)
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return what the monitor saw right after the event."""
        if self.monitor is None or self._event is None:
            return None
        looks = (look for look in reversed(self.monitor.history) if look.iteration == self._iterations)
        look = next(looks, None)
        return None if look is None else look.metrics()

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t├──> Method: %s on %d nodes", self.method.name, self.method.num_nodes)
        for line in self.method.describe():
            log(INFO, "\t├──> %s", line)
        sizes = self.method.sizes
        log(INFO, "\t└──> Message: %s, %d bits", sizes.codec, sizes.message_bits)

    # Mechanics.

    def _next_event(self) -> int | None:
        """Return the next iteration at which a node is due; None past the last iteration."""
        k = min(appointment.next for appointment in self._appointments.values())
        return k if self.num_iterations is None or k < self.num_iterations else None

    def _is_ready(self, node: Node, roster: Roster) -> bool:
        """Return whether a node is there, and is the one that was told its settings and still knows them."""
        appointment = self._appointments.get(node.partition_id)
        known = appointment is not None and appointment.node_id == node.node_id
        return known and node.node_id in roster.online and node.node_id not in self._refusing

    def _greet(self, grid: Grid, server_round: int, config: ConfigRecord, nodes: Sequence[Node]) -> None:
        """Tell nodes their settings, and hear when they communicate."""
        if not nodes and self._appointments:
            return
        group, timeout = f"{server_round}-hello", self.federation.timeout
        messages = []
        for node in nodes:
            content = RecordDict({self.settings.configrecord_key: self._settings(node.partition_id, config)})
            self.ledger.book(server_round, HUB_TO_NODE, 0, node.partition_id, 0, payload_bytes(content))
            messages.append(Message(content, node.node_id, HELLO, ttl=timeout, group_id=group))
        answers = collect(grid, messages, min(timeout, _PATIENCE)) if messages else iter(())
        for reply in Exchange(nodes, group, _introduced).accept(answers):
            self._note(server_round, reply)
        if not self._appointments:
            raise TooFewRepliesError(f"No node answered '{HELLO}': its ClientApp must know this method.")

    def _noting_refusals(self, replies: Iterable[Message]) -> Iterator[Message]:
        """Yield the replies, and note who raised: a restarted node under its old id looks like any other."""
        for message in replies:
            if message.has_error() and message.error.code == RAISED:
                self._refusing.add(message.metadata.src_node_id)
            yield message

    def _note(self, server_round: int, reply: Reply) -> None:
        """Keep a node's answer to a hello; a node that is behind has missed its communications so far."""
        i, appointment = reply.node.partition_id, reply.value
        before = self._appointments.get(i)
        self._refusing.discard(appointment.node_id)
        if i in self._communicated and appointment.next == appointment.kappa:
            log(WARNING, "Partition %d has lost its state: it starts from W^0.", i)
            self._communicated.discard(i)
            self._restarted += 1
        new = before is None or before.node_id != appointment.node_id
        if new and (size := self.method.set_up_bytes):
            for j in sorted(self.method.graph(0).neighbors(i)):
                self.ledger.book(server_round, SET_UP, i, j, 0, size)
        appointment.move_past(self._iterations - 1)
        self._appointments[i] = appointment
        self._book_reply(server_round, reply)

    def _updates(
        self,
        grid: Grid,
        roster: Roster,
        server_round: int,
        k: int,
        there: Sequence[int],
        config: ConfigRecord,
    ) -> list[tuple[Node, RecordDict]]:
        """Return what those that are due are sent: the iteration, and the payloads that they chose."""
        wants = {i: self._wanted(i, k) for i in there}
        first = {i: count for i in there if (count := self.method.first(i)) is not None}
        bundles = self._router.route(
            grid, roster, server_round, k, wants, timeout=self.federation.timeout, first=first
        )
        self._deprived = {i for i in there if wants[i] and not bundles[i]}
        contents = []
        for i in there:
            bundle = ConfigRecord({str(j): payload for j, payload in bundles[i].items()})
            own = ConfigRecord({**config, "iteration": k})
            own.update(self.method.event(i, k))
            content = RecordDict({self.settings.configrecord_key: own, "bundle": bundle})
            bits = len(bundle) * self.method.sizes.message_bits
            self.ledger.book(server_round, HUB_TO_NODE, 0, i, bits, payload_bytes(content))
            contents.append((roster.nodes[i], content))
        return contents

    def _wanted(self, i: int, k: int) -> Sequence[int]:
        wanted = self.method.wants(i, k)
        return self._appointments[i].want if wanted is None else wanted

    def _settings(self, i: int, config: ConfigRecord) -> ConfigRecord:
        """Return what a node is told once; the same if it is told again."""
        told = ConfigRecord({**config, "method": self.method.name, "run-seed": self.settings.seed})
        if self.monitor is not None:
            told["monitor"] = True
        told.update(self.method.instructions(i))
        return told

    def _book_reply(self, server_round: int, reply: Reply) -> None:
        size = payload_bytes(reply.content)
        self.ledger.book(server_round, NODE_TO_HUB, reply.node.partition_id, 0, 0, size)

    def _checked(self, node: Node, content: RecordDict) -> tuple[int, list[int]]:
        """Return when the node of a valid update communicates next, and with whom."""
        if content.array_records:
            raise PayloadError("bad arrays", "an update tells scalars alone")
        checked_metrics(content, self.settings.weighted_by_key)
        assert self._event is not None
        return _next_communication(content, "next", after=self._event)

    def _end_if_lost(self, server_round: int) -> None:
        """Raise TooFewRepliesError if this event and too many before it were lost."""
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
        records = [next(iter(content.metric_records.values())) for content in contents]
        told = [value for r in records if isinstance(value := r.get("disagreement"), float)]
        # The median, for a single node that lies must not end the run.
        if told and median(told) > DIVERGED:
            raise DivergenceError(f"The nodes' local disagreement exceeds {DIVERGED:g}: the run diverges.")
        metrics = self.federation.train_metrics(contents)
        event = self._router.report
        metrics.update(
            {
                "iteration": k,
                "receivers": len(contents),
                "deliveries": event.deliveries,
                "lost-payloads": sum(event.lost.values()),
                "refused": event.refused,
                "missed": self._missed,
                "restarted": self._restarted,
                **self.method.metrics(k + 1, self._restarted),
            }
        )
        return metrics

    def _look(self, grid: Grid, roster: Roster, server_round: int, *, until: int | None) -> None:
        """Let the monitor look at the iterations not seen yet, up to one at which nobody has communicated."""
        if self.monitor is None or until is None:
            return
        for iteration in range(self._looked + 1, until + 1):
            self._looked = iteration
            seen = self._ask_models(grid, roster, server_round, ConfigRecord({"iteration": iteration}))
            if not seen:
                continue
            mean = ArrayRecord({"mean": lazy_array(self.monitor.mean(seen))})
            told = (
                seen
                if not self.monitor.measures_loss
                else self._ask_models(
                    grid, roster, server_round, ConfigRecord({"iteration": iteration}), mean
                )
            )
            everyone = len(self._communicated) == self.method.num_nodes
            self.monitor.look(iteration, seen, told, may_stop=everyone)
            if self.monitor.stopped_at is not None:
                log(INFO, "The stopping rule is met at iteration %d.", iteration)
                return

    def _ask_models(
        self,
        grid: Grid,
        roster: Roster,
        server_round: int,
        config: ConfigRecord,
        mean: ArrayRecord | None = None,
    ) -> dict[int, Sight]:
        """Return what the monitor sees of each node that answers. Nothing of it is booked, or kept here."""
        group = f"{server_round}-look"
        nodes = [node for node in roster.nodes if self._is_ready(node, roster)]
        content = RecordDict({self.settings.configrecord_key: config})
        if mean is not None:
            content["arrays"] = mean
        timeout = self.federation.timeout
        messages = [Message(content, node.node_id, LOOK, ttl=timeout, group_id=group) for node in nodes]
        exchange = Exchange(nodes, group, lambda _, reply: _seen(reply, self.method.sizes.dim))
        replies = exchange.accept(collect(grid, messages, timeout))
        return {reply.node.partition_id: reply.value for reply in replies}

    def _tell(self, current: int, started: float, result: Result, evaluate_fn: EvaluateFn | None) -> None:
        """Tell the callbacks of an event, or of the state before the first."""
        central = evaluate_fn(current, result.arrays) if evaluate_fn is not None else None
        if central is not None:
            result.evaluate_metrics_serverapp[current] = central
        progress = self.progress()
        end = RoundEnd(
            round=current,
            train=dict(result.train_metrics_clientapp.get(current, {})),
            evaluate=dict(result.evaluate_metrics_clientapp.get(current, {})),
            central=dict(central or {}),
            **asdict(progress),
            wall_seconds=time.monotonic() - started,
            sent=self.report.sent,
            accepted=self.report.accepted,
            rejected=dict(self.report.rejected),
        )
        for callback in self.on_round_end:
            callback(end)


def _check_empty(arrays: ArrayRecord) -> None:
    if len(arrays):
        raise ValueError(
            f"initial_arrays has the keys {sorted(arrays)}; valid is an empty ArrayRecord: "
            "models live on the nodes"
        )


def _introduced(node: Node, content: RecordDict) -> _Appointment:
    """Return a node's answer to a hello."""
    kappa = content.config_records.get("hello", ConfigRecord()).get("kappa")
    if not isinstance(kappa, int) or kappa < 1:
        raise PayloadError("bad hello", f"kappa={kappa!r}, expected an integer >= 1")
    return _Appointment(node.node_id, kappa, *_next_communication(content, "hello", after=-1))


def _next_communication(content: RecordDict, key: str, after: int) -> tuple[int, list[int]]:
    """Return the iteration and the neighbours of a node's next communication."""
    record = content.config_records.get(key, ConfigRecord())
    k, want = record.get("next"), record.get("want", [])
    if not isinstance(k, int) or k <= after:
        raise PayloadError("bad next", f"next={k!r}, expected an iteration after {after}")
    if not isinstance(want, list):
        raise PayloadError("bad next", f"want={want!r}, expected a list of partition ids")
    return k, [j for j in want if isinstance(j, int)]


def _seen(content: RecordDict, n: int) -> Sight:
    """Return a node's model (n,) and what it tells of it; what is not finite is for the monitor to say."""
    arrays = only_arrays(content)
    if len(arrays) != 1:
        raise PayloadError("bad arrays", f"{len(arrays)} arrays, expected the model alone")
    model = view(next(iter(arrays.values())))
    if model.shape != (n,):
        raise PayloadError("wrong shape", f"the model has {model.shape}, expected ({n},)")
    told = next(iter(content.metric_records.values()), MetricRecord())
    objective, at_mean = (told.get(key) for key in ("objective", "mean-objective"))
    return Sight(
        model.astype(np.float64),
        float(objective) if isinstance(objective, int | float) else math.nan,
        float(at_mean) if isinstance(at_mean, int | float) else math.nan,
    )
