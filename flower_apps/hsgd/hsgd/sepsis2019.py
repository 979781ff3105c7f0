"""The PhysioNet/CinC Challenge 2019: hourly data of 40,000 stays in intensive care, with the onset of sepsis.

M. Reyna et al., "Early Prediction of Sepsis From Clinical Data: The PhysioNet/Computing in Cardiology
Challenge 2019", Critical Care Medicine 48(2): the label of an hour, and the utility of predicting it. There
are two tasks, with vital signs on the device and laboratory values at the hospital: matched series of 48
hours (``read_sepsis2019``), and hours sampled from all stays, as summaries of the measurements until then
(``read_sepsis2019_windows``). Files are parsed once and cached beside them.
"""

import hashlib
import os
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hedgerow.tasks.tabular import Table

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Indices = NDArray[np.int64]

SEPSIS_HOURS = 48
SEPSIS_LEAST_HOURS = 6
WINDOW_HOURS = 12
WINDOW_STRIDE = 8

_PARTS = ("set_A", "set_B")
_COLUMNS = 41
_VITALS, _MEASURED = 8, 34  # the first columns: vital signs, then laboratory values
_AGE, _GENDER, _UNIT1, _UNIT2, _ADMITTED = range(_MEASURED, 39)
_LABEL = -1
_MATCHING_SEED = 2019
_WINDOW_SEED = 20_190
_TEST_SHARE = 0.2

# Values with a long upper tail, which are summarised as logarithms.
# fmt: off
_LOGGED = frozenset({
    "AST", "BUN", "Alkalinephos", "Creatinine", "Bilirubin_direct", "Glucose", "Lactate", "Phosphate",
    "Bilirubin_total", "TroponinI", "PTT", "WBC", "Fibrinogen", "Platelets",
})
# fmt: on
_LEAST_LOGGED = 0.01
# Fractions: some files have percentages or negative values.
_FRACTIONS = frozenset({"FiO2"})
_SUMMARIES = ("last", "mean", "min", "max", "trend", "count", "measured")
# Features are clipped at this many deviations, so that an outlier cannot dominate its device's step.
_CLIP = 5.0

# Hours from the onset: the first at which predicting sepsis has a positive utility, the best, and the last
# that counts; the challenge's labels are 1 from the best on.
_EARLY, _BEST, _LATE = -12, -6, 3
_MISSED, _FALSE_ALARM = -2.0, -0.05


@dataclass(frozen=True, eq=False)
class _Stays:
    """All stays, hour after hour.

    Parameters
    ----------
    values : ndarray of float32, (hours, 41)
        The files' columns; NaN if missing.
    lengths : ndarray of int64, (stays,)
        Hours of each stay.
    names : ndarray of str, (stays,)
        Part and file, ``set_A/p000001``, sorted.
    columns : tuple of str
        The 41 names.
    """

    values: Floats
    lengths: Indices
    names: NDArray[np.str_]
    columns: tuple[str, ...]

    @cached_property
    def first(self) -> Indices:
        """The row of each stay's first hour, (stays,)."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def onsets(self) -> Indices:
        """The hour at which each stay's label becomes 1, (stays,); -1 if never."""
        labelled = np.flatnonzero(self.values[:, _LABEL] == 1)
        stays = np.searchsorted(self.first, labelled, side="right") - 1
        turned, places = np.unique(stays, return_index=True)
        onsets = np.full(len(self.lengths), -1, np.int64)
        onsets[turned] = labelled[places] - self.first[turned]
        return onsets


def read_sepsis2019(folder: Path) -> Table:
    """Read series of hours before sepsis, and of matched controls: the task is to predict sepsis.

    The challenge's label becomes 1 six hours before sepsis begins. A *case* is a patient whose label becomes
    1 at an hour t >= 6; the sample is the 48 hours before t, none of which is labelled. Each case has one
    *control*: a patient of the same hospital, never labelled, who stayed at least t hours, sampled at the
    same hour t. So the classes have equal size, and the length of a stay, which is shorter before sepsis,
    carries no information. A case without a control is excluded. Some 3,000 of 40,336 patients remain.

    The device has 8 vital signs, the hospital 26 laboratory values, (N, 48, ·), in order of time; hours
    before the admission are NaN. A patient is one sample.

    Raises
    ------
    ValueError
        If a file has other columns, or a value is not a number.
    """
    stays = _read_stays(folder)
    rng = np.random.default_rng(_MATCHING_SEED)
    samples = [one for part in _PARTS for one in _cases_and_controls(stays, part, rng)]
    if not samples:
        raise ValueError(
            f"{folder} must have a patient whose sepsis begins after {SEPSIS_LEAST_HOURS} hours or more"
        )
    series = np.full((len(samples), SEPSIS_HOURS, _MEASURED), np.nan, np.float32)
    for window, (stay, _, hour) in zip(series, samples, strict=True):
        start = stays.first[stay]
        hours = stays.values[start + max(0, hour - SEPSIS_HOURS) : start + hour, :_MEASURED]
        window[SEPSIS_HOURS - len(hours) :] = hours
    return Table(
        hospital=series[..., _VITALS:],
        device=series[..., :_VITALS],
        labels=np.array([label for _, label, _ in samples], np.int64),
        ids=stays.names[[stay for stay, _, _ in samples]],
        classes=("no sepsis", "sepsis"),
        hospital_features=stays.columns[_VITALS:_MEASURED],
        device_features=stays.columns[:_VITALS],
        masks=True,
    )


def read_sepsis2019_windows(folder: Path) -> Table:
    """Read the challenge's own task: whether to predict sepsis at an hour, from the measurements so far.

    A sample is a patient at an hour t, with the challenge's label of that hour: 1 from six hours before
    sepsis begins. Every eighth hour of each stay is a sample, starting at a random hour from 0 to 7. So every
    hour is equally likely, in short and long stays, with and without sepsis. Hours more than 3 after the
    onset, which score nothing in the challenge, are excluded. No feature looks ahead or depends on the
    beginning or the end of the stay.

    The device has seven features of each of 8 vital signs, the hospital of each of 26 laboratory values: the
    last value up to t; the mean, min, max, least-squares trend (1/h) and number (``log(1 + n)``) of the
    values in the 12 hours to t (without any: three times the last value, 0 and 0); and whether it was ever
    measured. Values with a long tail are logarithms. The hospital also has age, sex, unit and the time since
    its own admission (h, ``log(1 + h)``). A value that was never measured is NaN.

    ``people`` are patients. The test set is a fifth of them, drawn per hospital system and separately among
    those with and without sepsis. ``sites`` are the two hospital systems, set_A and set_B, and ``payoffs``
    those of the function ``payoffs``.

    Raises
    ------
    ValueError
        If a file has other columns, or a value is not a number.
    """
    stays = _read_stays(folder)
    rows, stay = _sampled_hours(stays)
    labels = stays.values[rows, _LABEL].astype(np.int64)
    if not 0 < labels.sum() < len(labels):
        raise ValueError(
            f"{folder} must have some but not all hours labelled, got {labels.sum()} of {len(labels)}"
        )
    summaries = [_summaries(stays, column, rows, stays.first[stay]) for column in range(_MEASURED)]
    names = [[f"{stays.columns[column]} {what}" for what in _SUMMARIES] for column in range(_MEASURED)]
    person, person_names = _admission(stays.values[rows])
    hours = rows - stays.first[stay]
    return Table(
        hospital=np.concatenate([*summaries[_VITALS:], person], axis=1, dtype=np.float32),
        device=np.concatenate(summaries[:_VITALS], axis=1, dtype=np.float32),
        labels=labels,
        ids=np.char.add(np.char.add(stays.names[stay], "@"), hours.astype(str)),
        classes=("no sepsis", "sepsis"),
        hospital_features=(*(name for part in names[_VITALS:] for name in part), *person_names),
        device_features=tuple(name for part in names[:_VITALS] for name in part),
        test=_test_stays(stays)[stay],
        people=stays.names[stay],
        sites=np.array([name.partition("/")[0] for name in stays.names])[stay],
        payoffs=payoffs(hours, stays.onsets[stay]),
        flags=frozenset(f"{column} measured" for column in stays.columns) | {"sex", "unit 1", "unit 2"},
        clip=_CLIP,
    )


def payoffs(hours: Indices, onsets: Indices) -> Doubles:
    """Return the challenge's utility of predicting "no sepsis" and "sepsis" at an hour, (N, 2).

    Let s be the hour at which sepsis begins, six after the first label. Predicting sepsis is worth -0.05
    until 12 hours before s, then rises linearly to 1 at s - 6, and falls linearly to 0 at s + 3. Not
    predicting it is worth 0 until s - 6, then falls linearly to -2 at s + 3. Later hours are worth 0. For
    patients without sepsis a false alarm is worth -0.05, no alarm 0.

    Parameters
    ----------
    hours : ndarray of int64, (N,)
        Hours since the first of the stay.
    onsets : ndarray of int64, (N,)
        The hour of the stay with the first label 1; -1 if there is none.
    """
    t = (hours - onsets + _BEST).astype(np.float64)  # hours from s
    septic = onsets >= 0
    rising = np.maximum((t - _EARLY) / (_BEST - _EARLY), _FALSE_ALARM)
    told = np.where(t <= _BEST, rising, (_LATE - t) / (_LATE - _BEST))
    missed = np.where(t <= _BEST, 0.0, _MISSED * (t - _BEST) / (_LATE - _BEST))
    of_septic = np.where((t <= _LATE)[:, None], np.stack([missed, told], axis=1), 0.0)
    result: Doubles = np.where(septic[:, None], of_septic, [0.0, _FALSE_ALARM])
    return result


def _sampled_hours(stays: _Stays) -> tuple[Indices, Indices]:
    """Return the rows of the sampled hours, and their stays."""
    start = np.random.default_rng(_WINDOW_SEED).integers(0, WINDOW_STRIDE, len(stays.lengths))
    # The label becomes 1 at s + _BEST; hours after s + _LATE are excluded.
    last = np.where(stays.onsets < 0, stays.lengths - 1, stays.onsets + _LATE - _BEST)
    count = np.maximum(np.minimum(last, stays.lengths - 1) - start + WINDOW_STRIDE, 0) // WINDOW_STRIDE
    stay = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(stay)) - np.repeat(np.cumsum(count) - count, count)
    return stays.first[stay] + start[stay] + WINDOW_STRIDE * within, stay


def _summaries(stays: _Stays, column: int, rows: Indices, first: Indices) -> Doubles:
    """Return ``_SUMMARIES`` of a column at each sampled hour, (N, 7); ``first`` are the stays' first rows."""
    name, values = stays.columns[column], stays.values[:, column].astype(np.float64)
    if name in _FRACTIONS:
        values = np.where((values > 0) & (values <= 1), values, np.nan)
    if name in _LOGGED:
        values = np.log(np.maximum(values, _LEAST_LOGGED))
    at = np.flatnonzero(~np.isnan(values))  # where it was measured
    v = values[at]
    end = np.searchsorted(at, rows, side="right")
    begin = np.searchsorted(at, np.maximum(rows - WINDOW_HOURS + 1, first))
    ever = end > np.searchsorted(at, first)
    # One extra entry, so that an empty window at the end has a valid index.
    last = np.where(ever, np.append(v, np.nan)[np.maximum(end - 1, 0)], np.nan)
    n = end - begin
    # Hours from the middle: sums of squares of integers this small are exact.
    t = at.astype(np.float64) - len(values) // 2
    sum_v, sum_t, sum_tt, sum_tv = (_window_sums(x, begin, end) for x in (v, t, t * t, t * v))
    some = np.maximum(n, 1)
    # Centred at the window's mean hour, because t itself is up to a million hours.
    spread = sum_tt - sum_t**2 / some
    trend = np.where(spread > 0.1, (sum_tv - sum_t * sum_v / some) / np.maximum(spread, 0.1), 0.0)
    least, most = (_window_extremes(function, v, begin, end) for function in (np.minimum, np.maximum))
    found = n > 0
    return np.stack(
        [
            last,
            np.where(found, sum_v / some, last),
            np.where(found, least, last),
            np.where(found, most, last),
            trend,
            np.log1p(n),
            ever,
        ],
        axis=1,
    )


def _window_sums(x: Doubles, begin: Indices, end: Indices) -> Doubles:
    total = np.concatenate([[0.0], np.cumsum(x)])
    result: Doubles = total[end] - total[begin]
    return result


def _window_extremes(function: np.ufunc, x: Doubles, begin: Indices, end: Indices) -> Doubles:
    """Return a ufunc's reduction over each x[begin:end]; arbitrary values for empty ones."""
    if not len(x):
        return np.full(len(begin), np.nan)
    # reduceat needs indices within the array; an empty pair gives the value at its begin.
    pairs = np.stack([begin, end], axis=1).reshape(-1)
    padded = np.append(x, x[-1])
    result: Doubles = function.reduceat(padded, pairs)[::2]
    return result


def _admission(values: Floats) -> tuple[Doubles, tuple[str, ...]]:
    unit1, unit2 = (np.nan_to_num(values[:, column]) for column in (_UNIT1, _UNIT2))
    # Negative: hours before intensive care. Some files wrongly have positive values.
    admitted = np.log1p(np.maximum(-values[:, _ADMITTED].astype(np.float64), 0))
    features = np.stack([values[:, _AGE], values[:, _GENDER], unit1, unit2, admitted], axis=1)
    return features.astype(np.float64), ("age", "sex", "unit 1", "unit 2", "hours in hospital")


def _test_stays(stays: _Stays) -> NDArray[np.bool_]:
    """Choose a fifth of each part's patients with sepsis, and a fifth of the others."""
    rng = np.random.default_rng(_WINDOW_SEED + 1)
    parts = np.array([name.partition("/")[0] for name in stays.names])
    test = np.zeros(len(stays.names), bool)
    for part in _PARTS:
        for septic in (False, True):
            members = np.flatnonzero((parts == part) & ((stays.onsets >= 0) == septic))
            test[rng.permutation(members)[: round(_TEST_SHARE * len(members))]] = True
    return test


def _cases_and_controls(stays: _Stays, part: str, rng: np.random.Generator) -> Iterable[tuple[int, int, int]]:
    """Yield (stay, label, hour), alternately a case and its control."""
    members = [stay for stay, name in enumerate(stays.names) if name.partition("/")[0] == part]
    onsets = {stay: int(stays.onsets[stay]) for stay in members}
    cases = [(onset, stay) for stay, onset in onsets.items() if onset >= SEPSIS_LEAST_HOURS]
    others = sorted((int(stays.lengths[stay]), stay) for stay, onset in onsets.items() if onset < 0)
    free: list[int] = []
    # From the latest onset to the earliest: a stay long enough for one case is so for all that follow.
    for onset, case in sorted(cases, reverse=True):
        while others and others[-1][0] >= onset:
            free.append(others.pop()[1])
        if free:
            yield case, 1, onset
            yield free.pop(int(rng.integers(len(free)))), 0, onset


def _read_stays(folder: Path) -> _Stays:
    """Return all stays, from the cache or else from the files, which are then cached."""
    paths = [path for part in _PARTS for path in sorted((folder / part).glob("*.psv"))]
    if not paths:
        raise ValueError(f"{folder} must have at least one .psv file in {' or '.join(_PARTS)}")
    name = f"sepsis2019-{_digest(folder, paths)}.npz"
    places = [folder / name, _cache_folder() / name]
    for place in places:
        if (kept := _kept(place)) is not None:
            return kept
    stays = _parsed(folder, paths)
    for place in places:
        if _keep(stays, place, paths[0].stat().st_mode & 0o666):
            break
    return stays


def _digest(folder: Path, paths: Sequence[Path]) -> str:
    """Return a digest of the files' names, sizes and modification times."""
    digest = hashlib.sha256()
    for path in paths:
        found = path.stat()
        digest.update(f"{path.relative_to(folder)}\0{found.st_size}\0{found.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hedgerow"


def _kept(place: Path) -> _Stays | None:
    """Return the stays of a cache file; None if it is missing or damaged."""
    try:
        with np.load(place) as file:
            stays = _Stays(file["values"], file["lengths"], file["names"], tuple(file["columns"].tolist()))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    fits = stays.values.shape == (stays.lengths.sum(), _COLUMNS) and len(stays.columns) == _COLUMNS
    return stays if fits and len(stays.names) == len(stays.lengths) else None


def _keep(stays: _Stays, place: Path, mode: int) -> bool:
    """Write stays to a cache file; False if nothing can be written there.

    ``mode`` is that of the original files, because these are patients' data.
    """
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        # Atomic, because runs of a sweep may start together.
        with tempfile.NamedTemporaryFile(dir=place.parent, suffix=".part", delete=False) as file:
            part = Path(file.name)
            try:
                np.savez_compressed(
                    file,
                    values=stays.values,
                    lengths=stays.lengths,
                    names=stays.names,
                    columns=np.array(stays.columns),
                )
                file.flush()
                part.chmod(mode)
                part.replace(place)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
    except OSError:
        return False
    return True


def _parsed(folder: Path, paths: Sequence[Path]) -> _Stays:
    columns = _header(paths[0])
    with warnings.catch_warnings():
        # NumPy's warning about text that it cannot parse to the end.
        warnings.simplefilter("error", DeprecationWarning)
        stays = [_hours(path) for path in paths]
    return _Stays(
        np.concatenate(stays),
        np.array([len(hours) for hours in stays], np.int64),
        np.array([str(path.relative_to(folder).with_suffix("")) for path in paths]),
        columns,
    )


def _header(path: Path) -> tuple[str, ...]:
    with path.open() as file:
        return tuple(file.readline().strip().split("|"))


def _hours(path: Path) -> Floats:
    """Return one stay, (hours, 41)."""
    head, _, body = path.read_bytes().partition(b"\n")
    columns = head.strip().split(b"|")
    if len(columns) != _COLUMNS or columns[_LABEL] != b"SepsisLabel":
        raise ValueError(
            f"{path} must have {_COLUMNS} columns, the last SepsisLabel, got {len(columns)}, the last "
            f"{columns[-1].decode(errors='replace')!r}"
        )
    lines = body.split()
    try:
        values = np.fromstring(b"|".join(lines), np.float32, sep="|")
    except (ValueError, DeprecationWarning):
        values = np.empty(0, np.float32)
    if not values.size or values.size != _COLUMNS * len(lines):
        # Slower, but its error names the row.
        values = read_numbers(path, "|", columns=_COLUMNS, skip=1)
    hours = values.reshape(-1, _COLUMNS)
    if not np.isin(hours[:, _LABEL], (0, 1)).all():
        wrong = hours[~np.isin(hours[:, _LABEL], (0, 1)), _LABEL]
        raise ValueError(f"{path}: SepsisLabel must be 0 or 1, got {wrong[0]:g}")
    return hours


def read_numbers(path: Path, delimiter: str, columns: int, skip: int = 0) -> Floats:
    """Return a text file's table of numbers, (rows, columns); ValueError if it is not such a table."""
    try:
        table = np.loadtxt(path, np.float32, delimiter=delimiter, skiprows=skip, ndmin=2)
    except ValueError as error:
        raise ValueError(f"{path} must have {columns} numbers a row: {error}") from error
    if table.shape[1] != columns:
        raise ValueError(f"{path} must have {columns} numbers a row, got {table.shape[1]}")
    return table
