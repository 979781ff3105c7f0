"""Partitions of a vertical data set's people to hospitals and devices, and matching of two parties' rows.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", experiments. The paper does not say which pairs of
classes dominate a group, nor how skewed its MIMIC-III split is: these choices are ours.
"""

import re
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checks import at_least

Indices = NDArray[np.int64]
Ids = NDArray[np.str_]

GROUP_SCHEMES = ("iid", "pairs", "rates", "sites")

# Random streams are keyed (seed, round, 0, purpose), as in the whole suite; 2 is the purpose "partition".
_PURPOSE = 2
# The most samples of a class, and the largest concentration; the smallest is its reciprocal.
_MOST = 1e9


def group_split(
    scheme: str,
    labels: NDArray[Any],
    num_groups: int,
    seed: int,
    people: Ids | None = None,
    sites: Ids | None = None,
) -> list[Indices]:
    """Return the training samples of each group, K_m each, in random order; a sample is in at most one group.

    If people have several samples, ``iid`` and ``sites`` assign people, each to one group, so that groups
    have equally many people and about as many samples; ``pairs`` and ``rates`` always assign samples.

    Parameters
    ----------
    scheme : str
        - ``"iid"``: at random. K_m = floor(N / M); the remainder is left out, as in the paper.
        - ``"pairs(n_major, n_minor)"``: n_major samples, an even number, of two classes and n_minor of the
          others; K_m = n_major + n_minor. The paper's splits are pairs(700, 220) for ESR and pairs(3000, 458)
          for OrganAMNIST. OrganAMNIST's current file has 20 fewer images, so use pairs(3000, 456). With as
          many groups as pairs of classes, each pair has one group; otherwise a group gets the class with
          the most and the class with the fewest samples left. An exhausted class is replaced by what is
          left.
        - ``"rates(concentration)"``, > 0: a group's class rates are drawn from a Dirichlet around the overall
          rates (small: skewed, large: iid); every group has a sample of each class that has enough. For the
          paper's MIMIC-III split, which it does not give; 1 is our guess. K_m = floor(N / M).
        - ``"sites"``: a group's people are from one site, and a site's people are assigned to its groups at
          random. Each site has at least one group, and further groups go to the site with the most people
          per group: two sites of equal size have half of the groups each. K_m is the floor of a site's
          people over its groups.
    labels : ndarray of int, (N,)
        The training labels.
    num_groups : int
        M, 1..N.
    seed : int
        The run's seed, >= 0. The same seed gives the same split.
    people : ndarray of str or None (default: None)
        The person of each sample, (N,); None: everyone has one sample.
    sites : ndarray of str or None (default: None)
        The site of each sample, (N,); required by ``sites``. A person is from one site.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """
    labels = np.asarray(labels)
    name, arguments = _parse(scheme)
    if labels.ndim != 1 or not labels.size:
        raise ValueError(f"labels must have the shape (N,) with N >= 1, got {labels.shape}")
    at_least(1, **{"num-groups": num_groups})
    at_least(0, seed=seed)
    if num_groups > labels.size:
        raise ValueError(
            f"num-groups must be from 1 to {labels.size}, the number of samples, got {num_groups}"
        )
    for key, names in (("people", people), ("sites", sites)):
        if names is not None and names.shape != labels.shape:
            raise ValueError(
                f"{key} must have the shape {labels.shape}, a name for each label, got {names.shape}"
            )
    rng = np.random.default_rng(np.random.SeedSequence([seed, 0, 0, _PURPOSE]))
    if name == "sites":
        groups = _of_sites(sites, people, labels.size, num_groups, rng)
    elif name == "iid" and people is not None:
        groups = _whole_people(np.arange(labels.size), people, num_groups, rng)
    else:
        groups = _groups(scheme, name, arguments, labels, num_groups, rng)
    return groups


def match_ids(wanted: Ids | Sequence[str], held: Ids | Sequence[str]) -> Indices:
    """Return a party's rows of the wanted samples: ``held[match_ids(wanted, held)] == wanted``.

    Parameters
    ----------
    wanted : ndarray of str, (n,)
        The ids of a batch from the other party.
    held : ndarray of str, (N,)
        The ids of the party's own rows, distinct.

    Raises
    ------
    ValueError
        If the party lacks a wanted sample, or has one twice.
    """
    place = {str(name): number for number, name in enumerate(held)}
    if len(place) < len(held):
        raise ValueError(f"held must have each id once, got {len(held) - len(place)} twice")
    lacking = [str(name) for name in wanted if str(name) not in place]
    if lacking:
        raise ValueError(
            f"wanted must be among the {len(held)} ids held, got {lacking[0]!r} and {len(lacking) - 1} more"
        )
    return np.array([place[str(name)] for name in wanted], np.int64)


def validate_group_scheme(scheme: str) -> None:
    """Raise ValueError if a scheme cannot be parsed; for checks of a configuration."""
    _parse(scheme)


def _parse(scheme: str) -> tuple[str, list[float]]:
    """Return a scheme's name and numbers."""
    found = re.fullmatch(r"\s*([a-z]+)\s*(?:\(([^()]*)\))?\s*", scheme)
    valid = "iid, pairs(n_major, n_minor) with n_major even, rates(concentration), or sites"
    error = ValueError(f"partition must be {valid}, got {scheme!r}")
    if not found or found[1] not in GROUP_SCHEMES:
        raise error
    try:
        numbers = [float(number) for number in found[2].split(",")] if found[2] else []
    except ValueError:
        raise error from None
    whole = all(0 <= number <= _MOST and number == int(number) for number in numbers if np.isfinite(number))
    fits = {
        "iid": not numbers,
        "sites": not numbers,
        "pairs": len(numbers) == 2
        and np.isfinite(numbers).all()
        and whole
        and numbers[0] >= 2
        and numbers[0] % 2 == 0,
        "rates": len(numbers) == 1 and 1 / _MOST <= numbers[0] <= _MOST,
    }
    if not fits[found[1]]:
        raise error
    return found[1], numbers


def _groups(
    scheme: str, name: str, numbers: list[float], labels: NDArray[Any], M: int, rng: np.random.Generator
) -> list[Indices]:
    K = labels.size // M
    if name == "iid":
        return list(rng.permutation(labels.size)[: M * K].reshape(M, K))
    classes, totals = np.unique(labels, return_counts=True)
    if name == "rates":
        counts = _rate_counts(totals, M, K, numbers[0], rng)
    else:
        n_major, n_minor = int(numbers[0]), int(numbers[1])
        if M * (n_major + n_minor) > labels.size or classes.size < 2:
            raise ValueError(
                f"partition must take at most {labels.size} samples in all, of at least 2 classes (there "
                f"are {classes.size}), got {scheme!r}: {M} groups of {n_major + n_minor} samples"
            )
        counts = _pair_counts(totals, M, n_major, n_minor)
    return _dealt(labels, classes, counts, rng)


def _of_sites(
    sites: Ids | None, people: Ids | None, count: int, M: int, rng: np.random.Generator
) -> list[Indices]:
    """Return groups of people from one site, sorted by the site's name."""
    if sites is None:
        raise ValueError("partition must not be 'sites' with data that do not tell their people's sites")
    people = np.arange(count).astype(str) if people is None else people
    names, site = np.unique(sites, return_inverse=True)
    if names.size > M:
        raise ValueError(
            f"num-groups must be at least {names.size}, the number of sites, with partition = 'sites', got "
            f"{M}"
        )
    members = [np.flatnonzero(site == number) for number in range(names.size)]
    sizes = np.array([len(set(people[own].tolist())) for own in members])
    if sizes.sum() > len(set(people.tolist())):
        raise ValueError("people must be from one site each, got someone from two")
    shares = np.ones(names.size, np.int64)
    for _ in range(M - names.size):
        shares[(sizes / shares).argmax()] += 1
    return [
        group
        for own, share in zip(members, shares, strict=True)
        for group in _whole_people(own, people[own], int(share), rng)
    ]


def _whole_people(rows: Indices, people: Ids, M: int, rng: np.random.Generator) -> list[Indices]:
    """Assign the people of these rows, each with all their samples, to groups of equally many people."""
    names, person = np.unique(people, return_inverse=True)
    K = names.size // M
    if not K:
        raise ValueError(f"num-groups must be at most {names.size}, the number of people, got {M}")
    # The group of each person; -1 for the remainder.
    group = np.full(names.size, -1)
    group[rng.permutation(names.size)[: M * K]] = np.repeat(np.arange(M), K)
    return [rng.permutation(rows[group[person] == m]) for m in range(M)]


def _dealt(
    labels: NDArray[Any], classes: NDArray[Any], counts: Indices, rng: np.random.Generator
) -> list[Indices]:
    """Return each group's samples, drawn at random: counts[m, c] of class c."""
    cuts = [
        np.split(rng.permutation(np.flatnonzero(labels == label)), taken.cumsum())[:-1]
        for label, taken in zip(classes, counts.T, strict=True)
    ]
    return [rng.permutation(np.concatenate(pieces)) for pieces in zip(*cuts, strict=True)]


def _pair_counts(totals: Indices, M: int, n_major: int, n_minor: int) -> Indices:
    """Return the numbers of samples (groups, classes) such that two classes dominate each group."""
    C = totals.size
    counts = np.zeros((M, C), np.int64)
    every_pair = list(combinations(range(C), 2))
    if C > 2 and len(every_pair) == M and (C - 1) * (n_major // 2) <= totals.min():
        pairs = every_pair
        for m, pair in enumerate(pairs):
            counts[m, list(pair)] = n_major // 2
        even = counts + _even_minors(every_pair, C, n_minor)
        if (even.sum(axis=0) <= totals).all():
            return even
    else:
        pairs = [_take_pair(counts, m, totals, n_major) for m in range(M)]
    _fill(counts, pairs, totals, n_major + n_minor)
    return counts


def _even_minors(pairs: Sequence[tuple[int, int]], C: int, n_minor: int) -> Indices:
    """Return n_minor samples of the classes outside each pair, with counts that differ by at most one.

    The odd samples rotate with the pair: for odd C every class gets the same total over all pairs, so that
    ESR's classes of 1,840 are used up exactly.
    """
    minors = np.zeros((len(pairs), C), np.int64)
    for m, (a, b) in enumerate(pairs):
        first, step = (a, b - a) if b - a <= C // 2 else (b, a + C - b)
        outside = [(first + turn) % C for turn in range(1, C) if turn != step]
        minors[m, outside] = [
            n_minor // len(outside) + (k < n_minor % len(outside)) for k in range(len(outside))
        ]
    return minors


def _take_pair(counts: Indices, m: int, totals: Indices, n_major: int) -> tuple[int, int]:
    left = totals - counts.sum(axis=0)
    common = int(left.argmax())
    others = [c for c in np.flatnonzero(left) if c != common] or [(common + 1) % left.size]
    rare = int(min(others, key=lambda c: left[c]))
    counts[m, rare] = min(n_major // 2, left[rare])
    counts[m, common] = min(n_major - counts[m, rare], left[common])
    return rare, common


def _fill(counts: Indices, pairs: Sequence[tuple[int, int]], totals: Indices, K: int) -> None:
    """Fill the groups in turn, one sample each, from what is left of the classes outside the pair.

    The divisor (1 + the group's samples of the class) spreads a group over the classes.
    """
    left = totals - counts.sum(axis=0)
    outside = np.ones(counts.shape, bool)
    outside[np.arange(len(pairs))[:, None], np.array(pairs)] = False
    while (open_groups := np.flatnonzero(counts.sum(axis=1) < K)).size:
        for m in open_groups:
            wanted = left * outside[m]
            c = int(((wanted if wanted.any() else left) / (1 + counts[m])).argmax())
            counts[m, c] += 1
            left[c] -= 1


def _rate_counts(totals: Indices, M: int, K: int, concentration: float, rng: np.random.Generator) -> Indices:
    """Return the numbers of samples (groups, classes), with rates drawn around the overall rates."""
    least = ((totals >= M) & (totals.size <= K)).astype(np.int64)
    counts, left = np.zeros((M, totals.size), np.int64), totals.copy()
    for m in range(M):
        room = left - (M - m - 1) * least
        rates = rng.dirichlet(concentration * totals / totals.sum())
        counts[m] = np.clip((rates * K).astype(np.int64), least, room)
        # Correct for rounding and exhausted classes: add where most is left, remove where most was taken.
        while (lack := K - counts[m].sum()) > 0:
            c = (room - counts[m]).argmax()
            counts[m, c] += min(lack, room[c] - counts[m, c])
        while (lack := K - counts[m].sum()) < 0:
            counts[m, (counts[m] - least).argmax()] -= 1
        left = left - counts[m]
    # Shuffled, because the last groups got what the others left.
    return rng.permutation(counts)
