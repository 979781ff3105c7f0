"""Published medical data sets: two halves of the same people's features.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", experiments: ESR, MIMIC-III and OrganAMNIST. Not in
the paper: ECG5000, SUPPORT2 and, in ``sepsis2019``, that year's challenge, which are all freely available.
MIMIC-III is split 38 + 38, because the printed 36 + 36 do not add up to its 76 features.

A missing measurement is NaN; splitting, imputation and scaling come later (``hedgerow.tasks.load_vertical``).
"""

import csv
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hedgerow.tasks.checks import described
from hedgerow.tasks.images import Images
from hedgerow.tasks.sources import DataSource, Fetch
from hedgerow.tasks.tabular import Table
from hsgd.sepsis2019 import read_numbers, read_sepsis2019, read_sepsis2019_windows

Floats = NDArray[np.float32]

_ORGAN_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
_ORGANS = (
    "bladder",
    "femur-left",
    "femur-right",
    "heart",
    "kidney-left",
    "kidney-right",
    "liver",
    "lung-left",
    "lung-right",
    "pancreas",
    "spleen",
)
_SUPPORT2_VITALS = ("meanbp", "hrt", "resp", "temp")
_SUPPORT2_LABS = ("wblc", "pafi", "alb", "bili", "crea", "sod", "ph", "glucose", "bun", "urine")

_MIMIC_HOURS = 48
# Each variable with the value to use before the first measurement, and the categories of a categorical one:
# the discretizer settings of the MIMIC-III benchmark, which give 59 columns and 17 masks.
_MIMIC_VARIABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "Capillary refill rate": ("0.0", ("0.0", "1.0")),
    "Diastolic blood pressure": ("59.0", ()),
    "Fraction inspired oxygen": ("0.21", ()),
    "Glascow coma scale eye opening": (
        "4 Spontaneously",
        (
            "To Pain",
            "3 To speech",
            "1 No Response",
            "4 Spontaneously",
            "None",
            "To Speech",
            "Spontaneously",
            "2 To pain",
        ),
    ),
    "Glascow coma scale motor response": (
        "6 Obeys Commands",
        (
            "1 No Response",
            "3 Abnorm flexion",
            "Abnormal extension",
            "No response",
            "4 Flex-withdraws",
            "Localizes Pain",
            "Flex-withdraws",
            "Obeys Commands",
            "Abnormal Flexion",
            "6 Obeys Commands",
            "5 Localizes Pain",
            "2 Abnorm extensn",
        ),
    ),
    "Glascow coma scale total": (
        "15",
        ("11", "10", "13", "12", "15", "14", "3", "5", "4", "7", "6", "9", "8"),
    ),
    "Glascow coma scale verbal response": (
        "5 Oriented",
        (
            "1 No Response",
            "No Response",
            "Confused",
            "Inappropriate Words",
            "Oriented",
            "No Response-ETT",
            "5 Oriented",
            "Incomprehensible sounds",
            "1.0 ET/Trach",
            "4 Confused",
            "2 Incomp sounds",
            "3 Inapprop words",
        ),
    ),
    "Glucose": ("128.0", ()),
    "Heart Rate": ("86", ()),
    "Height": ("170.0", ()),
    "Mean blood pressure": ("77.0", ()),
    "Oxygen saturation": ("98.0", ()),
    "Respiratory rate": ("19", ()),
    "Systolic blood pressure": ("118.0", ()),
    "Temperature": ("36.6", ()),
    "Weight": ("81.0", ()),
    "pH": ("7.4", ()),
}
_MIMIC_HOSPITAL = 38


def read_ecg5000(folder: Path) -> Table:
    """Read UCR's ECG5000: heartbeats of 140 samples, the first 70 at the hospital, the last 70 on the device.

    Raises
    ------
    ValueError
        If a row is not a label from 1 to 5 and 140 numbers.
    """
    parts = [folder / "ECG5000_TRAIN.tsv", folder / "ECG5000_TEST.tsv"]
    tables = [read_numbers(path, "\t", columns=141) for path in parts]
    beats = np.concatenate(tables)  # (N, 1 + 140)
    return Table(
        **_sequence_halves(beats[:, 1:]),
        labels=np.concatenate(
            [_labels(path, rows[:, 0], 5) for path, rows in zip(parts, tables, strict=True)]
        ),
        ids=np.array(
            [
                f"{part}-{row}"
                for part, rows in zip(("train", "test"), tables, strict=True)
                for row in range(len(rows))
            ]
        ),
        classes=("normal", "R-on-T PVC", "PVC", "supraventricular or ectopic", "unclassified"),
        test=np.repeat([False, True], [len(rows) for rows in tables]),
    )


def read_esr(folder: Path) -> Table:
    """Read UCI's Epileptic Seizure Recognition: seconds of EEG with 178 samples each, split 89 + 89.

    The name of a second, such as ``X21.V1.791``, is its position in a recording and the recording.
    ``people`` are the recordings, so that all seconds of one can be kept together.

    Raises
    ------
    ValueError
        If a row is not a name, 178 numbers and a label from 1 to 5.
    """
    path = folder / "data.csv"
    rows = _rows(path, columns=180)
    numbers = _floats(path, [row[1:] for row in rows])
    labels = _labels(path, numbers[:, -1], 5)
    names = [row[0] for row in rows]
    return Table(
        **_sequence_halves(numbers[:, :-1]),
        labels=labels,
        ids=np.array(names),
        classes=("seizure", "tumour area", "healthy area", "eyes closed", "eyes open"),
        # Recordings of different classes may have the same number.
        people=np.array(
            [f"{label}:{name.partition('.')[2] or name}" for label, name in zip(labels, names, strict=True)]
        ),
    )


def read_support2(folder: Path) -> Table:
    """Read SUPPORT2: vital signs on the device, laboratory values at the hospital; the label is death there.

    Both are of the third day. Patients without any value on one side (one in the file) are excluded.

    Raises
    ------
    ValueError
        If a column is missing, or a value is not a number.
    """
    path = folder / "support2.csv"
    header, *rows = _rows(path)
    wanted = ("sno", "hospdead", *_SUPPORT2_VITALS, *_SUPPORT2_LABS)
    places = _places(path, header, wanted)
    cells = [[row[place].strip() for place in places] for row in rows]
    numbers = _floats(path, [row[1:] for row in cells])
    device, hospital = np.split(numbers[:, 1:], [len(_SUPPORT2_VITALS)], axis=1)
    known = ~(np.isnan(device).all(axis=1) | np.isnan(hospital).all(axis=1))
    return Table(
        hospital=hospital[known],
        device=device[known],
        labels=_labels(path, numbers[known, 0], 2, first=0),
        ids=np.array([row[0] for row in cells])[known],
        classes=("survived", "died"),
        hospital_features=_SUPPORT2_LABS,
        device_features=_SUPPORT2_VITALS,
    )


def read_mimic3(folder: Path) -> Table:
    """Read the in-hospital mortality task written by the MIMIC-III benchmark's scripts.

    ``train/listfile.csv`` and ``test/listfile.csv`` list each stay's file and outcome; a row of the file has
    the hour and 17 variables. An hour has the last value measured in it, else the one before, else a normal
    one (the benchmark's imputation). Categories are one-hot encoded, which gives 59 columns; 17 masks mark
    what was measured. The hospital has the first 38 of the 76 columns, the device the others.

    Raises
    ------
    ValueError
        If a column is missing, a category is unknown, or a value is not a number.
    """
    listed = [
        (part, name, label)
        for part in ("train", "test")
        for name, label in _listed(folder / part / "listfile.csv")
    ]
    series = np.empty((len(listed), _MIMIC_HOURS, len(_MIMIC_FEATURES)), np.float32)
    for sample, (part, name, _) in zip(series, listed, strict=True):
        sample[:] = _mimic_series(folder / part / name)
    return Table(
        hospital=series[..., :_MIMIC_HOSPITAL],
        device=series[..., _MIMIC_HOSPITAL:],
        labels=np.array([label for _, _, label in listed], np.int64),
        ids=np.array([name.removesuffix("_timeseries.csv") for _, name, _ in listed]),
        classes=("survived", "died"),
        hospital_features=_MIMIC_FEATURES[:_MIMIC_HOSPITAL],
        device_features=_MIMIC_FEATURES[_MIMIC_HOSPITAL:],
        test=np.array([part == "test" for part, _, _ in listed]),
        people=np.array([name.partition("_")[0] for _, name, _ in listed]),
        flags=frozenset(_MIMIC_FEATURES) - _MIMIC_VARIABLES.keys(),
    )


def _listed(path: Path) -> list[tuple[str, int]]:
    header, *rows = _rows(path)
    stay, outcome = _places(path, header, ("stay", "y_true"))
    labels = _labels(path, _column(path, rows, outcome), 2, first=0)
    return [(row[stay], int(label)) for row, label in zip(rows, labels, strict=True)]


def _mimic_columns(variable: str) -> tuple[str, ...]:
    categories = _MIMIC_VARIABLES[variable][1]
    return tuple(f"{variable} = {category}" for category in categories) or (variable,)


_MIMIC_FEATURES = (
    *(column for variable in _MIMIC_VARIABLES for column in _mimic_columns(variable)),
    *(f"{variable} measured" for variable in _MIMIC_VARIABLES),
)


def _mimic_series(path: Path) -> Floats:
    """Return one stay, (48, 76)."""
    header, *rows = _rows(path)
    hour_at, *places = _places(path, header, ("Hours", *_MIMIC_VARIABLES))
    hours = _column(path, rows, hour_at)
    values: list[list[str]] = [[""] * len(places) for _ in range(_MIMIC_HOURS)]
    for place in np.argsort(hours, kind="stable"):
        if 0 <= hours[place] <= _MIMIC_HOURS:
            # A full hour ends its slot, as in the benchmark: 1.0 is in the first.
            slot = values[max(0, math.ceil(hours[place]) - 1)]
            slot[:] = [rows[place][at] or before for at, before in zip(places, slot, strict=True)]
    measured = np.array([[cell != "" for cell in slot] for slot in values])  # (48, 17)
    columns = [
        _mimic_values(path, variable, [slot[number] for slot in values])
        for number, variable in enumerate(_MIMIC_VARIABLES)
    ]
    return np.concatenate([*columns, measured], axis=1).astype(np.float32)


def _mimic_values(path: Path, variable: str, cells: Sequence[str]) -> Floats:
    """Return one variable's columns, (48, 1) or (48, categories), with every hour filled."""
    last, categories = _MIMIC_VARIABLES[variable]
    filled = [last := cell or last for cell in cells]
    if not categories:
        return _floats(path, [[cell] for cell in filled])
    if variable == "Glascow coma scale total":
        # The benchmark's scripts write 15 or 15.0, depending on pandas.
        filled = [cell.removesuffix(".0") for cell in filled]
    unknown = set(filled) - set(categories)
    if unknown:
        raise ValueError(f"{path}: {variable} must be one of {', '.join(categories)}, got {min(unknown)!r}")
    return np.array([[cell == category for category in categories] for cell in filled], np.float32)


def _sequence_halves(samples: Floats) -> dict[str, Any]:
    """Return both halves in time as sequences of one feature, (N, T / 2, 1)."""
    half = samples.shape[1] // 2
    return {"hospital": samples[:, :half, None], "device": samples[:, half:, None]}


def _rows(path: Path, columns: int | None = None) -> list[list[str]]:
    """Return a CSV file's rows; with a number of columns, check it and drop the header."""
    with path.open(newline="") as file:
        rows = [row for row in csv.reader(file) if row]
    if not rows:
        raise ValueError(f"{path} is empty: it must have a header and rows")
    for number, row in enumerate(rows, 1):
        if len(row) != (columns or len(rows[0])):
            raise ValueError(
                f"{path}: row {number} must have {columns or len(rows[0])} cells, got {len(row)}"
            )
    return rows if columns is None else rows[1:]


def _places(path: Path, header: Sequence[str], wanted: Sequence[str]) -> list[int]:
    lacking = [name for name in wanted if name not in header]
    if lacking:
        raise ValueError(
            f"{path}: no column {', '.join(map(repr, lacking))}; the columns are {', '.join(header)}"
        )
    return [header.index(name) for name in wanted]


def _column(path: Path, rows: Sequence[Sequence[str]], place: int) -> Floats:
    return _floats(path, [[row[place]] for row in rows])[:, 0] if rows else np.empty(0, np.float32)


def _floats(path: Path, cells: Sequence[Sequence[str]]) -> Floats:
    """Return cells as numbers; an empty cell is NaN."""
    if not cells:
        raise ValueError(f"{path} must have at least one row below the header")
    try:
        return np.array([[cell or "nan" for cell in row] for row in cells], np.float64).astype(np.float32)
    except ValueError as error:
        raise ValueError(f"{path}: every cell must be a number or empty: {error}") from error


def _labels(path: Path, values: Floats, classes: int, first: int = 1) -> NDArray[np.int64]:
    bad = ~np.isin(values, np.arange(first, first + classes))
    if bad.any():
        raise ValueError(f"{path}: label must be from {first} to {first + classes - 1}, got {values[bad][0]}")
    return values.astype(np.int64) - first


def read_organamnist(folder: Path) -> Images:
    """Read the training and test images; the pixels become (N, 1, H, W).

    Raises
    ------
    ValueError
        If an array is missing, or has a wrong type or shape.
    """
    path = folder / "organamnist.npz"
    with np.load(path) as file:
        lacking = [key for key in _ORGAN_ARRAYS if key not in file]
        if lacking:
            raise ValueError(
                f"{path} must have the arrays {', '.join(_ORGAN_ARRAYS)}, got no {', '.join(lacking)}"
            )
        arrays = [file[key] for key in _ORGAN_ARRAYS]
    for key, images in zip(_ORGAN_ARRAYS[::2], arrays[::2], strict=True):
        if images.dtype != np.uint8 or images.ndim != 3:
            raise ValueError(f"{path}: {key} must be uint8 of shape (N, H, W), got {described(images)}")
    x_train, y_train, x_test, y_test = arrays
    return Images(x_train[:, None], y_train.ravel(), x_test[:, None], y_test.ravel())


def _lacking(files: tuple[str, ...], folder: Path) -> list[str]:
    return [name for name in files if not (folder / name).exists()]


_CHALLENGE = "put the folders set_A and set_B of PhysioNet's challenge-2019 into DATA_DIR/sepsis2019"
_without_challenge = partial(_lacking, ("set_A", "set_B"))

SETS: Mapping[str, DataSource] = {
    "ecg5000": DataSource(
        "heartbeats of an electrocardiogram, five kinds",
        "5,000 series of 140 steps",
        "put ECG5000_TRAIN.tsv and ECG5000_TEST.tsv of the UCR archive into DATA_DIR/ecg5000",
        partial(_lacking, ("ECG5000_TRAIN.tsv", "ECG5000_TEST.tsv")),
        read_ecg5000,
        ("ecg5000",),
    ),
    "support2": DataSource(
        "seriously ill adults, and death in hospital: vital signs and laboratory values",
        "9,105 people, 4 + 10 features",
        "put support2.csv of Vanderbilt's data sets into DATA_DIR/support2",
        partial(_lacking, ("support2.csv",)),
        read_support2,
        ("support2",),
    ),
    "sepsis2019": DataSource(
        "hours in intensive care, of people with sepsis and without: vital signs and laboratory values",
        "48 hours a stay, 26 + 8 values an hour",
        _CHALLENGE,
        _without_challenge,
        read_sepsis2019,
        ("sepsis2019",),
    ),
    "sepsis2019-windows": DataSource(
        "hours in intensive care, and whether sepsis is imminent: summaries of the measurements so far",
        "some 190,000 hours of 40,336 people, 187 + 56 features",
        _CHALLENGE,
        _without_challenge,
        read_sepsis2019_windows,
        ("sepsis2019",),
    ),
    "esr": DataSource(
        "seconds of electroencephalograms, some with epileptic seizures",
        "11,500 series of 178 steps",
        "put data.csv of UCI's Epileptic Seizure Recognition into DATA_DIR/esr",
        partial(_lacking, ("data.csv",)),
        read_esr,
        ("esr",),
    ),
    "mimic3": DataSource(
        "the first 48 hours in intensive care, and death in hospital",
        "48 hours a stay, 38 + 38 features an hour",
        "put the folders train and test of the MIMIC-III benchmark's in-hospital-mortality task into "
        "DATA_DIR/mimic3; MIMIC-III needs PhysioNet's permission",
        partial(_lacking, ("train/listfile.csv", "test/listfile.csv")),
        read_mimic3,
        ("mimic3",),
    ),
    "organamnist": DataSource(
        "abdominal CT slices of eleven organs, in two halves",
        "some 52,000 images 1x28x28",
        "put organamnist.npz of MedMNIST into DATA_DIR/organamnist",
        partial(_lacking, ("organamnist.npz",)),
        read_organamnist,
        ("organamnist",),
        (Path("~/.medmnist"),),
        fetch=Fetch("medmnist.OrganAMNIST", split="train"),
        classes=_ORGANS,
    ),
}
