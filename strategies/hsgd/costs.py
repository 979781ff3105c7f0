"""The traffic and time of HSGD and its baselines: accounts of bytes, a time model, and the modelled system.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning": cost (19), the round time and its rates, and
the set-up of the experiments.
Differs: (19) counts neither downlinks, nor the encoders of a global aggregation, nor an encoding's hop from
device to edge, nor a device's copy of the head; ``traffic`` counts every transfer. The paper names the parts
of its round time without defining them, and gives no cost of the baselines; both are derived here from its
message flow.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum

from hedgerow.wire.checks import at_least, in_range, int_at_least, not_negative, one_of
from hedgerow.wire.clock import Rates
from hedgerow.wire.sparse_rows import row_bytes

_BYTES_PER_SCALAR = 4
_BITS_PER_SCALAR = 32

# kappa = log2(b) / 32 at the paper's quantisation level b = 128.
COMPRESSION_RATIO = 7 / 32

# Devices are mobile (14 Mbit/s up, 110 down); hospitals, edges and the cloud are fixed (74 up, 204 down).
# A hospital and its edge both send to each other at their uplink's rate.
PAPER_RATES = Rates(
    {
        "device->edge": 14e6,
        "edge->device": 110e6,
        "edge->hospital": 74e6,
        "hospital->edge": 74e6,
        "hospital->cloud": 74e6,
        "cloud->hospital": 204e6,
        "edge->cloud": 74e6,
        "cloud->edge": 204e6,
    }
)


class MethodName(StrEnum):
    """The methods that the paper compares; C- is with top-k compressed encodings and heads."""

    HSGD = "hsgd"
    C_HSGD = "c-hsgd"
    JFL = "jfl"
    TDCD = "tdcd"
    C_TDCD = "c-tdcd"


@dataclass(frozen=True)
class Sizes:
    """Sizes of one group's messages in scalars of 32 bits, and its batch; all >= 1."""

    # |theta_0|, |theta_1| and |theta_2|.
    head: int
    hospital: int
    device: int
    # Length of one sample's zeta_1 and zeta_2.
    hospital_encoding: int
    device_encoding: int
    batch: int  # |A|, devices in a local interval; each has one sample.

    def __post_init__(self) -> None:
        at_least(1, **{field.name: getattr(self, field.name) for field in fields(self)})


def paper_bytes(
    sizes: Sizes, *, P: int, Q: int, T: int, method: str = MethodName.HSGD, raw_bytes: float = 0.0
) -> float:
    """Return one group's bytes as the paper counts them: (19) / M, and its analogue for the baselines.

    The cost of a run is the sum over its groups. If T is no multiple of P, the last interval counts in part,
    as in (19).

    - ``sizes``: The group's; for TDCD, those of one group before the merger.
    - ``P``, ``Q``: Global and local interval in iterations, >= 1, Q a divisor of P. TDCD ignores P.
    - ``T``: Iterations, >= 1.
    - ``method``: A ``MethodName`` or its value.
    - ``raw_bytes``: The one-off transfer of raw features per group in TDCD and C-TDCD, >= 0.
    """
    require_intervals(P=P, Q=Q)
    at_least(1, T=T)
    method = _valid_method(method)
    not_negative(raw_bytes=raw_bytes)
    if raw_bytes and method not in (MethodName.TDCD, MethodName.C_TDCD):
        raise ValueError(f"raw_bytes must be 0 for {method}, which moves no raw data, got {raw_bytes!r}")
    pairs = sizes.batch if method is MethodName.JFL else 1  # JFL has a head and an encoder per device.
    exchanged = pairs * sizes.head + sizes.batch * (sizes.hospital_encoding + sizes.device_encoding)
    swapped = _ratio(method) * exchanged
    if method is MethodName.JFL:
        scalars = pairs * (sizes.head + sizes.hospital + sizes.device) / P + swapped / Q
    elif method in (MethodName.TDCD, MethodName.C_TDCD):
        scalars = (sizes.batch * sizes.device + swapped) / Q
    else:
        scalars = sizes.hospital / P + (sizes.batch * sizes.device + swapped) / Q  # (19)
    return _BYTES_PER_SCALAR * scalars * T + raw_bytes


def traffic(
    sizes: Sizes, *, P: int, Q: int, T: int, compressed: bool = False, send_final: bool = False
) -> dict[str, int]:
    """Return all bytes that one group of HSGD sends in T iterations, by link.

    Hospital, edge and devices exchange data in every local interval, and send models to the cloud and back
    in every global interval. TDCD is one group without its cloud links.

    - ``P``, ``Q``, ``T``: Intervals and iterations, >= 1, Q a divisor of P and P of T.
    - ``compressed``: C-HSGD: encodings (by row) and head are sent as top-k values with packed indices.
    - ``send_final``: Whether to count the transfer of the last global model back to the group.
    """
    require_intervals(P=P, Q=Q, T=T)
    a, encode = sizes.batch, row_bytes if compressed else _dense_bytes
    head, zeta_1, zeta_2 = map(encode, (sizes.head, sizes.hospital_encoding, sizes.device_encoding))
    theta_2, hospital_model = _dense_bytes(sizes.device), _dense_bytes(sizes.head + sizes.hospital)
    local, up = T // Q, T // P
    down = up + send_final
    return {
        "device->edge": local * a * (zeta_2 + theta_2),
        "edge->device": local * a * (theta_2 + head + zeta_1),
        "edge->hospital": local * a * zeta_2,
        "hospital->edge": local * (head + a * zeta_1),
        "hospital->cloud": up * hospital_model,
        "cloud->hospital": down * hospital_model,
        "edge->cloud": up * theta_2,
        "cloud->edge": down * theta_2,
    }


@dataclass(frozen=True)
class RoundParts:
    """Transfer times of a global interval in seconds, >= 0: t_g once, t_l and t_e in every local interval."""

    global_aggregation: float  # t_g
    local_aggregation: float  # t_l
    exchange: float  # t_e


def round_parts(sizes: Sizes, *, rates: Rates = PAPER_RATES, method: str = MethodName.HSGD) -> RoundParts:
    """Return t_g, t_l and t_e of one group; in TDCD, of the merged group.

    All devices send at once, and no link is shared. JFL has no local aggregation, TDCD no global one.
    """
    method = _valid_method(method)
    pairs = sizes.batch if method is MethodName.JFL else 1

    def seconds(link: str, scalars: float) -> float:
        return rates.seconds(_BITS_PER_SCALAR * scalars, link)

    def both_ways(lower: str, upper: str, scalars: float) -> float:
        return seconds(f"{lower}->{upper}", scalars) + seconds(f"{upper}->{lower}", scalars)

    kappa, a = _ratio(method), sizes.batch
    head, zeta_1, zeta_2 = (kappa * n for n in (sizes.head, sizes.hospital_encoding, sizes.device_encoding))
    to_cloud = pairs * (sizes.head + sizes.hospital)
    through_device = both_ways("device", "edge", sizes.device)
    # A pair of JFL has no edge: its device sends theta_2 to the cloud over its own link.
    encoders = through_device if method is MethodName.JFL else both_ways("edge", "cloud", sizes.device)
    exchange = (
        seconds("device->edge", zeta_2)
        + max(seconds("edge->hospital", a * zeta_2), seconds("hospital->edge", pairs * head + a * zeta_1))
        + seconds("edge->device", head + zeta_1)
    )
    merged = method in (MethodName.TDCD, MethodName.C_TDCD)
    return RoundParts(
        0.0 if merged else max(both_ways("hospital", "cloud", to_cloud), encoders),
        0.0 if method is MethodName.JFL else through_device,
        exchange,
    )


def round_seconds(parts: RoundParts, *, P: int, Q: int, compute_seconds: float) -> float:
    """Return the seconds of one group's global interval: t_g + P/Q (t_l + t_e) + P t_c.

    Q must be a divisor of P. ``compute_seconds`` is t_c of one iteration, >= 0, measured at the slower of
    hospital and device; a JFL hospital does the work of |A| devices in it.
    """
    require_intervals(P=P, Q=Q)
    not_negative(compute_seconds=compute_seconds)
    transfers = parts.global_aggregation + P // Q * (parts.local_aggregation + parts.exchange)
    return transfers + P * compute_seconds


def require_intervals(**counts: int) -> None:
    """Raise ValueError unless all counts are integers >= 1, and Q | P and P | T if both are given."""
    at_least(1, **counts)
    for key, divisor in (("P", "Q"), ("T", "P")):
        if key in counts and divisor in counts and counts[key] % counts[divisor] != 0:
            raise ValueError(
                f"{key} must be a multiple of {divisor} = {counts[divisor]!r}, got {counts[key]!r}"
            )


def _dense_bytes(length: int) -> int:
    return _BYTES_PER_SCALAR * length


def _ratio(method: MethodName) -> float:
    return COMPRESSION_RATIO if method in (MethodName.C_HSGD, MethodName.C_TDCD) else 1.0


def _valid_method(method: str) -> MethodName:
    one_of("method", method, MethodName)
    return MethodName(method)


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

    def seconds(self, groups: Iterable[Sizes], P: int, Q: int) -> float:
        """Return the seconds of a global interval of the slowest group; 0 without groups."""
        apart = MethodName.C_TDCD if self.compressed else MethodName.TDCD
        method, system = self.method if self.aggregate else apart, self.system
        parts = [round_parts(sizes, rates=system.rates, method=method) for sizes in set(groups)]
        seconds = (round_seconds(one, P=P, Q=Q, compute_seconds=system.compute_seconds) for one in parts)
        return max(seconds, default=0.0)
