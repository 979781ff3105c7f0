"""What a server sends a node to keep, in one place, so that no secure sum forgets it.

A member of a sum masks its update with keys of all that decides it beside its own data: the instruction
(``SumPlan.about``, which the server knows too), and what is here. Members that were told different things
have masks that do not cancel, and shares that the others do not open.
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from flwr.app import ConfigRecord, Context

from hedgerow.wire.calls import RUN_KEY, Call
from hedgerow.wire.records import config_in

__all__ = ["digest_of", "keep_told", "told", "told_digest"]

_TOLD, _OWN = "told/", "told-own/"  # before a name in ``context.state``


def keep_told(context: Context, name: str, common: Mapping[str, Any], own: Mapping[str, Any] = {}) -> None:
    """Put what a server said into ``context.state``, for this run.

    - ``common``: What all members of a sum must have been told alike.
    - ``own``: What is this node's alone, such as the people whom it has.
    """
    for prefix, values in ((_TOLD, common), (_OWN, own)):
        context.state[prefix + name] = ConfigRecord({**values, RUN_KEY: str(context.run_id)})


def told(context: Context, name: str) -> ConfigRecord | None:
    """Return what was kept under a name in this run; None if nothing was."""
    parts = [config_in(context.state, prefix + name) for prefix in (_OWN, _TOLD)]
    if any(part.get(RUN_KEY) != str(context.run_id) for part in parts):
        return None
    values = {**parts[0], **parts[1]}
    del values[RUN_KEY]
    return ConfigRecord(values)


def told_digest(call: Call) -> bytes:
    """Return 32 bytes of what the members of a sum must have in common, and no instruction holds.

    The message type, the message types that the app answers, the run config, and every record of
    ``keep_told``.
    """
    parts: list[Any] = [call.message_type, call.app, _items(call.context.run_config)]
    run = str(call.context.run_id)
    for name in sorted(call.context.state):
        if name.startswith(_TOLD):
            record = config_in(call.context.state, name)
            if record.get(RUN_KEY) == run:
                parts.append([name, _items({key: record[key] for key in record if key != RUN_KEY})])
    return sha256(json.dumps(parts).encode()).digest()


def digest_of(*parts: Any) -> str:
    """Return a digest of values that JSON can write, in hex."""
    return sha256(json.dumps(parts).encode()).hexdigest()


def _items(values: Mapping[str, Any]) -> list[list[str]]:
    return [[key, repr(values[key])] for key in sorted(values)]
