"""A node counts as simulated by what its own process is, and by nothing that reaches it."""

import sys
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from hedgerow.clients import BatchClientApp, each
from hedgerow.sim import InProcessGrid
from hedgerow.wire import process
from hedgerow.wire.process import is_simulated

SIMULATION = "flwr.simulation"


@pytest.fixture(autouse=True)
def no_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_open", 0)
    for name in ("ray", SIMULATION):
        monkeypatch.delitem(sys.modules, name, raising=False)


def ray(monkeypatch: pytest.MonkeyPatch, *, started: bool, actor: str | None, flowers: bool) -> None:
    context = SimpleNamespace(get_actor_id=lambda: actor)
    fake = SimpleNamespace(is_initialized=lambda: started, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", fake)  # type: ignore[arg-type]
    if flowers:
        monkeypatch.setitem(sys.modules, SIMULATION, SimpleNamespace())  # type: ignore[arg-type]


def test_a_process_is_no_simulation_by_itself() -> None:
    assert not is_simulated()
    with process.simulated(), process.simulated():
        assert is_simulated()
    with pytest.raises(ZeroDivisionError), process.simulated():
        raise ZeroDivisionError
    assert not is_simulated()


@pytest.mark.parametrize(
    ("started", "actor", "flowers", "found"),
    [
        (True, "a1", True, True),  # An actor of Flower's simulation.
        (True, "a1", False, False),  # Somebody else's.
        (True, None, True, False),  # A driver: whoever imported and started Ray in this process.
        (False, "a1", True, False),
    ],
)
def test_of_rays_processes_only_flowers_actors_are_simulations(
    started: bool, actor: str | None, flowers: bool, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray(monkeypatch, started=started, actor=actor, flowers=flowers)
    assert is_simulated() == found


def test_an_engine_says_that_it_simulates_while_it_calls_a_handler() -> None:
    def tell(call: object) -> RecordDict:
        return RecordDict({"told": MetricRecord({"simulated": int(is_simulated())})})

    plain = ClientApp()

    @plain.query()
    def answer(message: Message, context: Context) -> Message:
        return Message(tell(None), reply_to=message)

    for app in (BatchClientApp({"query": each(tell)}), plain):
        with InProcessGrid(app, 2) as grid:
            assert told(grid) == [1, 1]
    assert not is_simulated()


def told(grid: Grid) -> list[object]:
    content = RecordDict({"config": ConfigRecord()})
    messages = [Message(content, node, "query") for node in grid.get_node_ids()]
    return [reply.content["told"]["simulated"] for reply in grid.send_and_receive(messages)]
