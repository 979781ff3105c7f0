"""Methods whose means can be secure sums, with their real clients, on a grid that loses."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from tests.strategies.averaging import AVERAGING, CONFIG, NODES, OPTIONS, net, task
from tests.strategies.summing import NOTHING, Loses, LossyGrid

from hedgerow.sim import flower_identity
from hedgerow.strategies import FederatedStrategy, RoundEnd
from hedgerow.wire import view

__all__ = ["METHODS", "N", "distance", "grid_of", "run", "task"]

N = NODES
Make = Callable[..., FederatedStrategy]


def method(name: str, **options: Any) -> tuple[Make, Callable[..., Any]]:
    """Return a method that averages, with these options, and its client."""
    make, client = AVERAGING[name]
    return partial(make, **OPTIONS, **options), client


METHODS: dict[str, tuple[Make, Callable[..., Any]]] = {
    "sd-feel": method("SD-FEEL"),
    "fedavg": method("fedavg"),
    "fedavg by examples": method("fedavg", weighting="examples"),
    "fedprox": method("fedprox"),
    "fedpaq": method("ef-fedavg", compressor="randk(0.3)", error_feedback=False),
    "fedmud": method("FedMUD", variant="mud", sync="dense"),
    "fedmud+bkd": method(
        "FedMUD", variant="mud+bkd", sync="dense", reset_interval=2, weighting="num-batches"
    ),
    "fedmud+aad": method("FedMUD", sync="dense", weighting="uniform"),
    "fedmud dense": method("FedMUD's FedAvg", sync="dense"),
    "fedlmt": method("FedLMT", sync="dense"),
    "fedpara": method("FedPara", sync="dense"),
}


def grid_of(name: str, loses: Loses = NOTHING, **options: Any) -> LossyGrid:
    return LossyGrid(N, loses, client=METHODS[name][1](task), **options)


def run(
    strategy: FederatedStrategy, grid: LossyGrid, rounds: int = 3
) -> tuple[dict[str, np.ndarray], list[RoundEnd]]:
    ends: list[RoundEnd] = []
    strategy.on_round_end = [ends.append]
    with flower_identity(grid):
        result = strategy.start(grid, ArrayRecord(net().state_dict()), rounds, 60.0, ConfigRecord(CONFIG))
    return {key: view(array) for key, array in result.arrays.items()}, [end for end in ends if end.round]


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(a[key] - b[key]).max()) for key in b)
