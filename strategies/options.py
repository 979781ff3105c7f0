"""The options that every strategy takes."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import Parameter, signature
from typing import Any, Required, TypedDict, get_args, get_origin, get_type_hints

from flwr.app import MetricRecord, RecordDict

from hedgerow.strategies.buffer import Buffer
from hedgerow.strategies.registry import Registry
from hedgerow.strategies.roster import Roster
from hedgerow.strategies.round_end import RoundCallback
from hedgerow.wire.checks import did_you_mean, in_range, int_at_least, is_real, require

MetricsAggregator = Callable[[list[RecordDict], str], MetricRecord]


class FederationOptions(TypedDict, total=False):
    """Options that every strategy takes, by keyword.

    Parameters
    ----------
    seed : int (default: 0)
        Seed of the server's random draws, >= 0.
    fraction_evaluate : float (default: 1.0)
        Share of nodes that evaluate the global model each round, in [0, 1]; 0 for none.
    min_train_nodes : int (default: 1)
        A round with fewer valid replies is repeated; if fewer nodes take part, all of them must reply.
    min_available_nodes : int (default: 2)
        The quorum: how many nodes must be online when the run starts, >= 1. Others may join later.
    num_clients : int or None (default: None)
        Number of places, at least ``min_available_nodes``; partition ids are below it. 0 for no limit, if the
        method supports that; None for ``min_available_nodes``: the run waits for all nodes.
    roster : Roster or None (default: None)
        The nodes, if they were queried before (``Roster.gather``), for example to build a model.
    registry : Registry or None (default: None)
        The nodes that may take part (``Registry.read("nodes.toml")``); None accepts any node.
    frozen : Collection[str] or None (default: None)
        Keys of the arrays that no training changes (``frozen_keys(model)``). Messages have
        their checksum only, and a node that lacks them is sent them once. () for none; None for those that
        all nodes name when they introduce themselves, as this suite's clients do with a task of yours.
    local_layers : str (default: "")
        Patterns of the arrays that each node trains and keeps to itself, such as ``*bn*`` (FedBN) or
        ``linear2.*`` (FedPer), separated by commas. No message has them, but for one that sends the initial
        ones to a node whose model has others. Nodes start from the run's initial ones, which the strategy's
        own model has to the end.
    weighted_by_key, arrayrecord_key, configrecord_key : str
        As in Flower's FedAvg: ``"num-examples"``, ``"arrays"``, ``"config"``.
    train_metrics_aggr_fn, evaluate_metrics_aggr_fn : callable or None (default: None)
        As in Flower's FedAvg; None is the mean weighted by ``weighted_by_key``.
    on_round_end : Sequence[Callable[[RoundEnd], None]] (default: ())
        Called after each round, and once before the first.
    parts : Sequence[Part] (default: ())
        Your own parts, see ``Part``.
    server_step : ServerStep or None (default: None)
        The server's step on the mean change, see ``ServerStep``; None takes the mean itself.
    buffer : int, Buffer or None (default: None)
        Replies K of an update of the model, or a ``Buffer`` with further settings: nodes work on, each from
        the newest model when it begins, and a round is one update. None for rounds that wait for all replies.
    max_repeats : int (default: 2)
        How often a round below its minimum is repeated before the run stops.
    max_wait : float (default: 120.0)
        Seconds to wait for the nodes at the start.
    max_weight_ratio : float (default: 10.0)
        Bound on a node's weight, in multiples of the median of the claimed sizes, >= 1; 0 for no bound. The
        first cut is logged, and the round's metric ``weights-capped`` counts them. A claim above 10^6 medians
        is refused (``claimed size too large``). Not for sizes that the suite dealt itself: ``dealt_sizes``,
        and in simulations on Hedgerow's engine those that this suite's clients count.
    dealt_sizes : Sequence[int] or None (default: None)
        The number of examples of each client, by partition id, if the server deals the data.
    max_update_norm_ratio : float (default: 100.0)
        Bound on an update's norm, in multiples of the usual norm of the rounds before, >= 1; 0 for no bound.
        A larger update is refused (``update too large``), see ``UpdateBound``.
    quarantine_after : int (default: 3)
        A node is quarantined for 2, 4, … 64 rounds after this many refused replies or errors in a row, >= 1;
        0 for never.
    max_loss_ratio : float (default: 1e6)
        The run ends with DivergenceError if a loss is not finite, or exceeds this multiple of its first value
        (or of 1, if that is larger), >= 1; 0 for no bound. The losses are the server's evaluation loss and
        the medians of the nodes' training and evaluation losses.
    """

    seed: int
    fraction_evaluate: float
    min_train_nodes: int
    min_available_nodes: int
    num_clients: int | None
    roster: Roster | None
    registry: Registry | None
    weighted_by_key: str
    arrayrecord_key: str
    configrecord_key: str
    train_metrics_aggr_fn: MetricsAggregator | None
    evaluate_metrics_aggr_fn: MetricsAggregator | None
    on_round_end: Sequence[RoundCallback]
    parts: Sequence[Any]
    server_step: Any
    buffer: int | Buffer | None
    max_repeats: int
    max_wait: float
    max_weight_ratio: float
    dealt_sizes: Sequence[int] | None
    frozen: Collection[str] | None
    local_layers: str
    max_update_norm_ratio: float
    quarantine_after: int
    max_loss_ratio: float


@dataclass(frozen=True)
class FederationSettings:
    """The checked values of ``FederationOptions``."""

    seed: int = 0
    fraction_evaluate: float = 1.0
    min_train_nodes: int = 1
    min_available_nodes: int = 2
    num_clients: int | None = None
    roster: Roster | None = None
    registry: Registry | None = None
    weighted_by_key: str = "num-examples"
    arrayrecord_key: str = "arrays"
    configrecord_key: str = "config"
    train_metrics_aggr_fn: MetricsAggregator | None = None
    evaluate_metrics_aggr_fn: MetricsAggregator | None = None
    on_round_end: Sequence[RoundCallback] = ()
    parts: Sequence[Any] = ()
    server_step: Any = None
    buffer: int | Buffer | None = None
    max_repeats: int = 2
    max_wait: float = 120.0
    max_weight_ratio: float = 10.0
    dealt_sizes: Sequence[int] | None = None
    frozen: Collection[str] | None = None
    local_layers: str = ""
    max_update_norm_ratio: float = 100.0
    quarantine_after: int = 3
    max_loss_ratio: float = 1e6

    def __post_init__(self) -> None:
        for name in ("max_weight_ratio", "max_update_norm_ratio", "max_loss_ratio"):
            ratio = getattr(self, name)
            valid = is_real(ratio) and (ratio == 0 or ratio >= 1)
            require(name, ratio, "a number >= 1, or 0 for no bound", valid)
        for name, kind in (("roster", Roster), ("registry", Registry)):
            value = getattr(self, name)
            require(name, value, f"None or a {kind.__name__}", value is None or isinstance(value, kind))
        for name in ("weighted_by_key", "arrayrecord_key", "configrecord_key"):
            value = getattr(self, name)
            require(name, value, "a text", isinstance(value, str) and bool(value))
        for name in ("train_metrics_aggr_fn", "evaluate_metrics_aggr_fn"):
            value = getattr(self, name)
            require(name, value, "None or a function", value is None or callable(value))
        Buffer.of(self.buffer)
        many, sizes, frozen = self.on_round_end, self.dealt_sizes, self.frozen
        require("on_round_end", many, "a sequence of functions", _all(many, callable))
        require("parts", self.parts, "a sequence of parts", _all(self.parts, lambda one: True))
        valid = sizes is None or _all(sizes, lambda one: is_real(one) and one >= 0)
        require("dealt_sizes", sizes, "None or a sequence of numbers >= 0", valid)
        require("local_layers", self.local_layers, "a text", isinstance(self.local_layers, str))
        valid = frozen is None or _all(frozen, lambda one: isinstance(one, str))
        require("frozen", frozen, "None or a collection of keys", valid)
        require("max_wait", self.max_wait, "a number >= 0", is_real(self.max_wait) and self.max_wait >= 0)
        in_range("fraction_evaluate", self.fraction_evaluate, 0.0, 1.0)
        for name in ("seed", "min_train_nodes", "quarantine_after", "max_repeats"):
            int_at_least(0, **{name: getattr(self, name)})
        int_at_least(1, min_available_nodes=self.min_available_nodes)
        if self.num_clients is None:
            return
        int_at_least(0, num_clients=self.num_clients)
        if 0 < self.num_clients < self.min_available_nodes:
            raise ValueError(
                "num_clients must be 0 (accept any client), or at least min_available_nodes = "
                f"{self.min_available_nodes}, got {self.num_clients!r}"
            )


def _all(values: object, holds: Callable[[Any], bool]) -> bool:
    """Return whether it is a collection, and no text, whose entries are all valid."""
    return isinstance(values, Collection) and not isinstance(values, str | bytes) and all(map(holds, values))


def check_options(cls: type, options: Iterable[str], positional: int = 0) -> None:
    """Raise TypeError unless a class takes keyword arguments of these names, and needs no others.

    ``positional`` is the number of arguments without a name. ``Unpack[…]`` of a class's ``**options`` counts.
    """
    valid, needed = _options(cls)
    if valid is None:
        return
    for name in options:
        if name not in valid:
            meant = did_you_mean(name, valid)
            raise TypeError(
                f"{cls.__name__}() has no parameter {name!r}; its parameters are "
                f"{', '.join(sorted(valid))}.{f' D{meant[1:]}' if meant else ''}"
            )
    if missing := [name for name in needed[positional:] if name not in options]:
        given = ", ".join(sorted(options)) or "none"
        raise TypeError(f"{cls.__name__}() must be given {' and '.join(missing)}, got {given}")


@lru_cache(maxsize=64)
def _options(cls: Any) -> tuple[frozenset[str] | None, tuple[str, ...]]:
    """Return the names of a class's arguments, None if it takes any, and in order of those it must have."""
    names: set[str] = set()
    needed: list[str] = []
    for name, parameter in list(signature(cls.__init__).parameters.items())[1:]:
        if parameter.kind is Parameter.VAR_KEYWORD:
            (options,) = get_args(get_type_hints(cls.__init__).get(name)) or (None,)
            if options is None:
                return None, ()
            hints = get_type_hints(options, include_extras=True)
            names |= hints.keys()
            needed += [key for key, hint in hints.items() if get_origin(hint) is Required]
        elif parameter.kind is not Parameter.VAR_POSITIONAL:
            names.add(name)
            if parameter.default is Parameter.empty:
                needed.append(name)
    return frozenset(names), tuple(needed)
