"""Methods whose means can be secure sums, with their real clients on one small task, on a grid that loses."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from tests.strategies.summing import NOTHING, Loses, LossyGrid
from torch import nn

from hedgerow.clients import LocalTask, fedmud_client, sd_feel_client, similarity_free_client
from hedgerow.sim import flower_identity
from hedgerow.strategies import (
    FederatedStrategy,
    FedLMT,
    FedMUD,
    FedPara,
    Fixed,
    RoundEnd,
    SDFeel,
    SimilarityFree,
)
from hedgerow.wire import to_record, view

N = 6
CONFIG = {"learning-rate": 0.1, "batch-size": 8, "seed": 0}


@lru_cache(maxsize=1)
def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


@lru_cache(maxsize=1)
def data() -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((40 * N, 8))
    y = np.argmax(x @ rng.standard_normal((8, 3)), axis=1)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def task(context: Context) -> LocalTask:
    at = int(context.node_config["partition-id"])
    return LocalTask(model(), *data(), np.arange(40 * at, 40 * at + 16 + 4 * at))


def similarity_free(**options: Any) -> SimilarityFree:
    settings = {"schedule": Fixed(c=0.2, num_rounds=1), "local_iters": 2, "batch_size": 8}
    return SimilarityFree(**{**settings, "min_available_nodes": N, "fraction_evaluate": 0.0, **options})


def fedmud(cls: Any = FedMUD, **options: Any) -> Any:
    settings = {"learning_rate": 0.1, "batch_size": 8, "local_epochs": 1, "ratio": 0.6, "init_a": 0.5}
    return cls.for_model(
        model(), **{**settings, "min_available_nodes": N, "fraction_evaluate": 0.0, **options}
    )


def sd_feel(**options: Any) -> SDFeel:
    settings = {"num_servers": 2, "tau1": 2, "tau2": 1, "num_clients": N, "min_available_nodes": N}
    return SDFeel(**{**settings, "fraction_evaluate": 0.0, **options})


Make = Callable[..., FederatedStrategy]
# By name: the strategy, its client, and in how many sums its nodes are.
METHODS: dict[str, tuple[Make, Callable[..., Any]]] = {
    "sd-feel": (sd_feel, sd_feel_client),
    "fedavg": (similarity_free, similarity_free_client),
    "fedavg by examples": (
        lambda **more: similarity_free(weighting="examples", **more),
        similarity_free_client,
    ),
    "fedprox": (lambda **more: similarity_free(operator="prox", **more), similarity_free_client),
    "ef-fedavg": (lambda **more: similarity_free(compressor="randk(0.3)", **more), similarity_free_client),
    "fedmud": (lambda **more: fedmud(variant="mud", **more), fedmud_client),
    "fedmud+bkd": (
        lambda **more: fedmud(variant="mud+bkd", reset_interval=2, weighting="num-batches", **more),
        fedmud_client,
    ),
    "fedmud+aad": (lambda **more: fedmud(variant="mud+aad", weighting="uniform", **more), fedmud_client),
    "fedmud dense": (lambda **more: fedmud(variant="dense", **more), fedmud_client),
    "fedmud, base each time": (lambda **more: fedmud(variant="mud+aad", sync="dense", **more), fedmud_client),
    "fedlmt": (lambda **more: fedmud(FedLMT, **more), fedmud_client),
    "fedpara": (lambda **more: fedmud(FedPara, **more), fedmud_client),
}


def grid_of(name: str, loses: Loses = NOTHING, **options: Any) -> LossyGrid:
    return LossyGrid(N, loses, client=METHODS[name][1](task), **options)


def start() -> ArrayRecord:
    return to_record({key: value.clone() for key, value in model().state_dict().items()})


def run(
    strategy: FederatedStrategy, grid: LossyGrid, rounds: int = 3
) -> tuple[dict[str, np.ndarray], list[RoundEnd]]:
    ends: list[RoundEnd] = []
    strategy.on_round_end = [ends.append]
    with flower_identity(grid):
        result = strategy.start(grid, start(), rounds, 60.0, ConfigRecord({**CONFIG}))
    return {key: view(array) for key, array in result.arrays.items()}, [end for end in ends if end.round]


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(a[key] - b[key]).max()) for key in b)
