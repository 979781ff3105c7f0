"""The app's settings, and the strategy that they describe."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from flwr.app import ArrayRecord

from hedgerow.clients.local_task import known_or_import_path
from hedgerow.sim.runs.checkpoint import load_newest
from hedgerow.sim.runs.common_settings import (
    BoundSettings,
    IterationSettings,
    NoiseSettings,
    RunSettings,
    TaskSettings,
)
from hedgerow.sim.runs.kinds import (
    LARGEST,
    Kind,
    Nodes,
    NotNegative,
    Positive,
    PositiveFraction,
    Rounds,
    RoundsOr0,
    SamplesOr0,
    Steps,
    UnitFraction,
    choice,
    folder,
    number,
    text,
)
from hedgerow.sim.runs.settings import Role, Rules, Setting, setting
from hedgerow.strategies import HSGD, Adaptive, EmbeddingNoise, ModelledSystem, Probing, UploadNoise
from hedgerow.strategies.hsgd import OwnDataSetup
from hedgerow.strategies.hsgd.exchange import batch_size
from hedgerow.strategies.hsgd.theory import MethodName, Sizes
from hedgerow.strategies.registry import REGISTRY_TEXTS, Registry
from hedgerow.strategies.round_end import RoundCallback
from hedgerow.tasks import SPLIT_MODELS, split_model, validate_group_scheme
from hedgerow.tasks.own_data import parse_standardise
from hedgerow.tasks.sources import vertical_datasets
from hedgerow.wire.records import to_record
from hedgerow.wire.robust_means import AGGREGATIONS, parse_aggregation
from hsgd.medical import SETS
from hsgd.parties import AllParties, deal, is_own, merges, parse_class_weights

METHODS = tuple(str(method) for method in MethodName)


def _known_or_import_path(*names: str) -> Kind:
    return text(
        f"one of {', '.join(names)}, or an import path 'module:function'", known_or_import_path(names)
    )


def _validate_partition(scheme: str) -> None:
    if scheme != "own":
        validate_group_scheme(scheme)


def _names(value: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in value.split(",")) if value.strip() else ()
    if names and (len(names) < 2 or len(set(names)) < len(names) or "" in names):
        raise ValueError(f"classes must be at least 2 different names, got {value!r}")
    return names


def _validate_device_rule(rule: str) -> None:
    if rule:
        parse_aggregation(rule)


class Settings(BoundSettings, NoiseSettings, TaskSettings, IterationSettings, RunSettings):
    """The app's settings."""

    TEXTS: ClassVar = REGISTRY_TEXTS
    SENDERS = "num-groups"

    method: Annotated[str, choice(*METHODS)] = setting(
        "hsgd", "a method from the table at the top of README.md", first=True
    )
    tdcd: Literal["merged", "isolated"] = setting(
        "merged",
        "groups in TDCD: all people at one hospital (`merged`), or groups that never aggregate (`isolated`)",
    )
    num_groups: Nodes = setting(4, "number of hospitals M", first=True)
    layout: Literal["edges", "devices"] = setting(
        "edges",
        "nodes other than hospitals: one edge per hospital (`edges`), or every device (`devices`)",
        "data",
        own_data=False,
    )
    num_clients: Nodes = setting(8, "total number of nodes")
    min_available_nodes: int = setting(
        0,
        "own data: nodes that must be connected when the run starts, a complete group among them (0: all)",
        own_data=True,
    )
    patients_per_group: SamplesOr0 = setting(
        0, "K_m, at most the number of people available (0: all)", "data", own_data=False
    )
    participation: PositiveFraction = setting(
        0.2, "alpha: a batch has max(1, floor(alpha K_m)) devices of a group"
    )
    iterations: int = setting(400, "T, total iterations; a multiple of P")
    global_interval: Rounds = setting(
        4, "P, iterations between global aggregations; a multiple of Q", first=True
    )
    local_interval: Rounds = setting(2, "Q, iterations between exchanges", first=True)
    learning_rate: Positive = setting(0.1, "learning rate eta", "training", first=True)
    halving_period: RoundsOr0 = setting(0, "iterations after which eta is halved (0: never)", "training")
    mu: NotNegative = setting(0.0, "L2 regularization of both encoders", "training")
    sealed: bool = setting(
        True,
        "hospital and devices encrypt heads and encodings for each other, so the server only relays "
        "them. A simulation's results do not change. Adds 28 bytes per message, 64 with a head",
        "privacy",
    )
    aggregation: str = setting(
        "mean", "how the groups' models are aggregated: their mean (2), or a Byzantine-robust rule"
    )
    device_aggregation: Annotated[str, text(f"empty, or {AGGREGATIONS}", _validate_device_rule)] = setting(
        "",
        "the same for a batch's devices (1), if they are nodes, and for JFL's pairs (empty: as "
        "`aggregation`)",
        "robustness",
    )
    upload_clip: NotNegative = setting(
        0.0,
        "maximum norm of the change that a party uploads. Set both this and "
        "`upload-noise-multiplier`, or leave both 0",
        "privacy",
    )
    upload_noise_multiplier: NotNegative = setting(
        0.0, "standard deviation of the upload noise, divided by `upload-clip`", "privacy"
    )
    clip: NotNegative = setting(
        0.0, "maximum norm of an encoding. Set both this and `noise-multiplier`, or leave both 0", "privacy"
    )
    noise_multiplier: NotNegative = setting(
        0.0, "standard deviation of the encoding noise, divided by `clip`", "privacy"
    )
    adaptive: Literal["off", "observe", "strategy2", "strategy2+3"] = setting(
        "off",
        "`observe`: estimate rho, delta and F0, but keep the settings; `strategy2`: choose P = Q from "
        "the estimates; `strategy2+3`: choose eta too",
    )
    replan_every: RoundsOr0 = setting(0, "rounds between estimates (0: only at the start)")
    eta_power: Annotated[int, Kind("3 (the root of (20)) or 2 (as printed)", (3, 2))] = setting(
        3, "power of eta in Q*"
    )
    probe_steps: Steps = setting(5, "steps per estimate")
    probe_batches: Steps = setting(4, "random batches per step of an estimate")
    probe_batch: SamplesOr0 = setting(0, "people in each group's fixed batch of an estimate (0: all)")
    probe_aggregate: Literal["max", "mean"] = setting(
        "max", "take delta^2 as the largest variance, or as the mean"
    )
    final_loss: Annotated[float, number(f"a number from -{LARGEST:g} to {LARGEST:g}", -LARGEST, LARGEST)] = (
        setting(0.0, "expected loss E[F] at the end")
    )
    compute_seconds: NotNegative = setting(0.0, "t_c, simulated seconds per iteration", "run")
    raw_bytes_per_group: NotNegative = setting(
        0.0,
        "bytes of raw data per group that merged TDCD transfers first; other methods transfer none",
        "run",
    )
    raw_seconds: NotNegative = setting(
        0.0, "simulated seconds that merged TDCD waits for the raw data", "run"
    )
    dataset: Annotated[str, _known_or_import_path(*vertical_datasets(SETS))] = setting(
        "breast-cancer", "a data set from the table in README.md"
    )
    partition: Annotated[
        str, text("own, iid, pairs(n_major, n_minor), rates(concentration) or sites", _validate_partition)
    ] = setting(
        "iid",
        "how people are split into groups; `own`: each party has its own file (docs/methods/hsgd.md)",
    )
    holdout: float = setting(0.2, "own data: fraction of people held out for evaluation")
    standardise: Annotated[
        str, text("'federated', 'none', or a mean and a deviation, '0.13,0.31'", parse_standardise)
    ] = setting(
        "federated",
        "own data: standardize features over all training people, with constants, or not at all",
    )
    classes: Annotated[str, text("empty, or at least 2 different names with commas between", _names)] = (
        setting(
            "",
            "own data: class names in order; of two, the positive one last (empty: the hospitals' labels, "
            "sorted)",
        )
    )
    class_weights: Annotated[
        str, text("none, balanced, or a number > 0 for each class with commas between", parse_class_weights)
    ] = setting(
        "none", "class weights in the loss; `balanced`: all classes have the same total weight", "training"
    )
    rematch_every: RoundsOr0 = setting(
        0,
        "own data: rounds between re-reading the files and matching people again (0: never)",
        "data",
        own_data=True,
    )
    predict: Annotated[str, folder("the folder of an earlier run, or empty")] = setting(
        "",
        "own data: folder of a run whose model is evaluated on all matched people, without training",
        "run",
        own_data=True,
    )
    specificity: UnitFraction = setting(
        0.9, "own data: specificity at which sensitivity is reported", "data", own_data=True
    )
    model: Annotated[str, _known_or_import_path("auto", *SPLIT_MODELS)] = setting(
        "auto",
        "`auto` chooses by the samples' shape: `cnn` for images, `lstm` for series, `mlp` for tables",
        first=False,
    )
    training_mode: Literal["auto", "loop"] = setting(
        "auto",
        "`loop`: train each party's batch and each device separately, for bit-identical results "
        "(docs/bits.md)",
        "training",
        role=Role.REPETITION,
    )
    train_loss_samples: int = setting(
        0, "number of training people used to compute the loss, the same ones each time (0: all)"
    )
    min_replies: int = setting(1, "minimum number of groups left in a round")

    @property
    def round_iterations(self) -> int:
        """The local iterations of one round: P, at the start of a run that chooses P itself."""
        return self.global_interval

    @property
    def is_own(self) -> bool:
        """Whether each party has its own data."""
        return is_own(self.run_config)

    @property
    def merged(self) -> bool:
        """Whether all people are at one hospital, as in merged TDCD."""
        return merges(self.run_config)

    @property
    def one_model(self) -> bool:
        """Whether a cloud aggregates the groups' models."""
        return self.method not in ("tdcd", "c-tdcd")

    @property
    def robust(self) -> tuple[str, str]:
        """The rules of groups and of devices."""
        return self.aggregation, self.device_aggregation or self.aggregation

    def size_rule(self, due: int, what: str) -> tuple[bool, str, str]:
        """Return the rule for the number of nodes."""
        return self.num_clients == due, "num-clients", f"{due}: {what}"

    def rules(self) -> Rules:
        """Yield the conditions between valid values."""
        yield from super().rules()
        for key, divisor in (("global-interval", "local-interval"), ("iterations", "global-interval")):
            least = self.of(divisor)
            yield not self.of(key) % least, key, f"a multiple of {divisor} = {least}"
        if not self.is_own and self.layout == "edges":
            hospitals = 1 if self.merged else self.num_groups
            yield self.size_rule(2 * hospitals, f"{hospitals} hospitals and {hospitals} edges")
        yield self.both_or_neither("clip", "noise-multiplier")
        yield self.both_or_neither("upload-clip", "upload-noise-multiplier")
        rules = [parse_aggregation(rule) for rule in self.robust]
        yield (
            not self.one_model or self.num_groups >= rules[0].least, "aggregation",
            f"a rule of at most num-groups = {self.num_groups} groups, and it needs {rules[0].least}",
        )  # fmt: skip
        means = all(rule.is_mean for rule in rules)
        against = {
            "an aggregation but 'mean'": not means,
            "upload-clip > 0": self.upload_clip > 0,
            "tdcd = 'isolated'": not (self.one_model or self.merged),
        }
        if why := [words for words, there in against.items() if there]:
            yield from self.usual(f"with {' and '.join(why)}", "adaptive")


SETTINGS: Mapping[str, Setting] = Settings.table()
read = Settings.read


def check_size(values: Settings, parties: AllParties) -> None:
    """Raise SettingsError unless the numbers of nodes and people fit the settings."""
    M = len(parties.groups)
    values.hold(
        values.size_rule(parties.num_nodes, f"{M} hospitals and {parties.num_nodes - M} {parties.layout}")
    )
    there = {
        "probe-batch": (min(map(len, parties.groups)), "of the smallest group"),
        "train-loss-samples": (len(parties.people), "at all hospitals"),
    }
    values.hold(*(
        (values.of(key) <= most, key, f"at most {most}, the people {where} (0: all)")
        for key, (most, where) in there.items()
    ))  # fmt: skip
    batches = [batch_size(values.participation, len(group)) for group in parties.groups]
    devices = values.layout == "devices"
    if devices or values.method == "jfl":
        least, rule = parse_aggregation(values.robust[1]).least, values.robust[1]
        why = f"a rule of at most {min(batches)} models, the smallest batch, and {rule!r} needs {least}"
        values.hold((min(batches) >= least, "device-aggregation", why))


def num_rounds(values: Settings) -> int:
    """Return the rounds of a run; if the run chooses P itself, the largest possible number."""
    chosen = values.adaptive.startswith("strategy2")
    return values.iterations // (1 if chosen else values.global_interval)


def build_strategy(values: Settings, *, on_round_end: Sequence[RoundCallback] = ()) -> HSGD:
    """Return the strategy that the settings describe."""
    system = ModelledSystem(values.compute_seconds)
    if values.merged:
        system = replace(
            system,
            original_groups=values.num_groups,
            raw_bytes=values.raw_bytes_per_group,
            raw_seconds=values.raw_seconds,
        )
    return HSGD(
        method=values.method,
        global_interval=values.global_interval,
        local_interval=values.local_interval,
        participation=values.participation,
        learning_rate=values.learning_rate,
        halving_period=values.halving_period,
        mu=values.mu,
        aggregate=values.merged or values.one_model,
        num_groups=1 if values.merged else values.num_groups,
        noise=_noise(values),
        upload_noise=_upload_noise(values),
        sealed=values.sealed,
        aggregation=values.aggregation,
        device_aggregation=values.device_aggregation or None,
        adaptive=_adaptive(values),
        system=system,
        seed=values.seed,
        own=_own(values) if values.is_own else None,
        min_train_nodes=values.min_replies,
        min_available_nodes=values.min_available_nodes or values.num_clients,
        num_clients=values.num_clients,
        registry=Registry.named(values.registry),
        on_round_end=on_round_end,
        max_update_norm_ratio=values.max_update_norm_ratio,
        quarantine_after=values.quarantine_after,
        max_loss_ratio=values.max_loss_ratio,
    )


def group_sizes(values: Settings) -> list[Sizes]:
    """Return the sizes of each group's messages, for a plan."""
    parties = deal(values.run_config)
    model = parties.model
    head, hospital, device = (
        sum(parameter.numel() for parameter in piece.parameters())
        for piece in (model.head, model.hospital, model.device)
    )
    e1, e2 = model.hospital_encoding, model.device_encoding
    return [
        Sizes(head, hospital, device, e1, e2, batch_size(values.participation, len(group)))
        for group in parties.groups
    ]


def _own(values: Settings) -> OwnDataSetup:
    def build(hospital: tuple[int, ...], device: tuple[int, ...], classes: int) -> ArrayRecord:
        return to_record(split_model(values.model, hospital, device, classes, values.seed).state_dict())

    constants = parse_standardise(values.standardise)
    return OwnDataSetup(
        build,
        values.model,
        values.standardise if constants is None else (constants.mean[0], constants.std[0]),
        values.holdout,
        parse_class_weights(values.class_weights),
        values.rematch_every,
        values.specificity,
        _names(values.classes),
        None if not values.predict else _trained(values.predict),
    )


def _trained(run: str) -> Mapping[str, Any]:
    _, checkpoint = load_newest(Path(run).expanduser() / "checkpoint")
    state: Mapping[str, Any] = checkpoint.state["parts"]["strategy"]
    return state


def _noise(values: Settings) -> EmbeddingNoise | None:
    if not values.clip:
        return None
    return EmbeddingNoise(values.clip, values.noise_multiplier, values.noise_delta, values.noise_source)


def _upload_noise(values: Settings) -> UploadNoise | None:
    if not values.upload_clip:
        return None
    multiplier, delta = values.upload_noise_multiplier, values.noise_delta
    return UploadNoise(values.upload_clip, multiplier, delta, values.noise_source)


def _adaptive(values: Settings) -> Adaptive | None:
    if values.adaptive == "off":
        return None
    return Adaptive(
        values.iterations,
        values.replan_every,
        "strategy3" if values.adaptive == "strategy2+3" else "keep",
        3 if values.eta_power == 3 else 2,
        values.adaptive != "observe",
        Probing(
            values.probe_steps,
            values.probe_batches,
            values.probe_batch or None,
            values.probe_aggregate,
            values.final_loss or None,
        ),
    )
