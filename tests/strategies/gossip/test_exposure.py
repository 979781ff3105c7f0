"""What a run's epsilon counts: releases that were made, over resumes and restarts, and paths without noise.

The nodes are real, every message and state is serialised, and all noise that is drawn is seen.
"""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from tests.clients.ceps.federation import squares
from tests.strategies.recording_grid import RecordingGrid

import hedgerow.clients.gossip.node
from hedgerow.clients import ceps_client, noised, privacy_of
from hedgerow.clients.releases import Releases
from hedgerow.sim import flower_identity
from hedgerow.sim.engine.nodes import RemoteState
from hedgerow.strategies import CEPS, DPSGD, Gossip, Monitor, Privacy, RoundEnd
from hedgerow.strategies.gossip.exposure import Requested
from hedgerow.strategies.gossip.state import Appointment
from hedgerow.wire import UPDATE, parse_codec

M, N, SEED = 4, 20, 5
PROBLEMS = squares(2, M, N, 3)
APP = ceps_client(lambda context: PROBLEMS[int(context.node_config["partition-id"])])
SOUND = Privacy("sound", 0.5, 1e-5)
C, MU = 2.0, 0.1


class Grid(RecordingGrid):
    """An engine whose nodes lose their state before some of its updates."""

    def __init__(self, *, lose: dict[int, int] | None = None, **options: Any) -> None:
        super().__init__(APP, M, strict=True, push=self._restart, **options)
        # Before the update of an iteration, the node that restarts.
        self.lose = dict(lose or {})

    def _restart(self, kind: str, partition: int, content: RecordDict) -> None:
        if kind == UPDATE:
            i = self.lose.pop(int(content["config"]["iteration"]), None)
            for node in self._nodes.values():
                if node.partition_id == i:
                    node.state = RecordDict()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How many noisy gradients each node has drawn, by partition id."""
    drawn: Counter[int] = Counter()

    def counted(root: int, partition_id: int, *rest: Any) -> Any:
        drawn[partition_id] += 1
        return noised(root, partition_id, *rest)

    monkeypatch.setattr(hedgerow.clients.gossip.node, "noised", counted)
    return drawn


def ledgers(folder: Path) -> list[dict[str, Any]]:
    """Return node configs with which each node keeps a ledger of its own."""
    configs = []
    for i in range(M):
        policy = folder / f"node{i}.toml"
        policy.write_text(f'ledger = "ledger{i}.jsonl"\nmax-restores = 10\n')
        configs.append({"policy": str(policy)})
    return configs


def written(folder: Path) -> Counter[int]:
    """Return how many releases each ledger has."""
    lines = {i: (folder / f"ledger{i}.jsonl").read_text().splitlines() for i in range(M)}
    return Counter({i: sum(json.loads(one)["what"] == "release" for one in lines[i]) for i in lines})


def ceps(**parameters: Any) -> CEPS:
    defaults: dict[str, Any] = {
        "dim": N, "sparsity": N, "codec": "dense64", "topology": "complete", "interval": (1, 2), "seed": SEED,
        "min_available_nodes": M, "participation": 1.0, "sigma_rule": "fixed_c", "c": C, "mu": MU,
        "privacy": SOUND,
    }  # fmt: skip
    return CEPS(**{**defaults, **parameters})


def dpsgd(**parameters: Any) -> DPSGD:
    defaults: dict[str, Any] = {
        "dim": N, "learning_rate": 0.02, "local_steps": 2, "seed": SEED, "min_available_nodes": M,
        "topology": "complete", "privacy": SOUND,
    }  # fmt: skip
    return DPSGD(**{**defaults, **parameters})


def run(strategy: Gossip, grid: Grid, num_rounds: int) -> dict[str, Any]:
    """Run to a round, and return what the last round's record says."""
    ends: list[RoundEnd] = []
    strategy.on_round_end = [ends.append]
    with flower_identity(1):
        strategy.start(grid, ArrayRecord(), num_rounds=num_rounds, timeout=60.0)
    return dict(ends[-1].train)


def cost(count: int) -> float:
    return SOUND.report(count).epsilon


# Releases that were made


@pytest.mark.parametrize("make", [ceps, dpsgd])
def test_an_undisturbed_run_counts_what_was_made_and_no_more(make: Any, made: Counter[int]) -> None:
    told = run(make(), Grid(), 6)
    assert told["releases"] - max(made.values()) in (0, 1)
    assert told["epsilon"] == told["releases-epsilon"] == cost(int(told["releases"]))


@pytest.mark.parametrize("make", [ceps, dpsgd])
@pytest.mark.parametrize("lose", [{2: 1}, {2: 1, 4: 1, 6: 1}, {4: 0, 6: 2}])
def test_a_node_that_restarts_is_counted_before_its_first_update_too(
    make: Any, lose: dict[int, int], made: Counter[int]
) -> None:
    told = run(make(), Grid(lose=lose), 9)
    assert told["releases"] >= max(made.values())
    assert told["epsilon"] == cost(int(told["releases"]))


@pytest.mark.parametrize("make", [ceps, dpsgd])
def test_rounds_after_a_checkpoint_are_made_again_and_a_simulation_says_that_it_cannot_know(
    make: Any, made: Counter[int]
) -> None:
    strategy, grid = make(), Grid()
    run(strategy, grid, 3)
    state, kept = strategy.state_dict(), grid.state_dict()
    run_on(strategy, grid, 6, state, kept)  # Stopped after round 6, whose checkpoint is that of round 3.
    again = make()
    told = run_on(again, grid, 6, state, kept)
    assert max(made.values()) > run(make(), Grid(), 6)["releases"]
    assert told["epsilon"] == math.inf
    assert told["unprotected-lost-rounds"] == 1
    report = again.privacy_report()
    assert not report.guaranteed
    assert "resumed" in str(report)


def run_on(strategy: Gossip, grid: Grid, num_rounds: int, state: Any, kept: Any) -> dict[str, Any]:
    strategy.load_state_dict(json.loads(json.dumps(state)))
    grid.load_state_dict(kept)
    return run(strategy, grid, num_rounds)


def test_a_resumed_run_of_devices_counts_by_their_ledgers(made: Counter[int], tmp_path: Path) -> None:
    """Resumed twice from one checkpoint, under new ids, with a restart: all of it is in the ledgers."""
    configs = ledgers(tmp_path)
    first = ceps()
    grid = Grid(node_configs=configs)
    run(first, grid, 3)
    state, kept = first.state_dict(), RemoteState(grid, 60.0).state_dict()
    run(first, grid, 6)  # Begins anew, as a run that nobody linked to this one.
    told: dict[str, Any] = {}
    for seed in (1, 2):
        grid, strategy = Grid(node_configs=configs, seed=seed, lose={6: 1}), ceps()
        strategy.load_state_dict(json.loads(json.dumps(state)))
        RemoteState(grid, 60.0).load_state_dict(kept)
        told = run(strategy, grid, 7)
        assert written(tmp_path) == made
        assert told["releases"] >= max(made.values())
        assert told["epsilon"] == cost(max(made.values())) > cost(8 + 1)
        assert strategy.privacy_report().guaranteed


def test_a_node_whose_ledger_knows_nothing_of_the_earlier_run_leaves_it_open(tmp_path: Path) -> None:
    """It was not given its state back: what it released after the checkpoint is in no count."""
    configs, first = ledgers(tmp_path), ceps()
    run(first, Grid(node_configs=configs), 3)
    state = first.state_dict()
    strategy = ceps()
    strategy.load_state_dict(json.loads(json.dumps(state)))
    told = run(strategy, Grid(node_configs=configs, seed=1), 6)
    assert told["unprotected-lost-rounds"] == 1
    assert told["epsilon"] == math.inf


def test_linked_runs_are_counted_together_and_others_are_not(tmp_path: Path) -> None:
    ledger = Releases(tmp_path / "ledger.jsonl")
    for root, (run_id, of) in enumerate([("a", None), ("b", "a"), ("c", "a"), ("d", "c"), ("x", None)]):
        if of is not None:
            ledger.restore(run_id, 7, 9, of, 1)
        for index in range(2):
            ledger.release(run_id, 7, root, index, 5.0, 1e-5, math.inf)
    assert {one: ledger.made(one) for one in "abcdxy"} == {
        "a": (8, 0), "b": (8, 1), "c": (8, 1), "d": (8, 2), "x": (2, 0), "y": (0, 0),
    }  # fmt: skip


@pytest.mark.parametrize(
    "told", ["many", [3], [3, 0, 0], [-1, 0], [2**31, 0], [3.5, 0.0], ["3", "0"], [2**62, 2**62]]
)
def test_a_count_that_is_none_changes_nothing(told: Any) -> None:
    exposure = ceps().exposure
    exposure.tell(1, RecordDict({"next": ConfigRecord({"releases": told})}), "next")
    assert exposure.of.get(1, Requested()) == Requested()


def test_a_node_that_tells_a_huge_count_does_not_end_the_run(tmp_path: Path) -> None:
    def lie(kind: str, partition: int, reply: Message) -> None:
        if reply.has_content() and "next" in reply.content:
            reply.content["next"]["releases"] = [2**31 - 1, 0]

    told = run(ceps(), Grid(pull=lie), 3)
    assert cost(100) < told["epsilon"] < math.inf


# Paths without noise


def test_who_knows_the_seed_takes_the_noise_off_and_the_report_says_so() -> None:
    """The server decodes w^1 = (xi - gradient) / (c + mu) from what it relays, and draws xi itself."""

    def error(source: Any) -> tuple[float, dict[str, Any]]:
        grid = Grid()
        told = run(ceps(privacy=Privacy("sound", 0.5, 1e-5, noise_source=source), interval=1), grid, 1)
        errors = []
        for _, i, content in grid.replies:
            if "payload" in content:
                w = parse_codec("dense64").decode(content["payload"]["bytes"], N, (0,))  # type: ignore[arg-type]
                asked = Privacy("sound", 0.5, 1e-5).instructions()
                private = privacy_of(ConfigRecord({**asked}), PROBLEMS[i].num_examples)
                xi = noised(SEED, i, 0, np.zeros(N), private)
                gradient = PROBLEMS[i].gradient(np.zeros(N), 1.0)
                errors.append(np.linalg.norm(xi - w * (C + MU) - gradient) / np.linalg.norm(gradient))
        assert len(errors) == M
        return float(max(errors)), told

    read, told = error("seed")
    assert read < 1e-5  # Rounding to the grid is left.
    assert told["epsilon"] == math.inf
    assert told["unprotected-seeded-noise"] == 1
    read, told = error("entropy")
    assert read > 1
    assert told["epsilon"] == cost(2)


def test_a_monitor_that_is_answered_makes_epsilon_infinite(tmp_path: Path) -> None:
    """A node's guard refuses it in mode sound, and the run keeps its epsilon."""
    strategy = ceps(monitor=Monitor(3))
    told = run(strategy, Grid(), 3)
    assert told["unprotected-monitor"] == 1
    assert told["epsilon"] == math.inf
    assert "monitor" in str(strategy.privacy_report())
    told = run(ceps(monitor=Monitor(3)), Grid(node_configs=ledgers(tmp_path)), 3)
    assert "unprotected-monitor" not in told
    assert told["epsilon"] == cost(int(told["releases"]))


def test_one_node_that_answers_a_monitor_is_enough(tmp_path: Path) -> None:
    configs = ledgers(tmp_path)
    configs[2] = {}
    strategy = ceps(monitor=Monitor(3))
    assert run(strategy, Grid(node_configs=configs), 3)["epsilon"] == math.inf
    for later in (ceps(monitor=Monitor(3)), ceps()):
        later.load_state_dict(json.loads(json.dumps(strategy.state_dict())))
        assert "monitor" in later.privacy_report().unprotected


def test_a_node_that_is_told_its_settings_again_may_have_begun_anew() -> None:
    """As it may that comes back under another id; one that says that it is past its beginning did not."""
    of_communications, of_iterations = both = ceps().exposure, dpsgd().exposure
    for exposure in both:
        for exposure.iterations in (0, 5, 9):
            exposure.greet(1)
        exposure.iterations = 11
    assert of_communications.most() == 3
    assert of_iterations.most() == 5 + 9 + 11
    for exposure in both:
        exposure.iterations = 9
        exposure.keep(1, Appointment(7, 2, 10, []))
        exposure.iterations = 11
    assert of_communications.most() == 2
    assert of_iterations.most() == 5 + 11
