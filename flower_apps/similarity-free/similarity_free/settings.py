"""The app's settings, and the strategy for them."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from flwr.serverapp.strategy import FedProx

from hedgerow.clients import LOCAL_OPTIMISER_TEXTS, TASK_TEXTS, parse_inner_lr
from hedgerow.sim.runs.common_settings import LocalOptimiserSettings, TrainingSettings
from hedgerow.sim.runs.kinds import (
    FractionBelow1,
    Nodes,
    Positive,
    Rounds,
    RoundsOr0,
    Samples,
    Steps,
    above,
    choice,
    choice_or,
    in_range,
    text,
)
from hedgerow.sim.runs.settings import Role, Rules, Setting, setting
from hedgerow.strategies import InnerSolver, SimilarityFree
from hedgerow.strategies.aggregate.flower import FLOWER_TEXT, FlowerAggregation
from hedgerow.strategies.aggregate.sum_settings import training_options
from hedgerow.strategies.parts.server_optimisers import SERVER_STEP_TEXTS
from hedgerow.strategies.registry import REGISTRY_TEXTS
from hedgerow.strategies.roster import Roster
from hedgerow.strategies.round_end import RoundCallback
from hedgerow.strategies.schedules import Diminishing, Fixed, Schedule, StepDecay
from hedgerow.tasks import AUGMENTATIONS
from hedgerow.wire.compress import Identity, RandK, parse_compressor, validate_compressor

# Operator, and whether the uplink is compressed and has error feedback.
_ALGORITHMS = {
    "fedavg": ("gradient", False, False),
    "fedprox": ("prox", False, False),
    "ef-fedavg": ("gradient", True, True),
    "ef-fedprox": ("prox", True, True),
    "fedpaq": ("gradient", True, False),
}


class Settings(LocalOptimiserSettings, TrainingSettings):
    """The app's settings."""

    TEXTS: ClassVar = {**TASK_TEXTS, **LOCAL_OPTIMISER_TEXTS, **REGISTRY_TEXTS, **SERVER_STEP_TEXTS}
    METHOD = "algorithm"

    algorithm: Annotated[str, choice_or(*FLOWER_TEXT, *_ALGORITHMS)] = setting(
        "ef-fedavg",
        "an algorithm from the table at the top of README.md; `flwr:…` is FedAvg with a strategy of Flower",
        first=True,
    )
    num_rounds: Rounds = setting(50, "number of communication rounds K", first=True, role=Role.RESUME)
    num_clients: Nodes = setting(10, "number of workers n")
    local_iters: Steps = setting(10, "local iterations T of the gradient operator", "training", first=True)
    batch_size: Samples = setting(32, "mini-batch size", "training")
    compressor: Annotated[
        str,
        text("'identity', 'topk(0.01)', 'topk(100)', 'randk(0.1)', 'sign' or 'ternary'", validate_compressor),
    ] = setting(
        "topk(0.01)",
        "`topk(fraction)`, `topk(count)`, `randk(fraction)`, `sign`, `ternary` or `identity`; `randk` "
        "draws new entries each round, the same for all workers",
        first=True,
    )
    schedule: Literal["fixed", "diminishing", "step-decay"] = setting(
        "fixed",
        "`fixed`: c / sqrt(K); `diminishing`: c / (k + 1)^nu; `step-decay`: start / factor^floor(k / stage)",
        "training",
    )
    fixed_c: Positive = setting(0.7, "c of the fixed schedule", "training", first=True)
    diminishing_c: Positive = setting(0.8, "c of the diminishing schedule", "training")
    diminishing_nu: Annotated[float, in_range(0.5, 1.0, open_below=True, open_above=True)] = setting(
        0.51, "nu of the diminishing schedule", "training"
    )
    decay_start: Positive = setting(0.2, "initial step of the step decay", "training")
    decay_factor: Annotated[float, above(1)] = setting(
        2.0, "factor by which the step decay divides the step", "training"
    )
    decay_stage: Rounds = setting(10, "rounds per stage of the step decay", "training")
    schedule_drives: Literal["local", "round"] = setting(
        "local",
        "`local`: the schedule sets the local step, as in the paper's experiments; `round`: it sets "
        "the step of a whole round, as in the paper's theory, and a local SGD step is 1/T of it",
        "training",
    )
    inner_lr: Annotated[str, text("'auto:<max>' or 'fixed:<value>', both > 0", parse_inner_lr)] = setting(
        "auto:0.1",
        "step of the inner solver of the proximal step: `auto:<max>` is gamma/3 up to a maximum; "
        "`fixed:<value>` diverges above 2 gamma",
        "training",
    )
    inner_steps: Steps = setting(30, "maximum number of inner steps", "training")
    inner_tol: FractionBelow1 = setting(
        0.001, "residual, relative to the first gradient, at which the inner solver stops", "training"
    )
    inner_batch: Literal["fixed", "fresh"] = setting(
        "fixed", "one mini-batch per round (`fixed`), or per inner step (`fresh`)", "training"
    )
    weighting: Literal["uniform", "examples"] = setting(
        "uniform", "`uniform`: 1/n, as in the paper", "training"
    )
    probe_rounds: RoundsOr0 = setting(
        0,
        "number of first rounds in which workers also estimate curvature and gradient variance, for "
        "the planner",
        "run",
    )
    scaling: str = setting("unit")
    partition: str = setting("ring(2)", "`ring(2)`: two classes per worker; `ring(1)`: one class per worker")
    model: str = setting("lenet", "`cnn-431k` is the paper's")
    augmentation: Annotated[str, choice(*AUGMENTATIONS)] = setting(
        "none",
        "augmentation of each batch of images: none, random `flips`, or random `crops-and-flips`",
        "training",
    )
    min_replies: int = setting(1, "minimum number of valid replies per round (0: from every worker)")

    @property
    def no_local_optimiser(self) -> str:
        """Why the method cannot have another optimiser; empty if it can."""
        prox = self.proximal_mu or (not self.flower and _ALGORITHMS[self.algorithm][0] == "prox")
        return f"algorithm = {self.algorithm!r}, whose nodes solve a proximal step" if prox else ""

    def sum_sizes(self) -> tuple[int, int]:
        """Return the nodes of the smallest and the largest sum of a round."""
        return self.num_clients, self.num_clients

    @property
    def proximal_mu(self) -> float:
        """The weight mu of the proximal term of Flower's FedProx; 0 for any other algorithm."""
        strategy = FlowerAggregation.parse(self.flower).strategy if self.flower else None
        return strategy.proximal_mu if isinstance(strategy, FedProx) else 0.0

    @property
    def needs_length(self) -> str:
        """Why earlier rounds depend on K: the fixed schedule's step does."""
        return "the step of schedule = 'fixed' is c / sqrt(num-rounds)" if self.schedule == "fixed" else ""

    def rules(self) -> Rules:
        """Yield the conditions between values that are each valid."""
        yield from super().rules()
        if self.proximal_mu:
            steps = [key for key in self.table() if key.startswith(("schedule", "fixed-", "dimin", "decay-"))]
            yield from self.usual("with Flower's FedProx, whose step is 1 / proximal_mu", *steps)
        if self.secure_sum and not self.flower:
            chosen = _ALGORITHMS[self.algorithm][1] and not isinstance(
                parse_compressor(self.compressor), Identity | RandK
            )
            yield (
                not chosen, "compressor",
                "'identity' or 'randk(0.1)' with secure-sum (every entry is masked, so other compressors "
                "would save nothing)",
            )  # fmt: skip
            keeps = _ALGORITHMS[self.algorithm][2] and not isinstance(
                parse_compressor(self.compressor), Identity
            )
            yield (
                not keeps, "secure-sum",
                f"False with algorithm = {self.algorithm!r} (members of a sum must keep the same state, and "
                "each worker keeps an error memory)",
            )  # fmt: skip
            yield not self.probe_rounds, "probe-rounds", "0 with secure-sum (they are each worker's)"


SETTINGS: Mapping[str, Setting] = Settings.table()
read = Settings.read


def build_schedule(values: Settings) -> Schedule:
    """Return the step-size schedule; for Flower's FedProx the constant proximal parameter 1 / mu."""
    if values.proximal_mu:
        return Fixed(c=math.sqrt(values.num_rounds) / values.proximal_mu, num_rounds=values.num_rounds)
    match values.schedule:
        case "fixed":
            return Fixed(c=values.fixed_c, num_rounds=values.num_rounds)
        case "diminishing":
            return Diminishing(c=values.diminishing_c, nu=values.diminishing_nu)
        case _:
            return StepDecay(
                gamma0=values.decay_start, decay_factor=values.decay_factor, stage_len=values.decay_stage
            )


def build_strategy(
    values: Settings,
    *,
    roster: Roster | None = None,
    dealt_sizes: Sequence[int] | None = None,
    frozen: Collection[str] | None = None,
    on_round_end: Sequence[RoundCallback] = (),
) -> SimilarityFree:
    """Return the strategy for the settings.

    ``on_round_end`` is called after each round; ``roster`` has the nodes, if they are already known.
    ``dealt_sizes`` are the clients' numbers of samples, if the server deals the data, and
    ``frozen`` the keys of the frozen arrays, as in ``FederationOptions``.
    """
    flower = "fedprox" if values.proximal_mu else "fedavg"
    operator, compressed, error_feedback = _ALGORITHMS[flower if values.flower else values.algorithm]
    options = training_options(values.run_config, values.flower, ["proximal-mu"])
    return SimilarityFree(
        schedule=build_schedule(values),
        operator=operator,  # type: ignore[arg-type]
        compressor=values.compressor if compressed else "identity",
        error_feedback=error_feedback,
        schedule_drives=values.schedule_drives,
        local_iters=values.local_iters,
        batch_size=values.batch_size,
        inner=InnerSolver(values.inner_lr, values.inner_steps, values.inner_tol, values.inner_batch),
        weighting=values.weighting,
        probe_rounds=values.probe_rounds,
        roster=roster,
        dealt_sizes=dealt_sizes,
        frozen=frozen,
        on_round_end=on_round_end,
        **{**options, "min_train_nodes": values.min_replies or values.num_clients},
    )
