"""What a node stores between messages, and the digest of it that the masks of a secure sum depend on.

The keys of a member's masks depend on everything but its data that determines its update: the whole
instruction (``SumPlan.about``, which the server knows too) and the whole stored state. If these differ
between members, their masks do not cancel and the others do not open their shares.
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from flwr.app import ConfigRecord, Context, RecordDict

from hedgerow.wire.calls import LINKS_RECORD, RUN_KEY, SECRET_RECORD, Call
from hedgerow.wire.frozen import FROZEN
from hedgerow.wire.masked_sums import told_content
from hedgerow.wire.records import config_in

# The stored records that the masks of a secure sum do not bind: keys decide who can read what a node sends,
# not what it learns, and frozen arrays are used only if they have the checksum in the instruction.
UNBOUND_RECORDS = (SECRET_RECORD, LINKS_RECORD, FROZEN)

_COMMON, _OWN = "told/", "told-own/"  # before a name in ``context.state``


def store_settings(
    context: Context, name: str, common: Mapping[str, Any], own: Mapping[str, Any] = {}
) -> None:
    """Store what a server sent in ``context.state``, for this run.

    - ``common``: values that all nodes are sent.
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


def state_digest(call: Call) -> bytes:
    """Return a SHA-256 digest of what the members of a sum must share beside the instruction.

    It covers the message type, the app's message types, the run config, and all that the node has stored but
    ``UNBOUND_RECORDS``: a server may have influenced any of it.
    """
    parts = [call.message_type, call.app, _items(call.context.run_config)]
    state = call.context.state
    kept = RecordDict({name: state[name] for name in state if name not in UNBOUND_RECORDS})
    return sha256(json.dumps(parts).encode() + told_content(kept)).digest()


def _items(values: Mapping[str, Any]) -> list[list[str]]:
    return [[key, repr(values[key])] for key in sorted(values)]
