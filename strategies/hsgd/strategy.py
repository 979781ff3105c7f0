"""HSGD: hybrid federated learning of hospitals and their patients' devices, and its baselines.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning": the strategy of Algorithm 1, whose lines are in
``algorithm.py``, and of the baselines C-HSGD, JFL, TDCD and C-TDCD.
Differs: Flower's server relays the messages between hospital and devices, so it sees encodings and heads
unless they are sealed. Models alone reveal labels, and the record of a device with one person
(docs/privacy/noise.md).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from logging import INFO, WARNING
from typing import Any, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import RoundFailedError, Steps
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.hsgd.adaptive import Adaptive, Pacer
from hedgerow.strategies.hsgd.algorithm import Algorithm, State
from hedgerow.strategies.hsgd.exchange import (
    Books,
    Group,
    Interval,
    PartyLinks,
    Schema,
    Theta,
    ThetaBlocks,
    batch_size,
)
from hedgerow.strategies.hsgd.means import Asked, ChosenMeans
from hedgerow.strategies.hsgd.membership import Conversation, DealtMembers, Matching, Members
from hedgerow.strategies.hsgd.own_data import OwnDataSetup, OwnMembers, evaluate_groups, score_metrics
from hedgerow.strategies.hsgd.privacy import SUMS, EmbeddingNoise, RecordExposure, Report, UploadNoise
from hedgerow.strategies.hsgd.theory import (
    Estimates,
    MethodName,
    MethodVariant,
    ModelledSystem,
    Pace,
    Sizes,
    require_intervals,
)
from hedgerow.strategies.inbox import ExchangeReport
from hedgerow.strategies.options import FederationOptions
from hedgerow.strategies.parts import Part
from hedgerow.strategies.round_end import EvaluateFn
from hedgerow.wire.checks import in_range, int_at_least, one_of


class HSGD(Algorithm):
    """Hybrid federated learning: devices average at their group's edge, groups at the cloud.

    **A round is one global interval**: P iterations, in P / Q local intervals of two exchanges each. It
    starts from the model that the strategy holds; nodes keep nothing between rounds.

    1. ``train.exchange``: A_m is drawn; hospitals send head and encodings, devices (or edges) encodings.
    2. ``train.update``: each side receives the other's and makes Q steps. Edges then average, (1); after the
       last local interval the cloud averages, (2), weighted by the number of people per group.

    If a party does not answer, its group may skip that local interval (``missed-intervals``), see
    ``algorithm.py``. If that interval is the round's last, the group is also missing from (2), and the
    weights are renormalized (``lost-groups``). A round with fewer than ``min_train_nodes`` **groups** is
    repeated.

    Training metrics are the means of the hospitals' metrics, ``P``, ``Q``, ``eta`` at the round's start,
    ``iterations``, ``groups``, ``lost-groups``, ``missed-intervals`` if any, the privacy account, and in
    rounds with an estimate ``rho``, ``delta-g``, ``F0`` and ``gradient2``.

    ``initial_arrays`` are those of a split model, with the keys ``head.*``, ``hospital.*`` and ``device.*``.
    Without ``own``, a party that contradicts others is excluded (a hospital or edge with its group) and
    queried again later. It is counted by reason as ``left-out-…``; people that only one side has are counted
    as ``unmatched-…``. ``start`` raises PairingError, a ValueError, if no group is left.

    **The ClientApp must be** ``hedgerow.clients.hsgd_client(load)``, which also documents the messages.

    Parameters
    ----------
    method : {"hsgd", "c-hsgd", "jfl", "tdcd", "c-tdcd"} (default: "hsgd")
        C- compresses encodings and heads. In JFL every sampled pair trains its own model in a round. TDCD has
        no cloud: all people are at one hospital, unless ``aggregate`` is False.
    global_interval, local_interval : int (default: 1)
        P and Q in iterations, >= 1, Q a divisor of P.
    participation : float (default: 1.0)
        alpha in (0, 1]: max(1, floor(alpha K_m)) devices of a group take part in a local interval.
    learning_rate : float (default: 0.01)
        eta, >= 0; with ``halving_period``, eta of iteration 0.
    halving_period : int (default: 0)
        Iterations between halvings of eta, >= 0; 0 for never.
    mu : float (default: 0.0)
        L2 regularization of both encoders, >= 0.
    aggregate : bool (default: True)
        False: every group keeps its own model, see ``models``; the reported arrays are the weighted mean.
    num_groups : int or None (default: None)
        M, checked at set-up; None for the number of hospitals.
    noise : EmbeddingNoise or None (default: None)
        Clipping and noise of encodings.
    upload_noise : UploadNoise or None (default: None)
        Clipping and noise of uploads. Not with ``adaptive``.
    sealed : bool (default: False)
        Whether hospital and devices encrypt their messages to each other (``hedgerow.wire.sealed``). Metrics
        then report how many parties are ``pinning`` their peers' keys, and the refused shares: ``withheld``
        and ``unopened``, with ``unopened-<reason>`` for each reason.
    aggregation : str, Aggregation or Aggregator (default: "mean")
        How the cloud aggregates the groups' models: their mean, (2), a Byzantine-robust rule, see
        ``parse_aggregation``, or your own aggregator, which sees each group as its hospital. A robust rule
        gives every group equal weight, whatever number of people it reports. If a round leaves fewer groups
        than the rule needs, it uses their median (``rule-fell-back``).
    device_aggregation : str, Aggregation, Aggregator or None (default: None)
        The same for a group's devices, (1), and in JFL for the pairs' models at a hospital; None for the rule
        of ``aggregation``. An edge node always takes the mean of the devices that it hosts.
    adaptive : Adaptive or None (default: None)
        When to estimate rho, delta and F0 and choose P, Q and eta again.
    system : ModelledSystem (default: ModelledSystem())
        Seconds per iteration, link rates, and the cost of TDCD's merger.
    own : OwnDataSetup or None (default: None)
        Each party has its own data. People are matched by keyed hashes, ``initial_arrays`` is ignored, and
        metrics of held-out people are added to each result of ``evaluate_fn`` (without one, each round). A
        run starts when ``min_available_nodes`` parties are online and a group is complete: a hospital, with
        an edge or device that has one of its people. Parties join and leave between rounds. Batches and K_m
        of (2) cover the people whose parties are online.
    **options
        See ``FederationOptions``. Nodes are hospitals, and devices or edges; without ``own`` all must be
        online at the start. Nodes do not evaluate, because a hospital must not see theta_2.
    """

    def __init__(
        self,
        *,
        method: str = MethodName.HSGD,
        global_interval: int = 1,
        local_interval: int = 1,
        participation: float = 1.0,
        learning_rate: float = 0.01,
        halving_period: int = 0,
        mu: float = 0.0,
        aggregate: bool = True,
        num_groups: int | None = None,
        noise: EmbeddingNoise | None = None,
        upload_noise: UploadNoise | None = None,
        sealed: bool = False,
        aggregation: Asked = "mean",
        device_aggregation: Asked | None = None,
        adaptive: Adaptive | None = None,
        system: ModelledSystem | None = None,
        own: OwnDataSetup | None = None,
        **options: Unpack[FederationOptions],
    ) -> None:
        require_intervals(P=global_interval, Q=local_interval)
        in_range("participation", participation, 0.0, 1.0, open_below=True)
        int_at_least(0, halving_period=halving_period)
        in_range("learning_rate", learning_rate, 0.0, 1e300, open_below=adaptive is not None)
        in_range("mu", mu, 0.0, 1e300)
        one_of("method", method, MethodName)
        if num_groups is not None:
            int_at_least(1, num_groups=num_groups)
        if options.setdefault("fraction_evaluate", 0.0) != 0.0:
            raise ValueError(f"fraction_evaluate must be 0 in HSGD, got {options['fraction_evaluate']!r}")
        needed, places = options.get("min_available_nodes", 2), options.get("num_clients")
        if own is None and places not in (None, needed):
            raise ValueError(
                f"num_clients must be min_available_nodes = {needed}, got {places!r}: without own data all "
                "parties must be online when the run starts"
            )
        self.variant = MethodVariant(MethodName(method), aggregate, system or ModelledSystem())
        self.aggregate, self.pairs = aggregate, self.variant.pairs
        self.participation, self.mu = participation, mu
        if adaptive is not None and not aggregate:
            raise ValueError("adaptive must be None with aggregate=False: the theory covers one model")
        if noise is not None and upload_noise is not None:
            for key in ("delta", "source"):
                ours, theirs = getattr(upload_noise, key), getattr(noise, key)
                if ours != theirs:
                    raise ValueError(f"upload_noise must have the {key} of noise, {theirs!r}, got {ours!r}")
        if upload_noise is not None and adaptive is not None:
            raise ValueError("adaptive must be None with upload_noise: estimates need exact steps")
        self.chosen_means = ChosenMeans.of(aggregation, device_aggregation)
        self.chosen_means.check(self.variant, num_groups, adaptive=adaptive is not None)
        self.adaptive, self.own = adaptive, own
        federation = Federation(**options)
        deviation = 0.0 if upload_noise is None else upload_noise.clip * upload_noise.multiplier
        self._hold = None
        if federation.settings.max_update_norm_ratio:
            self._hold = partial(federation.limits.check_update, noise=deviation)
        self.links = PartyLinks(sealed, federation.settings.seed)

        shared = federation, num_groups, self.variant, self.links, self._check_groups
        self.members: Members = DealtMembers(*shared) if own is None else OwnMembers(own, *shared)
        sums = own is not None and (own.standardise == "federated" or own.class_weights == "balanced")
        self.noise, self.upload_noise, open_paths = noise, upload_noise, (SUMS,) if sums else ()
        self.exposure: RecordExposure | None = None
        if noise is not None or upload_noise is not None:
            self.exposure = RecordExposure(noise, upload_noise, hidden=sealed, open_paths=open_paths)
        asked = Pace(global_interval, local_interval, learning_rate, halving_period)
        self._pacer = Pacer(asked, adaptive, self)
        self.averages = self.chosen_means.means(apart=not aggregate)
        # What is off takes no part. Members come before the pacer, whose choice depends on them.
        parts: list[Part] = [self.links] if sealed else []
        parts += [self.exposure] if self.exposure is not None else []
        parts += [self.members, *([self._pacer] if adaptive is not None else [])]
        super().__init__(federation, parts=[*parts, *self.chosen_means.parts])

    # Properties of the run.

    @property
    def groups(self) -> Sequence[Group]:  # type: ignore[override]
        """The round's groups."""
        return self.members.groups

    @property
    def pace(self) -> Pace:
        """P, Q and eta in use."""
        return self._pacer.pace

    @property
    def seen(self) -> Estimates | None:
        """The last estimate of the constants."""
        return self._pacer.seen

    @property
    def total_iterations(self) -> int | None:
        """The planned iterations, if the run chooses P itself."""
        return self.adaptive.iterations if self.adaptive is not None and self.adaptive.apply else None

    @property
    def finished(self) -> bool:
        """Whether a run that chooses P itself has made its planned iterations, or only evaluates a model."""
        if self.own is not None and self.own.trained is not None:
            return True
        return self.total_iterations is not None and self.iterations >= self.total_iterations

    @property
    def report(self) -> ExchangeReport:
        """Messages sent, accepted and rejected in all exchanges of the last round."""
        return self.members.report

    def models(self) -> list[ArrayRecord]:
        """Return each group's model after the last round; without a cloud these are the run's result."""
        if self.state is None:
            return []
        known = [group.number for group in self.groups] or range(len(self.members.sizes))
        return [self._record(self.state.start(m)) for m in sorted(self.state.apart) or known]

    def privacy_report(self) -> Report | None:
        """Return the account of the most exposed person; None without noise."""
        return None if self.exposure is None else self.exposure.report()

    def disclosed(self) -> Report | None:
        """Return the same: every request counts."""
        return self.privacy_report()

    def _record(self, theta: Theta) -> ArrayRecord:
        return self._arrays(ThetaBlocks(self.federation.known_layout()).join(theta))

    # State.

    def saved(self, state: State) -> dict[str, Any]:
        """Return a state as a checkpoint's values."""
        apart = {str(m): {"size": size, **own._asdict()} for m, (size, own) in sorted(state.apart.items())}
        first = None if state.first is None else state.first._asdict()
        return {"theta": state.theta._asdict(), "t": state.t, "apart": apart, "first": first}

    def restored(self, saved: Mapping[str, Any]) -> State:
        """Return the state of a checkpoint."""
        apart = {int(m): (int(own["size"]), _theta(own)) for m, own in saved["apart"].items()}
        first = None if self.aggregate else _theta(saved["first"] or saved["theta"])
        return State(_theta(saved["theta"]), int(saved["t"]), apart, first)

    # Before a run.

    def _set_up(self, arrays: ArrayRecord, grid: Grid) -> ArrayRecord:
        """Set the initial model and the groups, once per run."""
        if self.links.sealed:
            self.links.introductions.begin(grid.run.run_id)  # Another run has other keys.
        if self.members.matching is not None:
            return arrays
        if self.own is None and self.state is None:
            self.state = self.begin(self.federation.vector(arrays))
        built = self.members.begin(grid)
        if self.state is not None:
            return arrays
        assert built is not None, "own data decide the model's shape"
        assert self.own is not None
        self.state = self.begin(self.federation.vector(built))
        if (trained := self.own.trained) is None:
            return built
        self.state = self.restored(trained["method"])
        if (*map(len, self.state.theta),) != ThetaBlocks(self.federation.known_layout()).sizes:
            raise ValueError("trained must be the state of this run's model, got another's")
        return self._record(self.state.theta)

    def _check_groups(self, matching: Matching) -> None:
        batches = [(group, batch_size(self.participation, group.size)) for group in matching.groups]
        self.chosen_means.check_groups(batches, self.variant)
        alone = [group.number for group, count in batches if count == 1]
        if alone and self.own is None:
            log(WARNING, "One device a batch in groups %s: their edge's mean is its model.", alone[:10])

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
        """Run the strategy, see ``FederatedStrategy.start``; with ``own``, also evaluate held-out people."""

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            metrics = MetricRecord() if evaluate_fn is None else evaluate_fn(server_round, arrays)
            if metrics is None:
                return None
            return MetricRecord({**metrics, **self.evaluate_held_out(grid, arrays)})

        evaluated = evaluate_fn if self.own is None else evaluate
        return super().start(
            grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluated
        )

    def summary(self) -> None:
        """Log the settings."""
        P, Q, eta0, period = self.pace
        log(INFO, "\t├──> Method: %s%s", self.variant.method, "" if self.aggregate else ", groups kept apart")
        log(INFO, "\t├──> P = %d | Q = %d | alpha = %g | mu = %g", P, Q, self.participation, self.mu)
        log(INFO, "\t├──> eta = %g%s", eta0, f", halved every {period} iterations" if period else "")
        for what, noise in (("", self.noise), (" of uploads", self.upload_noise)):
            if noise is not None:
                log(INFO, "\t├──> Noise%s: clip = %g, multiplier = %g", what, noise.clip, noise.multiplier)
        if (report := self.privacy_report()) is not None and report.unprotected:
            log(INFO, "\t├──> Privacy: %s", report)
        if self.links.sealed:
            log(INFO, "\t├──> Links of hospital and devices are sealed")
        log(INFO, "\t├──> Means: %s", self.chosen_means)
        if self.adaptive is not None:
            log(INFO, "\t├──> Adaptive: %s", self.adaptive)
        if self.groups:
            log(INFO, "\t├──> %d groups of %s people", len(self.groups), [g.size for g in self.groups][:10])
        self.log_keys()

    # A round.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return the messages of the round's first exchange."""
        self._set_up(arrays, grid)
        system = self.variant.system
        if server_round == 1 and not self.ledger.total().messages:
            if moved := round(system.raw_bytes * system.original_groups):
                self.ledger.book(1, "hospital->hospital", 0, 0, 8 * moved, moved)
            self.clock.advance(system.raw_seconds)
        return super().configure_train(server_round, arrays, config, grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return no messages, because no node may see the whole model."""
        return []

    def _steps(self, state: State, run: RoundContext) -> Steps[State]:
        """Advance the clock by a global interval, also for a failed round."""
        try:
            after = yield from super()._steps(state, run)
        except RoundFailedError:
            self.advance(self.pace.P, self.pace.Q)
            raise
        self.advance(self.pace.P, self.pace.Q)
        return after

    def interval(
        self, t: int, run: RoundContext, *, starts: bool, uploads: bool, plain: bool = False
    ) -> Interval:
        """Return the local interval that starts at t."""
        schema, (_, Q, eta0, period), system = self._schema(plain), self.pace, self.variant.system
        noise, upload_noise = (
            {} if one is None else one.instructions(self.settings.seed)
            for one in (self.noise, self.upload_noise)
        )
        books = Books(self.ledger, run.round, schema, self.variant.has_cloud, system.original_groups)
        return Interval(
            t, Q, starts, uploads, eta0, period, self.mu, noise, upload_noise, schema, self.links, books,
            self.exposure, None if plain else self._hold, over_grid=plain,
        )  # fmt: skip

    def ended(self, state: State, run: RoundContext) -> None:
        """Report the round's P, Q, eta and iterations."""
        P, Q, *_ = self.pace
        run.metrics |= {"P": P, "Q": Q, "eta": self.pace.eta(state.t - P), "iterations": state.t}

    # Held-out people.

    def evaluate_held_out(self, grid: Grid, arrays: ArrayRecord) -> dict[str, float]:
        """Return the metrics of held-out people, see ``score_metrics``; empty if there are none.

        Evaluates ``arrays``, or each group's own model with ``aggregate=False``.
        """
        matching, own = self.members.matching, self.own
        if own is None or matching is None or not matching.held_out:
            return {}
        state = self._known_state()
        whole = ThetaBlocks(self.federation.known_layout()).split(self.federation.vector(arrays))
        models = {m: whole if self.aggregate else state.start(m) for m in matching.held_out}
        noise = {} if self.noise is None else self.noise.instructions(self.settings.seed)
        scores = evaluate_groups(
            Conversation(self.federation, grid), matching.held_out, models,
            self._schema(plain=True), {"t": state.t, **noise}, self.links,
        )  # fmt: skip
        return score_metrics(scores, own.specificity)

    # Sizes and costs.

    def _schema(self, plain: bool = False) -> Schema:
        """Return the messages' schema; ``plain`` for estimates, see ``interval``."""
        (head, hospital, device), variant = self._known_state().theta, self.variant
        return Schema(
            len(head), len(hospital), len(device), *self.members.encodings, head.dtype,
            compressed=variant.compressed and not plain, pairs=variant.pairs and not plain,
            protected=self.upload_noise is not None,  # hospitals then report no loss
            sealed=self.links.sealed,
        )  # fmt: skip

    def advance(self, P: int, Q: int) -> None:
        """Advance the clock by a global interval of the slowest group."""
        n0, n1, n2 = map(len, self._known_state().theta)
        groups = [
            Sizes(n0, n1, n2, *self.members.encodings, batch_size(self.participation, group.size))
            for group in self.groups
        ]
        self.clock.advance(self.variant.seconds(groups, P, Q))


def _theta(blocks: Mapping[str, Any]) -> Theta:
    return Theta(*(np.asarray(blocks[key]) for key in Theta._fields))
