"""What a node takes of its neighbours' models: each rule alone, and a run in which a neighbour lies."""

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord

from hedgerow.clients import LinearRegression, ceps_client
from hedgerow.clients.ceps.algorithm import combined, neighbour_mean, neighbourhood_of
from hedgerow.sim import InProcessGrid
from hedgerow.strategies import CEPS, Monitor
from hedgerow.wire import Aggregation, parse_aggregation

N, M, LIAR = 20, 8, 5
OWN = np.linspace(-1.0, 1.0, N)
RECEIVED = {j: OWN + 0.1 * np.random.default_rng(j).normal(size=N) for j in (0, 2, 3, 4)}


def test_rules_that_leave_nothing_out_are_the_mean_and_who_heard_nobody_keeps_its_model() -> None:
    mean = neighbour_mean(1, OWN, RECEIVED)
    assert combined(Aggregation("mean"), 1, OWN, RECEIVED).tobytes() == mean.tobytes()
    for rule in (Aggregation("clipped", (1e9,)), Aggregation("trimmed-mean", (0.0,))):
        assert combined(rule, 1, OWN, RECEIVED) == pytest.approx(mean, rel=1e-12)
    for text in ("mean", "median", "trimmed-mean(0.2)", "clipped(0.2)"):
        assert (combined(parse_aggregation(text), 1, OWN, {}) == OWN).all()


def test_a_liar_moves_a_clipped_mean_by_twice_tau_over_the_models_at_most() -> None:
    tau = 0.3
    rule = Aggregation("clipped", (tau,))
    lied = {**RECEIVED, 3: 1e6 * OWN}
    moved = np.linalg.norm(combined(rule, 1, OWN, lied) - combined(rule, 1, OWN, RECEIVED))
    assert 0 < moved <= 2 * tau / 5 + 1e-12


@pytest.mark.parametrize("rule", [Aggregation("median"), Aggregation("trimmed-mean", (0.2,))])
def test_what_a_liar_among_five_sends_leaves_each_entry_between_honest_ones(rule: Aggregation) -> None:
    honest = np.stack([OWN, *(RECEIVED[j] for j in (0, 2, 4))])
    for lie in (1e6, -1e6):
        found = combined(rule, 1, OWN, {**RECEIVED, 3: np.full(N, lie)})
        assert (honest.min(axis=0) <= found).all()
        assert (found <= honest.max(axis=0)).all()


@pytest.mark.parametrize(
    "config",
    [
        {"aggregation": "krum"},
        {"aggregation": "clipped"},
        {"aggregation": "clipped", "aggregation-number": 0.0},
        {"aggregation": "trimmed-mean", "aggregation-number": 0.5},
        {"aggregation": "trimmed-mean", "aggregation-number": float("nan")},
    ],
)
def test_a_message_of_no_such_rule_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="aggregation"):
        neighbourhood_of(ConfigRecord(config))


def distance(rule: str, lies: bool) -> float:
    """Return how far the honest nodes' models end from the truth, relative to its norm."""
    truth = np.zeros(N)
    truth[[2, 7, 11]] = [1.0, -1.0, 1.0]
    problems = []
    for node in range(M):
        rng = np.random.default_rng([3, node])
        A = rng.standard_normal((40, N))
        problems.append(LinearRegression(A, A @ ((-20.0 if lies and node == LIAR else 1.0) * truth)))
    client = ceps_client(lambda context: problems[int(context.node_config["partition-id"])])
    monitor = Monitor(3, measures_loss=False)
    strategy = CEPS(
        dim=N, sparsity=3, codec="dense64", topology="complete", participation=1.0, interval=1,
        num_iterations=15, sigma_rule="fixed_c", c=1.5, min_available_nodes=M, monitor=monitor,
        aggregation=rule,
    )  # fmt: skip
    with InProcessGrid(client, M) as grid:
        strategy.start(grid, ArrayRecord(), num_rounds=15, timeout=60.0)
    assert monitor.models is not None
    off = np.linalg.norm(np.delete(monitor.models, LIAR, axis=0) - truth, axis=1)
    return float(off.max() / np.linalg.norm(truth))


def test_a_neighbour_that_lies_ruins_the_mean_and_not_a_rule() -> None:
    assert distance("mean", lies=False) < 0.3
    assert distance("mean", lies=True) > 0.8
    for rule in ("median", "trimmed-mean(0.2)", "clipped(0.3)"):
        assert distance(rule, lies=True) < 0.4
