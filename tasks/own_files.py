"""Readers of a node's own data: arrays, tables, image folders and saved Hugging Face data sets.

Each yields what it reads as float32, and labels as the file has them; what is wrong is one ValueError that
names file, row and column. Tables are read in chunks: beside what is returned, memory holds one chunk.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .extras import needed

__all__ = ["RawData", "checked_inputs", "read_file"]

Floats = NDArray[np.float32]

# Cells of a table that are read at once: 64 MiB as float64.
_CHUNK_CELLS = 2**23
_IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_FORMS = (
    "a file .npz, .csv or .parquet, a folder of one folder of images a class, or a folder written by "
    "datasets.save_to_disk"
)


@dataclass(frozen=True, eq=False)
class RawData:
    """What a file holds.

    Parameters
    ----------
    x : ndarray of float32, (N, ...)
        Finite inputs.
    values : Sequence[str]
        The labels that occur, as texts, each once.
    labels : ndarray of int64, (N,)
        Of each sample, its place in ``values``.
    rows : Sequence[str]
        Where each sample stands, for messages.
    num_classes : int or None (default: None)
        The number of classes, where the file tells.
    features : tuple of str (default: none)
        The columns of a table.
    """

    x: Floats
    values: Sequence[str]
    labels: NDArray[np.int64]
    rows: Sequence[str]
    num_classes: int | None = None
    features: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, x: Floats, labels: NDArray[Any], rows: Sequence[str], num_classes: int | None = None
    ) -> "RawData":
        """Return inputs with labels as they stand, integers or texts (N,)."""
        values, places = np.unique(labels, return_inverse=True)
        return cls(
            x, [str(value) for value in values], places.reshape(-1).astype(np.int64), rows, num_classes
        )


class _Rows(Sequence[str]):
    """Names of rows, made when asked for."""

    def __init__(self, words: str, count: int, first: int = 0) -> None:
        self._words, self._count, self._first = words, count, first

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: Any) -> Any:
        return self._words.format(range(self._first, self._first + self._count)[at])


def read_file(path: Path, label: str, features: Sequence[str] | None) -> RawData:
    """Return what a file or folder holds.

    Parameters
    ----------
    path : Path
        An ``.npz`` with ``x`` (N, ...) and ``y`` (N,), and ``classes``, a number, where it is told; a
        ``.csv`` or ``.parquet``; a folder of class folders; or what ``datasets.save_to_disk`` wrote.
    label : str
        The label's column in a table.
    features : Sequence[str] or None
        The other columns of a table to take, in this order; None for all, in the file's order.

    Raises
    ------
    ValueError
        If there is no such file, it is of no known form, or what it holds is not valid.
    """
    try:
        if path.is_dir():
            saved = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
            return _read_saved(path, label, features) if saved else _read_images(path)
        reader = {".npz": _read_npz, ".csv": _read_csv, ".parquet": _read_parquet}.get(path.suffix.lower())
        if reader is None:
            raise ValueError(f"{path} must be {_FORMS}")
        if not path.is_file():
            raise ValueError(f"{path}: there is no such file")
        return reader(path, label, features)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error


def checked_inputs(where: object, x: object) -> Floats:
    """Return an array of numbers (N, ...) as float32; ValueError unless all are finite and N >= 1."""
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "fiub":
        raise ValueError(f"{where}: x must be an array of numbers (N, ...), got {_described(x)}")
    if not x.size or x.ndim < 2:
        raise ValueError(
            f"{where}: x must be a non-empty array (N, ...) of two axes or more, got {_described(x)}"
        )
    with np.errstate(over="ignore"):
        out = np.ascontiguousarray(x, np.float32)
    step = max(1, _CHUNK_CELLS * len(out) // out.size)
    for start in range(0, len(out), step):
        strange = ~np.isfinite(out[start : start + step])
        if strange.any():
            at = np.argwhere(strange)[0]
            place = f"x[{', '.join(map(str, [start + at[0], *at[1:]]))}]"
            value = x[start + at[0]][tuple(at[1:])]
            raise ValueError(f"{where}: {place} must be a finite number of float32, got {value}")
    return out


def _read_npz(path: Path, _label: str, _features: Sequence[str] | None) -> RawData:
    try:
        with np.load(path, allow_pickle=False) as file:
            lacking = [key for key in ("x", "y") if key not in file]
            if lacking:
                raise ValueError(f"the file must have x and y, got no array {' and '.join(lacking)}")
            x, y = file["x"], file["y"]
            classes = file.get("classes")
    except Exception as error:  # A damaged archive fails in many ways.
        raise ValueError(f"{path}: {error}") from error
    samples = len(x) if x.ndim else 0
    if y.shape != (samples,) or y.dtype.kind not in "iubUS":
        raise ValueError(
            f"{path}: y must be integers or texts of shape ({samples},), one for each of x, got "
            f"{_described(y)}"
        )
    if y.dtype.kind == "S":
        y = np.char.decode(y, "utf-8", "replace")
    if y.dtype.kind == "b":
        y = y.astype(np.int64)
    if classes is not None and (classes.shape != () or classes.dtype.kind not in "iu" or classes < 2):
        raise ValueError(f"{path}: classes must be one integer >= 2, got {_described(classes)}")
    rows = _Rows("y[{}]", len(y))
    return RawData.of(checked_inputs(path, x), y, rows, None if classes is None else int(classes))


def _read_csv(path: Path, label: str, features: Sequence[str] | None) -> RawData:
    pandas = needed("pandas", "data", str(path))
    options = {"index_col": False, "keep_default_na": False, "low_memory": False}

    def chunks() -> Iterator[Any]:
        # Every column, not those in use: only so are rows of too many cells found.
        with pandas.read_csv(path, dtype={label: str}, chunksize=size, **options) as found:
            yield from found

    with warnings.catch_warnings():
        # pandas only warns of a row with more cells than there are columns, and drops what is over.
        warnings.simplefilter("error", pandas.errors.ParserWarning)
        try:
            header = list(pandas.read_csv(path, nrows=0, **options).columns)
            names = _columns(path, header, label, features)
            size = max(1, _CHUNK_CELLS // len(header))
            # The header is row 1.
            return _table(path, names, label, chunks(), first_row=2)
        except (pandas.errors.EmptyDataError, pandas.errors.ParserError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: {error}") from error
        except pandas.errors.ParserWarning as error:
            raise ValueError(f"{path}: a row has more cells than there are columns ({error})") from error


def _read_parquet(path: Path, label: str, features: Sequence[str] | None) -> RawData:
    needed("pandas", "data", str(path))
    arrow, parquet = needed("pyarrow", "data", str(path)), needed("pyarrow.parquet", "data", str(path))
    try:
        with parquet.ParquetFile(path) as file:
            names = _columns(path, file.schema_arrow.names, label, features)
            size = max(1, _CHUNK_CELLS // (len(names) + 1))
            batches = file.iter_batches(batch_size=size, columns=[*names, label])
            return _table(path, names, label, (batch.to_pandas() for batch in batches), first_row=1)
    except arrow.ArrowException as error:
        raise ValueError(f"{path}: {error}") from error


def _columns(path: Path, header: Sequence[str], label: str, features: Sequence[str] | None) -> list[str]:
    """Return the features' columns."""
    names = [name for name in header if name != label] if features is None else list(features)
    lacking = [name for name in (label, *names) if name not in header]
    if lacking:
        raise ValueError(
            f"{path}: no column {', '.join(map(repr, lacking))}; there are "
            f"{', '.join(map(repr, header[:20]))}{' …' if len(header) > 20 else ''}. Keys label and features "
            "of the node config name columns"
        )
    if label in names or len(set(names)) < len(names) or not names:
        raise ValueError(
            f"{path}: features must be one column or more, each once, without the label {label!r}, got "
            f"{names}"
        )
    return names


def _table(path: Path, names: list[str], label: str, chunks: Iterable[Any], first_row: int) -> RawData:
    parts: list[Floats] = []
    labels: list[NDArray[np.int64]] = []
    places: dict[str, int] = {}
    row = first_row
    for chunk in chunks:
        x = np.empty((len(chunk), len(names)), np.float32)
        for j, name in enumerate(names):
            with np.errstate(over="ignore"):
                x[:, j] = _numbers(chunk[name])
        strange = ~np.isfinite(x)
        if strange.any():
            i, j = np.argwhere(strange)[0]
            value = chunk[names[j]].iloc[i]
            value = value.item() if isinstance(value, np.generic) else value
            raise ValueError(
                f"{path}: row {row + i}, column {names[j]!r} must be a finite number, got {value!r}"
            )
        y = chunk[label]
        if (empty := np.flatnonzero(y.isna() | (y.astype(str) == ""))).size:
            raise ValueError(
                f"{path}: row {row + empty[0]}, column {label!r} must be a label, got an empty cell"
            )
        codes, found = y.factorize()
        of_code = [places.setdefault(_text(value), len(places)) for value in found]
        labels.append(np.array(of_code, np.int64)[codes])
        parts.append(x)
        row += len(chunk)
    if row == first_row:
        raise ValueError(f"{path} must have at least one row")
    rows = _Rows(f"row {{}}, column {label!r}", row - first_row, first_row)
    return RawData(_joined(parts), list(places), np.concatenate(labels), rows, features=tuple(names))


def _numbers(column: Any) -> NDArray[Any]:
    """Return a column as float64, NaN where a cell is no number."""
    kind = getattr(column.dtype, "kind", "O")
    if kind not in "fiub":
        pandas = needed("pandas", "data", "a table")
        column = pandas.to_numeric(column, errors="coerce")
    return np.asarray(column.to_numpy(dtype=np.float64, na_value=np.nan))


def _text(label: Any) -> str:
    """Return a label as a text: a float that is a whole number as that, true and false as 1 and 0."""
    if isinstance(label, bool | np.bool_) or (isinstance(label, float | np.floating) and label == label // 1):
        return str(int(label))
    return str(label)


def _joined(parts: list[Floats]) -> Floats:
    """Return all parts in one array, each given up when it was copied."""
    out = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), np.float32)
    start = 0
    parts.reverse()
    while parts:
        part = parts.pop()
        out[start : start + len(part)] = part
        start += len(part)
    return out


def _read_images(path: Path) -> RawData:
    """Return the images of a folder of class folders as (N, C, H, W) in [0, 1]: one channel or three."""
    classes = sorted(folder for folder in path.iterdir() if folder.is_dir() and folder.name[0] != ".")
    files = [
        file for folder in classes for file in sorted(folder.iterdir()) if file.suffix.lower() in _IMAGES
    ]
    if not files:
        raise ValueError(f"{path} has no images in class folders: it must be {_FORMS}")
    image = needed("PIL.Image", "data", str(path))
    first = _pixels(image, files[0])
    x = np.empty((len(files), *first.shape), np.float32)
    for i, file in enumerate(files):
        pixels = _pixels(image, file)
        if pixels.shape != first.shape:
            raise ValueError(
                f"{file} must have the shape of {files[0]}, {first.shape} (channels, height, width), got "
                f"{pixels.shape}"
            )
        x[i] = pixels
    labels = np.array([file.parent.name for file in files])
    return RawData.of(x, labels, [f"the folder of {file}" for file in files])


def _pixels(image: Any, file: Path) -> Floats:
    try:
        with image.open(file) as opened:
            return _scaled(opened)
    except Exception as error:  # A damaged image fails in many ways.
        raise ValueError(f"{file}: no image that Pillow reads ({error})") from error


def _scaled(picture: Any) -> Floats:
    """Return a Pillow image as (C, H, W) in [0, 1]: one channel if it is grey, else three."""
    if picture.mode.startswith("I"):  # 16 bits a pixel.
        return np.asarray(picture, np.float32)[None] / np.float32(65535)
    if picture.mode in ("1", "L", "LA"):
        return np.asarray(picture.convert("L"), np.float32)[None] / np.float32(255)
    return np.asarray(picture.convert("RGB"), np.float32).transpose(2, 0, 1) / np.float32(255)


def _read_saved(path: Path, label: str, features: Sequence[str] | None) -> RawData:
    """Return what ``datasets.Dataset.save_to_disk`` wrote: columns of numbers, or one of arrays or images."""
    datasets = needed("datasets", "datasets", str(path))
    try:
        saved = datasets.load_from_disk(str(path))
    except Exception as error:  # Whatever a library of formats raises.
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(saved, datasets.Dataset):
        raise ValueError(f"{path} has the splits {', '.join(saved)}: it must be the folder of one of them")
    if not len(saved):
        raise ValueError(f"{path} must have at least one row")
    names = _columns(path, saved.column_names, label, features)
    plain = all(str(getattr(saved.features[name], "dtype", "")).startswith(_NUMBERS) for name in names)
    size = max(1, _CHUNK_CELLS // (len(names) + 1))
    if plain:
        chunks = saved.select_columns([*names, label]).with_format("pandas").iter(batch_size=size)
        return _table(path, names, label, chunks, first_row=0)
    if len(names) > 1:
        raise ValueError(
            f"{path}: the columns {', '.join(map(repr, names))} must all be numbers, or one of arrays or "
            "images, which key features of the node config names"
        )
    (name,) = names
    parts = [_sample(path, name, i, row[name]) for i, row in enumerate(saved.select_columns(names))]
    first = parts[0].shape
    if strange := [i for i, part in enumerate(parts) if part.shape != first]:
        raise ValueError(
            f"{path}: row {strange[0]}, column {name!r} must have the shape {first}, that of row 0, got "
            f"{parts[strange[0]].shape}"
        )
    labels = np.array([_text(value) for value in saved[label]])
    x = checked_inputs(path, np.stack(parts))
    return RawData.of(x, labels, _Rows(f"row {{}}, column {label!r}", len(x)))


_NUMBERS = ("int", "uint", "float", "bool", "double")


def _sample(path: Path, name: str, row: int, value: Any) -> Floats:
    try:
        if hasattr(value, "convert"):  # A Pillow image.
            return _scaled(value)
        return np.atleast_1d(np.asarray(value, np.float32))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: row {row}, column {name!r} is no array of numbers ({error})") from error


def _described(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    return f"a {type(value).__name__}"
