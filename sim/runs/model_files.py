"""Files of the global model: ``model.npz`` for NumPy alone, ``model.safetensors`` for everything else.

Both hold the same arrays under the same names; neither needs unpickling.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from logging import WARNING
from pathlib import Path
from typing import IO, Any
from zipfile import ZipFile

import numpy as np
from flwr.common import log
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save

from hedgerow.sim.runs.checkpoint import load_safetensors, plain_array
from hedgerow.sim.runs.durable import remove, write_file
from hedgerow.sim.runs.folder import RunFolderError, opened, refused

NPZ, SAFETENSORS = "model.npz", "model.safetensors"
# Folder of the models of single rounds.
MODELS = "models"
# Folder of the nodes' own models.
NODES = "nodes"
# Reserved by the header of a safetensors file.
_RESERVED = "__metadata__"


def save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write an uncompressed ``.npz`` file atomically.

    ``np.savez`` takes names as keywords and thus refuses some, such as ``file``.
    """

    def fill(file: IO[bytes]) -> None:
        with ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)

    write_file(path, fill)


def load_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of an ``.npz`` file; OSError if it is missing, ValueError if it is not of arrays."""
    try:
        with opened(path) as file, np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except OSError:
        raise
    except Exception as error:  # A damaged archive can raise anything.
        raise ValueError(f"{path} is not a file of arrays: {error}") from error


def keep_model(folder: Path, server_round: int, arrays: Mapping[str, Any]) -> None:
    """Save a round's model in a run's folder."""
    (folder / MODELS).mkdir(exist_ok=True)
    save_arrays(folder / MODELS / f"{server_round:06d}.npz", arrays)


def save_model(folder: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write a model's arrays to the two files in a run's folder, each atomically.

    A model that safetensors cannot hold (such as text or 128-bit complex numbers) gets only ``model.npz``,
    with a warning. Without arrays, as if models stay on the nodes, there is no file.
    """
    if not arrays:
        # Files of an earlier part of a resumed run.
        remove(folder / NPZ)
        remove(folder / SAFETENSORS)
        return
    save_arrays(folder / NPZ, arrays)
    try:
        if _RESERVED in arrays:
            raise ValueError(f"an array is called {_RESERVED}")
        packed = save({name: plain_array(array) for name, array in arrays.items()})
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        log(WARNING, "No %s: %s: %s", SAFETENSORS, type(error).__name__, error)
        # A file of an earlier part of a resumed run.
        remove(folder / SAFETENSORS)
        return
    write_file(folder / SAFETENSORS, lambda file: file.write(packed))


def save_node_models(folder: Path, models: Mapping[str, Mapping[str, NDArray[np.generic]]]) -> None:
    """Write each node's model to the files of ``nodes/NAME`` in a run's folder."""
    with refused(folder):
        for name, arrays in models.items():
            (folder / NODES / name).mkdir(parents=True, exist_ok=True)
            save_model(folder / NODES / name, arrays)


def read_model(path: str | Path) -> dict[str, NDArray[Any]]:
    """Return a model's arrays by name, from either of its files or from a run folder.

    Parameters
    ----------
    path : str or Path
        A ``.npz`` or ``.safetensors`` file, or a folder with ``model.npz``, which keeps the model's order, or
        ``model.safetensors``, which does not.

    Raises
    ------
    RunFolderError
        If there is no such file, or it cannot be read.

    Examples
    --------
    ::

        model.load_state_dict({name: torch.from_numpy(a) for name, a in read_model("runs/my-app-…").items()})
    """
    file = Path(path).expanduser()
    if file.is_dir():
        found = next((file / name for name in (NPZ, SAFETENSORS) if os.path.lexists(file / name)), None)
        if found is None:
            raise RunFolderError(f"{file} has neither {NPZ} nor {SAFETENSORS}")
        file = place = found
    else:
        place = file.resolve()  # the caller may name a link, as caches of models have them
    try:
        with refused(file):
            return load_safetensors(place)[0] if file.suffix == ".safetensors" else load_arrays(place)
    except RunFolderError:
        raise
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise RunFolderError(f"{file} cannot be read as a model: {error}") from error
