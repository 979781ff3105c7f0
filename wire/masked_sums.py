"""Masked sums: numbers on a grid, masks that cancel in the sum, and the removal of those that do not.

Papers: K. Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017),
sections 4 and 6; J. H. Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead"
(CCS 2020), masks between neighbours of a sparse graph. Member u of a sum adds to its numbers, modulo 2^32,

    y_u = x_u + PRG(b_u) + sum_{v in N(u), v > u} PRG(s_uv) - sum_{v in N(u), v < u} PRG(s_uv).

Differs: s_uv is derived per sum from a secret that u and v agreed on once (``sealed.py``), so that no keys or
shares are exchanged before a round: shares of b_u and of all s_uv are sent sealed beside y_u. Revealing s_uv
after u is lost reveals nothing about other rounds. Shares go to all members, not only to neighbours. A member
reveals its share of b_u or those of s_uv, once; two thirds of the others are needed, and few of a survivor's
neighbours may be lost. A server that sends members different lists of survivors therefore gets too few of
either (``survivors_needed`` has the proof), without an exchange to compare the lists. The
context of a sum (``about``: members, settings, the model that was sent) is part of every key: the masks of a
member with another context do not cancel.

Flower's ``secure_aggregation`` is not used: its ``pseudo_rand_gen`` reduces a seed to 32 bits for Mersenne
Twister, which can be searched; ``quantize`` rounds with NumPy's global generator; ``shamir`` is slow, see
``secret_shares.py``. Keys and seals are those of the sealed links.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from math import ceil, floor, isfinite, isqrt, log2, sqrt
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from hedgerow.wire.discrete_gaussian import MAX_DEVIATION, CoinFlips, concentration, discrete_gaussian
from hedgerow.wire.records import PayloadError, view
from hedgerow.wire.sealed import INTRODUCTION_BYTES, SEAL_BYTES
from hedgerow.wire.secret_shares import MAX_SHARES, combined_shares, secret_shares

# Names of a sum's records in an instruction and its answer, and of their keys.
MASKED_SUM, MASKED, SHARES = "masked-sum", "masked", "shares"

SEED_BYTES = 16
MAX_MEMBERS = MAX_SHARES
# With two members, each could compute the other's update.
LEAST_MEMBERS = 3
# More than two thirds must survive, so that the server and fewer than a third of the members open no update.
LEAST_THRESHOLD = 2 / 3
# The largest step in which a member's own update enters a sum.
COARSEST_STEP = 2.0**-12
# Clipping bounds of counters (integer arrays) and metrics.
COUNTER_CLIP, METRIC_CLIP = 2.0**20, 2.0**10
_PROTOCOL = b"hedgerow masked sum 1"
_LARGEST = 2**31 - 1
_MOST_METRICS = 16
# A plan's record: its keys in order, and their types.
_KINDS = {
    "number": int, "members": list, "introductions": bytes, "threshold": int, "neighbours": int,
    "clip": float, "max-weight": float, "weighted-by": str, "metrics": str, "norm": float,
    "multiplier": float, "noise-source": str,
}  # fmt: skip

Words = NDArray[np.uint32]


def survivors_needed(members: int, threshold: float = LEAST_THRESHOLD) -> int:
    """Return t, the number of members that must survive: more than the threshold's share, at most all.

    With all others as neighbors, it is large enough that the server and any c < n / 3 members cannot open an
    update, whatever lists of survivors the server sends: 2 (t - 1) > n - 1 + c, which for n = 3 k + 1 is one
    more than two thirds.

    Notes
    -----
    Proof. A member answers once, for the list that it received. To open the update of member v the server
    needs v's own seed and, for each neighbor u that does not collude, the seed of u and v. A seed takes
    t - 1 shares of the others. With c colluding members that is t - 1 - c answers of the n - 1 - c honest
    others.

    1. For v's own seed, t - 1 - c of them were told that v survived.
    2. If the seed of u and v comes from u's shares, t - 1 - c more were told that v is lost:
       2 (t - 1 - c) <= n - 1 - c, so 2 (t - 1) <= n - 1 + c.
    3. Otherwise it comes from v's shares, and t - 1 - c were told that v survived and u did not. If this
       holds for all m honest neighbors, m (t - 1 - c) <= (n - 1 - c) l: an accepted list reports at most
       l = min(n - t, k / 2) of v's k neighbors as lost.
    4. Where all are neighbors, m is n - 1 - c and l is n - t, so 3 also says 2 (t - 1) <= n - 1 + c.
    5. In a graph (from 20 members on) m >= k - c: updates stay hidden while 2 (t - 1) > n - 1 + c and
       (k - c)(t - 1 - c) > (n - 1 - c) l. This assumes that all colluding members are v's neighbors.
    """
    # 1e-9, because a share such as 2/3 is rounded to a binary fraction.
    share = floor(members * threshold + 1e-9) + 1
    colluders = (members - 1) // 3
    return min(max(share, (members - 1 + colluders) // 2 + 2), members)


def default_neighbours(members: int) -> int:
    """Return the number of others with which a member shares masks: even and >= 2 log2(n) + 8, or all.

    A member's masks protect it as long as one neighbor is neither lost nor hostile. At most half of a
    survivor's neighbors may be lost (``SumPlan.most_lost``). If a tenth of all members are hostile, the
    probability that all its other neighbors are is 7e-6 for 50 members (k = 20).
    """
    k = 2 * ceil(log2(max(members, 2))) + 8
    return min(k, members - 1)


@dataclass(frozen=True)
class SumPlan:
    """The parameters of one sum, which all its members receive."""

    number: int  # counts the sums of a run, from 1; a member accepts only increasing numbers
    members: tuple[int, ...]  # partition ids, ascending, at most 255
    introductions: tuple[bytes, ...]  # public keys (``NodeIdentity.introduction``), 64 bytes per member
    threshold: int  # number of members that must survive
    neighbours: int  # number of others with which a member shares masks: even, or all
    clip: float  # R > 0: members clip each entry of their updates to [-R, R]
    max_weight: float  # W > 0: the largest weight of a member
    weighted_by: str  # the metric that is a member's weight; empty for equal weights
    metrics: tuple[str, ...] = ()  # metrics averaged within the sum, clipped to [-1024, 1024]
    # With noise: C and z of ``NoisyGrid``, both > 0. Weights are then equal, and no metric is reported.
    norm: float = 0.0
    multiplier: float = 0.0
    # Source of the members' noise: "entropy", the operating system, or "seed", the run's seed.
    noise_source: str = "entropy"

    def __post_init__(self) -> None:
        n = len(self.members)
        ascending = all(a < b for a, b in zip(self.members, self.members[1:], strict=False))
        sizes = {len(one) for one in self.introductions}
        regular = self.neighbours == n - 1 or self.neighbours % 2 == 0
        for right, what in (
            (self.number >= 1, f"number must be >= 1, got {self.number}"),
            (1 <= n <= MAX_MEMBERS, f"a sum must have 1 to {MAX_MEMBERS} members, got {n}"),
            (ascending and min(self.members, default=0) >= 0, "members repeat or are not ascending"),
            (len(self.introductions) == n and sizes == {INTRODUCTION_BYTES}, "introductions of other sizes"),
            (len(set(self.introductions)) == n, "two members with one introduction"),
            (1 <= self.threshold <= n, f"threshold must be from 1 to {n}, got {self.threshold}"),
            (0 <= self.neighbours < n and regular, f"neighbours is {self.neighbours} for {n} members"),
            (isfinite(self.clip) and self.clip > 0, f"clip must be > 0, got {self.clip}"),
            (isfinite(self.max_weight) and self.max_weight > 0, f"max weight is {self.max_weight}"),
            (len(self.metrics) <= _MOST_METRICS, f"{len(self.metrics)} metrics"),
            (self.norm == 0 or (isfinite(self.norm) and self.norm > 0), f"norm is {self.norm}"),
            (bool(self.norm) == bool(self.multiplier), f"norm {self.norm}, multiplier {self.multiplier}"),
            (not self.norm or not (self.metrics or self.weighted_by), "weights or metrics beside noise"),
            (self.noise_source in ("entropy", "seed"), f"noise source {self.noise_source!r}"),
        ):
            if not right:
                raise ValueError(f"masked sum: {what}")
        _ = self.noisy_grid  # raises if its parameters are out of range

    def record(self) -> ConfigRecord:
        """Return the plan as a record for the instruction."""
        values = {key: getattr(self, key.replace("-", "_")) for key in _KINDS}
        return ConfigRecord(
            values
            | {
                "members": list(self.members),
                "introductions": b"".join(self.introductions),
                "metrics": "\n".join(self.metrics),
            }
        )

    @classmethod
    def of(cls, record: ConfigRecord) -> "SumPlan":
        """Return the plan in a record; ValueError if the record is invalid."""
        for key, kind in _KINDS.items():
            if type(record.get(key)) is not kind:
                raise ValueError(f"masked sum: {key} is no {kind.__name__}")
        values: dict[str, Any] = {key.replace("-", "_"): record[key] for key in _KINDS}
        if not all(type(member) is int for member in values["members"]):
            raise ValueError("masked sum: members are no integers")
        keys = values["introductions"]
        values["members"] = tuple(values["members"])
        values["introductions"] = tuple(
            keys[i : i + INTRODUCTION_BYTES] for i in range(0, len(keys), INTRODUCTION_BYTES)
        )
        values["metrics"] = tuple(filter(None, values["metrics"].split("\n")))
        return cls(**values)

    def packed(self) -> bytes:
        """Return the plan as bytes, for ``unpacked``."""
        record = {key: value for key, value in self.record().items() if key != "introductions"}
        return json.dumps(record).encode() + b"\n" + b"".join(self.introductions)

    @staticmethod
    @lru_cache(maxsize=64)
    def unpacked(packed: bytes) -> "SumPlan":
        """Return the plan from the result of ``packed``; ValueError for anything else."""
        text, _, introductions = packed.partition(b"\n")
        return SumPlan.of(ConfigRecord({**json.loads(text), "introductions": introductions}))

    def about(self, content: bytes) -> bytes:
        """Return a 32-byte digest of the plan and of the members' instruction, see ``told_content``."""
        parts = [
            self.number, self.members, b"".join(self.introductions).hex(), self.threshold, self.neighbours,
            self.clip.hex(), self.max_weight.hex(), self.weighted_by, self.metrics, self.norm.hex(),
            self.multiplier.hex(), self.noise_source, content.hex(),
        ]  # fmt: skip
        return sha256(_PROTOCOL + json.dumps(parts).encode()).digest()

    @property
    def grid(self) -> "Grid":
        """The grid of its numbers."""
        return Grid(len(self.members))

    def check_share(self, share: float) -> None:
        """Raise ValueError if a member of this share of ``max_weight`` has too coarse a part in the sum.

        Each member checks its own: a clip or a largest weight that is out of proportion would leave little
        but the update of one member.
        """
        if not (step := self.clip / self.grid.largest / max(share, 1e-300)) <= COARSEST_STEP:
            raise ValueError(
                f"clip = {self.clip:g} and max-weight = {self.max_weight:g} must let this node's update have "
                f"steps of at most {COARSEST_STEP:.3g}, got {step:.3g}"
            )

    @cached_property
    def noisy_grid(self) -> "NoisyGrid | None":
        """The grid of a sum with noise, None without noise; ValueError if there is no such grid."""
        return NoisyGrid(len(self.members), self.needed, self.norm, self.multiplier) if self.norm else None

    @property
    def extras(self) -> int:
        """The number of entries after those of the update: weight, clipped share, two per metric.

        It is 0 with noise, where everything that depends on a member's data is in the update.
        """
        return 0 if self.norm else 2 + 2 * len(self.metrics)

    @property
    def needed(self) -> int:
        """The number of shares that reconstruct a seed; no member has a share of its own seeds."""
        return max(self.threshold - 1, 1)

    @property
    def fewest(self) -> int:
        """The size of the smallest sum that a server can obtain by sending members false lists.

        A member shares every sum with a neighbour unless ``needed`` of the n - 1 others are told that one of
        the two is lost. Each of them accepts at most n - t lost members and ``most_lost`` lost neighbours.
        """
        n, lost = len(self.members), min(len(self.members) - self.threshold, self.most_lost)
        return max(1, 1 + self.neighbours - lost * (n - 1) // self.needed)

    @property
    def least_multiplier(self) -> float:
        """The noise deviation over C in the smallest sum, without that of one member, which knows its own."""
        return self.multiplier * sqrt(min(max(self.fewest - 1, 1), self.needed) / self.needed)

    @property
    def most_lost(self) -> int:
        """The largest number of a survivor's neighbours that may be lost.

        Without a limit, a server that declares all of them lost could remove every mask of that member.
        """
        return self.neighbours // 2

    @property
    def share_bytes(self) -> int:
        """Size of a sealed message between members: shares of the own seed and of those with neighbours."""
        return SEED_BYTES * (1 + self.neighbours) + SEAL_BYTES

    def graph(self, about: bytes) -> dict[int, tuple[int, ...]]:
        """Return each member's neighbours, ascending: the nearest on a circle ordered by ``about``."""
        return _graph(self.members, self.neighbours, about)


@lru_cache(maxsize=64)
def _graph(members: tuple[int, ...], neighbours: int, about: bytes) -> dict[int, tuple[int, ...]]:
    n = len(members)
    if neighbours == n - 1:
        return {one: tuple(other for other in members if other != one) for one in members}
    order = sorted(members, key=lambda one: sha256(about + one.to_bytes(8)).digest())
    steps = [step for d in range(1, neighbours // 2 + 1) for step in (d, -d)]
    return {one: tuple(sorted(order[(at + step) % n] for step in steps)) for at, one in enumerate(order)}


def told_content(content: RecordDict) -> bytes:
    """Return a SHA-256 digest of the arrays, in their order, and of the settings of an instruction.

    If a server sends members different models, to predict the updates of all but one, their masks do not
    cancel.
    """
    digest = sha256()
    for name in sorted(content):
        record = content[name]
        digest.update(json.dumps([name, type(record).__name__]).encode())
        # A member's numbers follow the arrays' order: others' zeros at another place would leave one alone.
        for key in record if isinstance(record, ArrayRecord) else sorted(record):
            value: Any = record[key]
            if isinstance(record, ArrayRecord):
                array = np.ascontiguousarray(view(value))
                digest.update(json.dumps([key, str(array.dtype), list(array.shape)]).encode())
                digest.update(array.data if array.size else b"")
            else:
                digest.update(json.dumps([key, repr(value)]).encode())
    return digest.digest()


# Numbers


@dataclass(frozen=True)
class Grid:
    """Multiples of R / L in [-R, R], L = floor((2^31 - 1) / n), added modulo 2^32.

    For any number of survivors the sum stays within +-(2^31 - 1), so it never wraps.
    """

    members: int  # n >= 1

    @property
    def largest(self) -> int:
        """L."""
        return _LARGEST // self.members

    def encode(
        self,
        values: NDArray[Any],
        clips: NDArray[Any] | float,
        share: float,
        draws: NDArray[np.float64] | float = 0.5,
    ) -> Words:
        """Clip the values, multiply them by ``share`` and round them to the grid.

        - ``values``: Finite numbers (d,).
        - ``clips``: R > 0, one for all or one each.
        - ``share``: In [0, 1].
        - ``draws``: Uniform in [0, 1), one each: a value is rounded up with the probability of its distance
          to the step below, so that its mean is the value however small it is. 0.5 rounds to the nearest.
        """
        limits = np.asarray(clips, np.float64)
        steps = np.floor(np.clip(values, -limits, limits) * (share * self.largest / limits) + draws)
        # Rounding the product twice could end one step outside.
        whole: NDArray[np.int64] = np.clip(steps, -self.largest, self.largest).astype(np.int64)
        return whole.astype(np.uint32)

    def decode(self, total: Words, clips: NDArray[Any] | float) -> NDArray[np.float64]:
        """Return the value of a sum on the grid."""
        numbers: NDArray[np.float64] = total.view(np.int32) * (np.asarray(clips, np.float64) / self.largest)
        return numbers

    def error(self, clip: float, survivors: int, shares: float) -> float:
        """Return the largest rounding error of a weighted mean of values clipped to ``clip``.

        The sums of values and of weights are each off by at most a step per survivor. ``shares`` is the
        sum of the survivors' shares, each in (0, 1].
        """
        off = survivors / self.largest
        return 2 * off * clip / (shares - off)


@dataclass(frozen=True)
class NoisyGrid:
    """The grid of a sum with noise: multiples of C / D, added modulo 2^32, with the largest possible D.

    A member scales its update to a norm of at most C, rounds it towards zero, so that its norm is at most D
    steps (checked in exact integers), and adds discrete Gaussian noise. The noise of h members has a total
    deviation of at least z C. The sum of n members, including noise of up to 12 deviations, is within
    +-(2^31 - 1); beyond, an entry wraps, which costs accuracy but no privacy.

    ValueError if a member's noise would not have a deviation between 2 and 2^24 steps.
    """

    members: int  # n >= 1
    noisy: int  # h, 1 to n: the members whose noise is counted
    norm: float  # C > 0
    multiplier: float  # z > 0

    def __post_init__(self) -> None:
        if self.largest < 1 or not 2 <= self.deviation <= MAX_DEVIATION:
            raise ValueError(f"masked sum: multiplier must be about 1e-3 to 1e6, got {self.multiplier}")

    @cached_property
    def largest(self) -> int:
        """D, the number of steps in C."""
        n, h, z = self.members, self.noisy, self.multiplier
        fits = (_LARGEST - 13 * sqrt(n)) / (n + 12 * z * sqrt(n / h))
        return floor(min(fits, (MAX_DEVIATION - 1) * sqrt(h) / z))

    @cached_property
    def deviation(self) -> int:
        """Sigma of one member's noise in steps: the smallest integer with h sigma^2 >= (z D)^2."""
        return ceil(self.multiplier * self.largest / sqrt(self.noisy) * (1 + 1e-12))

    def encode(self, update: NDArray[np.float64], flips: CoinFlips) -> Words:
        """Return a finite update (d,), clipped to the norm C, on the grid, with noise."""
        steps = self._within(update)
        return (steps + discrete_gaussian(self.deviation, steps.size, flips)).astype(np.uint32)

    def _within(self, update: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return an update in whole steps, with a norm of at most ``largest``."""
        # Scaled by its largest entry first, because squares may overflow.
        most = float(np.abs(update).max(initial=0.0))
        if most == 0:
            return np.zeros(update.size, np.int64)
        relative: NDArray[np.float64] = update / most
        length = float(np.linalg.norm(relative))
        steps = relative * (self.largest * min(most / self.norm, 1 / length))
        while _norm(whole := np.trunc(steps).astype(np.int64)) > self.largest:
            steps *= 1 - 1e-9  # floating-point rounding exceeded the norm
        return whole

    def decode(self, total: Words) -> NDArray[np.float64]:
        """Return the value of a sum on the grid."""
        return total.view(np.int32).astype(np.float64) * (self.norm / self.largest)

    def rho(self, size: int) -> float:
        """Return rho of zero-concentrated DP for a sum of d entries when one member's update is replaced.

        Replacing it moves the sum by a norm of at most 2 D.
        """
        return concentration(2 * self.largest, self.deviation, self.noisy, size)


def _norm(whole: NDArray[np.int64]) -> int:
    """Return the exact norm of integers below 2^31, rounded up."""
    high, low = whole >> 16, whole & 0xFFFF
    square = (int(high @ high) << 32) + (int(high @ low) << 17) + int(low @ low)
    return isqrt(square - 1) + 1 if square else 0


def clips_of(arrays: Mapping[str, NDArray[Any]], plan: SumPlan) -> NDArray[np.float64]:
    """Return the clipping bound of each entry of a sum: the update (M,), weight, clipped share, metrics.

    With noise there is only the update, whose norm is clipped.
    """
    if plan.norm:
        return np.full(sum(array.size for array in arrays.values()), plan.norm)
    parts = [
        np.full(array.size, plan.clip if array.dtype.kind == "f" else COUNTER_CLIP)
        for array in arrays.values()
    ]
    return np.concatenate([*parts, [1.0, 1.0], [METRIC_CLIP, 1.0] * len(plan.metrics)])


# Masks


def pair_seed(secret: bytes, about: bytes) -> bytes:
    """Return s_uv, 16 bytes for one sum, from two members' shared secret and the sum's context."""
    return HKDFExpand(SHA256(), SEED_BYTES, _PROTOCOL + b" pair" + about).derive(secret)


def commitment(seed: bytes) -> bytes:
    """Return a 16-byte commitment to a seed, which does not reveal it."""
    return sha256(_PROTOCOL + b" commitment" + seed).digest()[:SEED_BYTES]


def _expanded(seed: bytes, size: int) -> Words:
    key = sha256(_PROTOCOL + b" mask" + seed).digest()
    # Each key is used for one mask only, so the nonce can be constant.
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(4 * size))
    return np.frombuffer(stream, "<u4").astype(np.uint32, copy=False)


@dataclass(frozen=True)
class MaskedSum:
    """One member's contribution to a sum."""

    words: Words  # y_u
    shares: Mapping[int, bytes]  # the shares for each other member, not yet sealed
    commitments: bytes  # 16 bytes per seed: the member's own first, then those with its neighbours


def masked(plan: SumPlan, own: int, numbers: Words, seeds: Mapping[int, bytes]) -> MaskedSum:
    """Mask one member's numbers; ``seeds`` are s_uv of its neighbours, see ``pair_seed``."""
    drawn = os.urandom(SEED_BYTES)
    words = numbers + _expanded(drawn, numbers.size)
    for other, seed in seeds.items():
        mask = _expanded(seed, numbers.size)
        if other > own:
            words += mask
        else:
            words -= mask
    secrets = [drawn, *(seeds[other] for other in sorted(seeds))]
    # A share's point is its member's place in the list of members, which all of them know.
    dealt = secret_shares(b"".join(secrets), plan.needed, len(plan.members))
    shares = {member: share for member, share in zip(plan.members, dealt, strict=True) if member != own}
    return MaskedSum(words, shares, b"".join(map(commitment, secrets)))


class Unmasking:
    """The server's side of one sum, once the survivors are known; ``words`` are their y_u."""

    def __init__(
        self, plan: SumPlan, about: bytes, words: Mapping[int, Words], commitments: Mapping[int, bytes]
    ) -> None:
        self.plan = plan
        self.survivors = tuple(sorted(words))
        self._words, self._commitments = words, commitments
        self._graph = plan.graph(about)
        self._points = {member: at + 1 for at, member in enumerate(plan.members)}
        # Revealed shares by the member whose seeds they are of and by the revealing member's point.
        self._shares: dict[int, dict[int, bytes]] = {survivor: {} for survivor in self.survivors}
        self.answered = 0  # number of survivors that answered

    @cached_property
    def lost(self) -> dict[int, tuple[int, ...]]:
        """Each survivor's lost neighbours, whose masks with it do not cancel."""
        return lost_neighbours(self._graph, self.survivors)

    def check(self, member: int, answer: bytes) -> list[tuple[int, bytes]]:
        """Return the shares in a survivor's answer, each with the member whose seeds they are of.

        PayloadError with reason ``bad shares`` if the answer has the wrong size.
        """
        found, at = [], 0
        for other in self.survivors:
            if other == member:
                continue
            size = SEED_BYTES * (1 + len(self.lost[other]))
            opened, share = answer[at : at + 1], answer[at + 1 : at + 1 + size]
            at += 1 + size
            if opened == b"\x01" and len(share) == size:
                found.append((other, share))
        if at != len(answer):
            raise PayloadError("bad shares", f"{len(answer)} bytes, expected {at}")
        return found

    def take(self, member: int, found: Iterable[tuple[int, bytes]]) -> None:
        """Store a survivor's checked answer."""
        self.answered += 1
        for other, share in found:
            self._shares[other][self._points[member]] = share

    def total(self) -> tuple[Words | None, list[int]]:
        """Return the sum of the survivors' numbers, and the members whose seeds could not be reconstructed.

        Commitments detect wrong shares, and other shares are then tried. Without all seeds there is no sum.
        """
        bad, masks = [], []
        for survivor in self.survivors:
            seeds = self._seeds(survivor)
            if seeds is None:
                bad.append(survivor)
                continue
            masks.append((-1, seeds[0]))
            for other, seed in zip(self.lost[survivor], seeds[1:], strict=True):
                masks.append((-1 if other > survivor else 1, seed))
        if bad:
            return None, bad
        total = np.zeros_like(next(iter(self._words.values())))
        for words in self._words.values():
            total += words
        for sign, seed in masks:
            mask = _expanded(seed, total.size)
            total = total + mask if sign > 0 else total - mask
        return total, []

    def _seeds(self, survivor: int) -> list[bytes] | None:
        """Return a survivor's own seed and those with its lost neighbours; None if that is impossible."""
        shares, needed = sorted(self._shares[survivor].items()), self.plan.needed
        if len(shares) < needed:
            return None
        places = [0, *(1 + self._graph[survivor].index(other) for other in self.lost[survivor])]
        known = self._commitments[survivor]
        due = [known[SEED_BYTES * place : SEED_BYTES * (place + 1)] for place in places]
        for start in range(len(shares) if len(shares) > needed else 1):
            chosen = [shares[(start + i) % len(shares)] for i in range(needed)]
            secret = combined_shares([point for point, _ in chosen], [share for _, share in chosen])
            seeds = [secret[i : i + SEED_BYTES] for i in range(0, len(secret), SEED_BYTES)]
            if [commitment(seed) for seed in seeds] == due:
                return seeds
        return None


def lost_neighbours(
    graph: Mapping[int, Sequence[int]], survivors: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Return each survivor's neighbours that did not survive."""
    alive = frozenset(survivors)
    return {one: tuple(other for other in graph[one] if other not in alive) for one in survivors}


def connected_survivors(
    plan: SumPlan, graph: Mapping[int, Sequence[int]], arrived: Iterable[int]
) -> tuple[int, ...]:
    """Return the members that sent numbers and lost at most ``plan.most_lost`` neighbours."""
    alive = set(arrived)
    while alive:
        gone = {one: sum(other not in alive for other in graph[one]) for one in alive}
        worst = max(sorted(alive), key=lambda one: gone[one])
        if gone[worst] <= plan.most_lost:
            break
        alive.discard(worst)
    return tuple(sorted(alive))


def revealed(
    plan: SumPlan,
    own: int,
    graph: Mapping[int, Sequence[int]],
    survivors: Sequence[int],
    opened: Mapping[int, bytes],
) -> bytes:
    """Return the shares that a survivor reveals: for each other survivor v, of b_v and of s_vu of the lost u.

    A member never reveals both kinds for one member: for a lost member only seeds that it shares with
    survivors, and for survivors only their own seed and those that they share with lost members.

    - ``survivors``: The survivors according to the server, ascending.
    - ``opened``: The survivors' shares that could be opened.

    ValueError if ``survivors`` is not such a list, lacks this node, or has fewer than the threshold.
    """
    alive = frozenset(survivors)
    if list(survivors) != sorted(alive) or not alive <= set(plan.members):
        raise ValueError("survivors are no ascending list of members")
    if own not in alive:
        raise ValueError("this node is not among the survivors")
    if len(alive) < plan.threshold:
        raise ValueError(f"a sum must have at least {plan.threshold} survivors, got {len(alive)}")
    lost, parts = lost_neighbours(graph, survivors), []
    if any(len(gone) > plan.most_lost for gone in lost.values()):
        raise ValueError(f"more than {plan.most_lost} neighbours of a survivor are lost")
    size = SEED_BYTES * (1 + plan.neighbours)
    for other in survivors:
        if other == own:
            continue
        share = opened.get(other, b"")
        places = [0, *(1 + graph[other].index(one) for one in lost[other])]
        if len(share) == size:
            seeds = [share[SEED_BYTES * place : SEED_BYTES * (place + 1)] for place in places]
            parts.append(b"\x01" + b"".join(seeds))
        else:
            parts.append(bytes(1 + SEED_BYTES * len(places)))
    return b"".join(parts)
