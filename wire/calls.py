"""The arguments and results of batched client handlers.

A client's work is written once, over a list of calls: Flower's own engines pass a list of one call, an engine
that has a whole round passes all of its calls.
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

# Beside a node's records in ``query.state`` and ``query.restore``: its partition id, and their run.
NODE_RECORD = "hedgerow.node"
# The record of ``context.state`` that ``query.state`` omits and ``query.restore`` does not set.
SECRET_RECORD = "hedgerow.secret"
# A node's state of its sealed links, and the seeds sent over them. A device sends it only encrypted, with the
# rest of its state, in the record below.
LINKS_RECORD = "hedgerow.links"
SEALED_RECORD = "hedgerow.sealed-state"
# The key of the run of a record in ``context.state``.
RUN_KEY = "run"


class LocalDataError(ValueError):
    """A node's own data are invalid: a mistake of their owner, shown in one line without a traceback."""


@dataclass(frozen=True, slots=True)
class Call:
    """One node's share of a batched call: what it was sent, and its own context.

    Parameters
    ----------
    content : RecordDict
        The records of the instruction message. Shared between nodes that were sent the same object: do not
        modify it.
    context : Context
        The node's context. Only ``context.state`` is kept until its next call.
    message_type : str
        Flower's message type, such as ``"train"`` or ``"train.local_step"``.
    app : tuple of str (default: none)
        The message types that the app answers, sorted; set by ``BatchClientApp``.
    """

    content: RecordDict
    context: Context
    message_type: str
    app: tuple[str, ...] = ()

    @property
    def partition_id(self) -> int:
        """The node's partition id from its node config; for a node with only a name, a hash of the name.

        It keys random streams. The partition that a server assigns to a name may differ between runs.
        """
        config = self.context.node_config
        if "partition-id" not in config and config.get("name"):
            return int.from_bytes(sha256(str(config["name"]).encode()).digest()[:8]) >> 2
        return int(config["partition-id"])


@dataclass(frozen=True, slots=True)
class Delivery:
    """Nodes of an exchange that were sent the same content.

    Parameters
    ----------
    content : RecordDict
        The records of their instruction. Do not modify it.
    contexts : Sequence[Context]
        The nodes' contexts; changes of a handler are not kept.
    """

    content: RecordDict
    contexts: Sequence[Context]


@dataclass(frozen=True, slots=True)
class InColumns:
    """The replies of K nodes: an ArrayRecord with the keys that were sent and a MetricRecord each.

    Parameters
    ----------
    rows : NDArray or Tensor
        The values of the arrays, in the order of the keys (K, M); of an integer or boolean array its change
        since it was sent. A tensor stays on its device.
    metrics : Mapping[str, NDArray]
        The metrics, integers or float64, (K,) each.
    """

    rows: "NDArray[Any] | Tensor"
    metrics: Mapping[str, NDArray[Any]]

    @property
    def on_host(self) -> NDArray[Any]:
        """The rows as an array."""
        return self.rows if isinstance(self.rows, np.ndarray) else self.rows.numpy(force=True)


# Returns the replies of all nodes, in the order of their contexts. If it raises, messages are sent instead.
ColumnHandler = Callable[[Sequence[Delivery]], InColumns]


# Returns one reply per call, in order. An exception in place of a record fails only that node.
BatchHandler = Callable[[Sequence[Call]], Sequence[RecordDict | Exception]]


@runtime_checkable
class Batched(Protocol):
    """A ClientApp whose handlers can take many nodes at once."""

    def batch_handler(self, message_type: str) -> BatchHandler | None:
        """Return the handler for a message type, or None if calls must be made one by one."""


@runtime_checkable
class AnswersColumns(Protocol):
    """A ClientApp that can answer an exchange for all its nodes at once, without messages."""

    def column_handler(self, message_type: str) -> ColumnHandler | None:
        """Return the handler, or None if messages must be sent."""


@runtime_checkable
class KnowsSizes(Protocol):
    """A ClientApp that knows the introductions of all nodes of a simulation."""

    def sizes(self, run_config: UserConfig) -> Sequence[int] | None:
        """Return the nodes' numbers of examples, >= 1, by partition id.

        None if nodes introduce themselves with more than ``partition-id`` and ``num-examples``, such as the
        shapes of their own data, or names.
        """


@dataclass(frozen=True, slots=True)
class KnownNodes:
    """All nodes of a grid that knows them in advance, and whose nodes do not change."""

    node_ids: NDArray[np.uint64]  # (N,): Their ids, by partition id.
    sizes: Sequence[int]  # Their numbers of examples, >= 1, by partition id.
