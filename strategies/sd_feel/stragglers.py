"""Clients that are slow now and then, or all along, on the simulated clock.

The latency model of SD-FEEL knows one speed of all clients. Here a client's local iterations take some times
as long, by draws of its own; what that costs, each server's clock says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx

from hedgerow.wire.checks import in_range
from hedgerow.wire.printable import quoted
from hedgerow.wire.seeds import Purpose, generator

__all__ = ["ServerClocks", "Stragglers"]

_FORM = re.compile(r"(transient|lasting)\(\s*([^,\s]+)\s*,\s*([^,\s]+)\s*\)")
_VALID = "transient(p,f) or lasting(p,f), with 0 < p <= 1 and 1 <= f <= 1e6"


@dataclass(frozen=True)
class Stragglers:
    """Who is slow, and how slow.

    Parameters
    ----------
    lasting : bool
        Whether a client is slow all along; else each round is drawn anew.
    probability : float
        Of a client, or of a client in a round, in (0, 1].
    slowdown : float
        How many times as long a slow client's iteration takes, 1 to 1e6.

    Raises
    ------
    ValueError
        If a number is out of range.
    """

    lasting: bool
    probability: float
    slowdown: float

    def __post_init__(self) -> None:
        in_range("probability", self.probability, 0.0, 1.0, open_below=True)
        in_range("slowdown", self.slowdown, 1.0, 1e6)

    @classmethod
    def parse(cls, text: str) -> Stragglers | None:
        """Read ``"transient(0.1,10)"`` or ``"lasting(0.1,10)"``; None for an empty text."""
        if not text.strip():
            return None
        match = _FORM.fullmatch(text.strip())
        try:
            if match is None:
                raise ValueError
            return cls(match[1] == "lasting", float(match[2]), float(match[3]))
        except ValueError:
            raise ValueError(f"stragglers is {quoted(text)}; valid is {_VALID}, or empty") from None

    def factor(self, seed: int, server_round: int, client: int) -> float:
        """Return how many times as long a client's iterations take in a round, by a stream of its own."""
        at = 0 if self.lasting else server_round
        rng = generator(seed, round=at, partition_id=client, purpose=Purpose.STRAGGLER)
        return self.slowdown if rng.random() < self.probability else 1.0

    def slowest(self, seed: int, server_round: int, clients: Iterable[int]) -> float:
        """Return the largest factor of some clients; 1 of none."""
        return max((self.factor(seed, server_round, client) for client in clients), default=1.0)


class ServerClocks:
    """A simulated clock for each server, of those that wait for their neighbours and for nobody else.

    Parameters
    ----------
    graph : networkx.Graph
        The servers' graph.
    """

    def __init__(self, graph: nx.Graph) -> None:
        self._near = [sorted({*graph.neighbors(d), d}) for d in range(len(graph))]
        self.seconds = [0.0] * len(graph)

    def work(self, seconds: Sequence[float]) -> None:
        """Let each server's round take its time (D,)."""
        self.seconds = [now + more for now, more in zip(self.seconds, seconds, strict=True)]

    def exchange(self, steps: int, seconds: float) -> None:
        """Let servers exchange models, each step once all neighbours are there, and ``seconds`` long."""
        for _ in range(steps):
            self.seconds = [max(self.seconds[j] for j in near) + seconds for near in self._near]

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds."""
        return {"server-seconds": list(self.seconds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them; ValueError for those of another number of servers."""
        seconds = [float(one) for one in state["server-seconds"]]
        if len(seconds) != len(self._near):
            raise ValueError(f"state has the clocks of {len(seconds)} servers; valid is {len(self._near)}")
        self.seconds = seconds
