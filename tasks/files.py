"""Readers of a node's own files: arrays, tables, image folders and saved Hugging Face data sets.

Measurements become finite float32, or float64 where float32 would lose their differences; integers of
arrays stay integers (token ids); labels and ids become strings. A ``Reading`` says what was read and what was
left out. Invalid content raises one ValueError that names file, row and column. Tables are read in chunks, so
memory holds the result in float64 and one chunk. CSV and arrays need no extra package.
"""

import csv
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checks import check_axes, described
from .extras import needed
from .pictures import decoded, read_pictures

Inputs = NDArray[Any]
# The cells of a column; row numbers with their cells by column name.
_Cells = Sequence[Any] | NDArray[Any]
_Chunk = tuple[Sequence[int], Mapping[str, _Cells]]

# Cells of a table per chunk: some 20 MB as strings.
_CHUNK_CELLS = 2**18
# Values of an array checked at a time.
_CHECKED = 2**23
# Names that pandas and R give to a column of row numbers.
_INDEX = re.compile(r"|Unnamed: \d+(?:\.\d+)*|__index_level_\d+__|row[._]?names?")
# Fewest rows in which whole numbers in order, and shuffled, are row numbers and not chance.
_FEWEST_IN_ORDER, _FEWEST_SHUFFLED = 5, 10
# Largest share of a feature's deviation that rounding to float32 may move a value.
_ROUNDING = 1e-3
# Names of each kind in a line of the log.
_MOST_NAMES = 20
_FORMS = (
    "a file .npz, .csv or .parquet, a folder with one folder of images per class, or a folder written by "
    "datasets.save_to_disk"
)
# Largest number of float32.
_LARGEST = float(np.finfo(np.float32).max)
# Smallest number > 0 of float32: smaller ones are rounded to a multiple of it.
_SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
_FLAGS = {"true": 1.0, "false": 0.0}


class Labels:
    """Labels as strings, collected in order.

    Attributes
    ----------
    first : dict of str to str
        Each distinct label in order of appearance, and where it first appears, for messages.
    codes : array of int64
        Each sample's label as an index into ``first``.
    """

    def __init__(self) -> None:
        self.first: dict[str, str] = {}
        self.codes = array("q")
        self._places: dict[str, int] = {}

    def add(self, values: Iterable[Any], where: Callable[[int], str]) -> None:
        """Add labels; ``where(i)`` says where the i-th of them is. ValueError if one is empty."""
        for i, value in enumerate(values):
            label = _text(value)
            if label not in self._places:
                if not label:
                    raise ValueError(f"{where(i)} must be a label, got an empty cell")
                self._places[label] = len(self._places)
                self.first[label] = where(i)
            self.codes.append(self._places[label])

    def numbers(self, of_label: Sequence[int]) -> NDArray[np.int64]:
        """Return each sample's class number, (N,), given one for each label in ``first``."""
        return np.array(of_label, np.int64)[np.frombuffer(self.codes, np.int64)]


@dataclass(frozen=True)
class Reading:
    """What was read from a file, for its owner's log.

    Parameters
    ----------
    path : str
        The file, folder or function.
    rows : int
        Samples.
    dtype : str
        Of the inputs in memory.
    features : tuple of (str, str)
        A table's features and the type of each in the file; of arrays and images ``x``, its type and shape.
    classes : tuple of (str, int)
        The labels, in order of appearance, and how many samples have each; empty without labels.
    skipped : tuple of (str, str)
        What was left out, and why.
    notes : tuple of str
        What its owner should check.
    """

    path: str
    rows: int
    dtype: str
    features: tuple[tuple[str, str], ...]
    classes: tuple[tuple[str, int], ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return one line."""
        parts = [f"{self.rows} rows as {self.dtype}", _several("feature", self.features)]
        if self.classes:
            parts.append(_several("class", self.classes))
        parts.append("skipped " + ", ".join(_first(self.skipped)) if self.skipped else "nothing skipped")
        return f"Read {self.path}: {'; '.join([*parts, *self.notes])}"


def _several(what: str, found: Sequence[tuple[str, object]]) -> str:
    plural = what if len(found) == 1 else what + ("es" if what.endswith("s") else "s")
    return f"{len(found)} {plural}: {', '.join(_first(found))}"


def _first(found: Sequence[tuple[str, object]]) -> list[str]:
    more = [f"{len(found) - _MOST_NAMES} more"] if len(found) > _MOST_NAMES else []
    return [*(f"{name!r} ({about})" for name, about in found[:_MOST_NAMES]), *more]


@dataclass(frozen=True, eq=False)
class FileData:
    """The contents of a file.

    Parameters
    ----------
    x : ndarray of float32, float64 or int64, (N, ...)
        Finite inputs, N >= 1; images are (N, C, H, W). Integers are those of an array. float64 if float32
        would round away more than a thousandth of a feature's deviation.
    labels : Labels or None
        None if the file has none.
    ids : tuple of str (default: none)
        The id of each sample, if requested: distinct and non-empty.
    features : tuple of str (default: none)
        The feature columns of a table.
    num_classes : int or None (default: None)
        The number of classes, if the file has it.
    depth : str (default: "")
        Of images, see ``Pictures``.
    types : tuple of str (default: none)
        The type in the file of each feature, or of the array.
    skipped : tuple of (str, str) (default: none)
        What was left out, and why.
    notes : tuple of str (default: none)
        What its owner should check.
    """

    x: Inputs
    labels: Labels | None
    ids: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    num_classes: int | None = None
    depth: str = ""
    types: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def reading(self, path: str) -> Reading:
        """Return what was read."""
        shape = "×".join(map(str, self.x.shape[1:]))
        kinds = (f"{kind} {shape}" if not self.features else kind for kind in self.types)
        features = tuple(zip(self.features or ("x",), kinds, strict=True))
        classes: tuple[tuple[str, int], ...] = ()
        if self.labels is not None:
            counts = np.bincount(np.frombuffer(self.labels.codes, np.int64), minlength=len(self.labels.first))
            classes = tuple(zip(self.labels.first, counts.tolist(), strict=True))
        dtype = str(self.x.dtype)
        return Reading(path, len(self.x), dtype, features, classes, self.skipped, self.notes)

    def __post_init__(self) -> None:
        first: dict[str, int] = {}
        for sample, one in enumerate(self.ids, 1):
            if not one:
                raise ValueError(f"the id of sample {sample} must not be empty")
            if (before := first.setdefault(one, sample)) != sample:
                # The id itself is private.
                raise ValueError(f"samples {before} and {sample} must not have the same id")


@dataclass(frozen=True)
class FileColumns:
    """The parts of a file to read.

    Parameters
    ----------
    label : str (default: "label")
        A table's label column.
    features : tuple of str (default: empty)
        A table's feature columns, in this order; empty for all others that are no index, in the file's order.
    id : str or None (default: None)
        A table's id column. Arrays have ids as ``ids``, images use their file names. None: no ids.
    labelled : bool (default: True)
        Whether labels are required.
    index : tuple of str (default: empty)
        The columns that the file itself declares as its index.
    """

    label: str = "label"
    features: tuple[str, ...] = ()
    id: str | None = None
    labelled: bool = True
    index: tuple[str, ...] = ()

    def skipped_in(self, header: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """Return a table's columns that are not read, and why."""
        read = {self.label, self.id, *self.features_in(header)}
        return tuple(
            (name, "an index of the rows" if self._is_index(name) else "not in the key features")
            for name in header
            if name not in read
        )

    def indices_in(self, header: Sequence[str]) -> list[str]:
        """Return the columns that are left out for their names alone."""
        if self.features:
            return []
        others = (self.label, self.id, *self.index)
        return [name for name in header if name not in others and self._is_index(name)]

    def _is_index(self, name: str) -> bool:
        return name in self.index or _INDEX.fullmatch(name) is not None

    def features_in(self, header: Sequence[str]) -> tuple[str, ...]:
        """Return a table's feature columns; ValueError if a required column is missing."""
        if twice := sorted({name for name in header if header.count(name) > 1}):
            raise ValueError(f"each column must have a name of its own, got {twice[0]!r} twice")
        others = (self.label, self.id)
        names = self.features or tuple(
            name for name in header if name not in others and not self._is_index(name)
        )
        due = [*([self.label] if self.labelled else []), *([] if self.id is None else [self.id]), *names]
        if lacking := [name for name in due if name not in header]:
            raise ValueError(
                f"no column {', '.join(map(repr, lacking))}; the columns are "
                f"{', '.join(map(repr, header[:20]))}{' …' if len(header) > 20 else ''}. The node config's "
                "keys label, features and id name columns"
            )
        if not names or len(set(names)) < len(names) or set(names) & set(others):
            raise ValueError(
                "features must be one column or more, each once, without those of labels and ids, got "
                f"{[*names]}"
            )
        return names


def read_file(path: Path, columns: FileColumns) -> FileData:
    """Read a file or folder.

    Parameters
    ----------
    path : Path
        A ``.csv`` with a header or a ``.parquet``, with numeric features; an ``.npz`` with ``x`` (N, ...),
        ``y`` (N,) and optionally ``ids`` (N,), strings, and ``classes``, an integer; a folder with a folder
        of images per class, or of images without labels; or a folder written by ``datasets.save_to_disk``.
    columns : FileColumns
        The parts to read.

    Raises
    ------
    ValueError
        If the file does not exist, has an unknown format, or has invalid content.
    """
    readers = {".npz": _read_npz, ".csv": _read_csv, ".parquet": _read_parquet}
    with named(path):
        if path.is_dir():
            saved = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
            found = _read_saved(path, columns) if saved else _read_images(path, columns)
        elif reader := readers.get(path.suffix.lower()):
            if not path.is_file():
                raise ValueError("the file does not exist")
            found = reader(path, columns)
        else:
            raise ValueError(f"it must be {_FORMS}")
        if columns.labelled and found.labels is None:
            raise ValueError("there must be labels, got none")
    return found


@contextmanager
def named(where: object) -> Iterator[None]:
    """Turn any error of a ``with`` block, such as a damaged file's, into a ValueError that says where."""
    try:
        yield
    except Exception as error:
        words = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ValueError(f"{where}: {words}") from error


# Arrays.


def of_arrays(x: Any, y: Any, ids: Any = None, classes: Any = None) -> FileData:
    """Return inputs (N, ...) with labels (N,), ids (N,) and a number of classes, each of the latter optional.

    Raises
    ------
    ValueError
        If one has a wrong type or shape, or an input is not finite.
    """
    samples = len(x) if isinstance(x, np.ndarray) and x.ndim else 0
    for key, column, kinds, valid in (("y", y, "iubUSO", "integers or texts"), ("ids", ids, "US", "texts")):
        if column is not None and (column.shape != (samples,) or column.dtype.kind not in kinds):
            raise ValueError(
                f"{key} must be {valid} of shape ({samples},), one for each of x, got {described(column)}"
            )
    if classes is not None and (classes.shape != () or classes.dtype.kind not in "iu" or classes < 2):
        raise ValueError(f"classes must be one integer >= 2, got {described(classes)}")
    labels = None
    if y is not None:
        labels = Labels()
        labels.add(y.tolist(), "y[{}]".format)
    people = () if ids is None else tuple(map(_text, ids.tolist()))
    number = None if classes is None else int(classes)
    return FileData(_inputs(x), labels, people, num_classes=number, types=(str(x.dtype),))


def _inputs(x: object) -> Inputs:
    """Return a numeric array (N, ...) as the inputs of a model; ValueError unless all are finite and N >= 1.

    Integers become int64, because they are ids such as tokens; only those of images (four axes) are pixels,
    and become float32 as all other numbers do.
    """
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "fiub":
        raise ValueError(f"x must be an array of numbers (N, ...), got {described(x)}")
    if not x.size or x.ndim < 2:
        raise ValueError(f"x must be a non-empty array (N, ...) of two axes or more, got {described(x)}")
    check_axes("x", x)
    if x.dtype.kind in "iu" and x.ndim != 4:
        if x.max() > np.iinfo(np.int64).max:
            raise ValueError(f"x must be integers of int64, got {x.max()}")
        return np.ascontiguousarray(x, np.int64)
    with np.errstate(over="ignore"):
        out = np.ascontiguousarray(x, np.float32)
    step = max(1, _CHECKED * len(out) // out.size)
    for start in range(0, len(out), step):
        strange = ~np.isfinite(out[start : start + step])
        if strange.any():
            at = np.argwhere(strange)[0]
            place = f"x[{', '.join(map(str, [start + at[0], *at[1:]]))}]"
            value = x[start + at[0]][tuple(at[1:])]
            raise ValueError(f"{place} must be a finite number of float32, got {value}")
    return (
        out
        if x.dtype.kind != "f" or x.dtype.itemsize <= 4 or not rounded_away(x).any()
        else x.astype(np.float64)
    )


def rounded_away(x: NDArray[Any]) -> NDArray[np.bool_]:
    """Return for each feature of samples x (N, ...) whether float32 would lose their differences.

    A feature is a channel of images, else a position on the last axis.
    """
    columns = np.moveaxis(x, 1, -1) if x.ndim == 4 else x
    axes = tuple(range(columns.ndim - 1))
    low, high, deviation = columns.min(axes), columns.max(axes), columns.std(axes, dtype=np.float64)
    rounding = np.maximum(np.maximum(abs(low), abs(high)) * 2.0**-24, _SMALLEST / 2)
    # The differences of a constant are those to other nodes.
    exact = (low == high) & (low == low.astype(np.float32))
    return np.asarray(~(exact | (rounding < _ROUNDING * deviation)))


def _read_npz(path: Path, columns: FileColumns) -> FileData:
    with np.load(path, allow_pickle=False) as file:
        held = {key: file[key] for key in ("x", "y", "ids", "classes") if key in file}
    due = ["x", *(["y"] if columns.labelled else []), *(["ids"] if columns.id is not None else [])]
    if lacking := [key for key in due if key not in held]:
        raise ValueError(f"there must be arrays {', '.join(due)}, got no array {' and '.join(lacking)}")
    return of_arrays(held["x"], held.get("y"), held["ids"] if "ids" in due else None, held.get("classes"))


# Tables.


def _table(columns: FileColumns, header: Sequence[str], chunks: Iterable[_Chunk]) -> FileData:
    """Return a table from its chunks."""
    names, has_labels = columns.features_in(header), columns.label in header
    # Grows in place: concatenating arrays would need a second copy.
    values, labels = bytearray(), Labels()
    ids: list[str] = []
    types: dict[str, str] = {}
    unnamed = columns.indices_in(header)
    first = next(i for i, name in enumerate([*header, names[0]]) if name not in unnamed)
    for rows, cells in chunks:
        x = np.empty((len(rows), len(names)), np.float64)
        for name in unnamed:
            _check_index(name, cells[name], header.index(name) < first)
        for j, name in enumerate(names):
            x[:, j] = _numbers(cells[name])
            kind = _type(cells[name], x[:, j])
            types[name] = kind if types.get(name, kind) == kind else "float64"
        strange = ~(abs(x) <= _LARGEST)
        if strange.any():
            i, j = np.argwhere(strange)[0]
            raise ValueError(
                f"{_place(rows, names[j], i)} must be a finite number, got {str(cells[names[j]][i])!r}"
            )
        values += x.tobytes()
        if has_labels:
            labels.add(cells[columns.label], partial(_place, rows, columns.label))
        if columns.id is not None:
            ids += map(_text, cells[columns.id])
    if not values:
        raise ValueError("there must be at least one row")
    x = np.frombuffer(values, np.float64).reshape(-1, len(names))
    notes = [] if columns.features else _check_counters(x, names)
    return FileData(
        x if rounded_away(x).any() else x.astype(np.float32),
        labels if has_labels else None,
        tuple(ids),
        names,
        types=tuple(types[name] for name in names),
        skipped=columns.skipped_in(header),
        notes=tuple(notes),
    )


def _check_index(name: str, cells: _Cells, leads: bool) -> None:
    """Raise ValueError if a column that only its name makes an index may be data: not first, or not whole."""
    texts = [str(cell).strip() for cell in cells]
    if not any(texts) or (leads and not any(_number(text) % 1 > 0 for text in texts)):
        return
    raise ValueError(
        f"column {name!r} must be an index of the rows (in front, of texts or whole numbers) or have another "
        "name: rename it, or list the features in the node config's key features"
    )


def _type(cells: _Cells, numbers: NDArray[np.float64]) -> str:
    """Return the type of a column: its own, or that of a CSV's numbers."""
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "fiub":
        return str(cells.dtype)
    return "int64" if (numbers == np.floor(numbers)).all() else "float64"


def _check_counters(x: NDArray[np.float64], names: Sequence[str]) -> list[str]:
    """Raise ValueError if a feature counts the rows; return notes on those that may number them.

    Whatever the rows' order follows, a model could read it from such a column.
    """
    notes = []
    for j, name in enumerate(names):
        column = np.ascontiguousarray(x[:, j])
        first, last, rows = column.min(), column.max(), len(column)
        if rows < _FEWEST_IN_ORDER or first != np.floor(first) or not first < last:
            continue
        counted = np.arange(first, first + rows)
        if first in (0, 1) and last == counted[-1]:
            shuffled = rows >= _FEWEST_SHUFFLED and np.array_equal(np.sort(column), counted)
            if shuffled or np.array_equal(column, counted):
                raise ValueError(
                    f"column {name!r} must not be a feature unless the node config's key features names it: "
                    f"it counts the rows, {first:.0f} to {last:.0f}. List the features there, or remove it"
                )
        step = column[1] - column[0]
        if step == np.floor(step) and (np.diff(column) == step).all():
            notes.append(
                f"column {name!r} changes by {step:.0f} from row to row: if it numbers the rows, leave it "
                "out of the features"
            )
    return notes


def _place(rows: Sequence[int], column: str, i: int) -> str:
    return f"row {rows[i]}, column {column!r}"


def _numbers(cells: _Cells) -> NDArray[Any]:
    """Return the cells of a column as numbers; NaN if a cell is not a number."""
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "fiub":
        return cells
    try:
        if _are_plain("".join(cells)):
            return np.fromiter(map(float, cells), np.float64, len(cells))
    except (TypeError, ValueError, OverflowError):
        pass
    return np.fromiter(map(_number, cells), np.float64, len(cells))


def _number(cell: Any) -> float:
    try:
        return float(cell) if not isinstance(cell, str) or _are_plain(cell.strip()) else np.nan
    except (TypeError, ValueError, OverflowError):
        return _FLAGS.get(str(cell).lower(), np.nan)


def _are_plain(text: str) -> bool:
    """Return whether a text has no digits of other scripts and no ``_``, which Python takes in a number."""
    return text.isascii() and "_" not in text


def _text(value: Any) -> str:
    """Return a label or id as a string: an integral float as an integer, true and false as 1 and 0."""
    if value is None or (isinstance(value, float | np.floating) and np.isnan(value)):
        return ""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace").strip()
    if isinstance(value, bool | np.bool_) or (isinstance(value, float | np.floating) and value == value // 1):
        return str(int(value))
    return str(value).strip()


def _read_csv(path: Path, columns: FileColumns) -> FileData:
    with path.open(newline="", encoding="utf-8-sig") as file:
        header, rows = _csv_rows(file)

        def chunks() -> Iterator[_Chunk]:
            while block := list(islice(rows, max(1, _CHUNK_CELLS // len(header)))):
                numbers, cells = zip(*block, strict=True)
                yield numbers, dict(zip(header, zip(*cells, strict=True), strict=True))

        return _table(columns, header, chunks())


def _csv_rows(lines: Iterable[str]) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Return the header, and the non-blank rows with their numbers; the header is row 1."""
    reader = csv.reader(lines, strict=True)
    header = [name.strip() for name in next(reader, [])]
    if not header:
        raise ValueError("there must be a header, got no columns")

    def rows() -> Iterator[tuple[int, list[str]]]:
        for number, row in enumerate(reader, 2):
            if row and len(row) != len(header):
                raise ValueError(
                    f"row {number} must have {len(header)} cells, as the header has, got {len(row)}"
                )
            if row:
                yield number, row

    return header, rows()


def read_constants(path: Path, features: Sequence[str]) -> tuple[list[float], list[float]]:
    """Return the means and standard deviations of features from a ``.csv`` with columns feature, mean, std.

    Raises
    ------
    ValueError
        If a feature is missing, a value is not finite, or a deviation is not > 0.
    """
    found: dict[str, tuple[float, float]] = {}
    # The error reaches the server, so it does not name the folder.
    with named(f"constants {path.name}"), path.open(newline="", encoding="utf-8-sig") as file:
        header, rows = _csv_rows(file)
        if not {"feature", "mean", "std"} <= {*header}:
            raise ValueError(f"the columns must be feature, mean and std, got {', '.join(header)}")
        for _, row in rows:
            cells = dict(zip(header, row, strict=True))
            found[cells["feature"].strip()] = _number(cells["mean"]), _number(cells["std"])
    means, deviations = [], []
    for name in features:
        mean, deviation = found.get(name, (np.nan, np.nan))
        if not np.isfinite([mean, deviation]).all() or deviation <= 0:
            raise ValueError(f"constants: feature {name!r} must have a row with a finite mean and std > 0")
        means.append(mean)
        deviations.append(deviation)
    return means, deviations


def _read_parquet(path: Path, columns: FileColumns) -> FileData:
    parquet = needed("pyarrow.parquet", "data", "a .parquet file")
    with parquet.ParquetFile(path) as file:
        header = file.schema_arrow.names
        # pandas notes which columns were a frame's index; a range has no column.
        index = (file.schema_arrow.pandas_metadata or {}).get("index_columns", [])
        columns = replace(columns, index=tuple(name for name in index if isinstance(name, str)))
        used = _used(columns, header)
        batches = file.iter_batches(batch_size=max(1, _CHUNK_CELLS // len(used)), columns=used)
        return _table(columns, header, _arrow_chunks(batches, 1))


def _used(columns: FileColumns, header: Sequence[str]) -> list[str]:
    names = columns.features_in(header)
    more = dict.fromkeys([columns.label, columns.id or "", *columns.indices_in(header)])
    return [*names, *(name for name in more if name in header)]


def _arrow_chunks(batches: Iterable[Any], first_row: int) -> Iterator[_Chunk]:
    """Yield pyarrow's batches or tables as NumPy arrays: NaN or None for an empty cell."""
    row = first_row
    for batch in batches:
        # to_numpy of batches and of tables have different options.
        cells = {name: np.asarray(batch.column(name)) for name in batch.schema.names}
        yield range(row, row + batch.num_rows), cells
        row += batch.num_rows


def _read_saved(path: Path, columns: FileColumns) -> FileData:
    """Read a folder of ``datasets.Dataset.save_to_disk``: columns of numbers, or one of arrays or images."""
    datasets = needed("datasets", "datasets", "a saved data set")
    saved = datasets.load_from_disk(str(path))
    if not isinstance(saved, datasets.Dataset):
        raise ValueError(f"it must be the folder of one split, got the splits {', '.join(saved)}")
    if not len(saved):
        raise ValueError("there must be at least one row")
    header, names = saved.column_names, columns.features_in(saved.column_names)
    plain = ("int", "uint", "float", "bool", "double")
    if all(str(getattr(saved.features[name], "dtype", "")).startswith(plain) for name in names):
        used = _used(columns, header)
        tables = saved.select_columns(used).with_format("arrow")
        return _table(
            columns, header, _arrow_chunks(tables.iter(batch_size=max(1, _CHUNK_CELLS // len(used))), 0)
        )
    if len(names) > 1:
        raise ValueError(
            f"the columns {', '.join(map(repr, names))} must all be numbers; a single column of arrays or "
            "images must be named by the node config's key features"
        )
    (name,) = names
    samples = [_sample(name, i, row[name]) for i, row in enumerate(saved.select_columns([name]))]
    parts, depths, lefts = zip(*samples, strict=True)
    for i, (part, depth) in enumerate(zip(parts, depths, strict=True)):
        for what, own, first in (("shape", part.shape, parts[0].shape), ("depth", depth, depths[0])):
            if own != first:
                raise ValueError(
                    f"row {i}, column {name!r} must have the {what} {first}, that of row 0, got {own}"
                )
    labels = Labels()
    if columns.label in header:
        labels.add(saved[columns.label], partial(_place, range(len(saved)), columns.label))
    ids = () if columns.id is None else tuple(map(_text, saved[columns.id]))
    x = np.stack(parts)
    left = tuple((f"row {i}", why) for i, why in enumerate(lefts) if why)
    return FileData(
        _inputs(x),
        labels if labels.codes else None,
        ids,
        depth=depths[0],
        types=(str(x.dtype),),
        skipped=columns.skipped_in(header) + left,
    )


def _sample(name: str, row: int, value: Any) -> tuple[Inputs, str, str]:
    try:
        if hasattr(value, "convert"):  # A Pillow image.
            return decoded(value)
        sample = np.atleast_1d(np.asarray(value))
        return sample if sample.dtype.kind in "iub" else sample.astype(np.float64), "", ""
    except (TypeError, ValueError) as error:
        raise ValueError(f"row {row}, column {name!r} must be an array of numbers ({error})") from error


# Images.


def _read_images(path: Path, columns: FileColumns) -> FileData:
    """Return the images of a folder as (N, C, H, W) in [0, 1], with one channel or three."""
    found = read_pictures(path, in_classes=True)
    has_labels = found is not None
    if found is None and not columns.labelled:
        found = read_pictures(path, in_classes=False)
    if found is None:
        raise ValueError(f"no images in class folders: it must be {_FORMS}")
    files = found.files
    labels = Labels()
    if has_labels:
        labels.add((file.parts[0] for file in files), lambda i: f"the folder of {files[i]}")
    ids = () if columns.id is None else tuple(file.stem for file in files)
    return FileData(
        found.x,
        labels if has_labels else None,
        ids,
        depth=found.depth,
        types=(f"{found.depth} pixels",),
        skipped=found.skipped,
    )
