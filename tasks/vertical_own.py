"""One party's half of its own people's features, read from a file that only it has.

A table has a row a person: an id, features, and at a hospital a label. No error names a value of the file or
an id: what goes wrong at a node is told to whoever asked it.
"""

import csv
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from .groups import group_split
from .own_data import OWN
from .vertical import VerticalDataset, load_vertical

__all__ = ["OwnHalf", "read_constants", "read_half", "write_group_split", "write_groups"]

# The keys of a party's node config that name a file.
_PATHS = ("data", "match-key-file")


@dataclass(frozen=True, eq=False)
class OwnHalf:
    """One party's half of its people's samples.

    Parameters
    ----------
    ids : tuple of str
        The people, each once and none empty, in the order of the file. They stay at the node.
    x : ndarray of float32, (n, ...)
        Their features, all finite, n >= 1.
    labels : tuple of str or None
        Their classes by name; None where the file has none.
    features : tuple of str
        Names along the last axis; empty where they have none.

    Raises
    ------
    ValueError
        An id is empty or there twice (its row is named, not the id), or a value is not as above.
    """

    ids: tuple[str, ...]
    x: NDArray[np.float32]
    labels: tuple[str, ...] | None
    features: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.ids:
            raise ValueError("data must have at least one person")
        if self.x.dtype != np.float32 or self.x.ndim < 2 or not self.x.size or len(self.x) != len(self.ids):
            raise ValueError(
                f"data: x must be float32 of shape ({len(self.ids)}, ...), not empty, got {self.x.dtype} of "
                f"shape {self.x.shape}"
            )
        if self.labels is not None and len(self.labels) != len(self.ids):
            raise ValueError(f"data must have {len(self.ids)} labels, one a person, got {len(self.labels)}")
        first: dict[str, int] = {}
        for row, person in enumerate(self.ids, 1):
            if not person:
                raise ValueError(f"data: the id of person {row} must not be empty")
            if (before := first.setdefault(person, row)) != row:
                raise ValueError(f"data: persons {before} and {row} must not have the same id")
        if self.labels is not None and "" in self.labels:
            raise ValueError(f"data: the label of person {self.labels.index('') + 1} must not be empty")
        if not np.isfinite(self.x).all():
            row = int(np.argwhere(~np.isfinite(self.x))[0][0]) + 1
            raise ValueError(f"data: the features of person {row} must be finite numbers")


def read_half(
    path: str | os.PathLike[str], id_column: str = "id", label_column: str = "label", *, labelled: bool
) -> OwnHalf:
    """Return the half that a file holds.

    Parameters
    ----------
    path : str or path
        ``.csv``: a header, then a row a person; all columns but those of id and label are features, numbers.
        It is read row by row, so that memory holds the features and not the text. ``.npz``: arrays ``ids``
        (text), ``x`` (n, ...) and, with labels, ``y``; for images and series.
    id_column, label_column : str (default: ``"id"``, ``"label"``)
        Columns of a ``.csv``.
    labelled : bool
        Whether there must be labels, as at a hospital; elsewhere there may be.

    Raises
    ------
    ValueError
        The file cannot be read or is not as above; file, row and column are named.
    """
    file = Path(path).expanduser()
    readers = {".csv": _read_csv, ".npz": _read_npz}
    read = readers.get(file.suffix.lower())
    if read is None:
        raise ValueError(f"data must be a .csv or .npz file, got {file.name!r}")
    try:
        half = read(file, id_column, label_column)
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise ValueError(f"data must be a readable file, got {file.name!r} ({reason})") from error
    if labelled and half.labels is None:
        named = f"column {label_column!r}" if file.suffix.lower() == ".csv" else "array 'y'"
        raise ValueError(f"{file.name} has no {named}: a hospital's file must have labels")
    return half


def read_constants(path: str | os.PathLike[str], features: Sequence[str]) -> tuple[list[float], list[float]]:
    """Return mean and deviation of these features from a ``.csv`` with columns feature, mean, std.

    Raises
    ------
    ValueError
        A feature is missing, or a value is not finite, or a deviation not > 0.
    """
    file, found = Path(path).expanduser(), {}
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            for row in csv.DictReader(lines):
                found[str(row.get("feature")).strip()] = row.get("mean"), row.get("std")
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"constants must be a readable .csv, got {file.name!r}") from error
    means, deviations = [], []
    for name in features:
        try:
            mean, deviation = (float(value or "nan") for value in found[name])
        except (KeyError, ValueError):
            mean = deviation = float("nan")
        if not np.isfinite([mean, deviation]).all() or deviation <= 0:
            raise ValueError(f"constants: feature {name!r} must have a row with a finite mean and std > 0")
        means.append(mean)
        deviations.append(deviation)
    return means, deviations


def write_groups(
    data: VerticalDataset, groups: Sequence[NDArray[np.int64]], folder: str | os.PathLike[str], layout: str
) -> list[dict[str, str | int]]:
    """Write a data set as the files of its parties, and return their node configs, by partition.

    Nodes that learn from these with ``holdout = 0`` and ``standardise = "none"`` have what a simulation on
    the data set has, people in the order of their hashes.

    Parameters
    ----------
    data : VerticalDataset
        Its training people.
    groups : sequence of ndarray of int64
        The rows of each hospital's people.
    folder : str or path
        A folder ``group-<m>`` with ``hospital.csv``, ``match.key`` and ``edge.csv`` or ``device-<n>.csv``
        is made in it for each group. Every file is its owner's alone (mode 0600).
    layout : {"edges", "devices"}
        Whether a group's devices are one file, or one each.

    Raises
    ------
    ValueError
        The samples are no rows of a table, the layout is unknown, or a file is there already.
    """
    if data.hospital_train.ndim != 2 or data.device_train.ndim != 2:
        raise ValueError(f"data set {data.name!r} must have samples of shape (N, features), rows of a table")
    if layout not in ("edges", "devices"):
        raise ValueError(f"layout must be edges or devices, got {layout!r}")
    hospitals: list[dict[str, str | int]] = []
    others: list[dict[str, str | int]] = []
    for m, rows in enumerate(groups):
        place = Path(folder).expanduser() / f"group-{m}"
        place.mkdir(parents=True, exist_ok=True)
        key = place / "match.key"
        with _own_file(key, "wb") as secret:
            secret.write(os.urandom(32))

        files = [("hospital", "hospital", rows)]
        if layout == "edges":
            files.append(("edge", "edge", rows))
        else:
            files += [("device", f"device-{n}", rows[[n]]) for n in range(len(rows))]
        for role, name, people in files:
            path = place / f"{name}.csv"
            _write_half(path, data, people, role == "hospital")
            told: dict[str, str | int] = {
                "role": role,
                "group": m,
                "data": str(path),
                "match-key-file": str(key),
            }
            (hospitals if role == "hospital" else others).append(told)
    return [*hospitals, *others]


def write_group_split(
    dataset: str,
    folder: str | os.PathLike[str],
    num_groups: int,
    scheme: str,
    seed: int = 0,
    data_dir: str | os.PathLike[str] | None = None,
    layout: str = "edges",
    people: int | None = None,
) -> Path:
    """Write a data set's training people as one file a party, dealt as a simulation deals them.

    Parameters
    ----------
    dataset, data_dir
        As for ``load_vertical``; a set of tables.
    folder : str or path
        Where the files go, as ``write_groups`` lays them out; made if it is not there.
    num_groups, scheme, seed
        As for ``group_split``.
    layout : {"edges", "devices"} (default: "edges")
        As for ``write_groups``.
    people : int or None (default: None)
        People of a group at most, >= 1; None takes all.

    Returns
    -------
    Path
        ``manifest.json`` in the folder: what was dealt how, each party's node config (paths are relative to
        the folder), and what the run config must say.

    Raises
    ------
    DatasetNotFound, ValueError
        As ``load_vertical``, ``group_split`` and ``write_groups`` do; ValueError too if the folder has a
        manifest already.
    """
    folder = Path(folder).expanduser()
    manifest = folder / "manifest.json"
    if manifest.exists():
        raise ValueError(f"{manifest} exists already: the folder must have no files of an earlier split")
    if people is not None and people < 1:
        raise ValueError(f"people must be an integer >= 1, got {people}")
    data = load_vertical(dataset, data_dir)
    dealt = group_split(scheme, data.y_train, num_groups, seed).groups
    groups = [rows[:people] for rows in dealt]
    configs = write_groups(data, groups, folder, layout)
    told = {
        "dataset": dataset,
        "partition": scheme,
        "seed": seed,
        "num-examples": [len(rows) for rows in groups],
        "run-config": {
            "partition": OWN,
            "num-groups": num_groups,
            "layout": layout,
            "num-clients": len(configs),
            "classes": ",".join(data.classes),
        },
        "node-config": [
            {
                key: Path(str(value)).relative_to(folder).as_posix() if key in _PATHS else value
                for key, value in config.items()
            }
            for config in configs
        ],
    }
    manifest.write_text(json.dumps(told, indent=2) + "\n")
    return manifest


def _own_file(path: Path, mode: str, **options: Any) -> IO[Any]:
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), mode, **options)
    except FileExistsError as error:
        raise ValueError(f"{path} exists already: the folder must not have these files") from error


def _write_half(path: Path, data: VerticalDataset, rows: NDArray[np.int64], hospital: bool) -> None:
    x = (data.hospital_train if hospital else data.device_train)[rows]
    names = (data.hospital_features if hospital else data.device_features) or [
        f"x{n}" for n in range(x.shape[1])
    ]
    with _own_file(path, "w", newline="", encoding="utf-8") as lines:
        table = csv.writer(lines)
        table.writerow(["id", *names, *(["label"] if hospital else [])])
        for row, values in zip(rows, x, strict=True):
            label = [data.classes[data.y_train[row]]] if hospital else []
            table.writerow([data.ids_train[row], *map(repr, values.tolist()), *label])


def _read_csv(file: Path, id_column: str, label_column: str) -> OwnHalf:
    with file.open(newline="", encoding="utf-8-sig") as lines:
        rows = csv.reader(lines, strict=True)
        header = [name.strip() for name in next(rows, [])]
        place = _columns(file, header, id_column)
        label = header.index(label_column) if label_column in header else None
        features = [column for column in range(len(header)) if column not in (place, label)]
        if not features:
            raise ValueError(f"{file.name} must have at least one feature, a column beside id and label")
        ids: list[str] = []
        labels: list[str] = []
        at = array("q")
        values = array("f")
        for line, row in _rows(file, rows, len(header)):
            ids.append(row[place].strip())
            if label is not None:
                labels.append(row[label].strip())
            at.append(line)
            cells = [row[column] for column in features]
            try:
                values.extend(map(float, cells))
            except ValueError:
                values.extend(_number(file, line, header[c], row[c]) for c in features)
    named = tuple(header[column] for column in features)
    x = np.frombuffer(values, np.float32).reshape(len(ids), len(named)) if ids else np.zeros((0, 1))
    if not np.isfinite(x).all():
        row_, column = np.argwhere(~np.isfinite(x))[0]
        raise _bad_cell(file, at[int(row_)], named[column])
    return OwnHalf(tuple(ids), np.asarray(x, np.float32), tuple(labels) if label is not None else None, named)


def _columns(file: Path, header: list[str], id_column: str) -> int:
    if twice := sorted({name for name in header if header.count(name) > 1}):
        raise ValueError(f"{file.name} must have each column once, got {twice[0]!r} twice")
    if id_column not in header:
        raise ValueError(f"{file.name}: the header must have the column {id_column!r} (node config key 'id')")
    return header.index(id_column)


def _rows(file: Path, rows: Iterator[list[str]], width: int) -> Iterator[tuple[int, list[str]]]:
    for line, row in enumerate(rows, 2):
        if not row:
            continue
        if len(row) != width:
            raise ValueError(
                f"{file.name}, row {line} must have {width} cells, as the header has, got {len(row)}"
            )
        yield line, row


def _number(file: Path, line: int, column: str, cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        raise _bad_cell(file, line, column, empty=not cell.strip()) from None


def _bad_cell(file: Path, line: int, column: str, empty: bool = False) -> ValueError:
    found = ", got an empty cell" if empty else ""
    return ValueError(f"{file.name}, row {line}, column {column!r} must be a finite number{found}")


def _read_npz(file: Path, id_column: str, label_column: str) -> OwnHalf:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            held = {key: arrays[key] for key in ("ids", "x", "y") if key in arrays}
    except ValueError as error:
        raise ValueError(f"{file.name} must be a .npz of plain arrays ids, x and y") from error
    ids, x = held.get("ids"), held.get("x")
    if ids is None or ids.ndim != 1 or ids.dtype.kind not in "US":
        raise ValueError(f"{file.name} must have an array 'ids' of texts, one a person")
    if x is None or x.dtype.kind not in "fiu":
        raise ValueError(f"{file.name} must have an array 'x' of numbers, of shape (n, ...)")
    y: NDArray[Any] | None = held.get("y")
    if y is not None and (y.ndim != 1 or y.dtype.kind not in "iuUb"):
        raise ValueError(f"{file.name}: 'y' must be classes of shape (n,), got {y.dtype} of shape {y.shape}")
    labels = None if y is None else tuple(str(label) for label in y.tolist())
    people = tuple((one.decode() if isinstance(one, bytes) else str(one)).strip() for one in ids.tolist())
    with np.errstate(over="ignore"):
        return OwnHalf(people, x.astype(np.float32), labels)
