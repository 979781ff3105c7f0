"""A node's own data: reading and checking what its node config names, classes, and standardisation.

With ``partition = "own"`` a node of a deployment learns from the data that its own node config names. No
server can name a file or a module on a node.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .files import FileColumns, FileData, Reading, named, of_arrays, read_file, rounded_away
from .imports import call_imported, is_import_path

# The partition of a run whose nodes have their own data.
OWN = "own"
# The node config's keys about data.
NODE_DATA_KEYS = (
    "allow-imports",
    "data",
    "features",
    "holdout",
    "holdout-seed",
    "label",
    "min-samples",
    "name",
    "share-statistics",
)

_MAX_CLASSES = 2**20
_INTEGRAL = re.compile(r"^(-?\d+)\.0+$")


@dataclass(frozen=True, eq=False)
class OwnData:
    """One node's samples, all finite and labeled. Shared: read the arrays, never change them.

    Parameters
    ----------
    x : ndarray of float32, float64 or int64, (N, ...)
        Inputs as in ``FileData``, N >= 1; images are (N, C, H, W).
    y : ndarray of int64, (N,)
        Labels, each in 0..num_classes - 1.
    num_classes : int
        Number of classes, at least 2.
    features : tuple of str
        The columns of a table; empty for anything else.
    depth : str (default: "")
        Of images in a folder, see ``Pictures``.
    reading : Reading or None (default: None)
        What was read, for the owner's log.
    """

    x: NDArray[Any]
    y: NDArray[np.int64]
    num_classes: int
    features: tuple[str, ...] = ()
    depth: str = ""
    reading: Reading | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self.x.shape[1:]

    @property
    def dtype(self) -> str:
        """The type of a sample in training, as nodes report it; a table's has a short digest of its columns.

        The names themselves stay at the node; nodes whose columns or their order differ are detected. So are
        nodes whose images have another depth than 8 bits, because their scale differs.
        """
        kind = "int64" if self.is_integer else "float32"
        if self.depth not in ("", "8-bit"):
            return f"{kind}[{self.depth}]"
        if not self.features:
            return kind
        return f"{kind}[{sha256(json.dumps(self.features).encode()).hexdigest()[:16]}]"

    @property
    def is_integer(self) -> bool:
        """Whether samples are integers, such as token ids, which are never standardized."""
        return self.x.dtype.kind in "iu"


@dataclass(frozen=True)
class Classes:
    """The value of a run's key ``classes``.

    Parameters
    ----------
    number : int or None
        Number of classes, at least 2; None to use each file's.
    names : tuple of str
        The label of each class in the files; empty if labels are 0, 1, …
    """

    number: int | None = None
    names: tuple[str, ...] = ()


def parse_classes(text: str) -> Classes:
    """Parse the classes of a run: ``"10"``, or the labels in the files, ``"benign,malignant"``.

    The i-th name is class i, at every node. Empty: labels are 0, 1, …, and the number of classes is the
    file's, or else its largest label plus one.

    Raises
    ------
    ValueError
        If it is none of these, or a name is repeated.
    """
    names = tuple(name.strip() for name in text.split(",")) if text.strip() else ()
    if not names:
        return Classes()
    if len(names) == 1:
        if not names[0].isdecimal() or len(names[0]) > 7 or not 2 <= int(names[0]) <= _MAX_CLASSES:
            raise ValueError(f"there must be at least two names, got {names[0]!r}")
        return Classes(int(names[0]))
    if "" in names or len({*map(_plain, names)}) < len(names):
        raise ValueError("names must be distinct and not empty")
    return Classes(len(names), names)


@dataclass(frozen=True)
class OwnSource:
    """A node config's entries about data; hashable.

    Parameters
    ----------
    data : str
        A file or folder for ``files.read_file``, or ``module:function``.
    label : str
        A table's label column.
    features : tuple of str
        A table's feature columns, in this order; empty for all others, in the file's order.
    allowed : tuple of str
        Import paths that the node allows.
    config : tuple
        The whole node config, which is passed to the function.
    """

    data: str
    label: str
    features: tuple[str, ...]
    allowed: tuple[str, ...]
    config: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> "OwnSource":
        """Read a node config.

        Raises
        ------
        ValueError
            If a key is missing or not a text, or data is an import path that the node does not allow.
        """
        texts = {}
        for key, default in (("data", ""), ("label", "label"), ("features", ""), ("allow-imports", "")):
            value = node_config.get(key, default)
            if not isinstance(value, str):
                raise ValueError(f"{key} must be a text, got {value!r} in the node config")
            texts[key] = value
        data, allowed = texts["data"], listed(texts["allow-imports"])
        if not data:
            raise ValueError(
                "data is missing in the node config; with partition = 'own' it names this node's file or "
                "folder, or a 'module:function': --node-config 'data=\"/srv/x.npz\"'"
            )
        if is_import_path(data) and not Path(data).exists() and data not in allowed:
            raise ValueError(
                "data must not be an import path unless allow-imports of the same config has it (now "
                f"{', '.join(allowed) or 'empty'}), got {data!r} in the node config"
            )
        config = tuple(sorted(node_config.items()))
        return cls(data, texts["label"], listed(texts["features"]), allowed, config)


def listed(text: str) -> tuple[str, ...]:
    """Return the names in a text, separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def read_own(source: OwnSource, classes: Classes | None = None) -> OwnData:
    """Return a node's own data.

    Parameters
    ----------
    source : OwnSource
        From the node config. A function is called with the node config as a dictionary and returns
        ``(x, y)``: x a NumPy array of numbers (N, ...), y integers or strings (N,).
    classes : Classes or None (default: None)
        The run's; None is ``Classes()``.

    Raises
    ------
    ValueError
        If the file or its content is invalid; it names file, row and column.
    """
    classes = classes or Classes()
    if is_import_path(source.data) and not Path(source.data).exists():
        found = _called(source)
    else:
        found = read_file(Path(source.data).expanduser(), FileColumns(source.label, source.features))
    y = _classified(source.data, found, classes)
    told = classes.number or found.num_classes or max(2, int(y.max()) + 1)
    return OwnData(found.x, y, told, found.features, found.depth, found.reading(source.data))


def _called(source: OwnSource) -> FileData:
    path = source.data
    found = call_imported("data", path, dict(source.config))
    if not isinstance(found, tuple) or len(found) != 2:
        raise ValueError(f"data = {path!r} must return (x, y), got a {type(found).__name__}")
    with named(path):
        # A copy, because x is standardised in place.
        return of_arrays(np.array(found[0]), np.asarray(found[1]))


def _classified(where: str, found: FileData, classes: Classes) -> NDArray[np.int64]:
    """Return labels as class numbers."""
    known = {_plain(name): number for number, name in enumerate(classes.names)}
    most = classes.number or found.num_classes or _MAX_CLASSES
    if known:
        valid = f"one of {', '.join(map(repr, classes.names))}"
    else:
        valid = f"an integer from 0 to {most - 1} (or the run's key classes name the labels)"
    numbers = []
    assert found.labels is not None
    for label, place in found.labels.first.items():
        number = known.get(_plain(label)) if known else _number(_plain(label))
        if number is None or number >= most:
            raise ValueError(f"{where}: {place} must be {valid}, got {label!r}")
        numbers.append(number)
    return found.labels.numbers(numbers)


def _plain(label: str) -> str:
    """Return a label in the form in which every reader's agree: a CSV's ``True`` is 1, and 1.0 is 1."""
    flags = {"true": "1", "false": "0"}
    return flags.get(label.lower()) or _INTEGRAL.sub(r"\1", label)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def in_training(x: NDArray[Any], features: Sequence[str] = ()) -> NDArray[Any]:
    """Return unstandardized samples as a model gets them: float32, or integers.

    ``features`` names the columns of a table.

    Raises
    ------
    ValueError
        If float32 would round away the differences of a feature, such as a Unix time's.
    """
    if x.dtype != np.float64:
        return x
    rough = np.flatnonzero(rounded_away(x) & (x.min(_axes(x)) < x.max(_axes(x))))
    if rough.size:
        name = repr(features[rough[0]]) if features else f"x[..., {rough[0]}]"
        raise ValueError(
            f"standardise must be 'federated' or two numbers, or the file must hold smaller values: float32 "
            f"would round away the differences of {name}"
        )
    return x.astype(np.float32)


# Standardisation.


def num_features(input_shape: tuple[int, ...]) -> int:
    """Return the number of features to standardize: an image's channels, else the last axis."""
    return input_shape[0] if len(input_shape) == 3 else input_shape[-1]


def _axes(x: NDArray[Any]) -> tuple[int, ...]:
    """Return the axes over which a feature of x (N, ...) has values."""
    return (0, 2, 3) if x.ndim == 4 else tuple(range(x.ndim - 1))


def _by_feature(x: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
    """Return values per feature, shaped to broadcast with x (N, ...)."""
    return values[:, None, None] if x.ndim == 4 else values


@dataclass(frozen=True)
class Moments:
    """The statistics that a node reports of its features.

    Parameters
    ----------
    count : int
        Values of each feature: samples, times pixels or steps.
    mean, squares : ndarray of float64, (features,)
        Their mean, and the sum of squared deviations from it. Sums of plain squares would lose precision for
        a feature with a large mean.
    """

    count: int
    mean: NDArray[np.float64]
    squares: NDArray[np.float64]


def moments(x: NDArray[Any]) -> Moments:
    """Return the moments of samples x (N, ...), N >= 1.

    The corrected two-pass algorithm: the rounding of a large mean changes neither mean nor squares.
    """
    axes = _axes(x)
    count = x.size // num_features(x.shape[1:])
    mean = x.mean(axis=axes, dtype=np.float64)
    rest, squares = np.zeros_like(mean), np.zeros_like(mean)
    for block in _blocks(x):
        moved = block - _by_feature(x, mean)
        rest += moved.sum(axis=axes)
        squares += np.square(moved).sum(axis=axes)
    return Moments(count, mean + rest / count, np.maximum(squares - rest**2 / count, 0.0))


def _blocks(x: NDArray[Any]) -> list[NDArray[Any]]:
    return np.array_split(x, max(1, x.size // 2**23))


@dataclass(frozen=True)
class Standardisation:
    """The mean to subtract from each feature, and the deviation to divide it by.

    Parameters
    ----------
    mean, std : tuple of float
        One per feature, or one for all; deviations > 0.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def apply(self, x: NDArray[Any]) -> NDArray[np.float32]:
        """Return samples x (N, ...) standardized in float64, as float32; in place if they are that already.

        An overflow becomes float32's largest number: an error would tell a server that chose the constants
        how large the samples are.

        Raises
        ------
        ValueError
            If the number of constants is not that of the features.
        """
        mean, std = np.array(self.mean), np.array(self.std)
        features = num_features(x.shape[1:])
        if mean.size not in (1, features) or std.shape != mean.shape:
            raise ValueError(
                f"the standardisation must have {features} means and deviations, got {mean.size} and "
                f"{std.size}"
            )
        out = x if x.dtype == np.float32 else np.empty(x.shape, np.float32)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            for block, result in zip(_blocks(x), _blocks(out), strict=True):
                result[:] = (block - _by_feature(x, mean)) / _by_feature(x, std)
        if not np.isfinite(out.sum(dtype=np.float64)):
            np.nan_to_num(out, copy=False)
        return out


def parse_standardise(text: str) -> Standardisation | None:
    """Parse a run's key ``standardise``: ``"0.13,0.31"``, a mean and a deviation for all features.

    None for ``"federated"`` and ``"none"``.

    Raises
    ------
    ValueError
        For anything else.
    """
    if text in ("federated", "none"):
        return None
    parts = text.split(",")
    try:
        mean, std = (float(part) for part in parts)
    except ValueError:
        raise ValueError("it must be two numbers") from None
    if not (abs(mean) <= 1e30 and 1e-30 <= std <= 1e30):
        raise ValueError("the mean must be in [-1e30, 1e30] and the deviation in [1e-30, 1e30]")
    return Standardisation((mean,), (std,))
