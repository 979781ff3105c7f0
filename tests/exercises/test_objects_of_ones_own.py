"""A user's own aggregator, server step and part, in every method that averages."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.docs.pages import blocks
from tests.strategies.averaging import (
    AVERAGING,
    NODES,
    OPTIONS,
    ROUNDS,
    failing_once,
    model,
    play,
    start,
    task,
)
from tests.strategies.hsgd.test_algorithm import ended

from hedgerow.clients import sd_feel_client
from hedgerow.sim import InProcessGrid, flower_identity
from hedgerow.strategies import (
    FedAvg,
    SDFeel,
    SecureSum,
    ServerStep,
)

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
# The page's classes.
PAGES: dict[str, Any] = {}
for block in blocks(PAGE):
    if block.title:
        exec(compile(block.text, block.title, "exec"), PAGES)
Momentum, Cosines, FedAdam = PAGES["Momentum"], PAGES["Cosines"], PAGES["FedAdam"]


# A method's tests share the run that nothing of one's own is in, and so the process.
every_averaging_method = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in AVERAGING]
)


@cache
def undisturbed(name: str) -> np.ndarray:
    return model(play(name)[0])


@cache
def with_momentum(name: str) -> np.ndarray:
    return model(play(name, aggregation=Momentum(0.5))[0])


@every_averaging_method
def test_an_aggregator_with_momentum_is_in_every_method_that_averages(name: str) -> None:
    assert np.isfinite(with_momentum(name)).all()
    assert not np.array_equal(undisturbed(name), with_momentum(name))
    first = [model(play(name, 1, aggregation=one)[0]) for one in (Momentum(0.5), Momentum(0.0), "mean")]
    np.testing.assert_array_equal(first[0], first[1])
    np.testing.assert_array_equal(first[1], first[2])


WEIGHTINGS = [
    *[(name, weighting) for name in ("fedavg", "ef-fedprox") for weighting in ("uniform", "examples")],
    *[
        (name, weighting)
        for name in ("FedMUD", "FedHM")
        for weighting in ("num-examples", "num-batches", "uniform")
    ],
]


@pytest.mark.parametrize(("name", "weighting"), WEIGHTINGS)
def test_an_aggregator_gets_the_weights_of_the_method(name: str, weighting: str) -> None:
    own, plain = (play(name, weighting=weighting, aggregation=one)[0] for one in (Momentum(0.0), "mean"))
    np.testing.assert_array_equal(model(own), model(plain))


@every_averaging_method
def test_its_state_is_in_checkpoints(name: str) -> None:
    make, client = AVERAGING[name]
    half, again = (make(**OPTIONS, aggregation=Momentum(0.5)) for _ in range(2))
    with InProcessGrid(client(task), NODES) as grid, flower_identity(1):
        start(half, grid, 2)
        again.load_state_dict(half.state_dict())
        start(again, grid, ROUNDS)
    np.testing.assert_array_equal(model(again), with_momentum(name))


# FedMUD redraws its factors.
every_method_with_a_server_step = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in AVERAGING if name != "FedMUD"],
)


class Again(ServerStep):
    """The change of the round before, on top of the mean's."""

    def __init__(self) -> None:
        self.changes: list[np.ndarray] = []
        super().__init__()

    def step(self, change: Any, memory: Any) -> Any:
        self.changes.append(change)
        return change + memory.get("last", 0.0), {"last": change}


@every_method_with_a_server_step
def test_a_server_step_is_in_every_method_that_averages(name: str) -> None:
    np.testing.assert_array_equal(model(play(name, 1, server_step=Again())[0]), model(play(name, 1)[0]))
    stepped = model(play(name, server_step=Again())[0])
    assert not np.array_equal(stepped, undisturbed(name))
    # An aggregator's momentum of 1 on a mean of two rounds is the same step.
    two = [play(name, 2, **own)[0] for own in ({"server_step": Again()}, {"aggregation": Momentum(1.0)})]
    np.testing.assert_array_equal(*map(model, two))
    assert np.isfinite(model(play(name, server_step=FedAdam())[0])).all()


@every_method_with_a_server_step
def test_the_memory_of_a_server_step_is_in_checkpoints(name: str) -> None:
    make, client = AVERAGING[name]
    half, again, through = (make(**OPTIONS, server_step=FedAdam()) for _ in range(3))
    with InProcessGrid(client(task), NODES) as grid, flower_identity(1):
        start(half, grid, 2)
        again.load_state_dict(half.state_dict())
        start(again, grid, ROUNDS)
    with InProcessGrid(client(task), NODES) as grid, flower_identity(1):
        start(through, grid, ROUNDS)
    np.testing.assert_array_equal(model(again), model(through))


def test_a_failed_round_leaves_the_memory_of_a_server_step() -> None:
    fails_once = failing_once()
    strategy = fails_once(local_steps=2, **OPTIONS, server_step=FedAdam())
    with InProcessGrid(sd_feel_client(task), NODES) as grid, flower_identity(1):
        start(strategy, grid, ROUNDS)
    assert fails_once.tries == ROUNDS + 1
    np.testing.assert_array_equal(model(strategy), model(play("FedAvg", server_step=FedAdam())[0]))


@pytest.mark.parametrize("name", ["FedAvg", "fedavg"])
def test_a_server_step_acts_on_the_mean_of_a_secure_sum(name: str) -> None:
    step, plain = Again(), Again()
    sums = SecureSum(min_nodes=3, threshold=0.67)
    secure = model(play(name, secure_sum=sums, server_step=step)[0])
    np.testing.assert_allclose(secure, model(play(name, server_step=plain)[0]), atol=1e-4)
    assert len(step.changes) == len(plain.changes) == ROUNDS


@pytest.mark.parametrize("options", [{"aggregation": "median"}, {"compressor": "topk(0.5)"}], ids=str)
def test_a_server_step_acts_on_robust_means_and_on_compressed_changes(options: dict[str, Any]) -> None:
    step = Again()
    stepped = model(play("ef-fedavg", server_step=step, **options)[0])
    first = [model(play("ef-fedavg", 1, **options, **own)[0]) for own in ({}, {"server_step": Again()})]
    np.testing.assert_array_equal(*first)
    assert len(step.changes) == ROUNDS
    assert not np.array_equal(stepped, model(play("ef-fedavg", **options)[0]))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (AVERAGING["FedMUD"][0], "FedMUD: its factors are drawn anew every 1 rounds"),
        (
            partial(SDFeel, num_servers=2, num_clients=6, edge_servers="nodes"),
            "SDFeel: edge servers are nodes",
        ),
        (partial(ended, edges=True, rounds=1), "HSGD: its two means are of parts of a model"),
    ],
)
def test_a_method_without_a_lasting_model_refuses_a_server_step(make: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"server_step must be None with {why}"):
        make(server_step=Again())
    with pytest.raises(ValueError, match="server_step must be None or a ServerStep, got 'adam'"):
        FedAvg(**OPTIONS, server_step="adam")


@every_averaging_method
def test_a_part_that_records_cosines_is_in_every_method_that_averages(name: str) -> None:
    watched, ends = play(name, parts=[Cosines()])
    np.testing.assert_array_equal(undisturbed(name), model(watched))
    for end in ends[1:]:
        cosines = end.train["cosines"]
        assert len(cosines) == end.accepted
        assert max(map(abs, cosines)) <= 1 + 1e-12
        assert sum(cosines) > 0


def test_two_parts_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="parts must have different names"):
        FedAvg(**OPTIONS, parts=[Cosines(), Cosines()])


@pytest.mark.parametrize("edges", [True, False])
def test_they_are_in_hsgd_too(edges: bool) -> None:
    plain, _ = ended(edges=edges, rounds=3)
    moved, _ = ended(edges=edges, rounds=3, aggregation=Momentum(0.5), device_aggregation="mean")
    assert np.isfinite(moved).all()
    assert not np.array_equal(plain, moved)
    for own in (
        {"aggregation": Momentum(0.0), "device_aggregation": "mean"},
        {"device_aggregation": Momentum(0.0)},
    ):
        same, _ = ended(edges=edges, rounds=3, **own)
        np.testing.assert_array_equal(plain, same)
    watched, ends = ended(edges=edges, rounds=3, parts=[Cosines()])
    np.testing.assert_array_equal(plain, watched)
    assert [len(end.train["cosines"]) > 0 for end in ends if end.round] == [True] * 3
