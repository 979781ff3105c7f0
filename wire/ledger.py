"""The ledger: every transfer of a run, in the paper's bits and in the bytes that are sent.

Both are recorded because they differ: a paper counts 32 bits per parameter, while a serialised record also
has headers and keys. The links of the modelled system (``client->edge``, ``edge->edge``, …) and the real
links, through Flower's hub or between orchestrators, are recorded under separate names.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HUB_TO_NODE = "hub->node"
NODE_TO_HUB = "node->hub"
# Everything that orchestrators send each other directly.
PEER_TO_PEER = "peer->peer"
_REAL = (HUB_TO_NODE, NODE_TO_HUB, PEER_TO_PEER)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer: ``nominal_bits`` is the paper's count, ``payload_bytes`` what is serialized."""

    round: int
    link: str
    src: int
    dst: int
    nominal_bits: int
    payload_bytes: int

    @property
    def bits(self) -> Sequence[int]:
        """Its nominal bits."""
        return (self.nominal_bits,)

    def each(self) -> Iterable["Transfer"]:
        """Yield it."""
        yield self


@dataclass(frozen=True, slots=True)
class _Many:
    """Transfers that were recorded together."""

    round: int
    link: str
    src: Sequence[int]
    dst: Sequence[int]
    nominal_bits: int | Sequence[int]
    payload_bytes: Sequence[int]

    @property
    def bits(self) -> Sequence[int]:
        """Each transfer's nominal bits."""
        bits = self.nominal_bits
        return [bits] * len(self.src) if isinstance(bits, int) else bits

    def each(self) -> Iterable[Transfer]:
        for src, dst, bits, size in zip(self.src, self.dst, self.bits, self.payload_bytes, strict=True):
            yield Transfer(self.round, self.link, src, dst, bits, size)


@dataclass(frozen=True, slots=True)
class Traffic:
    """A sum of transfers."""

    messages: int = 0
    nominal_bits: int = 0
    payload_bytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.messages + other.messages,
            self.nominal_bits + other.nominal_bits,
            self.payload_bytes + other.payload_bytes,
        )


class Ledger:
    """Totals by link over the whole run, and the single transfers of the current round."""

    def __init__(self) -> None:
        self._booked: list[Transfer | _Many] = []
        self._totals: dict[str, Traffic] = {}

    def book(self, round: int, link: str, src: int, dst: int, nominal_bits: int, payload_bytes: int) -> None:
        """Record one transfer from ``src`` to ``dst`` (partition or server ids) over ``link``."""
        self._begin(round)
        self._booked.append(Transfer(round, link, src, dst, nominal_bits, payload_bytes))
        self._totals[link] = self._totals.get(link, Traffic()) + Traffic(1, nominal_bits, payload_bytes)

    def book_all(
        self,
        round: int,
        link: str,
        src: Sequence[int],
        dst: Sequence[int],
        nominal_bits: int | Sequence[int],
        payload_bytes: Sequence[int],
    ) -> None:
        """Record transfers over one link; ``nominal_bits`` are one number for all, or one for each."""
        self._begin(round)
        many = _Many(round, link, src, dst, nominal_bits, payload_bytes)
        self._booked.append(many)
        sums = Traffic(len(src), sum(many.bits), sum(payload_bytes))
        self._totals[link] = self._totals.get(link, Traffic()) + sums

    def _begin(self, round: int) -> None:
        if self._booked and self._booked[-1].round != round:
            self._booked.clear()

    @property
    def transfers(self) -> list[Transfer]:
        """The single transfers of the current round."""
        return [one for entry in self._booked for one in entry.each()]

    def largest(self, round: int, link: str) -> int:
        """Return the most nominal bits of a round's transfers over a link; 0 if there are none."""
        here = (one for one in self._booked if one.link == link and one.round == round)
        return max((max(one.bits, default=0) for one in here), default=0)

    def by_link(self) -> dict[str, Traffic]:
        """Return the run's total for each link, in alphabetical order."""
        return dict(sorted(self._totals.items()))

    def total(self, link: str | None = None) -> Traffic:
        """Return the run's total over one link, or over all links of the modeled system."""
        if link is not None:
            return self._totals.get(link, Traffic())
        modelled = (traffic for name, traffic in self._totals.items() if name not in _REAL)
        return sum(modelled, Traffic())

    def state_dict(self) -> dict[str, Any]:
        """Return the totals, for a checkpoint."""
        return {link: [t.messages, t.nominal_bits, t.payload_bytes] for link, t in self.by_link().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the totals of a checkpoint."""
        self._booked.clear()
        self._totals = {link: Traffic(*(int(n) for n in numbers)) for link, numbers in state.items()}
