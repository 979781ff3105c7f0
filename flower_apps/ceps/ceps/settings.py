"""The app's settings: what each key may be, and the strategy that they describe."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hedgerow.clients import TASK_TEXTS
from hedgerow.sim.runs.common_settings import (
    HOLDOUT,
    ITERATIONS,
    MONITOR,
    QUORUM,
    RUN_SETTINGS,
    SEED,
    aggregation_setting,
    registry_setting,
    task_settings,
)
from hedgerow.sim.runs.kinds import (
    MAX_NODES,
    MAX_ROUNDS,
    NOT_NEGATIVE,
    POSITIVE,
    NumberRange,
    above,
    choice,
    flag,
    in_range,
    number,
    text,
    whole,
)
from hedgerow.sim.runs.peer_settings import (
    PEERS,
    credential_files,
    credential_problems,
    peer_addresses,
    peer_settings,
    peers_setting,
)
from hedgerow.sim.runs.settings import Setting, at_most, override, reader
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

__all__ = ["METHODS", "SETTINGS", "build_strategy", "read"]

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
_SITE_SETTINGS: Mapping[str, Setting] = {
    PEERS: peers_setting(
        "with several sites, each a SuperLink with a run of its own: where each listens for the others, in "
        "their order, this one too. Node i of m belongs to site floor(i S / m)",
    ),
    "site": Setting(0, whole(0, MAX_NODES), "which of the sites in `peers` this is, from 0"),
    **peer_settings("site"),
}

SETTINGS: Mapping[str, Setting] = {
    "method": Setting("ceps", choice(*METHODS), "a row of the table at the top of README.md"),
    "iterations": replace(ITERATIONS, default=61, help="iterations K"),
    "num-clients": Setting(16, whole(1, MAX_NODES), "nodes m"),
    "topology": Setting(
        "",
        text("a graph's name, 'regular(8)' or 'ring' for example; empty: regular of degree m / 4"),
        "a connected graph: `ring`, `complete`, `regular(8)`, `erdos-renyi(0.4)`, …; empty: random regular. "
        "`sgp` also takes directed ones: `directed-ring`, `directed-exponential`, `directed-out(4)`, "
        "`directed-erdos-renyi(0.3)`, `one-peer-exponential`",
    ),
    "participation": Setting(
        0.5,
        in_range(0.0, 1.0, open_below=True),
        "r: the share of its neighbours that a node asks (`ceps`, `d-psgd-pc`, `dfedavgm`, `dfedsam`)",
    ),
    "sparsity": Setting(10, whole(1, _MAX_FEATURES), "s; also of the truth in `linear`"),
    "codec": Setting(
        "1bcs",
        choice("1bcs", "sparse16", "sparse32", "sparse64", "dense32", "dense64"),
        "a message of `ceps`: one bit a measurement, or the model itself as indices and values, or dense",
    ),
    "measurements": Setting(0, whole(0, _MAX_FEATURES), "signs d of a one-bit message (0: n / 2)"),
    "expand": Setting(
        "consistent",
        choice("consistent", "literal"),
        "recover the scale that Algorithm 2 divides out, or take it literally with base gamma",
    ),
    "compand": Setting("log", choice("log", "none"), "measure sign(w) log(1 + abs(w)), or w"),
    "gamma": Setting(5.0, above(1), "base of `expand` = `literal`"),
    "decoder": Setting("gpsp", choice("gpsp", "biht"), "what finds the model behind the signs"),
    "phi": Setting(
        "gaussian",
        choice(*MATRICES),
        "the measuring matrix; `srht` is a transform, for large models",
    ),
    "phi-density": Setting(1.0, in_range(0.5, 1.0), "nonzeros of a Gaussian measuring matrix"),
    "phi-owner": Setting("sender", choice("sender", "receiver"), "whose matrix measures"),
    "stragglers": Setting(
        False, flag(), "hear the neighbours that reply first, in place of some drawn before"
    ),
    "interval-low": Setting(
        10, whole(1, MAX_ROUNDS), "a node communicates every kappa iterations, drawn from here on"
    ),
    "interval-high": Setting(15, whole(1, MAX_ROUNDS), "and up to here"),
    "mu": Setting(0.1, POSITIVE, "proximal weight of a local step"),
    "sigma-rule": Setting(
        "paper",
        choice("paper", "fixed_c"),
        "sigma from the data's largest singular value (`paper`) or c / m_i (`fixed_c`)",
    ),
    "c": Setting(1.0, POSITIVE, "c of `fixed_c`"),
    "privacy": Setting(
        "none",
        choice("none", "paper", "sound"),
        "noise: `none`; as the `paper` prints it, which guarantees nothing; `sound`",
    ),
    "epsilon": Setting(0.5, POSITIVE, "epsilon of one release"),
    "delta": Setting(1e-5, in_range(0.0, 1.0, open_below=True, open_above=True), "delta of one release"),
    "sensitivity": Setting(0.1, POSITIVE, "u_i of the paper's calibration"),
    "clip": Setting(1.0, POSITIVE, "norm to which `sound` clips each record's gradient"),
    "noise-source": Setting(
        "entropy",
        choice("entropy", "seed"),
        "where `sound` takes its noise from: the operating system, or `seed`, for simulations that must "
        "repeat (and guarantee nothing)",
    ),
    "learning-rate": Setting(0.1, POSITIVE, "step size of the baselines"),
    "momentum": Setting(0.9, in_range(0.0, 1.0, open_above=True), "of DFedAvgM"),
    "rho": Setting(0.05, NOT_NEGATIVE, "of DFedSAM"),
    "local-steps": Setting(10, whole(1, MAX_STEPS), "steps of the baselines between two communications"),
    "bits": Setting(
        0, whole(0, 16), "quantiser bits of DFedAvgM (0: none), DCD-PSGD, CHOCO-SGD and BEER (0: 8)"
    ),
    "top-k": Setting(
        0,
        whole(0, _MAX_FEATURES),
        "entries that CHOCO-SGD and BEER send of a vector, the largest, in 32 bits (0: all, in `bits`)",
    ),
    "step-gamma": Setting(
        0.0,
        in_range(0.0, 1.0),
        "consensus step of CHOCO-SGD and BEER (0: what is proved to converge, which is small)",
    ),
    "contraction": Setting(
        0.0,
        in_range(0.0, 1.0),
        "delta of the compressor in that proof (0: what it guarantees for every vector)",
    ),
    "budget": Setting(0.5, in_range(0.0, 1.0, open_below=True), "communication budget of MATCHA"),
    "sealed": Setting(
        True,
        flag(),
        "neighbours seal what they publish and the seeds that it is decoded with: the server only relays "
        "them. Moves no bit of a simulation; 28 bytes a message",
    ),
    **_SITE_SETTINGS,
    "monitor": MONITOR,
    "tolerance": Setting(0.0, NOT_NEGATIVE, "stop when the consensus measure falls to this (0: never)"),
    "problem": Setting(
        "linear",
        choice("linear", "logistic", "network"),
        "`linear`: Example 1; `logistic`: Example 2 on two classes of images or a LIBSVM file; `network`: a "
        "small network on images, whose change from a common start is sparse",
    ),
    "features": Setting(1000, whole(1, _MAX_FEATURES), "n of `linear`"),
    "noise": Setting(
        0.5, number("a number from 0 to 1e6", NumberRange(0, 1e6)), "noise of `linear`'s observations"
    ),
    "samples-low": Setting(250, whole(1, _MAX_FEATURES), "fewest samples of a node in `linear`"),
    "samples-high": Setting(750, whole(1, _MAX_FEATURES), "most samples of a node in `linear`"),
    "class-0": Setting(0, whole(0, _MAX_CLASS), "the one class of `logistic`"),
    "class-1": Setting(1, whole(0, _MAX_CLASS), "the other class of `logistic`"),
    "libsvm": Setting("", text("a file in data-dir, or empty"), "a file for `logistic`, instead of images"),
    "l2": Setting(0.001, NOT_NEGATIVE, "lambda of `logistic`"),
    **override(
        task_settings({key: TASK_TEXTS[key] for key in _TASK_KEYS}),
        defaults={"model": "mlp"},
        helps={
            "dataset": "images of `logistic` and `network`: a name of `hedgerow data`, or `module:function`",
            "partition": "how `network`'s images are dealt; `own`: each node has data of its own, for "
            "`logistic` and `network`",
            "model": "of `network`",
        },
    ),
    "holdout": HOLDOUT,
    "min-available-nodes": QUORUM,
    "registry": registry_setting(Registry.named),
    **override(
        {"aggregation": aggregation_setting(NEIGHBOURHOOD_RULES, neighbourhood_rule)},
        helps={
            "aggregation": "what a node of `ceps` takes of its own and its neighbours' models: the mean, or "
            "what liars cannot ruin"
        },
    ),
    "seed": SEED,
    **override(
        RUN_SETTINGS,
        defaults={"evaluate-every": 1},
        helps={
            "evaluate-every": "events between records of what the monitor saw",
            "train-loss-samples": "not used here",
            "min-replies": "fewest valid replies of an event",
            "checkpoint-every": "events between checkpoints",
        },
    ),
}


def _problems(values: Mapping[str, Any]) -> list[str]:
    """Return what is wrong between settings that are each valid."""
    problems = at_most(
        values,
        ("interval-low", "interval-high"),
        ("samples-low", "samples-high"),
        ("min-replies", "num-clients"),
        ("min-available-nodes", "num-clients"),
    )
    if values["problem"] == "linear":
        problems += at_most(values, ("sparsity", "features"))
        if values["features"] * values["samples-high"] > _MAX_ENTRIES:
            problems.append(
                f"features = {values['features']} with samples-high = {values['samples-high']}; valid is a "
                f"product of up to {_MAX_ENTRIES}: a node holds that many numbers, 1 GiB"
            )
    own = values["partition"] == OWN
    if own and values["problem"] == "linear":
        problems.append("problem = 'linear'; valid with partition = 'own' is 'logistic' or 'network'")
    if own and values["libsvm"]:
        problems.append(f"libsvm = {values['libsvm']!r}; valid with partition = 'own' is empty")
    if (
        values["problem"] == "logistic"
        and not own
        and not values["libsvm"]
        and values["class-0"] == values["class-1"]
    ):
        problems.append(f"class-1 = {values['class-1']}; valid is another class than class-0")
    changes = values["method"] == "sgp" and values["topology"].strip() == ONE_PEER
    if values["topology"] and not changes:
        try:
            directed = values["method"] in _DIRECTED
            validate_topology(values["topology"], values["num-clients"], directed=directed)
        except ValueError as error:
            problems.append(str(error))
    if values["privacy"] == "sound" and values["sigma-rule"] == "paper" and values["method"] == "ceps":
        problems.append("sigma-rule = 'paper'; valid with privacy = 'sound' is 'fixed_c'")
    if values["aggregation"] != "mean" and values["method"] != "ceps":
        problems.append(
            f"aggregation = {values['aggregation']!r}; valid is 'mean' with method = {values['method']!r}: "
            "its weights are a mixing matrix's"
        )
    if values["bits"] and values["top-k"] and values["method"] in ("choco-sgd", "beer"):
        problems.append(f"bits = {values['bits']}; valid with top-k = {values['top-k']} is 0: values have 32")
    if values["bits"] == 1:
        problems.append(f"bits = {values['bits']}; valid is 0 (none) or 2 to 16")
    return problems + _site_problems(values)


def _site_problems(values: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the settings of one site of several."""
    peers = peer_addresses(values)
    if not peers:
        return [
            f"{key} = {values[key]!r}; valid is {setting.default!r} where peers is empty"
            for key, setting in _SITE_SETTINGS.items()
            if values[key] != setting.default and key != PEERS
        ]
    # Nobody sees the nodes of all sites, nor what all of them spend.
    only = {"monitor": False, "stragglers": False}
    problems = [
        f"{key} = {str(values[key]).lower()}; valid with peers is {str(valid).lower()}"
        for key, valid in only.items()
        if values[key] != valid
    ]
    if values["partition"] == OWN:
        problems.append(f"partition = {OWN!r}; valid with peers is one of a data set")
    budget = Budget.parse(values["stop-after"])
    if budget is not None and budget.of != "iterations":
        problems.append(f"stop-after = {values['stop-after']!r}; valid with peers is iterations=N")
    problems += credential_problems(values)
    try:
        site = _site(values)
        own = len(site.nodes(values["num-clients"])) if site is not None else 0
    except ValueError as error:
        return [*problems, str(error)]
    if values["min-available-nodes"] > own:
        problems.append(
            f"min-available-nodes = {values['min-available-nodes']}; valid is at most {own}, the nodes of "
            f"site {values['site']}"
        )
    return problems


def _site(values: Mapping[str, Any]) -> Site | None:
    """Return which of several sites this is; None where there is one hub for all nodes."""
    if not (peers := peer_addresses(values)):
        return None
    files = credential_files(values)
    return Site(
        values["site"],
        peers,
        None if files is None else PeerCredentials(*files),
        values["peer-listen"],
        values["peer-timeout"],
    )


read = reader(SETTINGS, _problems)


def build_strategy(
    values: Mapping[str, Any],
    *,
    dim: int,
    monitor: Monitor | None = None,
    roster: Roster | None = None,
    on_round_end: Sequence[RoundCallback] = (),
) -> Gossip:
    """Return the strategy that the settings describe, for models of dimension ``dim``."""
    site = _site(values)
    here = values["num-clients"] if site is None else len(site.nodes(values["num-clients"]))
    options: dict[str, Any] = {
        "dim": dim,
        "num_clients": values["num-clients"],
        "site": site,
        "topology": values["topology"] or None,
        "privacy": Privacy(
            values["privacy"],
            values["epsilon"],
            values["delta"],
            values["sensitivity"],
            values["clip"],
            noise_source=values["noise-source"],
        ),
        "num_iterations": values["iterations"],
        "monitor": monitor,
        "sealed": values["sealed"],
        "seed": values["seed"],
        "roster": roster,
        "registry": Registry.named(values["registry"]),
        "min_train_nodes": values["min-replies"],
        "min_available_nodes": values["min-available-nodes"] or here,
        "on_round_end": on_round_end,
    }
    r, rate = values["participation"], values["learning-rate"]
    local = {"learning_rate": rate, "local_steps": values["local-steps"], **options}
    top_k = values["top-k"] or None
    compressed = {
        "learning_rate": rate,
        "bits": None if top_k else values["bits"] or 8,
        "top_k": top_k,
        "step_gamma": values["step-gamma"] or None,
        "delta": values["contraction"] or None,
        **options,
    }
    strategies: dict[str, Callable[[], Gossip]] = {
        "ceps": lambda: _ceps(values, options),
        "d-psgd": lambda: DPSGD(**local),
        "d-psgd-dn": lambda: DPSGD(dynamic=True, **local),
        "d-psgd-pc": lambda: DPSGD(participation=r, **local),
        "dfedavgm": lambda: DFedAvgM(
            momentum=values["momentum"], bits=values["bits"] or None, participation=r, **local
        ),
        "dfedsam": lambda: DFedSAM(rho=values["rho"], participation=r, **local),
        "dcd-psgd": lambda: DCDPSGD(learning_rate=rate, bits=values["bits"] or 8, **options),
        "choco-sgd": lambda: ChocoSGD(local_steps=values["local-steps"], **compressed),
        "beer": lambda: BEER(**compressed),
        "sgp": lambda: SGP(**local),
        "sgp-dn": lambda: SGP(dynamic=True, **local),
        "dp-dsgt": lambda: DPDSGT(learning_rate=rate, **options),
        "matcha": lambda: Matcha(learning_rate=rate, budget=values["budget"], **options),
    }
    return strategies[values["method"]]()


def _ceps(values: Mapping[str, Any], options: dict[str, Any]) -> CEPS:
    return CEPS(
        sparsity=values["sparsity"],
        measurements=values["measurements"] or None,
        codec=values["codec"],
        code=OneBitCode(
            expand=values["expand"],
            compand=values["compand"],
            gamma=values["gamma"],
            decoder=values["decoder"],
            phi=values["phi"],
            phi_density=values["phi-density"],
            phi_owner=values["phi-owner"],
        ),
        participation=values["participation"],
        interval=(values["interval-low"], values["interval-high"]),
        stragglers=values["stragglers"],
        mu=values["mu"],
        sigma_rule=values["sigma-rule"],
        c=values["c"],
        aggregation=values["aggregation"],
        **options,
    )
