"""The app's settings: what each key may be, and the strategy that they describe."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from flwr.app import ArrayRecord

from hedgerow.clients.local_task import known_or_import_path
from hedgerow.sim.runs.common_settings import (
    BoundSettings,
    IterationSettings,
    NoiseSettings,
    RunSettings,
    SumSettings,
    TaskSettings,
)
from hedgerow.sim.runs.generations import load_newest
from hedgerow.sim.runs.kinds import (
    LARGEST,
    MAX_NODES,
    MAX_ROUNDS,
    NOT_NEGATIVE,
    POSITIVE,
    Kind,
    NumberRange,
    choice,
    folder,
    in_range,
    number,
    text,
    whole,
)
from hedgerow.sim.runs.settings import Setting, at_most, refuse, setting
from hedgerow.strategies import HSGD, Adaptive, EmbeddingNoise, ModelledSystem, Probing, UploadNoise
from hedgerow.strategies.aggregate.secure_sums import SecureSum
from hedgerow.strategies.hsgd import OwnDataSetup
from hedgerow.strategies.hsgd.costs import MethodName, Sizes
from hedgerow.strategies.hsgd.groups import batch_size
from hedgerow.strategies.registry import Registry
from hedgerow.strategies.rounds import RoundCallback
from hedgerow.tasks import SPLIT_MODELS, VERTICAL_DATASETS, split_model, validate_group_scheme
from hedgerow.tasks.own_data import parse_standardise
from hedgerow.wire.limits import MAX_SAMPLES, MAX_STEPS
from hedgerow.wire.masked_sums import MAX_MEMBERS
from hedgerow.wire.records import to_record
from hedgerow.wire.robust_means import AGGREGATIONS, parse_aggregation
from hsgd.parties import AllParties, deal, is_own, merges, parse_class_weights

REGISTRY = ("a file like the nodes.toml of `hedgerow deploy keys`, or empty", Registry.named)

__all__ = [
    "METHODS",
    "SETTINGS",
    "Settings",
    "build_strategy",
    "check_size",
    "group_sizes",
    "num_rounds",
    "read",
]

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
        raise ValueError(f"classes = {value!r}; valid are at least 2 different names")
    return names


def _validate_device_rule(rule: str) -> None:
    if rule:
        parse_aggregation(rule)


# Sums of HSGD have no noise of their own: uploads have.
_SUM_KEYS = ("secure-sum", "sum-clip", "sum-threshold", "sum-min-nodes")


class Settings(BoundSettings, SumSettings, NoiseSettings, TaskSettings, IterationSettings, RunSettings):
    """The app's settings."""

    TEXTS: ClassVar = {"registry": REGISTRY, "aggregation": (AGGREGATIONS, parse_aggregation)}

    method: Annotated[str, choice(*METHODS)] = setting(
        "hsgd", "a row of the table at the top of README.md", first=True
    )
    tdcd: Literal["merged", "isolated"] = setting(
        "merged",
        "groups in TDCD: all people at one hospital (`merged`), or groups that never aggregate (`isolated`)",
    )
    num_groups: Annotated[int, whole(1, MAX_NODES)] = setting(4, "hospitals M", first=True)
    layout: Literal["edges", "devices"] = setting(
        "edges", "beside the hospitals: an edge for each, or every device", group="data"
    )
    num_clients: Annotated[int, whole(1, MAX_NODES)] = setting(8, "all nodes")
    min_available_nodes: int = setting(
        0, "own data: nodes that must be there when the run starts, a whole group among them (0: all)"
    )
    patients_per_group: Annotated[int, whole(0, MAX_SAMPLES)] = setting(
        0, "K_m, at most what there is (0: all)", group="data"
    )
    participation: Annotated[float, in_range(0.0, 1.0, open_below=True)] = setting(
        0.2, "alpha: max(1, floor(alpha K_m)) devices of a group are in a batch"
    )
    iterations: int = setting(400, "T, a multiple of P")
    global_interval: Annotated[int, whole(1, MAX_ROUNDS)] = setting(4, "P, a multiple of Q", first=True)
    local_interval: Annotated[int, whole(1, MAX_ROUNDS)] = setting(2, "Q", first=True)
    learning_rate: Annotated[float, POSITIVE] = setting(0.1, "eta", group="training", first=True)
    halving_period: Annotated[int, whole(0, MAX_ROUNDS)] = setting(
        0, "the iterations after which eta is halved (0: never)", group="training"
    )
    mu: Annotated[float, NOT_NEGATIVE] = setting(0.0, "L2 regularisation of both encoders", group="training")
    sealed: bool = setting(
        True,
        "hospital and devices seal heads and encodings for each other: the server only relays them. Moves no "
        "bit of a simulation; 28 bytes a message, and 64 with a head",
        group="privacy",
    )
    aggregation: str = setting(
        "mean", "what becomes of the groups' models: their mean (2), or what lying groups cannot ruin"
    )
    device_aggregation: Annotated[str, text(f"empty, or {AGGREGATIONS}", _validate_device_rule)] = setting(
        "",
        "the same of a batch's devices (1), if they are nodes, and of JFL's pairs (empty: as `aggregation`)",
        group="robustness",
    )
    sum_min_devices: Annotated[int, whole(3, MAX_MEMBERS)] = setting(
        16,
        "devices of a batch without which there is no sum of them: of fewer a mean may tell one person's "
        "features",
        group="privacy",
    )
    upload_clip: Annotated[float, NOT_NEGATIVE] = setting(
        0.0,
        "largest norm of the change of what a party uploads; with its noise both > 0, or both 0 for none",
        group="privacy",
    )
    upload_noise_multiplier: Annotated[float, NOT_NEGATIVE] = setting(
        0.0, "the deviation of its noise over that norm", group="privacy"
    )
    clip: Annotated[float, NOT_NEGATIVE] = setting(
        0.0, "largest norm of an encoding; with the noise both > 0, or both 0 for none", group="privacy"
    )
    noise_multiplier: Annotated[float, NOT_NEGATIVE] = setting(
        0.0, "the noise's deviation over the largest norm", group="privacy"
    )
    noise_delta: Annotated[float, in_range(0.0, 1.0, open_below=True, open_above=True)] = setting(
        1e-5, "delta at which epsilon is told"
    )
    noise_source: Literal["entropy", "seed"] = setting(
        "entropy",
        "`entropy`: from the operating system; `seed`: for simulations that must repeat, no protection",
        group="privacy",
    )
    adaptive: Literal["off", "observe", "strategy2", "strategy2+3"] = setting(
        "off",
        "`observe`: estimate rho, delta and F0 and go on as set; `strategy2`: choose P = Q by them; "
        "`strategy2+3`: eta too",
    )
    replan_every: Annotated[int, whole(0, MAX_ROUNDS)] = setting(
        0, "rounds between estimates (0: at the start only)"
    )
    eta_power: Annotated[int, Kind("3 (the root of (20)) or 2 (as printed)", (3, 2))] = setting(
        3, "Q* with this power of eta"
    )
    probe_steps: Annotated[int, whole(1, MAX_STEPS)] = setting(5, "steps of an estimate")
    probe_batches: Annotated[int, whole(1, MAX_STEPS)] = setting(4, "random batches of a step of an estimate")
    probe_batch: Annotated[int, whole(0, MAX_SAMPLES)] = setting(
        0, "people of a group's fixed batch in an estimate (0: all)"
    )
    probe_aggregate: Literal["max", "mean"] = setting("max", "delta^2 is the largest variance, or the mean")
    final_loss: Annotated[
        float, number(f"a number from -{LARGEST:g} to {LARGEST:g}", NumberRange(-LARGEST, LARGEST))
    ] = setting(0.0, "E[F] at the end")
    compute_seconds: Annotated[float, NOT_NEGATIVE] = setting(
        0.0, "t_c, simulated seconds of an iteration", group="run"
    )
    raw_bytes_per_group: Annotated[float, NOT_NEGATIVE] = setting(
        0.0, "raw data that merged TDCD moves first; other methods move none", group="run"
    )
    raw_seconds: Annotated[float, NOT_NEGATIVE] = setting(
        0.0, "how long merged TDCD waits for the raw data", group="run"
    )
    dataset: Annotated[str, _known_or_import_path(*VERTICAL_DATASETS)] = setting(
        "breast-cancer", "a row of the table of data in README.md"
    )
    partition: Annotated[
        str, text("own, iid, pairs(n_major, n_minor), rates(concentration) or sites", _validate_partition)
    ] = setting("iid", "how people are dealt; `own`: each party has its own file, see below")
    holdout: float = setting(0.2, "own data: share of people that are evaluated and do not train")
    standardise: Annotated[
        str, text("'federated', 'none', or a mean and a deviation, '0.13,0.31'", parse_standardise)
    ] = setting(
        "federated",
        "own data: columns to mean 0 and deviation 1 over all training people, by constants, or not",
    )
    classes: Annotated[str, text("empty, or at least 2 different names with commas between", _names)] = (
        setting(
            "",
            "own data: classes in order, of two the positive one last (empty: as hospitals have, sorted)",
        )
    )
    class_weights: Annotated[
        str, text("none, balanced, or a number > 0 for each class with commas between", parse_class_weights)
    ] = setting("none", "of classes in the loss; `balanced`: all classes weigh alike", group="training")
    rematch_every: Annotated[int, whole(0, MAX_ROUNDS)] = setting(
        0, "own data: rounds after which files are read and people matched again (0: never)", group="data"
    )
    predict: Annotated[str, folder("the folder of an earlier run, or empty")] = setting(
        "", "own data: a run whose model is evaluated on all matched people, and not trained", group="run"
    )
    specificity: Annotated[float, in_range(0.0, 1.0)] = setting(
        0.9, "own data: at which sensitivity is told", group="data"
    )
    model: Annotated[str, _known_or_import_path("auto", *SPLIT_MODELS)] = setting(
        "auto", "`auto`: by the samples' shape, `cnn` for images, `lstm` for series, `mlp` for tables"
    )
    training_mode: Literal["auto", "loop"] = setting(
        "auto", "`loop`: each party's batch and each device by itself, which gives bits (docs/bits.md)"
    )
    train_loss_samples: int = setting(
        0, "training people that the loss is taken over, the same each time (0: all)"
    )
    min_replies: int = setting(1, "fewest groups left of a round")

    def problems(self) -> list[str]:
        """Return what is wrong between settings that are each valid."""
        return super().problems() + _problems(self)


SETTINGS: Mapping[str, Setting] = Settings.table()


def _problems(values: Settings) -> list[str]:
    """Return what is wrong between settings that are each valid."""
    problems = [
        f"{key} = {values.of(key)}; valid is a multiple of {divisor} = {values.of(divisor)}"
        for key, divisor in (("global-interval", "local-interval"), ("iterations", "global-interval"))
        if values.of(key) % values.of(divisor)
    ]
    problems += at_most(values, ("min-replies", "num-groups"), ("min-available-nodes", "num-clients"))
    if values.min_available_nodes and not is_own(values.run_config):
        problems.append(
            f"min-available-nodes = {values.min_available_nodes}; valid is 0 unless partition = 'own'"
        )
    hospitals = 1 if merges(values.run_config) else values.num_groups
    if not is_own(values.run_config) and values.layout == "edges" and values.num_clients != 2 * hospitals:
        problems.append(_wrong_size(values, 2 * hospitals, f"{hospitals} hospitals and {hospitals} edges"))
    problems += [
        f"{clip} = {values.of(clip)}, {multiplier} = {values.of(multiplier)}; valid is both > 0, or both 0"
        for clip, multiplier in (
            ("clip", "noise-multiplier"),
            ("upload-clip", "upload-noise-multiplier"),
        )
        if bool(values.of(clip)) != bool(values.of(multiplier))
    ]
    if values.upload_clip and values.adaptive != "off":
        problems.append(f"adaptive = {values.adaptive!r}; valid is 'off' with upload-clip > 0")
    problems += _mean_problems(values)
    if values.predict and not is_own(values.run_config):
        problems.append(f"predict = {values.predict!r}; valid is empty unless partition = 'own'")
    if values.adaptive != "off" and values.method in ("tdcd", "c-tdcd") and not merges(values.run_config):
        problems.append(f"adaptive = {values.adaptive!r}; valid is 'off' with tdcd = 'isolated'")
    return problems


def _rules(values: Settings) -> tuple[str, str]:
    """Return the rules of groups and of devices."""
    return values.aggregation, values.device_aggregation or values.aggregation


def _mean_problems(values: Settings) -> list[str]:
    """Return what speaks against rules and secure sums in place of means."""
    problems, rules = [], [parse_aggregation(rule) for rule in _rules(values)]
    one_model = values.method not in ("tdcd", "c-tdcd")
    if one_model and values.num_groups < rules[0].least:
        problems.append(
            f"aggregation = {values.aggregation!r}; valid with num-groups = {values.num_groups} is a "
            f"rule of so many groups, and it needs {rules[0].least}"
        )
    robust = [str(rule) for rule in rules if not rule.is_mean]
    if values.adaptive != "off" and (robust or values.secure_sum):
        problems.append(
            f"adaptive = {values.adaptive!r}; valid is 'off' with secure-sum, or an aggregation but 'mean'"
        )
    if not values.secure_sum:
        return problems
    if robust:
        problems.append(f"aggregation = {robust[0]!r}; valid with secure-sum is 'mean': a sum gives no other")
    if not values.sealed:
        problems.append(
            "sealed = False; valid with secure-sum is True: heads and encodings that the server reads tell "
            "what a sum hides"
        )
    if not one_model:
        problems.append(
            f"method = {values.method!r}; valid with secure-sum is one with groups and a cloud: of a "
            "hospital alone in it a sum hides nothing"
        )
    if values.sum_min_nodes > values.num_groups:
        problems.append(
            f"sum-min-nodes = {values.sum_min_nodes}; valid is at most num-groups = "
            f"{values.num_groups}: hospitals are in a sum"
        )
    if values.layout == "devices" and values.sum_min_devices < values.sum_min_nodes:
        problems.append(
            f"sum-min-devices = {values.sum_min_devices}; valid is at least sum-min-nodes = "
            f"{values.sum_min_nodes}"
        )
    longer = values.global_interval > values.local_interval
    if values.method == "jfl" and values.layout == "devices" and longer:
        problems.append(
            f"global-interval = {values.global_interval}; valid with secure-sum, method = 'jfl' and "
            f"layout = 'devices' is local-interval = {values.local_interval}: between intervals the "
            "server hands each device its own model"
        )
    return problems


read = Settings.read


def check_size(values: Settings, parties: AllParties) -> None:
    """Raise SettingsError unless there are as many nodes and people as the settings ask for."""
    if values.num_clients != parties.num_nodes:
        M = len(parties.groups)
        what = f"{M} hospitals and {parties.num_nodes - M} {parties.layout}"
        refuse([_wrong_size(values, parties.num_nodes, what)])
    there = {
        "probe-batch": (min(map(len, parties.groups)), "of the smallest group"),
        "train-loss-samples": (len(parties.people), "at all hospitals"),
    }
    asked = [
        f"{key} = {values.of(key)}; valid is at most {most}, the people {where} (0: all)"
        for key, (most, where) in there.items()
        if values.of(key) > most
    ]
    if asked:
        refuse(asked)
    batches = [batch_size(values.participation, len(group)) for group in parties.groups]
    least = parse_aggregation(_rules(values)[1]).least
    if (values.layout == "devices" or values.method == "jfl") and min(batches) < least:
        refuse(
            [
                f"device-aggregation = {_rules(values)[1]!r}; valid is a rule of at most {min(batches)} "
                f"models, the smallest batch, and it needs {least}"
            ]
        )
    fewest = values.sum_min_devices
    if not values.secure_sum or values.layout != "devices":
        return
    if min(batches) < fewest or max(batches) > MAX_MEMBERS:
        refuse(
            [
                f"participation = {values.participation}; valid with secure-sum and layout = 'devices' is "
                f"what makes batches of {fewest} (sum-min-devices) to {MAX_MEMBERS} devices, not of "
                f"{min(batches)} to {max(batches)}: a device has one person, whose features a sum of few "
                "tells"
            ]
        )


def _wrong_size(values: Settings, due: int, what: str) -> str:
    return f"num-clients = {values.num_clients}; valid is {due}: {what}"


def num_rounds(values: Settings) -> int:
    """Return the rounds of a run; where P is chosen while it runs, the most that there may be."""
    chosen = values.adaptive.startswith("strategy2")
    return int(values.iterations // (1 if chosen else values.global_interval))


def build_strategy(values: Settings, *, on_round_end: Sequence[RoundCallback] = ()) -> HSGD:
    """Return the strategy that the settings describe."""
    merged = merges(values.run_config)
    system = ModelledSystem(values.compute_seconds)
    if merged:
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
        aggregate=merged or values.method not in ("tdcd", "c-tdcd"),
        num_groups=1 if merged else values.num_groups,
        noise=_noise(values),
        upload_noise=_upload_noise(values),
        sealed=values.sealed,
        aggregation=values.aggregation,
        device_aggregation=values.device_aggregation or None,
        secure_sum=values.secure_sum
        and SecureSum(values.sum_clip, values.sum_threshold, values.sum_min_nodes),
        min_sum_devices=max(values.sum_min_devices, values.sum_min_nodes),
        adaptive=_adaptive(values),
        system=system,
        seed=values.seed,
        own=_own(values) if is_own(values.run_config) else None,
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
    """Return what each group's messages hold, for a plan."""
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
    return UploadNoise(
        values.upload_clip,
        values.upload_noise_multiplier,
        values.noise_delta,
        values.noise_source,
    )


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
