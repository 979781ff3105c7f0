"""SCAFFOLD against the paper as a plain loop, with replies that are lost on the way."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from torch import nn

from hedgerow.clients import LocalTask, scaffold_client, sd_feel_client
from hedgerow.sim import FaultModel, InProcessGrid, flower_identity
from hedgerow.strategies import FedAvg, Part, Scaffold

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


def played(part: Part, rate: float, option: str) -> Any:
    strategy = Scaffold(
        LR, GLOBAL, K, batch_size=6, option=option, min_available_nodes=NODES, fraction_evaluate=0.0,
        min_train_nodes=1, quarantine_after=0, parts=[part],
    )  # fmt: skip
    faults = FaultModel(corrupt="nan", corrupt_rate=rate)
    with InProcessGrid(scaffold_client(task), NODES, faults=faults) as grid, flower_identity(1):
        strategy.start(grid, ArrayRecord(START), num_rounds=ROUNDS, train_config=ConfigRecord({}))
    return strategy


def gradient(y: Mapping[str, torch.Tensor], node: int) -> dict[str, torch.Tensor]:
    part = slice(6 * node, 6 * node + 6)
    outputs = X[part].double() @ y["weight"].T + y["bias"]
    found = torch.autograd.grad(nn.functional.cross_entropy(outputs, Y[part]), list(y.values()))
    return dict(zip(y, found, strict=True))


def plain(rounds: list[list[int]], option: str) -> dict[str, torch.Tensor]:
    """Algorithm 1; a node whose reply is lost has no part in the round."""
    x = {key: value.double() for key, value in START.items()}
    c = {key: torch.zeros_like(value) for key, value in x.items()}
    own = [dict(c) for _ in range(NODES)]
    for nodes in rounds:
        ys, changes = [], []
        for i in nodes:
            y = {key: value.clone().requires_grad_() for key, value in x.items()}
            first = gradient(y, i)
            for _ in range(K):
                g = gradient(y, i)
                with torch.no_grad():
                    for key in y:
                        y[key] -= LR * (g[key] - own[i][key] + c[key])
            after = {key: own[i][key] - c[key] + (x[key] - y[key].detach()) / (K * LR) for key in x}
            after = first if option == "I" else after
            changes.append({key: after[key] - own[i][key] for key in x})
            ys.append({key: value.detach() for key, value in y.items()})
            own[i] = after
        share = len(nodes) / NODES
        x = {key: v + GLOBAL * (sum(y[key] for y in ys) / len(ys) - v) for key, v in x.items()}
        c = {key: v + share * sum(one[key] for one in changes) / len(nodes) for key, v in c.items()}
    return x


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_the_model_is_that_of_the_plain_loop_also_where_replies_are_lost(rate: float, option: str) -> None:
    part = Absorbed()
    strategy = played(part, rate, option)
    lost = NODES * ROUNDS - sum(map(len, part.rounds))
    assert (lost > 4) is (rate > 0)
    found, expected = strategy.current_arrays().to_torch_state_dict(), plain(part.rounds, option)
    for key, value in expected.items():
        torch.testing.assert_close(found[key].double(), value, rtol=0, atol=3e-6)


def skewed(seed: int) -> Any:
    """Return the tasks of nodes that each have one class."""
    stream = torch.Generator().manual_seed(seed)
    x = torch.randn(120, 5, generator=stream)
    y = (x @ torch.randn(5, 3, generator=stream)).argmax(1)
    parts = [np.flatnonzero(y == one).astype(np.int64) for one in range(3)]

    def task(context: Any) -> LocalTask:
        return LocalTask(MODEL, x, y, parts[int(context.node_config["partition-id"])])

    return x, y, task


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_beats_fedavg_on_skewed_data_at_equal_rounds_for_twice_the_traffic(seed: int) -> None:
    x, y, task = skewed(seed)
    common: dict[str, Any] = {"min_available_nodes": 3, "fraction_evaluate": 0.0}
    found = []
    for strategy, app, config in (
        (Scaffold(LR, 1.0, 20, batch_size=10, **common), scaffold_client(task), {}),
        (
            FedAvg(local_steps=20, **common),
            sd_feel_client(task),
            {"learning-rate": LR, "batch-size": 10, "seed": 0},
        ),
    ):
        with InProcessGrid(app, 3) as grid, flower_identity(1):
            strategy.start(grid, ArrayRecord(START), num_rounds=30, train_config=ConfigRecord(config))
        MODEL.load_state_dict(strategy.current_arrays().to_torch_state_dict())
        links = strategy.ledger.by_link().values()
        found.append(
            (float(nn.functional.cross_entropy(MODEL(x), y)), sum(one.nominal_bits for one in links))
        )
    (scaffold, bits), (fedavg, plain_bits) = found
    assert scaffold < 0.9 * fedavg
    assert bits == 2 * plain_bits
