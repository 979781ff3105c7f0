"""Actors of a Ray cluster are what worker processes are: same bits, and a death costs a round's replies."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message
from tests.sim.engine.test_grid import BatchedApp, app_of, by_partition, content, count, messages
from tests.sim.engine.test_workers import gone, keep, large, pids, told

from hedgerow.sim import InProcessGrid
from hedgerow.sim.engine import ray_cluster
from hedgerow.sim.engine._compat import ErrorCode
from hedgerow.sim.engine.ray_cluster import Cluster, ClusterError, check_address
from hedgerow.wire import view

pytestmark = pytest.mark.usefixtures("flower_identity")
ROOT = Path(__file__).parents[3]
HEDGEROW = sys.executable, "-c", "from hedgerow.sim.cli import app; app()"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two Ray nodes on this machine, a CPU each."""
    made = new_cluster()
    yield made
    made.shutdown()


def new_cluster() -> Any:
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 150 << 20}
    made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    made.add_node(**node)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"strict": True}], ids=str)
def test_any_number_of_actors_gives_what_one_process_does(cluster: Any, options: dict[str, Any]) -> None:
    found = []
    for asked in ({}, {"workers": 1, "ray": cluster.address}, {"workers": 2, "ray": cluster.address}):
        with InProcessGrid(BatchedApp(), 7, **asked, **options) as grid:
            found.append(told(grid, records=large if not options else content))
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_nodes_lie_on_both_machines_and_stay_there(cluster: Any) -> None:
    def where(message: Message, context: Context) -> Message:
        import ray

        reply = keep(message, context)
        node = int(ray.get_runtime_context().get_node_id()[:12], 16)
        reply.content["metrics"]["node"] = node  # type: ignore[index]
        return reply

    with InProcessGrid(app_of(where), 4, workers=0, ray=cluster.address) as grid:
        assert grid._workers is not None
        assert len(grid._workers) == 2
        first, second = (grid.send_and_receive(messages(grid, records=large(1.0))) for _ in range(2))
        # The states that checkpoints are made of keep no shared memory from being given back.
        node, answer = next(iter(grid._nodes.values())), view(second[0].content["arrays"]["w"])
        assert not np.shares_memory(view(node.state["sum"]["w"]), answer)
    assert pids(first) == pids(second)
    assert gone(list(pids(first).values()), 30)  # They end with the grid.
    assert len(set(by_partition(first, "node").values())) == 2
    assert all(view(reply.content["arrays"]["w"])[0] == 2.0 for reply in second)


@pytest.mark.slow
def test_an_actor_that_dies_costs_its_nodes_replies_and_no_state(cluster: Any) -> None:
    def die(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 3 and message.content["config"].get("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        return count(message, context)

    with InProcessGrid(app_of(die), 6, workers=2, ray=cluster.address) as grid:
        grid.send_and_receive(messages(grid))
        replies = grid.send_and_receive(messages(grid, records=content(die=True)))
        assert [r.error.code for r in replies if r.has_error()] == [ErrorCode.CLIENT_APP_CRASHED] * 3
        assert by_partition(replies, "calls") == {0: 2, 2: 2, 4: 2}
        after = by_partition(grid.send_and_receive(messages(grid)), "calls")
        assert grid._workers is not None
        assert len(grid._workers) == 2
    assert after == {0: 3, 1: 2, 2: 3, 3: 2, 4: 3, 5: 2}


@pytest.mark.slow
def test_an_apps_packages_travel(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "apps_own_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "steps.py").write_text(
        "from flwr.app import Message, MetricRecord, RecordDict\n"
        "def step(message, context):\n"
        "    from apps_own_package.numbers import ANSWER\n"
        "    here = MetricRecord({'partition-id': context.node_config['partition-id'], 'answer': ANSWER})\n"
        "    return Message(RecordDict({'metrics': here}), reply_to=message)\n"
    )
    (package / "numbers.py").write_text("ANSWER = 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from apps_own_package.steps import step

    # Another machine has not this one's folders.
    monkeypatch.setattr(ray_cluster, "_here", lambda: {"paths": [], "folder": "/nowhere", "environment": {}})
    packages = tuple(ray_cluster.app_packages(tmp_path))
    assert packages == (str(package),)
    with InProcessGrid(app_of(step), 2, ray=Cluster(cluster.address, packages)) as grid:
        assert by_partition(grid.send_and_receive(messages(grid)), "answer") == {0: 42, 1: 42}


@pytest.mark.slow
def test_what_cannot_be_had_is_one_error_before_work_starts(cluster: Any) -> None:
    with pytest.raises(ClusterError, match=r"workers must be at most the cluster's 2 CPUs, got 9"):
        InProcessGrid(app_of(count), 20, workers=9, ray=cluster.address)

    class Nowhere:
        def __reduce__(self) -> Any:
            return __import__, ("no_such_module_anywhere",)

    app: Any = app_of(count)
    app.more = Nowhere()
    with pytest.raises(
        ClusterError, match=r"cannot load the app: ModuleNotFoundError.*no_such_module_anywhere"
    ):
        InProcessGrid(app, 2, ray=cluster.address)


@pytest.mark.slow
def test_a_machine_that_dies_costs_a_round_of_its_nodes_and_a_cluster_the_run(tmp_path: Path) -> None:
    made = new_cluster()
    try:
        with InProcessGrid(app_of(count), 4, ray=made.address) as grid:
            grid.send_and_receive(messages(grid))
            made.remove_node(made.list_all_nodes()[1], allow_graceful=False)
            replies = grid.send_and_receive(messages(grid))
            assert [reply.has_error() for reply in replies].count(True) in (0, 2)
            after = by_partition(grid.send_and_receive(messages(grid)), "calls")
            assert sorted(after) == [0, 1, 2, 3]
            assert sum(after.values()) == 12 - [reply.has_error() for reply in replies].count(True)
        log = (tmp_path / "log").open("w")
        run = subprocess.Popen(
            [
                *(*HEDGEROW, "run", str(ROOT / "flower_apps/sd-feel")),
                *(
                    "-c",
                    "num-clients=4 num-servers=2 tau2=1 iterations=100000 quiet=true evaluate-every=1000",
                ),
                *("--ray", made.address, "--output-dir", str(tmp_path / "runs")),
            ],
            stdout=log,
            stderr=log,
        )
        lines = wait_for(
            lambda: next((tmp_path / "runs").glob("*/rounds.jsonl"), None), run, tmp_path / "log"
        )
        wait_for(lambda: lines.read_text().count("\n") > 3, run, tmp_path / "log")
    finally:
        made.shutdown()
    assert run.wait(120) == 1
    said = (tmp_path / "log").read_text()
    assert "Run failed: ray: the cluster at" in said
    assert "Traceback" not in said
    again = subprocess.run(
        [
            *(*HEDGEROW, "run", str(ROOT / "flower_apps/sd-feel")),
            *(
                "--resume",
                str(lines.parent),
                "-c",
                f"ray='' iterations={5 * (lines.read_text().count(chr(10)) + 3)}",
            ),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert again.returncode == 0, again.stderr
    assert (lines.parent / "summary.json").exists()


def wait_for(look: Any, run: subprocess.Popen[bytes], log: Path, seconds: float = 90.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := look()):
        assert run.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)
    return found


# Without a cluster


def test_where_nobody_listens_the_error_comes_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(ClusterError, match=f"ray: nothing answers at {address}"):
            InProcessGrid(app_of(count), 2, ray=address)
    assert time.monotonic() - began < 8


def test_what_answers_and_is_no_ray_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "_ANSWERING", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(
            ClusterError, match=f"ray: {address}: nothing there answers as a Ray cluster does"
        ):
            InProcessGrid(app_of(count), 2, ray=address)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"needs Ray: pip install 'flwr\[simulation\]'"):
        check_address("auto")


GPUS = {"GPU": 2.0, "CPU": 16.0}


@pytest.mark.parametrize(
    ("workers", "most", "device", "cluster", "dealt"),
    [
        (0, 100, "auto", {"CPU": 4.0}, (4, {"num_cpus": 1})),
        (3, 2, "auto", {"CPU": 4.0}, (2, {"num_cpus": 1})),
        (0, 100, "cpu", GPUS, (16, {"num_cpus": 1})),
        (0, 100, "cuda", GPUS, (2, {"num_cpus": 0, "num_gpus": 1.0})),
        (4, 100, "auto", GPUS, (4, {"num_cpus": 0, "num_gpus": 0.5})),
        (1, 100, "auto", GPUS, (1, {"num_cpus": 0, "num_gpus": 1.0})),
    ],
)
def test_an_actor_has_a_cpu_or_a_gpu(
    workers: int, most: int, device: str, cluster: dict[str, float], dealt: Any
) -> None:
    assert ray_cluster._dealt(workers, most, device, cluster, cluster) == dealt
