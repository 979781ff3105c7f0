"""The app's settings: what each key may be, and the strategy that they describe."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hedgerow.clients import TASK_TEXTS
from hedgerow.sim.runs.common_settings import (
    BOUND_SETTINGS,
    HOLDOUT,
    QUORUM,
    RUN_SETTINGS,
    SEED,
    STACK_SETTINGS,
    SUM_NOISE_SETTINGS,
    SUM_SETTINGS,
    WEIGHT_BOUND,
    aggregation_setting,
    registry_setting,
    task_settings,
    training_problems,
)
from hedgerow.sim.runs.kinds import MAX_NODES, MAX_ROUNDS, NOT_NEGATIVE, choice, flag, in_range, whole
from hedgerow.sim.runs.settings import Setting, at_most, override, reader
from hedgerow.strategies import EF21P, FedBAT, FedHM, FedLMT, FedMUD, FedPara
from hedgerow.strategies.aggregate.sum_settings import secure_sum_of, sum_problems
from hedgerow.strategies.fedmud import CompressedLayers
from hedgerow.strategies.registry import Registry
from hedgerow.strategies.roster import Roster
from hedgerow.strategies.rounds import RoundCallback
from hedgerow.tasks import AUGMENTATIONS
from hedgerow.wire.limits import MAX_SAMPLES, MAX_STEPS
from hedgerow.wire.lowrank import BUDGETS, LAYOUTS, VIEWS
from hedgerow.wire.robust_means import AGGREGATIONS, parse_aggregation

__all__ = ["METHODS", "SETTINGS", "build_strategy", "read"]

_VARIANTS = {
    "fedavg": "dense",
    "fedmud": "mud",
    "fedmud+f": "mud+f",
    "fedmud+aad": "mud+aad",
    "fedmud+bkd": "mud+bkd",
    "fedmud+bkd+f": "mud+bkd+f",
    "fedmud+bkd+aad": "mud+bkd+aad",
}
# More than any network has.
_MAX_LAYERS = 2**16
# Methods whose factors are the weight itself.
_OF_WEIGHTS = ("fedlmt", "fedpara", "fedhm")
METHODS = (*_VARIANTS, *_OF_WEIGHTS, "ef21-p", "fedbat")
# Whose server must see each reply.
_NO_SUMS = {"fedhm": FedHM.no_sums, "ef21-p": EF21P.no_sums, "fedbat": FedBAT.no_sums}

SETTINGS: Mapping[str, Setting] = {
    "method": Setting("fedmud+bkd+aad", choice(*METHODS), "a row of the table at the top of README.md"),
    "num-rounds": Setting(20, whole(1, MAX_ROUNDS), "rounds R"),
    "num-clients": Setting(10, whole(1, MAX_NODES), "clients N"),
    "clients-per-round": Setting(4, whole(1, MAX_NODES), "clients K that train in a round (drawn uniformly)"),
    "learning-rate": Setting(0.0, NOT_NEGATIVE, "step size of plain local SGD (0: the method's)"),
    "local-epochs": Setting(1, whole(1, MAX_STEPS), "epochs of plain local SGD in a round"),
    "batch-size": Setting(32, whole(1, MAX_SAMPLES), "samples of a mini-batch of plain local SGD"),
    "ratio": Setting(
        0.03125,
        # Below a millionth even vectors for factors are too much for any layer, and the search is long.
        in_range(1e-6, 1.0),
        "share of the dense parameters that is sent; 0.03125 is 1/32",
    ),
    "budget": Setting(
        "model",
        choice(*BUDGETS),
        "what `ratio` is a share of: the whole model, what stays uncompressed included (`model`), or each "
        "compressed layer (`layer`); of every method",
    ),
    "reset-interval": Setting(1, whole(1, MAX_ROUNDS), "rounds s between merges"),
    "init-a": Setting(
        0.0, NOT_NEGATIVE, "random factors are uniform in (-a, a) (0: as goes with method and step size)"
    ),
    "layout": Setting("flat", choice(*LAYOUTS), "order of Kronecker blocks"),
    "view": Setting(
        "buffer",
        choice(*VIEWS),
        "of `fedlmt`, `fedpara` and `fedhm`, the matrix of a convolution: FedMUD's (`buffer`), or that of U "
        "and V as two convolutions (`convolutions`), as FedLMT's and FedHM's authors have it",
    ),
    "tight": Setting(False, flag(), "leave out the Kronecker blocks that a layer's size never reaches"),
    "skip-front": Setting(1, whole(0, _MAX_LAYERS), "layers that stay dense at the front"),
    "skip-back": Setting(1, whole(0, _MAX_LAYERS), "layers that stay dense at the back"),
    "rand-k-scale": Setting(True, flag(), "EF21-P's Rand-K is scaled to be unbiased"),
    "measure-bias": Setting(
        False, flag(), "report how far the average of factors is from the average of updates"
    ),
    "sync": Setting(
        "catchup",
        choice("catchup", "dense", "broadcast"),
        "the downlink: a client is sent the merges that it missed (`catchup`), or the base each time "
        "(`dense`); or all hear every merge (`broadcast`)",
    ),
    "weighting": Setting(
        "num-examples",
        choice("num-examples", "num-batches", "uniform"),
        "of the clients in a mean; `num-batches` is the reference code's, `uniform` that of eq. 4",
    ),
    **override(
        task_settings(TASK_TEXTS),
        defaults={"partition": "dirichlet(0.3)", "model": "cnn4"},
        helps={
            "partition": "`capped-dirichlet(0.3)` is the paper's Non-IID-1, `labels(3)` its Non-IID-2",
            "model": "`cnn4`, `cnn8`, `cnn10`, `resnet18` are the paper's; any of Linear and Conv2d will do",
        },
    ),
    "augmentation": Setting(
        "none",
        choice(*AUGMENTATIONS),
        "what is done to each batch of images: nothing, random `flips`, or random `crops-and-flips`",
    ),
    "holdout": HOLDOUT,
    "min-available-nodes": QUORUM,
    "registry": registry_setting(Registry.named),
    "aggregation": aggregation_setting(AGGREGATIONS, parse_aggregation),
    **SUM_SETTINGS,
    **SUM_NOISE_SETTINGS,
    "max-weight-ratio": WEIGHT_BOUND,
    **BOUND_SETTINGS,
    "seed": SEED,
    **override(
        STACK_SETTINGS,
        helps={
            "training-mode": "`loop`: one client after the other, as `auto` trains models with BatchNorm on "
            "CPUs; `stack`: many at once"
        },
    ),
    **override(RUN_SETTINGS, defaults={"evaluate-every": 2, "train-loss-samples": 1000}),
}


def _problems(values: Mapping[str, Any]) -> list[str]:
    """Return what is wrong between settings that are each valid."""
    problems = at_most(
        values,
        ("clients-per-round", "num-clients"),
        ("min-replies", "clients-per-round"),
        ("min-available-nodes", "num-clients"),
    )
    if values["secure-sum"]:
        if reason := _NO_SUMS.get(values["method"]):
            problems.append(f"secure-sum = True; valid with method = {values['method']!r} is False: {reason}")
        if values["measure-bias"]:
            problems.append("measure-bias = True; valid with secure-sum is False: it reads every update")
    if values["view"] != VIEWS[0] and values["method"] not in _OF_WEIGHTS:
        problems.append(
            f"view = {values['view']!r}; valid with method = {values['method']!r} is {VIEWS[0]!r}: others "
            f"are for {', '.join(_OF_WEIGHTS)}"
        )
    problems += training_problems(values)
    return problems + sum_problems(values, values["clients-per-round"], values["clients-per-round"])


read = reader(SETTINGS, _problems)


def build_strategy(
    values: Mapping[str, Any],
    model: nn.Module,
    *,
    roster: Roster | None = None,
    on_round_end: Sequence[RoundCallback] = (),
) -> CompressedLayers[Any]:
    """Return the strategy that the settings describe, for one model.

    Parameters
    ----------
    values : Mapping[str, Any]
        From ``read``.
    model : nn.Module
        Whose Linear and Conv2d layers are compressed.
    roster : Roster or None (default: None)
        The nodes, where they were asked before.
    on_round_end : Sequence[Callable[[RoundEnd], None]] (default: ())
        Told of each round.
    """
    options: dict[str, Any] = {
        "roster": roster,
        "registry": Registry.named(values["registry"]),
        "sync": values["sync"],
        "weighting": values["weighting"],
        "num_clients_per_round": values["clients-per-round"],
        "learning_rate": values["learning-rate"] or None,
        "local_epochs": values["local-epochs"],
        "batch_size": values["batch-size"],
        "skip_front": values["skip-front"],
        "skip_back": values["skip-back"],
        "seed": values["seed"],
        "fraction_evaluate": 0.0,
        "min_train_nodes": values["min-replies"],
        "min_available_nodes": values["min-available-nodes"] or values["num-clients"],
        "num_clients": values["num-clients"],
        "on_round_end": on_round_end,
        "aggregation": values["aggregation"],
        "secure_sum": secure_sum_of(values),
        "max_weight_ratio": values["max-weight-ratio"],
        "max_update_norm_ratio": values["max-update-norm-ratio"],
        "quarantine_after": values["quarantine-after"],
        "max_loss_ratio": values["max-loss-ratio"],
        "seeded_base": True,
    }
    budget = {"ratio": values["ratio"], "budget": values["budget"]}
    width = values["init-a"] or None
    match values["method"]:
        case "fedlmt":
            return FedLMT.for_model(model, init_a=width, view=values["view"], **budget, **options)
        case "fedpara":
            return FedPara.for_model(model, init_a=width, view=values["view"], **budget, **options)
        case "fedhm":
            return FedHM.for_model(model, view=values["view"], **budget, **options)
        case "ef21-p":
            return EF21P.for_model(model, scale=values["rand-k-scale"], **budget, **options)
        case "fedbat":
            return FedBAT.for_model(model, **budget, **options)
        case method:
            return FedMUD.for_model(
                model,
                variant=_VARIANTS[method],
                reset_interval=values["reset-interval"],
                init_a=width,
                layout=values["layout"],
                tight=values["tight"],
                measure_bias=values["measure-bias"],
                **budget,
                **options,
            )
