"""SCAFFOLD against the paper as a plain loop, with replies that are lost on the way."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from torch import nn

from hedgerow.clients import LocalTask
from hedgerow.clients.scaffold import scaffold_client
from hedgerow.sim import FaultModel, InProcessGrid, flower_identity
from hedgerow.strategies import Part
from hedgerow.strategies.scaffold import Scaffold

NODES, ROUNDS, K, LR, GLOBAL = 4, 6, 3, 0.2, 0.7
torch.manual_seed(0)
X, Y = torch.randn(24, 5), torch.arange(24) % 3
MODEL = nn.Linear(5, 3)
START = {key: value.clone() for key, value in MODEL.state_dict().items()}


class Absorbed(Part):
    name = "absorbed"

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.rounds: list[list[int]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self.rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rounds = [list(nodes) for nodes in state["rounds"]]

    def ended(self, run: Any) -> None:
        self.rounds.append(list(run.absorbed))


def task(context: Any) -> LocalTask:
    node = int(context.node_config["partition-id"])
    return LocalTask(MODEL, X, Y, np.arange(6 * node, 6 * node + 6))


def played(part: Part, rate: float) -> Any:
    strategy = Scaffold(
        LR, GLOBAL, K, batch_size=6, min_available_nodes=NODES, fraction_evaluate=0.0, min_train_nodes=1,
        quarantine_after=0, parts=[part],
    )  # fmt: skip
    faults = FaultModel(corrupt="nan", corrupt_rate=rate)
    with InProcessGrid(scaffold_client(task), NODES, faults=faults) as grid, flower_identity(1):
        strategy.start(grid, ArrayRecord(START), num_rounds=ROUNDS, train_config=ConfigRecord({}))
    return strategy


def plain(rounds: list[list[int]]) -> dict[str, torch.Tensor]:
    """Algorithm 1, option II; a node whose reply is lost has no part in the round."""
    x = {key: value.double() for key, value in START.items()}
    c = {key: torch.zeros_like(value) for key, value in x.items()}
    own = [dict(c) for _ in range(NODES)]
    for nodes in rounds:
        ys, changes = [], []
        for i in nodes:
            y = {key: value.clone().requires_grad_() for key, value in x.items()}
            for _ in range(K):
                part = slice(6 * i, 6 * i + 6)
                outputs = X[part].double() @ y["weight"].T + y["bias"]
                gradients = torch.autograd.grad(
                    nn.functional.cross_entropy(outputs, Y[part]), list(y.values())
                )
                with torch.no_grad():
                    for key, gradient in zip(y, gradients, strict=True):
                        y[key] -= LR * (gradient - own[i][key] + c[key])
            after = {key: own[i][key] - c[key] + (x[key] - y[key].detach()) / (K * LR) for key in x}
            changes.append({key: after[key] - own[i][key] for key in x})
            ys.append({key: value.detach() for key, value in y.items()})
            own[i] = after
        share = len(nodes) / NODES
        x = {key: v + GLOBAL * (sum(y[key] for y in ys) / len(ys) - v) for key, v in x.items()}
        c = {key: v + share * sum(one[key] for one in changes) / len(nodes) for key, v in c.items()}
    return x


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_the_model_is_that_of_the_plain_loop_also_where_replies_are_lost(rate: float) -> None:
    part = Absorbed()
    strategy = played(part, rate)
    lost = NODES * ROUNDS - sum(map(len, part.rounds))
    assert (lost > 4) is (rate > 0)
    found, expected = strategy.current_arrays().to_torch_state_dict(), plain(part.rounds)
    for key, value in expected.items():
        torch.testing.assert_close(found[key].double(), value, rtol=0, atol=3e-6)
