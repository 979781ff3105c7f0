"""A node's sealed links in a run: its keys, whom it knows, and what is kept of that between messages.

A device has a long-lived key on its disk and a key of the run in its context, which is told to nobody and
gone when the run is over. A simulated node's keys follow from the run's seed: it has nobody to hide from, and
a run that goes on finds its links as they were.
"""

import json
import os
from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from flwr.app import ConfigRecord, Context

from hedgerow.clients.mods.guard import WEAK, Refusal
from hedgerow.wire.calls import LINKS_RECORD, RUN_KEY, SECRET_RECORD, Call
from hedgerow.wire.records import config_in
from hedgerow.wire.sealed import Links, NodeIdentity, SealingKey, read_pins
from hedgerow.wire.simulated import is_simulated

__all__ = ["NodeLinks", "check_sealed", "own_key"]

_KEY, _PINS = "sealing-key", "neighbour-keys"  # Of the node config.
_SESSION, _RUN = "link-session", "link-run"  # In SECRET_RECORD.
# In LINKS_RECORD: all links as one value, for engines copy a state with every message, value by value.
_WRITTEN = "links"


def check_sealed(call: Call, sealed: bool) -> None:
    """Raise ``guard.Refusal`` if a run is not sealed and the node's owner wants that it is."""
    if not sealed and any(call.context.node_config.get(key) for key in (_KEY, _PINS)):
        raise Refusal(WEAK, "sealed")


def own_key(context: Context, seed: int = 0) -> SealingKey:
    """Return the node's long-lived key: that of its node config's ``sealing-key``, else one of its own.

    A device's own is made at its first start, in Flower's home; a simulated node's follows from a seed.

    Raises
    ------
    ValueError
        If there is no such key; see ``SealingKey.at``.
    """
    config = context.node_config
    if named := config.get(_KEY):
        return SealingKey.at(_path(_KEY, named))
    name = str(config.get("name") or f"partition-{config.get('partition-id')}")
    if is_simulated():
        return SealingKey.simulated("key", seed, name)
    home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
    # A name is the owner's, and may hold what no file's name does.
    return SealingKey.at(home / "hedgerow-keys" / f"{sha256(name.encode()).hexdigest()[:32]}.pem")


def _path(key: str, named: object) -> Path:
    if not isinstance(named, str):
        raise ValueError(f"{key} must be the path of a file, got {named!r} in the node config")
    return Path(named).expanduser()


class NodeLinks(Links):
    """The links of one node in one run, as its context holds them.

    - ``seed``: The run's seed, which the keys of a simulated node follow from.
    - ``begin``: Whether a device may draw its key of the run, where it has none: an introduction must follow.
    - ``run``: What the run is called at both ends, where Flower calls it otherwise at each: at sites that
      have a run of Flower's each. Empty: Flower's id. What was sealed in an earlier run of this name does not
      open: a device has another key in each run of Flower's.

    Raises
    ------
    ValueError
        If the node has no key of the run, or a file of its node config is not valid.
    """

    def __init__(self, call: Call, seed: int, *, begin: bool = False, run: str = "") -> None:
        context, name = call.context, str(call.partition_id)
        if is_simulated():
            session = SealingKey.simulated("session", seed, name)
        else:
            session = _session(context, begin=begin)
        named, self._flowers = context.node_config.get(_PINS), str(context.run_id)
        pins = read_pins(_path(_PINS, named)) if named else None
        kept = config_in(context.state, LINKS_RECORD)
        written = kept.get(_WRITTEN) if kept.get(RUN_KEY) == self._flowers else None
        found = _read(written) if isinstance(written, bytes) else ({}, {}, None)
        known, told, neighbours = found
        identity = _identity(own_key(context, seed), session)
        super().__init__(identity, run or self._flowers, name, pins, known, neighbours)
        # Other secrets that are told on the links, by name.
        self.told: dict[str, bytes] = dict(told)
        self._before = found

    def name_neighbours(self, names: Iterable[str]) -> None:
        """Take the neighbours that the run's graph has, once: the first key of no other name is trusted.

        A server that could add a name later could hand on a key of its own under it, at any time. Simulated
        nodes, all of one user, trust everybody.
        """
        if self.neighbours is None and not is_simulated():
            self.neighbours = frozenset(names)

    def keep(self, context: Context) -> None:
        """Write the links to the node's state."""
        if (self.known, self.told, self.neighbours) != self._before:
            secrets = (
                {name: value.hex() for name, value in part.items()} for part in (self.known, self.told)
            )
            graph = [] if self.neighbours is None else [sorted(self.neighbours)]
            written = json.dumps([*secrets, *graph]).encode()
            context.state[LINKS_RECORD] = ConfigRecord({RUN_KEY: self._flowers, _WRITTEN: written})
        if not is_simulated():
            secret = config_in(context.state, SECRET_RECORD)
            session = self.identity.session.private
            context.state[SECRET_RECORD] = ConfigRecord({**secret, _SESSION: session, _RUN: self._flowers})


@lru_cache(maxsize=2**12)
def _identity(key: SealingKey, session: SealingKey) -> NodeIdentity:
    return NodeIdentity(key, session)


@lru_cache(maxsize=2**12)
def _read(written: bytes) -> tuple[dict[str, bytes], dict[str, bytes], frozenset[str] | None]:
    known, told, *graph = json.loads(written)
    known, told = ({name: bytes.fromhex(one) for name, one in part.items()} for part in (known, told))
    return known, told, frozenset(graph[0]) if graph else None


def _session(context: Context, *, begin: bool) -> SealingKey:
    secret = config_in(context.state, SECRET_RECORD)
    session = secret.get(_SESSION)
    if isinstance(session, bytes) and secret.get(_RUN) == str(context.run_id):
        return SealingKey(session)
    if not begin:
        raise ValueError("this node has no key of the run: it must get an introduction first")
    return SealingKey.drawn()
