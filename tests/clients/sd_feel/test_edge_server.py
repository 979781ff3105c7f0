"""An edge server's own arithmetic, Sun et al., eqs. (3) and (5), and what it takes and refuses."""

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from hedgerow.clients.sd_feel.edge_server import edge_server_handlers, node_role
from hedgerow.sim import through_the_wire
from hedgerow.wire import Call, lazy_array

Vectors = dict[str, Any]


def context(run_id: int = 1, partition: int = 4, clients: int = 4, **node_config: Any) -> Context:
    config = {"partition-id": partition, **node_config}
    return Context(run_id, 9, config, RecordDict(), {"num-clients": clients})


def record(vectors: Vectors) -> ArrayRecord:
    out = ArrayRecord()
    for key, values in vectors.items():
        out[key] = lazy_array(np.asarray(values))
    return out


def ask(
    node: Context,
    kind: str,
    models: Vectors,
    weights: dict[str, Any],
    own: Any = None,
    **config: Any,
) -> RecordDict | Exception:
    content = RecordDict(
        {"config": ConfigRecord(config), "models": record(models), "weights": MetricRecord(weights)}
    )
    if own is not None:
        content["own"] = record({"model": own})
    (answer,) = edge_server_handlers()[kind]([Call(through_the_wire(content, "instruction"), node, kind)])
    return answer


def intra(node: Context, models: Vectors, weights: dict[str, Any], token: int = 1) -> RecordDict | Exception:
    return ask(node, "train.intra", models, weights, token=token)


STEP = {"token": 2, "builds-on": 1, "server": 1, "dtype": "float32", "columns": [0, 2]}
COLUMN = {"0": 0.25, "1": -0.5, "2": 1.25}
NEIGHBOURS = {"0": np.float32([1, 2]), "2": np.float32([3, 4])}


def step(node: Context, **changes: Any) -> RecordDict | Exception:
    values = {"models": NEIGHBOURS, "weights": COLUMN, **STEP, **changes}
    return ask(
        node, "train.gossip", values.pop("models"), values.pop("weights"), values.pop("own", None), **values
    )


def model(answer: RecordDict | Exception) -> Any:
    assert isinstance(answer, RecordDict), answer
    return answer["arrays"]["model"].numpy()


# Eq. (3)


@settings(deadline=None, max_examples=40)
@given(
    weights=st.lists(st.floats(1, 1e4), min_size=1, max_size=8),
    dtype=st.sampled_from(["float32", "float64"]),
    seed=st.integers(0, 9),
)
def test_the_mean_of_clients_is_the_weighted_mean_in_the_dtype_of_the_models(
    weights: list[float], dtype: str, seed: int
) -> None:
    models = np.random.default_rng(seed).standard_normal((len(weights), 5)).astype(dtype)
    told = dict(zip(map(str, range(len(weights))), weights, strict=True))
    mean = model(intra(context(), dict(zip(told, models, strict=True)), told))
    assert mean.dtype == dtype
    tolerance = 1e-6 if dtype == "float32" else 1e-12
    expected = np.average(models.astype(float), axis=0, weights=weights)
    np.testing.assert_allclose(mean, expected, rtol=tolerance, atol=tolerance)


def test_the_order_of_records_does_not_move_a_bit() -> None:
    models = {str(i): np.random.default_rng(i).standard_normal(100) for i in range(12)}
    weights = {key: 1.0 + int(key) / 7 for key in models}
    turned = dict(reversed(models.items())), dict(reversed(weights.items()))
    assert np.array_equal(model(intra(context(), models, weights)), model(intra(context(), *turned)))


@pytest.mark.parametrize(
    ("models", "weights"),
    [
        ({}, {}), ({"0": [1.0]}, {}), ({"0": [1.0]}, {"0": 0.0}), ({"0": [1.0]}, {"0": -1.0}),
        ({"0": [1.0]}, {"0": float("nan")}), ({"0": [1.0]}, {"0": float("inf")}),
        ({"0": [1.0]}, {"0": [1.0]}), ({"0": [1.0]}, {"0": 1.0, "1": 1.0}),
        ({"0": [1.0], "1": [1.0, 2.0, 3.0]}, {"0": 1.0, "1": 1.0}), ({"0": [float("nan")]}, {"0": 1.0}),
        ({"0": [[1.0]]}, {"0": 1.0}), ({"0": [1]}, {"0": 1.0}), ({"a": [1.0]}, {"a": 1.0}),
    ],
    ids=str,
)  # fmt: skip
def test_a_bundle_that_is_none_is_refused_and_the_state_stays(models: Vectors, weights: Any) -> None:
    node = context()
    intra(node, {"0": [7.0]}, {"0": 1.0}, token=5)
    kept = dict(node.state)
    assert isinstance(intra(node, models, weights, token=6), ValueError)
    assert dict(node.state) == kept


# Eq. (5)


def test_a_step_goes_on_from_the_model_that_the_node_keeps_and_columns_that_are_not_mixed_stay() -> None:
    node = context()
    intra(node, {"0": np.float32([10, 20])}, {"0": 3.0})
    np.testing.assert_array_equal(model(step(node)), [0.25 - 5 + 3.75, 0.5 - 10 + 5])
    own = np.float32([10, 20, 30, 40])
    models = {"0": np.ones(4, np.float32), "2": np.ones(4, np.float32)}
    mixed = model(step(context(), models=models, own=own, columns=[0, 1, 2, 3]))
    np.testing.assert_array_equal(mixed, [0.25 - 5 + 1.25, 20, 0.25 - 15 + 1.25, 40])
    np.testing.assert_array_equal(model(step(context(), models=models, own=own, columns=[])), own)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("median", [3, 4]),
        # Beside its own 0.25 and 1.25 of the differences to [1, 2] and [3, 4], cut to the norm 1.
        ("clipped(1)", [10 - 0.25 * 9 / 20.1246118 - 1.25 * 7 / 17.4642492, None]),
    ],
)
def test_a_step_of_a_rule_is_of_the_models_of_the_neighbourhood(rule: str, expected: list[Any]) -> None:
    node = context()
    intra(node, {"0": np.float32([10, 20])}, {"0": 3.0})
    got = model(step(node, aggregation=rule))
    assert got[0] == pytest.approx(expected[0], rel=1e-6)
    assert expected[1] is None or got[1] == expected[1]


def test_a_rule_within_a_cluster_is_of_updates_and_minds_no_weights() -> None:
    models = {"0": np.float32([1, 2]), "1": np.float32([2, 2]), "2": np.float32([1e9, -1e9])}
    weights = {"0": 1.0, "1": 1.0, "2": 2.0**53}
    own = np.float32([0, 2])
    node = context()
    lacking = ask(node, "train.intra", models, weights, token=1, aggregation="median", **{"builds-on": 3})
    assert isinstance(lacking, RecordDict)
    assert dict(lacking["edge"]) == {"lacks": 3}
    told = ask(node, "train.intra", models, weights, own, token=1, aggregation="median")
    np.testing.assert_array_equal(model(told), [2, 2])
    told = ask(context(), "train.intra", models, weights, own, token=1, aggregation="clipped(3)")
    np.testing.assert_allclose(model(told), [1 + np.sqrt(0.5), 2 - np.sqrt(0.5)], rtol=1e-6)


@pytest.mark.parametrize("case", ["nothing", "another token", "another run"])
def test_a_node_without_the_model_to_go_on_from_says_so_and_keeps_what_it_has(case: str) -> None:
    node = context()
    if case != "nothing":
        intra(node, {"0": np.float32([10, 20])}, {"0": 3.0}, token=1 if case == "another run" else 7)
    if case == "another run":
        node = Context(2, 9, node.node_config, node.state, node.run_config)
    kept = dict(node.state)
    answer = step(node)
    assert isinstance(answer, RecordDict)
    assert not answer.array_records
    assert dict(answer["edge"]) == {"lacks": 1}
    assert dict(node.state) == kept
    # And takes what it is then sent, whatever it had.
    assert len(model(step(node, own=np.float32([1, 2])))) == 2


@pytest.mark.parametrize(
    "bad",
    [
        {"server": -1}, {"server": 3}, {"token": 0}, {"aggregation": "krum(0)"},
        {"aggregation": "clipped(0)"}, {"aggregation": 2}, {"dtype": "int64"}, {"dtype": "float16"},
        {"columns": 3}, {"columns": [0]}, {"columns": [1, 0]}, {"columns": [-1, 1]}, {"columns": [0, 3]},
        {"columns": ["a", "b"]}, {"weights": {"0": 1.0}}, {"weights": {**COLUMN, "3": 1.0}},
        {"weights": {**COLUMN, "0": float("inf")}}, {"models": {"0": [1.0, 2.0], "2": [1.0]}},
        {"models": {"0": [1.0, float("nan")], "2": [1.0, 2.0]}}, {"models": {"0": [1, 2], "2": [1, 2]}},
        {"models": {"0": [3e38, 0], "2": [3e38, 0]}, "weights": {"0": 3.0, "1": 1.0, "2": 3.0}},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_a_step_that_is_none_is_refused_and_the_state_stays(bad: dict[str, Any]) -> None:
    node = context()
    intra(node, {"0": np.float32([10, 20])}, {"0": 3.0})
    kept = dict(node.state)
    assert isinstance(step(node, **bad), ValueError)
    assert dict(node.state) == kept


# Who is one


@pytest.mark.parametrize(
    ("partition", "role", "expected"),
    [(3, None, "client"), (4, None, "edge"), (4, "client", "client"), (0, "edge", "edge")],
)
def test_the_node_config_says_the_role_and_else_the_partition_does(
    partition: int, role: str | None, expected: str
) -> None:
    assert node_role(context(partition=partition, **({"role": role} if role else {}))) == expected
    # Without a number of clients all are clients.
    assert node_role(Context(1, 9, {"partition-id": 99}, RecordDict(), {})) == "client"
    with pytest.raises(ValueError, match="role must be 'client' or 'edge', got 'cloud' in the node config"):
        node_role(context(role="cloud"))


@pytest.mark.parametrize("kind", ["train.intra", "train.gossip"])
def test_a_client_does_no_edge_servers_work(kind: str) -> None:
    answer = ask(context(partition=3), kind, NEIGHBOURS, COLUMN, **STEP)
    assert isinstance(answer, ValueError)
    assert str(answer) == f"partition 3 must be an edge for {kind}, got a client"


def test_many_edge_servers_at_once_answer_what_each_answers_alone() -> None:
    calls = []
    for d in range(3):
        content = RecordDict(
            {
                "config": ConfigRecord({"token": 1}),
                "models": record({"0": [1.0 * d], "1": [2.0]}),
                "weights": MetricRecord({"0": 1.0, "1": float(d - 1) or 2.0}),
            }
        )
        calls.append(Call(content, context(partition=4 + d), "train.intra"))
    first, second, third = edge_server_handlers()["train.intra"](calls)
    assert isinstance(first, ValueError)
    assert [float(model(second)[0]), float(model(third)[0])] == [(1 + 4) / 3, 2.0]
