"""The methods that CEPS is compared with, through their real handlers, against plain loops.

Whole runs of each, with the suite's strategy, are held against loops in tests/strategies/ceps.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from flwr.app import ConfigRecord
from tests.clients.ceps.federation import Federation, squares
from tests.oracles import decentralised as oracle

from hedgerow.clients import (
    GradientPrivacy,
    LinearRegression,
    Problem,
    ceps_client,
    gaussian_variance,
    noised,
)
from hedgerow.clients.ceps.baselines import BASELINES, mix
from hedgerow.wire import Purpose, Quantised, generator

Array = npt.NDArray[np.float64]

M, N, SEED, ETA, K = 5, 6, 4, 0.1, 3
EDGES = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (0, 2))
W = oracle.metropolis(EDGES, M)
PROBLEMS = squares(1, M, N, 3)
SETTINGS: dict[str, Any] = {
    "run-seed": SEED,
    "num-nodes": M,
    "codec": "dense64",
    "r": 1.0,
    "privacy": "none",
    "epsilon": 1.0,
    "delta": 1e-5,
    "sens": 0.1,
    "clip": 0.5,
    "noise-source": "seed",
    "eta": ETA,
    "local-steps": K,
    "theta": 0.9,
    "rho-sam": 0.05,
    "step-gamma": 0.6,
}
CODE = Quantised(8)
TOP = 2


def gradients(X: Array) -> Array:
    return np.stack([p.gradient(x) for p, x in zip(PROBLEMS, X, strict=True)])


def row(matrix: Array, i: int) -> dict[str, Any]:
    """Return a node's neighbours and weights, as messages have them."""
    neighbours = [j for j in range(M) if j != i and matrix[i, j]]
    return {"neighbours": neighbours, "weights": [float(matrix[i, j]) for j in [*neighbours, i]]}


def federation(method: str, *, weights: bool = True, **changes: Any) -> Federation:
    configs = [{**SETTINGS, "method": method, **row(W, i), **changes} for i in range(M)]
    if not weights:
        for config in configs:
            del config["weights"]
    return Federation(ceps_client, PROBLEMS, configs)


def zeros() -> Array:
    return np.zeros((M, N))


def coded(sent: Array, a: int, kappa: int = 1) -> Array:
    """Return what is received of the a-th communication's messages, whoever reads them."""
    received = []
    for i, vector in enumerate(sent):
        seed = (SEED, a * kappa, i, int(Purpose.COMPRESSION))
        received.append(CODE.decode(CODE.encode(vector, seed), N))
    return np.stack(received)


def drawn(a: int) -> Array:
    """Return what the nodes mix by where each draws half of its neighbours, at the a-th communication."""
    matrix = np.eye(M)
    for i in range(M):
        neighbours = row(W, i)["neighbours"]
        stream = generator(SEED, round=a * K, partition_id=i, purpose=Purpose.SUBSET)
        matrix[i, stream.choice(neighbours, max(1, round(0.5 * len(neighbours))), replace=False)] = 1
    return matrix / matrix.sum(axis=1, keepdims=True)


def test_partial_communication_mixes_by_what_nodes_draw() -> None:
    models = federation("d-psgd-pc", weights=False, r=0.5).run_until(3 * K + 1)
    expected = oracle.d_psgd(gradients, zeros(), [drawn(a) for a in (1, 2, 3)], ETA, K)
    np.testing.assert_allclose(models, expected, atol=1e-12)


def test_d_psgd_may_threshold_what_it_mixed() -> None:
    found = federation("d-psgd", threshold=True, s=3)
    assert (np.count_nonzero(found.run_until(K + 1), axis=1) <= 3).all()


def locally(method: str) -> Callable[[Array], Array]:
    if method == "dfedavgm":
        return lambda X: oracle.local_momentum(gradients, X, ETA, 0.9, K)
    if method == "dfedsam":
        return lambda X: oracle.local_ascent(gradients, X, ETA, 0.05, K)
    return lambda X: oracle.local_momentum(gradients, X, ETA, 0.0, K)


def test_quantised_dfedavgm_is_its_loop() -> None:
    found = federation("dfedavgm", codec="quantised8").run_until(4 * K + 1)
    expected = oracle.dfedavg_quantised(
        locally("dfedavgm"), zeros(), [W] * 4, lambda sent, a: coded(sent, a, K)
    )
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_dcd_psgd_is_its_loop_and_every_replica_is_its_owner() -> None:
    found = federation("dcd-psgd", codec="quantised8", **{"local-steps": 1})
    models = found.run_until(21)
    np.testing.assert_allclose(models, oracle.dcd_psgd(gradients, zeros(), W, ETA, 20, coded), atol=1e-12)
    for i in range(M):
        for j in row(W, i)["neighbours"]:
            assert np.array_equal(found.arrays(i)[f"replica-{j}"], found.arrays(j)["x"])


def test_dcd_psgd_gives_up_a_replica_whose_message_was_lost() -> None:
    found = federation("dcd-psgd", codec="quantised8", **{"local-steps": 1})
    found.event(1)
    found.event(2, lost=lambda k, j, i: (j, i) == (1, 0))
    assert "replica-1" not in found.arrays(0)
    assert "replica-1" in found.arrays(2)
    x, W0 = found.models(3), W[0].copy()
    W0[0], W0[1] = W0[0] + W0[1], 0
    found.publish(3, [0])
    plus = found.arrays(0)["plus"]
    np.testing.assert_allclose(plus, W0 @ x - ETA * PROBLEMS[0].gradient(x[0]), atol=1e-12)


def top(sent: Array) -> Array:
    """Return what is received where each node sends its largest entries, in 32 bits."""
    kept = np.zeros_like(sent)
    for i, vector in enumerate(sent):
        largest = np.argsort(-np.abs(vector), kind="stable")[:TOP]
        kept[i, largest] = vector[largest].astype(np.float32)
    return kept


@pytest.mark.parametrize("codec", ["dense64", "quantised8", "sparse32"])
def test_choco_sgd_is_its_matrix_loop_and_every_copy_is_its_owners_estimate(codec: str) -> None:
    codes: dict[str, Callable[[Array, int], Array]] = {
        "dense64": lambda sent, a: sent,
        "quantised8": lambda sent, a: coded(sent, a, K),
        "sparse32": lambda sent, a: top(sent),
    }
    found = federation("choco-sgd", codec=codec, s=TOP)
    models = found.run_until(8 * K + 1)
    expected = oracle.choco(locally("matcha"), zeros(), W, 0.6, 8, codes[codec])
    np.testing.assert_allclose(models, expected, atol=1e-12)
    for i in range(M):
        for j in row(W, i)["neighbours"]:
            assert np.array_equal(found.arrays(i)[f"hat-{j}"], found.arrays(j)["hat"])


def beer_code(codec: str) -> Callable[[Array, Array, int], tuple[Array, Array]]:
    def quantised(x: Array, v: Array, a: int) -> tuple[Array, Array]:
        both, code = [], Quantised(8, vectors=2)
        for i in range(M):
            seed = (SEED, a, i, int(Purpose.COMPRESSION))
            both.append(code.decode(code.encode(np.concatenate([x[i], v[i]]), seed), 2 * N))
        return np.stack(both)[:, :N], np.stack(both)[:, N:]

    return {
        "dense64": lambda x, v, a: (x, v),
        "quantised8x2": quantised,
        "sparse32": lambda x, v, a: (top(x), top(v)),
    }[codec]


@pytest.mark.parametrize("codec", ["dense64", "quantised8x2", "sparse32"])
def test_beer_is_its_matrix_loop(codec: str) -> None:
    found = federation("beer", codec=codec, s=2 * TOP, **{"local-steps": 1})
    models = found.run_until(16)
    x, v = oracle.beer(gradients, zeros(), W, ETA, 0.6, 15, beer_code(codec))
    np.testing.assert_allclose(models, x, atol=1e-12)
    np.testing.assert_allclose([found.arrays(i)["v"] for i in range(M)], v, atol=1e-12)
    for i in range(M):
        for j in row(W, i)["neighbours"]:
            assert np.array_equal(found.arrays(i)[f"u-{j}"], found.arrays(j)["u"])


def test_beers_trackers_sum_to_the_noisy_gradients_whatever_is_left_out() -> None:
    found = federation("beer", codec="sparse32", s=2, privacy="sound", **{"local-steps": 1})
    found.run_until(9)
    state = [found.arrays(i) for i in range(M)]
    np.testing.assert_allclose(sum(a["v"] for a in state), sum(a["g"] for a in state), atol=1e-12)
    assert [found.counts(i)["gradients"] for i in range(M)] == [9] * M


@pytest.mark.parametrize(("method", "copies"), [("choco-sgd", ["hat"]), ("beer", ["h", "u"])])
def test_a_copy_whose_message_was_lost_is_given_up(method: str, copies: list[str]) -> None:
    found = federation(method, **{"local-steps": 1, "step-gamma": 0.6})
    found.event(1)
    found.event(2, lost=lambda k, j, i: (j, i) == (1, 0))
    assert found.metrics[-M][2]["replicas"] == len(row(W, 0)["neighbours"]) - 1
    for name in copies:
        assert f"{name}-1" not in found.arrays(0)
        assert f"{name}-1" in found.arrays(2)
    found.event(3)
    estimates = np.stack([found.arrays(i)[copies[0]] for i in range(M)])
    W0 = W[0].copy()
    W0[0], W0[1] = W0[0] + W0[1], 0
    before = found.arrays(0)
    found.event(4)
    if method == "choco-sgd":
        half = before["x"] - ETA * PROBLEMS[0].gradient(before["x"])
        # Without compression an estimate after event 4 is the owner's half step.
        estimates = np.stack([found.arrays(i)["hat"] for i in range(M)])
        expected = half + 0.6 * (W0 @ estimates - estimates[0])
    else:
        expected = before["x"] + 0.6 * (W0 @ estimates - estimates[0]) - ETA * before["v"]
    np.testing.assert_allclose(found.arrays(0)["x"], expected, atol=1e-12)
    assert np.isfinite(found.run_until(9)).all()


@pytest.mark.parametrize("mode", ["none", "sound"])
def test_dp_dsgt_is_its_loop_and_the_trackers_sum_to_the_gradients(mode: str) -> None:
    clip = 0.5 if mode == "sound" else np.inf
    variance = 0.0 if mode == "none" else gaussian_variance(1.0, 1e-5, 2 * 0.5 / PROBLEMS[0].num_examples)

    def clipped(X: Array) -> Array:
        return np.stack([p.gradient(x, clip) for p, x in zip(PROBLEMS, X, strict=True)])

    def noisy(a: int, gradients: Array) -> Array:
        private = GradientPrivacy(mode, variance, clip, PROBLEMS[0].num_examples)
        return np.stack([noised(SEED, i, a, g, private) for i, g in enumerate(gradients)])

    found = federation("dp-dsgt", privacy=mode, **{"local-steps": 1})
    for steps in range(1, 12):
        models = found.run_until(steps + 1)
        state = [found.arrays(i) for i in range(M)]
        sums = [sum(arrays[key] for arrays in state) for key in ("y", "g")]
        np.testing.assert_allclose(sums[0], sums[1], atol=1e-12)
    x, y, _ = oracle.dp_dsgt(clipped, zeros(), W, ETA, 11, noisy)
    np.testing.assert_allclose(models, x, atol=1e-12)
    np.testing.assert_allclose([arrays["y"] for arrays in state], y, atol=1e-12)


# SGP: directed edges, from sender to receiver. Node 0 sends to three, and all but node 3 hear one or two.
ARROWS = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (0, 2), (0, 3), (1, 3))
P = oracle.push_matrix(ARROWS, M)


def pushing(problems: Sequence[Problem] = PROBLEMS, **changes: Any) -> Federation:
    configs = [{**SETTINGS, "method": "sgp", **row(P, i), **changes} for i in range(M)]
    return Federation(ceps_client, problems, configs)


def sums(found: Federation) -> tuple[Array, float]:
    """Return the sums of all nodes' biased models and of their weights."""
    x = sum((found.arrays(i)["x"] for i in range(M)), np.zeros(N))
    return x, sum(found.counts(i).get("push-weight", 1.0) for i in range(M))


def test_sgp_ends_at_the_mean_of_all_nodes_and_row_averaging_on_the_same_graph_does_not() -> None:
    rng = np.random.default_rng(3)
    centres = rng.standard_normal((M, N))
    # f_i(w) = ||w - centre_i||^2 / 2, whose sum is least at the mean of the centres.
    problems = [LinearRegression(np.sqrt(N) * np.eye(N), np.sqrt(N) * centre) for centre in centres]
    rows = (P > 0) / (P > 0).sum(axis=1, keepdims=True)

    def mean(method: str, matrix: Array) -> Array:
        base = {**SETTINGS, "eta": 0.1, "local-steps": 1, "method": method}
        found = Federation(ceps_client, problems, [{**base, **row(matrix, i)} for i in range(M)])
        return np.asarray(found.run_until(250).mean(axis=0))

    # At the fixed point the gradients' sum is zero: exactly so, whatever the step.
    np.testing.assert_allclose(mean("sgp", P), centres.mean(axis=0), atol=1e-8)
    # Row-averaging ends where X = R X - eta (X - centres), at a mean that weighs nodes by the graph.
    biased = (0.1 * np.linalg.solve(1.1 * np.eye(M) - rows, centres)).mean(axis=0)
    assert np.linalg.norm(biased - centres.mean(axis=0)) > 0.3
    np.testing.assert_allclose(mean("d-psgd", rows), biased, atol=1e-8)


def test_what_is_lost_scales_model_and_weight_alike() -> None:
    # All nodes have one minimiser, so that every mean of models is as good as another.
    problems = squares(1, 1, N, 3) * M
    H = np.stack([problems[0].gradient(e) - problems[0].gradient(0 * e) for e in np.eye(N)])
    best = np.linalg.solve(H, -problems[0].gradient(np.zeros(N)))
    found = pushing(problems=problems)
    rng = np.random.default_rng(0)
    models = found.run_until(40 * K + 1, lost=lambda k, j, i: bool(rng.random() < 0.05))
    assert 0 < sums(found)[1] < 0.6 * M
    np.testing.assert_allclose(models, np.tile(best, (M, 1)), atol=1e-3)


def heard(node: int, *senders: int, told: Callable[[Array], Array] = lambda message: message) -> Any:
    """Return the metrics of a node that hears these, the first as ``told`` has it, and the federation."""
    found = pushing()
    found.event(K)
    box = found.publish(2 * K, range(M))
    bundle = {str(j): told(np.frombuffer(box[j])).tobytes() if j == senders[0] else box[j] for j in senders}
    content = {"config": ConfigRecord({"iteration": 2 * K}), "bundle": ConfigRecord({**bundle})}
    return found.ask("train.update", {node: content})[node].metric_records["metrics"], found


@pytest.mark.parametrize("weight", [0.0, -1.0, 2.0 * M + 0.1, 1e300, 1e-12, -0.0, np.nan, np.inf])
def test_a_neighbours_impossible_weight_costs_its_message_alone(weight: float) -> None:
    lied, found = heard(2, 1, 0, told=lambda message: np.append(message[:-1], weight))
    honest, without = heard(2, 0)
    assert (lied["rejected"], honest["rejected"]) == (1, 0)
    assert lied["push-weight"] == honest["push-weight"]
    assert np.array_equal(found.arrays(2)["x"], without.arrays(2)["x"])


def test_a_node_that_hears_none_but_a_liar_goes_on_with_what_it_has() -> None:
    before = pushing()
    before.event(K)
    told, _ = heard(1, 0, told=lambda message: np.append(message[:-1], -1.0))
    assert told["rejected"] == 1
    assert told["push-weight"] == pytest.approx(P[1, 1] * before.counts(1)["push-weight"], rel=1e-15)


def test_a_model_is_compared_with_others_by_what_it_is_and_not_by_its_weight() -> None:
    # A thousandth of the weight is an honest message, and so is its thousandth of the model.
    assert heard(2, 1, 0, told=lambda message: message / 1000)[0]["rejected"] == 0


def test_sgp_adds_noise_to_each_gradient_and_clips_its_records() -> None:
    clip, variance = 0.5, gaussian_variance(1.0, 1e-5, 2 * 0.5 / PROBLEMS[0].num_examples)
    private, count = GradientPrivacy("sound", variance, clip, PROBLEMS[0].num_examples), iter(range(99))

    def noisy(Z: Array) -> Array:
        a = next(count)
        clipped = [problem.gradient(z, clip) for problem, z in zip(PROBLEMS, Z, strict=True)]
        return np.stack([noised(SEED, i, a, g, private) for i, g in enumerate(clipped)])

    models = pushing(privacy="sound").run_until(4 * K + 1)
    X, w = oracle.sgp(noisy, zeros(), [P] * 4, ETA, K)
    np.testing.assert_allclose(models, X / w, atol=1e-12)


def test_weights_that_do_not_fit_the_neighbours_are_refused() -> None:
    with pytest.raises(
        ValueError, match="weights is missing in the message's config: it must hold the parts"
    ):
        federation("sgp", weights=False)
    for own, other in ((0.0, 0.5), (0.5, -0.1), (1.5, 0.5)):
        found = pushing()
        parts = {"neighbours": [0, 1], "weights": [other, 0.5, own]}
        with pytest.raises(ValueError, match=r"must be numbers >= 0, the node's own in \(0, 1\]"):
            found.event(K, extra=lambda k, i, parts=parts: parts if i == 2 else row(P, i))  # type: ignore[misc]
    with pytest.raises(ValueError, match="must be 4 numbers, the neighbours' and the node's own"):
        federation("d-psgd").event(K, extra=lambda k, i: {**row(W, i), "weights": [1.0]})


# All of them

METHODS: Mapping[str, Mapping[str, Any]] = {
    **{name: {} for name in BASELINES},
    "dcd-psgd": {"codec": "quantised8", "local-steps": 1},
    "choco-sgd": {"codec": "quantised8"},
    "beer": {"codec": "sparse32", "s": 2 * TOP, "local-steps": 1},
    "dp-dsgt": {"local-steps": 1},
    "matcha": {"local-steps": 1},
}
each = pytest.mark.parametrize("method", METHODS)


@each
def test_looking_changes_nothing(method: str) -> None:
    looked, left = federation(method, **METHODS[method]), federation(method, **METHODS[method])
    for k in range(14):
        looked.run_until(k)
    assert np.array_equal(looked.run_until(14), left.run_until(14))


@each
def test_publishing_twice_gives_the_same_bytes_and_a_missed_event_is_counted(
    method: str,
) -> None:
    found = federation(method, **METHODS[method])
    k = found.next[0]
    first, gradients_used = found.publish(k, range(M)), found.counts(0)["gradients"]
    assert found.publish(k, range(M)) == first
    assert found.counts(0)["gradients"] == gradients_used
    for i in found.next:
        found.next[i] = 2 * k
    models = found.run_until(3 * k + 1)
    assert [found.counts(i)["missed"] for i in range(M)] == [1] * M
    assert np.isfinite(models).all()


@each
def test_noise_is_on_every_gradient(method: str) -> None:
    quiet = federation(method, **METHODS[method]).run_until(8)
    noisy = federation(method, privacy="paper", **METHODS[method]).run_until(8)
    assert not np.array_equal(quiet, noisy)


def test_who_does_not_answer_leaves_its_weight_to_the_node() -> None:
    own, other = np.array([1.0, 2.0]), np.array([3.0, -1.0])
    weights = {0: 0.5, 1: 0.3, 2: 0.2}
    np.testing.assert_allclose(mix(0, own, {1: other}, weights), 0.7 * own + 0.3 * other)
    np.testing.assert_allclose(mix(0, own, {}, weights), own)
    np.testing.assert_allclose(mix(0, own, {1: other}, None), (own + other) / 2)


def test_a_step_that_diverges_is_refused() -> None:
    with (
        np.errstate(all="ignore"),
        pytest.raises(ValueError, match="eta must be smaller: it makes the model not finite"),
    ):
        federation("dfedavgm", eta=1e200, **{"local-steps": 4}).run_until(9)


@pytest.mark.parametrize(
    ("method", "changes", "text"),
    [
        ("d-psgd", {"eta": 0.0}, "eta must be a finite number > 0, got 0.0"),
        ("dfedavgm", {"theta": 1.0}, "theta must be a number >= 0 and < 1, got 1.0"),
        ("dfedsam", {"rho-sam": -0.1}, "rho-sam must be .*got -0.1"),
        ("matcha", {"local-steps": 0}, "local-steps must be an integer >= 1, got 0"),
        ("d-psgd", {"kappa-low": 2, "kappa-high": 3}, "kappa-high must equal kappa-low, 2, got 3"),
        ("d-psgd", {"threshold": True}, "s must be .*got None"),
        ("choco-sgd", {"step-gamma": 0.0}, "step-gamma must be a finite number > 0, got 0.0"),
        ("beer", {"step-gamma": 1.5}, r"step-gamma must be a number in \(0, 1\], got 1.5"),
        ("fedavg", {}, "method must be .*got 'fedavg'"),
    ],
)
def test_bad_settings_are_refused_by_name(method: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        federation(method, **changes)
