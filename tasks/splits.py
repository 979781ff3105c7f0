"""Known data sets written as files of nodes, partitioned as in a simulation.

A run on these files with ``partition = "own"``, ``standardise = "none"``, ``holdout = 0`` (on devices in the
node config) and the same seed equals the simulation: docs/bits.md.
"""

import csv
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from .federated import federated
from .groups import group_split
from .own_data import OWN
from .sources import DataSource
from .vertical import VerticalDataset, load_vertical

# The keys of a party's node config that name a file.
_PATHS = ("data", "match-key-file")


def write_split(
    dataset: str,
    folder: str | os.PathLike[str],
    num_nodes: int,
    scheme: str,
    seed: int = 0,
    data_dir: str | os.PathLike[str] | None = None,
    scaling: str = "standard",
) -> Path:
    """Write the training set of a data set as one file per node.

    Parameters
    ----------
    dataset : str
        A name or import path, as for ``load``.
    folder : str or path
        The output folder, created if missing.
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
        ``manifest.json`` in the folder: the partition, each node's number of samples and node config
        (``data`` is the file, relative to the folder), and the required run config.

    Raises
    ------
    DatasetNotFound, ValueError
        As ``load`` and ``partition`` do; ValueError too if the folder has a manifest or such files already.
    """
    names = [f"node-{i}.npz" for i in range(num_nodes)]
    folder = _new_split(folder, *names)
    data = federated(dataset, scheme, num_nodes, seed, data_dir, scaling)
    folder.mkdir(parents=True, exist_ok=True)
    x, y = data.dataset.x_train, data.dataset.y_train
    for name, part in zip(names, data.parts, strict=True):
        with _own_file(folder / name, "wb") as file:
            np.savez(file, x=x[part], y=y[part], classes=np.int64(data.dataset.num_classes))
    return _manifest(
        folder,
        {
            "dataset": dataset,
            "partition": scheme,
            "num-nodes": num_nodes,
            "seed": seed,
            "scaling": scaling,
            "input-shape": list(data.dataset.input_shape),
            "num-classes": data.dataset.num_classes,
            "num-examples": data.sizes,
            "run-config": {"partition": OWN, "num-clients": num_nodes},
            "node-config": [{"data": name} for name in names],
        },
    )


def write_groups(
    data: VerticalDataset, groups: Sequence[NDArray[np.int64]], folder: str | os.PathLike[str], layout: str
) -> list[dict[str, str | int]]:
    """Write a data set as files of its parties, and return their node configs by partition.

    Nodes that learn from these files with ``holdout = 0`` and ``standardise = "none"`` have the same data as
    a simulation, with people in the order of their hashes.

    Parameters
    ----------
    data : VerticalDataset
        The data set, whose training people are written.
    groups : sequence of ndarray of int64
        The rows of each hospital's people.
    folder : str or path
        The output folder. Each group has a folder ``group-<m>`` in it with ``hospital.csv``, ``match.key``
        and ``edge.csv`` or ``device-<n>.csv``, readable only by their owner (mode 0600).
    layout : {"edges", "devices"}
        One file for all devices of a group, or one per device.

    Raises
    ------
    ValueError
        If the samples are not rows of a table, the layout is unknown, or a file exists already.
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
    more: Mapping[str, DataSource] = MappingProxyType({}),
) -> Path:
    """Write a data set's training people as one file per party, partitioned as in a simulation.

    Parameters
    ----------
    dataset, data_dir, more
        As for ``load_vertical``; a set of tables.
    folder : str or path
        The output folder, created if missing, with the files of ``write_groups``.
    num_groups, scheme, seed
        As for ``group_split``.
    layout : {"edges", "devices"} (default: "edges")
        As for ``write_groups``.
    people : int or None (default: None)
        The most people of a group, >= 1; None for all.

    Returns
    -------
    Path
        ``manifest.json`` in the folder: the partition, each party's node config (with paths relative to the
        folder), and the required run config.

    Raises
    ------
    DatasetNotFound, ValueError
        As ``load_vertical``, ``group_split`` and ``write_groups`` do; ValueError too if the folder has a
        manifest already.
    """
    folder = _new_split(folder)
    if people is not None and people < 1:
        raise ValueError(f"people must be an integer >= 1, got {people}")
    data = load_vertical(dataset, data_dir, more=more)
    dealt = group_split(scheme, data.y_train, num_groups, seed)
    groups = [rows[:people] for rows in dealt]
    configs = write_groups(data, groups, folder, layout)
    return _manifest(
        folder,
        {
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
        },
    )


def _new_split(folder: str | os.PathLike[str], *names: str) -> Path:
    """Return where a split with files of these names goes; ValueError if there is one."""
    folder = Path(folder).expanduser()
    if there := [path for name in ("manifest.json", *names) if (path := folder / name).exists()]:
        raise ValueError(f"{there[0]} exists already: the folder must have no files of an earlier split")
    return folder


def _manifest(folder: Path, told: Mapping[str, Any]) -> Path:
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps(told, indent=2) + "\n")
    return manifest


def _own_file(path: Path, mode: str, **options: Any) -> IO[Any]:
    # Each node may read its own file alone.
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
