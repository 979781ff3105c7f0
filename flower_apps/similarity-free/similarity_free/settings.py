"""The app's settings: what each key may be, and the strategy that they describe."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from flwr.app import UserConfigValue

from hedgerow.clients import TASK_TEXTS, parse_inner_lr
from hedgerow.sim.runs.serverapp import RUN_SETTINGS
from hedgerow.sim.runs.settings import Setting, choice, number, read_settings, refuse, text, whole
from hedgerow.strategies import InnerSolver, SimilarityFree
from hedgerow.strategies.rounds import RoundCallback
from hedgerow.strategies.schedules import Diminishing, Fixed, Schedule, StepDecay
from hedgerow.wire.compress import validate_compressor

__all__ = ["SETTINGS", "build_schedule", "build_strategy", "read"]

_POSITIVE = number("a finite number > 0", lambda v: 0 < v < inf)
# What the uplink carries, and whether workers remember what it cut off.
_ALGORITHMS = {
    "fedavg": ("gradient", False, False),
    "fedprox": ("prox", False, False),
    "ef-fedavg": ("gradient", True, True),
    "ef-fedprox": ("prox", True, True),
    "fedpaq": ("gradient", True, False),
}

SETTINGS: Mapping[str, Setting] = {
    "algorithm": choice(*_ALGORITHMS),
    "num-rounds": whole(1),
    "num-clients": whole(1),
    "local-iters": whole(1),
    "batch-size": whole(1),
    "compressor": text("'identity', 'topk(0.01)', 'topk(100)', 'sign' or 'ternary'", validate_compressor),
    "schedule": choice("fixed", "diminishing", "step-decay"),
    "fixed-c": _POSITIVE,
    "diminishing-c": _POSITIVE,
    "diminishing-nu": number("a number in (0.5, 1)", lambda v: 0.5 < v < 1),
    "decay-start": _POSITIVE,
    "decay-factor": number("a finite number > 1", lambda v: 1 < v < inf),
    "decay-stage": whole(1),
    "schedule-drives": choice("local", "round"),
    "inner-lr": text("'auto:<max>' or 'fixed:<value>', both > 0", parse_inner_lr),
    "inner-steps": whole(1),
    "inner-tol": number("a number in [0, 1)", lambda v: 0 <= v < 1),
    "inner-batch": choice("fixed", "fresh"),
    "weighting": choice("uniform", "examples"),
    "probe-rounds": whole(0),
    **{key: text(valid, check) for key, (valid, check) in TASK_TEXTS.items()},
    "seed": whole(0),
    "training-mode": choice("auto", "loop", "stack"),
    "stack-nodes": whole(0),
    **RUN_SETTINGS,
}


def read(run_config: Mapping[str, UserConfigValue]) -> dict[str, Any]:
    """Return the settings, checked one by one and against each other.

    Raises
    ------
    SettingsError
        Naming every bad key, its value and what is valid.
    """
    values = read_settings(run_config, SETTINGS)
    if values["min-replies"] > values["num-clients"]:
        refuse(
            [f"min-replies = {values['min-replies']}; valid is 0 to num-clients = {values['num-clients']}"]
        )
    return values


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
    values: Mapping[str, Any], *, on_round_end: Sequence[RoundCallback] = ()
) -> SimilarityFree:
    """Return the strategy that the settings describe; ``on_round_end`` is told of each round."""
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
        min_available_nodes=values["num-clients"],
        on_round_end=on_round_end,
    )
