"""Worker processes change how long a round takes, and nothing else."""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from tests.sim.engine.test_grid import BatchedApp, answer_with, app_of, by_partition, content, count, messages

from hedgerow.sim import Delay, FaultModel, InProcessGrid
from hedgerow.sim.engine._compat import ErrorCode
from hedgerow.sim.engine.handlers import NodeJob
from hedgerow.sim.engine.workers import Dealt, default_workers
from hedgerow.wire import lazy_array, view
from hedgerow.wire.process import is_simulated

pytestmark = pytest.mark.usefixtures("flower_identity")


def keep(message: Message, context: Context) -> Message:
    """Keep what was sent, and its own sum of it; answer with that sum and the process."""
    sent = view(message.content["arrays"]["w"])
    before = context.state.get("sum", ArrayRecord())
    total = sent + view(before["w"]) if before else sent.copy()
    record = ArrayRecord()
    record["w"] = lazy_array(total)
    context.state["sum"] = record
    context.state["sent"] = message.content["arrays"]
    metrics = MetricRecord({"partition-id": int(context.node_config["partition-id"]), "pid": os.getpid()})
    return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)


def large(value: float) -> RecordDict:
    record = ArrayRecord()
    record["w"] = lazy_array(np.full(5000, value))
    return RecordDict({"arrays": record, "config": ConfigRecord({"lr": 0.5})})


def told(grid: InProcessGrid, rounds: int = 3, records: Callable[[float], RecordDict] = content) -> list[Any]:
    """Return all that a server and a checkpoint see of some rounds."""
    seen: list[Any] = []
    for n in range(rounds):
        for kind in ("train", "evaluate"):
            for reply in grid.send_and_receive(messages(grid, kind, records(float(n)))):
                arrays = [array.tobytes() for array in reply.content["arrays"].to_numpy_ndarrays()]
                seen.append((kind, dict(reply.content["metrics"]), arrays))
    return [*seen, repr(grid.state_dict()["nodes"])]


def pids(replies: Sequence[Message]) -> dict[int, int]:
    return {int(i): int(pid) for i, pid in by_partition(replies, "pid").items()}


def alive(pid: int) -> bool:
    # Where the first thread is a zombie and another is not gone yet, the sockets are still open.
    process = Path(f"/proc/{pid}")
    try:
        return len(list((process / "task").iterdir())) > 1 or (
            (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pids: Sequence[int], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(alive, pids))


@pytest.mark.parametrize("options", [{"strict": True}, {"max_in_flight": 3}], ids=str)
def test_any_number_of_workers_gives_what_one_process_does(options: dict[str, Any]) -> None:
    found = []
    for workers in (1, 2, 3):
        with InProcessGrid(BatchedApp(), 7, workers=workers, **options) as grid:
            found.append(told(grid))
    assert found[0] == found[1] == found[2]


def test_faults_and_virtual_time_are_the_grids() -> None:
    faults = FaultModel(dropout=0.3, delay=Delay("uniform", (1.0, 5.0)), corrupt="nan", corrupt_rate=0.3)
    seen = []
    for workers in (1, 2):
        with InProcessGrid(app_of(count), 8, faults=faults, seed=3, workers=workers) as grid:
            replies = [
                reply for _ in range(3) for reply in grid.send_and_receive(messages(grid), timeout=4.0)
            ]
            seen.append((repr([reply.content for reply in replies if reply.has_content()]), grid.now()))
    assert seen[0] == seen[1]


def test_a_node_stays_with_its_worker_and_no_worker_has_all() -> None:
    with InProcessGrid(app_of(keep), 6, workers=2) as grid:
        first, second = (pids(grid.send_and_receive(messages(grid, records=large(1.0)))) for _ in range(2))
    assert first == second
    assert sorted(first.values()) == sorted([first[0]] * 3 + [first[1]] * 3)
    assert os.getpid() not in first.values()


def test_a_handler_that_raises_costs_its_own_reply_and_its_state_rolls_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(message: Message, context: Context) -> Message:
        reply = count(message, context)
        if context.node_config["partition-id"] == 1 and message.content["config"].get("bad"):
            raise RuntimeError("no luck")
        return reply

    with InProcessGrid(app_of(fail), 4, workers=2) as grid:
        with caplog.at_level(ERROR, logger="flwr"):
            getLogger("flwr").addHandler(caplog.handler)
            replies = grid.send_and_receive(messages(grid, records=content(bad=True)))
            getLogger("flwr").removeHandler(caplog.handler)
        assert [reply.error.code for reply in replies if reply.has_error()] == [2]
        assert "Partition 1, train: RuntimeError: no luck" in caplog.text
        after = grid.send_and_receive(messages(grid, records=content()))
    assert by_partition(after, "calls") == {0: 2, 1: 1, 2: 2, 3: 2}


def test_a_worker_that_dies_costs_its_nodes_replies_and_no_state() -> None:
    def die(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 3 and message.content["config"].get("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        return count(message, context)

    with InProcessGrid(app_of(die), 6, workers=2) as grid:
        grid.send_and_receive(messages(grid))
        replies = grid.send_and_receive(messages(grid, records=content(die=True)))
        assert [r.error.code for r in replies if r.has_error()] == [ErrorCode.CLIENT_APP_CRASHED] * 3
        assert by_partition(replies, "calls") == {0: 2, 2: 2, 4: 2}
        after = by_partition(grid.send_and_receive(messages(grid)), "calls")
    assert after == {0: 3, 1: 2, 2: 3, 3: 2, 4: 3, 5: 2}


def test_a_restored_checkpoint_is_what_workers_go_on_from() -> None:
    with InProcessGrid(app_of(count), 4, workers=2) as grid:
        grid.send_and_receive(messages(grid))
        kept = grid.state_dict()
        grid.send_and_receive(messages(grid))
        grid.load_state_dict(kept)
        assert by_partition(grid.send_and_receive(messages(grid)), "calls") == dict.fromkeys(range(4), 2)


def draw(message: Message, context: Context) -> Message:
    drawn = (random.random(), np.random.random(), torch.rand(()).item())  # noqa: NPY002
    return answer_with(context, message, drawn=list(drawn))  # type: ignore[arg-type]


def test_nodes_draw_other_numbers_each_and_the_same_in_every_run() -> None:
    seen = []
    state = random.getstate()
    try:
        for _ in range(2):
            random.seed(5)
            with InProcessGrid(app_of(draw), 2, workers=2) as grid:
                seen.append(by_partition(grid.send_and_receive(messages(grid)), "drawn"))
    finally:
        random.setstate(state)
    assert seen[0] == seen[1]
    assert all(a != b for a, b in zip(seen[0][0], seen[0][1], strict=True))


def test_nodes_in_workers_are_simulated_ones_on_one_thread() -> None:
    def look(message: Message, context: Context) -> Message:
        return answer_with(context, message, simulated=int(is_simulated()), threads=torch.get_num_threads())

    with InProcessGrid(app_of(look), 2, workers=2) as grid:
        replies = grid.send_and_receive(messages(grid))
    assert by_partition(replies, "simulated") == {0: 1, 1: 1}
    assert by_partition(replies, "threads") == {0: 1, 1: 1}


def test_workers_end_with_the_grid() -> None:
    # What starts the other's workers was forked meanwhile, and has copies of the first one's links.
    with (
        InProcessGrid(app_of(keep), 2, workers=2) as grid,
        InProcessGrid(app_of(keep), 2, workers=2) as other,
    ):
        there = pids(other.send_and_receive(messages(other, records=large(1.0))))
        here = pids(grid.send_and_receive(messages(grid, records=large(1.0))))
        grid.close()
        assert gone(list(here.values()))
        assert all(map(alive, there.values()))
    assert gone(list(there.values()))


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent_in_the_midst_of_work(sign: signal.Signals, tmp_path: Path) -> None:
    def work(message: Message, context: Context) -> Message:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(60)
        return answer_with(context, message)

    parent = os.fork()
    if parent == 0:
        # pytest's own workers ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with InProcessGrid(app_of(work), 2, workers=2) as grid:
                grid.send_and_receive(messages(grid))
        finally:
            os._exit(0)
    end = time.monotonic() + 10
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    workers = [int(path.name) for path in tmp_path.iterdir()]
    assert len(workers) == 2
    os.kill(parent, sign)
    os.waitpid(parent, 0)
    assert gone(workers)


def test_an_interrupted_round_leaves_no_answers_for_the_next() -> None:
    def slow(message: Message, context: Context) -> Message:
        time.sleep(float(message.content["config"].get("seconds", 0)))
        return count(message, context)

    def ring(*_: object) -> None:
        raise KeyboardInterrupt

    with InProcessGrid(app_of(slow), 2, workers=2) as grid:
        grid.send_and_receive(messages(grid))
        before = signal.signal(signal.SIGALRM, ring)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                grid.send_and_receive(messages(grid, records=content(seconds=0.5)))
        finally:
            signal.signal(signal.SIGALRM, before)
        assert by_partition(grid.send_and_receive(messages(grid)), "calls") == {0: 2, 1: 2}


def test_by_default_there_are_no_more_workers_than_torch_would_use_threads() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert default_workers(BatchedApp()) == 1
    finally:
        torch.set_num_threads(before)
    assert default_workers(BatchedApp()) <= before
    assert default_workers(app_of(count)) == 1


def test_by_default_only_calls_that_are_worth_it_are_dealt() -> None:
    def jobs(nodes: int, size: int) -> list[NodeJob]:
        message = object()
        return [NodeJob(message, None, 0.0, 0.0, size=size) for _ in range(nodes)]  # type: ignore[arg-type]

    dealt = Dealt(always=False)
    assert not any(dealt.worth("train", jobs(50, 30_000)) for _ in range(1000))
    assert not any(dealt.worth("train", jobs(1, 10**9)) for _ in range(10))
    assert not any(dealt.worth("query.state", jobs(50, 10**6)) for _ in range(10))
    assert [dealt.worth("train", jobs(50, 87_360)) for _ in range(5)] == [False, False, False, True, True]
    assert Dealt(always=True).worth("query", jobs(1, 0))
