"""Clients that can be checked by hand, and edge servers that are nodes: real handlers of both."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flwr.app import Context, Message, RecordDict
from tests.strategies.quadratic import Quadratics
from tests.strategies.recording_grid import RecordingGrid

from hedgerow.clients import sd_feel_client
from hedgerow.sim import InProcessGrid

# What an edge server does with its reply before it is sent: (server, message type, state, reply) -> reply.
Spoil = Callable[[int, str, RecordDict, RecordDict], RecordDict]


@dataclass
class EdgeFederation:
    """The clients of a problem, and after them ``num_servers`` edge servers."""

    problem: Quadratics
    num_servers: int
    spoil: Spoil | None = None

    @property
    def num_clients(self) -> int:
        return len(self.problem.sizes)

    @property
    def num_nodes(self) -> int:
        return self.num_clients + self.num_servers

    def app(self, message: Message, context: Context) -> Message:
        return self._apps[context.node_config["partition-id"] >= self.num_clients](message, context)

    def __post_init__(self) -> None:
        edges = sd_feel_client(_no_task)

        def edge(message: Message, context: Context) -> Message:
            reply = edges(message, context)
            kind = message.metadata.message_type
            if self.spoil is None or not kind.startswith("train"):
                return reply
            server = int(context.node_config["partition-id"]) - self.num_clients
            return Message(self.spoil(server, kind, context.state, reply.content), reply_to=message)

        self._apps = {False: self.problem.client_app(), True: edge}

    def grid(self, grid: type[InProcessGrid] = InProcessGrid, **options: Any) -> Any:
        config = {"num-clients": self.num_clients}
        return grid(self.app, self.num_nodes, run_config=config, **options)

    def recording(self, **options: Any) -> RecordingGrid:
        recording: RecordingGrid = self.grid(RecordingGrid, **options)
        return recording


def _no_task(context: Context) -> Any:
    raise AssertionError("an edge server has no data")
