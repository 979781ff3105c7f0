"""Predicted traffic and time of HSGD and its baselines: two accounts of bytes, and a time model.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning": cost (19), the round time and its rates.
Differs: (19) counts neither downlinks, nor the encoders of a global aggregation, nor a device's copy of the
head; ``traffic`` counts every transfer. The paper names the parts of its round time without defining them,
and gives no cost of the baselines; both are derived here from its message flow.
"""

from dataclasses import dataclass, fields
from enum import StrEnum

from hedgerow.wire.checks import at_least, not_negative, one_of
from hedgerow.wire.clock import Rates
from hedgerow.wire.sparse_rows import row_bytes

__all__ = [
    "COMPRESSION_RATIO",
    "PAPER_RATES",
    "MethodName",
    "RoundParts",
    "Sizes",
    "paper_bytes",
    "require_intervals",
    "round_parts",
    "round_seconds",
    "traffic",
]

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
