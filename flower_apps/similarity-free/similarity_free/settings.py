"""The app's settings: what each key may be, and the strategy that they describe."""

from collections.abc import Mapping, Sequence
from typing import Any

from hedgerow.clients import TASK_TEXTS, parse_inner_lr
from hedgerow.sim.runs.common_settings import (
    BOUND_SETTINGS,
    HOLDOUT,
    QUORUM,
    RUN_SETTINGS,
    SEED,
    STACK_SETTINGS,
    SUM_NOISE_SETTINGS,
    SUM_SETTINGS,
    WEIGHT_BOUND,
    aggregation_setting,
    registry_setting,
    task_settings,
    training_problems,
)
from hedgerow.sim.runs.kinds import MAX_NODES, MAX_ROUNDS, POSITIVE, above, choice, in_range, text, whole
from hedgerow.sim.runs.settings import Setting, at_most, override, reader
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

__all__ = ["SETTINGS", "build_schedule", "build_strategy", "read"]

# What the uplink carries, and whether workers remember what it cut off.
_ALGORITHMS = {
    "fedavg": ("gradient", False, False),
    "fedprox": ("prox", False, False),
    "ef-fedavg": ("gradient", True, True),
    "ef-fedprox": ("prox", True, True),
    "fedpaq": ("gradient", True, False),
}

SETTINGS: Mapping[str, Setting] = {
    "algorithm": Setting("ef-fedavg", choice(*_ALGORITHMS), "a row of the table at the top of README.md"),
    "num-rounds": Setting(50, whole(1, MAX_ROUNDS), "communication rounds K"),
    "num-clients": Setting(10, whole(1, MAX_NODES), "workers n"),
    "local-iters": Setting(10, whole(1, MAX_STEPS), "T of the gradient operator"),
    "batch-size": Setting(32, whole(1, MAX_SAMPLES), "samples of a mini-batch"),
    "compressor": Setting(
        "topk(0.01)",
        text("'identity', 'topk(0.01)', 'topk(100)', 'randk(0.1)', 'sign' or 'ternary'", validate_compressor),
        "`topk(fraction)`, `topk(count)`, `randk(fraction)`, the same entries of all workers, drawn anew "
        "each round, `sign`, `ternary`, `identity`",
    ),
    "schedule": Setting(
        "fixed",
        choice("fixed", "diminishing", "step-decay"),
        "`fixed`: c / sqrt(K); `diminishing`: c / (k + 1)^nu; `step-decay`: start / factor^floor(k / stage)",
    ),
    "fixed-c": Setting(0.7, POSITIVE, "c of the fixed schedule"),
    "diminishing-c": Setting(0.8, POSITIVE, "c of the diminishing schedule"),
    "diminishing-nu": Setting(
        0.51, in_range(0.5, 1.0, open_below=True, open_above=True), "nu of the diminishing schedule"
    ),
    "decay-start": Setting(0.2, POSITIVE, "first step of the step decay"),
    "decay-factor": Setting(2.0, above(1), "what the step decay divides by"),
    "decay-stage": Setting(10, whole(1, MAX_ROUNDS), "rounds of a stage of the step decay"),
    "schedule-drives": Setting(
        "local",
        choice("local", "round"),
        "`local`: the schedule is the local step, as in the paper's experiments; `round`: it is the step of "
        "a whole round, as in its theory, and a local step of SGD is 1/T of it",
    ),
    "inner-lr": Setting(
        "auto:0.1",
        text("'auto:<max>' or 'fixed:<value>', both > 0", parse_inner_lr),
        "step of the inner solver of a proximal point: `auto:<max>` is gamma/3 up to a maximum, "
        "`fixed:<value>` diverges above 2 gamma",
    ),
    "inner-steps": Setting(30, whole(1, MAX_STEPS), "at most so many inner steps"),
    "inner-tol": Setting(
        0.001,
        in_range(0.0, 1.0, open_above=True),
        "inner steps stop at this residual relative to the first gradient",
    ),
    "inner-batch": Setting(
        "fixed", choice("fixed", "fresh"), "one mini-batch a round (`fixed`), or an inner step (`fresh`)"
    ),
    "weighting": Setting("uniform", choice("uniform", "examples"), "`uniform`: 1/n, as in the paper"),
    "probe-rounds": Setting(
        0,
        whole(0, MAX_ROUNDS),
        "first rounds in which workers also estimate curvature and gradient variance, for the planner",
    ),
    **override(
        task_settings(TASK_TEXTS),
        defaults={"scaling": "unit", "partition": "ring(2)"},
        helps={
            "partition": "`ring(2)`: two classes a worker; `ring(1)`: one class",
            "model": "`cnn-431k` is the paper's",
        },
    ),
    "augmentation": Setting(
        "none",
        choice(*AUGMENTATIONS),
        "what is done to each batch of images: nothing, random `flips`, or random `crops-and-flips`",
    ),
    "holdout": HOLDOUT,
    "min-available-nodes": QUORUM,
    "registry": registry_setting(Registry.named),
    "aggregation": aggregation_setting(AGGREGATIONS, parse_aggregation),
    **SUM_SETTINGS,
    **SUM_NOISE_SETTINGS,
    "max-weight-ratio": WEIGHT_BOUND,
    **BOUND_SETTINGS,
    "seed": SEED,
    **STACK_SETTINGS,
    **override(RUN_SETTINGS, helps={"min-replies": "fewest valid replies of a round (0: every worker's)"}),
}


def _problems(values: Mapping[str, Any]) -> list[str]:
    """Return what is wrong between settings that are each valid."""
    problems = at_most(values, ("min-replies", "num-clients"), ("min-available-nodes", "num-clients"))
    if values["secure-sum"]:
        if _ALGORITHMS[values["algorithm"]][1] and not isinstance(
            parse_compressor(values["compressor"]), Identity | RandK
        ):
            problems.append(
                f"compressor = {values['compressor']!r}; valid with secure-sum is 'identity' or "
                "'randk(0.1)': masks are on every entry, so that where each worker chooses its own, or sends "
                "signs, nothing is saved"
            )
        if values["probe-rounds"]:
            problems.append(
                f"probe-rounds = {values['probe-rounds']}; valid with secure-sum is 0: they are each worker's"
            )
    problems += training_problems(values)
    return problems + sum_problems(values, values["num-clients"], values["num-clients"])


read = reader(SETTINGS, _problems)


def build_schedule(values: Mapping[str, Any]) -> Schedule:
    """Return the step-size schedule."""
    match values["schedule"]:
        case "fixed":
            return Fixed(c=values["fixed-c"], num_rounds=values["num-rounds"])
        case "diminishing":
            return Diminishing(c=values["diminishing-c"], nu=values["diminishing-nu"])
        case _:
            return StepDecay(
                gamma0=values["decay-start"],
                decay_factor=values["decay-factor"],
                stage_len=values["decay-stage"],
            )


def build_strategy(
    values: Mapping[str, Any], *, roster: Roster | None = None, on_round_end: Sequence[RoundCallback] = ()
) -> SimilarityFree:
    """Return the strategy that the settings describe.

    ``on_round_end`` is told of each round; ``roster`` has the nodes, where they were asked before.
    """
    operator, compressed, error_feedback = _ALGORITHMS[values["algorithm"]]
    return SimilarityFree(
        schedule=build_schedule(values),
        operator=operator,  # type: ignore[arg-type]
        compressor=values["compressor"] if compressed else "identity",
        error_feedback=error_feedback,
        schedule_drives=values["schedule-drives"],
        local_iters=values["local-iters"],
        batch_size=values["batch-size"],
        inner=InnerSolver(
            lr=values["inner-lr"],
            steps=values["inner-steps"],
            tol=values["inner-tol"],
            batch=values["inner-batch"],
        ),
        weighting=values["weighting"],
        probe_rounds=values["probe-rounds"],
        seed=values["seed"],
        fraction_evaluate=0.0,
        min_train_nodes=values["min-replies"] or values["num-clients"],
        min_available_nodes=values["min-available-nodes"] or values["num-clients"],
        num_clients=values["num-clients"],
        roster=roster,
        registry=Registry.named(values["registry"]),
        on_round_end=on_round_end,
        aggregation=values["aggregation"],
        secure_sum=secure_sum_of(values),
        max_weight_ratio=values["max-weight-ratio"],
        max_update_norm_ratio=values["max-update-norm-ratio"],
        quarantine_after=values["quarantine-after"],
        max_loss_ratio=values["max-loss-ratio"],
    )
