"""FedLMT, FedPara and FedHM: factors of the weights themselves, and nodes that keep nothing."""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies.linear_federation import (
    COMPRESSED,
    E_UNC,
    MODEL,
    LinearFederation,
    initial,
    run,
    same,
)

from hedgerow.strategies import FedHM, FedLMT, FedPara
from hedgerow.strategies.fedmud import DOWN, SYNCS, UP, CompressedLayers
from hedgerow.strategies.fedmud.factored import SingularValues, truncated
from hedgerow.wire import Factorisation, LayerShape, to_record, to_state_dict

TRAINING: dict[str, Any] = {"learning_rate": 0.1, "min_available_nodes": 5, "fraction_evaluate": 0.0}
BASELINES = [FedLMT, FedPara, FedHM]


def baseline(kind: Any, **parameters: Any) -> Any:
    width = {} if kind is FedHM else {"init_a": 0.1}
    return kind(**{**MODEL, "ratio": 0.3, "budget": "layer", **width, **TRAINING, **parameters})


@pytest.mark.parametrize("kind", BASELINES)
def test_nodes_are_sent_factors_alone_and_keep_nothing(kind: Any) -> None:
    federation = LinearFederation()
    strategy = baseline(kind, num_clients_per_round=2)
    run(strategy, federation, 4)
    for _, _, message_type, content in federation.seen:
        assert message_type == "train"
        assert set(content) == {"arrays", "factors", "config"}
        assert {key: array.shape for key, array in content["factors"].items()} == strategy.plan.shapes
        assert not content["config"]["keep-base"]


@pytest.mark.parametrize("kind", BASELINES)
def test_the_way_of_sending_makes_no_difference(kind: Any) -> None:
    runs = []
    for sync in SYNCS:
        strategy: CompressedLayers = baseline(kind, sync=sync, num_clients_per_round=2)
        runs.append((run(strategy, LinearFederation(), 3)[0], strategy.ledger.by_link(), strategy.traffic()))
    final, links, traffic = runs[0]
    assert all(same(final, other[0]) and other[1] == links and other[2] == traffic for other in runs)
    assert len(set(traffic.values())) == 1


@pytest.mark.parametrize("kind", BASELINES)
def test_factors_and_the_rest_are_counted_both_ways(kind: Any) -> None:
    strategy = baseline(kind)
    run(strategy, LinearFederation(), 3)
    nominal = 3 * 5 * 32 * (strategy.plan.count + E_UNC)
    assert strategy.ledger.total(DOWN).nominal_bits == strategy.ledger.total(UP).nominal_bits == nominal
    assert strategy.ledger.total(DOWN).payload_bytes == strategy.ledger.total(UP).payload_bytes


@pytest.mark.parametrize("kind", [FedLMT, FedPara])
def test_the_run_starts_from_random_factors_and_says_so_before_the_first_round(kind: Any) -> None:
    strategy = baseline(kind, seed=4)
    evaluated: list[dict[str, Any]] = []
    from hedgerow.sim import flower_identity

    with flower_identity(1):
        strategy.start(
            LinearFederation().grid(),
            initial(),
            num_rounds=0,
            evaluate_fn=lambda r, arrays: evaluated.append({k: a.numpy() for k, a in arrays.items()}),
        )
    plan = strategy.plan
    expected = plan.merge({}, plan.init(4, 0), {})
    assert same({key: evaluated[0][key] for key in COMPRESSED}, {k: w.numpy() for k, w in expected.items()})
    assert np.array_equal(evaluated[0]["first.weight"], initial()["first.weight"].numpy())


def test_fedlmt_tells_the_bias_of_its_mean() -> None:
    strategy = baseline(FedLMT, measure_bias=True, init_a=0.5, local_epochs=20)
    _, ends = run(strategy, LinearFederation(), 2)
    assert all(end.train["aggregation-bias"] > 1e-4 for end in ends[1:])


# FedHM


def test_golden_truncation_of_a_diagonal() -> None:
    matrix = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    u, v = truncated(matrix, 2)
    assert torch.linalg.norm(matrix - u @ v).item() == pytest.approx(1.0, abs=1e-6)


def test_golden_truncation_error_is_told() -> None:
    plan = Factorisation.plan(
        [LayerShape("w", (3, 3))],
        variant="lmt",
        num_parameters=9,
        ratio=1.0,
        budget="layer",
        skip_front=0,
        skip_back=0,
    )
    assert plan.layers[0].rank == 2
    method = SingularValues(plan)
    method.begin({"w": torch.zeros(3, 3)})
    metrics = method.move(1, np.diag([3.0, 2.0, 1.0]).ravel())
    assert metrics["truncation-error"] == pytest.approx(1.0, abs=1e-6)
    assert torch.equal(method.weights()["w"], torch.diag(torch.tensor([3.0, 2.0, 1.0])))


@settings(deadline=None, max_examples=30)
@given(m=st.integers(1, 9), n=st.integers(1, 9), rank=st.integers(1, 9), seed=st.integers(0, 99))
def test_truncation_leaves_the_smallest_singular_values(m: int, n: int, rank: int, seed: int) -> None:
    matrix = torch.randn(m, n, generator=torch.Generator().manual_seed(seed))
    u, v = truncated(matrix, rank)
    assert (u.shape, v.shape) == ((m, rank), (rank, n))
    left = np.linalg.norm(np.linalg.svd(matrix.double().numpy(), compute_uv=False)[rank:])
    assert torch.linalg.norm(matrix - u @ v).item() == pytest.approx(left, abs=1e-5)
    np.testing.assert_allclose((u**2).sum(0), (v**2).sum(1), atol=1e-5)  # split evenly


def test_fedhm_averages_what_the_factors_give_exactly() -> None:
    replies: dict[int, RecordDict] = {}

    def keep(client: int, server_round: int, reply: RecordDict) -> RecordDict:
        replies[client] = reply
        return reply

    strategy = baseline(FedHM)
    final, _ = run(strategy, LinearFederation(sabotage=keep), 1)
    for key in COMPRESSED:
        models = [
            replies[i]["arrays"][f"{key}:U"].numpy().astype(np.float64)
            @ replies[i]["arrays"][f"{key}:V"].numpy()
            for i in range(5)
        ]
        np.testing.assert_allclose(final[key], np.average(models, axis=0, weights=range(6, 11)), atol=1e-6)


def test_fedhm_at_full_rank_is_fedavg_where_nobody_trains() -> None:
    strategy = baseline(FedHM, ratio=1.0, learning_rate=1e-30)
    for layer in strategy.plan.layers:
        assert layer.rank < min(layer.m, layer.n)  # what a ratio of 1 leaves out
    state = to_state_dict(initial())
    for key in COMPRESSED:
        left, right = state[key][:, :1], state[key][:1, :]
        state[key] = left @ right  # rank one: nothing is cut off
    final, ends = run(strategy, LinearFederation(), 3, start=to_record(state))
    for key in COMPRESSED:
        np.testing.assert_allclose(final[key], state[key], atol=1e-6)
    assert ends[-1].train["truncation-error"] < 1e-6


@pytest.mark.parametrize("view", ["buffer", "convolutions"])
def test_a_convolution_is_truncated_as_the_matrix_of_its_view(view: str) -> None:
    plan = Factorisation.plan(
        [LayerShape("w", (4, 3, 2, 2))],
        variant="lmt",
        num_parameters=48,
        ratio=0.9,
        budget="layer",
        skip_front=0,
        skip_back=0,
        view=view,
    )
    method = SingularValues(plan)
    weight = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    method.begin({"w": weight})
    sent = plan.merge({}, to_state_dict(method.down()["factors"]), {})["w"]
    matrix = weight if view == "buffer" else weight.permute(0, 2, 1, 3)
    values = np.linalg.svd(matrix.reshape(8, 6).double().numpy(), compute_uv=False)
    error = torch.linalg.norm(weight - sent).item()
    assert error == pytest.approx(np.linalg.norm(values[plan.layers[0].rank :]), abs=1e-5)


@pytest.mark.parametrize("kind", BASELINES)
def test_summary_is_logged_without_a_run(kind: Any) -> None:
    baseline(kind).summary()
