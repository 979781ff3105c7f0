"""The simulated clock of SD-FEEL."""

from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord
from torch import nn

from hedgerow.clients import LocalTask, sd_feel_client
from hedgerow.sim import InProcessGrid, flower_identity
from hedgerow.strategies import Compressed, SDFeel

_DATA = torch.linspace(-1, 1, 30).reshape(10, 3)
_TASK = LocalTask(nn.Linear(3, 2), _DATA, torch.arange(10) % 2, np.arange(10))


def _seconds(codec: str) -> tuple[float, float]:
    """Return the bits and simulated seconds of two rounds of SD-FEEL; without a codec uncompressed."""
    app: Any = sd_feel_client(lambda context: _TASK)
    strategy: Any = SDFeel(
        num_servers=2, topology="path", clusters=[0, 0, 1, 1], tau1=1, tau2=1, fraction_evaluate=0.0
    )
    wrapped = Compressed(strategy, codec) if codec else strategy
    start = ArrayRecord(nn.Linear(3, 2).state_dict())
    config = {"learning-rate": 0.1, "batch-size": 5, "seed": 0}
    with InProcessGrid(app, 4) as grid, flower_identity(1):
        wrapped.start(grid, start, num_rounds=2, train_config=ConfigRecord(config))
    return strategy.progress().bits, strategy.clock.seconds


def test_compressed_updates_take_less_simulated_time() -> None:
    (bits, seconds), (fewer, less) = _seconds(""), _seconds("topk(1)")
    assert fewer < bits
    assert less < seconds
