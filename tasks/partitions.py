"""Partition schemes of a training set by name, for example ``"dirichlet(0.5)"``.

``dirichlet`` is the partition of Sun et al., Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data, experiments. A draw that leaves a node without samples is repeated as a whole:
the paper does not say what an empty node would train on. ``capped-dirichlet`` and ``labels`` are Non-IID-1
and Non-IID-2 of Li et al., The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient
Federated Learning (FedMUD), experiments.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from .checks import at_least, check_sources, described
from .flower_partitions import PREFIX, named_partitioner, parts_of

Indices = NDArray[np.int64]

_ATTEMPTS = 1_000
_LEAST_ALPHA, _MOST_ALPHA = 1e-9, 1e9
# Random streams are keyed (seed, attempt, 0, purpose), as in the whole suite; 2 is the purpose "partition".
_PURPOSE = 2
# And 22 the purpose "test shares".
_PURPOSE_OF_OTHERS = 22
_WITH_REPLACEMENT = "with-replacement"
_SOURCE = "source"


@dataclass(frozen=True)
class Scheme:
    """A parsed partition scheme.

    Parameters
    ----------
    name : str
        One of ``SCHEMES``.
    argument : float or int or None
        The number in parentheses; None if the scheme takes none.
    """

    name: str
    argument: float | int | None

    def __str__(self) -> str:
        return self.name if self.argument is None else f"{self.name}({self.argument})"


@dataclass(frozen=True)
class DrawnParts(Sequence[Indices]):
    """Partitions of ``num_samples`` samples each, drawn on access and not kept.

    Parameters
    ----------
    most : int
        Samples of the training set, >= 1.
    num_partitions, num_samples : int
        Number of partitions, and samples of each, >= 1.
    seed : int
        Keys the random streams, one per partition.
    """

    most: int
    num_partitions: int
    num_samples: int
    seed: int

    def __len__(self) -> int:
        return self.num_partitions

    @overload
    def __getitem__(self, at: int) -> Indices: ...
    @overload
    def __getitem__(self, at: slice) -> list[Indices]: ...
    def __getitem__(self, at: int | slice) -> Indices | list[Indices]:
        """Return a partition's sample indices, ascending, possibly with repetitions."""
        partitions = range(self.num_partitions)[at]
        if isinstance(partitions, range):
            return [self[i] for i in partitions]
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, 0, partitions, _PURPOSE]))
        return np.sort(rng.integers(self.most, size=self.num_samples))


def partition(
    scheme: str,
    labels: NDArray[Any],
    num_partitions: int,
    seed: int,
    sources: NDArray[Any] | None = None,
) -> Sequence[Indices]:
    """Assign samples to non-empty partitions, each to exactly one except with replacement.

    Parameters
    ----------
    scheme : str
        - ``"iid"``: a random permutation in parts whose sizes differ by at most one.
        - ``"dirichlet(alpha)"``, alpha > 0: for each class, the proportions of the partitions are drawn
          from a symmetric Dirichlet(alpha), and the shuffled class is split at floor(cumsum(p) * n_class).
          Small alpha: few classes per partition, unequal sizes; large alpha: close to ``"iid"``. A draw that
          leaves a partition empty is repeated with the next sub-seed, so the result is the Dirichlet
          scheme conditioned on no partition being empty; after 1,000 draws it is an error.
        - ``"capped-dirichlet(alpha)"``, alpha > 0: the same, but a partition that already has at least the
          mean number of samples gets none of the following classes, and the draw is repeated until the
          smallest has 10 samples: see ``capped_dirichlet``.
        - ``"shards(k)"``, k >= 1: samples sorted by label are split into k * num_partitions chunks whose
          sizes differ by at most one; each partition receives k of them at random.
        - ``"ring(k)"``, 1 <= k <= number of classes C: partition i has the classes i, i+1, …, i+k-1
          modulo C. The partitions of a class share it equally; the seed determines who gets which samples.
        - ``"labels(k)"``, 1 <= k <= number of classes: each partition has k classes, the numbers of
          partitions of any two classes differ by at most one, and the partitions of a class share it
          equally. Each partition in turn takes the least assigned classes, with ties broken at random: a
          stable order would give only a few distinct sets of classes.
        - ``"source"``: each partition has samples of one source. Partitions are given to sources one by one,
          to that with the most samples per partition so far: sources have partitions in proportion to their
          samples, at least one each. The partitions of a source follow each other, sources ascend, and the
          parts of one source are random and differ in size by at most one.
        - ``"source(share)"``, 0 < share <= 1: the same, but a partition keeps that share of its samples,
          rounded, and all others are shuffled together and split again, to each partition as many as it gave.
        - ``"with-replacement(n)"``, n >= 1: each partition is n samples drawn uniformly with replacement,
          independently and on access: for federations with more nodes than samples.
        - ``"flwr_datasets:NAME(key=value, ...)"``: a partitioner of flwr-datasets, see ``parts_of``.
    labels : ndarray of int, (N,)
        The training labels.
    num_partitions : int
        Number of partitions, 1..N; unlimited with replacement.
    seed : int
        The run's seed, >= 0. The same seed gives the same partition.
    sources : ndarray of str or integers, (N,), or None (default: None)
        The source of each sample, for ``"source"``; None if unknown.

    Returns
    -------
    sequence of ndarray of int64
        The sample indices of each partition, ascending.

    Raises
    ------
    ValueError
        If an argument is out of range, the scheme cannot give every partition a sample, or ``"source"`` has
        no sources or more than there are partitions.
    """
    labels = np.asarray(labels)
    if scheme.startswith(PREFIX):
        _check_arguments(labels, num_partitions, seed, drawn=False)
        return parts_of(scheme, labels, num_partitions, seed)
    parsed = parse_scheme(scheme)
    _check_arguments(labels, num_partitions, seed, drawn=parsed.name == _WITH_REPLACEMENT)
    if parsed.name == _WITH_REPLACEMENT:
        assert isinstance(parsed.argument, int)
        return DrawnParts(labels.size, num_partitions, parsed.argument, seed)
    deal, smallest = _DEALS[parsed.name], _SMALLEST.get(parsed.name, 1)
    dealt_by = labels if parsed.name != _SOURCE else _sources(scheme, sources, labels.size)
    for attempt in range(_ATTEMPTS if parsed.name in _REDRAWN else 1):
        rng = np.random.default_rng(np.random.SeedSequence([seed, attempt, 0, _PURPOSE]))
        parts = deal(dealt_by, num_partitions, parsed.argument, rng)
        if all(part.size >= smallest for part in parts):
            return [np.sort(part).astype(np.int64) for part in parts]
    lack = "no sample" if smallest == 1 else f"fewer than {smallest} samples"
    short = sum(part.size < smallest for part in parts)
    raise ValueError(
        f"partition = {scheme!r}: {short} of {num_partitions} partitions of {labels.size} samples have "
        f"{lack} (last of {attempt + 1} draws); use fewer partitions or a less skewed scheme"
    )


def deal_alike(
    parts: Sequence[Indices], labels: NDArray[Any], others: NDArray[Any], seed: int
) -> list[Indices]:
    """Assign other samples to the parts of a partition in the proportions in which these have each class.

    The shuffled samples of a class are split at floor(cumsum(n) / sum(n) * m), for the n samples of the class
    that the parts have, and m others. Each is in one part, except those of classes of which no part has a
    sample. A part that would have none is given one that another has too, of its most frequent class among
    the others' classes; it stays empty if it has none of these.

    Parameters
    ----------
    parts : sequence of ndarray of int64
        The sample indices of each part.
    labels, others : ndarray of int, (N,) and (M,)
        The labels of the partitioned samples, and of the others.
    seed : int
        The run's seed, >= 0.

    Returns
    -------
    list of ndarray of int64
        The indices of each part's others, ascending.
    """
    classes, numbers = np.unique(labels, return_inverse=True)
    counts = np.stack([np.bincount(numbers[part], minlength=classes.size) for part in parts])
    classes, counts = classes[counts.any(axis=0)], counts[:, counts.any(axis=0)]
    rng = np.random.default_rng(np.random.SeedSequence([seed, 0, 0, _PURPOSE_OF_OTHERS]))
    members = [rng.permutation(np.flatnonzero(others == label)) for label in classes]
    pieces: list[list[Indices]] = [[] for _ in parts]
    for of, held in zip(members, counts.T, strict=True):
        cuts = np.cumsum(held)[:-1] * of.size // held.sum()
        for own, piece in zip(pieces, np.split(of, cuts), strict=True):
            own.append(piece)
    shares = [np.concatenate(own) for own in pieces]
    there = np.array([of.size > 0 for of in members])
    for i, share in enumerate(shares):
        if not share.size and (own_there := counts[i] * there).any():
            shares[i] = members[int(own_there.argmax())][:1]
    return [np.sort(share).astype(np.int64) for share in shares]


def capped_dirichlet(
    labels: NDArray[Any], num_partitions: int, alpha: float, rng: np.random.Generator | np.random.RandomState
) -> list[Indices]:
    """Return one draw of the capped Dirichlet scheme: parts of any size, in random order.

    For each class in ascending order: shuffle its samples, draw proportions from Dirichlet(alpha), set them
    to 0 for parts that already have at least the mean number of samples, renormalise, and split at the floors
    of their cumulative sums.

    Parameters
    ----------
    labels : ndarray of int, (N,)
        The training labels.
    num_partitions : int
        Number of parts, >= 1.
    alpha : float
        The distribution's parameter, > 0.
    rng : Generator or RandomState
        The source of the draws: for each class its shuffle, then its proportions.
    """
    parts: list[Indices] = [np.empty(0, np.int64) for _ in range(num_partitions)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        p = rng.dirichlet(np.full(num_partitions, alpha))
        is_open = np.array([part.size * num_partitions < labels.size for part in parts])
        p = p * is_open if (p * is_open).any() else is_open  # a tiny alpha may draw only zeros
        cumulated = np.cumsum(p)
        # Divided by its own last entry, so that rounding leaves no remainder for a full last part.
        cuts = np.floor(cumulated[:-1] / cumulated[-1] * members.size).astype(np.int64)
        pieces = np.split(members, cuts)
        parts = [np.concatenate(pair) for pair in zip(parts, pieces, strict=True)]
    return parts


def parse_scheme(scheme: str) -> Scheme:
    """Return the scheme's name and argument.

    Raises
    ------
    ValueError
        If the name is unknown, or the argument is missing, superfluous or out of range.
    """
    match = re.fullmatch(r"\s*([\w-]+)\s*(?:\(([^()]*)\))?\s*", scheme)
    name, text = match.groups() if match else (None, None)
    if name not in _ARGUMENTS:
        raise ValueError(f"partition must be one of {', '.join(_FORMS)}, got {scheme!r}")
    return Scheme(name, _ARGUMENTS[name](scheme, text))


def validate_scheme(scheme: str) -> None:
    """Raise ``ValueError`` if a scheme cannot be parsed; for checks of a configuration."""
    if scheme.startswith(PREFIX):
        named_partitioner(scheme)
    else:
        parse_scheme(scheme)


def _no_argument(scheme: str, text: str | None) -> None:
    if text is not None:
        raise ValueError(f"partition must be 'iid' without an argument, got {scheme!r}")


def _concentration(scheme: str, text: str | None) -> float:
    try:
        alpha = float(text or "")
    except ValueError:
        alpha = math.nan
    # Beyond these, Gamma variates in float64 are indistinguishable.
    if not _LEAST_ALPHA <= alpha <= _MOST_ALPHA:
        name = scheme.partition("(")[0].strip()
        raise ValueError(
            f"partition must have a number alpha > 0, '{name}(0.5)' for example, from {_LEAST_ALPHA:g} to "
            f"{_MOST_ALPHA:g}, got {scheme!r}"
        )
    return alpha


def _share(scheme: str, text: str | None) -> float | None:
    try:
        share = None if text is None else float(text)
    except ValueError:
        share = math.nan
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"partition must have a share in (0, 1], 'source(0.7)' for example, got {scheme!r}")
    return share


def _count(scheme: str, text: str | None) -> int:
    text = (text or "").strip()
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < 1:
        name = scheme.partition("(")[0].strip()
        raise ValueError(f"partition must have an integer k >= 1, '{name}(2)' for example, got {scheme!r}")
    return int(text)


def _check_arguments(labels: NDArray[Any], num_partitions: int, seed: int, *, drawn: bool) -> None:
    if labels.ndim != 1 or not labels.size or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"labels must be a non-empty array of integers (N,), got {described(labels)}")
    at_least(1, num_partitions=num_partitions)
    at_least(0, seed=seed)
    if not drawn and num_partitions > labels.size:
        raise ValueError(
            f"num_partitions must be from 1 to {labels.size} (one sample each), got {num_partitions}; "
            f"partition = '{_WITH_REPLACEMENT}(n)' has no such limit"
        )


def _sources(scheme: str, sources: NDArray[Any] | None, count: int) -> NDArray[np.int64]:
    """Return the number of each sample's source, sources in ascending order."""
    if sources is None:
        raise ValueError(f"partition = {scheme!r}: the data set has no sources (Dataset's sources)")
    check_sources("sources", sources, count)
    numbers: NDArray[np.int64] = np.unique(sources, return_inverse=True)[1]
    return numbers


def _deal_iid(
    labels: NDArray[Any], num_partitions: int, _argument: None, rng: np.random.Generator
) -> list[Indices]:
    return np.array_split(rng.permutation(labels.size), num_partitions)


def _deal_dirichlet(
    labels: NDArray[Any], num_partitions: int, alpha: float, rng: np.random.Generator
) -> list[Indices]:
    shares: list[list[Indices]] = [[] for _ in range(num_partitions)]
    for label in np.unique(labels):
        p = rng.dirichlet(np.full(num_partitions, alpha))
        members = rng.permutation(np.flatnonzero(labels == label))
        cuts = np.floor(np.cumsum(p)[:-1] * members.size).astype(np.int64)
        for share, piece in zip(shares, np.split(members, cuts), strict=True):
            share.append(piece)
    return [np.concatenate(share) for share in shares]


def _deal_shards(
    labels: NDArray[Any], num_partitions: int, k: int, rng: np.random.Generator
) -> list[Indices]:
    if k * num_partitions > labels.size:
        raise ValueError(
            f"partition = 'shards({k})' must give at most {labels.size} shards, one per sample, got {k} * "
            f"{num_partitions}"
        )
    # Shuffled first, so that the seed decides which samples of a label are in which shard.
    shuffled = rng.permutation(labels.size)
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    chunks = np.array_split(by_label, k * num_partitions)
    hands = rng.permutation(k * num_partitions).reshape(num_partitions, k)
    return [np.concatenate([chunks[chunk] for chunk in hand]) for hand in hands]


def _deal_labels(
    labels: NDArray[Any], num_partitions: int, k: int, rng: np.random.Generator
) -> list[Indices]:
    classes = _classes("labels", labels, k)
    if k * num_partitions < classes.size:
        raise ValueError(
            f"partition = 'labels({k})': {num_partitions} partitions of {k} classes cannot hold all "
            f"{classes.size} classes; k * num_partitions must be at least {classes.size}"
        )
    return _deal_classes(labels, classes, _holders(classes.size, num_partitions, k, rng), num_partitions, rng)


def _deal_ring(labels: NDArray[Any], num_partitions: int, k: int, rng: np.random.Generator) -> list[Indices]:
    classes = _classes("ring", labels, k)
    if num_partitions + k - 1 < classes.size:
        raise ValueError(
            f"partition = 'ring({k})': {num_partitions} partitions hold the first {num_partitions + k - 1} "
            f"of {classes.size} classes; num_partitions must be at least {classes.size - k + 1}"
        )
    # By distance: with as many partitions as classes, partition c - j gets piece j of class c.
    near = np.arange(num_partitions)
    holders = []
    for label in range(classes.size):
        distance = (label - near) % classes.size
        holders.append(near[np.lexsort((near, distance))][: int(np.sum(distance < k))])
    return _deal_classes(labels, classes, holders, num_partitions, rng)


def _deal_sources(
    sources: NDArray[np.int64], num_partitions: int, share: float | None, rng: np.random.Generator
) -> list[Indices]:
    samples = np.bincount(sources)
    if samples.size > num_partitions:
        raise ValueError(
            f"partition = '{Scheme(_SOURCE, share)}': num_partitions must be at least {samples.size}, the "
            f"number of sources, got {num_partitions}"
        )
    holders = np.ones(samples.size, np.int64)
    for _ in range(num_partitions - samples.size):
        holders[np.argmax(samples / holders)] += 1
    parts = [
        part
        for source, number in enumerate(holders)
        for part in np.array_split(rng.permutation(np.flatnonzero(sources == source)), number)
    ]
    if share is None:
        return parts
    kept = [round(share * part.size) for part in parts]
    others = rng.permutation(np.concatenate([part[k:] for part, k in zip(parts, kept, strict=True)]))
    ends = np.cumsum([part.size - k for part, k in zip(parts, kept, strict=True)])
    pieces = np.split(others, ends[:-1])
    return [np.concatenate([part[:k], piece]) for part, k, piece in zip(parts, kept, pieces, strict=True)]


def _classes(name: str, labels: NDArray[Any], k: int) -> NDArray[Any]:
    classes = np.unique(labels)
    if k > classes.size:
        raise ValueError(f"partition = '{name}({k})': k must be in 1..{classes.size}, the number of classes")
    return classes


def _deal_classes(
    labels: NDArray[Any],
    classes: NDArray[Any],
    holders_of: Sequence[NDArray[np.int64]],
    num_partitions: int,
    rng: np.random.Generator,
) -> list[Indices]:
    """Divide each class equally among its partitions."""
    shares: list[list[Indices]] = [[] for _ in range(num_partitions)]
    for label, holders in zip(classes, holders_of, strict=True):
        members = rng.permutation(np.flatnonzero(labels == label))
        for holder, piece in zip(holders, np.array_split(members, len(holders)), strict=True):
            shares[holder].append(piece)
    return [np.concatenate(share) for share in shares]


def _holders(
    num_classes: int, num_partitions: int, k: int, rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Return the partitions of each class."""
    holds = np.zeros((num_partitions, num_classes), bool)
    for holder in range(num_partitions):
        # The k classes with the fewest partitions, ties at random: counts never differ by more than one.
        tie_break = rng.permutation(num_classes)
        holds[holder, np.lexsort((tie_break, holds.sum(axis=0)))[:k]] = True
    # In random order, because array_split gives its larger pieces to the first.
    return [rng.permutation(np.flatnonzero(column)) for column in holds.T]


_ARGUMENTS: dict[str, Callable[[str, str | None], float | int | None]] = {
    "iid": _no_argument,
    "dirichlet": _concentration,
    "shards": _count,
    "labels": _count,
    "ring": _count,
    "capped-dirichlet": _concentration,
    _SOURCE: _share,
    _WITH_REPLACEMENT: _count,
}
_DEALS: dict[str, Callable[..., list[Indices]]] = {
    "iid": _deal_iid,
    "dirichlet": _deal_dirichlet,
    "shards": _deal_shards,
    "labels": _deal_labels,
    "ring": _deal_ring,
    "capped-dirichlet": capped_dirichlet,
    _SOURCE: _deal_sources,
}
_FORMS = (
    "iid",
    "dirichlet(alpha)",
    "shards(k)",
    "labels(k)",
    "ring(k)",
    "capped-dirichlet(alpha)",
    _SOURCE,
    f"{_SOURCE}(share)",
    f"{_WITH_REPLACEMENT}(n)",
    f"{PREFIX}NAME(key=value, ...)",
)
# Schemes with random sizes, for which another draw may succeed.
_REDRAWN = {"dirichlet", "capped-dirichlet"}
# The least samples of a partition, if more than one.
_SMALLEST = {"capped-dirichlet": 10}

SCHEMES = tuple(_ARGUMENTS)
