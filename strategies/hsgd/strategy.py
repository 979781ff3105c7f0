"""HSGD: hybrid federated learning of hospitals and their patients' devices, and its baselines.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", Algorithm 1 with (1), (2) and (5)-(7), and the
baselines C-HSGD, JFL, TDCD and C-TDCD, which are groupings and compressions of one engine.
Differs: devices are averaged before groups are, over the set that just trained, and T iterations make T
updates, as the text forces. Flower's server relays what hospital and devices send each other: unless it is
sealed, it sees encodings and heads. Of a device with one person, and of labels, models alone tell it all:
docs/privacy.md.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from logging import INFO, WARNING
from typing import Any, Unpack

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from hedgerow.strategies.federation import Federation, FederationOptions
from hedgerow.strategies.hsgd.adaptive import Adaptive
from hedgerow.strategies.hsgd.aggregators import Blocks, Combine, Theta
from hedgerow.strategies.hsgd.books import Books
from hedgerow.strategies.hsgd.cloud import Cloud
from hedgerow.strategies.hsgd.costs import PAPER_RATES, Method, require_intervals
from hedgerow.strategies.hsgd.evaluation import evaluate_groups, score_metrics
from hedgerow.strategies.hsgd.groups import Group, PairingError, batch_size, draw
from hedgerow.strategies.hsgd.interval import GroupRound, LocalInterval, Terms
from hedgerow.strategies.hsgd.matching import Matching
from hedgerow.strategies.hsgd.means import MANY_DEVICES, Means
from hedgerow.strategies.hsgd.messages import Schema, introduction
from hedgerow.strategies.hsgd.noise import HEADS, SUMS, EmbeddingNoise, Exposure, Report, UploadNoise
from hedgerow.strategies.hsgd.own import Agreed, OwnData, OwnSetup
from hedgerow.strategies.hsgd.pace import Pace, Pacer
from hedgerow.strategies.hsgd.parties import question
from hedgerow.strategies.hsgd.probes import Prober, Seen
from hedgerow.strategies.hsgd.sealing import SealedLinks
from hedgerow.strategies.hsgd.setup import DealtSetup
from hedgerow.strategies.hsgd.sums import PartySums
from hedgerow.strategies.hsgd.system import System
from hedgerow.strategies.hsgd.waves import Waves
from hedgerow.strategies.inbox import ExchangeReport, Reply, collect
from hedgerow.strategies.rounds import EvaluateFn
from hedgerow.strategies.secure_sums import SecureSum
from hedgerow.strategies.strategy import FederatedStrategy
from hedgerow.wire.checks import in_range, int_at_least, one_of
from hedgerow.wire.clock import Rates
from hedgerow.wire.message_types import EXCHANGE, PAIR, UPDATE

__all__ = ["HSGD"]


class HSGD(FederatedStrategy):
    """Hybrid federated learning: devices average at their group's edge, groups at the cloud.

    **A round is one global interval**: P iterations, in P / Q local intervals of two exchanges each. It
    starts from the model that the strategy holds, so that nodes keep nothing between rounds.

    1. ``train.exchange``: A_m is drawn; hospitals tell head and encodings, devices (or edges) encodings.
    2. ``train.update``: each side gets the other's and makes Q steps. Edges then average, (1); after the last
       local interval the cloud does, (2), weighted by the people of a group.

    A silent party costs what ``interval.py`` says: its group sits out that local interval
    (``missed-intervals``), and if that is the round's last, (2), whose weights are renormalised
    (``lost-groups``). A round with fewer than ``min_train_nodes`` **groups** left is repeated.

    Training metrics are the means of what hospitals tell, ``P``, ``Q``, ``eta`` at the round's start,
    ``iterations``, ``groups``, ``lost-groups``, ``missed-intervals`` where there are any, the noise's
    accounts, and the estimates of a round that makes them: ``rho``, ``delta-g``, ``F0`` and ``gradient2``.

    ``initial_arrays`` are a split model's, with the keys ``head.*``, ``hospital.*`` and ``device.*``.
    Without ``own``, a party whose introduction others contradict is left out, with its group if it is the
    hospital or edge, and counted by reason (``left-out-…``, and people whom one side alone has as
    ``unmatched-…``); it is asked again later. ``start`` raises PairingError, a ValueError, if no group is
    left.

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
    upload_noise : UploadNoise or None (default: None)
        Clipping and noise of what is uploaded. Not with ``adaptive``.
    sealed : bool (default: False)
        Whether hospital and devices seal what they tell each other (``hedgerow.wire.sealed``). Metrics then
        tell how many parties are ``pinning`` their peers' keys and what was refused: ``withheld`` shares, and
        ``unopened`` ones, with ``unopened-<reason>`` for each reason.
    aggregation : str (default: "mean")
        What the cloud takes of the groups' models: the mean, (2), or a rule that some lying groups cannot
        ruin, see ``parse_aggregation``. Under a rule every group counts as one, whatever people it tells of.
        Where a round leaves fewer than the rule wants, it takes their median (``rule-fell-back``).
    device_aggregation : str or None (default: None)
        The same of a group's devices, (1), and in JFL of the pairs' models at a hospital; None for
        ``aggregation``. The mean of devices that an edge node hosts is that node's own.
    secure_sum : bool or SecureSum (default: False)
        Whether the server sees means alone, of a batch's devices, of hospitals and of edges (``SecureSum``
        for other settings than the defaults): parties must answer ``train.upload``, ``query.sum_keys`` and
        ``query.sum_shares``, as those of ``hsgd_client`` do. Only with ``sealed``. A round is two exchanges
        longer, and with devices as nodes each of its intervals. Where too few of a batch's devices survive,
        theta_2 of the group stays; where too few hospitals or edges do, the round is repeated.
        ``max_update_norm_ratio`` is then held against means, and K_m of (2) is how many people a party has.
    min_sum_devices : int (default: 16)
        Devices without which there is no sum of a batch's, 3 to 255 and ``SecureSum.min_nodes`` at least. In
        one of fewer a unit of the first layer may be one person's alone, whose features the mean then tells.
    adaptive : Adaptive or None (default: None)
        When rho, delta and F0 are estimated, and P, Q and eta chosen anew.
    compute_seconds : float (default: 0.0)
        t_c of one iteration, >= 0.
    rates : Rates (default: PAPER_RATES)
        Of the links.
    raw_bytes, raw_seconds : float (default: 0.0)
        Transfer of raw data before TDCD, per original group, and how long it delays the start; >= 0.
    own : OwnData or None (default: None)
        The parties' data are their own: who has whom is matched by keyed hashes, ``initial_arrays`` is taken
        no notice of, and what ``evaluate_fn`` returns is completed with the metrics of people held out,
        each time that it returns something (without one, each round). A run starts when
        ``min_available_nodes`` parties are there and a group is complete, a hospital with an edge or a device
        that has one of its people; before each round those that came are taken in, and those that left are
        let go. Batches are drawn from, and K_m of (2) counts, the people whose parties are there.
    **options
        See ``FederationOptions``. Nodes are hospitals, and devices or edges; without ``own`` all must be
        there at the start. Nodes do not evaluate: a hospital must not see theta_2.

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
        upload_noise: UploadNoise | None = None,
        sealed: bool = False,
        aggregation: str = "mean",
        device_aggregation: str | None = None,
        secure_sum: bool | SecureSum = False,
        min_sum_devices: int = MANY_DEVICES,
        adaptive: Adaptive | None = None,
        compute_seconds: float = 0.0,
        rates: Rates = PAPER_RATES,
        raw_bytes: float = 0.0,
        raw_seconds: float = 0.0,
        own: OwnData | None = None,
        **options: Unpack[FederationOptions],
    ) -> None:
        require_intervals(P=global_interval, Q=local_interval)
        in_range("participation", participation, 0.0, 1.0, open_below=True)
        int_at_least(0, halving_period=halving_period)
        in_range("learning_rate", learning_rate, 0.0, 1e300, open_below=adaptive is not None)
        in_range("mu", mu, 0.0, 1e300)
        one_of("method", method, Method)
        if num_groups is not None:
            int_at_least(1, num_groups=num_groups)
        if options.setdefault("fraction_evaluate", 0.0) != 0.0:
            raise ValueError(f"fraction_evaluate is {options['fraction_evaluate']!r}; valid is 0 in HSGD")
        needed, places = options.get("min_available_nodes", 2), options.get("num_clients")
        if own is None and places not in (None, needed):
            raise ValueError(
                f"num_clients is {places!r}; valid is min_available_nodes = {needed}: without own data "
                "no party can be away when the run starts"
            )
        self.system = System(
            Method(method), aggregate, original_groups, compute_seconds, rates, raw_bytes, raw_seconds
        )
        self.system.check(adaptive)
        self.participation = participation
        self.mu = mu
        self.num_groups = num_groups
        if noise is not None and upload_noise is not None:
            for key in ("delta", "source"):
                ours, theirs = getattr(upload_noise, key), getattr(noise, key)
                if ours != theirs:
                    raise ValueError(f"upload_noise has {key} {ours!r}; valid is that of noise, {theirs!r}")
        if upload_noise is not None and adaptive is not None:
            raise ValueError("adaptive is set; valid is None with upload_noise: estimates are of exact steps")
        self.means = Means.of(aggregation, device_aggregation, secure_sum, min_sum_devices)
        self.means.check(self.system, num_groups, sealed=sealed, adaptive=adaptive is not None)
        self.noise = noise
        self.upload_noise = upload_noise
        self.sealed = sealed
        self.adaptive = adaptive
        self.own = own
        self._asked_pace = Pace(global_interval, local_interval, learning_rate, halving_period)
        federation = Federation(**options)
        deviation = 0.0 if upload_noise is None else upload_noise.clip * upload_noise.multiplier
        self._hold = partial(federation.check_update, noise=deviation)
        self._sums: PartySums | None = None
        if (sums := self.means.sums) is not None:
            self._sums = PartySums(
                sums, federation, upload_noise is None, self.means.least_devices, self._hold
            )
        super().__init__(federation)

    # State.

    @property
    def iterations(self) -> int:
        """t, local iterations so far."""
        return self._iterations

    @property
    def total_iterations(self) -> int | None:
        """The iterations that a run that chooses P itself was planned for."""
        return self.adaptive.iterations if self.adaptive is not None and self.adaptive.apply else None

    @property
    def finished(self) -> bool:
        """Whether a run that chooses P itself has made the iterations planned, or none is to train at all."""
        if self.own is not None and self.own.trained is not None:
            return True
        return self.total_iterations is not None and self.iterations >= self.total_iterations

    @property
    def report(self) -> ExchangeReport:
        """What all exchanges of the last round sent, got and lost."""
        return self._waves.report

    @property
    def aggregate(self) -> bool:
        """Whether there is one global model; False where every group keeps its own."""
        return self.system.aggregate

    @property
    def pace(self) -> Pace:
        """P, Q and eta in use."""
        return self._pacer.pace

    @property
    def seen(self) -> Seen | None:
        """The last estimate of the constants."""
        return self._pacer.seen

    def current_arrays(self) -> ArrayRecord | None:
        """Return the global model, or the mean of groups that are kept apart; None before the first round."""
        return None if self._cloud is None else self._record(self._cloud.theta)

    def models(self) -> list[ArrayRecord]:
        """Return each group's model at the end of the last round: without a cloud they are its result."""
        if self._cloud is None:
            return []
        numbers = self._cloud.groups or [group.number for group in self.groups] or range(len(self._sizes))
        return [self._record(self._cloud.start(m)) for m in numbers]

    def _forget(self) -> None:
        self.groups: list[Group] = []
        self._agreed: Agreed | None = None
        self._setup: OwnSetup | None = None
        self._dealt: DealtSetup | None = None
        self._matching: Matching | None = None
        self._matched_at = 0
        self._unmatched: Counter[str] = Counter()
        self.encodings = (0, 0)  # e1 and e2
        # Of people, by group; 0 of one that sat out so far.
        self._sizes: list[int] = []
        self._cloud: Cloud | None = None
        # By group, the most people that were there.
        self._most: dict[int, int] = {}
        self._iterations = 0
        self._pacer = Pacer(self._asked_pace, self.adaptive)
        self._exposure = Exposure()
        self._links = SealedLinks(self.settings.seed) if self.sealed else None
        if self._sums is not None:
            self._sums.forget()
        # Under which node id, or in which answer, each party told its introduction.
        self._greeted: dict[int, Any] = {}
        self._waves = Waves(self.federation, 0)
        self._interval: LocalInterval | None = None
        self._runs: list[GroupRound] = []
        self._contents: list[RecordDict] = []

    def _state(self) -> dict[str, Any]:
        return {
            **self._known_cloud().state_dict(),
            **self._pacer.state_dict(),
            "iterations": self._iterations,
            "group-sizes": list(self._sizes),
            "exposure": self._exposure.state_dict(),
            **({} if self._agreed is None else {"own": self._agreed.state_dict()}),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._cloud = Cloud.restored(state, self.aggregate, self._combine)
        self._pacer.load_state_dict(state)
        self._iterations = int(state["iterations"])
        self._sizes = [int(size) for size in state["group-sizes"]]
        self._exposure.load_state_dict(state["exposure"])
        self._agreed = Agreed.restored(state["own"]) if "own" in state else None

    # Flower's interface.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Make all exchanges of the round but the last, and return that one's messages."""
        self._begin_round(server_round)
        if self._links is not None:
            self._links.begin_round()
        self._exposure.begin_round()
        self._set_up(arrays, grid)
        raised, self._waves = self._waves.raised, Waves(self.federation, server_round)
        self._meet(grid, raised)
        self._greet(grid, raised)
        if server_round == 1 and not self.ledger.total().messages:
            self._move_raw_data()
        if self.groups:
            self._replan(server_round, config, grid)
        cloud = self._known_cloud()
        combine = self.means.combine(self.means.devices, self.federation)
        self._runs = [GroupRound(g, cloud.start(g.number), self.system.pairs, combine) for g in self.groups]
        self._contents = []
        self.federation.begin_bounds(server_round)
        self.federation.fell_back = 0
        first, P, Q = self._iterations, self.pace.P, self.pace.Q
        for t in range(first, first + P, Q):
            self._choose(t, starts=t == first)
            terms = self._terms(config, t, steps=Q, starts=t == first, uploads=t + Q == first + P)
            interval = LocalInterval(
                self._runs, terms, self._schema(), self._books(), server_round, self._hold
            )
            self._exchange(interval, grid)
            if not terms.told:
                self._update(interval, grid)
                self._contents += interval.contents
            if self._sums is not None and not terms.uploads:
                self._sum_devices(self._sums, interval, terms, grid)
        self._interval = interval
        if self._sums is not None:
            told = terms.upload()
            return self._sums.open(
                server_round, grid, self._waves, self._runs, told, cloud.theta, self._people()
            )
        return self._waves.open(grid, UPDATE, self._asked_to_upload(interval), interval.check_update)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """End the round: edges average their devices, (1), and the cloud its groups, (2)."""
        interval = self._interval
        if interval is None:
            raise RuntimeError("No round is open: configure_train comes first.")
        P, Q, *_ = self.pace
        self._advance(P, Q)
        groups = self._averaged(interval, self._waves.close(replies), server_round)
        if not groups:
            return None, None
        metrics = self._metrics(server_round, groups)
        self._iterations += P
        metrics["iterations"] = self._iterations
        self.federation.completed = server_round
        return self.current_arrays(), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return no messages: no node may see the whole model."""
        return []

    def summary(self) -> None:
        """Log the settings."""
        P, Q, eta0, period = self.pace
        log(INFO, "\t├──> Method: %s%s", self.system.method, "" if self.aggregate else ", groups kept apart")
        log(INFO, "\t├──> P = %d | Q = %d | alpha = %g | mu = %g", P, Q, self.participation, self.mu)
        log(INFO, "\t├──> eta = %g%s", eta0, f", halved every {period} iterations" if period else "")
        if self.noise is not None:
            log(INFO, "\t├──> Noise: clip = %g, multiplier = %g", self.noise.clip, self.noise.multiplier)
        if (noise := self.upload_noise) is not None:
            log(INFO, "\t├──> Noise of uploads: clip = %g, multiplier = %g", noise.clip, noise.multiplier)
        if (report := self.privacy_report()) is not None and report.unprotected:
            log(INFO, "\t├──> Privacy: %s", report)
        if self.sealed:
            log(INFO, "\t├──> Links of hospital and devices are sealed")
        log(INFO, "\t├──> Means: %s", self.means)
        if self.adaptive is not None:
            log(INFO, "\t├──> Adaptive: %s", self.adaptive)
        if self.groups:
            log(INFO, "\t├──> %d groups of %s people", len(self.groups), [g.size for g in self.groups][:10])
        self.federation.log_keys()

    # What becomes of the groups' models.

    @property
    def _combine(self) -> Combine | None:
        """The rule in place of the mean of groups."""
        return self.means.combine(self.means.groups, self.federation)

    def _averaged(self, interval: LocalInterval, replies: list[Reply], server_round: int) -> int:
        """Let the cloud average the groups that are left, (2); return how many, 0 where they are too few."""
        least = max(1, min(self.settings.min_train_nodes, len(self.groups)))
        if self._sums is not None:
            mean = self._sums.close(server_round, replies, self._runs, self._books())
            if mean is None or mean.groups < least:
                return 0
            self._known_cloud().take_sums(mean.head_and_hospital, mean.device)
            self._contents.append(mean.metrics)
            return mean.groups
        interval.updated(replies)
        self._contents += interval.contents
        there = {run.group.number: run.model for run in self._runs if run.model is not None}
        if len(there) < least:
            return 0
        self._known_cloud().take(there, {group.number: group.size for group in self.groups})
        return len(there)

    def _people(self) -> dict[int, float]:
        """Return how many people a group's parties may count by: all that were matched, held out or not.

        With dealt data those that nobody else has too, which a party counts: at most as many again.
        """
        held = {} if self._matching is None else self._matching.held_out
        for group in self.groups:
            m, matched = group.number, group.size + (held[group.number].size if group.number in held else 0)
            told = self._most.get(m, 0) if self._dealt is None else self._dealt.sizes.get(m, 0)
            self._most[m] = max(matched, min(told, 2 * matched))
        return {m: float(most) for m, most in self._most.items()}

    def _sum_devices(self, sums: PartySums, interval: LocalInterval, terms: Terms, grid: Grid) -> None:
        """Have the means of devices between two intervals of a round."""
        messages = sums.open(interval.server_round, grid, self._waves, self._runs, terms.upload())
        replies = self._waves.close(collect(grid, messages, self.federation.timeout) if messages else ())
        sums.close(interval.server_round, replies, self._runs, self._books())

    # Set-up.

    def _set_up(self, arrays: ArrayRecord, grid: Grid) -> ArrayRecord:
        """Take the initial model, and find out who belongs together; once a run."""
        if self._links is not None:
            self._links.begin(grid.run.run_id)
        if self.own is not None and self._matching is None:
            built = self._match(grid)
            arrays = arrays if built is None else built
        if self._cloud is None:
            vector = self.federation.vector(arrays)
            theta = Blocks(self.federation.known_layout()).split(vector)
            self._cloud = Cloud(theta, self.aggregate, self._combine)
        if not self.groups and self.own is None:
            self._pair(grid)
        return arrays

    def _match(self, grid: Grid) -> ArrayRecord | None:
        """Match the people of parties with data of their own; return the model that a new run starts from."""
        assert self.own is not None
        trained = self.own.trained
        if trained is not None:
            self._agreed = Agreed.restored(trained["own"])
        self._setup = OwnSetup(self.federation, self.own, self.num_groups, self.sealed)
        matching, self._agreed = self._setup.run(grid, self._agreed)
        if trained is not None:
            matching.held_out = {group.number: group for group in matching.groups}
        if self.system.merged and len(matching.groups) > 1:
            raise PairingError(
                f"{len(matching.groups)} hospitals; valid is one in {self.system.method}, or aggregate=False"
            )
        if trained is None:
            self._check_groups(matching)
        self._take_part(matching, self._setup)
        self._take_links(self._setup, grid)
        if self._links is not None:
            self._links.log()
        self._matched_at = self.completed_rounds
        form = matching.form
        if self._cloud is not None:
            return None
        built = self.own.build(form.hospital_shape, form.device_shape, len(form.classes))
        if trained is None:
            return built
        self.federation.vector(built)
        self._cloud = Cloud.restored(trained, self.aggregate, self._combine)
        if [len(block) for block in self._cloud.theta] != [*Blocks(self.federation.known_layout()).sizes]:
            raise ValueError("trained is the state of another model; valid is one of this run's")
        return self._record(self._cloud.theta)

    def _meet(self, grid: Grid, raised: Collection[int]) -> None:
        """Take in parties with data of their own that came, let go of those that left, and match anew."""
        if self._dealt is not None:
            self._hear(self._dealt, *self._dealt.meet(grid), grid)
        if self.own is None or self._setup is None or self._agreed is None:
            return
        every = self.own.rematch_every
        due = every > 0 and self.completed_rounds - self._matched_at >= every
        matching = self._setup.meet(grid, self._agreed, raised, reread=due)
        if due:
            self._matched_at = self.completed_rounds
        if matching is not None:
            if self.system.merged:  # There is one hospital, the first.
                matching.groups = [group for group in matching.groups if group.number in self._setup.first]
            self._take_part(matching, self._setup)
        self._take_links(self._setup, grid)
        roster = self.federation.gather(grid)
        missed = len(roster)
        if self.federation.places is None:  # Nobody is missed who was never there.
            missed = sum(not node.vacant for node in roster.nodes)
        if away := missed - len(roster.online):
            self._waves.report.rejected["offline"] += away
        self._waves.report.rejected += self.federation.left_out(self.completed_rounds + 1)

    def _greet(self, grid: Grid, raised: Collection[int]) -> None:
        """Take the introductions of parties that are new, came under another node id, or forgot theirs."""
        if self._links is None or self.own is not None:
            return
        there = self.federation.gather(grid).node_ids
        new = [i for i, node_id in there.items() if i in raised or self._greeted.get(i) != node_id]
        taking_part = {i for group in self.groups for i in group.partitions} if new else set()
        new = [i for i in new if i in taking_part]
        if not new:
            return
        content = RecordDict({"config": question(self.federation, sealed=True)})
        waves = Waves(self.federation, self.completed_rounds, booked=False)
        timeout = min(self.federation.timeout, self.settings.max_wait)
        contents = [(i, content) for i in new]
        for reply in waves.ask(grid, PAIR, contents, lambda _, told: introduction(told), timeout):
            self._links.take(reply.node.partition_id, reply.value.link)
            self._greeted[reply.node.partition_id] = reply.node.node_id

    def _take_links(self, setup: OwnSetup, grid: Grid) -> None:
        """Take the introductions of parties with data of their own that told who they are anew."""
        if self._links is None:
            return
        for i, one in sorted(setup.parties.there(grid).items()):
            if self._greeted.get(i) is not one:
                self._links.take(i, one.link)
                self._greeted[i] = one

    def _take_part(self, matching: Matching, setup: OwnSetup | DealtSetup) -> None:
        self._matching, self._unmatched = matching, setup.counts
        self.groups, self.encodings = matching.groups, setup.encodings
        if self._links is not None:
            self._links.place([*matching.groups, *matching.held_out.values()])
        if isinstance(setup, DealtSetup):
            self._sizes = [setup.sizes.get(m, 0) for m in range(max(setup.sizes) + 1)]
        else:
            self._sizes = [group.size for group in self.groups]

    # People who are held out.

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
        """Run the strategy, see ``FederatedStrategy.start``; ``own`` has people held out evaluated too."""

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            told = MetricRecord() if evaluate_fn is None else evaluate_fn(server_round, arrays)
            if told is None:
                return None
            return MetricRecord({**told, **self.evaluate_held_out(grid, arrays)})

        evaluated = evaluate_fn if self.own is None else evaluate
        return super().start(
            grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluated
        )

    def evaluate_held_out(self, grid: Grid, arrays: ArrayRecord) -> dict[str, float]:
        """Return the metrics of people who do not train, see ``score_metrics``; empty where there are none.

        Groups that are kept apart are evaluated by their own models, all others by ``arrays``.
        """
        matching, own = self._matching, self.own
        if own is None or matching is None or not matching.held_out:
            return {}
        cloud = self._known_cloud()
        layout = self.federation.known_layout()
        whole = Blocks(layout).split(self.federation.vector(arrays))
        models = {m: whole if self.aggregate else cloud.start(m) for m in matching.held_out}
        noise: dict[str, Any] = {}
        if self.noise is not None:
            noise = self.noise.instructions(self.settings.seed)
        told = evaluate_groups(
            Waves(self.federation, self.completed_rounds), grid, matching.held_out, models,
            self._schema(plain=True), {"t": self._iterations, **noise}, self._links,
        )  # fmt: skip
        return score_metrics(told, own.specificity)

    def _pair(self, grid: Grid) -> None:
        shapes = zip(self.federation.known_layout().keys, self.federation.known_layout().shapes, strict=True)
        widths = {shape[1] for key, shape in shapes if key.startswith("head.") and len(shape) > 1}
        dealt = DealtSetup(self.federation, self.num_groups, self.sealed, widths)
        matching = dealt.run(grid, {m: size for m, size in enumerate(self._sizes) if size})
        if self.system.merged and len(matching.groups) > 1:
            raise PairingError(
                f"{len(matching.groups)} hospitals; valid is one in {self.system.method}, or aggregate=False"
            )
        self._check_groups(matching)
        self._dealt = dealt
        self._hear(dealt, matching, set(dealt.parties.known), grid)
        if self._links is not None:
            self._links.log()
        if alone := [group.number for group in self.groups if self._count(group) == 1]:
            log(WARNING, "One device a batch in groups %s: their edge's mean is its model.", alone[:10])

    def _hear(self, dealt: DealtSetup, matching: Matching | None, told: Collection[int], grid: Grid) -> None:
        """Take what parties with dealt data told: their links, and the groups that they make up."""
        if self._links is not None:
            nodes = self.federation.gather(grid).nodes
            for i, party in dealt.parties.known.items():
                if i in told:
                    self._links.take(i, party.link)
                    self._greeted[i] = nodes[i].node_id
        self._unmatched = dealt.counts
        if matching is not None:
            self._take_part(matching, dealt)

    def _check_groups(self, matching: Matching) -> None:
        batches = [(group, self._count(group)) for group in matching.groups]
        self.means.check_groups(batches, self.system, whole=self.pace.P == self.pace.Q)

    def _move_raw_data(self) -> None:
        if self.system.raw_bytes:
            self._books().raw_data(1, self.system.raw_bytes)
        self.clock.advance(self.system.raw_seconds)

    def _replan(self, server_round: int, config: ConfigRecord, grid: Grid) -> None:
        """Estimate the constants where that is due, and choose P, Q and eta by them."""

        def ask(interval: LocalInterval) -> None:
            self._exchange(interval, grid)
            self._update(interval, grid)
            self._advance(1, 1)

        def estimate(adaptive: Adaptive, eta: float) -> Seen:
            terms = self._terms(config, self._iterations, steps=1, starts=True, uploads=True)
            prober = Prober(
                self.groups, [self._count(group) for group in self.groups], ask, self._books(plain=True),
                terms, seed=self.settings.seed, server_round=server_round,
            )  # fmt: skip
            return prober.estimate(adaptive.probing, self._known_cloud().theta, eta)

        self._pacer.replan(server_round, self._iterations, estimate)

    # A local interval.

    def _terms(self, config: ConfigRecord, t: int, *, steps: int, starts: bool, uploads: bool) -> Terms:
        seed = self.settings.seed
        noise = {} if self.noise is None else self.noise.instructions(seed)
        protection = {} if self.upload_noise is None else self.upload_noise.instructions(seed)
        return Terms(
            t, steps, starts, uploads, self.pace.eta0, self.pace.period, self.mu, noise, protection,
            self._links, self._sums is not None, dict(config),
        )  # fmt: skip

    def _choose(self, t: int, starts: bool) -> None:
        """Draw A_m; of JFL it stays for the round, less those who were silent."""
        for run in self._runs:
            if starts or not self.system.pairs:
                ids = draw(run.group, self._count(run.group), seed=self.settings.seed, t=t)
            else:
                ids = run.ids
            run.edge.choose(ids)

    def _exchange(self, interval: LocalInterval, grid: Grid) -> None:
        if self.noise is not None:
            for run in interval.runs:
                self._exposure.count_encodings(run.group.number, run.ids)
        if not interval.terms.starts and not self.sealed:
            self._exposure.note_open(HEADS)
        contents = interval.exchange()
        interval.exchanged(self._waves.ask(grid, EXCHANGE, contents, interval.check_exchange))

    def _update(self, interval: LocalInterval, grid: Grid) -> None:
        contents = self._asked_to_upload(interval)
        interval.updated(self._waves.ask(grid, UPDATE, contents, interval.check_update))

    def _asked_to_upload(self, interval: LocalInterval) -> list[tuple[int, RecordDict]]:
        """Return an update's contents, and count what they ask for."""
        for run in interval.runs:
            if self.upload_noise is not None and not run.lost:
                self._exposure.count_uploads(
                    run.group.number,
                    run.ids,
                    hosted=run.group.hosted,
                    pairs=self.system.pairs,
                    ends=interval.terms.uploads,
                )
        return interval.update()

    def privacy_report(self) -> Report | None:
        """Return what was told of the person of whom most was; None without any noise."""
        if self.noise is None and self.upload_noise is None:
            return None
        if self.own is not None and (
            self.own.standardise == "federated" or self.own.class_weights == "balanced"
        ):
            self._exposure.note_open(SUMS)
        return self._exposure.report(self.noise, self.upload_noise, hidden=self.sealed)

    def _metrics(self, server_round: int, num_groups: int) -> MetricRecord:
        metrics = self.federation.train_metrics(self._contents)
        P, Q, *_ = self.pace
        metrics.update({"P": P, "Q": Q, "eta": self.pace.eta(self._iterations), "groups": num_groups})
        due = len(self.groups) if self._dealt is None else max(len(self.groups), self.num_groups or 0)
        metrics["lost-groups"] = due - num_groups
        if missed := sum(run.missed for run in self._runs):
            metrics["missed-intervals"] = missed
        if (report := self.privacy_report()) is not None:
            metrics.update(report.metrics())
        if self._links is not None:
            metrics.update(self._links.metrics())
        metrics.update(self._pacer.metrics(server_round))
        metrics.update({reason: number for reason, number in sorted(self._unmatched.items()) if number})
        return metrics

    # What things hold and cost.

    def _count(self, group: Group) -> int:
        return batch_size(self.participation, group.size)

    def _schema(self, plain: bool = False) -> Schema:
        # Beside what is noisy, or goes into a sum, no loss is told.
        protected = self.upload_noise is not None or self._sums is not None
        theta = self._known_cloud().theta
        return self.system.schema(theta, self.encodings, plain, sealed=self.sealed, protected=protected)

    def _books(self, plain: bool = False) -> Books:
        return self.system.books(self.ledger, self._schema(plain))

    def _advance(self, P: int, Q: int) -> None:
        """Let a global interval of the slowest group pass."""
        batches = [self._count(group) for group in self.groups]
        self.clock.advance(self.system.seconds(self._schema(), batches, P, Q))

    def _known_cloud(self) -> Cloud:
        if self._cloud is None:
            raise RuntimeError("No model yet: configure_train or start comes first.")
        return self._cloud

    def _record(self, theta: Theta) -> ArrayRecord:
        layout = self.federation.known_layout()
        return layout.unflatten(Blocks(layout).join(theta))
