"""HSGD: hybrid federated learning of hospitals and their patients' devices, and its baselines.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", Algorithm 1 with (1), (2) and (5)-(7), and the
baselines C-HSGD, JFL, TDCD and C-TDCD, which are groupings and compressions of one engine.
Differs: devices are averaged before groups are, over the set that just trained, and T iterations make T
updates, as the text forces. Flower's server relays what hospital and devices send each other: it sees
encodings and heads, though no data and no labels.
"""

import math
from collections.abc import Iterable, Mapping
from logging import INFO, WARNING
from typing import Any, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from hedgerow.strategies.exchange import ExchangeReport
from hedgerow.strategies.federation import Federation, FederationOptions
from hedgerow.strategies.hsgd.adaptive import Adaptive
from hedgerow.strategies.hsgd.aggregators import Blocks, Theta, mean_of
from hedgerow.strategies.hsgd.books import Books
from hedgerow.strategies.hsgd.costs import (
    PAPER_RATES,
    Method,
    Sizes,
    require_intervals,
    round_parts,
    round_seconds,
)
from hedgerow.strategies.hsgd.groups import Group, PairingError, batch_size, draw, pair
from hedgerow.strategies.hsgd.interval import GroupRound, LocalInterval, Terms
from hedgerow.strategies.hsgd.messages import EXCHANGE, UPDATE, Schema
from hedgerow.strategies.hsgd.noise import EmbeddingNoise, Exposure
from hedgerow.strategies.hsgd.probes import LostProbeError, Prober, Seen
from hedgerow.strategies.hsgd.setup import (
    COMPRESSED,
    MERGED,
    Pace,
    check_combination,
    encoding_lengths,
    introductions,
)
from hedgerow.strategies.hsgd.waves import Waves
from hedgerow.strategies.rounds import EvaluateFn, Progress, run_rounds
from hedgerow.wire.checks import in_range, int_at_least, one_of
from hedgerow.wire.clock import Rates
from hedgerow.wire.ledger import Ledger

__all__ = ["HSGD"]


class HSGD(Strategy):
    """Hybrid federated learning: devices average at their group's edge, groups at the cloud.

    **A round is one global interval**: P iterations, in P / Q local intervals of two exchanges each. It
    starts from the model that the strategy holds, so that nodes keep nothing between rounds.

    1. ``train.exchange``: A_m is drawn; hospitals tell head and encodings, devices (or edges) encodings.
    2. ``train.update``: each side gets the other's and makes Q steps. Edges then average, (1); after the last
       local interval the cloud does, (2), weighted by the people of a group.

    A silent party costs what ``interval.py`` says; groups that are lost are left out of (2), whose weights
    are renormalised. A round with fewer than ``min_train_nodes`` **groups** left is repeated.

    Training metrics are the means of what hospitals tell, ``P``, ``Q``, ``eta`` at the round's start,
    ``iterations``, ``groups`` and ``lost-groups``, the noise's accounts, and the estimates of a round that
    makes them: ``rho``, ``delta-g``, ``F0`` and ``gradient2``.

    **The ClientApp must be** ``hedgerow.clients.hsgd_client(load)``; see ``messages.py`` for what is sent.

    Parameters
    ----------
    method : {"hsgd", "c-hsgd", "jfl", "tdcd", "c-tdcd"} (default: "hsgd")
        C- compresses encodings and heads. In JFL every drawn pair trains a model of its own in a round.
        TDCD has no cloud: all people are at one hospital, unless ``aggregate`` is False.
    global_interval, local_interval : int (default: 1)
        P and Q in iterations, >= 1, Q a divisor of P.
    participation : float (default: 1.0)
        alpha in (0, 1]: max(1, floor(alpha K_m)) devices of a group take part in a local interval.
    learning_rate : float (default: 0.01)
        eta, >= 0; with ``halving_period`` that of iteration 0.
    halving_period : int (default: 0)
        Iterations after which eta is halved, >= 0; 0 for never.
    mu : float (default: 0.0)
        L2 regularisation of both encoders, >= 0.
    aggregate : bool (default: True)
        False: every group keeps its own model; the arrays shown are the weighted mean, see ``models``.
    num_groups : int or None (default: None)
        M, checked at set-up; None for as many as there are hospitals.
    original_groups : int (default: 1)
        How many groups TDCD merged into its one, >= 1: the paper's cost is stated per original group.
    noise : EmbeddingNoise or None (default: None)
        Clipping and noise of encodings.
    adaptive : Adaptive or None (default: None)
        When rho, delta and F0 are estimated, and P, Q and eta chosen anew.
    compute_seconds : float (default: 0.0)
        t_c of one iteration, >= 0.
    rates : Rates (default: PAPER_RATES)
        Of the links.
    raw_bytes, raw_seconds : float (default: 0.0)
        Transfer of raw data before TDCD, per original group, and how long it delays the start; >= 0.
    **options
        See ``FederationOptions``. ``min_available_nodes`` is the number of all nodes, hospitals and devices
        or edges; nodes do not evaluate: a hospital must not see theta_2.

    Raises
    ------
    ValueError
        If a parameter is out of range, naming it, its value and what is valid.
    """

    def __init__(
        self,
        *,
        method: str = Method.HSGD,
        global_interval: int = 1,
        local_interval: int = 1,
        participation: float = 1.0,
        learning_rate: float = 0.01,
        halving_period: int = 0,
        mu: float = 0.0,
        aggregate: bool = True,
        num_groups: int | None = None,
        original_groups: int = 1,
        noise: EmbeddingNoise | None = None,
        adaptive: Adaptive | None = None,
        compute_seconds: float = 0.0,
        rates: Rates = PAPER_RATES,
        raw_bytes: float = 0.0,
        raw_seconds: float = 0.0,
        **options: Unpack[FederationOptions],
    ) -> None:
        require_intervals(P=global_interval, Q=local_interval)
        in_range("participation", participation, 0.0, 1.0, open_below=True)
        int_at_least(0, halving_period=halving_period)
        int_at_least(1, original_groups=original_groups)
        for key, number in (
            ("learning_rate", learning_rate),
            ("mu", mu),
            ("compute_seconds", compute_seconds),
            ("raw_bytes", raw_bytes),
            ("raw_seconds", raw_seconds),
        ):
            in_range(key, number, 0.0, 1e300)
        one_of("method", method, Method)
        self.method = Method(method)
        check_combination(self.method, aggregate, original_groups, raw_bytes + raw_seconds, adaptive)
        if adaptive is not None:
            in_range("learning_rate", learning_rate, 0.0, 1e300, open_below=True)
        if num_groups is not None:
            int_at_least(1, num_groups=num_groups)
        if options.setdefault("fraction_evaluate", 0.0) != 0.0:
            raise ValueError(f"fraction_evaluate is {options['fraction_evaluate']!r}; valid is 0 in HSGD")
        self.participation = participation
        self.mu = mu
        self.aggregate = aggregate
        self.num_groups = num_groups
        self.original_groups = original_groups
        self.noise = noise
        self.adaptive = adaptive
        self.compute_seconds = compute_seconds
        self.rates = rates
        self.raw_bytes, self.raw_seconds = raw_bytes, raw_seconds
        self._asked_pace = Pace(global_interval, local_interval, learning_rate, halving_period)
        self.federation = Federation(**options)
        self.settings = self.federation.settings
        self.on_round_end = self.settings.on_round_end
        self.max_repeats = self.settings.max_repeats
        self._forget()

    def _forget(self) -> None:
        self.pace = self._asked_pace
        self.seen: Seen | None = None
        self.groups: list[Group] = []
        self.encodings = (0, 0)  # e1 and e2
        self._sizes: list[int] = []
        self._theta: Theta | None = None
        self._models: dict[int, Theta] = {}
        self._iterations = 0
        self._planned = 0
        self._exposure = Exposure()
        self._waves = Waves(self.federation, 0)
        self._interval: LocalInterval | None = None
        self._runs: list[GroupRound] = []
        self._contents: list[RecordDict] = []

    # State.

    @property
    def completed_rounds(self) -> int:
        """Rounds so far."""
        return self.federation.completed

    @property
    def iterations(self) -> int:
        """t, local iterations so far."""
        return self._iterations

    @property
    def finished(self) -> bool:
        """Whether a run that chooses P itself has made the iterations that it was planned for."""
        adaptive = self.adaptive
        return adaptive is not None and adaptive.apply and self.iterations >= adaptive.iterations

    @property
    def report(self) -> ExchangeReport:
        """What all exchanges of the last round sent, got and lost."""
        return self._waves.report

    @property
    def ledger(self) -> Ledger:
        """Every transfer so far."""
        return self.federation.ledger

    def progress(self) -> Progress:
        """Return iterations, traffic and simulated seconds since the start."""
        total = self.ledger.total()
        return Progress(
            self.iterations, total.nominal_bits, total.payload_bytes, self.federation.clock.seconds
        )

    def current_arrays(self) -> ArrayRecord | None:
        """Return the global model, or the mean of groups that are kept apart; None before the first round."""
        return None if self._theta is None else self._record(self._theta)

    def models(self) -> list[ArrayRecord]:
        """Return each group's model at the end of the last round: without a cloud they are its result."""
        if self._theta is None:
            return []
        return [self._record(self._start(m)) for m in range(len(self.groups) or len(self._sizes))]

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next round depends on."""
        theta = self._known_theta()
        return {
            **self.federation.state_dict(),
            "theta": theta._asdict(),
            "models": {str(m): model._asdict() for m, model in sorted(self._models.items())},
            "iterations": self._iterations,
            "pace": list(self.pace),
            "group-sizes": list(self._sizes),
            "exposure": self._exposure.state_dict(),
            "seen": None if self.seen is None else self.seen.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; the next ``start`` goes on after its round."""
        self.federation.load_state_dict(state)
        self._forget()
        self._theta = _restored(state["theta"])
        self._models = {int(m): _restored(model) for m, model in state["models"].items()}
        self._iterations = int(state["iterations"])
        P, Q, eta0, period = state["pace"]
        self.pace = Pace(int(P), int(Q), float(eta0), int(period))
        self._sizes = [int(size) for size in state["group-sizes"]]
        self._exposure.load_state_dict(state["exposure"])
        self.seen = None if state["seen"] is None else Seen.restored(state["seen"])

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
        """Run the strategy; parameters as in Flower's ``Strategy.start``, ``timeout`` that of one exchange.

        ``initial_arrays`` is a split model's state dict, with keys ``head.*``, ``hospital.*``, ``device.*``.

        Raises
        ------
        ValueError
            If the arrays are none of a split model.
        RosterError
            If the nodes do not come, or do not say who they are.
        PairingError
            If a group lacks its hospital, or hospital and devices do not have the same people.
        TooFewRepliesError
            If too few groups are left in a round however often it is repeated.
        """
        int_at_least(0, num_rounds=num_rounds)
        if not self.federation.begin(timeout):
            self._forget()
        self._set_up(initial_arrays, grid)
        return run_rounds(
            self, grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Make all exchanges of the round but the last, and return that one's messages."""
        if server_round == 1 and self.completed_rounds:
            self.federation.reset()
            self._forget()
        self._set_up(arrays, grid)
        self._waves = Waves(self.federation, server_round)
        if server_round == 1 and not self.ledger.total().messages:
            self._move_raw_data()
        self._replan(server_round, config, grid)
        pairs = self.method is Method.JFL
        self._runs = [GroupRound(group, self._start(group.number), pairs) for group in self.groups]
        self._contents = []
        first, P, Q = self._iterations, self.pace.P, self.pace.Q
        for t in range(first, first + P, Q):
            self._choose(t, starts=t == first)
            terms = self._terms(config, t, steps=Q, starts=t == first, uploads=t + Q == first + P)
            interval = LocalInterval(self._runs, terms, self._schema(), self._books(), server_round)
            self._exchange(interval, grid)
            if not terms.uploads:
                self._update(interval, grid)
                self._contents += interval.contents
        self._interval = interval
        return self._waves.open(grid, UPDATE, interval.update(), interval.check_update)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """End the round: edges average their devices, and the cloud its groups."""
        interval = self._interval
        if interval is None:
            raise RuntimeError("No round is open: configure_train comes first.")
        interval.updated(self._waves.close(replies))
        self._contents += interval.contents
        P, Q, *_ = self.pace
        self._advance(P, Q)
        there = {run.group.number: (run.group.size, run.model) for run in self._runs if run.model is not None}
        if len(there) < max(1, min(self.settings.min_train_nodes, len(self.groups))):
            return None, None
        self._take(there)
        metrics = self._metrics(self._iterations, len(there))
        self._iterations += P
        metrics["iterations"] = self._iterations
        self.federation.completed = server_round
        return self.current_arrays(), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return no messages: no node may see the whole model."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return nothing."""
        return None

    def summary(self) -> None:
        """Log the settings."""
        P, Q, eta0, period = self.pace
        log(INFO, "\t├──> Method: %s%s", self.method, "" if self.aggregate else ", groups kept apart")
        log(INFO, "\t├──> P = %d | Q = %d | alpha = %g | mu = %g", P, Q, self.participation, self.mu)
        log(INFO, "\t├──> eta = %g%s", eta0, f", halved every {period} iterations" if period else "")
        if self.noise is not None:
            log(INFO, "\t├──> Noise: clip = %g, multiplier = %g", self.noise.clip, self.noise.multiplier)
        if self.adaptive is not None:
            log(INFO, "\t├──> Adaptive: %s", self.adaptive)
        if self.groups:
            log(INFO, "\t├──> %d groups of %s people", len(self.groups), [g.size for g in self.groups][:10])
        self.federation.log_keys()

    # Set-up.

    def _set_up(self, arrays: ArrayRecord, grid: Grid) -> None:
        """Take the initial model, and find out who belongs together; once a run."""
        if self._theta is None:
            vector = self.federation.vector(arrays)
            self._theta = Blocks(self.federation.known_layout()).split(vector)
        if self.groups:
            return
        parties = introductions(self.federation, grid)
        self.groups = pair(parties, self.num_groups)
        self.encodings = encoding_lengths(parties)
        sizes = [group.size for group in self.groups]
        if self._sizes and self._sizes != sizes:
            raise PairingError(
                f"the groups have {sizes} people; valid is {self._sizes}, as in the checkpoint"
            )
        self._sizes = sizes
        if self.method in MERGED and self.aggregate and len(sizes) > 1:
            raise PairingError(f"{len(sizes)} hospitals; valid is one in {self.method}, or aggregate=False")
        if alone := [group.number for group in self.groups if self._count(group) == 1]:
            log(WARNING, "One device a batch in groups %s: their edge's mean is its model.", alone[:10])

    def _move_raw_data(self) -> None:
        if self.raw_bytes:
            self._books().raw_data(1, self.raw_bytes)
        self.federation.clock.advance(self.raw_seconds)

    # A round.

    def _terms(self, config: ConfigRecord, t: int, *, steps: int, starts: bool, uploads: bool) -> Terms:
        noise = {} if self.noise is None else self.noise.instructions(self.settings.seed)
        return Terms(
            t, steps, starts, uploads, self.pace.eta0, self.pace.period, self.mu, noise, dict(config)
        )

    def _choose(self, t: int, starts: bool) -> None:
        """Draw A_m; of JFL it stays for the round, less those who were silent."""
        for run in self._runs:
            if starts or self.method is not Method.JFL:
                ids = draw(run.group, self._count(run.group), seed=self.settings.seed, t=t)
            else:
                ids = run.ids
            run.edge.choose(ids)

    def _exchange(self, interval: LocalInterval, grid: Grid) -> None:
        if self.noise is not None:
            for run in interval.runs:
                self._exposure.count(run.group.number, run.ids)
        contents = interval.exchange()
        interval.exchanged(self._waves.ask(grid, EXCHANGE, contents, interval.check_exchange))

    def _update(self, interval: LocalInterval, grid: Grid) -> None:
        interval.updated(self._waves.ask(grid, UPDATE, interval.update(), interval.check_update))

    def _take(self, there: Mapping[int, tuple[int, Theta]]) -> None:
        """Let the cloud aggregate the groups that are there, or keep each its own model."""
        if self.aggregate:
            self._theta = mean_of(there)
            return
        self._models.update({m: model for m, (_, model) in there.items()})
        sizes = {group.number: group.size for group in self.groups}
        self._theta = mean_of({m: (size, self._start(m)) for m, size in sizes.items()})

    def _start(self, m: int) -> Theta:
        """Return what a group starts its round from."""
        if self.aggregate:
            return self._known_theta()
        if not self._models:
            self._models = {group.number: self._known_theta() for group in self.groups}
        return self._models[m]

    def _metrics(self, t: int, num_groups: int) -> MetricRecord:
        metrics = self.federation.train_metrics(self._contents)
        P, Q, *_ = self.pace
        metrics.update({"P": P, "Q": Q, "eta": self.pace.eta(t), "groups": num_groups})
        metrics["lost-groups"] = len(self.groups) - num_groups
        if self.noise is not None:
            metrics.update(self._exposure.metrics(self.noise))
        if self.seen is not None and self._planned == self.completed_rounds + 1:
            metrics.update(self.seen.metrics())
        return metrics

    def _replan(self, server_round: int, config: ConfigRecord, grid: Grid) -> None:
        """Estimate the constants where that is due, and choose P, Q and eta by them."""
        if self.adaptive is None or not self.adaptive.due(server_round - 1) or self._planned == server_round:
            return

        def ask(interval: LocalInterval) -> None:
            self._exchange(interval, grid)
            self._update(interval, grid)
            self._advance(1, 1)

        t, counts = self._iterations, [self._count(group) for group in self.groups]
        terms = self._terms(config, t, steps=1, starts=True, uploads=True)
        prober = Prober(
            self.groups, counts, ask, self._books(plain=True), terms,
            seed=self.settings.seed, server_round=server_round,
        )  # fmt: skip
        asked = self._asked_pace
        try:
            seen = prober.estimate(self.adaptive.probing, self._known_theta(), asked.eta(t))
        except (LostProbeError, ValueError) as error:
            log(WARNING, "No estimate before round %d, P, Q and eta stay: %s", server_round, error)
            return
        self.seen, self._planned = seen, server_round
        log(INFO, "Estimates: rho = %g, delta = %g, F0 = %g", seen.known.rho, seen.known.delta, seen.known.F0)
        if self.adaptive.apply:
            P, Q, eta = self.adaptive.choose(seen, eta=asked.eta(t), done=t)
            halved = asked.period if self.adaptive.eta == "keep" else 0
            self.pace = Pace(P, Q, math.ldexp(eta, t // halved) if halved else eta, halved)
            log(INFO, "Chosen: P = Q = %d, eta = %g", P, eta)

    # What things cost.

    def _count(self, group: Group) -> int:
        return batch_size(self.participation, group.size)

    def _schema(self, plain: bool = False) -> Schema:
        theta = self._known_theta()
        compressed, pairs = self.method in COMPRESSED, self.method is Method.JFL
        head, hospital, device = map(len, theta)
        return Schema(
            head, hospital, device, *self.encodings, theta.head.dtype,
            compressed and not plain, pairs and not plain,
        )  # fmt: skip

    def _books(self, plain: bool = False) -> Books:
        """Return the books; ``plain`` those of an estimate, which compresses nothing and has no pairs."""
        return Books(self.ledger, self._schema(plain), self.method, self.aggregate, self.original_groups)

    def _advance(self, P: int, Q: int) -> None:
        """Let a global interval of the slowest group pass."""
        head, hospital, device = map(len, self._known_theta())
        apart = Method.C_TDCD if self.method in COMPRESSED else Method.TDCD
        method = self.method if self.aggregate else apart

        def seconds(a: int) -> float:
            parts = round_parts(
                Sizes(head, hospital, device, *self.encodings, a), rates=self.rates, method=method
            )
            return round_seconds(parts, P=P, Q=Q, compute_seconds=self.compute_seconds)

        self.federation.clock.advance(max(seconds(a) for a in {self._count(group) for group in self.groups}))

    # Models.

    def _known_theta(self) -> Theta:
        if self._theta is None:
            raise RuntimeError("No model yet: configure_train or start comes first.")
        return self._theta

    def _record(self, theta: Theta) -> ArrayRecord:
        layout = self.federation.known_layout()
        return layout.unflatten(Blocks(layout).join(theta))


def _restored(state: Mapping[str, Any]) -> Theta:
    return Theta(**{key: np.asarray(block) for key, block in state.items()})
