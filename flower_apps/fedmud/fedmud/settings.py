"""The app's settings, and the strategy for them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from torch import nn

from hedgerow.clients import LOCAL_OPTIMISER_TEXTS, TASK_TEXTS
from hedgerow.sim.runs.common_settings import LocalOptimiserSettings, TrainingSettings
from hedgerow.sim.runs.kinds import (
    Nodes,
    NotNegative,
    Rounds,
    Samples,
    Steps,
    choice,
    choice_or,
    in_range,
    whole,
)
from hedgerow.sim.runs.settings import Role, Rules, Setting, setting
from hedgerow.strategies import EF21P, FedBAT, FedExLoRA, FedHM, FedLMT, FedMUD, FedPara, LoRA
from hedgerow.strategies.aggregate.flower import FLOWER_TEXT
from hedgerow.strategies.aggregate.sum_settings import training_options
from hedgerow.strategies.fedmud import CompressedLayers
from hedgerow.strategies.parts.server_optimisers import SERVER_STEP_TEXTS
from hedgerow.strategies.registry import REGISTRY_TEXTS
from hedgerow.strategies.roster import Roster
from hedgerow.strategies.round_end import RoundCallback
from hedgerow.tasks import AUGMENTATIONS
from hedgerow.wire.lowrank import BUDGETS, LAYOUTS, VIEWS

_VARIANTS = {
    "fedavg": "dense",
    "fedmud": "mud",
    "fedmud+f": "mud+f",
    "fedmud+aad": "mud+aad",
    "fedmud+bkd": "mud+bkd",
    "fedmud+bkd+f": "mud+bkd+f",
    "fedmud+bkd+aad": "mud+bkd+aad",
}
# LoRA adapters, whose nodes hold a base too.
_LORA = ("lora", "ffa-lora", "fedex-lora")
# More than any network has.
_MAX_LAYERS = 2**16
# Methods that factor the weight itself.
_OF_WEIGHTS = ("fedlmt", "fedpara", "fedhm")
METHODS = (*_VARIANTS, *_LORA, *_OF_WEIGHTS, "ef21-p", "fedbat")
# Methods whose nodes hold a base between rounds.
_WITH_BASE = (*(method for method in METHODS if method.startswith("fedmud")), *_LORA)
# Methods whose server must see each reply, with the reason.
_NO_SUMS = {
    "fedhm": FedHM.no_sums,
    "ef21-p": EF21P.no_sums,
    "fedbat": FedBAT.no_sums,
    "fedex-lora": FedExLoRA.no_sums,
}


class Settings(LocalOptimiserSettings, TrainingSettings):
    """The app's settings."""

    TEXTS: ClassVar = {**TASK_TEXTS, **LOCAL_OPTIMISER_TEXTS, **REGISTRY_TEXTS, **SERVER_STEP_TEXTS}
    SENDERS = "clients-per-round"

    method: Annotated[str, choice_or(*FLOWER_TEXT, *METHODS)] = setting(
        "fedmud+bkd+aad",
        "a method from the table at the top of README.md; `flwr:…` is FedAvg with a strategy of Flower",
        first=True,
    )
    num_rounds: Rounds = setting(20, "number of rounds R", first=True, role=Role.RESUME)
    num_clients: Nodes = setting(10, "number of clients N")
    clients_per_round: Nodes = setting(4, "number of clients K sampled uniformly for each round", first=True)
    learning_rate: NotNegative = setting(
        0.0, "step size of plain local SGD (0: the method's default)", "training"
    )
    local_epochs: Steps = setting(1, "epochs of plain local SGD per round", "training", first=True)
    batch_size: Samples = setting(32, "mini-batch size of plain local SGD", "training")
    ratio: Annotated[float, in_range(1e-6, 1.0)] = setting(
        0.03125, "fraction of the dense parameters that is sent; 0.03125 is 1/32", first=True
    )
    budget: Annotated[str, choice(*BUDGETS)] = setting(
        "model",
        "what `ratio` is a fraction of, for every method: the whole model, including what stays "
        "uncompressed (`model`), or each compressed layer (`layer`)",
    )
    reset_interval: Annotated[int, whole(0, 2**20)] = setting(
        0, "rounds s between merges (0: 1 for `fedmud…`, none for LoRA)"
    )
    init_a: NotNegative = setting(
        0.0, "random factors are uniform in (-a, a) (0: chosen by method and step size)"
    )
    layout: Annotated[str, choice(*LAYOUTS)] = setting("flat", "order of the Kronecker blocks", "data")
    view: Annotated[str, choice(*VIEWS)] = setting(
        "buffer",
        "matrix form of a convolution in `fedlmt`, `fedpara` and `fedhm`: FedMUD's (`buffer`), or U "
        "and V as two convolutions (`convolutions`), as FedLMT's and FedHM's authors do",
    )
    tight: bool = setting(False, "omit the Kronecker blocks that a layer's size never reaches")
    layers: str = setting(
        "",
        "patterns with commas of the weights to compress, also frozen ones: `*.query,*.value` (empty: all of "
        "Linear and Conv2d but those skipped)",
    )
    skip_front: Annotated[int, whole(0, _MAX_LAYERS)] = setting(
        1, "number of layers that stay dense at the front"
    )
    skip_back: Annotated[int, whole(0, _MAX_LAYERS)] = setting(
        1, "number of layers that stay dense at the back"
    )
    rand_k_scale: bool = setting(True, "scale EF21-P's Rand-K to be unbiased")
    measure_bias: bool = setting(
        False, "record how far the average of factors is from the average of updates", "run"
    )
    sync: Literal["catchup", "dense", "broadcast"] = setting(
        "catchup",
        "downlink: send each client the merges that it missed (`catchup`) or the base each time "
        "(`dense`), or send every merge to all clients (`broadcast`)",
    )
    weighting: Literal["num-examples", "num-batches", "uniform"] = setting(
        "num-examples",
        "client weights in a mean; `num-batches` as in the reference code, `uniform` as in eq. 4",
        "training",
    )
    partition: str = setting(
        "dirichlet(0.3)", "`capped-dirichlet(0.3)` is the paper's Non-IID-1, `labels(3)` its Non-IID-2"
    )
    model: str = setting(
        "cnn4",
        "`cnn4`, `cnn8`, `cnn10`, `resnet18` are the paper's; any model of Linear and Conv2d layers works",
    )
    augmentation: Annotated[str, choice(*AUGMENTATIONS)] = setting(
        "none",
        "augmentation of each batch of images: none, random `flips`, or random `crops-and-flips`",
        "training",
    )
    drop_last: Literal["auto", "always", "never"] = setting(
        "auto",
        "leave out an epoch's last batch if it is one sample and the model cannot train on one, as with "
        "batch normalization (`auto`), if it is shorter than the others (`always`), or never",
        "training",
    )
    training_mode: Literal["auto", "loop", "stack"] = setting(
        "auto",
        "`loop`: train one client after the other, as `auto` does for models with BatchNorm on CPUs; "
        "`stack`: train many at once",
    )
    evaluate_every: int = setting(2)
    train_loss_samples: int = setting(1000)

    @property
    def no_local_optimiser(self) -> str:
        """Why the method cannot have another optimiser; empty if it can."""
        return "method = 'fedbat', which trains by its own rule" if self.method == "fedbat" else ""

    def sum_sizes(self) -> tuple[int, int]:
        """Return the nodes of the smallest and the largest sum of a round."""
        return self.clients_per_round, self.clients_per_round

    def rules(self) -> Rules:
        """Yield the conditions between values that are each valid."""
        yield from super().rules()
        yield self.at_most("clients-per-round", "num-clients")
        if self.secure_sum:
            reason = _NO_SUMS.get(self.method)
            yield not reason, "secure-sum", f"False with method = {self.method!r} ({reason})"
            stays = self.method in ("lora", "ffa-lora") and not self.reset_interval
            yield (
                self.sync == "dense" or stays or self.method not in _WITH_BASE, "sync",
                "'dense' with secure-sum (members of a sum must get the same instruction, and otherwise each "
                "is sent the updates that it lacks)",
            )  # fmt: skip
            yield not self.measure_bias, "measure-bias", "False with secure-sum (it reads every update)"
        yield not self.layers or self.method != "fedavg", "layers", "empty with method = 'fedavg'"
        if self.layers:
            yield from self.usual("with layers", "skip-front", "skip-back")
        if self.method == "fedex-lora":
            yield from self.usual(
                "with method = 'fedex-lora' (its weights change every round)", "reset-interval"
            )
        if self.method not in _OF_WEIGHTS:
            yield from self.usual(f"but for method = {', '.join(_OF_WEIGHTS)}", "view")


SETTINGS: Mapping[str, Setting] = Settings.table()
read = Settings.read


def build_strategy(
    values: Settings,
    model: nn.Module,
    *,
    roster: Roster | None = None,
    dealt_sizes: Sequence[int] | None = None,
    frozen: Collection[str] | None = None,
    on_round_end: Sequence[RoundCallback] = (),
) -> CompressedLayers[Any]:
    """Return the strategy for the settings and a model.

    Parameters
    ----------
    values : Settings
        From ``read``.
    model : nn.Module
        The model, whose Linear and Conv2d layers are compressed.
    roster : Roster or None (default: None)
        The nodes, if they are already known.
    dealt_sizes : Sequence[int] or None (default: None)
        Each client's number of samples, if the server deals the data.
    frozen : Collection[str] or None (default: None)
        Keys of the frozen arrays, as in ``FederationOptions``.
    on_round_end : Sequence[Callable[[RoundEnd], None]] (default: ())
        Called after each round.
    """
    options: dict[str, Any] = {
        **training_options(values.run_config, values.flower),
        "roster": roster,
        "dealt_sizes": dealt_sizes,
        "frozen": frozen,
        "on_round_end": on_round_end,
        "sync": values.sync,
        "weighting": values.weighting,
        "num_clients_per_round": values.clients_per_round,
        "learning_rate": values.learning_rate or None,
        "local_epochs": values.local_epochs,
        "batch_size": values.batch_size,
        "layers": values.layers,
        **({} if values.layers else {"skip_front": values.skip_front, "skip_back": values.skip_back}),
        "seeded_base": True,
    }
    strategy, own = _chosen(values)
    made: CompressedLayers[Any] = strategy.for_model(
        model, ratio=values.ratio, budget=values.budget, **own, **options
    )
    return made


def _chosen(values: Settings) -> tuple[type[CompressedLayers[Any]], dict[str, Any]]:
    """Return the method's strategy, and the options that it alone has."""
    method, width, view = values.method, {"init_a": values.init_a or None}, {"view": values.view}
    merged = {**width, "measure_bias": values.measure_bias}
    lora = {"freeze": method == "ffa-lora", "reset_interval": values.reset_interval or None, **merged}
    others: dict[str, tuple[type[CompressedLayers[Any]], dict[str, Any]]] = {
        "lora": (LoRA, lora),
        "ffa-lora": (LoRA, lora),
        "fedex-lora": (FedExLoRA, width),
        "fedlmt": (FedLMT, {**width, **view}),
        "fedpara": (FedPara, {**width, **view}),
        "fedhm": (FedHM, view),
        "ef21-p": (EF21P, {"scale": values.rand_k_scale}),
        "fedbat": (FedBAT, {}),
    }
    if method in others:
        return others[method]
    return FedMUD, {
        "variant": "dense" if values.flower else _VARIANTS[method],
        "reset_interval": values.reset_interval or 1,
        "layout": values.layout,
        "tight": values.tight,
        **merged,
    }
