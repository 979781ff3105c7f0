"""Observation of edge servers that have no centre: a process that they report to, and that none needs.

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data", section III: u, the weighted mean of the servers' models, which no server has.
Ours: who computes it. A server tells the monitor its model where u is to be evaluated, from a thread of its
own that its rounds never wait for; what the monitor does not take is counted, and lost to the record alone.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING
from math import isfinite
from typing import Any

import networkx as nx
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from hedgerow.strategies.edges.mixers import consensus_error, robust_mean
from hedgerow.strategies.peers import UNREADABLE, PeerChannel, PeerCredentials, Topic
from hedgerow.strategies.rounds import EvaluateFn, Progress, RoundCallback, RoundEnd
from hedgerow.strategies.topology import as_graph
from hedgerow.wire.budget import Budget
from hedgerow.wire.checks import int_at_least, positive
from hedgerow.wire.ledger import Traffic
from hedgerow.wire.records import Layout, PayloadError
from hedgerow.wire.robust_means import parse_aggregation

__all__ = ["EdgeMonitor", "Reporter", "layout_digest", "run_digest"]

# Reports that wait to be sent at a server, and that wait for other servers' at the monitor.
_WAITING = 4
_LARGEST_HEADER = 1 << 12
_HEADER_LENGTH = 4
_MOST = 2**63
_MOST_LINKS = 16
_LONGEST_NAME = 64
# Seconds between two looks at what came.
_PAUSE = 0.5


def run_digest(
    graph: nx.Graph, *, tau1: int, tau2: int, seed: int, aggregation: str, **others: object
) -> str:
    """Return what is the same at servers, and a monitor, that make one run."""
    told = {
        "tau1": tau1,
        "tau2": tau2,
        "seed": seed,
        "aggregation": aggregation,
        "edges": sorted(sorted(edge) for edge in graph.edges),
        "servers": len(graph),
        **others,
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def layout_digest(layout: Layout) -> str:
    """Return what says that models have the same entries in the same order."""
    return hashlib.sha256(json.dumps([layout.keys, layout.shapes, layout.dtypes]).encode()).hexdigest()


def _vector_type(layout: Layout) -> np.dtype[Any]:
    """Return the dtype of a model as a vector, as of ``Federation.vector``."""
    floats = (dtype for dtype in layout.dtypes if np.dtype(dtype).kind == "f")
    return np.dtype(np.result_type(np.float32, *floats))


def largest_report(layout: Layout) -> int:
    """Return how many bytes a report has at most."""
    return _HEADER_LENGTH + _LARGEST_HEADER + 8 * layout.size


@dataclass(frozen=True)
class _Report:
    """What one server says after a round: its model (M,), |S| of its cluster, and what it has spent."""

    model: NDArray[Any]
    size: float
    progress: Progress

    def encoded(self) -> bytes:
        told = self.progress
        header = json.dumps(
            {
                "size": self.size,
                "iterations": told.iterations,
                "bits": told.bits,
                "payload-bytes": told.payload_bytes,
                "sim-seconds": told.sim_seconds,
                "links": {
                    name: [one.messages, one.nominal_bits, one.payload_bytes]
                    for name, one in told.by_link.items()
                },
            }
        ).encode()
        return len(header).to_bytes(_HEADER_LENGTH, "big") + header + self.model.tobytes()

    @classmethod
    def decoded(cls, payload: bytes | bytearray, layout: Layout) -> _Report:
        """Return what a server, which may lie, has sent; PayloadError where it cannot be used."""
        end = _HEADER_LENGTH + int.from_bytes(payload[:_HEADER_LENGTH], "big")
        try:
            header = json.loads(payload[_HEADER_LENGTH:end])
            size, seconds = float(header["size"]), header["sim-seconds"]
            iterations = header["iterations"]
            progress = Progress(
                iterations=None if iterations is None else _count(iterations),
                bits=_count(header["bits"]),
                payload_bytes=_count(header["payload-bytes"]),
                by_link=_links(header["links"]),
                sim_seconds=None if seconds is None else float(seconds),
            )
        except UNREADABLE as error:
            raise PayloadError("unreadable", "report") from error
        if not (isfinite(size) and size > 0 and isfinite(progress.sim_seconds or 0.0)):
            raise PayloadError("unreadable", "report")
        dtype = _vector_type(layout)
        if len(payload) - end != layout.size * dtype.itemsize:
            raise PayloadError("wrong size", "of a model")
        model = np.frombuffer(payload, dtype, offset=end)
        if not np.isfinite(model).all():
            raise PayloadError("non-finite", "model")
        return cls(model, size, progress)


def _count(told: object) -> int:
    if isinstance(told, int) and 0 <= told < _MOST:
        return told
    raise ValueError("not a count")


def _links(told: Mapping[str, Sequence[object]]) -> dict[str, Traffic]:
    if len(told) > _MOST_LINKS or any(len(name) > _LONGEST_NAME or not name.isascii() for name in told):
        raise ValueError("not the links of a server")
    return {name: Traffic(*(_count(number) for number in numbers)) for name, numbers in sorted(told.items())}


class Reporter:
    """A server's end: takes reports at once, and sends them from a thread of its own.

    Parameters
    ----------
    channel : PeerChannel
        Open; the monitor is a listener of it.
    monitor : int
        Its number there.
    timeout : float
        Seconds that a report may take to be sent, > 0.

    Attributes
    ----------
    lost : int
        Reports that the monitor did not take, or that there was no room for.
    """

    def __init__(self, channel: PeerChannel, monitor: int, timeout: float) -> None:
        self._channel, self._monitor, self._timeout = channel, monitor, timeout
        self._waiting: queue.Queue[tuple[int, bytes] | None] = queue.Queue(_WAITING)
        self.lost = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._send, name="to the monitor", daemon=True)
        self._thread.start()

    def report(self, server_round: int, model: NDArray[Any], size: float, progress: Progress) -> int:
        """Have a report sent when the monitor takes it, and return its bytes; lost where too many wait."""
        told = _Report(model, size, progress).encoded()
        try:
            self._waiting.put_nowait((server_round, told))
        except queue.Full:
            self.lost += 1
            return 0
        return len(told)

    def close(self, seconds: float) -> None:
        """Wait for the reports that are on their way, not longer than ``seconds``."""
        self._closing.set()
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            log(WARNING, "The monitor is late: its last reports may be lost.")
        self._thread.join(seconds)

    def _send(self) -> None:
        while not (self._closing.is_set() and self._waiting.empty()):
            try:
                one = self._waiting.get(timeout=_PAUSE)
            except queue.Empty:
                continue
            if one is None:
                return
            server_round, told = one
            if not self._channel.tell(self._monitor, Topic(server_round, 0), told, self._timeout):
                self.lost += 1
                if self.lost == 1:
                    log(WARNING, "The monitor does not take the report of round %d.", server_round)


class EdgeMonitor:
    """The monitor as what a ServerApp runs: no strategy, for it sends nothing to anyone.

    It waits for the servers' reports of the rounds in which u is evaluated, and tells callbacks of each
    as a strategy that emulates the servers would: u's metrics in ``central``, ``consensus-error`` in
    ``train``, traffic as the servers' sum, simulated seconds as the latest server's.

    Parameters
    ----------
    peers : Sequence[str]
        ``host:port`` of each edge server.
    address : str
        Of this process, ``host:port``, as the servers call it.
    every : int
        Rounds between two evaluations, as the servers have it, >= 1.
    topology, tau1, tau2, alpha, exact_if_complete, seed, aggregation
        As of the servers: who has other settings is refused.
    credentials : PeerCredentials or None (default: None)
        Of this process; its certificate is for the number after the last server's.
    listen : str (default: "")
        Where it listens, if not at its address.
    patience : float (default: 600.0)
        Seconds after a round's first report, and the last of each server that is late, until it is evaluated
        without them, > 0; one that was late is not waited for again before it reports.
    on_round_end : Sequence[Callable[[RoundEnd], None]] (default: ())
        Told of each evaluated round.

    Notes
    -----
    What servers say of themselves is believed: one that lies makes the observation wrong, and no model. Under
    a robust ``aggregation`` u is what the rule takes of the servers' models.

    Raises
    ------
    ValueError
        If a parameter is out of range, naming it, its value and what is valid.
    """

    # What a run may spend, of iterations or simulated seconds; set before ``start``.
    budget: Budget | None = None

    def __init__(
        self,
        *,
        peers: Sequence[str],
        address: str,
        every: int,
        topology: str | nx.Graph = "ring",
        tau1: int = 1,
        tau2: int = 1,
        alpha: int = 1,
        exact_if_complete: bool = False,
        seed: int = 0,
        aggregation: str = "mean",
        credentials: PeerCredentials | None = None,
        listen: str = "",
        patience: float = 600.0,
        on_round_end: Sequence[RoundCallback] = (),
    ) -> None:
        int_at_least(1, every=every, tau1=tau1, tau2=tau2)
        int_at_least(0, alpha=alpha)
        positive(patience=patience)
        self.peers, self.address, self.every = list(peers), address, every
        self.patience, self.on_round_end = patience, list(on_round_end)
        self.aggregation = parse_aggregation(aggregation)
        self.tau2 = tau2
        graph = as_graph(topology, len(peers), seed)
        self._run = run_digest(
            graph, tau1=tau1, tau2=tau2, seed=seed, aggregation=str(self.aggregation),
            alpha=alpha, exact_if_complete=exact_if_complete,
        )  # fmt: skip
        self._credentials, self._listen = credentials, listen
        self.completed = 0
        self._u: NDArray[Any] | None = None
        # Of each server its last report, and the round of its last one that came.
        self._last: dict[int, _Report] = {}
        self._reached: dict[int, int] = {}
        self._heard_at: dict[int, float] = {}
        self._absent: set[int] = set()
        # By round: each server's report, and when the first came.
        self._reports: dict[int, dict[int, _Report]] = {}
        self._since: dict[int, float] = {}
        self._refused: Counter[str] = Counter()
        self._channel("", 1)

    def _channel(self, layout: str, largest: int) -> PeerChannel:
        servers = len(self.peers)
        return PeerChannel(
            servers, [*self.peers, self.address], range(servers), run=self._run, layout=layout,
            largest=largest, credentials=self._credentials, listen=self._listen,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return the last evaluated round, and u (M,)."""
        return {"completed": self.completed, "u": self._u if self._u is not None else np.zeros(0)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; reports of rounds up to its own are not waited for."""
        self.completed = int(state["completed"])
        self._u = np.asarray(state["u"]) if len(state["u"]) else None

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
        """Observe a run of ``num_rounds`` rounds; parameters as of ``Strategy.start``, the grid idle.

        Returns
        -------
        Result
            Its arrays are the last u.

        Raises
        ------
        OSError
            If its address cannot be listened on.
        TimeoutError
            If no server reports for as many times ``timeout`` as there are rounds between two reports.
        """
        if num_rounds % self.tau2:
            raise ValueError(f"num_rounds is {num_rounds}; valid is a multiple of tau2 = {self.tau2}")
        layout, result = Layout.of(initial_arrays), Result()
        if not self.completed:
            self._u = layout.flatten(initial_arrays, _vector_type(layout))
            self._tell(0, {}, layout, evaluate_fn, result, time.monotonic())
        with self._channel(layout_digest(layout), largest_report(layout)) as channel:
            log(INFO, "The monitor of %d edge servers waits for their reports.", len(self.peers))
            began = heard = time.monotonic()
            while self.completed < num_rounds and not self.out_of_budget:
                if self._heard(channel, layout, num_rounds):
                    heard = time.monotonic()
                elif time.monotonic() - heard > timeout * self.every + self.patience:
                    raise TimeoutError(
                        f"No edge server has reported for {time.monotonic() - heard:.0f} s, "
                        f"after round {self.completed} of {num_rounds}"
                    )
                for due in sorted(self._reports):
                    if not self._is_over(due):
                        break
                    self._refused.update(channel.refused)
                    channel.refused.clear()
                    self._close(due, layout, evaluate_fn, result, began)
                    began = time.monotonic()
        if self._u is not None:
            result.arrays = layout.unflatten(self._u)
        return result

    def progress(self) -> Progress:
        """Return what the servers have spent: the latest's iterations and seconds, the traffic of all."""
        spent = [report.progress for report in self._last.values()]
        links: dict[str, Traffic] = {}
        for one in spent:
            for name, traffic in one.by_link.items():
                links[name] = links.get(name, Traffic()) + traffic
        return Progress(
            iterations=_largest(one.iterations for one in spent),
            bits=sum(one.bits for one in spent),
            payload_bytes=sum(one.payload_bytes for one in spent),
            by_link=dict(sorted(links.items())),
            sim_seconds=_largest(one.sim_seconds for one in spent),
        )

    @property
    def out_of_budget(self) -> bool:
        """Whether the servers have spent ``budget``, and end."""
        return self.budget is not None and self.budget.spent(self.progress())

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t└──> Monitor of %d edge servers, every %d rounds", len(self.peers), self.every)

    def _heard(self, channel: PeerChannel, layout: Layout, num_rounds: int) -> bool:
        """Take what came; return whether something did that can be used."""
        usable = False
        for server, told in channel.take(_PAUSE).items():
            at = told.topic.round
            if not self.completed < at <= num_rounds:
                self._refused["not due"] += 1
                continue
            try:
                report = _Report.decoded(told.payload, layout)
            except PayloadError as error:
                self._refused[error.reason] += 1
                continue
            usable = True
            self._absent.discard(server)
            self._reached[server], self._heard_at[server] = at, time.monotonic()
            self._reports.setdefault(at, {})[server] = report
            self._since.setdefault(at, time.monotonic())
        return usable

    def _is_over(self, due: int) -> bool:
        """Return whether no report of a round is to be waited for any longer."""
        here = self._reports[due]
        missing = {
            server
            for server in range(len(self.peers))
            if server not in here and server not in self._absent and self._reached.get(server, 0) < due
        }
        if not missing:
            return True
        # A server that reports earlier rounds is on its way, however early another says it is there.
        since = max(self._since[due], *(self._heard_at.get(server, 0.0) for server in missing))
        if time.monotonic() - since < self.patience:
            # Rounds that wait take memory; a server that is far behind the others is as good as gone.
            return len(self._reports) > _WAITING
        return True

    def _close(
        self, due: int, layout: Layout, evaluate_fn: EvaluateFn | None, result: Result, began: float
    ) -> None:
        here = dict(sorted(self._reports.pop(due).items()))
        del self._since[due]
        self._absent |= {server for server in range(len(self.peers)) if self._reached.get(server, 0) < due}
        self._last |= here
        models = np.stack([report.model for report in here.values()])
        sizes = np.array([report.size for report in here.values()])
        weights = sizes / sizes.sum()
        self._u = robust_mean(models, weights, self.aggregation)
        train = {"consensus-error": consensus_error(models, weights), "servers": list(here)}
        self.completed = due
        self._tell(due, train, layout, evaluate_fn, result, began)

    def _tell(
        self,
        due: int,
        train: dict[str, Any],
        layout: Layout,
        evaluate_fn: EvaluateFn | None,
        result: Result,
        began: float,
    ) -> None:
        assert self._u is not None
        arrays = layout.unflatten(self._u)
        central = None if evaluate_fn is None else evaluate_fn(due, arrays)
        if central is not None:
            log(INFO, "Round %d, u of %d servers: %s", due, len(train.get("servers", ())), central)
            result.evaluate_metrics_serverapp[due] = central
        spent = self.progress()
        servers = len(self.peers) if due else 0
        missing = servers - len(train.get("servers", ()))
        lost = {**({"no report": missing} if missing else {}), **self._refused}
        self._refused.clear()
        end = RoundEnd(
            round=due,
            train=train,
            evaluate={},
            central=dict(central or {}),
            iterations=spent.iterations,
            total_iterations=None,
            bits=spent.bits,
            payload_bytes=spent.payload_bytes,
            by_link=spent.by_link,
            sim_seconds=spent.sim_seconds,
            wall_seconds=time.monotonic() - began,
            sent=servers,
            accepted=servers - missing,
            rejected=lost,
        )
        for callback in self.on_round_end:
            callback(end)


def _largest(told: Iterable[Any]) -> Any:
    """Return the largest number, 0 of none, None where one is not known."""
    numbers = list(told)
    return None if None in numbers else max(numbers, default=0)
