"""A node's sealed links in a run: its keys, its known peers, and their storage between messages.

A device has a long-lived key on its disk and a session key in its context, which never leaves the node and is
dropped at the end of the run. A simulated node derives its keys from the run's seed, so that a resumed run
finds the same links.
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
from hedgerow.wire.process import is_simulated
from hedgerow.wire.records import config_in
from hedgerow.wire.sealed import Links, NodeIdentity, SealingKey, read_pins

_KEY, _PINS = "sealing-key", "neighbour-keys"  # in the node config
_SESSION, _RUN = "link-session", "link-run"  # in SECRET_RECORD
# In LINKS_RECORD: all links as one value, because engines copy a state value by value with every message.
_WRITTEN = "links"
# Known peers, other secrets, and neighbours, if they are fixed.
_Kept = tuple[dict[str, bytes], dict[str, bytes], frozenset[str] | None]


def check_sealed(call: Call, sealed: bool) -> None:
    """Raise ``guard.Refusal`` if a run is not sealed but the node's owner requires it."""
    if not sealed and any(call.context.node_config.get(key) for key in (_KEY, _PINS)):
        raise Refusal(WEAK, "sealed")


def own_key(context: Context, seed: int | None = None) -> SealingKey:
    """Return the node's long-lived key: the node config's ``sealing-key``, else a generated one.

    A device generates its key at its first start, in FLWR_HOME; a simulated node derives it from the run's
    ``seed``, which is None for a device.
    ValueError if the named key cannot be read, see ``SealingKey.at``.
    """
    config = context.node_config
    if named := config.get(_KEY):
        return SealingKey.at(_path(_KEY, named))
    name = str(config.get("name") or f"partition-{config.get('partition-id')}")
    if seed is not None:
        return SealingKey.simulated("key", seed, name)
    home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
    # Hashed, because a name may hold characters that a file name cannot.
    return SealingKey.at(home / "hedgerow-keys" / f"{sha256(name.encode()).hexdigest()[:32]}.pem")


def _path(key: str, named: object) -> Path:
    if not isinstance(named, str):
        raise ValueError(f"{key} must be the path of a file, got {named!r} in the node config")
    return Path(named).expanduser()


class NodeLinks(Links):
    """The links of one node in one run, as stored in its context.

    - ``seed``: The run's seed, from which a simulated node derives its keys.
    - ``begin``: Whether a device without a session key may draw one; an introduction must follow.
    - ``run``: A run name that both ends share, for sites that each have their own Flower run; if empty,
      Flower's run id. Messages sealed in an earlier run of the same name do not open, because a device draws
      a new session key in each Flower run.

    ValueError if the node has no session key, or a file in its node config is invalid.
    """

    def __init__(self, call: Call, seed: int, *, begin: bool = False, run: str = "") -> None:
        context, name = call.context, str(call.partition_id)
        self._simulated = is_simulated()
        key = own_key(context, seed if self._simulated else None)
        if self._simulated:
            session = SealingKey.simulated("session", seed, name)
        else:
            session = _session(context, begin=begin)
        named, self._run_id = context.node_config.get(_PINS), str(context.run_id)
        pins = read_pins(_path(_PINS, named)) if named else None
        kept = context.state.get(LINKS_RECORD)
        found: _Kept = {}, {}, None
        if isinstance(kept, ConfigRecord) and kept.get(RUN_KEY) == self._run_id:
            written = kept.get(_WRITTEN)
            found = _read(written) if isinstance(written, bytes) else found
        known, secrets, neighbours = found
        super().__init__(_identity(key, session), run or self._run_id, name, pins, known, neighbours)
        # Other secrets exchanged on the links, by name.
        self.secrets: dict[str, bytes] = dict(secrets)
        self._before = found

    def name_neighbours(self, names: Iterable[str]) -> None:
        """Fix the neighbours of the run's graph; keys of other names are not trusted on first use.

        Otherwise a server could add a name later and pass its own key under it. Simulated nodes trust all.
        """
        if self.neighbours is None and not self._simulated:
            self.neighbours = frozenset(names)

    def keep(self, context: Context) -> None:
        """Write the links to the context."""
        if (self.known, self.secrets, self.neighbours) != self._before:
            parts = (
                {name: value.hex() for name, value in part.items()} for part in (self.known, self.secrets)
            )
            graph = [] if self.neighbours is None else [sorted(self.neighbours)]
            written = json.dumps([*parts, *graph]).encode()
            context.state[LINKS_RECORD] = ConfigRecord({RUN_KEY: self._run_id, _WRITTEN: written})
        if not self._simulated:
            secret = config_in(context.state, SECRET_RECORD)
            session = self.identity.session.private
            context.state[SECRET_RECORD] = ConfigRecord({**secret, _SESSION: session, _RUN: self._run_id})


@lru_cache(maxsize=2**12)
def _identity(key: SealingKey, session: SealingKey) -> NodeIdentity:
    return NodeIdentity(key, session)


@lru_cache(maxsize=2**12)
def _read(written: bytes) -> _Kept:
    known, secrets, *graph = json.loads(written)
    known, secrets = ({name: bytes.fromhex(one) for name, one in part.items()} for part in (known, secrets))
    return known, secrets, frozenset(graph[0]) if graph else None


def _session(context: Context, *, begin: bool) -> SealingKey:
    secret = config_in(context.state, SECRET_RECORD)
    session = secret.get(_SESSION)
    if isinstance(session, bytes) and secret.get(_RUN) == str(context.run_id):
        return SealingKey(session)
    if not begin:
        raise ValueError("this node has no session key for this run: an introduction must come first")
    return SealingKey.drawn()
