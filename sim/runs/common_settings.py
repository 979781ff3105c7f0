"""Settings that have the same meaning in every app, in groups.

An app's model inherits them and may change their defaults and help.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from flwr.app import UserConfigValue

from hedgerow.sim.engine.workers import MOST_WORKERS
from hedgerow.sim.runs.kinds import (
    MAX_INT64,
    Delta,
    Nodes,
    NodesOr0,
    Ratio,
    Rounds,
    RoundsOr0,
    SamplesOr0,
    above,
    folder,
    in_range,
    number,
    text,
    whole,
)
from hedgerow.sim.runs.settings import AppSettings, Role, Rules, SettingsError, setting
from hedgerow.wire.budget import Budget
from hedgerow.wire.masked_sums import MAX_MEMBERS
from hedgerow.wire.printable import quoted
from hedgerow.wire.robust_means import AGGREGATIONS, parse_aggregation

# Names of a run's length; the last is that of Flower's own apps.
LENGTHS = ("iterations", "num-rounds", "num-server-rounds")
# Longer than any useful timeout, and within the range of every clock.
_MAX_SECONDS = 1e8
_SECONDS = number(f"a number of seconds > 0, up to {_MAX_SECONDS:g}", 0, _MAX_SECONDS, open_below=True)


class RunSettings(AppSettings):
    """Settings of every app: nodes, engine and records of a run."""

    GROUP = "run"
    # The key that bounds the number of replies in a round.
    SENDERS: ClassVar[str] = "num-clients"

    num_clients: Nodes = setting(2, "number of nodes", "method", first=True)
    holdout: Annotated[float, in_range(0.0, 0.9)] = setting(
        0.2,
        "own data, in simulations: fraction of each node's samples held out for evaluation. On "
        "devices, set `holdout` in the node config",
        "data",
        own_data=True,
    )
    min_available_nodes: NodesOr0 = setting(
        0, "nodes that must be connected when the run starts; others may join later (0: all)", "deployment"
    )
    registry: str = setting(
        "",
        "the server's file that binds the nodes' keys to partitions and roles (docs/nodes.md); empty: "
        "accept any node",
        "deployment",
        role=Role.IRRELEVANT,
    )
    seed: Annotated[int, whole(0, MAX_INT64)] = setting(
        0, "seed of all random draws", role=Role.REPETITION, first=True
    )
    evaluate_every: Rounds = setting(5, "rounds between evaluations")
    train_loss_samples: SamplesOr0 = setting(
        0,
        "number of training samples used to compute the loss, the same ones each time (0: all)",
        own_data=False,
    )
    round_timeout: Annotated[float, _SECONDS] = setting(
        600.0, "seconds to wait for a reply", "deployment", role=Role.RESUME
    )
    min_replies: NodesOr0 = setting(1, "minimum number of valid replies per round", "robustness")
    stop_after: Annotated[
        str, text("iterations=N, sim-seconds=S, bits=B or payload-bytes=B, each > 0, or empty", Budget.parse)
    ] = setting(
        "", "stop after the round that reaches this budget, unless the run ends earlier", role=Role.RESUME
    )
    engine: Literal["flower", "inprocess"] = setting(
        "flower",
        "`inprocess`: the ServerApp runs the nodes itself, even under `flwr run`",
        "deployment",
        role=Role.REPETITION,
    )
    workers: Annotated[int, whole(0, MOST_WORKERS)] = setting(
        0,
        "`inprocess` only: number of processes that run the nodes (0: the number of physical cores "
        "where that is faster; 1: no extra processes)",
        "deployment",
        role=Role.IRRELEVANT,
    )
    output_dir: Annotated[str, folder("a folder", writable=True)] = setting(
        "runs", "parent folder of the run folders", role=Role.IRRELEVANT
    )
    checkpoint_every: Rounds = setting(10, "rounds between checkpoints", role=Role.IRRELEVANT)
    checkpoint_nodes: Literal["auto", "always", "never"] = setting(
        "auto",
        "whether checkpoints include the nodes' state; `auto`: in simulations, but not from devices",
        role=Role.IRRELEVANT,
    )
    resume: Annotated[str, folder("the folder of an earlier run, or empty")] = setting(
        "", "run folder to resume from", role=Role.IRRELEVANT
    )
    quiet: bool = setting(False, "hide progress output", role=Role.IRRELEVANT)

    @property
    def needs_length(self) -> str:
        """Why earlier rounds depend on the run's length, which a resume may then not change; empty if not."""
        return ""

    def rules(self) -> Rules:
        """Yield the conditions between values that are each valid."""
        yield from super().rules()
        yield self.at_most("min-replies", self.SENDERS)
        yield self.at_most("min-available-nodes", "num-clients")
        table = self.table()
        if "partition" in table:
            own = self.of("partition") == "own"
            unread = (key for key, one in table.items() if one.own_data is (not own))
            yield from self.usual(f"{'with' if own else 'unless'} partition = 'own'", *unread)


class IterationSettings(AppSettings):
    """Length of a run in local iterations, which may grow when the run is resumed.

    Commands also accept ``num-rounds``, in communication rounds, which overrides ``iterations``.
    """

    iterations: Rounds = setting(100, "number of iterations", role=Role.RESUME, first=True)

    @property
    def round_iterations(self) -> int:
        """Local iterations per communication round."""
        return 1

    @classmethod
    def of_rounds(cls, rounds: object, run_config: Mapping[str, UserConfigValue]) -> int:
        """Return the iterations of ``rounds`` communication rounds under the run config's other settings.

        Raises SettingsError if ``rounds`` is not an integer >= 1.
        """
        if type(rounds) is not int or rounds < 1:
            raise SettingsError(f"num-rounds must be an integer >= 1, got {quoted(rounds)}")
        values = cls.checked_alone(run_config)[0]
        # An invalid value is the error to report.
        return rounds * (values.round_iterations if values else 1)


class MonitorSettings(AppSettings):
    """Whether all models are evaluated centrally."""

    GROUP = "run"

    monitor: bool = setting(
        True,
        "record metrics of all nodes' models (simulation only; turned off if most nodes refuse)",
        role=Role.RESUME,
    )


class TaskSettings(AppSettings):
    """Data set and model; the app declares the valid texts (``TEXTS``)."""

    GROUP = "data"

    dataset: str = setting(
        "mnist-5k", "a name from `hedgerow data`, or `module:function`", first=True, own_data=False
    )
    data_dir: Annotated[str, folder("a folder, or empty")] = setting(
        "", "folder with the data set's files", own_data=False
    )
    partition: str = setting(
        "iid", "how the data are split across nodes; `own`: each node uses its own data", first=True
    )
    classes: str = setting(
        "",
        "own data: number of classes, or the labels in class order, such as `benign,malignant`",
        own_data=True,
    )
    standardise: str = setting(
        "federated",
        "own data: standardize with statistics over all nodes (`federated`), with a given mean and "
        "standard deviation, or not at all (`none`)",
        own_data=True,
    )
    model: str = setting("lenet", "model to train", "training", first=True)


class ImageSettings(TaskSettings):
    """A torch model that is trained on images."""

    GROUP = "data"

    scaling: str = setting(
        "standard",
        "`standard`: pixels with mean 0 and standard deviation 1 per channel; `unit`: pixels in [0, 1]",
        own_data=False,
    )
    device: str = setting("cpu", "device that nodes train on", "training", role=Role.REPETITION)


class BoundSettings(AppSettings):
    """Bounds on the influence of a single node."""

    GROUP = "robustness"

    max_update_norm_ratio: Ratio = setting(
        100.0,
        "reject an update whose norm exceeds this multiple of the usual norm in earlier rounds (0: no bound)",
    )
    quarantine_after: RoundsOr0 = setting(
        3, "number of consecutive rejected replies after which a node is paused for a while (0: never)"
    )
    max_loss_ratio: Ratio = setting(
        1e6, "stop with an error when the loss exceeds this multiple of the initial loss (0: never)"
    )
    aggregation: Annotated[str, text(AGGREGATIONS, parse_aggregation)] = setting(
        "mean", "how updates are aggregated: their mean, or a Byzantine-robust rule"
    )


class SumSettings(AppSettings):
    """Secure aggregation: the server sees only sums (docs/privacy.md)."""

    GROUP = "privacy"

    secure_sum: bool = setting(
        False,
        "the server sees only the nodes' weighted mean, never the value of a single node (docs/privacy.md)",
    )
    sum_clip: Annotated[float, number("a number from 1e-06 to 1e+06", 1e-6, 1e6)] = setting(
        8.0,
        "clip R of `secure-sum`: each number of an update is clipped to [-R, R] and rounded to n R / 2^31",
    )
    sum_threshold: Annotated[float, in_range(0.67, 1.0, open_above=True)] = setting(
        0.67, "discard a sum if at most this fraction of its nodes survive"
    )
    sum_min_nodes: Annotated[int, whole(3, MAX_MEMBERS)] = setting(3, "minimum number of nodes in a sum")


class NoiseSettings(AppSettings):
    """Source of the noise, and the delta of the reported epsilon."""

    GROUP = "privacy"

    noise_delta: Delta = setting(1e-5, "delta at which epsilon is reported")
    noise_source: Literal["entropy", "seed"] = setting(
        "entropy",
        "`entropy`: the operating system; `seed`: for simulations that must be repeatable, gives no "
        "protection",
    )


class SumNoiseSettings(SumSettings, NoiseSettings, BoundSettings):
    """Noise on secure sums (differential privacy of nodes), and the bound on a node's weight."""

    GROUP = "privacy"

    upload_clip: Annotated[float, number("0, or a number up to 1e+30", 0, 1e30)] = setting(
        0.0,
        "with `secure-sum`: maximum norm of a node's update. Set both this and "
        "`upload-noise-multiplier`, or leave both 0",
    )
    upload_noise_multiplier: Annotated[
        float, number("0, or a number from 0.001 to 1e+06", 1e-3, 1e6, zero=True)
    ] = setting(
        0.0, "standard deviation of the noise on a sum of updates, divided by `upload-clip` (docs/privacy.md)"
    )
    max_weight_ratio: Ratio = setting(
        10.0,
        "maximum weight of a node, as a multiple of the median number of examples that nodes report "
        "(0: no bound); without effect on data that the run splits",
        "robustness",
    )

    def sum_sizes(self) -> tuple[int, int]:
        """Return the number of nodes in the smallest and the largest sum of a round."""
        raise NotImplementedError

    def rules(self) -> Rules:
        """Yield the conditions between values that are each valid."""
        yield from super().rules()
        yield self.both_or_neither("upload-clip", "upload-noise-multiplier")
        if not self.secure_sum:
            yield (
                not self.upload_clip, "upload-clip",
                "0 without secure-sum (the noise is divided among the members of a sum; one member's share "
                "would not hide its own update)",
            )  # fmt: skip
            return
        smallest, largest = self.sum_sizes()
        mean = parse_aggregation(self.aggregation).is_mean
        yield mean, "aggregation", "'mean' with secure-sum (other rules need single updates)"
        yield (
            largest <= MAX_MEMBERS,
            "secure-sum",
            f"False: a sum has at most {MAX_MEMBERS} nodes, not {largest}",
        )
        least = f"at most {smallest}, the nodes of the smallest sum in a round"
        yield self.sum_min_nodes <= smallest, "sum-min-nodes", least


class BufferSettings(RunSettings):
    """Buffered asynchronous rounds (docs/how-to/buffered.md)."""

    GROUP = "run"

    buffer: NodesOr0 = setting(
        0,
        "number of replies K per update of the model, while nodes work on: a round is then an update (0: a "
        "round waits for all its replies)",
    )
    buffer_concurrency: NodesOr0 = setting(
        0, "`buffer` only: number of nodes at work at a time (0: as many as a round of the method asks)"
    )
    buffer_staleness: Literal["sqrt", "none"] = setting(
        "sqrt",
        "`buffer` only: factor on an update that the model has moved on from s times: 1/sqrt(1 + s), or 1",
    )
    buffer_max_staleness: RoundsOr0 = setting(
        0, "`buffer` only: discard an update that the model has moved on from more often (0: no bound)"
    )

    def rules(self) -> Rules:
        """Yield the conditions between values that are each valid."""
        yield from super().rules()
        yield self.at_most("buffer-concurrency", "num-clients")
        if self.buffer:
            yield from self.usual("with a buffer, whose size is the number of replies", "min-replies")
        else:
            keys = [key for key in self.table() if key.startswith("buffer-")]
            yield from self.usual("unless buffer > 0", *keys)


class StackSettings(AppSettings):
    """How a machine trains its nodes."""

    GROUP = "training"

    training_mode: Literal["auto", "loop", "stack"] = setting(
        "auto",
        "`loop`: train one node after the other, for bit-identical results (docs/bits.md); `stack`: "
        "train many at once",
        role=Role.REPETITION,
    )
    stack_nodes: NodesOr0 = setting(
        0, "maximum number of nodes in a stack (0: as many as memory and caches hold)"
    )
    precision: Literal["float32", "bf16"] = setting(
        "float32",
        "`bf16`: local training computes products in bfloat16; parameters and sums stay in float32 "
        "(docs/precision.md)",
    )
    compile: bool = setting(
        False,
        "use `torch.compile` for local training where a compiler is available (docs/precision.md)",
        role=Role.REPETITION,
    )

    def rules(self) -> Rules:
        """Yield the conditions between values that are each valid."""
        yield from super().rules()
        stacked = self.compile and self.training_mode == "stack"
        yield not stacked, "compile", "False with training-mode = 'stack' (a stack is not compiled)"


class LocalOptimiserSettings(StackSettings):
    """The optimiser of a node's local steps; the app declares the valid texts (``TEXTS``)."""

    GROUP = "training"

    local_optimiser: str = setting(
        "",
        "optimizer of the nodes' local steps with the method's step size: `adamw(weight_decay=0.01, "
        "warm_up=0.1)`, or `sgd(accumulate=4)` for micro-batches; empty: the method's SGD",
    )

    @property
    def no_local_optimiser(self) -> str:
        """Why the method cannot have another optimiser; empty if it can."""
        return ""

    def rules(self) -> Rules:
        """Yield the conditions between values that are each valid."""
        yield from super().rules()
        if self.local_optimiser:
            why = "with local-optimiser, whose nodes train one after the other in float32"
            yield self.training_mode != "stack", "training-mode", f"'auto' or 'loop' {why}"
            keys = [key for key in ("precision", "compile", "augmentation") if key in self.table()]
            yield from self.usual("with local-optimiser", *keys)
            no = self.no_local_optimiser
            yield not no, "local-optimiser", f"empty with {no}"


class TrainingSettings(StackSettings, SumNoiseSettings, ImageSettings, BufferSettings):
    """Settings of apps whose nodes train in stacks and send bounded, masked or noised updates."""

    # The key that names the method.
    METHOD: ClassVar[str] = "method"

    server_step: str = setting(
        "",
        "the server's optimizer on the mean change of a round: `adam(lr=0.01)`, `yogi(lr=0.01)`, "
        "`adagrad(lr=0.1)` or `momentum(lr=1.0, beta=0.9)`; empty: the mean itself",
        "training",
    )

    local_layers: Annotated[
        str,
        text("patterns of a model's arrays, such as '*bn*' or 'linear2.*', separated by commas, or empty"),
    ] = setting(
        "",
        "arrays that each node trains and keeps to itself: `*bn*` (FedBN), the last layer's (FedPer); the "
        "nodes then evaluate the model, each with its own",
        "training",
    )

    @property
    def flower(self) -> str:
        """The strategy of Flower's that the method names, without its prefix; empty if it names none."""
        declared = self.table().get(self.METHOD)
        prefix = declared.kind.prefix if declared else ""
        method = str(self.of(self.METHOD)) if prefix else ""
        return method.removeprefix(prefix) if prefix and method.startswith(prefix) else ""

    def rules(self) -> Rules:
        """Yield the conditions between values that are each valid."""
        yield from super().rules()
        if self.buffer and (self.flower or not parse_aggregation(self.aggregation).is_mean):
            most = self.sum_sizes()[0]
            valid = f"at most {most}, the nodes of a round, each once under this rule"
            yield self.buffer <= most, "buffer", valid
        if self.flower:
            why = f"with {self.METHOD} = 'flwr:…'"
            yield from self.usual(f"{why}, which aggregates itself", "aggregation", "server-step")
            yield not self.secure_sum, "secure-sum", f"False {why} (Flower's strategies need single updates)"
        if self.local_layers:
            why = "with local-layers (members of a sum must keep the same state)"
            yield not self.secure_sum, "secure-sum", f"False {why}"


class PeerSettings(AppSettings):
    """Direct links between servers of one run."""

    GROUP = "deployment"

    peers: Annotated[str, text("host:port,host:port,…, or empty")] = setting(
        "", "host:port at which each server listens for the others", role=Role.IRRELEVANT
    )
    peer_listen: Annotated[str, text("host:port, or empty")] = setting(
        "",
        "host:port at which this server listens, if it differs from its address in `peers`",
        role=Role.IRRELEVANT,
    )
    peer_timeout: Annotated[float, above(0.0)] = setting(
        600.0,
        "seconds to wait for another server that is late; half of that at the start",
        role=Role.IRRELEVANT,
    )
    peer_ca: Annotated[str, text("a file like the ca.crt of `hedgerow deploy keys --edges`, or empty")] = (
        setting(
            "",
            "certificate of the CA that signed the servers' certificates; empty: no TLS, on one machine only",
            role=Role.IRRELEVANT,
        )
    )
    peer_certificate: Annotated[str, text("a file like its peer.pem, or empty")] = setting(
        "", "certificate with which this server authenticates itself", role=Role.IRRELEVANT
    )
    peer_key: Annotated[str, text("a file like its peer.key, or empty")] = setting(
        "", "private key of `peer-certificate`", role=Role.IRRELEVANT
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

    def rules(self) -> Rules:
        """Yield the conditions between values that are each valid."""
        yield from super().rules()
        files = ("peer-ca", "peer-certificate", "peer-key")
        missing = [key for key in files if not self.of(key)]
        words = "a file if any of peer-ca, peer-certificate and peer-key is"
        yield len(missing) in (0, 3), (missing or files)[0], words


_ROLES: dict[str, Role] = {
    key: one.role
    for part in (TrainingSettings, IterationSettings, MonitorSettings, PeerSettings)
    for key, one in part.table().items()
} | dict.fromkeys(LENGTHS, Role.RESUME)
# A key of earlier runs, which can still be resumed and compared.
_ROLES["ray"] = Role.IRRELEVANT


def role_of(key: str) -> Role:
    """Return the role of a run-config key of any app: that of the common setting with this name."""
    return _ROLES.get(key, Role.RESULTS)
