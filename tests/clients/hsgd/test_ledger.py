"""What a node of HSGD releases stands in its own ledger, over restarts and runs, till its budget is spent."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.strategies.hsgd.real_nodes import GROUPS, MODEL, Server, World, run, strategy

from hedgerow.clients.releases import epsilon_of
from hedgerow.sim import flower_identity
from hedgerow.strategies import HSGD, EmbeddingNoise, UploadNoise
from hedgerow.wire import to_record

NOISE: dict[str, Any] = {
    "sealed": True, "noise": EmbeddingNoise(1.0, 8.0), "upload_noise": UploadNoise(0.5, 4.0),
}  # fmt: skip
# Of a device: the deviation of its noise on encodings and on uploads, in sensitivities 2 C.
ROUND = [4.0, 2.0]
DEVICE = GROUPS


class Node:
    """One node that has a policy, and what it wrote down."""

    def __init__(self, folder: Path, partition: int, budget: float = 100.0, **more: Any) -> None:
        self.partition, self.ledger = partition, folder / "ledger.jsonl"
        self.policy = folder / "policy.toml"
        told = {"privacy": "sound", "max-epsilon": budget, "ledger": str(self.ledger), **more}
        self.policy.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in told.items()))

    def server(self, world: World) -> Server:
        configs: list[dict[str, Any]] = [{"partition-id": i} for i in range(len(world.parties))]
        configs[self.partition]["policy"] = str(self.policy)
        return Server(world, node_configs=configs)

    def released(self) -> list[float]:
        if not self.ledger.exists():
            return []
        lines = [json.loads(line) for line in self.ledger.read_text().splitlines()]
        return [line["multiplier"] for line in lines if line["what"] == "release"]


def play(hsgd: HSGD, world: World, server: Server, rounds: int, run_id: int) -> list[dict[str, int]]:
    """Run, under a run id of its own; return what was lost in each round."""
    ends: list[Any] = []
    hsgd.on_round_end = [ends.append]
    with flower_identity(run_id):
        hsgd.start(server, to_record(MODEL.state_dict()), num_rounds=rounds, timeout=60.0)
    return [dict(end.rejected) for end in ends if end.round]


def test_releases_are_counted_over_restarts_and_runs_until_the_budget_is_spent(tmp_path: Path) -> None:
    """Three rounds fit: two of one run, one of the next, on nodes that began anew."""
    world = World("devices")
    node = Node(tmp_path, DEVICE, epsilon_of(3 * ROUND, 1e-6) * (1 + 1e-9))
    assert play(strategy(world, **NOISE), world, node.server(world), 2, run_id=1) == [{}, {}]
    assert node.released() == 2 * ROUND
    lost = play(strategy(world, **NOISE), world, node.server(world), 4, run_id=2)
    assert lost == [{}, {"error 2": 1}, {"error 2": 1}, {"error 2": 1}]
    assert node.released() == 3 * ROUND


@pytest.mark.parametrize(("partition", "layout"), [(0, "edges"), (GROUPS, "edges"), (0, "devices")])
def test_hospitals_and_edges_release_once_a_round(partition: int, layout: str, tmp_path: Path) -> None:
    world = World(layout)
    node = Node(tmp_path, partition)
    assert play(strategy(world, **NOISE), world, node.server(world), 2, run_id=1) == [{}, {}]
    assert node.released() == 2 * ROUND


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"sealed": True}, {}),  # Nothing is noisy.
        ({**NOISE, "noise": None}, {}),  # Encodings are not.
        ({**NOISE, "upload_noise": None}, {}),  # Uploads are not.
        (NOISE, {"min-noise-multiplier": 3.0}),
        (NOISE, {"max-clip": 0.4}),
    ],
)
def test_a_node_that_wants_noise_tells_nothing_without_enough(
    options: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    world = World("devices")
    node = Node(tmp_path, DEVICE, **more)
    server = node.server(world)
    lost = play(strategy(world, **options), world, server, 1, run_id=1)
    assert lost == [{"error 2": 1}]
    told = {kind for kind, i, _ in server.replies if i == DEVICE}
    assert "train.update" not in told


def test_a_hospital_tells_no_head_without_noise_between_aggregations(tmp_path: Path) -> None:
    """P = 2 Q: the second exchange asks for a head that has learnt since."""
    world = World("edges")
    node = Node(tmp_path, 0)
    lost = play(strategy(world, 2, 1, **NOISE), world, node.server(world), 1, run_id=1)
    assert lost == [{"error 2": 1}]
    _, (end,), _ = run(strategy(world, 2, 1, **NOISE), world, 1)
    assert end.rejected == {}
