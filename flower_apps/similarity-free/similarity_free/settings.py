"""The app's settings: what each key may be, and the strategy that they describe."""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from hedgerow.clients import TASK_TEXTS, parse_inner_lr
from hedgerow.sim.runs.common_settings import (
    BoundSettings,
    RunSettings,
    StackSettings,
    SumNoiseSettings,
    TrainingTaskSettings,
)
from hedgerow.sim.runs.kinds import MAX_NODES, MAX_ROUNDS, POSITIVE, above, choice, in_range, text, whole
from hedgerow.sim.runs.settings import Setting, at_most, setting
from hedgerow.strategies import InnerSolver, SimilarityFree
from hedgerow.strategies.aggregate.sum_settings import secure_sum_of, sum_problems
from hedgerow.strategies.registry import Registry
from hedgerow.strategies.roster import Roster
from hedgerow.strategies.rounds import RoundCallback
from hedgerow.strategies.schedules import Diminishing, Fixed, Schedule, StepDecay
from hedgerow.tasks import AUGMENTATIONS
from hedgerow.wire.compress import Identity, RandK, parse_compressor, validate_compressor
from hedgerow.wire.limits import MAX_SAMPLES, MAX_STEPS
from hedgerow.wire.robust_means import AGGREGATIONS, parse_aggregation

REGISTRY = ("a file like the nodes.toml of `hedgerow deploy keys`, or empty", Registry.named)

__all__ = ["SETTINGS", "Settings", "build_schedule", "build_strategy", "read"]

# What the uplink carries, and whether workers remember what it cut off.
_ALGORITHMS = {
    "fedavg": ("gradient", False, False),
    "fedprox": ("prox", False, False),
    "ef-fedavg": ("gradient", True, True),
    "ef-fedprox": ("prox", True, True),
    "fedpaq": ("gradient", True, False),
}


class Settings(StackSettings, BoundSettings, SumNoiseSettings, TrainingTaskSettings, RunSettings):
    """The app's settings."""

    TEXTS: ClassVar = {**TASK_TEXTS, "registry": REGISTRY, "aggregation": (AGGREGATIONS, parse_aggregation)}

    algorithm: Annotated[str, choice(*_ALGORITHMS)] = setting(
        "ef-fedavg", "a row of the table at the top of README.md", first=True
    )
    num_rounds: Annotated[int, whole(1, MAX_ROUNDS)] = setting(50, "communication rounds K", first=True)
    num_clients: Annotated[int, whole(1, MAX_NODES)] = setting(10, "workers n")
    local_iters: Annotated[int, whole(1, MAX_STEPS)] = setting(
        10, "T of the gradient operator", group="training", first=True
    )
    batch_size: Annotated[int, whole(1, MAX_SAMPLES)] = setting(
        32, "samples of a mini-batch", group="training"
    )
    compressor: Annotated[
        str,
        text("'identity', 'topk(0.01)', 'topk(100)', 'randk(0.1)', 'sign' or 'ternary'", validate_compressor),
    ] = setting(
        "topk(0.01)",
        "`topk(fraction)`, `topk(count)`, either with `,packed` before the bracket (bit-packed indices), "
        "`randk(fraction)`, the same entries of all workers, drawn anew each round, `sign`, `ternary`, "
        "`identity`",
        first=True,
    )
    schedule: Literal["fixed", "diminishing", "step-decay"] = setting(
        "fixed",
        "`fixed`: c / sqrt(K); `diminishing`: c / (k + 1)^nu; `step-decay`: start / factor^floor(k / stage)",
        group="training",
    )
    fixed_c: Annotated[float, POSITIVE] = setting(
        0.7, "c of the fixed schedule", group="training", first=True
    )
    diminishing_c: Annotated[float, POSITIVE] = setting(
        0.8, "c of the diminishing schedule", group="training"
    )
    diminishing_nu: Annotated[float, in_range(0.5, 1.0, open_below=True, open_above=True)] = setting(
        0.51, "nu of the diminishing schedule", group="training"
    )
    decay_start: Annotated[float, POSITIVE] = setting(0.2, "first step of the step decay", group="training")
    decay_factor: Annotated[float, above(1)] = setting(
        2.0, "what the step decay divides by", group="training"
    )
    decay_stage: Annotated[int, whole(1, MAX_ROUNDS)] = setting(
        10, "rounds of a stage of the step decay", group="training"
    )
    schedule_drives: Literal["local", "round"] = setting(
        "local",
        "`local`: the schedule is the local step, as in the paper's experiments; `round`: it is the step of "
        "a whole round, as in its theory, and a local step of SGD is 1/T of it",
        group="training",
    )
    inner_lr: Annotated[str, text("'auto:<max>' or 'fixed:<value>', both > 0", parse_inner_lr)] = setting(
        "auto:0.1",
        "step of the inner solver of a proximal point: `auto:<max>` is gamma/3 up to a maximum, "
        "`fixed:<value>` diverges above 2 gamma",
        group="training",
    )
    inner_steps: Annotated[int, whole(1, MAX_STEPS)] = setting(
        30, "at most so many inner steps", group="training"
    )
    inner_tol: Annotated[float, in_range(0.0, 1.0, open_above=True)] = setting(
        0.001, "inner steps stop at this residual relative to the first gradient", group="training"
    )
    inner_batch: Literal["fixed", "fresh"] = setting(
        "fixed", "one mini-batch a round (`fixed`), or an inner step (`fresh`)", group="training"
    )
    weighting: Literal["uniform", "examples"] = setting(
        "uniform", "`uniform`: 1/n, as in the paper", group="training"
    )
    probe_rounds: Annotated[int, whole(0, MAX_ROUNDS)] = setting(
        0,
        "first rounds in which workers also estimate curvature and gradient variance, for the planner",
        group="run",
    )
    scaling: str = setting("unit")
    partition: str = setting("ring(2)", "`ring(2)`: two classes a worker; `ring(1)`: one class")
    model: str = setting("lenet", "`cnn-431k` is the paper's")
    augmentation: Annotated[str, choice(*AUGMENTATIONS)] = setting(
        "none",
        "what is done to each batch of images: nothing, random `flips`, or random `crops-and-flips`",
        group="training",
    )
    min_replies: int = setting(1, "fewest valid replies of a round (0: every worker's)")

    def problems(self) -> list[str]:
        """Return what is wrong between settings that are each valid."""
        return super().problems() + _problems(self)


SETTINGS: Mapping[str, Setting] = Settings.table()


def _problems(values: Settings) -> list[str]:
    """Return what is wrong between settings that are each valid."""
    problems = at_most(values, ("min-replies", "num-clients"), ("min-available-nodes", "num-clients"))
    if values.secure_sum:
        if _ALGORITHMS[values.algorithm][1] and not isinstance(
            parse_compressor(values.compressor), Identity | RandK
        ):
            problems.append(
                f"compressor = {values.compressor!r}; valid with secure-sum is 'identity' or "
                "'randk(0.1)': masks are on every entry, so that where each worker chooses its own, or sends "
                "signs, nothing is saved"
            )
        if values.probe_rounds:
            problems.append(
                f"probe-rounds = {values.probe_rounds}; valid with secure-sum is 0: they are each worker's"
            )
    return problems + sum_problems(values.run_config, values.num_clients, values.num_clients)


read = Settings.read


def build_schedule(values: Settings) -> Schedule:
    """Return the step-size schedule."""
    match values.schedule:
        case "fixed":
            return Fixed(c=values.fixed_c, num_rounds=values.num_rounds)
        case "diminishing":
            return Diminishing(c=values.diminishing_c, nu=values.diminishing_nu)
        case _:
            return StepDecay(
                gamma0=values.decay_start,
                decay_factor=values.decay_factor,
                stage_len=values.decay_stage,
            )


def build_strategy(
    values: Settings, *, roster: Roster | None = None, on_round_end: Sequence[RoundCallback] = ()
) -> SimilarityFree:
    """Return the strategy that the settings describe.

    ``on_round_end`` is told of each round; ``roster`` has the nodes, where they were asked before.
    """
    operator, compressed, error_feedback = _ALGORITHMS[values.algorithm]
    return SimilarityFree(
        schedule=build_schedule(values),
        operator=operator,  # type: ignore[arg-type]
        compressor=values.compressor if compressed else "identity",
        error_feedback=error_feedback,
        schedule_drives=values.schedule_drives,
        local_iters=values.local_iters,
        batch_size=values.batch_size,
        inner=InnerSolver(
            lr=values.inner_lr,
            steps=values.inner_steps,
            tol=values.inner_tol,
            batch=values.inner_batch,
        ),
        weighting=values.weighting,
        probe_rounds=values.probe_rounds,
        seed=values.seed,
        fraction_evaluate=0.0,
        min_train_nodes=values.min_replies or values.num_clients,
        min_available_nodes=values.min_available_nodes or values.num_clients,
        num_clients=values.num_clients,
        roster=roster,
        registry=Registry.named(values.registry),
        on_round_end=on_round_end,
        aggregation=values.aggregation,
        secure_sum=secure_sum_of(values.run_config),
        max_weight_ratio=values.max_weight_ratio,
        max_update_norm_ratio=values.max_update_norm_ratio,
        quarantine_after=values.quarantine_after,
        max_loss_ratio=values.max_loss_ratio,
    )
