"""Sizes: those that the suite dealt count as they are, and those that nodes claim up to a bound, counted."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies.averaging import AVERAGING, CONFIG, net

from hedgerow.clients import LocalTask
from hedgerow.sim import InProcessGrid, flower_identity
from hedgerow.wire import view

METHODS = ("SD-FEEL", "FedAvg", "fedavg", "FedMUD's FedAvg")


class Devices(InProcessGrid):
    """An engine whose nodes are not known to count what they were dealt."""

    def counts_examples(self) -> bool:
        return False


def trained(
    name: str, sizes: Sequence[int], grid: Any = InProcessGrid, **options: Any
) -> tuple[dict[str, Any], list[Any], Any]:
    make, app = AVERAGING[name]
    if name == "fedavg":  # Whose nodes have equal weights by default.
        options["weighting"] = "examples"
    ends = np.cumsum([0, *sizes])
    data = torch.Generator().manual_seed(1)
    x = torch.randn(int(ends[-1]), 8, generator=data)
    y = torch.randint(0, 3, (int(ends[-1]),), generator=data)

    def task(context: Context) -> LocalTask:
        i = int(context.node_config["partition-id"])
        return LocalTask(net(), x, y, np.arange(ends[i], ends[i + 1]))

    seen: list[Any] = []
    strategy = make(min_available_nodes=4, fraction_evaluate=0.0, on_round_end=[seen.append], **options)
    begin, config = ArrayRecord(net().state_dict()), ConfigRecord(CONFIG)
    with flower_identity(1):
        result = strategy.start(grid(app(task, "loop"), 4), begin, num_rounds=2, train_config=config)
    return {key: view(array) for key, array in result.arrays.items()}, seen, strategy


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", METHODS)
@settings(deadline=None, max_examples=8)
@given(sizes=st.lists(st.integers(1, 200), min_size=4, max_size=4))
def test_sizes_that_a_simulation_counts_are_the_weights(name: str, sizes: list[int]) -> None:
    model, ends, strategy = trained(name, sizes)
    assert same(model, trained(name, sizes, max_weight_ratio=0)[0])
    assert strategy.federation.limits.weights(4).tolist() == sizes
    assert not any("weights-capped" in end.train for end in ends[1:])


UNEVEN = [5, 90, 4, 7]


@pytest.mark.parametrize("name", METHODS)
def test_sizes_that_the_server_dealt_are_the_weights_whoever_reports_them(name: str) -> None:
    exact = trained(name, UNEVEN, max_weight_ratio=0)[0]
    dealt, ends, _ = trained(name, UNEVEN, Devices, dealt_sizes=UNEVEN)
    assert same(dealt, exact)
    assert not any("weights-capped" in end.train for end in ends[1:])


@pytest.mark.parametrize("name", METHODS)
def test_a_cap_on_claims_is_counted_in_each_round_and_logged_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "flwr"):
        capped, ends, strategy = trained(name, UNEVEN, Devices)
    assert not same(capped, trained(name, UNEVEN)[0])
    assert [end.train["weights-capped"] for end in ends[1:]] == [1, 1]
    told = [record for record in caplog.records if "max_weight_ratio" in record.getMessage()]
    assert len(told) == 1
    assert strategy.federation.limits.weight_of(1) == 50
    # A node that claims more than it was dealt makes all sizes claims.
    lying = trained(name, UNEVEN, Devices, dealt_sizes=[5, 5, 4, 7])[0]
    assert same(lying, capped)
