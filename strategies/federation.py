"""The nodes of a run, their messages, the model's layout, traffic and simulated time."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, Unpack

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from hedgerow.strategies.evaluation import FederatedEvaluation
from hedgerow.strategies.inbox import ExchangeReport, Inbox, Reply
from hedgerow.strategies.limits import OVERSTATED, KnownSizes, Limits
from hedgerow.strategies.membership import Membership
from hedgerow.strategies.node import Node
from hedgerow.strategies.options import FederationOptions, FederationSettings
from hedgerow.strategies.roster import Roster
from hedgerow.wire.clock import Clock
from hedgerow.wire.compress import compressed_part
from hedgerow.wire.frozen import FROZEN, FROZEN_CHECKSUM, LOCAL_LAYERS, local_keys
from hedgerow.wire.ledger import Ledger
from hedgerow.wire.printable import quoted
from hedgerow.wire.records import Layout, checksum, only_record, to_record, view


def only_arrays(content: RecordDict) -> ArrayRecord:
    """Return a reply's one ArrayRecord; raise PayloadError (``bad arrays``) otherwise."""
    return only_record(content, ArrayRecord, "bad arrays")


class Federation:
    """The nodes of a run, the current exchange, traffic and simulated time.

    Parameters
    ----------
    clients : int or None (default: None)
        Number of clients; None for ``num_clients`` of the options.
    **options
        See ``FederationOptions``.

    Attributes
    ----------
    members : Membership
        Who is there.
    limits : Limits
        What is believed of replies.
    evaluation : FederatedEvaluation
        Federated evaluation and metrics.
    ledger : Ledger
        Every transfer so far.
    clock : Clock
        Simulated time.
    completed : int
        Number of completed rounds.
    """

    def __init__(self, clients: int | None = None, /, **options: Unpack[FederationOptions]) -> None:
        self.settings = FederationSettings(**options)
        wanted = self.settings.num_clients if clients is None else clients
        if wanted != self.settings.num_clients is not None:
            raise ValueError(f"num_clients must be {wanted}, got {self.settings.num_clients!r}")
        places = self.settings.min_available_nodes if wanted is None else wanted or None
        quorum = self.settings.min_available_nodes
        if wanted is None or (clients is not None and self.settings.num_clients is None):
            quorum = places or quorum
        self.members = Membership(self.settings, places, quorum)
        self.limits = Limits(self.settings)
        self.timeout = 3600.0
        self._loaded = False
        # Keys that the method trains though they are frozen in the model.
        self.trained: frozenset[str] = frozenset()
        self.reset()

    @classmethod
    def of(cls, roster: Roster, ledger: Ledger, timeout: float) -> Self:
        """Return a federation of gathered nodes, for exchanges outside a run."""
        federation = cls(len(roster), min_available_nodes=1)
        federation.members.roster, federation.ledger, federation.timeout = roster, ledger, timeout
        federation.layout = Layout((), (), ())
        return federation

    def reset(self) -> None:
        """Forget the run."""
        self.ledger = Ledger()
        self.clock = Clock()
        self.completed = 0
        self.layout: Layout | None = None
        # All keys of the model, and the frozen arrays; the clients that are sent them next.
        self._keys: tuple[str, ...] = ()
        self.frozen = ArrayRecord()
        self.lacking: set[int] = set()
        # Clients that are at work beside the round, and not asked to evaluate.
        self.busy: Collection[int] = ()
        self._frozen_checksum: tuple[ArrayRecord | None, str] = None, ""
        self.members.reset()
        self.limits.reset()
        self.evaluation = FederatedEvaluation(self.settings)
        self._exchange = Inbox([], "", lambda node, content: None)

    @property
    def num_clients(self) -> int:
        """Number of clients; without a limit, of those that have come so far."""
        return self.members.num_clients

    def begin(self, timeout: float) -> bool:
        """Begin a run with a round's deadline in seconds; return whether it resumes from a loaded state."""
        resumed, self._loaded = self._loaded, False
        if not resumed:
            self.reset()
        self.timeout = timeout
        return resumed

    # Nodes.

    def open_round(self, grid: Grid) -> Roster:
        """Begin an attempt of a round; return the roster, see ``gather``."""
        return self.gather(grid)

    def gather(self, grid: Grid) -> Roster:
        """Return the roster: gathered on the first call, refreshed later. First reported sizes count."""
        begins = self.members.roster is None
        roster = self.members.gather(grid, self.timeout, self.completed)
        if begins:
            self.limits.claims.counted = getattr(grid, "counts_examples", lambda: False)()
        if roster.known is not None:
            if begins:
                self.limits.claims.sizes = KnownSizes(roster.known.sizes)
            return roster
        known = dict(self.limits.claims.sizes)
        reported = {node.partition_id: node.num_examples for node in roster.nodes}
        sizes = {i: float(size) for i, size in reported.items() if size}
        self.limits.claims.sizes = known | sizes if begins else sizes | known
        if self.settings.registry is not None:
            most = {node.partition_id: node.max_examples for node in roster.nodes}
            self.limits.registered = {i: float(size) for i, size in most.items() if size is not None}
        if overstated := self.limits.overstated():
            self.members.bar(overstated, OVERSTATED, self.completed)
        return roster

    # Exchanges.

    @property
    def inbox(self) -> Inbox:
        """The inbox of the last training exchange."""
        return self._exchange

    @property
    def report(self) -> ExchangeReport:
        """Message counts of the last training exchange."""
        return self._exchange.report

    @property
    def whole_report(self) -> ExchangeReport:
        """``report``, with the other exchanges that count with the training exchange."""
        return self.report

    def enough(self) -> bool:
        """Return whether the training exchange got its minimum, or all replies if fewer nodes take part."""
        report = self._exchange.report
        chosen = report.sent + report.rejected["offline"]
        return report.accepted >= min(self.settings.min_train_nodes, chosen)

    def open_exchange(
        self,
        server_round: int,
        nodes: Sequence[Node],
        check: Callable[[Node, RecordDict], Any],
        *,
        offline: int = 0,
        group: str = "",
    ) -> Inbox:
        """Open a round's training exchange and return the inbox for its replies."""
        self.limits.begin(server_round)
        self.evaluation.trained_loss = None
        self._exchange = Inbox(nodes, group or str(server_round), check)
        if offline:
            self._exchange.report.rejected["offline"] = offline
        self._exchange.report.rejected += self.members.left_out(server_round)
        return self._exchange

    def accept(self, replies: Iterable[Message]) -> Iterator[Reply]:
        """Yield the valid replies of the training exchange in the order of partition ids."""
        yield from self._exchange.accept(replies)
        self.judge(self._exchange)

    def judge(self, exchange: Inbox) -> None:
        """End an exchange: count its refused replies, and quarantine nodes after several in a row.

        A node that failed may lack the frozen arrays, and is sent them with its next message.
        """
        if self.frozen:
            self.lacking |= exchange.report.errors.keys()
        self.members.judge(exchange.refused, exchange.used, self.completed)
        exchange.close()

    # FederatedEvaluation and metrics.

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send the global model to a share of the online nodes."""
        if self.settings.fraction_evaluate == 0.0:
            return []
        roster = self.gather(grid)
        idle = [i for i in roster.present if i not in self.busy] if self.busy else roster.present
        nodes = [roster.nodes[i] for i in self.evaluation.drawn(idle, server_round)]
        content = self.evaluated({**config, "server-round": server_round}, arrays)
        return self.evaluation.instruct(nodes, content, server_round, self.timeout) if nodes else []

    def evaluated(self, config: Mapping[str, Any], arrays: ArrayRecord) -> RecordDict:
        """Return the content of a message to nodes that evaluate a model."""
        frozen = self.frozen_config if self.frozen else {}
        names = self.settings.arrayrecord_key, self.settings.configrecord_key
        return RecordDict({names[0]: self.travelling(arrays), names[1]: ConfigRecord({**config, **frozen})})

    def aggregate_evaluate(self, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the nodes' metrics."""
        if self.settings.fraction_evaluate == 0.0:
            return None
        return self.evaluation.aggregate(replies, self.limits.claims.metrics_ratio)

    # Models as vectors.

    def vector(self, arrays: ArrayRecord) -> NDArray[Any]:
        """Store the model's layout; return the arrays as a vector (M,): float64 if any is, else float32."""
        if self.layout is None:
            frozen = (self._frozen_keys() - self.trained) | self._local_keys(arrays)
            self.frozen = ArrayRecord({key: arrays[key] for key in arrays if key in frozen})
            self._keys = tuple(arrays)
        travelling = self.travelling(arrays)
        if self.layout != (found := Layout.of(travelling)):  # Else it keeps the run's first integers.
            self.layout = found
        return self.known_layout().flatten(travelling, found.float_type)

    def _frozen_keys(self) -> frozenset[str]:
        """Return the keys of the settings, or those that all nodes name."""
        if self.settings.frozen is not None:
            return frozenset(self.settings.frozen)
        if self.members.roster is None or self.members.roster.known is not None:
            return frozenset()
        named = [frozenset(node.frozen) for node in self.members.nodes]
        return frozenset.intersection(*named) if named else frozenset()

    def _local_keys(self, arrays: ArrayRecord) -> frozenset[str]:
        """Return the keys of the layers that nodes keep; ValueError unless they are some of the arrays."""
        patterns = self.settings.local_layers
        local = frozenset(local_keys(patterns, arrays))
        if patterns and not 0 < len(local) < len(arrays):
            which = "none" if not local else "all"
            raise ValueError(
                f"local_layers must match some of the arrays, and not all, got {quoted(patterns)}, which "
                f"matches {which} of {', '.join(arrays) or 'none: nodes have the model'}"
            )
        return local

    def travelling(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the arrays without the frozen ones."""
        if not self.frozen:
            return arrays
        return ArrayRecord({key: array for key, array in arrays.items() if key not in self.frozen})

    def whole(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return a model's arrays with the frozen ones."""
        return ArrayRecord({k: self.frozen[k] if k in self.frozen else arrays[k] for k in self._keys})

    @property
    def frozen_config(self) -> dict[str, str]:
        """The config entry of messages with a model; nothing if no array is frozen."""
        if not self.frozen:
            return {}
        if self._frozen_checksum[0] is not self.frozen:
            ordered = ArrayRecord({key: self.frozen[key] for key in sorted(self.frozen)})
            self._frozen_checksum = self.frozen, checksum(ordered)
        local = {LOCAL_LAYERS: self.settings.local_layers} if self.settings.local_layers else {}
        return {FROZEN_CHECKSUM: self._frozen_checksum[1], **local}

    def frozen_for(self, client: int) -> dict[str, ArrayRecord]:
        """Return the record of frozen arrays of a client's next message, if it lacks them."""
        return {FROZEN: self.frozen} if client in self.lacking else {}

    def known_layout(self) -> Layout:
        """Return the model's layout; RuntimeError before the first round."""
        if self.layout is None:
            raise RuntimeError("No model yet: configure_train or start comes first.")
        return self.layout

    @property
    def num_parameters(self) -> int:
        """The model's parameters as papers count them: without running statistics and counters."""
        return compressed_part(self.known_layout()).size

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return nodes, limits, round, layout, ledger and clock, for a checkpoint."""
        layout = self.known_layout()
        return {
            **self.members.state_dict(),
            **self.limits.state_dict(),
            "round": self.completed,
            "layout": {
                "keys": list(layout.keys),
                "shapes": [list(shape) for shape in layout.shapes],
                "dtypes": list(layout.dtypes),
                **({"origin": dict(layout.origin)} if layout.origin else {}),
            },
            **({"frozen": self._frozen_state()} if self.frozen else {}),
            "ledger": self.ledger.state_dict(),
            "clock": self.clock.state_dict(),
        }

    def _frozen_state(self) -> dict[str, Any]:
        arrays = {key: view(array) for key, array in self.frozen.items()}
        return {"keys": list(self._keys), "arrays": arrays, "lacking": sorted(self.lacking)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint; the next ``begin`` resumes after its round."""
        self.reset()
        self.members.load_state_dict(state)
        self.limits.load_state_dict(state)
        layout = state["layout"]
        shapes = tuple(tuple(s) for s in layout["shapes"])
        self.layout = Layout(tuple(layout["keys"]), shapes, tuple(layout["dtypes"]), layout.get("origin", {}))
        if frozen := state.get("frozen"):
            self._keys, self.frozen = tuple(frozen["keys"]), to_record(frozen["arrays"])
            self.lacking = {int(client) for client in frozen["lacking"]}
        self.completed = int(state["round"])
        self.ledger.load_state_dict(state["ledger"])
        self.clock.load_state_dict(state["clock"])
        self._loaded = True
