"""A folder with one data file per node, and its manifest."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import UserConfig

MANIFEST = "manifest.json"
_TABLES = "node-config", "run-config"
# Keys of a node config that name a file of the folder.
_PATHS = ("data", "match-key-file")


@dataclass(frozen=True)
class Split:
    """The files of ``hedgerow deploy split``.

    Parameters
    ----------
    node_configs : list of dict
        Each node's config with absolute paths of its files; one entry per partition, at least one.
    run_config : dict
        The settings that a run on them requires: ``partition = "own"``, number of nodes, layout.
    """

    node_configs: list[UserConfig]
    run_config: UserConfig


def read_split(folder: str | os.PathLike[str]) -> Split:
    """Read a folder's ``manifest.json``: ``node-config``, a list, and ``run-config``, keys and values.

    Its paths are relative to the folder and must stay within it.

    Raises
    ------
    ValueError
        If the manifest is missing or malformed, or a file is missing or outside the folder.
    """
    folder = Path(folder).expanduser().absolute()
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"the folder must be made by `hedgerow deploy split`; {path} cannot be read ({error.strerror})"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} must be a manifest of `hedgerow deploy split` in JSON ({error})") from error
    nodes, run = (content.get(key) if isinstance(content, dict) else None for key in _TABLES)
    if not (
        isinstance(nodes, list) and nodes and isinstance(run, dict) and all(map(_is_config, [*nodes, run]))
    ):
        raise ValueError(
            f"{path} must be a manifest of `hedgerow deploy split`, with 'node-config', a list of one or "
            "more {key: value}, and 'run-config', {key: value}"
        )
    return Split([_located(path, config) for config in nodes], run)


def readable_by_others(node_configs: Sequence[UserConfig]) -> list[Path]:
    """Return the nodes' files that others than their owner may read."""
    files = {Path(str(config[key])) for config in node_configs for key in _PATHS if key in config}
    return sorted(file for file in files if file.stat().st_mode & 0o077)


def _is_config(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(one, bool | int | float | str) for one in value.values()
    )


def _located(manifest: Path, config: Mapping[str, Any]) -> UserConfig:
    """Return a node config whose paths are absolute."""
    found = dict(config)
    for key in _PATHS:
        if key not in config:
            continue
        file = manifest.parent / str(config[key])
        if not file.resolve().is_relative_to(manifest.parent.resolve()):
            raise ValueError(f"{manifest}: {key} must be a file within the folder, got {config[key]!r}")
        if not file.is_file():
            raise ValueError(f"{manifest}: {key} must be an existing file, got {config[key]!r}")
        found[key] = str(file)
    if "data" not in found:
        raise ValueError(f"{manifest}: each node config must have 'data', the name of its file")
    return found
