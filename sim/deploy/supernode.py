"""A SuperNode on this machine: its config, its id, its start and its restart."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

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
