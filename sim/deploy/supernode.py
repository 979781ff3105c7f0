"""A SuperNode on this machine: its config, its id, its start and its return after a failure."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from flwr.app import UserConfig

from hedgerow.sim.deploy.processes import Program, StartError, program
from hedgerow.sim.runs.plan import parse_overrides, toml_value

__all__ = ["SuperNode", "node_configs"]

_NODE_ID = re.compile(r"SuperNode ID: (\d+)")
_SCOPED = re.compile(r"\s*(\d+)(?:-(\d+))?\s*:\s*(.*)", re.DOTALL)


class SuperNode(Program):
    """One node, which may be killed and started again.

    Parameters
    ----------
    partition_id : int
        Its place in the federation.
    config : Mapping[str, bool | int | float | str]
        Its node config, ``partition-id`` and ``num-partitions`` included.
    arguments : Sequence[str]
        How it finds the SuperLink and proves who it is.
    env, log_file, user
        As for ``Program``.
    """

    def __init__(
        self,
        partition_id: int,
        config: UserConfig,
        arguments: Sequence[str],
        env: Mapping[str, str],
        log_file: Path,
        user: int | None = None,
    ) -> None:
        self.partition_id = partition_id
        self.config = dict(config)
        pairs = " ".join(f"{key}={toml_value(value)}" for key, value in config.items())
        command = [program("flower-supernode"), *arguments, "--node-config", pairs]
        super().__init__(f"the SuperNode of partition {partition_id}", command, env, log_file, user)

    @property
    def node_id(self) -> int | None:
        """Flower's id of the node, None until the SuperLink has taken it."""
        found = _NODE_ID.search(self.log()) if self.log_file.exists() else None
        return int(found[1]) if found else None

    def join(self, patience: float) -> None:
        """Return when the SuperLink has taken the node.

        Raises
        ------
        StartError
            If the node ends, or is not taken within ``patience`` seconds.
        """
        self.wait_until(lambda: self.node_id is not None, patience)

    def move(self, superlink: str, patience: float = 120.0) -> None:
        """Stop the node, and start it towards another SuperLink (``host:port``), which must know its key.

        Raises
        ------
        StartError
            If it was not taken within ``patience`` seconds.
        """
        self.command[self.command.index("--superlink") + 1] = superlink
        self.restart(patience)

    def restart(self, patience: float = 120.0, *, delay: float = 10.0) -> None:
        """Start the node again, as often as it takes: stopped first where it runs.

        With authentication a SuperLink refuses a node that it still counts as online, which a killed one is
        for up to a minute. A new process knows nothing of what the old one kept in ``context.state``.

        Parameters
        ----------
        patience : float (default: 120.0)
            Seconds until it must be taken.
        delay : float (default: 10.0)
            Seconds between two starts; a shorter one is refused more often and comes back no sooner.

        Raises
        ------
        StartError
            If it was not taken in time.
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
    """Return each node's config as the command line says it.

    Parameters
    ----------
    texts : Sequence[str]
        ``'key=value ...'`` for every node, ``'2: key=value ...'`` for one, ``'0-3: key=value ...'`` for
        several. Later ones win. ``{partition-id}`` in a text is each node's own:
        ``'data=node-{partition-id}.npz'``.
    num_nodes : int
        Nodes of the federation.

    Raises
    ------
    ValueError
        If a text is not of that form, or names a partition that is not there.
    """
    configs: list[UserConfig] = [{} for _ in range(num_nodes)]
    for text in texts:
        scoped = _SCOPED.fullmatch(text)
        first, last, pairs = (
            (int(scoped[1]), int(scoped[2] or scoped[1]), scoped[3]) if scoped else (0, -1, text)
        )
        last = num_nodes - 1 if last < 0 else last
        if not first <= last < num_nodes:
            raise ValueError(f"node config {text!r}: valid partitions are 0 to {num_nodes - 1}")
        for partition_id, config in enumerate(configs[first : last + 1], first):
            own = pairs.replace("{partition-id}", str(partition_id))
            config.update(parse_overrides([own], {}))
    return configs
