"""What HSGD and its baselines send and how long they take, before a run: two ledgers and a time model.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning": cost (19), the round time and its rates.
Differs: (19) counts neither downlinks, nor the encoders of a global aggregation, nor a device's copy of the
head, so ``traffic`` counts every transfer beside it. The paper splits its round time into parts without
saying what they hold, and prints no cost of the baselines: both follow here from its message flow.
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

# Devices are mobile (14 Mbit/s up, 110 down), hospitals, edges and the cloud fixed (74 up, 204 down). Both
# ends of the swap between a hospital and its edge send at their uplink's rate.
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
    """The methods that the paper compares; C- is the one with top-k compressed encodings and heads."""

    HSGD = "hsgd"
    C_HSGD = "c-hsgd"
    JFL = "jfl"
    TDCD = "tdcd"
    C_TDCD = "c-tdcd"


@dataclass(frozen=True)
class Sizes:
    """What one group's messages hold, in scalars of 32 bits.

    Raises
    ------
    ValueError
        If a number is not an integer >= 1.
    """

    # |theta_0|, |theta_1| and |theta_2|, >= 1.
    head: int
    hospital: int
    device: int
    # Length of one sample's zeta_1 and zeta_2, >= 1.
    hospital_encoding: int
    device_encoding: int
    batch: int  # Devices |A| that take part in a local interval, >= 1; each has one sample.

    def __post_init__(self) -> None:
        at_least(1, **{field.name: getattr(self, field.name) for field in fields(self)})


def paper_bytes(
    sizes: Sizes, *, P: int, Q: int, T: int, method: str = MethodName.HSGD, raw_bytes: float = 0.0
) -> float:
    """Return one group's bytes by the paper's own account: (19) over M, and its like for the baselines.

    Sum it over the groups of a run. A T that is no multiple of P counts its last interval in part, as
    (19) does.

    Parameters
    ----------
    sizes : Sizes
        The group's; TDCD's too are those of one group before the merger, its cost being stated per group.
    P, Q : int
        Global and local interval in iterations, >= 1, Q a divisor of P. TDCD does not look at P.
    T : int
        Iterations, >= 1.
    method : str (default: "hsgd")
        A ``MethodName`` or its value.
    raw_bytes : float (default: 0)
        One-off transfer of raw features that TDCD and C-TDCD are charged, per group, >= 0. The others
        move no raw data.

    Raises
    ------
    ValueError
        If the method is unknown, or a number is out of range.
    """
    require_intervals(P=P, Q=Q)
    at_least(1, T=T)
    method = _valid_method(method)
    not_negative(raw_bytes=raw_bytes)
    if raw_bytes and method not in (MethodName.TDCD, MethodName.C_TDCD):
        raise ValueError(f"raw_bytes must be 0 for {method}, which moves no raw data, got {raw_bytes!r}")
    pairs = sizes.batch if method is MethodName.JFL else 1  # JFL keeps a head and an encoder a device
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
    """Return every byte that one group of HSGD sends in T iterations, by link.

    Between hospital, edge and devices that is what every local interval starts and ends with, between
    them and the cloud what every global interval does. TDCD is one group without its cloud links.

    Parameters
    ----------
    sizes : Sizes
        The group's.
    P, Q, T : int
        Intervals and iterations, >= 1, Q a divisor of P and P of T.
    compressed : bool (default: False)
        C-HSGD: encodings (by row) and head travel as top-k values with packed indices.
    send_final : bool (default: False)
        Count the way of the last global model back to the group too.

    Raises
    ------
    ValueError
        If a number is out of range.
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
    """Seconds of the transfers of a global interval: t_g once, t_l and t_e in every local interval."""

    # t_g, t_l and t_e, >= 0.
    global_aggregation: float
    local_aggregation: float
    exchange: float


def round_parts(sizes: Sizes, *, rates: Rates = PAPER_RATES, method: str = MethodName.HSGD) -> RoundParts:
    """Return t_g, t_l and t_e of one group; all devices send at once, and no link is shared.

    Parameters
    ----------
    sizes : Sizes
        The group's, in TDCD the merged one's.
    rates : Rates (default: PAPER_RATES)
        Rates of the links that ``traffic`` names.
    method : str (default: "hsgd")
        JFL has no local aggregation, TDCD no global one.

    Raises
    ------
    ValueError
        If the method is unknown or a link has no rate.
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
    # A pair of JFL has no edge: its device's own link carries theta_2 to the cloud.
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
    """Return the seconds of one global interval: t_g + P/Q (t_l + t_e) + P t_c.

    Parameters
    ----------
    parts : RoundParts
        Of the group; where groups differ the slowest one's round counts.
    P, Q : int
        Intervals in iterations, >= 1, Q a divisor of P.
    compute_seconds : float
        t_c of one iteration, >= 0, measured at the slower of hospital and device. A hospital of JFL does
        the work of |A| in it.

    Raises
    ------
    ValueError
        If a number is out of range.
    """
    require_intervals(P=P, Q=Q)
    not_negative(compute_seconds=compute_seconds)
    transfers = parts.global_aggregation + P // Q * (parts.local_aggregation + parts.exchange)
    return transfers + P * compute_seconds


def require_intervals(**counts: int) -> None:
    """Raise ValueError unless all counts are integers >= 1, and Q | P and P | T where both are given."""
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
