"""What an app's settings say of secure sums: the keys of ``SUM_SETTINGS`` and ``SUM_NOISE_SETTINGS``."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hedgerow.strategies.aggregate.secure_sums import SecureSum
from hedgerow.strategies.aggregate.sum_noise import EVALUATION, NO_COUNTERS, OWN_DATA, SumNoise
from hedgerow.wire.masked_sums import MAX_MEMBERS
from hedgerow.wire.robust_means import parse_aggregation

__all__ = ["check_noise", "secure_sum_of", "sum_problems"]


def secure_sum_of(values: Mapping[str, Any]) -> SecureSum | bool:
    """Return the settings of secure sums; False for none."""
    if not values["secure-sum"]:
        return False
    noise = None
    if values["upload-clip"]:
        # Nodes of own data are asked for what their data are like, and how well the model does on them.
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
    """Raise ValueError if there is to be noise on a model (its state dict) that cannot have any."""
    counters = [key for key, value in state.items() if not value.is_floating_point()]
    if values["secure-sum"] and values["upload-clip"] and counters:
        raise ValueError(
            f"upload-clip must be 0 with model = {values['model']!r}, got {values['upload-clip']}: "
            f"{NO_COUNTERS}"
        )


def sum_problems(values: Mapping[str, Any], smallest: int, largest: int) -> list[str]:
    """Return what speaks against sums that hide their nodes, and against their noise.

    Parameters
    ----------
    values : Mapping[str, Any]
        The settings, each valid by itself.
    smallest, largest : int
        The nodes that the smallest and the largest sum of a round would have.
    """
    clip, multiplier = values["upload-clip"], values["upload-noise-multiplier"]
    problems = []
    if bool(clip) != bool(multiplier):
        problems.append(
            f"upload-clip and upload-noise-multiplier must both be > 0 or both 0, got {clip} and {multiplier}"
        )
    if not values["secure-sum"]:
        if clip:
            problems.append(
                f"upload-clip must be 0 without secure-sum, got {clip}: the noise is shared by the members "
                "of a sum, and one member's share does not hide its update"
            )
        return problems
    if not parse_aggregation(values["aggregation"]).is_mean:
        problems.append(
            f"aggregation must be 'mean' with secure-sum, got {values['aggregation']!r}: a sum gives no other"
        )
    if largest > MAX_MEMBERS:
        problems.append(f"secure-sum must have at most {MAX_MEMBERS} nodes in a sum, got {largest}")
    if smallest < values["sum-min-nodes"]:
        problems.append(
            f"sum-min-nodes must be at most {smallest}, the nodes in the smallest sum of a round, got "
            f"{values['sum-min-nodes']}"
        )
    return problems
