"""Layers that stay at their nodes: trained there, averaged nowhere, and in no message."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from tests.strategies.averaging import (
    AVERAGING,
    CONFIG,
    NODES,
    OPTIONS,
    PARTS,
    ROUNDS,
    X,
    Y,
    model,
    net,
    play,
    task,
)
from tests.strategies.recording_grid import RecordingGrid
from torch.nn import functional

from hedgerow.clients import sd_feel_client
from hedgerow.sim import InProcessGrid, flower_identity, load_app, plan_run, read_rounds, run_app
from hedgerow.strategies import FedAvg
from hedgerow.strategies.node_metrics import NodeEvaluation
from hedgerow.tasks import federated
from hedgerow.wire import to_state_dict

HEAD = "4.*"
every_method = pytest.mark.parametrize("name", AVERAGING)


def fedper(rounds: int, lr: float = 0.1, steps: int = 2) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """FedPer as a plain loop, with the whole of a node's samples in each step: the body, and the heads."""
    body = {key: value for key, value in net().state_dict().items() if not key.startswith("4.")}
    head = {key: value for key, value in net().state_dict().items() if key.startswith("4.")}
    heads = [head] * NODES
    for _ in range(rounds):
        bodies = []
        for node, part in enumerate(PARTS):
            own = net()
            own.load_state_dict({**body, **heads[node]})
            for _ in range(steps):
                own.zero_grad()
                functional.cross_entropy(own(X[part]), Y[part]).backward()
                with torch.no_grad():
                    for parameter in own.parameters():
                        parameter.sub_(parameter.grad, alpha=lr)
            after = {key: value.clone() for key, value in own.state_dict().items()}
            heads[node] = {key: after[key] for key in head}
            bodies.append({key: after[key] for key in body})
        shares = torch.tensor([len(part) / len(Y) for part in PARTS])
        body = {key: sum(s * one[key] for s, one in zip(shares, bodies, strict=True)) for key in body}
    return body, heads


def run(grid: InProcessGrid, strategy: FedAvg, rounds: int = ROUNDS) -> FedAvg:
    config = ConfigRecord({**CONFIG, "batch-size": 100})
    with flower_identity(1):
        strategy.start(grid, ArrayRecord(net().state_dict()), num_rounds=rounds, train_config=config)
    return strategy


@pytest.mark.parametrize("grid_class", [InProcessGrid, RecordingGrid])
def test_it_is_fedper_as_a_plain_loop(grid_class: Any) -> None:
    strategy = FedAvg(local_steps=2, local_layers=HEAD, **OPTIONS)
    with grid_class(sd_feel_client(task), NODES) as grid:
        run(grid, strategy)
        body, heads = fedper(ROUNDS)
        found = to_state_dict(strategy.current_arrays())
        for key, value in body.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6)
        for key, value in net().state_dict().items():
            if key.startswith("4."):  # The server never had another.
                torch.testing.assert_close(found[key], value, rtol=0, atol=0)
        with flower_identity(1):
            metrics = NodeEvaluation(grid, strategy)(found)
        if isinstance(grid, RecordingGrid):
            passed = [content for _, _, content in grid.sent + grid.replies]
            assert {key for one in passed for record in one.array_records.values() for key in record} == set(
                body
            )
    own = []
    for head, part in zip(heads, PARTS, strict=True):
        node = net()
        node.load_state_dict({**body, **head})
        own.append(float((node(X[part]).argmax(1) == Y[part]).float().mean()))
    np.testing.assert_allclose(metrics["node-accuracy"], own, atol=1e-6)
    assert metrics["worst-tenth-accuracy"] == pytest.approx(min(own))
    assert metrics["accuracy-spread"] == pytest.approx(np.std(own))


def test_nodes_with_layers_of_their_own_evaluate_on_their_own_classes() -> None:
    seven, three = (X[:7], Y[:7]), (X[:3], Y[:3])

    def dealt(context: Any) -> Any:
        return replace(task(context), test=seven, personal_test=lambda: three)

    for layers, count in ((HEAD, 3), ("", 7)):
        strategy = FedAvg(local_steps=2, local_layers=layers, **OPTIONS)
        with InProcessGrid(sd_feel_client(dealt), NODES) as grid:
            run(grid, strategy)
            with flower_identity(1):
                metrics = NodeEvaluation(grid, strategy)(to_state_dict(strategy.current_arrays()))
        assert metrics["node-examples"] == [count] * NODES
        assert metrics["held-out"] == 1.0


def test_the_record_of_an_app_has_the_accuracy_on_the_nodes_own_classes(tmp_path: Path) -> None:
    config = (
        "method=fedavg num-clients=10 tau1=10 tau2=1 iterations=40 partition=ring(2) model=logistic "
        f"evaluate-every=2 train-loss-samples=1 output-dir={tmp_path}"
    )
    found = []
    for layers in ([], ["local-layers=*weight"]):
        loaded = load_app("sd-feel")
        run_app(loaded, plan_run(loaded.spec, [config, *layers]))
        (folder,) = set(tmp_path.iterdir()) - {one for one, _ in found}
        found.append((folder, read_rounds(folder)[-1]["central"]))
    (_, plain), (_, personal) = found
    data = federated("mnist-5k", "ring(2)", 10, 0)
    sizes = [len(data.personal_test_share(i)[1]) for i in range(10)]
    assert personal["node-examples"] == sizes
    # Each node has two classes of ten, and its weights are for these.
    assert personal["accuracy"] > 0.9 > plain["accuracy"]
    weighted = np.average(personal["node-accuracy"], weights=sizes)
    assert personal["accuracy"] == pytest.approx(weighted)


@every_method
def test_it_is_in_every_method_that_averages(name: str) -> None:
    strategy, ends = play(name, local_layers=HEAD)
    plain, plain_ends = play(name)
    start = np.concatenate([value.numpy().ravel() for value in net().state_dict().values()])
    head = sum(value.numel() for key, value in net().state_dict().items() if key.startswith("4."))
    np.testing.assert_array_equal(model(strategy)[-head:], start[-head:])
    assert np.isfinite(model(strategy)).all()
    assert not np.array_equal(model(strategy)[:-head], model(plain)[:-head])
    # Four bytes a number fewer, each way, and the key of the patterns.
    assert ends[-1].payload_bytes < plain_ends[-1].payload_bytes
    again, _ = play(name, local_layers=HEAD)
    np.testing.assert_array_equal(model(strategy), model(again))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: play("FedAvg", local_layers="x*"), "matches none of 0.weight, 0.bias"),
        (lambda: play("FedAvg", local_layers="*"), "matches all of 0.weight, 0.bias"),
        (lambda: FedAvg(local_layers=HEAD, secure_sum=True, **OPTIONS), "node state if secure_sum is set"),
        (lambda: FedAvg(local_layers=3, **OPTIONS), "local_layers must be a text, got 3"),  # type: ignore[arg-type]
    ],
)
def test_what_no_node_could_keep_is_refused(make: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()
