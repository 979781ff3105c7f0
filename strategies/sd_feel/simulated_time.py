"""The simulated clock of SD-FEEL and its baselines, with optional stragglers.

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data", the latency model of section IV. Stragglers are ours: a slow client's local
iterations take several times as long, by draws of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import networkx as nx

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Exchange
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.parts.part import Part
from hedgerow.strategies.parts.steps import ReportedSteps
from hedgerow.strategies.sd_feel.theory import System, SystemName, inter_seconds, preset, round_seconds
from hedgerow.wire.checks import in_range
from hedgerow.wire.printable import quoted
from hedgerow.wire.seeds import Purpose, generator

_FORM = re.compile(r"(transient|lasting)\(\s*([^,\s]+)\s*,\s*([^,\s]+)\s*\)")
_VALID = "transient(p,f) or lasting(p,f), with 0 < p <= 1 and 1 <= f <= 1e6"


@dataclass(frozen=True)
class Stragglers:
    """Which clients are slow, and by how much.

    Parameters
    ----------
    lasting : bool
        Draw the slow clients once for the run, not in each round.
    probability : float
        Probability that a client is slow, or is slow in a round, in (0, 1].
    slowdown : float
        Factor on the time of a slow client's iteration, 1 to 1e6.
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
            raise ValueError(f"stragglers must be {_VALID}, or empty, got {quoted(text)}") from None

    def factor(self, seed: int, server_round: int, client: int) -> float:
        """Return the factor on the time of a client's iterations in a round, from its own stream."""
        at = 0 if self.lasting else server_round
        rng = generator(seed, round=at, partition_id=client, purpose=Purpose.STRAGGLER)
        return self.slowdown if rng.random() < self.probability else 1.0

    def slowest(self, seed: int, server_round: int, clients: Iterable[int]) -> float:
        """Return the largest factor of some clients; 1 without clients."""
        return max((self.factor(seed, server_round, client) for client in clients), default=1.0)


class SimulatedTime(Part):
    """The simulated clock, from the paper's latency model and the booked bits.

    A compressed reply takes its share of a model's time. With stragglers each server has its own clock: it
    waits for its slowest client, and in gossip for its neighbours in ``graph``; simulated time is the last
    server's. ``system`` None is the paper's system with the size of the trained model. Time is unknown if
    nodes do not report how many iterations they took.
    """

    name = "simulated-time"

    def __init__(
        self,
        scheme: SystemName,
        system: System | None,
        *,
        tau1: int,
        tau2: int,
        gossip_steps: int,
        up_link: str,
        steps: ReportedSteps,
        stragglers: Stragglers | None = None,
        graph: nx.Graph | None = None,
    ) -> None:
        self._scheme, self._system, self._steps = scheme, system, steps
        self._tau1, self._tau2, self._gossip_steps = tau1, tau2, gossip_steps
        self._up_link, self._stragglers = up_link, stragglers
        self._near = [] if graph is None else [sorted({*graph.neighbors(d), d}) for d in range(len(graph))]
        self.forget()

    def forget(self) -> None:
        """Start at zero."""
        self._seconds = [0.0] * len(self._near)
        self._clients: dict[int, list[int]] = {}
        # The seconds of a round without stragglers, and of the mixing after it, by the round's uplink.
        self._constant: dict[float, tuple[float, float]] = {}

    def system(self, federation: Federation) -> System:
        """Return the modelled system."""
        if self._system is not None:
            return self._system
        return System(federation.num_parameters, preset("paper-text").compute)

    def ask(self, exchange: Exchange, run: RoundContext) -> Exchange:
        """Note which clients train for which server."""
        if exchange.kind == "train":
            self._clients = {ask.pool: list(ask.nodes) for ask in exchange.asks}
        return exchange

    def ended(self, run: RoundContext) -> None:
        """Advance the clock by a round."""
        if not self._steps.all_report:
            return
        federation, tau1 = run.federation, self._tau1
        # The largest reply as a share of a model's bits; 1 without replies.
        bits = federation.ledger.largest(run.round, self._up_link)
        uplink = bits / (32 * federation.num_parameters) if bits else 1.0
        mixed = run.round % self._tau2 == 0
        if self._stragglers is None:
            if uplink not in self._constant:
                system = self.system(federation)
                self._constant[uplink] = (
                    round_seconds(self._scheme, system, tau1=tau1, uplink=uplink),
                    inter_seconds(self._scheme, system, alpha=self._gossip_steps),
                )
            alone, mixing = self._constant[uplink]
            federation.clock.advance(alone + mixing if mixed else alone)
            return
        system = self.system(federation)
        for d in range(len(self._seconds)):
            slowest = self._stragglers.slowest(run.seed, run.round, self._clients.get(d, ()))
            self._seconds[d] += round_seconds(
                self._scheme, system, tau1=tau1, slowdown=slowest, uplink=uplink
            )
        if mixed:
            link = inter_seconds(self._scheme, system, alpha=1)
            for _ in range(self._gossip_steps):
                self._seconds = [max(self._seconds[j] for j in near) + link for near in self._near]
        federation.clock.advance(max(self._seconds) - federation.clock.seconds)

    def state_dict(self) -> dict[str, Any]:
        """Return the servers' clocks."""
        return {"server-seconds": list(self._seconds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the servers' clocks; ValueError for another number of servers."""
        seconds = [float(one) for one in state["server-seconds"]]
        if len(seconds) != len(self._near):
            raise ValueError(f"state must have the clocks of {len(self._near)} servers, got {len(seconds)}")
        self._seconds = seconds
