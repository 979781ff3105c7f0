"""A SuperNode on this machine: its config, its id, its start and its restart."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import UserConfig

from hedgerow.sim.deploy.pace import paced
from hedgerow.sim.deploy.processes import Program, StartError, program
from hedgerow.sim.runs.plan import parse_overrides, toml_value

_NODE_ID = re.compile(r"SuperNode ID: (\d+)")
_SCOPED = re.compile(r"\s*(\d+)(?:-(\d+))?\s*:\s*(.*)", re.DOTALL)


class SuperNode(Program):
    """One node, which can be killed and started again.

    Parameters
    ----------
    partition_id : int
        Its partition.
    config : Mapping[str, bool | int | float | str]
        Its node config, including ``partition-id`` and ``num-partitions``.
    arguments : Sequence[str]
        ``flower-supernode``'s options for the SuperLink's address and authentication.
    env, log_file, user
        As in ``Program``.
    fast : bool (default: True)
        Ask for messages at the pace of ``pace.py``, not every 3 s.
    """

    def __init__(
        self,
        partition_id: int,
        config: UserConfig,
        arguments: Sequence[str],
        env: Mapping[str, str],
        log_file: Path,
        user: int | None = None,
        *,
        fast: bool = True,
    ) -> None:
        self.partition_id = partition_id
        self.config = dict(config)
        pairs = " ".join(f"{key}={toml_value(value)}" for key, value in config.items())
        supernode, arguments = program("flower-supernode"), [*arguments, "--node-config", pairs]
        command = paced(supernode, arguments) if fast else [supernode, *arguments]
        super().__init__(f"the SuperNode of partition {partition_id}", command, env, log_file, user)

    @property
    def node_id(self) -> int | None:
        """Flower's id of the node, None until the SuperLink has accepted it."""
        found = _NODE_ID.search(self.log()) if self.log_file.exists() else None
        return int(found[1]) if found else None

    def join(self, patience: float) -> None:
        """Wait until the SuperLink has accepted the node; StartError if not within ``patience`` seconds."""
        self.wait_until(lambda: self.node_id is not None, patience)

    def move(self, superlink: str, patience: float = 120.0) -> None:
        """Restart the node with another SuperLink (``host:port``), at which its key must be registered."""
        self.command[self.command.index("--superlink") + 1] = superlink
        self.restart(patience)

    def restart(self, patience: float = 120.0, *, delay: float = 10.0) -> None:
        """Stop the node and start it until it is accepted; StartError if not within ``patience`` seconds.

        With authentication a SuperLink refuses a node that it still counts as online, for up to a minute
        after it was killed; ``delay`` is the time between two starts. The new process does not have the old
        one's ``context.state``.
        """
        self.stop()
        end = time.monotonic() + patience
        while True:
            self.start()
            try:
                return self.join(max(end - time.monotonic(), 1.0))
            except StartError:
                self.stop()
                if time.monotonic() + delay > end:
                    raise
            time.sleep(delay)


def node_configs(texts: Sequence[str], num_nodes: int) -> list[UserConfig]:
    """Return each node's config from command-line options.

    Each text is ``'key=value ...'`` for all nodes, ``'2: key=value ...'`` for one or ``'0-3: key=value ...'``
    for several; later texts win. ``{partition-id}`` is replaced by each node's own, as in
    ``'data=node-{partition-id}.npz'``. ValueError for another form or an unknown partition.
    """
    configs: list[UserConfig] = [{} for _ in range(num_nodes)]
    for text in texts:
        scoped = _SCOPED.fullmatch(text)
        first, last, pairs = (
            (int(scoped[1]), int(scoped[2] or scoped[1]), scoped[3]) if scoped else (0, -1, text)
        )
        last = num_nodes - 1 if last < 0 else last
        if not first <= last < num_nodes:
            raise ValueError(f"partitions must be from 0 to {num_nodes - 1}, got node config {text!r}")
        for partition_id, config in enumerate(configs[first : last + 1], first):
            own = pairs.replace("{partition-id}", str(partition_id))
            config.update(parse_overrides([own], {}))
    return configs


# A folder with one data file per node, and its manifest


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
