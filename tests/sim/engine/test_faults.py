"""Faults are drawn from the run's seed, and say what is wrong when they cannot be read."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from hedgerow.sim import Delay, FaultModel
from hedgerow.sim.engine.faults import CORRUPTIONS, corrupted
from hedgerow.sim.engine.grid import message_key

MODEL = FaultModel(dropout=0.3, delay=Delay("uniform", (1.0, 5.0)), corrupt="nan", corrupt_rate=0.2)


def test_fates_differ_between_seeds_rounds_nodes_and_messages() -> None:
    delays = {
        MODEL.draw(message_key(seed, round, partition_id, kind, count), partition_id, 1).delay
        for seed in range(2)
        for round in range(2)
        for partition_id in range(2)
        for kind in ("train", "evaluate")
        for count in range(2)
    }
    assert len(delays) == 32


def test_the_rates_are_met() -> None:
    fates = [
        MODEL.draw(message_key(0, round, partition_id, "train"), partition_id, 1)
        for partition_id in range(50)
        for round in range(40)
    ]
    # Two thousand draws: five standard deviations are 0.051 and 0.045.
    assert np.mean([fate.dropped for fate in fates]) == pytest.approx(0.3, abs=0.051)
    assert np.mean([fate.corrupt == "nan" for fate in fates]) == pytest.approx(0.2, abs=0.045)
    assert np.mean([fate.delay for fate in fates]) == pytest.approx(3.0, abs=0.13)


def test_one_rate_does_not_move_another_faults_luck() -> None:
    other = FaultModel(dropout=0.9, delay=MODEL.delay, corrupt="nan", corrupt_rate=0.2)
    for number in range(1, 30):
        fate, moved = MODEL.draw(number, 3, 1), other.draw(number, 3, 1)
        assert (fate.delay, fate.corrupt) == (moved.delay, moved.corrupt)


def test_a_crash_is_for_good() -> None:
    model = FaultModel(crash_at={2: 3})
    assert [model.draw(0, 2, number).crashed for number in range(1, 6)] == [False, False, True, True, True]
    assert not model.draw(0, 1, 99).crashed


@pytest.mark.parametrize(
    ("text", "mean"),
    [(2.5, 2.5), ("2.5", 2.5), ("uniform:1,3", 2.0), ("exponential:4", 4.0), ("lognormal:2,0.5", 2.266)],
)
def test_delays_have_the_mean_of_their_distribution(text: str | float, mean: float) -> None:
    rng = np.random.default_rng(0)
    draws = [Delay.parse(text).draw(rng) for _ in range(4000)]
    assert min(draws) >= 0
    assert np.mean(draws) == pytest.approx(mean, rel=0.08)


def test_run_config_keys_are_read() -> None:
    model = FaultModel.from_run_config(
        {
            "lr": 0.1,
            "fault-dropout": 0.1,
            "fault-delay": "uniform:1,5",
            "fault-stragglers": "0, 3",
            "fault-slowdown": 10.0,
            "fault-crash": "3:5,4:2",
            "fault-corrupt": "nan",
            "fault-corrupt-rate": 0.2,
        }
    )
    assert model == FaultModel(
        dropout=0.1,
        delay=Delay("uniform", (1.0, 5.0)),
        stragglers=frozenset({0, 3}),
        slowdown=10.0,
        crash_at={3: 5, 4: 2},
        corrupt="nan",
        corrupt_rate=0.2,
    )


def test_empty_texts_mean_no_faults() -> None:
    empty = {"fault-delay": "", "fault-stragglers": "", "fault-crash": "", "fault-corrupt": ""}
    assert FaultModel.from_run_config(empty) == FaultModel()
    assert FaultModel.from_run_config({"lr": 0.1}) is None


def reply() -> RecordDict:
    return RecordDict(
        {
            "config": ConfigRecord({"a": 1}),
            "arrays": ArrayRecord([np.ones((2, 3), np.float32), np.ones(4)]),
            "metrics": MetricRecord({"num-examples": 5}),
        }
    )


def test_each_corruption_is_what_it_says() -> None:
    nan, shape, keys = (corrupted(reply(), kind)["arrays"] for kind in CORRUPTIONS)
    assert np.isnan(nan["0"].numpy()).all()
    assert nan["0"].numpy().dtype == np.float32
    assert shape["0"].numpy().shape == (7,)
    assert sorted(keys) == ["1", "unknown-0"]


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_a_corrupted_reply_leaves_the_original_alone(kind: str) -> None:
    original = reply()
    assert corrupted(original, kind) != original
    assert original == reply()
