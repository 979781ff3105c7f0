"""The settings that mean the same in every app, in groups: what is learnt, how nodes train, what a run is.

An app's model inherits them and may give them other defaults and other help.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from hedgerow.sim.engine.ray_cluster import MOST_WORKERS, check_address
from hedgerow.sim.runs.kinds import (
    LARGEST,
    MAX_INT64,
    MAX_NODES,
    MAX_ROUNDS,
    NumberRange,
    above,
    folder,
    in_range,
    number,
    text,
    whole,
)
from hedgerow.sim.runs.settings import AppSettings, Role, setting
from hedgerow.wire.budget import Budget
from hedgerow.wire.limits import MAX_SAMPLES

__all__ = [
    "BoundSettings",
    "IterationSettings",
    "MonitorSettings",
    "NoiseSettings",
    "PeerSettings",
    "RunSettings",
    "StackSettings",
    "SumNoiseSettings",
    "SumSettings",
    "TaskSettings",
    "TrainingTaskSettings",
    "role_of",
]

# Longer than a server waits for anything, and short enough for every clock.
_MAX_SECONDS = 1e8
_RATIO = number("0, or a number from 1 to 1e+30", NumberRange(1, LARGEST, zero=True))


def _check_cluster(address: str) -> None:
    if address:
        check_address(address)


class RunSettings(AppSettings):
    """Who takes part, who carries the messages, and what is kept of the run: of every app."""

    GROUP = "run"

    num_clients: Annotated[int, whole(1, MAX_NODES)] = setting(2, "nodes", group="method", first=True)
    holdout: Annotated[float, in_range(0.0, 0.9)] = setting(
        0.2,
        "of `own`, in simulations: the share of its samples that each node keeps aside to measure on. "
        "A device's own `holdout` is in its node config",
        group="data",
    )
    min_available_nodes: Annotated[int, whole(0, MAX_NODES)] = setting(
        0,
        "nodes that must be there when the run starts; others may come later (0: all)",
        group="deployment",
    )
    registry: str = setting(
        "",
        "the server's file that binds nodes' keys to places (docs/nodes.md); empty: accept any node",
        role=Role.IRRELEVANT,
        group="deployment",
    )
    seed: Annotated[int, whole(0, MAX_INT64)] = setting(
        0, "keys everything that is drawn", role=Role.REPETITION, first=True
    )
    evaluate_every: Annotated[int, whole(1, MAX_ROUNDS)] = setting(5, "rounds between evaluations")
    train_loss_samples: Annotated[int, whole(0, MAX_SAMPLES)] = setting(
        0, "training samples that the loss is taken over, the same each time (0: all)"
    )
    round_timeout: Annotated[
        float,
        number(
            f"a number of seconds > 0, up to {_MAX_SECONDS:g}", NumberRange(0, _MAX_SECONDS, open_below=True)
        ),
    ] = setting(600.0, "seconds until a reply is too late", role=Role.RESUME, group="deployment")
    min_replies: Annotated[int, whole(0, MAX_NODES)] = setting(
        1, "fewest valid replies of a round", group="robustness"
    )
    stop_after: Annotated[
        str, text("iterations=N, sim-seconds=S, bits=B or payload-bytes=B, each > 0, or empty", Budget.parse)
    ] = setting(
        "",
        "the run ends after the round that spent so much, if it has not ended before",
        role=Role.RESUME,
    )
    engine: Literal["flower", "inprocess"] = setting(
        "flower",
        "`inprocess`: the ServerApp runs the nodes itself, also under `flwr run`",
        role=Role.REPETITION,
        group="deployment",
    )
    workers: Annotated[int, whole(0, MOST_WORKERS)] = setting(
        0,
        "of `inprocess`: processes that the nodes are dealt to (0: physical cores where that pays; 1: none)",
        role=Role.IRRELEVANT,
        group="deployment",
    )
    ray: Annotated[
        str, text("the address of a Ray cluster, `HOST:PORT` or `auto`, or empty", _check_cluster)
    ] = setting(
        "",
        "of `inprocess`: a Ray cluster that the nodes are dealt to (`workers` = 0: its CPUs)",
        role=Role.IRRELEVANT,
        group="deployment",
    )
    output_dir: Annotated[str, folder("a folder", writable=True)] = setting(
        "runs", "where run folders go", role=Role.IRRELEVANT
    )
    checkpoint_every: Annotated[int, whole(1, MAX_ROUNDS)] = setting(
        10, "rounds between checkpoints", role=Role.IRRELEVANT
    )
    checkpoint_nodes: Literal["auto", "always", "never"] = setting(
        "auto",
        "whether a checkpoint holds what nodes keep; `auto`: in simulation, not from devices",
        role=Role.IRRELEVANT,
    )
    resume: Annotated[str, folder("the folder of an earlier run, or empty")] = setting(
        "", "a run folder to go on with", role=Role.IRRELEVANT
    )
    quiet: bool = setting(False, "no progress", role=Role.IRRELEVANT)


class IterationSettings(AppSettings):
    """How long a run is, where that may change when it is resumed."""

    iterations: Annotated[int, whole(1, MAX_ROUNDS)] = setting(
        100, "iterations", role=Role.RESUME, first=True
    )


class MonitorSettings(AppSettings):
    """Whether somebody sees all models."""

    GROUP = "run"

    monitor: bool = setting(
        True,
        "record metrics of all models (simulation only; given up once where most nodes refuse)",
        role=Role.RESUME,
    )


class TaskSettings(AppSettings):
    """What is learnt; what is valid of its texts, the app says (``TEXTS``)."""

    GROUP = "data"

    dataset: str = setting("mnist-5k", "a name of `hedgerow data`, or `module:function`", first=True)
    data_dir: Annotated[str, folder("a folder, or empty")] = setting("", "where its files are")
    partition: str = setting(
        "iid", "how the data are dealt to nodes; `own`: each node has data of its own", first=True
    )
    classes: str = setting(
        "", "of `own`: a number, or the labels in the order of their classes, `benign,malignant`"
    )
    standardise: str = setting(
        "federated",
        "of `own`: by what all nodes hold together (`federated`), by a mean and a deviation, or `none`",
    )
    model: str = setting("lenet", "what is trained", group="training", first=True)


class TrainingTaskSettings(TaskSettings):
    """What is learnt of images by nodes that train a model of torch's."""

    scaling: str = setting(
        "standard", "pixels with mean 0 and deviation 1 a channel; `unit`: in [0, 1]", group="data"
    )
    device: str = setting("cpu", "where nodes train", role=Role.REPETITION, group="training")


class BoundSettings(AppSettings):
    """What one node can do to a run at most."""

    GROUP = "robustness"

    max_update_norm_ratio: Annotated[float, _RATIO] = setting(
        100.0, "a larger update, in norms usual in the rounds before, is refused (0: no bound)"
    )
    quarantine_after: Annotated[int, whole(0, MAX_ROUNDS)] = setting(
        3, "refused replies running after which a node rests for a while (0: never)"
    )
    max_loss_ratio: Annotated[float, _RATIO] = setting(
        1e6, "a run ends with an error at a larger loss, in losses of the start (0: it goes on)"
    )
    aggregation: str = setting("mean", "how updates become one: their mean, or a Byzantine-robust rule")


class SumSettings(AppSettings):
    """Whether a server sees sums alone (docs/privacy.md)."""

    GROUP = "privacy"

    secure_sum: bool = setting(
        False, "the server sees the nodes' weighted mean and nothing of one of them (docs/privacy.md)"
    )
    sum_clip: Annotated[float, number("a number from 1e-06 to 1e+06", NumberRange(1e-6, 1e6))] = setting(
        8.0, "R of `secure-sum`: each number of an update is clipped to [-R, R] and rounded to n R / 2^31"
    )
    sum_threshold: Annotated[float, in_range(0.67, 1.0, open_above=True)] = setting(
        0.67, "a sum that at most this share of the nodes survive is none"
    )
    sum_min_nodes: Annotated[int, whole(3, 255)] = setting(3, "nodes without which there is no sum")


class NoiseSettings(AppSettings):
    """Where noise comes from, and what is reported of it."""

    GROUP = "privacy"

    noise_delta: Annotated[float, in_range(0.0, 1.0, open_below=True, open_above=True)] = setting(
        1e-5, "delta at which epsilon is reported"
    )
    noise_source: Literal["entropy", "seed"] = setting(
        "entropy",
        "`entropy`: from the operating system; `seed`: for simulations that must repeat, no protection",
    )


class SumNoiseSettings(SumSettings, NoiseSettings):
    """Noise on such sums, which is differential privacy of whole nodes, and the bound on a node's weight."""

    GROUP = "privacy"

    upload_clip: Annotated[float, number("0, or a number up to 1e+30", NumberRange(0, 1e30))] = setting(
        0.0, "with `secure-sum`: largest norm of a node's update; with its noise both > 0, or both 0 for none"
    )
    upload_noise_multiplier: Annotated[
        float, number("0, or a number from 0.001 to 1e+06", NumberRange(1e-3, 1e6, zero=True))
    ] = setting(0.0, "the deviation of the noise on a sum of updates over that norm (docs/privacy.md)")
    max_weight_ratio: Annotated[float, _RATIO] = setting(
        10.0,
        "a node counts at most so many times the median of the examples that nodes claim (0: no bound)",
        group="robustness",
    )


class StackSettings(AppSettings):
    """How a machine trains its nodes; nothing of it changes what a run means."""

    GROUP = "training"

    training_mode: Literal["auto", "loop", "stack"] = setting(
        "auto",
        "`loop`: one node after the other, which gives bits (docs/bits.md); `stack`: many at once",
        role=Role.REPETITION,
    )
    stack_nodes: Annotated[int, whole(0, MAX_NODES)] = setting(
        0, "the most nodes in a stack (0: as memory and caches hold)"
    )
    precision: Literal["float32", "bf16"] = setting(
        "float32",
        "`bf16`: products of local training in bfloat16, parameters and sums in float32 (docs/precision.md)",
    )
    compile: bool = setting(
        False,
        "`torch.compile` for local training, where it finds a compiler (docs/precision.md)",
        role=Role.REPETITION,
    )

    def problems(self) -> list[str]:
        """Return what is wrong between settings of how nodes train."""
        if self.compile and self.training_mode == "stack":
            return ["compile = True; valid with training-mode = 'stack' is False: a stack is not compiled"]
        return []


class PeerSettings(AppSettings):
    """Of a run whose server sends others of its kind something over links of their own."""

    GROUP = "deployment"

    peers: Annotated[str, text("host:port,host:port,…, or empty")] = setting(
        "", "where each server listens for the others", role=Role.IRRELEVANT
    )
    peer_listen: Annotated[str, text("host:port, or empty")] = setting(
        "", "where this server listens, if not at its own address in `peers`", role=Role.IRRELEVANT
    )
    peer_timeout: Annotated[float, above(0.0)] = setting(
        600.0,
        "seconds that another server which is late is waited for; half of that at the start",
        role=Role.IRRELEVANT,
    )
    peer_ca: Annotated[str, text("a file like the ca.crt of `hedgerow deploy keys --edges`, or empty")] = (
        setting(
            "",
            "the certificate that servers' are signed with; empty: no TLS, on one machine alone",
            role=Role.IRRELEVANT,
        )
    )
    peer_certificate: Annotated[str, text("a file like its peer.pem, or empty")] = setting(
        "", "with which this server proves who it is", role=Role.IRRELEVANT
    )
    peer_key: Annotated[str, text("a file like its peer.key, or empty")] = setting(
        "", "the private key of that", role=Role.IRRELEVANT
    )

    @property
    def peer_addresses(self) -> list[str]:
        """The addresses in ``peers``."""
        return [address for part in self.peers.split(",") if (address := part.strip())]

    @property
    def credential_files(self) -> tuple[Path, Path, Path] | None:
        """The files of the CA, the certificate and its key; None for a run without TLS."""
        if not self.peer_ca:
            return None
        ca, certificate, key = (
            Path(name).expanduser() for name in (self.peer_ca, self.peer_certificate, self.peer_key)
        )
        return ca, certificate, key

    def credential_problems(self) -> list[str]:
        """Return what is wrong where some of the files are named and others are not."""
        files = ("peer-ca", "peer-certificate", "peer-key")
        named = [key for key in files if self.of(key)]
        if len(named) in (1, 2):
            return [f"{named[0]} is set; valid is all of {', '.join(files[:2])} and {files[2]}, or none"]
        return []


class _All(RunSettings, IterationSettings, MonitorSettings, StackSettings, PeerSettings):
    registry: Annotated[str, text("")] = setting("")
    device: Annotated[str, text("")] = setting("", role=Role.REPETITION)


_ROLES: Mapping[str, Role] = {
    **{key: one.role for key, one in _All.table().items()},
    # What apps of Flower's call it.
    "num-server-rounds": Role.RESUME,
}


def role_of(key: str) -> Role:
    """Return the role of a run-config key, in whichever app: that of the setting which has the name here."""
    return _ROLES.get(key, Role.RESULTS)
