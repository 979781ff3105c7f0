"""The app's settings, and the strategy for them."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from flwr.app import UserConfigValue

from hedgerow.clients import TASK_TEXTS
from hedgerow.clients.gossip.node import drawn_interval
from hedgerow.sim.runs.common_settings import (
    IterationSettings,
    MonitorSettings,
    PeerSettings,
    RunSettings,
    TaskSettings,
)
from hedgerow.sim.runs.kinds import (
    Delta,
    FractionBelow1,
    Nodes,
    NodesOr0,
    NotNegative,
    Positive,
    PositiveFraction,
    Rounds,
    Steps,
    UnitFraction,
    above,
    choice,
    in_range,
    number,
    text,
    whole,
)
from hedgerow.sim.runs.settings import Rules, Setting, setting
from hedgerow.strategies.ceps.baselines import (
    BEER,
    DCDPSGD,
    DPDSGT,
    DPSGD,
    SGP,
    ChocoSGD,
    DFedAvgM,
    DFedSAM,
    Matcha,
)
from hedgerow.strategies.ceps.privacy import Privacy
from hedgerow.strategies.ceps.strategy import CEPS, OneBitCode
from hedgerow.strategies.gossip.monitor import Monitor
from hedgerow.strategies.gossip.sites import Site
from hedgerow.strategies.gossip.strategy import Gossip
from hedgerow.strategies.registry import REGISTRY_TEXTS, Registry
from hedgerow.strategies.roster import Roster
from hedgerow.strategies.round_end import RoundCallback
from hedgerow.strategies.topology import ONE_PEER, validate_topology
from hedgerow.tasks import OWN
from hedgerow.wire.budget import Budget
from hedgerow.wire.links.peers import PeerCredentials
from hedgerow.wire.robust_means import NEIGHBOURHOOD_RULES, neighbourhood_rule
from hedgerow.wire.sensing import MATRICES

METHODS = (
    "ceps", "d-psgd", "d-psgd-dn", "d-psgd-pc", "dfedavgm", "dfedsam", "dcd-psgd", "choco-sgd", "beer", "sgp",
    "sgp-dn", "dp-dsgt", "matcha",
)  # fmt: skip
# Who takes a directed graph.
_DIRECTED = ("sgp", "sgp-dn")
# A node holds its records of `linear` as a dense matrix, of at most as many entries: 1 GiB.
_MAX_ENTRIES = 2**27
_MAX_FEATURES = 2**24

Features = Annotated[int, whole(1, _MAX_FEATURES)]
FeaturesOr0 = Annotated[int, whole(0, _MAX_FEATURES)]
Label = Annotated[int, whole(0, 2**31 - 1)]


class Settings(MonitorSettings, PeerSettings, TaskSettings, IterationSettings, RunSettings):
    """The app's settings."""

    TEXTS: ClassVar = {**TASK_TEXTS, **REGISTRY_TEXTS}

    method: Annotated[str, choice(*METHODS)] = setting(
        "ceps", "a method from the table at the top of README.md", first=True
    )
    iterations: int = setting(61, "number of iterations K")
    num_clients: Nodes = setting(16, "number of nodes m")
    topology: Annotated[
        str, text("a graph's name, 'regular(8)' or 'ring' for example; empty: regular of degree m / 4")
    ] = setting(
        "",
        "a connected graph: `ring`, `complete`, `regular(8)`, `erdos-renyi(0.4)`, …; empty: random "
        "regular. `sgp` also accepts directed graphs: `directed-ring`, `directed-exponential`, "
        "`directed-out(4)`, `directed-erdos-renyi(0.3)`, `one-peer-exponential`",
        first=True,
    )
    participation: PositiveFraction = setting(
        0.5,
        "r: fraction of its neighbors that a node requests models from (`ceps`, `d-psgd-pc`, "
        "`dfedavgm`, `dfedsam`)",
        first=True,
    )
    sparsity: Features = setting(
        10, "s, nonzeros of each model; in `linear` also of the true model", first=True
    )
    codec: Literal["1bcs", "sparse16", "sparse32", "sparse64", "dense32", "dense64"] = setting(
        "1bcs",
        "message format of `ceps`: one bit per measurement, or the model itself, as indices and "
        "values or dense",
        first=True,
    )
    measurements: FeaturesOr0 = setting(0, "number of signs d in a one-bit message (0: n / 2)")
    expand: Literal["consistent", "literal"] = setting(
        "consistent",
        "`consistent`: recover the scale that Algorithm 2 divides out; `literal`: follow the "
        "algorithm literally, with base gamma",
    )
    compand: Literal["log", "none"] = setting("log", "measure sign(w) log(1 + abs(w)) (`log`), or w (`none`)")
    gamma: Annotated[float, above(1)] = setting(5.0, "base for `expand` = `literal`")
    decoder: Literal["gpsp", "biht"] = setting("gpsp", "algorithm that recovers the model from the signs")
    phi: Annotated[str, choice(*MATRICES)] = setting(
        "gaussian", "measurement matrix; `srht` is a transform, for large models"
    )
    phi_density: Annotated[float, in_range(0.5, 1.0)] = setting(
        1.0, "fraction of nonzeros in a Gaussian measurement matrix"
    )
    phi_owner: Literal["sender", "receiver"] = setting("sender", "whose measurement matrix is used")
    stragglers: bool = setting(
        False, "use the neighbors that reply first instead of neighbors drawn in advance", "robustness"
    )
    interval_low: Rounds = setting(
        10, "lower end of the range from which a node's communication interval kappa is drawn, in iterations"
    )
    interval_high: Rounds = setting(15, "upper end of that range")
    mu: Positive = setting(0.1, "proximal weight of a local step", "training")
    sigma_rule: Literal["paper", "fixed_c"] = setting(
        "paper", "compute sigma from the data's largest singular value (`paper`), or as c / m_i (`fixed_c`)"
    )
    c: Positive = setting(1.0, "c of `fixed_c`")
    privacy: Literal["none", "paper", "sound"] = setting(
        "none",
        "`none`: no noise; `paper`: noise as printed in the paper, which guarantees nothing; `sound`: "
        "noise with a guarantee",
        "privacy",
    )
    epsilon: Positive = setting(0.5, "epsilon per release", "privacy")
    delta: Delta = setting(1e-5, "delta per release", "privacy")
    sensitivity: Positive = setting(0.1, "u_i in the paper's calibration", "privacy")
    clip: Positive = setting(1.0, "norm to which `sound` clips the gradient of each record", "privacy")
    noise_source: Literal["entropy", "seed"] = setting(
        "entropy",
        "source of the noise of `sound`: the operating system (`entropy`), or `seed`, for simulations "
        "that must be repeatable (and guarantee nothing)",
        "privacy",
    )
    learning_rate: Positive = setting(0.1, "step size of the baselines", "training")
    momentum: FractionBelow1 = setting(0.9, "momentum of DFedAvgM", "training")
    rho: NotNegative = setting(0.05, "rho of DFedSAM")
    local_steps: Steps = setting(10, "steps of the baselines between two communications", "training")
    bits: Annotated[int, whole(0, 16)] = setting(
        0, "quantizer bits of DFedAvgM (0: no quantization), and of DCD-PSGD, CHOCO-SGD and BEER (0: 8)"
    )
    top_k: FeaturesOr0 = setting(
        0,
        "number of largest entries of a vector that CHOCO-SGD and BEER send, at 32 bits each (0: all "
        "entries, at `bits` each)",
    )
    step_gamma: UnitFraction = setting(
        0.0, "consensus step of CHOCO-SGD and BEER (0: the small step for which convergence is proved)"
    )
    contraction: UnitFraction = setting(
        0.0, "delta of the compressor in that proof (0: what the compressor guarantees for every vector)"
    )
    budget: PositiveFraction = setting(0.5, "communication budget of MATCHA")
    sealed: bool = setting(
        True,
        "neighbors encrypt payloads and decoding seeds for each other, so the server only relays "
        "them. A simulation's results do not change. Adds 28 bytes per message",
        "privacy",
    )
    peers: str = setting(
        "",
        "several sites, each a SuperLink with a run of its own: host:port at which each site listens "
        "for the others, in order, including this one. Node i of m belongs to site floor(i S / m)",
    )
    site: NodesOr0 = setting(0, "index of this site in `peers`, from 0", "deployment")
    tolerance: NotNegative = setting(
        0.0, "stop when the consensus measure falls to this value (0: never)", "run"
    )
    problem: Literal["linear", "logistic", "network"] = setting(
        "linear",
        "`linear`: Example 1; `logistic`: Example 2, on two classes of images or a LIBSVM file; "
        "`network`: a small network on images, whose change from a common initial model is sparse",
        "data",
        first=True,
    )
    features: Features = setting(1000, "number of features n in `linear`", "data", own_data=False)
    noise: Annotated[float, number("a number from 0 to 1e6", 0, 1e6)] = setting(
        0.5, "observation noise in `linear`", "data", own_data=False
    )
    samples_low: Features = setting(
        250, "minimum number of samples per node in `linear`", "data", own_data=False
    )
    samples_high: Features = setting(
        750, "maximum number of samples per node in `linear`", "data", own_data=False
    )
    class_0: Label = setting(0, "first class of `logistic`", "data", own_data=False)
    class_1: Label = setting(1, "second class of `logistic`", "data", own_data=False)
    libsvm: Annotated[str, text("a file in data-dir, or empty")] = setting(
        "", "LIBSVM file for `logistic`, instead of images", "data", own_data=False
    )
    l2: NotNegative = setting(0.001, "lambda of `logistic`", "data")
    model: str = setting("mlp", "model of `network`", first=False)
    dataset: str = setting(
        "mnist-5k", "images of `logistic` and `network`: a name from `hedgerow data`, or `module:function`"
    )
    partition: str = setting(
        "iid",
        "how the images of `network` are split across nodes; `own`: each node uses its own data, for "
        "`logistic` and `network`",
        first=False,
    )
    aggregation: Annotated[str, text(NEIGHBOURHOOD_RULES, neighbourhood_rule)] = setting(
        "mean",
        "how a node of `ceps` combines its own and its neighbors' models: the mean, or a robust rule",
        "robustness",
    )
    evaluate_every: int = setting(1, "events between records of the monitor's metrics")
    train_loss_samples: int = setting(0, "not used by this app")
    min_replies: int = setting(1, "minimum number of valid replies per event")
    checkpoint_every: int = setting(10, "events between checkpoints")

    @classmethod
    def of_rounds(cls, rounds: object, run_config: Mapping[str, UserConfigValue]) -> int:
        """Return the iterations after which so many of them were ones at which a node communicates."""
        count = super().of_rounds(rounds, run_config)
        values = cls.checked_alone(run_config)[0]
        try:
            method = (
                None if values is None else build_strategy(values.for_all_nodes(), dim=values.features).method
            )
        except ValueError:
            method = None
        if values is None or method is None:  # An invalid value is the error to report.
            return count
        asks = map(method.instructions, range(values.num_clients))
        kappas = {
            drawn_interval(values.seed, i, cast(int, one["kappa-low"]), cast(int, one["kappa-high"]))
            for i, one in enumerate(asks)
        }
        multiples = (k for k in itertools.count(1) if any(k % kappa == 0 for kappa in kappas))
        return next(itertools.islice(multiples, count - 1, None)) + 1

    def for_all_nodes(self) -> Self:
        """Return the settings of one hub for the nodes of all sites."""
        return self.model_copy(update={"peers": "", "registry": "", "min_available_nodes": 0})

    def rules(self) -> Rules:
        """Yield the conditions between values that are each valid."""
        yield from super().rules()
        yield self.at_most("interval-low", "interval-high")
        yield self.at_most("samples-low", "samples-high")
        own, method = self.partition == OWN, f"method = {self.method!r}"
        match self.problem:
            case "linear":
                yield self.at_most("sparsity", "features")
                most = _MAX_ENTRIES // self.features
                yield (
                    self.samples_high <= most, "samples-high",
                    f"at most {most} with features = {self.features}: a node holds their product, at most "
                    f"{_MAX_ENTRIES} numbers, 1 GiB",
                )  # fmt: skip
                yield not own, "problem", f"'logistic' or 'network' with partition = {OWN!r}"
            case "logistic" if not own and not self.libsvm:
                yield self.class_1 != self.class_0, "class-1", "another class than class-0"
        if self.topology and not (self.method == "sgp" and self.topology.strip() == ONE_PEER):
            try:
                validate_topology(self.topology, self.num_clients, directed=self.method in _DIRECTED)
            except ValueError as error:
                yield False, "", str(error)
        if self.method == "ceps":
            exact = self.privacy == "sound" and self.sigma_rule == "paper"
            yield not exact, "sigma-rule", "'fixed_c' with privacy = 'sound'"
        else:
            yield from self.usual(f"with {method}, whose weights are a mixing matrix's", "aggregation")
        if self.method in ("choco-sgd", "beer") and self.top_k:
            yield from self.usual(f"with top-k = {self.top_k}, whose values have 32", "bits")
        yield from self.usual("in this app, which does not use it", "train-loss-samples")
        yield self.bits != 1, "bits", "0 (none) or 2 to 16"
        if self.peer_addresses:
            yield from self._site_rules()
        else:
            yield from self.usual("where peers is empty", "site", *PeerSettings.table())

    def _site_rules(self) -> Rules:
        """Yield what must hold for one site of several: nobody sees the nodes and the costs of all."""
        for key in ("monitor", "stragglers"):
            yield not self.of(key), key, "False with peers"
        yield self.partition != OWN, "partition", "one of a data set with peers"
        budget = Budget.parse(self.stop_after)
        yield budget is None or budget.of == "iterations", "stop-after", "iterations=N with peers"
        try:
            site = _site(self)
            own = len(site.nodes(self.num_clients)) if site is not None else 0
        except ValueError as error:
            yield False, "", str(error)
        else:
            here = f"at most {own}, the nodes of site {self.site}"
            yield self.min_available_nodes <= own, "min-available-nodes", here


SETTINGS: Mapping[str, Setting] = Settings.table()
read = Settings.read


def _site(values: Settings) -> Site | None:
    """Return which of several sites this is; None where there is one hub for all nodes."""
    if not (peers := values.peer_addresses):
        return None
    files = values.credential_files
    return Site(
        values.site,
        peers,
        None if files is None else PeerCredentials(*files),
        values.peer_listen,
        values.peer_timeout,
    )


def build_strategy(
    values: Settings,
    *,
    dim: int,
    monitor: Monitor | None = None,
    roster: Roster | None = None,
    on_round_end: Sequence[RoundCallback] = (),
) -> Gossip:
    """Return the strategy that the settings describe, for models of dimension ``dim``."""
    site = _site(values)
    here = values.num_clients if site is None else len(site.nodes(values.num_clients))
    options: dict[str, Any] = {
        "dim": dim,
        "num_clients": values.num_clients,
        "site": site,
        "topology": values.topology or None,
        "privacy": Privacy(
            values.privacy,
            values.epsilon,
            values.delta,
            values.sensitivity,
            values.clip,
            noise_source=values.noise_source,
        ),
        "num_iterations": values.iterations,
        "monitor": monitor,
        "sealed": values.sealed,
        "seed": values.seed,
        "roster": roster,
        "registry": Registry.named(values.registry),
        "min_train_nodes": values.min_replies,
        "min_available_nodes": values.min_available_nodes or here,
        "on_round_end": on_round_end,
    }
    r, rate = values.participation, values.learning_rate
    local = {"learning_rate": rate, "local_steps": values.local_steps, **options}
    top_k = values.top_k or None
    compressed = {
        "learning_rate": rate,
        "bits": None if top_k else values.bits or 8,
        "top_k": top_k,
        "step_gamma": values.step_gamma or None,
        "delta": values.contraction or None,
        **options,
    }
    strategies: dict[str, Callable[[], Gossip]] = {
        "ceps": lambda: _ceps(values, options),
        "d-psgd": lambda: DPSGD(**local),
        "d-psgd-dn": lambda: DPSGD(dynamic=True, **local),
        "d-psgd-pc": lambda: DPSGD(participation=r, **local),
        "dfedavgm": lambda: DFedAvgM(
            momentum=values.momentum, bits=values.bits or None, participation=r, **local
        ),
        "dfedsam": lambda: DFedSAM(rho=values.rho, participation=r, **local),
        "dcd-psgd": lambda: DCDPSGD(learning_rate=rate, bits=values.bits or 8, **options),
        "choco-sgd": lambda: ChocoSGD(local_steps=values.local_steps, **compressed),
        "beer": lambda: BEER(**compressed),
        "sgp": lambda: SGP(**local),
        "sgp-dn": lambda: SGP(dynamic=True, **local),
        "dp-dsgt": lambda: DPDSGT(learning_rate=rate, **options),
        "matcha": lambda: Matcha(learning_rate=rate, budget=values.budget, **options),
    }
    return strategies[values.method]()


def _ceps(values: Settings, options: dict[str, Any]) -> CEPS:
    return CEPS(
        sparsity=values.sparsity,
        measurements=values.measurements or None,
        codec=values.codec,
        code=OneBitCode(
            expand=values.expand,
            compand=values.compand,
            gamma=values.gamma,
            decoder=values.decoder,
            phi=values.phi,
            phi_density=values.phi_density,
            phi_owner=values.phi_owner,
        ),
        participation=values.participation,
        interval=(values.interval_low, values.interval_high),
        stragglers=values.stragglers,
        mu=values.mu,
        sigma_rule=values.sigma_rule,
        c=values.c,
        aggregation=values.aggregation,
        **options,
    )
