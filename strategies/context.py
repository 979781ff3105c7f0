"""The context of a round: what algorithms, aggregators and parts see beside the state, and record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flwr.app import ArrayRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from hedgerow.strategies.federation import Federation
from hedgerow.strategies.inbox import ExchangeReport


class Hooked(Protocol):
    """The parts of a run, by the hook that they override, see ``Parts``."""

    @property
    def hooks(self) -> Mapping[str, Sequence[Any]]:
        """The parts that override each hook, by its name."""

    @property
    def see_columns(self) -> bool:
        """Whether all of them work without single replies."""


@dataclass(eq=False)
class RoundContext:
    """The context of one attempt of a round: its inputs next to the state, and what it records.

    Parameters
    ----------
    federation : Federation
        The nodes.
    round : int
        From 1.
    config : Mapping
        The caller's config for every node.
    online : Sequence[int]
        Partition ids of the online nodes, ascending.
    parts : Parts
        The parts of the run.
    grid : Grid or None (default: None)
        Carries the messages; None without a network.
    model : Callable[[], NDArray] or None (default: None)
        Returns the model (M,) of the state before the round.
    """

    federation: Federation
    round: int
    config: Mapping[str, Any]
    online: Sequence[int]
    parts: Hooked
    grid: Grid | None = None
    model: Callable[[], NDArray[Any]] | None = None
    # Message counts of the last exchange over the grid; complete once its replies are read.
    report: ExchangeReport = field(default_factory=ExchangeReport)
    # Message counts of all ``Together``.
    whole: ExchangeReport = field(default_factory=ExchangeReport)
    # The nodes whose updates the round has absorbed, and their metrics.
    absorbed: list[int] = field(default_factory=list)
    contents: list[RecordDict] = field(default_factory=list)
    # The same metrics in columns, if there were no single replies.
    table: Mapping[str, NDArray[Any]] | None = None
    # The models that were sent, by id, and their arrays.
    sent: dict[int, tuple[NDArray[Any], ArrayRecord]] = field(default_factory=dict)
    # Whether replies come from a buffer, to messages of rounds of their own.
    buffered: bool = False
    # Further metrics of the round.
    metrics: dict[str, Any] = field(default_factory=dict)
    # The update of the base that nodes hold (see ``Downlink``), if the round moves it.
    update: Mapping[str, Any] | None = None

    @property
    def seed(self) -> int:
        """Seed of the server's random draws."""
        return self.federation.settings.seed

    @property
    def id(self) -> int:
        """Flower's id of the run; a resumed run has another one."""
        return 0 if self.grid is None else self.grid.run.run_id

    def sizes(self, nodes: Sequence[int], claimed: Sequence[float]) -> Sequence[float]:
        """Return |S_i| of nodes (K,): the examples that each claimed first, up to the run's bound."""
        return self.federation.limits.weights_of(nodes, claimed)

    def known_sizes(self, nodes: Sequence[int], otherwise: float) -> Sequence[float]:
        """Return |S_i| of nodes (K,), or ``otherwise`` for one that has claimed none."""
        known, weight = self.federation.limits.claims.sizes, self.federation.limits.weight_of
        return [weight(i) if i in known else otherwise for i in nodes]

    def book(
        self, link: str, ends: Sequence[tuple[int, int]], payloads: Sequence[int], bits: int | None = None
    ) -> None:
        """Book transfers between servers, one for each (source, target), with their payloads in bytes.

        ``bits`` are the nominal bits of one; None for a model's.
        """
        if ends:
            sources, targets = zip(*ends, strict=True)
            bits = 32 * self.federation.num_parameters if bits is None else bits
            self.federation.ledger.book_all(self.round, link, sources, targets, bits, payloads)
