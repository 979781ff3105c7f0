"""A node's own data: what its node config names, read and checked; and real data sets written as such files.

A node of a deployment (``partition = "own"``) learns on what its own node config names. Nothing of it is an
index into a common set, and no server can name a file or a module on a node.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .federated import federated
from .imports import call_imported, is_import_path
from .own_files import RawData, checked_inputs, read_file

__all__ = [
    "NODE_DATA_KEYS",
    "OWN",
    "Classes",
    "Moments",
    "OwnData",
    "OwnSource",
    "Standardisation",
    "moments",
    "num_features",
    "parse_classes",
    "parse_standardise",
    "read_own",
    "write_split",
]

# The partition of a run whose nodes have data of their own.
OWN = "own"
# The keys of a node config that say what its data are.
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


@dataclass(frozen=True, eq=False)
class OwnData:
    """One node's samples, all finite and labelled. Shared: read the arrays, never change them.

    Parameters
    ----------
    x : ndarray of float32, (N, ...)
        Inputs, N >= 1; images are (N, C, H, W).
    y : ndarray of int64, (N,)
        Labels, each in 0..num_classes - 1.
    num_classes : int
        Number of classes, at least 2.
    features : tuple of str
        The columns of a table; empty for anything else.
    """

    x: NDArray[np.float32]
    y: NDArray[np.int64]
    num_classes: int
    features: tuple[str, ...] = ()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self.x.shape[1:]

    @property
    def dtype(self) -> str:
        """The type of a sample, as nodes tell it: of a table its columns belong to it, as a short digest.

        The names themselves stay at the node; nodes whose columns differ, or differ in order, are told apart.
        """
        if not self.features:
            return str(self.x.dtype)
        return f"{self.x.dtype}[{sha256(json.dumps(self.features).encode()).hexdigest()[:16]}]"


@dataclass(frozen=True)
class Classes:
    """What a run's key ``classes`` says.

    Parameters
    ----------
    number : int or None
        How many, at least 2; None where each node's file tells.
    names : tuple of str
        The name of each class, as the files' labels have it; empty where labels are 0, 1, …
    """

    number: int | None = None
    names: tuple[str, ...] = ()


def parse_classes(text: str) -> Classes:
    """Return the classes of a run: ``"10"``, or the labels that files have, ``"benign,malignant"``.

    The i-th name is class i, whatever a node's file holds and in whatever order. Empty: labels are 0, 1, …,
    and there are as many classes as the file tells, or its largest label and one.

    Raises
    ------
    ValueError
        If it is none of these, or a name stands twice.
    """
    names = tuple(name.strip() for name in text.split(",")) if text.strip() else ()
    if not names:
        return Classes()
    if len(names) == 1:
        if not names[0].isdecimal() or len(names[0]) > 7 or not 2 <= int(names[0]) <= _MAX_CLASSES:
            raise ValueError(f"one name, {names[0]!r}, is no class less than two")
        return Classes(int(names[0]))
    if "" in names or len(set(names)) < len(names):
        raise ValueError("a name is empty or stands twice")
    return Classes(len(names), names)


@dataclass(frozen=True)
class OwnSource:
    """What a node config says of the node's data; hashable.

    Parameters
    ----------
    data : str
        A file or folder, as ``own_files.read_file`` takes it, or ``module:function``.
    label : str
        The column of a table that holds labels.
    features : tuple of str
        The other columns to take, in this order; empty for all in the file's order.
    allowed : tuple of str
        Import paths that this node lets a run name.
    config : tuple
        The whole node config, which a function is given.
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
            If a key is missing or no text, or data is an import path that the node does not allow.
        """
        texts = {}
        for key, default in (("data", ""), ("label", "label"), ("features", ""), ("allow-imports", "")):
            value = node_config.get(key, default)
            if not isinstance(value, str):
                raise ValueError(f"{key} must be a text, got {value!r} in the node config")
            texts[key] = value
        data, allowed = texts["data"], _listed(texts["allow-imports"])
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
        return cls(data, texts["label"], _listed(texts["features"]), allowed, config)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def read_own(source: OwnSource, classes: Classes | None = None) -> OwnData:
    """Return a node's own data.

    Parameters
    ----------
    source : OwnSource
        From the node config. A function is called with the node config as a dictionary and returns
        ``(x, y)``: x a NumPy array of numbers (N, ...), y integers or texts (N,).
    classes : Classes or None (default: None)
        The run's; None is ``Classes()``.

    Raises
    ------
    ValueError
        Where the file, or what it holds, is not valid; it names file, row and column.
    """
    classes = classes or Classes()
    if is_import_path(source.data) and not Path(source.data).exists():
        raw = _called(source)
    else:
        raw = read_file(Path(source.data).expanduser(), source.label, source.features or None)
    y = _classified(source.data, raw, classes)
    told = classes.number or raw.num_classes or max(2, int(y.max()) + 1)
    return OwnData(raw.x, y, told, raw.features)


def _called(source: OwnSource) -> RawData:
    path = source.data
    # What the function keeps must not change with what is done here.
    found = call_imported("data", path, dict(source.config))
    if not isinstance(found, tuple) or len(found) != 2:
        raise ValueError(f"data = {path!r}: returned a {type(found).__name__}, must return (x, y)")
    x, labels = checked_inputs(path, np.array(found[0])), np.asarray(found[1])
    if labels.shape != (len(x),):
        raise ValueError(
            f"{path}: y must have the shape ({len(x)},), one label for each of x, got {labels.shape}"
        )
    return RawData.of(x, labels, [f"y[{i}]" for i in range(len(x))])


def _classified(where: str, raw: RawData, classes: Classes) -> NDArray[np.int64]:
    """Return labels as class numbers."""
    known = {name: number for number, name in enumerate(classes.names)}
    most = classes.number or raw.num_classes or _MAX_CLASSES
    if known:
        valid = f"one of {', '.join(map(repr, classes.names))}"
    else:
        valid = f"an integer from 0 to {most - 1} (or the run's key classes name the labels)"
    numbers = np.empty(len(raw.values), np.int64)
    for place, text in enumerate(raw.values):
        number = known.get(text) if known else _number(text)
        if number is None or number >= most:
            row = raw.rows[int(np.flatnonzero(raw.labels == place)[0])]
            raise ValueError(f"{where}: {row} must be {valid}, got {text!r}")
        numbers[place] = number
    return numbers[raw.labels]


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


# Standardisation.


def num_features(input_shape: tuple[int, ...]) -> int:
    """Return how many features are standardised by themselves: an image's channels, else the last axis."""
    return input_shape[0] if len(input_shape) == 3 else input_shape[-1]


def _by_feature(x: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
    """Return values of features in the shape that goes with x (N, ...)."""
    return values[:, None, None] if x.ndim == 4 else values


@dataclass(frozen=True)
class Moments:
    """What a node tells of its features.

    Parameters
    ----------
    count : int
        Values of each feature: samples, times pixels or steps.
    mean, squares : ndarray of float64, (features,)
        Their mean, and the sum of squared deviations from it: sums of plain squares would lose the digits of
        a feature whose mean is large.
    """

    count: int
    mean: NDArray[np.float64]
    squares: NDArray[np.float64]


def moments(x: NDArray[np.float32]) -> Moments:
    """Return the moments of samples x (N, ...), N >= 1."""
    axes = (0, 2, 3) if x.ndim == 4 else tuple(range(x.ndim - 1))
    count = x.size // num_features(x.shape[1:])
    mean = x.mean(axis=axes, dtype=np.float64)
    squares = np.zeros_like(mean)
    for block in np.array_split(x, max(1, x.size // 2**23)):
        squares += np.square(block - _by_feature(x, mean)).sum(axis=axes)
    return Moments(count, mean, squares)


@dataclass(frozen=True)
class Standardisation:
    """What is taken off each feature and what it is then divided by.

    Parameters
    ----------
    mean, std : tuple of float
        One a feature, or a single one for all; deviations > 0.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def apply(self, x: NDArray[np.float32]) -> None:
        """Take the mean off samples x (N, ...) and divide them by the deviation, in place.

        What float32 cannot hold becomes its largest number: a server that chose the numbers would read from
        an error how large the samples are.

        Raises
        ------
        ValueError
            If there are not as many numbers as features.
        """
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        features = num_features(x.shape[1:])
        if mean.size not in (1, features) or std.shape != mean.shape:
            raise ValueError(
                f"the standardisation must have {features} means and deviations, got {mean.size} and "
                f"{std.size}"
            )
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            x -= _by_feature(x, mean)
            x /= _by_feature(x, std)
        if not np.isfinite(x.sum(dtype=np.float64)):
            np.nan_to_num(x, copy=False)


def parse_standardise(text: str) -> Standardisation | None:
    """Return the constants of a run's key ``standardise``, ``"0.13,0.31"``: a mean and a deviation for all.

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
        raise ValueError("there are not two numbers") from None
    if not (abs(mean) <= 1e30 and 1e-30 <= std <= 1e30):
        raise ValueError("the mean is up to 1e30, the deviation from 1e-30 to 1e30")
    return Standardisation((mean,), (std,))


# A real data set as files.


def write_split(
    dataset: str,
    folder: str | os.PathLike[str],
    num_nodes: int,
    scheme: str,
    seed: int = 0,
    data_dir: str | os.PathLike[str] | None = None,
    scaling: str = "standard",
) -> Path:
    """Write the training set of a data set as one file a node, dealt as a simulation deals it.

    With ``partition = "own"``, ``standardise = "none"`` and ``holdout = 0`` (on devices in the node config),
    With ``partition = "own"``, ``standardise = "none"`` and ``holdout = 0`` (on devices of the node config),
    and seed: docs/bits.md.

    Parameters
    ----------
    dataset : str
        A name or import path, as for ``load``.
    folder : str or path
        Where the files go; made if it is not there.
    num_nodes : int
        Number of files, >= 1.
    scheme : str
        A partition scheme, as for ``partition``.
    seed : int (default: 0)
        Keys the partition.
    data_dir, scaling
        As for ``load``.

    Returns
    -------
    Path
        ``manifest.json`` in the folder: what was dealt how, each node's number of samples and node config
        (``data`` is the file, relative to the folder), and what the run config must say.

    Raises
    ------
    DatasetNotFound, ValueError
        As ``load`` and ``partition`` do; ValueError too if the folder has a manifest or such files already.
    """
    folder = Path(folder).expanduser()
    data = federated(dataset, scheme, num_nodes, seed, data_dir, scaling)
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "manifest.json"
    files = [folder / f"node-{i}.npz" for i in range(num_nodes)]
    if there := [path for path in (manifest, *files) if path.exists()]:
        raise ValueError(f"{there[0]} exists already: the folder must have no files of an earlier split")
    x, y = data.dataset.x_train, data.dataset.y_train
    for path, part in zip(files, data.parts, strict=True):
        # Each node may read its own file alone.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            np.savez(file, x=x[part], y=y[part], classes=np.int64(data.dataset.num_classes))
    told = {
        "dataset": dataset,
        "partition": scheme,
        "num-nodes": num_nodes,
        "seed": seed,
        "scaling": scaling,
        "input-shape": list(data.dataset.input_shape),
        "num-classes": data.dataset.num_classes,
        "num-examples": data.sizes,
        "run-config": {"partition": OWN, "num-clients": num_nodes},
        "node-config": [{"data": path.name} for path in files],
    }
    manifest.write_text(json.dumps(told, indent=2) + "\n")
    return manifest
