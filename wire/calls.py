"""What a batched client handler receives and returns.

A client's work is written once, over a list of calls: Flower's own engines hand it a list of one,
an engine that holds a whole round hands it the whole round.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol, runtime_checkable

from flwr.app import Context, RecordDict

__all__ = [
    "LINKS_RECORD",
    "NODE_RECORD",
    "RUN_KEY",
    "SEALED_RECORD",
    "SECRET_RECORD",
    "BatchHandler",
    "Batched",
    "Call",
]

# Beside a node's records in ``query.state`` and ``query.restore``: its partition id, and the run that they
# are of.
NODE_RECORD = "hedgerow.node"
# The record of ``context.state`` that ``query.state`` leaves out and ``query.restore`` does not set.
SECRET_RECORD = "hedgerow.secret"
# What a node knows of its sealed links, and the seeds that are told on them. A device tells it locked alone,
# with all else that it keeps, in the record below.
LINKS_RECORD = "hedgerow.links"
SEALED_RECORD = "hedgerow.sealed-state"
# Under this key a record in ``context.state`` says which run it is of.
RUN_KEY = "run"


@dataclass(frozen=True, slots=True)
class Call:
    """One node's share of a batched call: what it was sent, and its own context.

    Parameters
    ----------
    content : RecordDict
        The records of the instruction message. Shared between nodes when they were sent the same
        object: read it, never change it.
    context : Context
        The node's context. ``context.state`` is the only thing that lives until its next call.
    message_type : str
        Flower's message type, ``"train"`` or ``"train.local_step"`` for example.
    """

    content: RecordDict
    context: Context
    message_type: str

    @property
    def partition_id(self) -> int:
        """The node's partition id, from its node config; of one that has a name alone, a number of that.

        Streams are keyed by it. The place that a server gives to a name may be another in every run.
        """
        config = self.context.node_config
        if "partition-id" not in config and config.get("name"):
            return int.from_bytes(sha256(str(config["name"]).encode()).digest()[:8]) >> 2
        return int(config["partition-id"])


# One answer a call, in the order of the calls. An exception in place of a record fails that node
# alone: the others' answers stand.
BatchHandler = Callable[[Sequence[Call]], Sequence[RecordDict | Exception]]


@runtime_checkable
class Batched(Protocol):
    """A ClientApp whose handlers can take many nodes at once."""

    def batch_handler(self, message_type: str) -> BatchHandler | None:
        """Return the handler for a message type, or None where calls must be made one by one."""
