"""Strategy options from an app's settings: secure sums, and options of all apps with training nodes."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from hedgerow.strategies.aggregate.flower import FlowerAggregation
from hedgerow.strategies.aggregate.secure_sums import SecureSum
from hedgerow.strategies.aggregate.sum_noise import EVALUATION, NO_COUNTERS, OWN_DATA, SumNoise
from hedgerow.strategies.buffer import Buffer
from hedgerow.strategies.parts.server_optimisers import parse_server_step
from hedgerow.strategies.registry import Registry


def secure_sum_of(values: Mapping[str, Any]) -> SecureSum | bool:
    """Return the settings of secure sums; False for none."""
    if not values["secure-sum"]:
        return False
    noise = None
    if values["upload-clip"]:
        # Nodes with their own data report statistics of them, and evaluate the model on them.
        paths = (EVALUATION, OWN_DATA) if values["partition"] == "own" else ()
        noise = SumNoise(
            values["upload-clip"],
            values["upload-noise-multiplier"],
            values["noise-delta"],
            values["noise-source"],
            paths,
        )
    return SecureSum(values["sum-clip"], values["sum-threshold"], values["sum-min-nodes"], noise=noise)


def check_noise(values: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """Raise ValueError if noise is set for a model (its state dict) that cannot have any."""
    counters = [key for key, value in state.items() if not value.is_floating_point()]
    if values["secure-sum"] and values["upload-clip"] and counters:
        raise ValueError(
            f"upload-clip must be 0 with model = {values['model']!r}, got {values['upload-clip']}: "
            f"{NO_COUNTERS}"
        )


def buffer_of(values: Mapping[str, Any]) -> Buffer | None:
    """Return the settings of buffered rounds; None for rounds that wait for all replies."""
    if not values["buffer"]:
        return None
    keys = ("buffer", "buffer-concurrency", "buffer-staleness", "buffer-max-staleness")
    size, concurrency, staleness, most = (values[key] for key in keys)
    return Buffer(size, concurrency or None, staleness, most or None)


def training_options(
    values: Mapping[str, Any], flower: str = "", reads: Collection[str] = ()
) -> dict[str, Any]:
    """Return the strategy options that come from the settings of every app with training nodes.

    ``flower`` is the strategy of Flower's that aggregates, as ``FlowerAggregation.parse`` reads it; empty for
    none. ``reads`` are its instructions that the app's nodes follow.
    """
    same = ("seed", "num-clients", "aggregation", "max-weight-ratio", "max-update-norm-ratio")
    return {
        **{key.replace("-", "_"): values[key] for key in (*same, "quarantine-after", "max-loss-ratio")},
        "fraction_evaluate": 0.0,
        "min_train_nodes": values["min-replies"],
        "min_available_nodes": values["min-available-nodes"] or values["num-clients"],
        "registry": Registry.named(values["registry"]),
        "secure_sum": secure_sum_of(values),
        "buffer": buffer_of(values),
        "local_layers": values["local-layers"],
        "server_step": parse_server_step(values["server-step"]),
        **({"aggregation": FlowerAggregation.parse(flower, reads)} if flower else {}),
    }
