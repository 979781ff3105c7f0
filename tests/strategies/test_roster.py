"""Who takes part: introductions, places by name, and nodes that come and go."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.strategies.changing_grid import ChangingGrid, saying

from hedgerow.sim import Delay, FaultModel, InProcessGrid
from hedgerow.strategies import Roster, RosterError, Shapes
from hedgerow.wire import MESSAGE_FORMAT

pytestmark = pytest.mark.usefixtures("flower_identity")


def introducing(partition_ids: list[int] | None = None) -> ClientApp:
    """A ClientApp that answers whoami; ``partition_ids`` are what nodes claim."""
    app = ClientApp()

    @app.query("whoami")
    def whoami(message: Message, context: Context) -> Message:
        me = int(context.node_config["partition-id"])
        claimed = me if partition_ids is None else partition_ids[me]
        record = ConfigRecord(
            {"partition-id": claimed, "num-examples": 10 + me, "role": "leaf", "group": "g"}
        )
        return Message(RecordDict({"whoami": record}), reply_to=message)

    return app


def test_the_roster_is_in_the_order_of_partition_ids_and_knows_sizes_and_roles() -> None:
    roster = Roster.gather(InProcessGrid(introducing(), 5), 5, timeout=5)
    assert [node.partition_id for node in roster.nodes] == [0, 1, 2, 3, 4]
    assert [node.num_examples for node in roster.nodes] == [10, 11, 12, 13, 14]
    assert {(node.role, node.group) for node in roster.nodes} == {("leaf", "g")}
    assert [node.node_id for node in roster.nodes] != sorted(node.node_id for node in roster.nodes)


def test_too_few_nodes_are_an_error_that_says_how_to_get_them() -> None:
    with pytest.raises(RosterError, match=r"3 nodes after 5 s, but 4 are needed.*num-supernodes=4"):
        Roster.gather(InProcessGrid(introducing(), 3), 4, timeout=5)


def test_a_place_that_nobody_has_because_two_claim_another_is_an_error_that_says_so() -> None:
    words = r"no node introduced itself as \[2\] \(3 of 3 nodes answered; left out: 1 x duplicate partition\)"
    with pytest.raises(RosterError, match=words):
        Roster.gather(InProcessGrid(introducing([0, 1, 1]), 3), 3, timeout=5)


def test_what_keeps_every_node_out_is_told_as_they_told_it() -> None:
    app = ClientApp()

    @app.query("whoami")
    def whoami(message: Message, context: Context) -> Message:
        # As a SuperNode words it.
        raise ValueError("<class 'a.b.Refusal'>:<'dataset: not here'>")

    with pytest.raises(
        RosterError,
        match=r"No node can introduce itself. Node \d+: ValueError: Refusal: dataset: not here \(1 more",
    ):
        Roster.gather(InProcessGrid(app, 2), 2, timeout=5)


def test_more_nodes_than_expected_leaves_the_others_out() -> None:
    roster = Roster.gather(InProcessGrid(introducing(), 5), 3, timeout=5)
    assert len(roster) == 3
    assert not roster.take_refusals()


def test_without_introductions_partition_ids_are_ranks_of_sorted_node_ids() -> None:
    grid = InProcessGrid(ClientApp(), 4)
    roster = Roster.gather(grid, 4, timeout=5)
    assert not roster.introduced
    assert [node.node_id for node in roster.nodes] == sorted(grid.get_node_ids())
    assert all(node.num_examples is None for node in roster.nodes)


def test_lost_introductions_are_asked_for_again() -> None:
    grid = InProcessGrid(introducing(), 12, faults=FaultModel(dropout=0.5), seed=1)
    roster = Roster.gather(grid, 12, timeout=120)
    assert [node.partition_id for node in roster.nodes] == list(range(12))
    assert roster.introduced


def test_no_question_is_under_way_once_the_roster_is_there() -> None:
    # Answers take longer than it takes to ask again: what is still under way could overwrite a node's state.
    grid = InProcessGrid(introducing(), 3, faults=FaultModel(delay=Delay("constant", (12.0,))))
    asked, answered = [], []
    push, pull = grid.push_messages, grid.pull_messages
    grid.push_messages = lambda messages: asked.extend(push(messages)) or asked[-3:]  # type: ignore[func-returns-value, method-assign]

    def pulled(ids: Iterable[str]) -> list[Message]:
        messages = list(pull(ids))
        answered.extend(message.metadata.reply_to_message_id for message in messages)
        return messages

    grid.pull_messages = pulled  # type: ignore[method-assign, assignment]
    Roster.gather(grid, 3, timeout=80)
    assert len(asked) == 6
    assert sorted(answered) == sorted(asked)


def test_a_node_that_never_answers_is_named_at_the_deadline() -> None:
    grid = InProcessGrid(introducing(), 3, faults={1: FaultModel(dropout=1.0)})
    with pytest.raises(
        RosterError,
        match=r"no node introduced itself as \[1\] \(2 of 3 nodes answered; left out: 1 x no introd",
    ):
        Roster.gather(grid, 3, timeout=60)
    assert grid.now() == pytest.approx(60, abs=1)


class Changing(InProcessGrid):
    """A grid whose nodes can leave, or come back under another id."""

    def leave(self, node_id: int) -> None:
        self.left = self._nodes.pop(node_id)

    def come_back(self, node_id: int) -> None:
        self.left.node_id = node_id
        self._nodes[node_id] = self.left


@pytest.mark.parametrize("app", [introducing(), ClientApp()], ids=["introduced", "by rank"])
def test_a_node_that_returns_under_a_new_id_is_found_again(app: ClientApp) -> None:
    grid = Changing(app, 4)
    roster = Roster.gather(grid, 4, timeout=5)
    old = roster.nodes[2].node_id
    grid.leave(old)
    roster.refresh(grid, timeout=5)
    assert len(roster.online) == 3
    assert old not in roster.online
    grid.come_back(12345)
    roster.refresh(grid, timeout=5)
    assert roster.nodes[2].node_id == 12345
    assert roster.online == {node.node_id for node in roster.nodes}


class Cut(InProcessGrid):
    """A grid whose nodes cannot be reached until some time."""

    back_at = 0.0

    def get_node_ids(self) -> list[int]:
        return list(super().get_node_ids()) if self.now() >= self.back_at else []


@pytest.mark.parametrize(("back_at", "waited"), [(0.0, 0.0), (20.0, 20.0), (1e9, 60.0)])
def test_where_nobody_is_there_someone_is_waited_for_until_the_deadline(
    back_at: float, waited: float
) -> None:
    grid = Cut(introducing(), 2)
    roster = Roster.gather(grid, 2, timeout=5)
    began, grid.back_at = grid.now(), grid.now() + back_at
    roster.refresh(grid, timeout=60)
    assert grid.now() - began == pytest.approx(waited, abs=1)
    assert len(roster.online) == (2 if waited < 60 else 0)


# Enough, not all


def named(*names: str, **more: Any) -> list[dict[str, Any]]:
    return [{"name": name, "num-examples": 10 + i, **more} for i, name in enumerate(names)]


def test_a_quorum_starts_with_one_of_forty_away_and_takes_it_in_when_it_comes() -> None:
    grid = ChangingGrid(introducing(), 40, away=[17])
    roster = Roster.gather(grid, 40, timeout=120, quorum=30)
    assert len(roster) == 40
    assert roster.present == [i for i in range(40) if i != 17]
    assert roster.nodes[17].vacant
    assert grid.now() < 1
    grid.come(17)
    roster.refresh(grid, timeout=60, server_round=4)
    assert roster.present == list(range(40))
    assert roster.nodes[17].num_examples == 27
    assert not roster.take_refusals()


def test_a_silent_node_holds_a_quorum_up_for_a_moment_only() -> None:
    grid = InProcessGrid(introducing(), 5, faults={1: FaultModel(dropout=1.0)})
    roster = Roster.gather(grid, 5, timeout=120, quorum=3)
    assert roster.present == [0, 2, 3, 4]
    assert grid.now() < 40
    assert roster.take_refusals() == {"no introduction": 1}


def test_as_many_as_come_have_places() -> None:
    grid = ChangingGrid(saying(named("d", "b", "a", "c")), 4, away=[0, 2])
    roster = Roster.gather(grid, None, timeout=60, quorum=2)
    assert roster.names == {"b": 0, "c": 1}
    grid.come(2)
    grid.come(0)
    roster.refresh(grid, timeout=60)
    # Those that come together are put in the order of their names, not of their answers.
    assert roster.names == {"b": 0, "c": 1, "a": 2, "d": 3}
    assert [node.num_examples for node in roster.nodes] == [11, 13, 12, 10]


def test_of_as_many_as_come_nobody_can_make_up_a_huge_federation() -> None:
    told: list[dict[str, Any]] = [{"partition-id": 0}, {"partition-id": 2**40}]
    roster = Roster.gather(InProcessGrid(saying(told), 2), None, timeout=60, quorum=1)
    assert len(roster) == 1
    assert roster.take_refusals() == {"no place": 1}


def test_nodes_by_rank_take_the_places_that_are_free() -> None:
    grid = ChangingGrid(ClientApp(), 4, away=[1])
    roster = Roster.gather(grid, 4, timeout=60, quorum=3)
    assert roster.present == [0, 1, 2]
    grid.come(1)
    roster.refresh(grid, timeout=60)
    assert roster.present == [0, 1, 2, 3]


# Names


def test_a_name_keeps_its_place_whatever_the_node_id() -> None:
    grid = ChangingGrid(saying(named("x", "y", "z")), 3)
    roster = Roster.gather(grid, 3, timeout=60)
    assert roster.names == {"x": 0, "y": 1, "z": 2}
    grid.leave(1)
    roster.refresh(grid, timeout=60, server_round=1)
    assert roster.present == [0, 2]
    grid.come(1, 12345)
    roster.refresh(grid, timeout=60, server_round=2)
    assert roster.nodes[1].node_id == 12345
    assert roster.names == {"x": 0, "y": 1, "z": 2}
    # One that is back does not reweigh itself.
    assert roster.nodes[1].num_examples == 11


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({"name": "a"}, "duplicate name"),
        ({"partition-id": 0}, "duplicate partition"),
        ({"name": "b", "partition-id": 0}, "duplicate partition"),
        ({"name": "partition-0", "partition-id": 0}, "duplicate partition"),
    ],
)
def test_the_second_who_claims_a_place_is_refused_and_the_others_go_on(
    second: dict[str, Any], reason: str
) -> None:
    told: list[dict[str, Any]] = [{"name": "a", "partition-id": 0}, {"partition-id": 1}, second]
    grid = ChangingGrid(saying(told), 3, away=[2])
    roster = Roster.gather(grid, 3, timeout=60, quorum=2)
    first = roster.nodes[0].node_id
    grid.come(2)
    for server_round in range(1, 8):
        roster.refresh(grid, timeout=60, server_round=server_round)
    assert roster.present == [0, 1]
    assert roster.nodes[0].node_id == first
    # It was asked in rounds 1, 3 and 7.
    assert roster.take_refusals() == {reason: 3}
    assert [partition for _, partition, _ in grid.sent].count(2) == 3


def test_who_claims_the_name_of_one_that_left_has_another_partition_than_before() -> None:
    told: list[dict[str, Any]] = [
        {"name": "a", "partition-id": 0},
        {"partition-id": 1},
        {"name": "a", "partition-id": 2},
    ]
    grid = ChangingGrid(saying(told), 3, away=[2])
    roster = Roster.gather(grid, 3, timeout=60, quorum=2)
    grid.leave(0)
    grid.come(2)
    roster.refresh(grid, timeout=60)
    assert roster.present == [1]
    assert roster.take_refusals() == {"another partition than before": 1}


def test_a_node_whose_old_self_is_still_listed_is_taken_in_once_that_is_gone() -> None:
    told: list[dict[str, Any]] = [{"name": "a"}, {"name": "b"}, {"name": "a"}]
    grid = ChangingGrid(saying(told), 3, away=[2])
    roster = Roster.gather(grid, 2, timeout=60)
    old = roster.nodes[0].node_id
    grid.come(2)
    grid.leave(1)
    roster.refresh(grid, timeout=60, server_round=1)
    assert roster.take_refusals() == {"duplicate name": 1}
    grid.leave(0)
    for server_round in (2, 3):
        roster.refresh(grid, timeout=60, server_round=server_round)
    assert roster.present == [0]
    assert roster.nodes[0].node_id == grid.node_id(2) != old


def test_the_name_that_a_key_was_registered_with_is_the_nodes_name() -> None:
    grid = ChangingGrid(
        saying(named("ward-1", "ward-1", "ward-3")), 3, registered={0: "ward-1", 1: "ward-2", 2: "ward-3"}
    )
    roster = Roster.gather(grid, 3, timeout=60)
    assert roster.names == {"ward-1": 0, "ward-2": 1, "ward-3": 2}
    assert grid.partitions[roster.nodes[1].node_id] == 1


def test_a_run_that_goes_on_gives_names_their_places() -> None:
    before = Roster.gather(InProcessGrid(saying(named("a", "b", "c")), 3), 3, timeout=60)
    told = named("c", "a", "0-new", "b")
    again = Roster.gather(InProcessGrid(saying(told), 4), None, timeout=60, quorum=4, names=before.names)
    assert again.names == {"a": 0, "b": 1, "c": 2, "0-new": 3}
    # Also where the nodes were asked before the run's state was read.
    asked = Roster.gather(InProcessGrid(saying(told), 4), None, timeout=60, quorum=4)
    assert asked.names != again.names
    assert asked.continued(before.names).names == again.names


def test_a_place_of_an_earlier_run_waits_for_its_name() -> None:
    grid = InProcessGrid(saying(named("b", "new")), 2)
    roster = Roster.gather(grid, 4, timeout=60, quorum=2, names={"a": 0, "b": 1, "c": 2})
    assert roster.names == {"a": 0, "b": 1, "c": 2, "new": 3}
    assert roster.present == [1, 3]


# Shapes


def shaped(*shapes: tuple[Any, ...]) -> list[dict[str, Any]]:
    keys = ("input-shape", "num-classes", "dtype")
    return [
        {"partition-id": i} | {k: v for k, v in zip(keys, shape, strict=True) if v is not None}
        for i, shape in enumerate(shapes)
    ]


IMAGE = ([1, 28, 28], 10, "float32")


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (([3, 32, 32], 10, "float32"), "another input shape"),
        (([1, 28, 28], 2, "float32"), "another number of classes"),
        (([1, 28, 28], 10, "int64"), "another dtype"),
    ],
)
def test_a_node_whose_data_are_of_another_shape_than_most_is_left_out(
    other: tuple[Any, ...], reason: str
) -> None:
    told = shaped(other, IMAGE, (None, None, None), IMAGE, other)
    grid = ChangingGrid(saying(told), 5, away=[4])
    roster = Roster.gather(grid, 5, timeout=60, quorum=3)
    assert roster.shapes == Shapes((1, 28, 28), 10, "float32")
    assert roster.present == [1, 2, 3]
    assert roster.take_refusals() == {reason: 1}
    grid.come(4)
    roster.refresh(grid, timeout=60, server_round=1)
    assert roster.take_refusals() == {reason: 1}
    assert roster.nodes[1].shapes == roster.shapes


def test_the_shapes_of_a_run_that_goes_on_are_those_it_began_with() -> None:
    other = ([3, 32, 32], 10, "float32")
    grid = InProcessGrid(saying(shaped(other, other, IMAGE)), 3)
    roster = Roster.gather(grid, 3, timeout=60, quorum=1, shapes=Shapes((1, 28, 28), 10, "float32"))
    assert roster.present == [2]


# Whatever a node says

WORDS = st.one_of(st.text(max_size=8), st.integers(-(2**62), 2**62), st.booleans(), st.binary(max_size=3))
VALUES = st.one_of(
    WORDS,
    st.floats(allow_nan=False),
    st.lists(st.integers(-(2**62), 2**62), max_size=12),
    st.lists(st.text(max_size=3), max_size=3),
)
KEYS = ("partition-id", "name", "num-examples", "role", "group", "input-shape", "num-classes", "dtype")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=8))
def test_no_introduction_keeps_the_others_from_their_run(me: dict[str, Any]) -> None:
    told: list[dict[str, Any]] = [{"partition-id": 0}, {"partition-id": 1}, me, {"partition-id": 3}]
    roster = Roster.gather(InProcessGrid(saying(told), 4), 4, timeout=60, quorum=3)
    # A well-formed claim to an honest node's place may come first, and stands then.
    assert len(roster.present) >= 3
    assert len(roster) == 4
    assert json.loads(json.dumps(roster.names)) == roster.names
    assert all(name.isprintable() and len(name) <= 100 for name in roster.names)


@pytest.mark.parametrize(
    "me",
    [
        {},
        {"partition-id": -1},
        {"partition-id": True},
        {"name": "x" * 101},
        {"name": "a\x1b[2J"},
        {"name": "partition-1"},
        {"name": "ok", "input-shape": [0]},
        {"name": "ok", "input-shape": [2**20, 2**20]},
        {"name": "ok", "input-shape": [1] * 9},
        {"name": "ok", "num-classes": 0},
        {"name": "ok", "num-classes": 2**40},
        {"name": "ok", "message-format": "2"},
    ],
)
def test_a_malformed_introduction_is_counted_and_is_asked_for_again_later(me: dict[str, Any]) -> None:
    told: list[dict[str, Any]] = [{"partition-id": 0}, {"partition-id": 1}, me]
    grid = ChangingGrid(saying(told), 3)
    roster = Roster.gather(grid, 3, timeout=60, quorum=2)
    assert roster.present == [0, 1]
    assert roster.take_refusals() == {"malformed introduction": 1}
    told[2] = {"partition-id": 2}
    roster.refresh(grid, timeout=60, server_round=1)
    assert roster.present == [0, 1]
    roster.refresh(grid, timeout=60, server_round=2)
    assert roster.present == [0, 1, 2]


def test_a_node_that_speaks_another_message_format_is_left_out() -> None:
    formats: list[dict[str, Any]] = [
        {},
        {"message-format": MESSAGE_FORMAT},
        {"message-format": MESSAGE_FORMAT + 1},
    ]
    told = [{"partition-id": i, **spoken} for i, spoken in enumerate(formats)]
    roster = Roster.gather(ChangingGrid(saying(told), 3), 3, timeout=60, quorum=2)
    assert roster.present == [0, 1]
    assert roster.take_refusals() == {"another message format": 1}


def test_one_node_that_denies_knowing_the_question_does_not_speak_for_all() -> None:
    app = ClientApp()

    @app.query("whoami")
    def whoami(message: Message, context: Context) -> Message:
        me = int(context.node_config["partition-id"])
        if me == liar:
            raise ValueError("No query function registered with name 'whoami'")
        return Message(RecordDict({"whoami": ConfigRecord({"partition-id": me})}), reply_to=message)

    grid = ChangingGrid(app, 4)
    liar = grid.partitions[min(grid.get_node_ids())]
    roster = Roster.gather(grid, 4, timeout=60, quorum=3)
    assert roster.introduced
    assert roster.present == [i for i in range(4) if i != liar]
    assert roster.take_refusals() == {"introduction raised": 1}
