"""What a batched client handler receives and returns.

A client's work is written once, over a list of calls: Flower's own engines hand it a list of one,
an engine that holds a whole round hands it the whole round.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from flwr.app import Context, RecordDict, UserConfig
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "LINKS_RECORD",
    "NODE_RECORD",
    "RUN_KEY",
    "SEALED_RECORD",
    "SECRET_RECORD",
    "AnswersColumns",
    "BatchHandler",
    "Batched",
    "Call",
    "ColumnHandler",
    "InColumns",
    "KnownNodes",
    "LocalDataError",
    "TellsSizes",
    "Told",
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


class LocalDataError(ValueError):
    """A node's own data cannot be used: its owner's mistake, told in one line, and no bug to be traced."""


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
    app : tuple of str (default: none)
        The message types that the app answers, sorted: ``BatchClientApp`` says so to its handlers.
    """

    content: RecordDict
    context: Context
    message_type: str
    app: tuple[str, ...] = ()

    @property
    def partition_id(self) -> int:
        """The node's partition id, from its node config; of one that has a name alone, a number of that.

        Streams are keyed by it. The place that a server gives to a name may be another in every run.
        """
        config = self.context.node_config
        if "partition-id" not in config and config.get("name"):
            return int.from_bytes(sha256(str(config["name"]).encode()).digest()[:8]) >> 2
        return int(config["partition-id"])


@dataclass(frozen=True, slots=True)
class Told:
    """Nodes of an exchange that were sent the same.

    Parameters
    ----------
    content : RecordDict
        The records of their instruction. Read it, never change it.
    contexts : Sequence[Context]
        Theirs; what a handler writes to them is not kept.
    """

    content: RecordDict
    contexts: Sequence[Context]


@dataclass(frozen=True, slots=True)
class InColumns:
    """The replies of K nodes, each of one ArrayRecord with the keys that it was sent and one MetricRecord.

    Parameters
    ----------
    rows : NDArray or Tensor
        The values of each one's arrays, in the order of the keys (K, M); a tensor stays on its device.
    metrics : Mapping[str, NDArray]
        Its metrics, integers or float64, (K,) each.
    """

    rows: "NDArray[Any] | Tensor"
    metrics: Mapping[str, NDArray[Any]]

    @property
    def on_host(self) -> NDArray[Any]:
        """The rows as an array."""
        return self.rows if isinstance(self.rows, np.ndarray) else self.rows.numpy(force=True)


# Nodes answer at once, in the order of their contexts. One that cannot raises: then all are sent messages.
ColumnHandler = Callable[[Sequence[Told]], InColumns]


# One answer a call, in the order of the calls. An exception in place of a record fails that node
# alone: the others' answers stand.
BatchHandler = Callable[[Sequence[Call]], Sequence[RecordDict | Exception]]


@runtime_checkable
class Batched(Protocol):
    """A ClientApp whose handlers can take many nodes at once."""

    def batch_handler(self, message_type: str) -> BatchHandler | None:
        """Return the handler for a message type, or None where calls must be made one by one."""


@runtime_checkable
class AnswersColumns(Protocol):
    """A ClientApp that can answer an exchange for all its nodes at once, without messages."""

    def column_handler(self, message_type: str) -> ColumnHandler | None:
        """Return what does, or None where messages must go."""


@runtime_checkable
class TellsSizes(Protocol):
    """A ClientApp that can say for all nodes of a simulation at once what each would tell of itself."""

    def sizes(self, run_config: UserConfig) -> Sequence[int] | None:
        """Return the nodes' numbers of examples, >= 1, by partition id; None where nodes say more, or other.

        More is anything beside ``partition-id`` and ``num-examples``: shapes of data of their own, names.
        """


@dataclass(frozen=True, slots=True)
class KnownNodes:
    """All nodes of a grid that knows who they are, and in which none comes or goes."""

    node_ids: NDArray[np.uint64]  # (N,): Their ids, by partition id.
    sizes: Sequence[int]  # Their numbers of examples, >= 1, by partition id.
