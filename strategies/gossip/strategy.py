"""The strategy of gossip methods: its options, start and monitor; ``algorithm.py`` has an event."""

from collections.abc import Mapping
from contextlib import ExitStack
from logging import INFO, WARNING
from typing import Any, Unpack

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.gossip.algorithm import Algorithm
from hedgerow.strategies.gossip.exposure import Exposure, NoisyReleases
from hedgerow.strategies.gossip.links import OpenLinks, SealedLinks, sealed_sizes
from hedgerow.strategies.gossip.method import GossipMethod, Scalar
from hedgerow.strategies.gossip.monitor import Looks, Monitor
from hedgerow.strategies.gossip.sites import Site, Sites
from hedgerow.strategies.gossip.state import State
from hedgerow.strategies.messenger import Messenger
from hedgerow.strategies.node import Node, placed
from hedgerow.strategies.options import FederationOptions
from hedgerow.strategies.parts import Part
from hedgerow.strategies.parts.privacy import PrivacyReport
from hedgerow.strategies.router import Router
from hedgerow.wire.checks import int_at_least

# Default number of lost events in a row that end a run: an event may have only one receiver.
_MAX_LOST = 10


class GossipOptions(FederationOptions, total=False):
    """Options that every gossip strategy takes, by keyword; see ``Gossip``."""

    num_iterations: int | None
    monitor: Monitor | None
    sealed: bool
    site: Site | None


def places_in(options: GossipOptions) -> int:
    """Return the nodes m of the graph: ``num_clients`` if given, else ``min_available_nodes``."""
    if (places := options.get("num_clients")) is not None:
        int_at_least(1, num_clients=places)
        return places
    places = options.get("min_available_nodes", 2)
    int_at_least(1, min_available_nodes=places)
    return places


class Gossip(Algorithm):
    """A strategy that relays payloads from node to node and holds no model.

    **A round is one communication event**: the iteration k at which some nodes communicate.

    1. The neighbors that they chose publish their state at the start of iteration k, ``query.publish``.
    2. Each communicating node gets exactly those payloads (ConfigRecord ``bundle``, sender: bytes) in a
       ``train.update``, makes its communication step, and replies with its next communication and the
       neighbors that it then wants payloads from (ConfigRecord ``next``: ``next``, ``want``), and scalars
       (MetricRecord).

    All publishing for k ends before any update for k begins: the iteration is Jacobi, whatever the order of
    messages. Before its first event each node is sent its settings (``query.hello``) and replies with its
    ``kappa``, ``next`` and ``want`` (ConfigRecord ``hello``).

    A lost payload is missing in its receivers' bundles. An offline node is a straggler: the graph stays the
    same, its neighbors continue with the other payloads, and it misses its communications. A node that joins
    or reconnects is sent its settings, and takes part from its next communication. No event is repeated. An
    event with fewer than ``min_train_nodes`` valid updates is lost, unless all communicating nodes are
    offline and others are online; more than ``max_repeats`` lost events in a row end the run. A monitor's
    stopping rule ends a run only after all m nodes have communicated.

    A node with a ClientApp that refused an update may have lost its state: it is sent its settings again
    before the next event, which does not affect a node that knows them. A node that has communicated and is
    at its first communication again has restarted, from W^0.

    A round's training metrics are ``iteration`` (k), ``receivers``, ``deliveries``, ``lost-payloads``,
    ``refused`` and, since the start, ``missed`` communications and nodes that ``restarted``; with noise,
    ``PrivacyReport.metrics`` of the node with the most releases; the weighted means of the nodes' metrics;
    and ``gradients`` and ``communications`` so far, as means over all nodes.

    ``start`` takes an **empty** ArrayRecord and returns one: models live on the nodes. Its ``num_rounds`` is
    the largest number of events, its ``evaluate_fn`` gets the empty arrays, after the monitor has looked. It
    raises ValueError for other arrays, TooFewRepliesError also if no node answers a hello, and
    DivergenceError if the nodes' models diverge.

    Parameters
    ----------
    method : GossipMethod
        The method.
    privacy : NoisyReleases or None (default: None)
        The noise on the nodes' gradients, which is accounted for after each round; None without.
    node_settings : Mapping[str, Scalar] (default: none)
        Further settings that every node is sent once.
    num_iterations : int or None (default: None)
        The run ends with W^K after K iterations, >= 1; None if only ``num_rounds`` ends it.
    monitor : Monitor or None (default: None)
        Looks at all models after every iteration, which only a simulation allows, and may end the run. If
        most nodes refuse it, no node is queried again.
    sealed : bool (default: False)
        Whether payloads, and the seed of the sensing matrices, are sealed from neighbor to neighbor
        (``hedgerow.wire.sealed``). Metrics then also have the number of nodes that are ``pinning`` their
        neighbors' keys, and of refused payloads: ``withheld`` and ``unopened`` ones, with
        ``unopened-<reason>`` for each reason.
    site : Site or None (default: None)
        One of several sites, with its own nodes; ServerApps exchange payloads between sites directly. If all
        sites and nodes stay online, models are equal to those with one hub, bit for bit. Events are those in
        which this site's nodes communicate or publish, the sender's site books payloads, and metrics and the
        privacy report cover this site's nodes. There is no monitor, as no party sees all models. Metrics also
        have the number of neighboring sites that did not take part (``lost-sites``) and the time spent
        waiting for sites (``site-seconds``).
    **options
        See ``FederationOptions``. ``num_clients`` is the number of nodes m, ``min_available_nodes`` is all of
        them by default, ``max_repeats`` is 10 by default; ``fraction_evaluate`` has no effect.
    """

    def __init__(
        self,
        method: GossipMethod,
        *,
        privacy: NoisyReleases | None = None,
        node_settings: Mapping[str, Scalar] | None = None,
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
                f"min_available_nodes must be from 1 to {len(here)}, the number of nodes here, got "
                f"{options['min_available_nodes']!r}"
            )
        if site is not None and monitor is not None:
            raise ValueError("monitor must be None with a site: no party sees all models")
        options["num_clients"] = method.num_nodes
        federation = Federation(**options)
        seed = federation.settings.seed
        if seed >= 2**63:
            raise ValueError(f"seed must be an integer < 2^63, got {seed!r}")
        self.method = method
        self.num_iterations = num_iterations
        self.monitor = monitor
        self.sealed = sealed
        self.site = site
        sizes = sealed_sizes(method.sizes) if sealed else method.sizes
        noise = {} if privacy is None else privacy.noise.instructions()
        self.node_settings = {**noise, **(node_settings or {})}
        common = {"seed": seed, "sealed": sealed, **self.node_settings}
        self.carrier = (
            Router(method.graph, sizes)
            if site is None
            else Sites(site, method, sizes, num_iterations, common)
        )
        self.links = SealedLinks(method, self.carrier) if sealed else OpenLinks(method)
        self.looks = None if monitor is None else Looks(monitor, method.dim)
        self.exposure: Exposure | None = None
        if privacy is not None and privacy.noise.mode != "none":
            self.exposure = Exposure(privacy, method.num_nodes, self.looks)
        self.num_here = len(here)
        self._open = ExitStack()
        parts: list[Part | None] = [self.carrier, self.looks, self.links, self.exposure]
        super().__init__(federation, parts=[part for part in parts if part is not None])
        federation.members.admits = self._admits

    def saved(self, state: State) -> dict[str, Any]:
        """Return a state for a checkpoint."""
        return state.state_dict()

    def restored(self, saved: Mapping[str, Any]) -> State:
        """Return the state of a checkpoint."""
        return State.from_dict(saved)

    def _admits(self, node: Node) -> str | None:
        here = self.site is None or self.site.of(node.partition_id, self.method.num_nodes) == self.site.own
        return placed(node) or (None if here else "another site's")

    def _set_up(self, arrays: ArrayRecord, grid: Grid) -> ArrayRecord:
        if len(arrays):
            raise ValueError(
                f"initial_arrays must be an empty ArrayRecord, got the keys {sorted(arrays)}: models live "
                "on the nodes"
            )
        self._open.enter_context(self.carrier.joined(self.iterations))
        return arrays

    @property
    def iterations(self) -> int:
        """k + 1 after the event of iteration k."""
        return 0 if self.state is None else self.state.iterations

    @property
    def total_iterations(self) -> int | None:
        """K, ``num_iterations``; the stopping rule may end the run earlier."""
        return self.num_iterations

    @property
    def finished(self) -> bool:
        """Whether all iterations are done or the stopping rule is met, and no event is in progress."""
        if self._pending is not None:
            return False
        if self.looks is not None and self.looks.stopped:
            return True
        if self.state is None or not self.state.appointments:
            return False
        return self.carrier.over(self.next_own(self.state))

    def start(self, *args: Any, **options: Any) -> Result:
        """Run the strategy, see ``FederatedStrategy``.

        A site listens for the others during the run; OSError if its address cannot be bound.
        """
        with self._open:
            return super().start(*args, **options)

    def disclosed(self) -> PrivacyReport | None:
        """Return the report of what nodes may have sent so far; None without noise."""
        return None if self.exposure is None else self.privacy_report()

    def privacy_report(self, delta: float | None = None) -> PrivacyReport:
        """Account for the node with the most releases so far, at a total delta (None: that of one release).

        Requested releases count, or those of the node's own ledger if they are more. The nodes' data are
        disjoint, so the number of nodes does not matter. ValueError without noise.
        """
        if self.exposure is None:
            raise ValueError("privacy must be noise to account for, got None")
        return self.exposure.report(delta)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Let the monitor look at every iteration until the next event; there is no other evaluation.

        The round's record has the first of them, ``iterations``; ``Monitor.after_event`` has its models.
        """
        state = self.state
        if self.looks is None or state is None or self.completed_rounds != server_round:
            return []
        there = self.federation.gather(grid).present
        run = RoundContext(self.federation, server_round, {}, there, self.parts, grid)
        until = self.next_own(state)
        until = self.num_iterations if until is None else until
        ready, all_in = self.ready(state, run), self.all_communicated(state)
        Messenger(run).driven(self.looks.until(until, ready, run, may_stop=all_in, ended=self.iterations))
        return []

    def aggregate_evaluate(self, server_round: int, replies: Any) -> MetricRecord | None:
        """Return the monitor's metrics right after the event."""
        if self.looks is None or self.completed_rounds != server_round:
            return None
        return self.looks.metrics(self.iterations)

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t├──> Method: %s on %d nodes", self.method.name, self.method.num_nodes)
        for line in (*self.carrier.describe(), *self.method.describe()):
            log(INFO, "\t├──> %s", line)
        if self.exposure is not None:
            noise = self.exposure.noise
            log(INFO, "\t├──> Privacy: %s", noise.mode)
            if not (report := noise.report(1)).guaranteed:
                log(WARNING, "Privacy mode '%s' guarantees nothing: %s.", noise.mode, report.why)
        log(INFO, "\t└──> Message: %d bits", self.method.sizes.message_bits)
