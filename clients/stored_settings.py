"""Settings that a server sends a node to keep, stored in one place so that secure sums can bind to them.

The keys of a member's masks depend on everything but its data that determines its update: the instruction
(``SumPlan.about``, which the server knows too) and these settings. If members received different settings,
their masks do not cancel and the others do not open their shares.
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from flwr.app import ConfigRecord, Context

from hedgerow.wire.calls import RUN_KEY, Call
from hedgerow.wire.records import config_in

__all__ = ["digest_of", "settings_digest", "store_settings", "stored_settings"]

_COMMON, _OWN = "told/", "told-own/"  # before a name in ``context.state``


def store_settings(
    context: Context, name: str, common: Mapping[str, Any], own: Mapping[str, Any] = {}
) -> None:
    """Store what a server sent in ``context.state``, for this run.

    - ``common``: values that all members of a sum must share.
    - ``own``: values of this node alone, such as the people in its data.
    """
    for prefix, values in ((_COMMON, common), (_OWN, own)):
        context.state[prefix + name] = ConfigRecord({**values, RUN_KEY: str(context.run_id)})


def stored_settings(context: Context, name: str) -> ConfigRecord | None:
    """Return what was stored under a name in this run; None if nothing was."""
    parts = [config_in(context.state, prefix + name) for prefix in (_OWN, _COMMON)]
    if any(part.get(RUN_KEY) != str(context.run_id) for part in parts):
        return None
    values = {**parts[0], **parts[1]}
    del values[RUN_KEY]
    return ConfigRecord(values)


def settings_digest(call: Call) -> bytes:
    """Return a SHA-256 digest of what the members of a sum must share beside the instruction.

    It covers the message type, the app's message types, the run config, and ``common`` of ``store_settings``.
    """
    parts: list[Any] = [call.message_type, call.app, _items(call.context.run_config)]
    run = str(call.context.run_id)
    for name in sorted(call.context.state):
        if name.startswith(_COMMON):
            record = config_in(call.context.state, name)
            if record.get(RUN_KEY) == run:
                parts.append([name, _items({key: record[key] for key in record if key != RUN_KEY})])
    return sha256(json.dumps(parts).encode()).digest()


def digest_of(*parts: Any) -> str:
    """Return the SHA-256 hex digest of values that JSON can represent."""
    return sha256(json.dumps(parts).encode()).hexdigest()


def _items(values: Mapping[str, Any]) -> list[list[str]]:
    return [[key, repr(values[key])] for key in sorted(values)]
