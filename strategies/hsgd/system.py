"""HSGD's modelled system: link rates, computation time, and the duration of a round.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", the set-up of the experiments.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from hedgerow.strategies.hsgd.costs import PAPER_RATES, MethodName, Sizes, round_parts, round_seconds
from hedgerow.strategies.hsgd.messages import Schema
from hedgerow.wire.checks import in_range, int_at_least
from hedgerow.wire.clock import Rates

__all__ = ["MethodVariant", "ModelledSystem"]

_MERGED = (MethodName.TDCD, MethodName.C_TDCD)


@dataclass(frozen=True)
class ModelledSystem:
    """The modelled system: computation time, link rates, and the cost of TDCD's merger of groups.

    Parameters
    ----------
    compute_seconds : float (default: 0.0)
        t_c of one iteration, >= 0.
    rates : Rates (default: PAPER_RATES)
        Rates of the links.
    original_groups : int (default: 1)
        Number of groups that TDCD merged, >= 1; the paper states its cost per original group.
    raw_bytes, raw_seconds : float (default: 0.0)
        Bytes of raw data that TDCD transfers first, per original group, and the delay of the start; >= 0.
    """

    compute_seconds: float = 0.0
    rates: Rates = PAPER_RATES
    original_groups: int = 1
    raw_bytes: float = 0.0
    raw_seconds: float = 0.0

    def __post_init__(self) -> None:
        int_at_least(1, original_groups=self.original_groups)
        for key in ("compute_seconds", "raw_bytes", "raw_seconds"):
            in_range(key, getattr(self, key), 0.0, 1e300)


@dataclass(frozen=True)
class MethodVariant:
    """A method, and whether its groups aggregate; ValueError if it is incompatible with the system."""

    method: MethodName
    aggregate: bool = True
    system: ModelledSystem = ModelledSystem()

    def __post_init__(self) -> None:
        method, system = self.method, self.system
        if method is MethodName.JFL and not self.aggregate:
            raise ValueError("aggregate must be True in jfl, whose pairs last one round")
        if system.original_groups != 1 and not self.merged:
            raise ValueError(
                f"original_groups must be 1 unless tdcd merges groups, got {system.original_groups!r}"
            )
        for key in ("raw_bytes", "raw_seconds"):
            if (value := getattr(system, key)) and method not in _MERGED:
                raise ValueError(f"{key} must be 0 in {method}, got {value!r}: no raw data moves")

    @property
    def compressed(self) -> bool:
        """Whether encodings and heads are compressed."""
        return self.method in (MethodName.C_HSGD, MethodName.C_TDCD)

    @property
    def merged(self) -> bool:
        """Whether all people are at one hospital."""
        return self.method in _MERGED and self.aggregate

    @property
    def pairs(self) -> bool:
        """Whether every sampled pair has its own model in a round."""
        return self.method is MethodName.JFL

    @property
    def has_cloud(self) -> bool:
        """Whether a cloud aggregates the groups' models."""
        return self.aggregate and not self.merged

    def seconds(self, schema: Schema, batches: Iterable[int], P: int, Q: int) -> float:
        """Return the seconds of a global interval of the slowest group; 0 without groups."""
        apart = MethodName.C_TDCD if self.compressed else MethodName.TDCD
        method, system = self.method if self.aggregate else apart, self.system

        def of(a: int) -> float:
            sizes = Sizes(schema.head, schema.hospital, schema.device, schema.zeta1, schema.zeta2, a)
            parts = round_parts(sizes, rates=system.rates, method=method)
            return round_seconds(parts, P=P, Q=Q, compute_seconds=system.compute_seconds)

        return max((of(a) for a in set(batches)), default=0.0)
