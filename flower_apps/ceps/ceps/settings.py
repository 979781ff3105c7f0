"""The app's settings: what each key may be, and the strategy that they describe."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from hedgerow.clients import TASK_TEXTS
from hedgerow.sim.runs.common_settings import (
    IterationSettings,
    MonitorSettings,
    PeerSettings,
    RunSettings,
    TaskSettings,
)
from hedgerow.sim.runs.kinds import (
    MAX_NODES,
    MAX_ROUNDS,
    NOT_NEGATIVE,
    POSITIVE,
    NumberRange,
    above,
    choice,
    in_range,
    number,
    text,
    whole,
)
from hedgerow.sim.runs.settings import Setting, at_most, setting
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
from hedgerow.strategies.ceps.strategy import CEPS, NEIGHBOURHOOD_RULES, OneBitCode, neighbourhood_rule
from hedgerow.strategies.gossip.monitor import Monitor
from hedgerow.strategies.gossip.sites import Site
from hedgerow.strategies.gossip.strategy import Gossip
from hedgerow.strategies.parts.privacy import Privacy
from hedgerow.strategies.peers import PeerCredentials
from hedgerow.strategies.registry import Registry
from hedgerow.strategies.roster import Roster
from hedgerow.strategies.rounds import RoundCallback
from hedgerow.strategies.topology import ONE_PEER, validate_topology
from hedgerow.tasks import OWN
from hedgerow.wire.budget import Budget
from hedgerow.wire.limits import MAX_STEPS
from hedgerow.wire.sensing import MATRICES

REGISTRY = ("a file like the nodes.toml of `hedgerow deploy keys`, or empty", Registry.named)

__all__ = ["METHODS", "SETTINGS", "Settings", "build_strategy", "read"]

METHODS = (
    "ceps",
    "d-psgd",
    "d-psgd-dn",
    "d-psgd-pc",
    "dfedavgm",
    "dfedsam",
    "dcd-psgd",
    "choco-sgd",
    "beer",
    "sgp",
    "sgp-dn",
    "dp-dsgt",
    "matcha",
)
# Who takes a directed graph.
_DIRECTED = ("sgp", "sgp-dn")
# A node holds its records of `linear` as a dense matrix, of at most as many entries: 1 GiB.
_MAX_ENTRIES = 2**27
_MAX_FEATURES = 2**24
_MAX_CLASS = 2**31 - 1

_TASK_KEYS = ("dataset", "data-dir", "partition", "classes", "standardise", "model")

# Of a run that is one site of several; the first one says that there are some.
_SITE_KEYS = ("site", *PeerSettings.table())


class Settings(MonitorSettings, PeerSettings, TaskSettings, IterationSettings, RunSettings):
    """The app's settings."""

    TEXTS: ClassVar = {
        **{key: TASK_TEXTS[key] for key in _TASK_KEYS},
        "registry": REGISTRY,
        "aggregation": (NEIGHBOURHOOD_RULES, neighbourhood_rule),
    }

    method: Annotated[str, choice(*METHODS)] = setting(
        "ceps", "a row of the table at the top of README.md", first=True
    )
    iterations: int = setting(61, "iterations K")
    num_clients: Annotated[int, whole(1, MAX_NODES)] = setting(16, "nodes m")
    topology: Annotated[
        str, text("a graph's name, 'regular(8)' or 'ring' for example; empty: regular of degree m / 4")
    ] = setting(
        "",
        "a connected graph: `ring`, `complete`, `regular(8)`, `erdos-renyi(0.4)`, …; empty: random regular. "
        "`sgp` also takes directed ones: `directed-ring`, `directed-exponential`, `directed-out(4)`, "
        "`directed-erdos-renyi(0.3)`, `one-peer-exponential`",
        first=True,
    )
    participation: Annotated[float, in_range(0.0, 1.0, open_below=True)] = setting(
        0.5,
        "r: the share of its neighbours that a node asks (`ceps`, `d-psgd-pc`, `dfedavgm`, `dfedsam`)",
        first=True,
    )
    sparsity: Annotated[int, whole(1, _MAX_FEATURES)] = setting(
        10, "s; also of the truth in `linear`", first=True
    )
    codec: Literal["1bcs", "sparse16", "sparse32", "sparse64", "dense32", "dense64"] = setting(
        "1bcs",
        "a message of `ceps`: one bit a measurement, or the model itself as indices and values, or dense",
        first=True,
    )
    measurements: Annotated[int, whole(0, _MAX_FEATURES)] = setting(
        0, "signs d of a one-bit message (0: n / 2)"
    )
    expand: Literal["consistent", "literal"] = setting(
        "consistent", "recover the scale that Algorithm 2 divides out, or take it literally with base gamma"
    )
    compand: Literal["log", "none"] = setting("log", "measure sign(w) log(1 + abs(w)), or w")
    gamma: Annotated[float, above(1)] = setting(5.0, "base of `expand` = `literal`")
    decoder: Literal["gpsp", "biht"] = setting("gpsp", "what finds the model behind the signs")
    phi: Annotated[str, choice(*MATRICES)] = setting(
        "gaussian", "the measuring matrix; `srht` is a transform, for large models"
    )
    phi_density: Annotated[float, in_range(0.5, 1.0)] = setting(
        1.0, "nonzeros of a Gaussian measuring matrix"
    )
    phi_owner: Literal["sender", "receiver"] = setting("sender", "whose matrix measures")
    stragglers: bool = setting(
        False, "hear the neighbours that reply first, in place of some drawn before", group="robustness"
    )
    interval_low: Annotated[int, whole(1, MAX_ROUNDS)] = setting(
        10, "a node communicates every kappa iterations, drawn from here on"
    )
    interval_high: Annotated[int, whole(1, MAX_ROUNDS)] = setting(15, "and up to here")
    mu: Annotated[float, POSITIVE] = setting(0.1, "proximal weight of a local step", group="training")
    sigma_rule: Literal["paper", "fixed_c"] = setting(
        "paper", "sigma from the data's largest singular value (`paper`) or c / m_i (`fixed_c`)"
    )
    c: Annotated[float, POSITIVE] = setting(1.0, "c of `fixed_c`")
    privacy: Literal["none", "paper", "sound"] = setting(
        "none", "noise: `none`; as the `paper` prints it, which guarantees nothing; `sound`", group="privacy"
    )
    epsilon: Annotated[float, POSITIVE] = setting(0.5, "epsilon of one release", group="privacy")
    delta: Annotated[float, in_range(0.0, 1.0, open_below=True, open_above=True)] = setting(
        1e-5, "delta of one release", group="privacy"
    )
    sensitivity: Annotated[float, POSITIVE] = setting(0.1, "u_i of the paper's calibration", group="privacy")
    clip: Annotated[float, POSITIVE] = setting(
        1.0, "norm to which `sound` clips each record's gradient", group="privacy"
    )
    noise_source: Literal["entropy", "seed"] = setting(
        "entropy",
        "where `sound` takes its noise from: the operating system, or `seed`, for simulations that must "
        "repeat (and guarantee nothing)",
        group="privacy",
    )
    learning_rate: Annotated[float, POSITIVE] = setting(0.1, "step size of the baselines", group="training")
    momentum: Annotated[float, in_range(0.0, 1.0, open_above=True)] = setting(
        0.9, "of DFedAvgM", group="training"
    )
    rho: Annotated[float, NOT_NEGATIVE] = setting(0.05, "of DFedSAM")
    local_steps: Annotated[int, whole(1, MAX_STEPS)] = setting(
        10, "steps of the baselines between two communications", group="training"
    )
    bits: Annotated[int, whole(0, 16)] = setting(
        0, "quantiser bits of DFedAvgM (0: none), DCD-PSGD, CHOCO-SGD and BEER (0: 8)"
    )
    top_k: Annotated[int, whole(0, _MAX_FEATURES)] = setting(
        0, "entries that CHOCO-SGD and BEER send of a vector, the largest, in 32 bits (0: all, in `bits`)"
    )
    step_gamma: Annotated[float, in_range(0.0, 1.0)] = setting(
        0.0, "consensus step of CHOCO-SGD and BEER (0: what is proved to converge, which is small)"
    )
    contraction: Annotated[float, in_range(0.0, 1.0)] = setting(
        0.0, "delta of the compressor in that proof (0: what it guarantees for every vector)"
    )
    budget: Annotated[float, in_range(0.0, 1.0, open_below=True)] = setting(
        0.5, "communication budget of MATCHA"
    )
    sealed: bool = setting(
        True,
        "neighbours seal what they publish and the seeds that it is decoded with: the server only relays "
        "them. Moves no bit of a simulation; 28 bytes a message",
        group="privacy",
    )
    peers: str = setting(
        "",
        "with several sites, each a SuperLink with a run of its own: where each listens for the others, in "
        "their order, this one too. Node i of m belongs to site floor(i S / m)",
    )
    site: Annotated[int, whole(0, MAX_NODES)] = setting(
        0, "which of the sites in `peers` this is, from 0", group="deployment"
    )
    tolerance: Annotated[float, NOT_NEGATIVE] = setting(
        0.0, "stop when the consensus measure falls to this (0: never)", group="run"
    )
    problem: Literal["linear", "logistic", "network"] = setting(
        "linear",
        "`linear`: Example 1; `logistic`: Example 2 on two classes of images or a LIBSVM file; `network`: a "
        "small network on images, whose change from a common start is sparse",
        group="data",
        first=True,
    )
    features: Annotated[int, whole(1, _MAX_FEATURES)] = setting(1000, "n of `linear`", group="data")
    noise: Annotated[float, number("a number from 0 to 1e6", NumberRange(0, 1e6))] = setting(
        0.5, "noise of `linear`'s observations", group="data"
    )
    samples_low: Annotated[int, whole(1, _MAX_FEATURES)] = setting(
        250, "fewest samples of a node in `linear`", group="data"
    )
    samples_high: Annotated[int, whole(1, _MAX_FEATURES)] = setting(
        750, "most samples of a node in `linear`", group="data"
    )
    class_0: Annotated[int, whole(0, _MAX_CLASS)] = setting(0, "the one class of `logistic`", group="data")
    class_1: Annotated[int, whole(0, _MAX_CLASS)] = setting(1, "the other class of `logistic`", group="data")
    libsvm: Annotated[str, text("a file in data-dir, or empty")] = setting(
        "", "a file for `logistic`, instead of images", group="data"
    )
    l2: Annotated[float, NOT_NEGATIVE] = setting(0.001, "lambda of `logistic`", group="data")
    model: str = setting("mlp", "of `network`")
    dataset: str = setting(
        "mnist-5k", "images of `logistic` and `network`: a name of `hedgerow data`, or `module:function`"
    )
    partition: str = setting(
        "iid",
        "how `network`'s images are dealt; `own`: each node has data of its own, for "
        "`logistic` and `network`",
    )
    aggregation: str = setting(
        "mean",
        "what a node of `ceps` takes of its own and its neighbours' models: the mean, or "
        "what liars cannot ruin",
    )
    evaluate_every: int = setting(1, "events between records of what the monitor saw")
    train_loss_samples: int = setting(0, "not used here")
    min_replies: int = setting(1, "fewest valid replies of an event")
    checkpoint_every: int = setting(10, "events between checkpoints")

    def problems(self) -> list[str]:
        """Return what is wrong between settings that are each valid."""
        return super().problems() + _problems(self)


SETTINGS: Mapping[str, Setting] = Settings.table()


def _problems(values: Settings) -> list[str]:
    """Return what is wrong between settings that are each valid."""
    problems = at_most(
        values,
        ("interval-low", "interval-high"),
        ("samples-low", "samples-high"),
        ("min-replies", "num-clients"),
        ("min-available-nodes", "num-clients"),
    )
    if values.problem == "linear":
        problems += at_most(values, ("sparsity", "features"))
        if values.features * values.samples_high > _MAX_ENTRIES:
            problems.append(
                f"features = {values.features} with samples-high = {values.samples_high}; valid is a "
                f"product of up to {_MAX_ENTRIES}: a node holds that many numbers, 1 GiB"
            )
    own = values.partition == OWN
    if own and values.problem == "linear":
        problems.append("problem = 'linear'; valid with partition = 'own' is 'logistic' or 'network'")
    if own and values.libsvm:
        problems.append(f"libsvm = {values.libsvm!r}; valid with partition = 'own' is empty")
    if values.problem == "logistic" and not own and not values.libsvm and values.class_0 == values.class_1:
        problems.append(f"class-1 = {values.class_1}; valid is another class than class-0")
    changes = values.method == "sgp" and values.topology.strip() == ONE_PEER
    if values.topology and not changes:
        try:
            directed = values.method in _DIRECTED
            validate_topology(values.topology, values.num_clients, directed=directed)
        except ValueError as error:
            problems.append(str(error))
    if values.privacy == "sound" and values.sigma_rule == "paper" and values.method == "ceps":
        problems.append("sigma-rule = 'paper'; valid with privacy = 'sound' is 'fixed_c'")
    if values.aggregation != "mean" and values.method != "ceps":
        problems.append(
            f"aggregation = {values.aggregation!r}; valid is 'mean' with method = {values.method!r}: "
            "its weights are a mixing matrix's"
        )
    if values.bits and values.top_k and values.method in ("choco-sgd", "beer"):
        problems.append(f"bits = {values.bits}; valid with top-k = {values.top_k} is 0: values have 32")
    if values.bits == 1:
        problems.append(f"bits = {values.bits}; valid is 0 (none) or 2 to 16")
    return problems + _site_problems(values)


def _site_problems(values: Settings) -> list[str]:
    """Return what is wrong with the settings of one site of several."""
    peers = values.peer_addresses
    if not peers:
        return [
            f"{key} = {values.of(key)!r}; valid is {SETTINGS[key].default!r} where peers is empty"
            for key in _SITE_KEYS
            if values.of(key) != SETTINGS[key].default and key != "peers"
        ]
    # Nobody sees the nodes of all sites, nor what all of them spend.
    only = {"monitor": False, "stragglers": False}
    problems = [
        f"{key} = {str(values.of(key)).lower()}; valid with peers is {str(valid).lower()}"
        for key, valid in only.items()
        if values.of(key) != valid
    ]
    if values.partition == OWN:
        problems.append(f"partition = {OWN!r}; valid with peers is one of a data set")
    budget = Budget.parse(values.stop_after)
    if budget is not None and budget.of != "iterations":
        problems.append(f"stop-after = {values.stop_after!r}; valid with peers is iterations=N")
    problems += values.credential_problems()
    try:
        site = _site(values)
        own = len(site.nodes(values.num_clients)) if site is not None else 0
    except ValueError as error:
        return [*problems, str(error)]
    if values.min_available_nodes > own:
        problems.append(
            f"min-available-nodes = {values.min_available_nodes}; valid is at most {own}, the nodes of "
            f"site {values.site}"
        )
    return problems


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


read = Settings.read


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
