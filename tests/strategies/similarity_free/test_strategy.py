"""FedAvg, FedProx and their error-feedback forms through real messages, against goldens and the oracle."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context
from tests.clients.similarity_free.quadratic_cases import Point, half_square, samples
from tests.oracles.similarity_free import Q2, Quadratic

from hedgerow.clients import LocalTask, TrainingMode, similarity_free_client
from hedgerow.sim import FaultModel, InProcessGrid, flower_identity
from hedgerow.strategies import (
    FedAvg,
    Fixed,
    InnerSolver,
    SimilarityFree,
    TooFewRepliesError,
)
from hedgerow.wire import TopK, to_record

TENTH = Fixed(c=0.1, num_rounds=1)
EXACT = InnerSolver(lr="fixed:0.05", steps=45, tol=0.0)


class Federation:
    """Workers with a quadratic each; what they hold between rounds can be looked at."""

    def __init__(
        self,
        problems: Sequence[Quadratic] = Q2,
        faults: FaultModel | None = None,
        mode: TrainingMode | None = None,
    ) -> None:
        self.problems = problems
        x, y = samples(problems)

        def task(context: Context) -> LocalTask:
            i = int(context.node_config["partition-id"])
            return LocalTask(Point(x.shape[1] // 2), x, y, np.array([i]))

        self.grid = InProcessGrid(
            similarity_free_client(task, mode, half_square), num_nodes=len(problems), faults=faults
        )

    def run(self, strategy: SimilarityFree, rounds: int, start: Sequence[float] | None = None) -> np.ndarray:
        size = len(self.problems[0].c)
        arrays = to_record({"w": torch.tensor(start or [0.0] * size, dtype=torch.float64)})
        with flower_identity(self.grid):
            result = strategy.start(grid=self.grid, initial_arrays=arrays, num_rounds=rounds)
        return result.arrays["w"].numpy()


def family(algorithm: str, **parameters: Any) -> SimilarityFree:
    if algorithm.startswith("ef-"):
        parameters.setdefault("compressor", TopK(count=1))
    defaults = {"schedule": TENTH, "local_iters": 2, "inner": EXACT, "fraction_evaluate": 0.0}
    return SimilarityFree.named(algorithm, **{**defaults, **parameters})


# Goldens, section 8.2 of the reference problem


@pytest.mark.parametrize("mode", ["loop", "stack"])
@pytest.mark.parametrize(
    ("algorithm", "xs", "tolerance"),
    [
        ("fedavg", [(-0.085, 0.19), (-0.146625, 0.32775), (-0.191303125, 0.42761875)], 1e-12),
        (
            "fedprox",
            [
                (-0.037878787879, 0.090909090909),
                (-0.070879247016, 0.170110192837),
                (-0.099629647021, 0.239111152851),
            ],
            1e-11,
        ),
        # Messages and memories are float32.
        ("ef-fedavg", [(0.095, 0.19), (-0.196125, 0.19), (-0.082493125, 0.5339)], 1e-7),
        (
            "ef-fedprox",
            [
                (0.045454545455, 0.090909090909),
                (-0.081611570248, 0.090909090909),
                (-0.032447407964, 0.264462809917),
            ],
            1e-7,
        ),
    ],
)
def test_golden_trajectories(
    algorithm: str, xs: list[tuple[float, float]], tolerance: float, mode: TrainingMode
) -> None:
    federation, strategy = Federation(mode=mode), family(algorithm)
    seen: list[np.ndarray] = []
    strategy.on_round_end = [lambda end: seen.append(strategy.current_arrays())]
    federation.run(strategy, 3)
    got = [record["w"].numpy() for record in seen[1:]]
    np.testing.assert_allclose(got, xs, atol=tolerance)


def test_a_round_step_is_shared_by_the_local_iterations() -> None:
    # alpha^k = 0.2 over two iterations is the golden's local step of 0.1.
    strategy = family("fedavg", schedule=Fixed(c=0.2, num_rounds=1), schedule_drives="round")
    np.testing.assert_allclose(Federation().run(strategy, 1), (-0.085, 0.19), atol=1e-12)


def test_a_proximal_round_takes_the_whole_step_whatever_drives() -> None:
    local, round_ = (family("fedprox", schedule_drives=drives) for drives in ("local", "round"))
    assert local.local_step(0) == round_.local_step(0) == 0.1


# Reductions


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox"])
def test_error_feedback_without_a_compressor_is_full_precision_bit_for_bit(algorithm: str) -> None:
    plain = Federation().run(family(algorithm), 5)
    fed_back = Federation().run(family(f"ef-{algorithm}", compressor="identity"), 5)
    assert np.array_equal(plain, fed_back)


def test_full_precision_is_the_suites_fedavg_bit_for_bit() -> None:
    problems = [*Q2, Q2[0], Q2[1]]
    ours = Federation(problems).run(family("fedavg", min_available_nodes=4), 5)
    local = Federation(problems)

    def as_local_steps(strategy: FedAvg) -> np.ndarray:
        """The same local work for a strategy that knows neither operator nor schedule."""
        configure = strategy.configure_train

        def configured(server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            run: Any = SimpleNamespace(round=server_round, seed=0)
            told = family("fedavg", min_available_nodes=4).instructions(server_round - 1, run)
            uplink = {"compressor": "identity", "error-feedback": True, "acknowledged": -1}
            return configure(server_round, arrays, type(config)({**config, **told, **uplink}), grid)

        strategy.configure_train = configured  # type: ignore[method-assign]
        return local.run(strategy, 5)  # type: ignore[arg-type]

    reference = FedAvg(local_steps=2, min_available_nodes=4, fraction_evaluate=0.0)
    assert np.array_equal(ours, as_local_steps(reference))


# Memory


def memories(federation: Federation) -> list[np.ndarray]:
    states = [node.state for node in federation.grid._nodes.values()]
    return [next(iter(state.array_records.values()))["after.memory"].numpy() for state in states]


def test_each_worker_has_a_memory_of_its_own_from_the_first_round_on() -> None:
    federation, ends = Federation(), []
    strategy = family("ef-fedavg")
    strategy.on_round_end = [ends.append]
    federation.run(strategy, 3)
    first, second = memories(federation)
    assert not np.array_equal(first, second)
    assert [end.train["memory-norm"] > 0 for end in ends[1:]] == [True] * 3
    assert all(end.train["memory-lost"] == 0 for end in ends[1:])


def test_the_virtual_iterate_moves_by_the_mean_change() -> None:
    federation = Federation()
    x = federation.run(family("ef-fedavg"), 3)
    z = x + np.mean(memories(federation), axis=0)
    np.testing.assert_allclose(z, (-0.227190625, 0.4655), atol=1e-7)


def test_lost_replies_are_restored_and_nothing_is_lost() -> None:
    rounds = 12
    # A worker whose reply is dropped computes nothing; z must still move by the mean of what was computed.
    federation = Federation(faults=FaultModel(dropout=0.3))
    strategy = family("ef-fedavg", min_train_nodes=1, max_repeats=5)
    moves: list[float] = []
    strategy.on_round_end = [lambda end: moves.append(end.accepted)]
    x = federation.run(strategy, rounds)
    assert 0 < sum(moves[1:]) < 2 * rounds
    assert np.isfinite(x).all()
    assert np.linalg.norm(x - (-1 / 3, 2 / 3)) < 0.5


def test_a_missing_worker_counts_as_one_that_stayed() -> None:
    strategy = family("fedavg")
    federation = Federation(faults=FaultModel(crash_at={1: 2}))  # the introduction is message 1
    x = federation.run(strategy, 1)
    np.testing.assert_allclose(x, (0.19 / 2, 0.0), atol=1e-12)
    assert strategy.report.accepted == 1


def test_a_round_that_wants_all_workers_stops_the_run_without_one() -> None:
    federation = Federation(faults=FaultModel(crash_at={1: 2}))
    with pytest.raises(TooFewRepliesError):
        federation.run(family("fedavg", min_train_nodes=2), 1)


# Parameters


def test_probed_rounds_report_estimates() -> None:
    strategy, ends = family("fedavg", probe_rounds=2), []
    strategy.on_round_end = [ends.append]
    Federation().run(strategy, 3)
    assert [("curvature" in end.train) for end in ends[1:]] == [True, True, False]
    assert ends[1].train["curvature"] == pytest.approx(2.0, rel=1e-3)
    assert ends[1].train["gradient-variance"] == pytest.approx(0.0, abs=1e-12)


def test_a_second_start_begins_anew() -> None:
    federation, strategy = Federation(), family("ef-fedavg")
    first = federation.run(strategy, 3)
    assert np.array_equal(federation.run(strategy, 3), first)
