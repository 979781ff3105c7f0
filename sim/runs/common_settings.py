"""The settings that mean the same in every app, in groups: what is learnt, how nodes train, what a run is.

An app puts them among its own and may give them other defaults and other help (``settings.override``).
"""

from collections.abc import Callable, Mapping
from typing import Any

from hedgerow.sim.engine.ray_cluster import MOST_WORKERS, check_address
from hedgerow.sim.runs.kinds import (
    LARGEST,
    MAX_INT64,
    MAX_NODES,
    MAX_ROUNDS,
    NumberRange,
    choice,
    flag,
    folder,
    in_range,
    number,
    text,
    whole,
)
from hedgerow.sim.runs.peer_settings import PEERS, peer_settings, peers_setting
from hedgerow.sim.runs.settings import Role, Setting
from hedgerow.wire.budget import Budget
from hedgerow.wire.limits import MAX_SAMPLES

__all__ = [
    "BOUND_SETTINGS",
    "DATA_DIR",
    "HOLDOUT",
    "ITERATIONS",
    "MONITOR",
    "QUORUM",
    "RUN_SETTINGS",
    "SEED",
    "STACK_SETTINGS",
    "SUM_NOISE_SETTINGS",
    "SUM_SETTINGS",
    "WEIGHT_BOUND",
    "aggregation_setting",
    "registry_setting",
    "role_of",
    "task_settings",
    "training_problems",
]

# Longer than a server waits for anything, and short enough for every clock.
_MAX_SECONDS = 1e8
DATA_DIR = Setting("", folder("a folder, or empty"), "where its files are")

# What is learnt: default and help. What is valid is known to the rooms of tasks and clients.
_TASK = {
    "dataset": ("mnist-5k", "a name of `hedgerow data`, or `module:function`"),
    "scaling": ("standard", "pixels with mean 0 and deviation 1 a channel; `unit`: in [0, 1]"),
    "partition": ("iid", "how the data are dealt to nodes; `own`: each node has data of its own"),
    "classes": ("", "of `own`: a number, or the labels in the order of their classes, `benign,malignant`"),
    "standardise": (
        "federated",
        "of `own`: by what all nodes hold together (`federated`), by a mean and a deviation, or `none`",
    ),
    "model": ("lenet", "what is trained"),
    "device": ("cpu", "where nodes train"),
}
# Those of a task that do not decide results.
_TASK_ROLES = {"device": Role.REPETITION}


def task_settings(texts: Mapping[str, tuple[str, Callable[[str], object]]]) -> dict[str, Setting]:
    """Return what says what is learnt.

    Parameters
    ----------
    texts : Mapping[str, tuple[str, Callable[[str], object]]]
        For each key what is valid, in words and as a check: ``hedgerow.clients.TASK_TEXTS``, or some of it.
    """

    def setting(key: str, check: tuple[str, Callable[[str], object]]) -> Setting:
        default, help = _TASK[key]
        return Setting(default, text(*check), help, _TASK_ROLES.get(key, Role.RESULTS))

    return {key: DATA_DIR if key == "data-dir" else setting(key, check) for key, check in texts.items()}


HOLDOUT = Setting(
    0.2,
    in_range(0.0, 0.9),
    "of `own`, in simulations: the share of its samples that each node keeps aside to measure on. "
    "A device's own `holdout` is in its node config",
)
QUORUM = Setting(
    0, whole(0, MAX_NODES), "nodes that must be there when the run starts; others may come later (0: all)"
)
SEED = Setting(0, whole(0, MAX_INT64), "keys everything that is drawn", Role.REPETITION)
ITERATIONS = Setting(100, whole(1, MAX_ROUNDS), "iterations", Role.RESUME)
MONITOR = Setting(
    True,
    flag(),
    "look at all models (simulation only; given up once where most nodes refuse)",
    Role.RESUME,
)

# What one node can do to a run at most.
_RATIO = number("0, or a number from 1 to 1e+30", NumberRange(1, LARGEST, zero=True))
WEIGHT_BOUND = Setting(
    10.0,
    _RATIO,
    "a node counts at most so many times the median of the examples that nodes claim (0: no bound)",
)
BOUND_SETTINGS: Mapping[str, Setting] = {
    "max-update-norm-ratio": Setting(
        100.0, _RATIO, "a larger update, in norms usual in the rounds before, is refused (0: no bound)"
    ),
    "quarantine-after": Setting(
        3, whole(0, MAX_ROUNDS), "refused replies running after which a node rests for a while (0: never)"
    ),
    "max-loss-ratio": Setting(
        1e6, _RATIO, "a run ends with an error at a larger loss, in losses of the start (0: it goes on)"
    ),
}


def aggregation_setting(valid: str, check: Callable[[str], object]) -> Setting:
    """Return what says how updates become one; what is valid, in words and as a check, strategies know."""
    return Setting(
        "mean", text(valid, check), "what becomes of the updates: their mean, or what liars cannot ruin"
    )


# Whether a server sees sums alone (docs/privacy.md).
SUM_SETTINGS: Mapping[str, Setting] = {
    "secure-sum": Setting(
        False, flag(), "the server sees the nodes' weighted mean and nothing of one of them (docs/privacy.md)"
    ),
    "sum-clip": Setting(
        8.0,
        number("a number from 1e-06 to 1e+06", NumberRange(1e-6, 1e6)),
        "R of `secure-sum`: each number of an update is clipped to [-R, R] and rounded to n R / 2^31",
    ),
    "sum-threshold": Setting(
        0.67,
        in_range(0.67, 1.0, open_above=True),
        "a sum of which no more than this share of the nodes survive is none",
    ),
    "sum-min-nodes": Setting(3, whole(3, 255), "nodes without which there is no sum"),
}

# Noise on such sums: differential privacy of whole nodes.
SUM_NOISE_SETTINGS: Mapping[str, Setting] = {
    "upload-clip": Setting(
        0.0,
        number("0, or a number up to 1e+30", NumberRange(0, 1e30)),
        "with `secure-sum`: largest norm of a node's update; with its noise both > 0, or both 0 for none",
    ),
    "upload-noise-multiplier": Setting(
        0.0,
        number("0, or a number from 0.001 to 1e+06", NumberRange(1e-3, 1e6, zero=True)),
        "the deviation of the noise on a sum of updates over that norm (docs/privacy.md)",
    ),
    "noise-delta": Setting(
        1e-5, in_range(0.0, 1.0, open_below=True, open_above=True), "delta at which epsilon is told"
    ),
    "noise-source": Setting(
        "entropy",
        choice("entropy", "seed"),
        "`entropy`: from the operating system; `seed`: for simulations that must repeat, no protection",
    ),
}


def registry_setting(check: Callable[[str], object]) -> Setting:
    """Return what says who may take part as whom; whether a file does, strategies know."""
    return Setting(
        "",
        text("a file like the nodes.toml of `hedgerow deploy keys`, or empty", check),
        "the server's file that binds nodes' keys to places (docs/nodes.md); empty: whoever comes",
        Role.IRRELEVANT,
    )


# How a machine trains its nodes; nothing of it changes what a run means.
STACK_SETTINGS: Mapping[str, Setting] = {
    "training-mode": Setting(
        "auto",
        choice("auto", "loop", "stack"),
        "`loop`: one node after the other, which gives bits (docs/bits.md); `stack`: many at once",
        Role.REPETITION,
    ),
    "stack-nodes": Setting(
        0, whole(0, MAX_NODES), "the most nodes in a stack (0: as memory and caches hold)"
    ),
    "precision": Setting(
        "float32",
        choice("float32", "bf16"),
        "`bf16`: products of local training in bfloat16, parameters and sums in float32 (docs/precision.md)",
    ),
    "compile": Setting(
        False,
        flag(),
        "`torch.compile` for local training, where it finds a compiler (docs/precision.md)",
        Role.REPETITION,
    ),
}


def training_problems(values: Mapping[str, Any]) -> list[str]:
    """Return what is wrong between settings of how nodes train."""
    if values["compile"] and values["training-mode"] == "stack":
        return ["compile = True; valid with training-mode = 'stack' is False: a stack is not compiled"]
    return []


def _check_cluster(address: str) -> None:
    if address:
        check_address(address)


RUN_SETTINGS: Mapping[str, Setting] = {
    "evaluate-every": Setting(5, whole(1, MAX_ROUNDS), "rounds between evaluations"),
    "train-loss-samples": Setting(
        0, whole(0, MAX_SAMPLES), "training samples that the loss is taken over, the same each time (0: all)"
    ),
    # What nodes that are devices need.
    "round-timeout": Setting(
        600.0,
        number(
            f"a number of seconds > 0, up to {_MAX_SECONDS:g}", NumberRange(0, _MAX_SECONDS, open_below=True)
        ),
        "seconds until a reply is too late",
        Role.RESUME,
    ),
    "min-replies": Setting(1, whole(0, MAX_NODES), "fewest valid replies of a round"),
    "stop-after": Setting(
        "",
        text("iterations=N, sim-seconds=S, bits=B or payload-bytes=B, each > 0, or empty", Budget.parse),
        "the run ends after the round that spent so much, if it has not ended before",
        Role.RESUME,
    ),
    # Who carries the messages, and what is kept of the run.
    "engine": Setting(
        "flower",
        choice("flower", "inprocess"),
        "`inprocess`: the ServerApp runs the nodes itself, also under `flwr run`",
        Role.REPETITION,
    ),
    "workers": Setting(
        0,
        whole(0, MOST_WORKERS),
        "of `inprocess`: processes that the nodes are dealt to (0: physical cores where that pays; 1: none)",
        Role.IRRELEVANT,
    ),
    "ray": Setting(
        "",
        text("the address of a Ray cluster, `HOST:PORT` or `auto`, or empty", _check_cluster),
        "of `inprocess`: a Ray cluster that the nodes are dealt to (`workers` = 0: its CPUs)",
        Role.IRRELEVANT,
    ),
    "output-dir": Setting("runs", folder("a folder", writable=True), "where run folders go", Role.IRRELEVANT),
    "checkpoint-every": Setting(10, whole(1, MAX_ROUNDS), "rounds between checkpoints", Role.IRRELEVANT),
    "checkpoint-nodes": Setting(
        "auto",
        choice("auto", "always", "never"),
        "whether a checkpoint holds what nodes keep; `auto`: in simulation, not from devices",
        Role.IRRELEVANT,
    ),
    "resume": Setting(
        "", folder("the folder of an earlier run, or empty"), "a run folder to go on with", Role.IRRELEVANT
    ),
    "quiet": Setting(False, flag(), "no progress", Role.IRRELEVANT),
}

_ROLES: Mapping[str, Role] = _TASK_ROLES | {
    key: setting.role
    for key, setting in {
        **RUN_SETTINGS,
        **STACK_SETTINGS,
        **peer_settings("server"),
        PEERS: peers_setting(""),
        "iterations": ITERATIONS,
        "monitor": MONITOR,
        "registry": registry_setting(lambda _: None),
        "seed": SEED,
        # What apps of Flower's call it.
        "num-server-rounds": ITERATIONS,
    }.items()
}


def role_of(key: str) -> Role:
    """Return the role of a run-config key, in whichever app: that of the setting which has the name here."""
    return _ROLES.get(key, Role.RESULTS)
