"""The app's settings: what each key may be, and the strategy that they describe."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, UserConfigValue

from hedgerow.clients.local_task import known_or_import_path
from hedgerow.sim.runs.common_settings import (
    BOUND_SETTINGS,
    DATA_DIR,
    HOLDOUT,
    ITERATIONS,
    QUORUM,
    RUN_SETTINGS,
    SEED,
    SUM_SETTINGS,
    aggregation_setting,
    registry_setting,
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
    flag,
    folder,
    in_range,
    number,
    text,
    whole,
)
from hedgerow.sim.runs.settings import Setting, at_most, override, reader, refuse
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

__all__ = ["METHODS", "SETTINGS", "build_strategy", "check_size", "group_sizes", "num_rounds", "read"]

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


def _power(value: UserConfigValue) -> int:
    power: int = whole(2, 3).read(value)
    return power


SETTINGS: Mapping[str, Setting] = {
    "method": Setting("hsgd", choice(*METHODS), "a row of the table at the top of README.md"),
    "tdcd": Setting(
        "merged",
        choice("merged", "isolated"),
        "groups in TDCD: all people at one hospital (`merged`), or groups that never aggregate (`isolated`)",
    ),
    "num-groups": Setting(4, whole(1, MAX_NODES), "hospitals M"),
    "layout": Setting(
        "edges",
        choice("edges", "devices"),
        "beside the hospitals: an edge for each, or every device",
    ),
    "num-clients": Setting(8, whole(1, MAX_NODES), "all nodes"),
    "min-available-nodes": replace(
        QUORUM,
        help="own data: nodes that must be there when the run starts, a whole group among them (0: all)",
    ),
    "registry": registry_setting(Registry.named),
    "patients-per-group": Setting(0, whole(0, MAX_SAMPLES), "K_m, at most what there is (0: all)"),
    "participation": Setting(
        0.2,
        in_range(0.0, 1.0, open_below=True),
        "alpha: max(1, floor(alpha K_m)) devices of a group are in a batch",
    ),
    "iterations": replace(ITERATIONS, default=400, help="T, a multiple of P"),
    "global-interval": Setting(4, whole(1, MAX_ROUNDS), "P, a multiple of Q"),
    "local-interval": Setting(2, whole(1, MAX_ROUNDS), "Q"),
    "learning-rate": Setting(0.1, POSITIVE, "eta"),
    "halving-period": Setting(0, whole(0, MAX_ROUNDS), "the iterations after which eta is halved (0: never)"),
    "mu": Setting(0.0, NOT_NEGATIVE, "L2 regularisation of both encoders"),
    "sealed": Setting(
        True,
        flag(),
        "hospital and devices seal heads and encodings for each other: the server only relays them. Moves no "
        "bit of a simulation; 28 bytes a message, and 64 with a head",
    ),
    "aggregation": replace(
        aggregation_setting(AGGREGATIONS, parse_aggregation),
        help="what becomes of the groups' models: their mean (2), or what lying groups cannot ruin",
    ),
    "device-aggregation": Setting(
        "",
        text(f"empty, or {AGGREGATIONS}", _validate_device_rule),
        "the same of a batch's devices (1), if they are nodes, and of JFL's pairs (empty: as `aggregation`)",
    ),
    **{key: SUM_SETTINGS[key] for key in _SUM_KEYS},
    "sum-min-devices": Setting(
        16,
        whole(3, MAX_MEMBERS),
        "devices of a batch without which there is no sum of them: of fewer a mean may tell one person's "
        "features",
    ),
    "upload-clip": Setting(
        0.0,
        NOT_NEGATIVE,
        "largest norm of the change of what a party uploads; with its noise both > 0, or both 0 for none",
    ),
    "upload-noise-multiplier": Setting(0.0, NOT_NEGATIVE, "the deviation of its noise over that norm"),
    "clip": Setting(
        0.0, NOT_NEGATIVE, "largest norm of an encoding; with the noise both > 0, or both 0 for none"
    ),
    "noise-multiplier": Setting(0.0, NOT_NEGATIVE, "the noise's deviation over the largest norm"),
    "noise-delta": Setting(
        1e-5, in_range(0.0, 1.0, open_below=True, open_above=True), "delta at which epsilon is told"
    ),
    "noise-source": Setting(
        "entropy",
        choice("entropy", "seed"),
        "`entropy`: from the operating system; `seed`: for simulations that must repeat, no protection",
    ),
    "adaptive": Setting(
        "off",
        choice("off", "observe", "strategy2", "strategy2+3"),
        "`observe`: estimate rho, delta and F0 and go on as set; `strategy2`: choose P = Q by them; "
        "`strategy2+3`: eta too",
    ),
    "replan-every": Setting(0, whole(0, MAX_ROUNDS), "rounds between estimates (0: at the start only)"),
    "eta-power": Setting(
        3, Kind("3 (the root of (20)) or 2 (as printed)", _power, (3, 2)), "Q* with this power of eta"
    ),
    "probe-steps": Setting(5, whole(1, MAX_STEPS), "steps of an estimate"),
    "probe-batches": Setting(4, whole(1, MAX_STEPS), "random batches of a step of an estimate"),
    "probe-batch": Setting(
        0, whole(0, MAX_SAMPLES), "people of a group's fixed batch in an estimate (0: all)"
    ),
    "probe-aggregate": Setting("max", choice("max", "mean"), "delta^2 is the largest variance, or the mean"),
    "final-loss": Setting(
        0.0,
        number(f"a number from -{LARGEST:g} to {LARGEST:g}", NumberRange(-LARGEST, LARGEST)),
        "E[F] at the end",
    ),
    "compute-seconds": Setting(0.0, NOT_NEGATIVE, "t_c, simulated seconds of an iteration"),
    "raw-bytes-per-group": Setting(
        0.0, NOT_NEGATIVE, "raw data that merged TDCD moves first; other methods move none"
    ),
    "raw-seconds": Setting(0.0, NOT_NEGATIVE, "how long merged TDCD waits for the raw data"),
    "dataset": Setting(
        "breast-cancer",
        _known_or_import_path(*VERTICAL_DATASETS),
        "a row of the table of data in README.md",
    ),
    "data-dir": DATA_DIR,
    "partition": Setting(
        "iid",
        text("own, iid, pairs(n_major, n_minor), rates(concentration) or sites", _validate_partition),
        "how people are dealt; `own`: each party has its own file, see below",
    ),
    "holdout": replace(HOLDOUT, help="own data: share of people that are evaluated and do not train"),
    "standardise": Setting(
        "federated",
        text("'federated', 'none', or a mean and a deviation, '0.13,0.31'", parse_standardise),
        "own data: columns to mean 0 and deviation 1 over all training people, by constants, or not",
    ),
    "classes": Setting(
        "",
        text("empty, or at least 2 different names with commas between", _names),
        "own data: classes in their order, of two the positive one last (empty: as hospitals have, sorted)",
    ),
    "class-weights": Setting(
        "none",
        text("none, balanced, or a number > 0 for each class with commas between", parse_class_weights),
        "of classes in the loss; `balanced`: all classes weigh alike",
    ),
    "rematch-every": Setting(
        0,
        whole(0, MAX_ROUNDS),
        "own data: rounds after which files are read and people matched again (0: never)",
    ),
    "predict": Setting(
        "",
        folder("the folder of an earlier run, or empty"),
        "own data: a run whose model is evaluated on all matched people, and not trained",
    ),
    "specificity": Setting(0.9, in_range(0.0, 1.0), "own data: at which sensitivity is told"),
    "model": Setting(
        "auto",
        _known_or_import_path("auto", *SPLIT_MODELS),
        "`auto`: by the samples' shape, `cnn` for images, `lstm` for series, `mlp` for tables",
    ),
    **BOUND_SETTINGS,
    "seed": SEED,
    "training-mode": Setting(
        "auto",
        choice("auto", "loop"),
        "`loop`: each party's batch and each device by itself, which gives bits (docs/bits.md)",
    ),
    **override(
        RUN_SETTINGS,
        helps={
            "train-loss-samples": "training people that the loss is taken over, the same each time (0: all)",
            "min-replies": "fewest groups left of a round",
        },
    ),
}


def _problems(values: Mapping[str, Any]) -> list[str]:
    """Return what is wrong between settings that are each valid."""
    problems = [
        f"{key} = {values[key]}; valid is a multiple of {divisor} = {values[divisor]}"
        for key, divisor in (("global-interval", "local-interval"), ("iterations", "global-interval"))
        if values[key] % values[divisor]
    ]
    problems += at_most(values, ("min-replies", "num-groups"), ("min-available-nodes", "num-clients"))
    if values["min-available-nodes"] and not is_own(values):
        problems.append(
            f"min-available-nodes = {values['min-available-nodes']}; valid is 0 unless partition = 'own'"
        )
    hospitals = 1 if merges(values) else values["num-groups"]
    if not is_own(values) and values["layout"] == "edges" and values["num-clients"] != 2 * hospitals:
        problems.append(_wrong_size(values, 2 * hospitals, f"{hospitals} hospitals and {hospitals} edges"))
    problems += [
        f"{clip} = {values[clip]}, {multiplier} = {values[multiplier]}; valid is both > 0, or both 0"
        for clip, multiplier in (
            ("clip", "noise-multiplier"),
            ("upload-clip", "upload-noise-multiplier"),
        )
        if bool(values[clip]) != bool(values[multiplier])
    ]
    if values["upload-clip"] and values["adaptive"] != "off":
        problems.append(f"adaptive = {values['adaptive']!r}; valid is 'off' with upload-clip > 0")
    problems += _mean_problems(values)
    if values["predict"] and not is_own(values):
        problems.append(f"predict = {values['predict']!r}; valid is empty unless partition = 'own'")
    if values["adaptive"] != "off" and values["method"] in ("tdcd", "c-tdcd") and not merges(values):
        problems.append(f"adaptive = {values['adaptive']!r}; valid is 'off' with tdcd = 'isolated'")
    return problems


def _rules(values: Mapping[str, Any]) -> tuple[str, str]:
    """Return the rules of groups and of devices."""
    return values["aggregation"], values["device-aggregation"] or values["aggregation"]


def _mean_problems(values: Mapping[str, Any]) -> list[str]:
    """Return what speaks against rules and secure sums in place of means."""
    problems, rules = [], [parse_aggregation(rule) for rule in _rules(values)]
    one_model = values["method"] not in ("tdcd", "c-tdcd")
    if one_model and values["num-groups"] < rules[0].least:
        problems.append(
            f"aggregation = {values['aggregation']!r}; valid with num-groups = {values['num-groups']} is a "
            f"rule of so many groups, and it needs {rules[0].least}"
        )
    robust = [str(rule) for rule in rules if not rule.is_mean]
    if values["adaptive"] != "off" and (robust or values["secure-sum"]):
        problems.append(
            f"adaptive = {values['adaptive']!r}; valid is 'off' with secure-sum, or an aggregation but 'mean'"
        )
    if not values["secure-sum"]:
        return problems
    if robust:
        problems.append(f"aggregation = {robust[0]!r}; valid with secure-sum is 'mean': a sum gives no other")
    if not values["sealed"]:
        problems.append(
            "sealed = False; valid with secure-sum is True: heads and encodings that the server reads tell "
            "what a sum hides"
        )
    if not one_model:
        problems.append(
            f"method = {values['method']!r}; valid with secure-sum is one with groups and a cloud: of a "
            "hospital alone in it a sum hides nothing"
        )
    if values["sum-min-nodes"] > values["num-groups"]:
        problems.append(
            f"sum-min-nodes = {values['sum-min-nodes']}; valid is at most num-groups = "
            f"{values['num-groups']}: hospitals are in a sum"
        )
    if values["layout"] == "devices" and values["sum-min-devices"] < values["sum-min-nodes"]:
        problems.append(
            f"sum-min-devices = {values['sum-min-devices']}; valid is at least sum-min-nodes = "
            f"{values['sum-min-nodes']}"
        )
    longer = values["global-interval"] > values["local-interval"]
    if values["method"] == "jfl" and values["layout"] == "devices" and longer:
        problems.append(
            f"global-interval = {values['global-interval']}; valid with secure-sum, method = 'jfl' and "
            f"layout = 'devices' is local-interval = {values['local-interval']}: between intervals the "
            "server hands each device its own model"
        )
    return problems


read = reader(SETTINGS, _problems)


def check_size(values: Mapping[str, Any], parties: AllParties) -> None:
    """Raise SettingsError unless there are as many nodes and people as the settings ask for."""
    if values["num-clients"] != parties.num_nodes:
        M = len(parties.groups)
        what = f"{M} hospitals and {parties.num_nodes - M} {parties.layout}"
        refuse([_wrong_size(values, parties.num_nodes, what)])
    there = {
        "probe-batch": (min(map(len, parties.groups)), "of the smallest group"),
        "train-loss-samples": (len(parties.people), "at all hospitals"),
    }
    asked = [
        f"{key} = {values[key]}; valid is at most {most}, the people {where} (0: all)"
        for key, (most, where) in there.items()
        if values[key] > most
    ]
    if asked:
        refuse(asked)
    batches = [batch_size(values["participation"], len(group)) for group in parties.groups]
    least = parse_aggregation(_rules(values)[1]).least
    if (values["layout"] == "devices" or values["method"] == "jfl") and min(batches) < least:
        refuse(
            [
                f"device-aggregation = {_rules(values)[1]!r}; valid is a rule of at most {min(batches)} "
                f"models, the smallest batch, and it needs {least}"
            ]
        )
    fewest = values["sum-min-devices"]
    if not values["secure-sum"] or values["layout"] != "devices":
        return
    if min(batches) < fewest or max(batches) > MAX_MEMBERS:
        refuse(
            [
                f"participation = {values['participation']}; valid with secure-sum and layout = 'devices' is "
                f"what makes batches of {fewest} (sum-min-devices) to {MAX_MEMBERS} devices, not of "
                f"{min(batches)} to {max(batches)}: a device has one person, whose features a sum of few "
                "tells"
            ]
        )


def _wrong_size(values: Mapping[str, Any], due: int, what: str) -> str:
    return f"num-clients = {values['num-clients']}; valid is {due}: {what}"


def num_rounds(values: Mapping[str, Any]) -> int:
    """Return the rounds of a run; where P is chosen while it runs, the most that there may be."""
    chosen = values["adaptive"].startswith("strategy2")
    return int(values["iterations"] // (1 if chosen else values["global-interval"]))


def build_strategy(values: Mapping[str, Any], *, on_round_end: Sequence[RoundCallback] = ()) -> HSGD:
    """Return the strategy that the settings describe."""
    merged = merges(values)
    system = ModelledSystem(values["compute-seconds"])
    if merged:
        system = replace(
            system,
            original_groups=values["num-groups"],
            raw_bytes=values["raw-bytes-per-group"],
            raw_seconds=values["raw-seconds"],
        )
    return HSGD(
        method=values["method"],
        global_interval=values["global-interval"],
        local_interval=values["local-interval"],
        participation=values["participation"],
        learning_rate=values["learning-rate"],
        halving_period=values["halving-period"],
        mu=values["mu"],
        aggregate=merged or values["method"] not in ("tdcd", "c-tdcd"),
        num_groups=1 if merged else values["num-groups"],
        noise=_noise(values),
        upload_noise=_upload_noise(values),
        sealed=values["sealed"],
        aggregation=values["aggregation"],
        device_aggregation=values["device-aggregation"] or None,
        secure_sum=values["secure-sum"]
        and SecureSum(values["sum-clip"], values["sum-threshold"], values["sum-min-nodes"]),
        min_sum_devices=max(values["sum-min-devices"], values["sum-min-nodes"]),
        adaptive=_adaptive(values),
        system=system,
        seed=values["seed"],
        own=_own(values) if is_own(values) else None,
        min_train_nodes=values["min-replies"],
        min_available_nodes=values["min-available-nodes"] or values["num-clients"],
        num_clients=values["num-clients"],
        registry=Registry.named(values["registry"]),
        on_round_end=on_round_end,
        max_update_norm_ratio=values["max-update-norm-ratio"],
        quarantine_after=values["quarantine-after"],
        max_loss_ratio=values["max-loss-ratio"],
    )


def group_sizes(values: Mapping[str, Any]) -> list[Sizes]:
    """Return what each group's messages hold, for a plan."""
    parties = deal(values)
    model = parties.model
    head, hospital, device = (
        sum(parameter.numel() for parameter in piece.parameters())
        for piece in (model.head, model.hospital, model.device)
    )
    e1, e2 = model.hospital_encoding, model.device_encoding
    return [
        Sizes(head, hospital, device, e1, e2, batch_size(values["participation"], len(group)))
        for group in parties.groups
    ]


def _own(values: Mapping[str, Any]) -> OwnDataSetup:
    def build(hospital: tuple[int, ...], device: tuple[int, ...], classes: int) -> ArrayRecord:
        return to_record(split_model(values["model"], hospital, device, classes, values["seed"]).state_dict())

    constants = parse_standardise(values["standardise"])
    return OwnDataSetup(
        build,
        values["model"],
        values["standardise"] if constants is None else (constants.mean[0], constants.std[0]),
        values["holdout"],
        parse_class_weights(values["class-weights"]),
        values["rematch-every"],
        values["specificity"],
        _names(values["classes"]),
        None if not values["predict"] else _trained(values["predict"]),
    )


def _trained(run: str) -> Mapping[str, Any]:
    _, checkpoint = load_newest(Path(run).expanduser() / "checkpoint")
    state: Mapping[str, Any] = checkpoint.state["parts"]["strategy"]
    return state


def _noise(values: Mapping[str, Any]) -> EmbeddingNoise | None:
    if not values["clip"]:
        return None
    return EmbeddingNoise(
        values["clip"], values["noise-multiplier"], values["noise-delta"], values["noise-source"]
    )


def _upload_noise(values: Mapping[str, Any]) -> UploadNoise | None:
    if not values["upload-clip"]:
        return None
    return UploadNoise(
        values["upload-clip"],
        values["upload-noise-multiplier"],
        values["noise-delta"],
        values["noise-source"],
    )


def _adaptive(values: Mapping[str, Any]) -> Adaptive | None:
    if values["adaptive"] == "off":
        return None
    return Adaptive(
        values["iterations"],
        values["replan-every"],
        "strategy3" if values["adaptive"] == "strategy2+3" else "keep",
        3 if values["eta-power"] == 3 else 2,
        values["adaptive"] != "observe",
        Probing(
            values["probe-steps"],
            values["probe-batches"],
            values["probe-batch"] or None,
            values["probe-aggregate"],
            values["final-loss"] or None,
        ),
    )
