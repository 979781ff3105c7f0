"""A method outside the package, in a folder of its own: Hier-Local-QSGD."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.sim.cli.command_line import hedgerow
from tests.strategies.rounds_on_arrays import rounds

from hedgerow.sim import read_rounds
from hedgerow.strategies import Ask
from hedgerow.wire import Purpose, generator

FOLDER = Path(__file__).parent / "hier-local-qsgd"
SIZES = [10.0, 30.0, 20.0, 10.0]
CENTRES = np.random.default_rng(0).normal(size=(4, 5))


def test_it_is_one_small_folder() -> None:
    files = [file for file in FOLDER.rglob("*") if file.suffix in (".py", ".toml")]
    assert sum(len(file.read_text().splitlines()) for file in files) <= 250


def quantised(v: np.ndarray, s: int, seed: int, k: int, node: int) -> np.ndarray:
    """Q(v), written down again."""
    chance = generator(seed, round=k, partition_id=node, purpose=Purpose.COMPRESSION).random(v.shape)
    norm = np.linalg.norm(v)
    level = np.abs(v) / norm * s
    return np.asarray(norm * np.sign(v) * (np.floor(level) + (chance < level % 1)) / s)


def learnt(i: int, w: np.ndarray, steps: int) -> np.ndarray:
    for _ in range(steps):
        w = w - 0.2 * (w - CENTRES[i])
    return w


def test_rounds_on_arrays_are_the_papers_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    strategy = importlib.import_module("hier_local_qsgd.strategy")
    method = strategy.HierLocalQSGD(
        num_edges=2, tau1=3, tau2=2, levels=4, seed=1, min_available_nodes=4, max_weight_ratio=0
    )

    def work(i: int, ask: Ask, told: dict[str, Any]) -> np.ndarray:
        assert ask.model is not None
        move = learnt(i, ask.model, told["tau1"]) - ask.model
        return quantised(move, told["levels"], told["seed"], told["round"], i)

    cloud, edges = np.zeros(5), [np.zeros(5), np.zeros(5)]
    for k, state in enumerate(rounds(method, np.zeros(5), SIZES, work, 6), 1):
        for d, (i, j) in enumerate(((0, 1), (2, 3))):
            moves = [quantised(learnt(n, edges[d], 3) - edges[d], 4, 1, k, n) for n in (i, j)]
            edges[d] = edges[d] + np.average(moves, axis=0, weights=[SIZES[i], SIZES[j]])
        if k % 2 == 0:
            moves = [quantised(edge - cloud, 4, 1, k, 4 + d) for d, edge in enumerate(edges)]
            cloud = cloud + np.average(moves, axis=0, weights=[40.0, 30.0])
            edges = [cloud, cloud]
        np.testing.assert_allclose(state.cloud, cloud, atol=1e-14)
        np.testing.assert_allclose(state.edges, edges, atol=1e-14)


@pytest.mark.parametrize("mode", ["", "--strict"])
def test_it_runs_as_an_app_and_books_what_is_quantised(mode: str, tmp_path: Path) -> None:
    arguments = ["run", FOLDER, "-c", "rounds=8", "--output-dir", tmp_path, *mode.split()]
    shown = hedgerow(*arguments)
    assert shown.exit_code == 0, shown.output
    (folder,) = tmp_path.iterdir()
    told = read_rounds(folder)
    assert told[-1]["central"]["accuracy"] > 0.5
    links, entries = told[-1]["by_link"], 7850
    # Levels in [-8, 8] are 5 bits each.
    assert links["client->edge"]["nominal_bits"] == 8 * 6 * (32 + 5 * entries)
    assert links["edge->cloud"]["nominal_bits"] == 4 * 2 * (32 + 5 * entries)
    assert links["edge->client"]["nominal_bits"] == 8 * 6 * 32 * entries
    assert links["client->edge"]["payload_bytes"] < 0.3 * links["edge->client"]["payload_bytes"]


@pytest.mark.slow
def test_it_runs_on_flowers_engine(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    shown = hedgerow("run", FOLDER, "--engine", "flower", "-c", "rounds=2")
    assert shown.exit_code == 0, shown.output
