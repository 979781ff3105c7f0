"""Every method that averages, on one small federation: what a test of an extension plays."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord
from torch import nn

from hedgerow.clients import (
    BatchClientApp,
    LocalTask,
    fedmud_client,
    sd_feel_client,
    similarity_free_client,
)
from hedgerow.sim import InProcessGrid, flower_identity
from hedgerow.strategies import (
    EF21P,
    FedAvg,
    FedBAT,
    FedHM,
    FedLMT,
    FedMUD,
    FedPara,
    Feel,
    Fixed,
    HierFAvg,
    LoRA,
    Method,
    RoundContext,
    RoundEnd,
    RoundFailedError,
    SDFeel,
    SimilarityFree,
    Steps,
)

NODES, ROUNDS = 6, 3
STREAM = torch.Generator().manual_seed(0)
X, Y = torch.randn(120, 8, generator=STREAM), torch.randint(0, 3, (120,), generator=STREAM)
PARTS = np.split(np.arange(120), [10, 30, 60, 80, 110])


def net() -> nn.Module:
    # A node that draws from the global generator is no longer called with others.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))


def task(context: Any) -> LocalTask:
    return LocalTask(net(), X, Y, PARTS[int(context.node_config["partition-id"])])


OPTIONS: dict[str, Any] = {"min_available_nodes": NODES, "fraction_evaluate": 0.0}
STEPS: dict[str, Any] = {
    "schedule": Fixed(0.1, 4),
}
FACTORS = {"ratio": 0.7, "learning_rate": 0.1, "local_epochs": 1, "init_a": 0.1}
Made = tuple[Callable[..., Method[Any]], Callable[..., BatchClientApp]]
AVERAGING: dict[str, Made] = {
    "SD-FEEL": (partial(SDFeel, num_servers=2, tau1=2), sd_feel_client),
    "HierFAVG": (partial(HierFAvg, num_servers=2, tau1=2), sd_feel_client),
    "FEEL": (partial(Feel, clients_per_round=3, tau1=2), sd_feel_client),
    "FedAvg": (partial(FedAvg, local_steps=2), sd_feel_client),
    **{
        name: (partial(SimilarityFree.named, name, **STEPS), similarity_free_client)
        for name in ("fedavg", "fedprox", "ef-fedavg", "ef-fedprox")
    },
    "FedMUD": (partial(FedMUD.for_model, net(), variant="mud+aad", **FACTORS), fedmud_client),
    "FedMUD's FedAvg": (partial(FedMUD.for_model, net(), variant="dense", local_epochs=1), fedmud_client),
    "FedLMT": (partial(FedLMT.for_model, net(), **FACTORS), fedmud_client),
    "LoRA": (partial(LoRA.for_model, net(), **FACTORS), fedmud_client),
    "FedPara": (partial(FedPara.for_model, net(), **FACTORS), fedmud_client),
    "FedHM": (partial(FedHM.for_model, net(), ratio=0.7, local_epochs=1), fedmud_client),
    "EF21-P": (partial(EF21P.for_model, net(), ratio=0.7, local_epochs=1), fedmud_client),
    "FedBAT": (partial(FedBAT.for_model, net(), ratio=0.6, local_epochs=1), fedmud_client),
}
CONFIG = {"learning-rate": 0.1, "batch-size": 5, "seed": 0}


def play(name: str, rounds: int = ROUNDS, **options: Any) -> tuple[Method[Any], list[RoundEnd]]:
    """Return a method after a run, and its rounds."""
    make, client = AVERAGING[name]
    ends: list[RoundEnd] = []
    strategy = make(**OPTIONS, on_round_end=[ends.append], **options)
    with InProcessGrid(client(task), NODES) as grid, flower_identity(1):
        start(strategy, grid, rounds)
    return strategy, ends


def start(strategy: Method[Any], grid: InProcessGrid, rounds: int) -> None:
    arrays = ArrayRecord(net().state_dict())
    strategy.start(grid, arrays, num_rounds=rounds, train_config=ConfigRecord(CONFIG))


def failing_once() -> type[FedAvg]:
    """Return a FedAvg whose second attempt of a round fails at its end; ``tries`` counts attempts."""

    class FailsOnce(FedAvg):
        tries = 0

        def round(self, state: Any, run: RoundContext) -> Steps[Any]:
            after = yield from super().round(state, run)
            FailsOnce.tries += 1
            if FailsOnce.tries == 2:
                raise RoundFailedError
            return after

    return FailsOnce


def model(strategy: Method[Any]) -> np.ndarray:
    arrays = strategy.current_arrays()
    assert arrays is not None
    return np.concatenate([array.numpy().ravel() for array in arrays.values()])
