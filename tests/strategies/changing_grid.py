"""A grid whose nodes come and go between rounds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from tests.strategies.recording_grid import RecordingGrid

from hedgerow.sim.engine._compat import NodeInfo
from hedgerow.strategies import RoundEnd

Change = Callable[["ChangingGrid"], None]


class ChangingGrid(RecordingGrid):
    """Nodes are away, come, and come back under other ids; ``after`` says what happens at which round's end.

    Parameters
    ----------
    away : Iterable[int]
        The partition ids of those that are not there at the start.
    after : Mapping[int, Change]
        What happens at the end of a round; ``told`` is the callback that makes it happen.
    registered : Mapping[int, str]
        The names that keys were registered with, by partition id.
    """

    def __init__(
        self,
        app: Any,
        num_nodes: int,
        *,
        away: Iterable[int] = (),
        after: Mapping[int, Change] | None = None,
        registered: Mapping[int, str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(app, num_nodes, **options)
        self.away, self.after, self.registered = set(away), dict(after or {}), dict(registered or {})

    def told(self, end: RoundEnd) -> None:
        """Let happen what happens at the end of a round."""
        if (change := self.after.get(end.round)) is not None:
            change(self)

    def leave(self, partition: int) -> None:
        """Let a node go."""
        self.away.add(partition)

    def come(self, partition: int, node_id: int | None = None) -> None:
        """Let a node come, under an id of its own if one is given."""
        self.away.discard(partition)
        if node_id is not None:
            old = self.node_id(partition)
            node = self._nodes.pop(old)
            node.node_id = node_id
            self._nodes[node_id], self.partitions[node_id] = node, partition

    def node_id(self, partition: int) -> int:
        """Return a node's id."""
        return next(node.node_id for node in self._nodes.values() if node.partition_id == partition)

    def get_node_ids(self) -> list[int]:
        return [i for i in super().get_node_ids() if self.partitions[i] not in self.away]

    def get_nodes(self) -> list[NodeInfo]:
        return [
            NodeInfo(node_id=i, name=self.registered.get(self.partitions[i], "")) for i in self.get_node_ids()
        ]


def saying(told: Sequence[Mapping[str, Any]]) -> ClientApp:
    """A ClientApp whose node i introduces itself by what ``told[i]`` says, which may change."""
    app = ClientApp()

    @app.query("whoami")
    def whoami(message: Message, context: Context) -> Message:
        me = ConfigRecord(dict(told[int(context.node_config["partition-id"])]))
        return Message(RecordDict({"whoami": me}), reply_to=message)

    return app
