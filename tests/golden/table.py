"""The runs by which two checkouts are compared. Imports nothing of the suite.

Each row is a small run of an app. Some are chosen by hand; the others are drawn so that every valid pair of
an app's concerns occurs in a row (``pairwise``). An app of ``tests/registry.py`` that is not named here has
two rows: its small run, whole and resumed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from tests.registry import REGISTRY

__all__ = ["DESIGNS", "ROWS", "SCRIPTS", "Design", "Row", "Settings", "pairwise"]

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One run.

    Parameters
    ----------
    name : str
        Unique; begins with the app's.
    app : str
        Folder under ``flower_apps``.
    settings : dict
        Settings of the run config.
    faults : dict (default: none)
        The keys ``fault-*``.
    tags : tuple of str (default: none)
        The concerns that the row covers.
    data : {"", "tables", "parties"} (default: "")
        The nodes' own data: a table each, or the files of hospitals and edges.
    policy : str (default: "")
        The policy file of every node.
    late : dict of int to int (default: none)
        Partitions that join at the end of this round.
    killed : int (default: 0)
        The round at whose end the process is killed; the run is then resumed.
    strict : bool (default: False)
        Whether messages are serialised.
    workers : int or None (default: None)
        Worker processes; 0 for the engine's choice, None for one.
    peers : int (default: 0)
        Servers with a run each and direct links.
    script : str (default: "")
        One of ``SCRIPTS``, to run in place of the app's ServerApp for what no setting can express.
    transcript : bool (default: True)
        Whether messages are compared.
    """

    name: str
    app: str
    settings: Settings
    faults: Settings = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    data: str = ""
    policy: str = ""
    late: Mapping[int, int] = field(default_factory=dict)
    killed: int = 0
    strict: bool = False
    workers: int | None = None
    peers: int = 0
    script: str = ""
    transcript: bool = True


# `Compressed` around strategies: no app has a setting for it. Each is run by play.py.
SCRIPTS = ("compressed-fedavg", "compressed-sd-feel")

_BASE: Mapping[str, Settings] = {
    "sd-feel": {
        "num-clients": 8, "num-servers": 2, "topology": "path", "tau1": 2, "tau2": 2, "alpha": 1,
        "batch-size": 5, "iterations": 8, "model": "logistic", "evaluate-every": 2,
    },
    "similarity-free": {
        "num-clients": 5, "partition": "iid", "model": "logistic", "local-iters": 2, "inner-steps": 4,
        "batch-size": 5, "num-rounds": 4, "fixed-c": 0.3, "compressor": "topk(0.1)", "evaluate-every": 2,
    },
    "fedmud": {
        "num-clients": 5, "clients-per-round": 4, "partition": "iid", "batch-size": 250, "num-rounds": 4,
        "model": "mlp", "skip-front": 0, "ratio": 0.25, "init-a": 0.1, "train-loss-samples": 500,
        "evaluate-every": 2,
    },
    "ceps": {
        "num-clients": 6, "topology": "complete", "iterations": 12, "interval-low": 2, "interval-high": 4,
        "features": 60, "sparsity": 3, "measurements": 90, "samples-low": 30, "samples-high": 60,
        "local-steps": 3, "learning-rate": 0.02,
    },
    "hsgd": {
        "num-groups": 3, "num-clients": 6, "patients-per-group": 10, "participation": 0.4, "iterations": 8,
        "global-interval": 4, "local-interval": 2, "evaluate-every": 1,
    },
}  # fmt: skip
# What only a run that deals its data reads.
_DEALT = ("train-loss-samples", "features", "samples-low", "samples-high", "patients-per-group")
# One table per node, two classes.
_TABLES = {"partition": "own", "classes": "well,sick", "model": "logistic"}
# One node after the other, as a local optimiser wants it.
_ALONE: Settings = {"training-mode": "loop"}
_TEXT: Settings = {"dataset": "sentences-small", "partition": "source(0.7)", "model": "text-transformer"}
_SUMS: dict[str, Any] = {"secure-sum": True}
_NOISED_SUMS = {**_SUMS, "upload-clip": 0.1, "upload-noise-multiplier": 0.5, "noise-source": "seed"}
# What every simulated node answers, with its own ledger.
_POLICY = 'max-seconds = 600.0\nmax-hellos = 8\nshare-state = true\nmonitor = true\nledger = "ledger.jsonl"\n'
_SUMS_ALONE = 'secure-sums = "required"\nledger = "ledger.jsonl"\n'
_DROPPED: Settings = {"fault-dropout": 0.04}
_CORRUPT: Settings = {"fault-corrupt": "nan", "fault-corrupt-rate": 0.3}
# Rare enough for sums to succeed, and of a kind that a monitor does not take for a diverging run.
_RARELY_CORRUPT: Settings = {"fault-corrupt": "shape", "fault-corrupt-rate": 0.04}


def _row(app: str, name: str, *tags: str, **options: Any) -> Row:
    """Return a row of an app's base with changes, each under its keyword."""
    settings = options.pop("settings", {})
    unread = _DEALT if settings.get("partition") == "own" else ()
    settings = {**{key: value for key, value in _BASE[app].items() if key not in unread}, **settings}
    return Row(f"{app} {name}", app, settings, tags=tags, **options)


# Methods and codecs, one row each.


def _methods() -> Iterator[Row]:
    for one in REGISTRY:
        for method in one.others:
            name = f"{one.app} method {method}"
            yield Row(name, one.app, {**one.small, one.method: method}, tags=("method",))
    for app in ("sd-feel", "similarity-free", "fedmud"):
        yield _row(app, f"local layers of {app}", "method", settings={"local-layers": "*bias"})
        optimiser = {"local-optimiser": "adamw(warm_up=0.5, accumulate=2)"}
        yield _row(app, f"local optimiser of {app}", "method", settings={**optimiser, **_ALONE})
    yield _row("sd-feel", "text of four sources", settings=_TEXT)
    for step in ("adam(lr=0.02)", "yogi(lr=0.02)", "adagrad(lr=0.02)", "momentum"):
        yield _row("sd-feel", f"server step {step}", "method", settings={"server-step": step})
    for method in ("sd-feel", "hierfavg", "feel", "fedavg"):
        yield _row("sd-feel", f"method {method}", "method", settings={"method": method, "participation": 0.8})
    for method in ("fedavg", "fedprox", "ef-fedavg", "ef-fedprox", "fedpaq"):
        yield _row("similarity-free", f"method {method}", "method", settings={"algorithm": method})
    for method in (
        "fedavg", "fedmud", "fedmud+f", "fedmud+aad", "fedmud+bkd", "fedmud+bkd+f", "fedmud+bkd+aad",
        "fedlmt", "fedpara", "fedhm", "ef21-p", "fedbat", "lora", "ffa-lora", "fedex-lora",
    ):  # fmt: skip
        yield _row("fedmud", f"method {method}", "method", settings={"method": method, "num-rounds": 3})
    for method in (
        "ceps", "d-psgd", "d-psgd-dn", "d-psgd-pc", "dfedavgm", "dfedsam", "dcd-psgd", "choco-sgd", "beer",
        "sgp", "sgp-dn", "dp-dsgt", "matcha",
    ):  # fmt: skip
        # No seal: what nodes publish is then in the transcript.
        noise = {"privacy": "sound", "noise-source": "seed"} if method.startswith("dp-dsgt") else {}
        yield _row(
            "ceps", f"method {method}", "method", settings={"method": method, "sealed": False, **noise}
        )
    for method in ("hsgd", "c-hsgd", "jfl", "tdcd", "c-tdcd"):
        yield _row(
            "hsgd", f"method {method}", "method",
            settings={"method": method, "tdcd": "isolated", "sealed": False},
        )  # fmt: skip


def _codecs() -> Iterator[Row]:
    for codec in ("identity", "topk(20)", "topk(0.1)", "randk(0.2)", "sign", "ternary"):
        yield _row("similarity-free", f"codec {codec}", "codec", settings={"compressor": codec})
    yield _row(
        "similarity-free", "codec topk without memory", "codec",
        settings={"algorithm": "fedpaq", "compressor": "topk(0.1)"},
    )  # fmt: skip
    for codec in ("1bcs", "sparse16", "sparse32", "sparse64", "dense32", "dense64"):
        yield _row("ceps", f"codec {codec}", "codec", settings={"codec": codec, "sealed": False})
    for method, codec, more in (
        ("dfedavgm", "quantised4", {"bits": 4}),
        ("dcd-psgd", "quantised6", {"bits": 6}),
        ("choco-sgd", "sparse", {"top-k": 5, "step-gamma": 0.1}),
        ("beer", "quantised4", {"bits": 4, "step-gamma": 0.1}),
    ):
        yield _row("ceps", f"codec {codec} of {method}", "codec", settings={"method": method, **more})
    for name, more in (
        ("biht", {"decoder": "biht"}),
        ("literal", {"expand": "literal", "compand": "none"}),
        ("srht of receiver", {"phi": "srht", "phi-owner": "receiver"}),
        ("thin phi", {"phi-density": 0.6}),
    ):
        yield _row("ceps", f"codec 1bcs {name}", "codec", settings=more)
    for codec in ("topk(0.1)", "randk(0.1)", "sign", "ternary"):
        yield _row(
            "sd-feel", f"compressed FedAvg {codec}", "compressed", "error feedback",
            settings={"codec": codec}, script="compressed-fedavg",
        )  # fmt: skip
    yield _row(
        "sd-feel", "compressed SD-FEEL topk(0.1)", "compressed", "error feedback",
        settings={"codec": "topk(0.1)"}, script="compressed-sd-feel",
    )  # fmt: skip


# Concerns that have many levels, or one of an app alone.


def _rules() -> Iterator[Row]:
    for rule in (
        "median",
        "trimmed-mean(0.3)",
        "krum(1)",
        "multi-krum(1,2)",
        "geometric-median",
        "clipped(0.5)",
    ):
        yield _row(
            "similarity-free", f"rule {rule}", "robust", settings={"algorithm": "fedavg", "aggregation": rule}
        )  # fmt: skip
    for rule in ("median", "trimmed-mean(0.3)", "clipped(0.5)"):
        yield _row("ceps", f"rule {rule}", "robust", settings={"aggregation": rule, "codec": "dense64"})
    yield _row("fedmud", "rule geometric-median", "robust", settings={"aggregation": "geometric-median"})
    yield _row("sd-feel", "rule krum(1)", "robust", settings={"aggregation": "krum(1)", "num-clients": 10})
    yield _row(
        "hsgd", "rules of groups and devices", "robust",
        settings={
            "aggregation": "median", "device-aggregation": "trimmed-mean(0.3)", "layout": "devices",
            "num-clients": 33,
        },
    )  # fmt: skip


def _learning() -> Iterator[Row]:
    for sync in ("catchup", "dense", "broadcast"):
        yield _row(
            "fedmud", f"sync {sync}", "sync",
            settings={"sync": sync, "clients-per-round": 2, "num-rounds": 5, "reset-interval": 2},
        )  # fmt: skip
    yield _row(
        "fedmud",
        "bias and batches",
        settings={
            "measure-bias": True,
            "weighting": "num-batches",
            "augmentation": "flips",
            "precision": "bf16",
            "drop-last": "always",
        },
    )
    yield _row(
        "fedmud", "layout tiled and tight of layers",
        settings={"layout": "tiled", "tight": True, "budget": "layer", "method": "fedmud+bkd",
            "augmentation": "crops-and-flips", "training-mode": "stack", "drop-last": "never"},
    )  # fmt: skip
    yield _row(
        "fedmud", "cnn4 in convolutions", settings={
            "model": "cnn4", "method": "fedlmt", "view": "convolutions", "num-rounds": 1, "num-clients": 8,
            "clients-per-round": 2, "batch-size": 500, "train-loss-samples": 100, "evaluate-every": 1,
        },
    )  # fmt: skip
    for schedule in ("diminishing", "step-decay"):
        yield _row(
            "similarity-free", f"schedule {schedule}", "schedule",
            settings={"schedule": schedule, "schedule-drives": "round", "decay-stage": 2},
        )  # fmt: skip
    yield _row(
        "similarity-free", "crops in a stack",
        settings={"augmentation": "crops-and-flips", "training-mode": "stack"},
    )  # fmt: skip
    yield _row("similarity-free", "flips in bf16", settings={"augmentation": "flips", "precision": "bf16"})
    yield _row(
        "similarity-free", "fresh inner batches", settings={"algorithm": "ef-fedprox", "inner-batch": "fresh"}
    )  # fmt: skip
    for adaptive in ("observe", "strategy2", "strategy2+3"):
        yield _row(
            "hsgd", f"adaptive {adaptive}", "adaptive", settings={
                "adaptive": adaptive, "replan-every": 1, "probe-steps": 2, "probe-batches": 2,
                "probe-aggregate": "mean" if adaptive == "observe" else "max",
            },
        )  # fmt: skip
    yield _row(
        "hsgd", "merged TDCD with a clock", "clock",
        settings={
            "method": "tdcd", "num-clients": 2, "raw-bytes-per-group": 1e4, "raw-seconds": 1.0,
            "compute-seconds": 0.1,
        },
    )  # fmt: skip
    yield _row(
        "hsgd", "mnist-5k", settings={"dataset": "mnist-5k", "iterations": 4, "training-mode": "loop"}
    )  # fmt: skip
    for topology in ("erdos-renyi(0.6)", "torus(2,2)"):
        yield _row(
            "sd-feel", f"topology {topology}", "gossip",
            settings={"topology": topology, "num-servers": 4, "alpha": 2},
        )  # fmt: skip
    yield _row(
        "sd-feel", "exact mean on a complete graph", "gossip",
        settings={"topology": "complete", "num-servers": 3, "exact-if-complete": True},
    )  # fmt: skip
    yield _row("sd-feel", "lenet in a loop", settings={"model": "lenet", "training-mode": "loop", "seed": 7})
    yield _row(
        "sd-feel",
        "lenet in a stack",
        settings={"model": "lenet", "training-mode": "stack", "latency-preset": "paper-text"},
    )
    yield _row(
        "sd-feel",
        "lasting stragglers",
        "stragglers",
        settings={"stragglers": "lasting(0.4,5)", "latency-preset": "cifar-large"},
    )
    yield _row("sd-feel", "times of the engine", "clock", settings={"latency-preset": "engine"})
    for topology in ("directed-ring", "one-peer-exponential"):
        yield _row(
            "ceps", f"sgp on {topology}", "gossip",
            settings={"method": "sgp", "topology": topology, "sealed": False},
        )  # fmt: skip
    yield _row(
        "ceps", "network", settings={
            "problem": "network", "codec": "sparse32", "sparsity": 50, "iterations": 4, "model": "logistic",
            "num-clients": 4,
        },
    )  # fmt: skip
    yield _row(
        "ceps", "logistic",
        settings={"problem": "logistic", "codec": "dense32", "sparsity": 20, "iterations": 8},
    )  # fmt: skip


def _buffered() -> Iterator[Row]:
    slow = {"fault-delay": "exponential:2"}
    feel = {"method": "feel", "buffer": 2, "clients-per-round": 4}
    yield _row("sd-feel", "buffer of FEEL", "buffer", settings=feel, faults=slow)
    yield _row(
        "sd-feel", "buffer resumed with messages in flight", "buffer", "resumed", killed=3, faults=slow,
        settings={"method": "fedavg", "buffer": 3, "checkpoint-every": 1, "buffer-staleness": "none"},
    )  # fmt: skip
    yield _row(
        "similarity-free", "buffer with error feedback", "buffer", "error feedback", faults=slow,
        settings={
            "algorithm": "ef-fedavg", "buffer": 2, "buffer-concurrency": 3, "buffer-max-staleness": 2,
            "buffer-staleness": "none",
        },
    )  # fmt: skip
    yield _row(
        "fedmud", "buffer of updates", "buffer", faults=slow,
        settings={"method": "fedmud+aad", "sync": "dense", "buffer": 2, "buffer-staleness": "none"},
    )  # fmt: skip


def _private() -> Iterator[Row]:
    yield _row(
        "ceps", "one-bit with paper's noise", "privacy", settings={"privacy": "paper", "noise-source": "seed"}
    )
    for codec in ("1bcs", "dense64"):
        yield _row(
            "ceps", f"{codec} with sound noise", "privacy",
            settings={
                "codec": codec, "privacy": "sound", "noise-source": "seed", "sigma-rule": "fixed_c",
                "c": 100.0,
            },
        )  # fmt: skip
    for method in ("d-psgd-dn", "sgp-dn"):
        yield _row(
            "ceps", f"{method} with sound noise", "privacy",
            settings={"method": method, "privacy": "sound", "noise-source": "seed"},
        )  # fmt: skip
    yield _row(
        "hsgd", "noise on encodings and uploads", "privacy",
        settings={
            "clip": 1.0, "noise-multiplier": 0.5, "upload-clip": 1.0, "upload-noise-multiplier": 0.5,
            "noise-source": "seed",
        },
    )  # fmt: skip
    for app, more in (
        ("sd-feel", {}),
        ("similarity-free", {"algorithm": "fedavg"}),
        ("fedmud", {"method": "fedmud+aad", "sync": "dense"}),
    ):
        yield _row(app, "secure sum", "sums", settings={**more, **_SUMS})
        yield _row(
            app, "secure sum with dropped nodes", "sums", "faults", settings={**more, **_SUMS},
            faults={"fault-crash": "1:6"},
        )  # fmt: skip
        yield _row(app, "secure sum with noise", "sums", "privacy", settings={**more, **_NOISED_SUMS})


def _nodes() -> Iterator[Row]:
    yield _row(
        "similarity-free", "late nodes", "late", data="tables", late={1: 1, 3: 2},
        settings={**_TABLES, "min-available-nodes": 2, "num-clients": 4, "algorithm": "ef-fedavg"},
    )  # fmt: skip
    yield _row(
        "sd-feel", "late nodes", "late", data="tables", late={7: 1},
        settings={**_TABLES, "min-available-nodes": 7},
    )  # fmt: skip
    yield _row("sd-feel", "groups", "own data", data="tables", settings={**_TABLES, "clusters": "group"})
    yield _row(
        "fedmud", "late nodes", "late", data="tables", late={2: 2},
        settings={**_TABLES, "min-available-nodes": 4, "method": "fedavg"},
    )  # fmt: skip
    yield _row(
        "ceps", "own tables", "own data", data="tables",
        settings={**_TABLES, "problem": "logistic", "codec": "dense64", "sparsity": 2, "num-clients": 4},
    )  # fmt: skip
    yield _row(
        "hsgd", "own files", "own data", data="parties",
        settings={
            "partition": "own", "num-groups": 2, "num-clients": 4, "participation": 0.5,
            "classes": "malignant,benign",
        },
    )  # fmt: skip
    yield _row(
        "similarity-free", "policy", "policy", data="tables", policy=_POLICY,
        settings={**_TABLES, "num-clients": 4},
    )  # fmt: skip
    yield _row(
        "similarity-free", "policy of sums alone", "policy", "sums", data="tables", policy=_SUMS_ALONE,
        settings={**_TABLES, **_SUMS, "num-clients": 4, "algorithm": "fedavg", "standardise": "50,10"},
    )  # fmt: skip
    yield _row(
        "sd-feel", "policy that refuses", "policy", data="tables", policy=_SUMS_ALONE,
        settings={**_TABLES, "standardise": "50,10"},
    )  # fmt: skip
    yield _row(
        "similarity-free", "quarantine", "quarantine", "faults", faults=_CORRUPT,
        settings={"num-rounds": 8, "quarantine-after": 1, "algorithm": "fedavg"},
    )  # fmt: skip
    yield _row(
        "sd-feel", "quarantine", "quarantine", "faults", faults={**_CORRUPT, "fault-corrupt": "shape"},
        settings={"iterations": 16, "quarantine-after": 1},
    )  # fmt: skip
    yield _row(
        "fedmud", "faulty federation", "faults",
        faults={
            "fault-dropout": 0.1, "fault-delay": "uniform:1,5", "fault-stragglers": "0",
            "fault-slowdown": 10.0, "fault-crash": "3:6", "fault-corrupt": "keys", "fault-corrupt-rate": 0.1,
        },
        settings={"num-rounds": 6, "round-timeout": 20.0},
    )  # fmt: skip
    for app in ("similarity-free", "hsgd", "sd-feel", "ceps"):
        yield _row(
            app, "faulty federation", "faults", settings={"round-timeout": 20.0},
            faults={"fault-dropout": 0.1, "fault-delay": "lognormal:2,1", "fault-crash": "1:9"},
        )  # fmt: skip
    yield _row(
        "similarity-free", "too few replies", "faults", faults={"fault-dropout": 0.9},
        settings={"min-replies": 5},
    )  # fmt: skip
    yield _row("similarity-free", "divergence", "guard", settings={"fixed-c": 1e9, "algorithm": "fedavg"})
    yield _row(
        "sd-feel", "bounds", "guard",
        settings={"max-weight-ratio": 1.0, "max-update-norm-ratio": 1.0, "precision": "bf16"},
    )  # fmt: skip
    yield _row("sd-feel", "refused settings", settings={"topology": "moebius", "tau1": 3})
    yield _row("ceps", "stragglers", "stragglers", settings={"stragglers": True, "participation": 0.4})
    yield _row("sd-feel", "budget of bits", "budget", settings={"stop-after": "bits=2000000"})
    yield _row("ceps", "tolerance and budget", "budget", settings={"stop-after": "iterations=7"})


def _engines() -> Iterator[Row]:
    for app in _BASE:
        yield _row(
            app, "workers as the engine chooses", "workers", workers=0,
            settings={"training-mode": "loop"} if app != "ceps" else {},
        )  # fmt: skip
        yield _row(app, "resumed", "resumed", killed=3, settings={"checkpoint-every": 2})
    # Several servers.
    yield _row(
        "sd-feel", "direct", "direct", peers=2, settings={"edge-servers": "direct", "peer-timeout": 60.0}
    )  # fmt: skip
    yield _row(
        "ceps", "sites", "direct", peers=2,
        settings={"monitor": False, "topology": "ring", "peer-timeout": 60.0},
    )  # fmt: skip


# Pairs of concerns.


@dataclass(frozen=True)
class Design:
    """The concerns of an app that may meet.

    Parameters
    ----------
    app : str
        The app.
    base : dict
        Settings beside the app's base.
    factors : dict
        Of each concern its levels by name; the first is without it. A level is what it changes of a row,
        under the names of the row's fields.
    refused : tuple of (concern, level, concern, level)
        Pairs that the app refuses, "*" being any level but the first. Each must be refused indeed.
    """

    app: str
    base: Settings
    factors: Mapping[str, Mapping[str, Mapping[str, Any]]]
    refused: tuple[tuple[str, str, str, str], ...]

    def is_refused(self, one: tuple[str, str], other: tuple[str, str]) -> bool:
        """Whether two levels, (concern, level) each, do not go together."""
        both = ((one, other), (other, one))
        return any(self._is(x, a, b) and self._is(y, c, d) for a, b, c, d in self.refused for x, y in both)

    def _is(self, level: tuple[str, str], concern: str, name: str) -> bool:
        first = next(iter(self.factors[concern]))
        return level[0] == concern and (level[1] == name or (name == "*" and level[1] != first))

    def pairs(self) -> set[frozenset[tuple[str, str]]]:
        """All pairs of levels that go together."""
        levels = [(concern, level) for concern, names in self.factors.items() for level in names]
        return {
            frozenset((a, b))
            for a, b in combinations(levels, 2)
            if a[0] != b[0] and not self.is_refused(a, b)
        }

    def row(self, levels: Mapping[str, str]) -> Row:
        """Return the row that has these levels."""
        tags = tuple(f"{c}={level}" for c, level in levels.items() if level != next(iter(self.factors[c])))
        settings, changes = dict(self.base), dict[str, Any]()
        for concern, level in levels.items():
            change = dict(self.factors[concern][level])
            settings |= change.pop("settings", {})
            changes |= change
        return _row(self.app, f"pairs {' '.join(tags) or 'none'}", *tags, settings=settings, **changes)


def pairwise(design: Design) -> list[dict[str, str]]:
    """Return few sets of levels in which every pair that goes together occurs; the same each time."""
    left, made = design.pairs(), list[dict[str, str]]()
    while left:
        one = dict[str, str]()
        first = min(left, key=sorted)
        for concern, level in sorted(first):
            one[concern] = level
        for concern, names in design.factors.items():
            if concern in one:
                continue
            fitting = [n for n in names if not any(design.is_refused((concern, n), o) for o in one.items())]
            assert fitting, (concern, one)
            new = [sum(frozenset(((concern, n), o)) in left for o in one.items()) for n in fitting]
            one[concern] = fitting[new.index(max(new))]
        left -= {frozenset(pair) for pair in combinations(one.items(), 2)}
        made.append({concern: one[concern] for concern in design.factors})
    return made


def _setting(**settings: Any) -> dict[str, Any]:
    return {"settings": {key.replace("_", "-"): value for key, value in settings.items()}}


_PLAIN: dict[str, Any] = {}
_FAULTS = {"all": _PLAIN, "dropped": {"faults": _DROPPED}, "corrupt": {"faults": _RARELY_CORRUPT}}
_ENGINE = {"plain": _PLAIN, "strict": {"strict": True}, "workers": {"workers": 2}}
_END = {"through": _PLAIN, "resumed": {"killed": 2, "settings": {"checkpoint-every": 1}}}
_OWN = {"dealt": _PLAIN, "own": {"data": "tables", "settings": _TABLES}}
_SUMMED = {"clear": _PLAIN, "masked": {"settings": _SUMS}, "noised": {"settings": _NOISED_SUMS}}
_RULE = {"mean": _PLAIN, "robust": _setting(aggregation="median")}
_NO_ROBUST_SUM = ("sums", "*", "rule", "*")

DESIGNS = (
    Design(
        "sd-feel",
        {"training-mode": "loop"},
        {
            "edges": {"emulated": _PLAIN, "nodes": _setting(edge_servers="nodes")},
            "sums": _SUMMED,
            "rule": {"mean": _PLAIN, "robust": _setting(aggregation="clipped(0.5)")},
            "faults": _FAULTS,
            "stragglers": {"none": _PLAIN, "some": _setting(stragglers="transient(0.5,3)")},
            "probes": {"none": _PLAIN, "two": _setting(probe_rounds=2)},
            "data": _OWN,
            "engine": _ENGINE,
            "end": _END,
        },
        (
            _NO_ROBUST_SUM,
            ("edges", "nodes", "sums", "*"),
            ("edges", "nodes", "stragglers", "*"),
            ("sums", "*", "probes", "*"),
        ),
    ),
    Design(
        "similarity-free",
        {"training-mode": "loop", "compressor": "randk(0.2)"},
        {
            "memory": {"error feedback": _PLAIN, "none": _setting(algorithm="fedpaq")},
            "codec": {"randk": _PLAIN, "sign": _setting(compressor="sign")},
            "sums": _SUMMED,
            "rule": _RULE,
            "faults": _FAULTS,
            "probes": {"none": _PLAIN, "two": _setting(probe_rounds=2)},
            "weights": {"uniform": _PLAIN, "examples": _setting(weighting="examples")},
            "data": _OWN,
            "engine": _ENGINE,
            "end": _END,
        },
        (
            _NO_ROBUST_SUM, ("sums", "*", "probes", "*"), ("sums", "*", "codec", "*"),
            ("sums", "*", "memory", "error feedback"),
        ),
    ),
    Design(
        "fedmud",
        {"training-mode": "loop", "num-rounds": 3, "batch-size": 100, "method": "fedmud+aad"},
        {
            "sync": {
                "catchup": _PLAIN, "dense": _setting(sync="dense"), "broadcast": _setting(sync="broadcast"),
            },
            "sums": _SUMMED,
            "rule": _RULE,
            "faults": _FAULTS,
            "weights": {"examples": _PLAIN, "uniform": _setting(weighting="uniform")},
            "data": {
                "dealt": _PLAIN,
                "own": {"data": "tables", "settings": {**_TABLES, "skip-back": 0, "ratio": 1.0}},
            },
            "engine": _ENGINE,
            "end": _END,
        },
        (_NO_ROBUST_SUM, ("sums", "*", "sync", "catchup"), ("sums", "*", "sync", "broadcast")),
    ),
    Design(
        "ceps",
        {"sigma-rule": "fixed_c", "c": 100.0, "noise-source": "seed"},
        {
            "codec": {
                "1bcs": _PLAIN, "sparse": _setting(codec="sparse32"), "dense": _setting(codec="dense64"),
            },
            "privacy": {
                "none": _PLAIN, "paper": _setting(privacy="paper"), "sound": _setting(privacy="sound"),
            },
            "links": {"sealed": _PLAIN, "open": _setting(sealed=False)},
            "rule": _RULE,
            "neighbours": {"drawn": _PLAIN, "first": _setting(stragglers=True)},
            "faults": _FAULTS,
            "engine": _ENGINE,
            "end": _END,
        },
        (),
    ),
    Design(
        "hsgd",
        {
            "training-mode": "loop", "num-groups": 4, "num-clients": 8, "patients-per-group": 8,
            "participation": 0.5,
        },
        {
            "layout": {"edges": _PLAIN, "devices": _setting(layout="devices", num_clients=36)},
            "links": {"sealed": _PLAIN, "open": _setting(sealed=False)},
            "rule": _RULE,
            "uploads": {
                "plain": _PLAIN,
                "noised": _setting(upload_clip=1.0, upload_noise_multiplier=0.5, noise_source="seed"),
            },
            "encodings": {
                "plain": _PLAIN, "noised": _setting(clip=1.0, noise_multiplier=0.5, noise_source="seed"),
            },
            "adaptive": {
                "off": _PLAIN,
                "on": _setting(adaptive="strategy2+3", replan_every=1, probe_steps=2, probe_batches=2),
            },
            "faults": _FAULTS,
            "engine": _ENGINE,
            "end": _END,
        },
        (
            ("adaptive", "*", "uploads", "*"),
            ("adaptive", "*", "rule", "*"),
        ),
    ),
)  # fmt: skip


def _pairs() -> Iterator[Row]:
    for design in DESIGNS:
        for levels in pairwise(design):
            yield design.row(levels)


def _registered() -> Iterator[Row]:
    for one in REGISTRY:
        if one.app not in _BASE:
            yield Row(f"{one.app} small", one.app, one.small, tags=("method",))
            end = {"checkpoint-every": 2}
            yield Row(f"{one.app} resumed", one.app, {**one.small, **end}, tags=("resumed",), killed=2)


ROWS: Sequence[Row] = (
    *_methods(),
    *_codecs(),
    *_rules(),
    *_learning(),
    *_buffered(),
    *_private(),
    *_nodes(),
    *_engines(),
    *_pairs(),
    *_registered(),
)
