"""A grid on which handlers' real seconds count."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from flwr.app import Context, Message
from tests.sim.engine.test_grid import answer_with, app_of, by_partition, count, messages

from hedgerow.sim import Delay, FaultModel, InProcessGrid
from hedgerow.sim.engine import grid as engine
from hedgerow.sim.engine import handlers

pytestmark = pytest.mark.usefixtures("flower_identity")


class Watch:
    """A stopwatch that tests wind on."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds

    def work(self, message: Message, context: Context) -> Message:
        """Take as many seconds as the partition id says, and one."""
        self.seconds += 1.0 + int(context.node_config["partition-id"])
        return count(message, context)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    made = Watch()
    for module in (engine, handlers):
        monkeypatch.setattr(module, "perf_counter", made)
    return made


def make(watch: Watch, nodes: int = 3, **options: Any) -> InProcessGrid:
    return InProcessGrid(app_of(watch.work), nodes, real_time=True, **options)


def test_nodes_work_at_once_whatever_this_process_took(watch: Watch) -> None:
    grid = make(watch)
    replies = grid.send_and_receive(messages(grid))
    assert sorted(by_partition(replies, "calls")) == [0, 1, 2]
    assert grid.now() == 3.0


def test_a_timeout_cuts_off_who_is_slow_and_the_reply_comes_later(watch: Watch) -> None:
    grid = make(watch)
    sent = messages(grid)
    assert sorted(by_partition(grid.send_and_receive(sent, timeout=2.5), "calls")) == [0, 1]
    assert grid.now() == 2.5
    ids = [message.metadata.message_id for message in sent]
    assert grid.pull_messages(ids) == []
    grid.sleep(0.5)
    assert by_partition(grid.pull_messages(ids), "calls") == {2: 1}


def test_a_busy_node_begins_its_next_message_when_it_is_free(watch: Watch) -> None:
    grid = make(watch, 1)
    (first,), (second,) = messages(grid), messages(grid)
    replies = grid.send_and_receive([first, second])
    assert grid.now() == 2.0
    assert [reply.content["metrics"]["calls"] for reply in replies] == [1, 2]
    ids = grid.push_messages(messages(grid))
    grid.sleep(0.5)
    ids += grid.push_messages(messages(grid))
    grid.sleep(0.5)
    assert len(grid.pull_messages(ids)) == 1
    grid.sleep(0.9)
    assert len(grid.pull_messages(ids)) == 0
    grid.sleep(0.2)
    assert [reply.content["metrics"]["calls"] for reply in grid.pull_messages(ids)] == [4]


def test_the_servers_own_seconds_pass_too(watch: Watch) -> None:
    """Or a ServerApp that polls and sleeps would wait for ever."""
    grid = make(watch, 1)
    ids = grid.push_messages(messages(grid))
    polls = 0
    while not grid.pull_messages(ids):
        watch.seconds += 0.25
        polls += 1
    assert polls == 4
    assert grid.now() == 1.0


def test_faults_come_on_top(watch: Watch) -> None:
    faults = FaultModel(delay=Delay.parse(0.5), stragglers=frozenset({1}), slowdown=10.0)
    grid = make(watch, faults=faults)
    assert sorted(by_partition(grid.send_and_receive(messages(grid), timeout=3.5), "calls")) == [0, 2]
    grid.send_and_receive([])
    grid.sleep(21.5)
    assert grid.now() == 25.0
    assert len(grid.send_and_receive(messages(grid), timeout=3.5)) == 2


def test_a_handler_that_really_sleeps_is_late() -> None:
    def sleep(message: Message, context: Context) -> Message:
        time.sleep(0.05)
        return answer_with(context, message)

    grid = InProcessGrid(app_of(sleep), 2, real_time=True)
    assert grid.send_and_receive(messages(grid), timeout=0.04) == []
