"""Who is asked who it is, and how often: by a function, by a mod, and where there is neither."""

from collections import Counter
from typing import Any

import pytest
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from tests.strategies.recording_grid import RecordingGrid

from hedgerow.clients import introduce, introduced
from hedgerow.sim import InProcessGrid
from hedgerow.strategies import Roster

pytestmark = pytest.mark.usefixtures("flower_identity")

NODES = 6


def plain(mods: list[Any] | None = None) -> ClientApp:
    """A ClientApp as anybody writes it."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    return app


def asked(grid: RecordingGrid) -> Counter[str]:
    return Counter(kind for kind, _, _ in grid.sent)


def test_the_mod_tells_every_nodes_own_partition() -> None:
    grid = RecordingGrid(plain([introduce]), NODES)
    roster = Roster.gather(grid, NODES, timeout=60)
    assert roster.introduced
    assert [grid.partitions[node.node_id] for node in roster.nodes] == list(range(NODES))
    assert [node.num_examples for node in roster.nodes] == [None] * NODES
    # One node alone is asked for a function that the app has not.
    assert asked(grid) == {"query.whoami": 1, "train": NODES}


def test_a_function_is_asked_once_a_node_and_no_log_has_an_error(caplog: pytest.LogCaptureFixture) -> None:
    grid = RecordingGrid(introduced(plain(), lambda context: 30), NODES)
    roster = Roster.gather(grid, NODES, timeout=60)
    assert [node.num_examples for node in roster.nodes] == [30] * NODES
    assert asked(grid) == {"query.whoami": NODES}
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_without_either_two_nodes_are_asked_and_one_warning_names_the_mod(
    caplog: pytest.LogCaptureFixture,
) -> None:
    grid = RecordingGrid(plain(), NODES)
    roster = Roster.gather(grid, NODES, timeout=60)
    assert not roster.introduced
    assert asked(grid) == {"query.whoami": 2, "train": 2}
    assert len({partition for _, partition, _ in grid.sent}) == 2
    (warning,) = {record.getMessage() for record in caplog.records if record.levelname == "WARNING"}
    assert "ClientApp(mods=[introduce])" in warning


def test_a_node_that_refused_is_not_asked_again() -> None:
    class Stranger(RecordingGrid):
        """A grid to which a node comes that does not say who it is."""

        def come(self) -> None:
            left = self._nodes.pop(self.get_node_ids()[0])  # type: ignore[index]
            left.node_id, left.config = 12345, {}
            self._nodes[12345] = left
            self.partitions[12345] = -1

    grid = Stranger(introduced(plain()), NODES)
    roster = Roster.gather(grid, NODES, timeout=60)
    grid.come()
    for _ in range(3):
        roster.refresh(grid, timeout=60)
    assert [partition for _, partition, _ in grid.sent].count(-1) == 1
    assert len(roster.online) == NODES - 1


def test_a_model_is_trained_by_no_question() -> None:
    trained: list[ArrayRecord] = []
    app = ClientApp(mods=[introduce])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        trained.append(message.content["arrays"])
        return Message(RecordDict(), reply_to=message)

    Roster.gather(InProcessGrid(app, NODES), NODES, timeout=60)
    assert not trained
