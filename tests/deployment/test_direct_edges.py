"""Edge servers with a SuperLink each: the models of emulated ones, and what is left when something breaks."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.deployment.leftovers import left_running
from tests.deployment.trials import wait_for
from tests.sim.cli.command_line import hedgerow
from tests.wire.links.addresses import Wire

from hedgerow.sim import (
    EdgeDeployment,
    find_app,
    load,
    load_app,
    load_newest,
    make_edge_credentials,
    plan_run,
    read_rounds,
    run_app,
)
from hedgerow.sim.deploy.edges import edge_overrides
from hedgerow.sim.deploy.flower_cli import FlowerRun, healthy
from hedgerow.strategies.sd_feel import contiguous_clusters

pytestmark = pytest.mark.slow

APP = Path(__file__).parents[2] / "flower_apps" / "sd-feel"
CONFIG = "tau1=2 tau2=1 batch-size=5 model=logistic evaluate-every=1 training-mode=loop checkpoint-every=1"
PATIENCE = 300.0


@dataclass
class Edges:
    """A deployment whose servers run."""

    deployment: EdgeDeployment
    out: Path
    config: str
    runs: dict[int, FlowerRun] = field(default_factory=dict)

    def submit(self, edge: int, *overrides: str) -> None:
        one = self.deployment
        keys = one.keys[edge] if one.tls else None
        own = edge_overrides(edge, one.peers, keys, str(self.out))
        plan = plan_run(one.spec, [self.config, *own, *overrides], num_nodes=one.num_nodes)
        self.runs[edge] = one.submit(edge, plan, echo=False)

    def kill(self, edge: int) -> None:
        """Kill a server's ServerApp."""
        for pid in self.deployment.servers[edge].superlink.descendants("flwr-serverapp"):
            os.kill(pid, signal.SIGKILL)

    def folder(self, edge: int) -> Path:
        (found,) = (self.out / f"edge{edge}").iterdir()
        return found

    def rounds(self, edge: int) -> list[dict[str, Any]]:
        return read_rounds(self.folder(edge))

    def wait_for_round(self, edge: int, number: int) -> None:
        def there() -> bool:
            assert self.runs[edge].following, "".join(self.runs[edge].lines)[-3000:]
            place = self.out / f"edge{edge}"
            if not place.is_dir() or not list(place.glob("*/rounds.jsonl")):
                return False
            rounds = self.rounds(edge)
            return bool(rounds) and rounds[-1]["round"] >= number

        wait_for(there, f"round {number} of edge server {edge}")

    def end(self, *edges: int) -> None:
        for edge in edges or self.runs:
            end = self.runs[edge].wait(PATIENCE)
            assert end.exit_code == 0, f"{edge}: {end}\n{''.join(self.runs[edge].lines)[-4000:]}"

    def model(self, edge: int) -> dict[str, np.ndarray]:
        with np.load(self.folder(edge) / "model.npz") as model:
            return {name: model[name] for name in model.files}

    def members(self, edge: int) -> dict[int, list[int]]:
        return {one["round"]: one["train"]["servers"] for one in self.rounds(edge) if one["round"]}


@contextmanager
def edges(nodes: int, servers: int, config: str, out: Path, *, tls: bool = True) -> Iterator[Edges]:
    clusters = contiguous_clusters(nodes, servers)
    partitions = [[i for i, server in enumerate(clusters) if server == d] for d in range(servers)]
    with EdgeDeployment(find_app(APP), partitions, tls=tls) as deployment:
        yield Edges(deployment, out, f"{CONFIG} {config}")
    assert left_running(deployment.home) == []
    assert not deployment.home.exists()


def emulated(nodes: int, servers: int, config: str, out: Path) -> list[dict[str, np.ndarray]]:
    """Return each server's model of a run at level E1."""
    app = load_app(APP)
    overrides = [CONFIG, config, f"num-servers={servers} output-dir={out} quiet=true"]
    run_app(app, plan_run(app.spec, overrides, num_nodes=nodes))
    (folder,) = out.iterdir()
    _, found = load_newest(folder / "checkpoint")
    state = found.state["parts"]["strategy"]
    layout, models = state["federation"]["layout"], []
    for vector in np.asarray(state["method"]["servers"]):
        parts, at = {}, 0
        for key, shape in zip(layout["keys"], layout["shapes"], strict=True):
            size = int(np.prod(shape))
            parts[key] = vector[at : at + size].reshape(shape)
            at += size
        models.append(parts)
    return models


# Clusters of 2, 1 and 1 or 2, 2, 1 nodes and so on: unequal ones.
@pytest.mark.parametrize(
    ("nodes", "servers", "config"),
    [
        (4, 3, "topology=path alpha=1 iterations=4"),
        (5, 4, "topology=ring alpha=3 iterations=4"),
        (4, 3, "topology=complete alpha=2 iterations=4 exact-if-complete=true"),
    ],
)
def test_servers_with_superlinks_of_their_own_end_with_the_bits_of_emulated_ones(
    nodes: int, servers: int, config: str, tmp_path: Path
) -> None:
    expected = emulated(nodes, servers, config, tmp_path / "here")
    with edges(nodes, servers, config, tmp_path / "there") as there:
        for d in range(servers):
            there.submit(d)
        there.end()
    for d, models in enumerate(expected):
        found = there.model(d)
        assert [key for key in models if not np.array_equal(models[key], found[key])] == []
        assert there.members(d) == {1: list(range(servers)), 2: list(range(servers))}


@pytest.mark.parametrize("whole", [False, True], ids=["its ServerApp", "its SuperLink and its nodes"])
def test_a_killed_server_is_left_out_and_goes_on_from_its_checkpoint_where_the_others_are(
    whole: bool, tmp_path: Path
) -> None:
    config = "topology=path alpha=1 iterations=60 peer-timeout=40.0"
    with edges(3, 3, config, tmp_path, tls=not whole) as there:
        for d in range(3):
            there.submit(d)
        there.wait_for_round(2, 2)
        before, server = there.folder(2), there.deployment.servers[2]
        if whole:
            # As a power cut does.
            for program in (*server.nodes, server.superlink):
                program.kill()
            server.superlink.start()
            port = int(server.address.rpartition(":")[2])
            server.superlink.wait_until(lambda: healthy(port, None), 120.0)
            for node in server.nodes:
                node.restart()
        else:
            there.kill(2)
            there.wait_for_round(0, there.rounds(2)[-1]["round"] + 2)
        there.submit(2, f"resume={before}")
        there.end()
        members = there.members(1)
        assert [0, 1] in members.values()
        assert members[30] == [0, 1, 2]
        numbers = [one["round"] for one in there.rounds(2)]
        assert numbers == sorted(set(numbers))
        assert numbers[-1] == 30
        assert len(numbers) < 31


def test_a_server_with_another_certificate_is_alone_and_the_others_go_on(tmp_path: Path) -> None:
    strangers = make_edge_credentials(tmp_path / "keys", [[0], [1], [2]])
    config = "topology=path alpha=1 iterations=4 peer-timeout=60.0"
    with edges(3, 3, config, tmp_path / "out") as there:
        for d in range(2):
            there.submit(d)
        other = strangers[2]
        there.submit(
            2,
            f"peer-ca={other.superlink.ca} peer-certificate={other.peer_certificate}",
            f"peer-key={other.peer_key}",
        )
        there.end(0, 1)
        for d in range(2):
            assert there.members(d)[2] == [0, 1]
            assert not any(2 in members for members in there.members(d).values())


def wired(there: Edges, stack: ExitStack, one: int, other: int, delay: float = 0.0) -> list[Wire]:
    """Submit all servers, two of them with a wire each that it reaches the other over."""
    real = there.deployment.peers
    wires = {end: stack.enter_context(Wire(real[one + other - end], delay)) for end in (one, other)}
    for d in range(len(real)):
        seen = list(real)
        if d in wires:
            seen[one + other - d] = wires[d].address
        there.submit(d, f"peers={','.join(seen)} peer-listen={real[d]}")
    return list(wires.values())


def test_a_slow_link_is_waited_for_and_its_seconds_are_told(tmp_path: Path) -> None:
    config, delay = "topology=path alpha=1 iterations=4", 0.4
    expected = emulated(3, 2, config, tmp_path / "here")
    with edges(3, 2, config, tmp_path / "there", tls=False) as there, ExitStack() as stack:
        wired(there, stack, 0, 1, delay)
        there.end()
        for d, models in enumerate(expected):
            found = there.model(d)
            assert [key for key in models if not np.array_equal(models[key], found[key])] == []
            for one in there.rounds(d)[1:]:
                assert one["train"]["servers"] == [0, 1]
                # A message and its acknowledgement, in each of the stages of an exchange.
                assert one["train"]["link-send-seconds"][0] > 2 * 2 * delay


def test_a_cut_link_is_left_out_by_both_its_ends_and_taken_in_again(tmp_path: Path) -> None:
    config = "topology=ring alpha=2 iterations=16 peer-timeout=40.0"
    with edges(3, 3, config, tmp_path) as there, ExitStack() as stack:
        wires = wired(there, stack, 0, 1)
        there.wait_for_round(0, 1)
        for wire in wires:
            wire.cut()
        there.wait_for_round(0, 4)
        for wire in wires:
            wire.mend()
        there.end()
        # All are reached all along, over 2.
        assert set(map(tuple, there.members(0).values())) == {(0, 1, 2)}
        lost = [[_lost(one) for one in there.rounds(d) if one["round"]] for d in range(3)]
        assert lost[2] == [0] * 8
        assert lost[0] == lost[1]
        assert sum(lost[0]) >= 1
        assert lost[0][-1] == 0
        matrices = [[one["train"]["zeta"] for one in there.rounds(d) if one["round"]] for d in range(3)]
        assert matrices[0] == matrices[1] == matrices[2]
        # Without the link it is a path, and with it a ring again.
        assert matrices[0][0] == matrices[0][-1] < max(matrices[0])


def _lost(record: dict[str, Any]) -> int:
    return sum(count for key, count in record["train"].items() if key.startswith("lost-links"))


def test_u_is_measured_afterwards_as_that_of_emulated_servers_and_the_folders_are_read_as_one_run(
    tmp_path: Path,
) -> None:
    config = "topology=path alpha=2 iterations=6"
    emulated(4, 3, config, tmp_path / "here")
    (expected,) = load([next((tmp_path / "here").iterdir())]).runs
    with edges(4, 3, config, tmp_path / "there") as there:
        for d in range(3):
            there.submit(d)
        there.end()
    (unmeasured,) = load([tmp_path / "there"]).runs
    assert unmeasured.series("rounds", "servers-loss")
    shown = hedgerow("evaluate", tmp_path / "there")
    assert shown.exit_code == 0, shown.output
    (found,) = load([tmp_path / "there"]).runs
    for metric in ("loss", "accuracy"):
        assert found.series("bits", metric) == expected.series("bits", metric)
    assert found.series("sim-seconds", "consensus-error") == expected.series("sim-seconds", "consensus-error")
    assert min(point.y for point in found.series("rounds", "gossip-seconds")) > 0


# Put on the wire in place of what the server holds, after its own mean and rule; nothing else that servers
# tell each other in an exchange is as long as a model.
LYING = """
import numpy as np

from hedgerow.wire.links.peers import PeerChannel
from sd_feel.server_app import app as honest

DIGEST, PARAMETERS = 32, 7850
truth = PeerChannel.exchange


def exchange(channel, topic, payloads, timeout):
    return truth(channel, topic, {peer: told(payload) for peer, payload in payloads.items()}, timeout)


def told(payload):
    dtype = {4 * PARAMETERS: np.float32, 8 * PARAMETERS: np.float64}.get(len(payload) - DIGEST)
    if dtype is None:
        return payload
    return payload[:DIGEST] + (np.frombuffer(payload, dtype, offset=DIGEST) * dtype(-20)).tobytes()


PeerChannel.exchange = exchange
app = honest
"""


def tamper(there: Edges, edge: int, folder: Path) -> None:
    """Let a server run a copy of the app that tells its neighbours -20 times its model in each step."""
    shutil.copytree(APP, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "sd_feel" / "lying.py").write_text(LYING)
    project = (folder / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(project.replace("sd_feel.server_app:app", "sd_feel.lying:app"))
    there.deployment.servers[edge].spec = find_app(folder)


@pytest.mark.parametrize("aggregation", ["clipped(0.2)", "mean"])
def test_a_server_that_lies_ruins_a_mean_and_slows_those_that_clip(aggregation: str, tmp_path: Path) -> None:
    config = f'topology=path alpha=2 iterations=8 peer-timeout=40.0 aggregation="{aggregation}"'
    with edges(3, 3, config, tmp_path / "there", tls=False) as there:
        tamper(there, 2, tmp_path / "app")
        for d in range(3):
            there.submit(d)
        # The liar first: where its app does not load, the others would wait for it.
        there.end(2, 0, 1)
        losses = [[one["central"]["loss"] for one in there.rounds(d)] for d in range(2)]
        lost = [[_lost(one) for one in there.rounds(d)] for d in range(2)]
        heard = [list(there.members(d).values()) for d in range(2)]
    if aggregation == "mean":
        assert max(losses[1]) > 2 * losses[1][0]
        return
    # Each lie was taken, for it is no absurd one, and moved its neighbour no further than the rule lets it.
    assert heard == [[[0, 1, 2]] * 4] * 2
    assert lost == [[0] * 5] * 2
    assert all(loss[-1] < loss[0] - 0.2 for loss in losses)
