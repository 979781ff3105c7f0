"""CEPS's client through its real handlers: event by event it is the synchronous loop, bit for bit."""

from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt
import pytest
from flwr.app import ConfigRecord, RecordDict
from tests.clients.ceps.federation import Federation, squares
from tests.clients.ceps.test_algorithm import T, quadratic
from tests.clients.contexts import answered, context
from tests.oracles import ceps as oracle

from hedgerow.clients import GradientPrivacy, LinearRegression, ceps_client, gaussian_variance, noised
from hedgerow.clients.ceps.algorithm import penalty
from hedgerow.tasks import LinearData, linear_part, sparse_truth
from hedgerow.wire import Purpose, generator, to_record

Array = npt.NDArray[np.float64]

SEED, M, N, S = 11, 8, 24, 4
GRAPH = nx.random_regular_graph(4, M, seed=1)
NEIGHBOURS = [sorted(GRAPH.neighbors(i)) for i in range(M)]
SETTINGS: dict[str, Any] = {
    "method": "ceps",
    "run-seed": SEED,
    "num-nodes": M,
    "s": S,
    "d": 200,
    "codec": "dense64",
    "r": 0.5,
    "kappa-low": 2,
    "kappa-high": 5,
    "mu": 0.1,
    "sigma-rule": "fixed_c",
    "c": 2.0,
    "privacy": "none",
    "epsilon": 0.5,
    "delta": 0.5,
    "sens": 0.1,
    "clip": 1.0,
    "noise-source": "seed",
}
PRIVACY = ("none", "paper", "sound")


def federation(problems: list[Any] | None = None, **changes: Any) -> Federation:
    strict = changes.pop("strict", False)
    problems = problems or squares(SEED, M, N, S)
    settings = {**SETTINGS, **changes}
    configs = [{**settings, "neighbours": NEIGHBOURS[i]} for i in range(M)]
    return Federation(ceps_client, problems, configs, strict=strict)


def kappas(**changes: Any) -> list[int]:
    low, high = ({**SETTINGS, **changes}[key] for key in ("kappa-low", "kappa-high"))
    return [
        int(generator(SEED, partition_id=i, purpose=Purpose.SCHEDULE).integers(low, high + 1))
        for i in range(M)
    ]


def subset(i: int, k: int, r: float = 0.5) -> list[int]:
    count = max(1, round(r * len(NEIGHBOURS[i])))
    stream = generator(SEED, round=k, partition_id=i, purpose=Purpose.SUBSET)
    return [int(j) for j in stream.choice(NEIGHBOURS[i], count, replace=False)]


def synchronous(problems: list[LinearRegression], mode: str, iterations: int, **changes: Any) -> list[Array]:
    clip = 1.0 if mode == "sound" else np.inf
    sensitivity = [2 * clip / p.num_examples if mode == "sound" else 0.1 for p in problems]
    private = [
        GradientPrivacy(mode, gaussian_variance(0.5, 0.5, sensitivity[i]), clip, problems[i].num_examples)
        for i in range(M)
    ]
    c = changes.pop("c", 2.0)
    return oracle.trajectory(
        oracle.Setting(
            gradients=[lambda w, p=p: p.gradient(w, clip) for p in problems],  # type: ignore[misc]
            n=N,
            s=S,
            mu=0.1,
            kappa=kappas(),
            sigma=c if isinstance(c, list) else [c] * M,
            fixed_c=not isinstance(c, list),
            neighbours=NEIGHBOURS,
            select=subset,
            noise=lambda i, k, vector: noised(SEED, i, k, vector, private[i]),
            privacy=mode,
        ),
        iterations,
    )


# Against the synchronous loop


@pytest.mark.parametrize("mode", PRIVACY)
def test_event_by_event_is_the_synchronous_loop_bit_for_bit(mode: str) -> None:
    problems = squares(SEED, M, N, S)
    found = federation(problems, privacy=mode)
    history = synchronous(problems, mode, 60)
    assert len(set(kappas())) > 1
    for k in (1, 5, 17, 40, 60):
        assert np.array_equal(found.run_until(k), history[k]), f"W^{k}"


def test_the_papers_sigma_gives_the_loop_with_that_sigma_and_bits_divide_by_the_measurements() -> None:
    problems = squares(SEED, M, N, S)
    sigma = [penalty(p.largest_eigenvalue, M, 0.5, p.num_examples) for p in problems]
    found = federation(problems, **{"sigma-rule": "paper"}).run_until(30)
    assert np.array_equal(found, synchronous(problems, "none", 30, c=sigma)[30])
    by_bits = federation(problems, **{"sigma-rule": "paper", "sigma-d": "bits"})
    assert by_bits.counts(3)["sigma"] == penalty(problems[3].largest_eigenvalue, M, 0.5, 200)


@pytest.mark.parametrize("owner", ["sender", "receiver"])
def test_one_bit_messages_lead_near_the_exact_ones(owner: str) -> None:
    found = federation(codec="1bcs", d=600, **{"phi-owner": owner})
    models = found.run_until(30) if owner == "sender" else _receiver_keyed(found, 30)
    exact = federation().run_until(30)
    assert np.linalg.norm(models - exact) / np.linalg.norm(exact) < 0.05


def _receiver_keyed(found: Federation, iterations: int) -> Array:
    while (k := min(found.next.values())) < iterations:
        due = [i for i in sorted(found.next) if found.next[i] == k]
        bundles: dict[int, dict[str, bytes]] = {i: {} for i in due}
        for j in sorted({j for i in due for j in found.want[i]}):
            readers = [i for i in due if j in found.want[i]]
            request = {"config": ConfigRecord({"iteration": k, "receivers": readers})}
            payloads = found.ask("query.publish", {j: request})[j].config_records["payload"]["bytes"]
            assert isinstance(payloads, list)
            for i, payload in zip(readers, payloads, strict=True):
                bundles[i][str(j)] = payload  # type: ignore[assignment]
        contents = {
            i: {"config": ConfigRecord({"iteration": k}), "bundle": ConfigRecord({**bundles[i]})} for i in due
        }
        for i, answer in found.ask("train.update", contents).items():
            told = answer.config_records["next"]
            found.next[i], found.want[i] = told["next"], told["want"]  # type: ignore[assignment]
    return found.models(iterations)


# Reductions and invariants


def test_the_data_are_read_once_at_first_and_once_a_communication_and_missed_ones_are_counted() -> None:
    found, K = federation(), 41
    found.run_until(K)
    assert [found.counts(i)["gradients"] for i in range(M)] == [1 + (K - 1) // kappa for kappa in kappas()]
    missing = federation()
    missing.models(16)
    assert [missing.counts(i)["missed"] for i in range(M)] == [15 // kappa for kappa in kappas()]


@pytest.mark.parametrize("codec", ["dense64", "1bcs"])
def test_the_truths_support_is_found_and_the_objective_is_that_of_the_truth(codec: str) -> None:
    m, data = 16, LinearData(n=300, s=5, samples=(150, 250))
    graph = nx.random_regular_graph(4, m, seed=0)
    problems = [LinearRegression(*linear_part(data, i, 3)) for i in range(m)]
    config = {
        **SETTINGS,
        "num-nodes": m,
        "s": 5,
        "d": 300,
        "codec": codec,
        "r": 0.2,
        "kappa-low": 10,
        "kappa-high": 15,
        "sigma-rule": "paper",
    }
    configs = [{**config, "neighbours": sorted(graph.neighbors(i))} for i in range(m)]
    models = Federation(ceps_client, problems, configs).run_until(80)
    truth, mean = sparse_truth(data, 3), models.mean(axis=0)
    assert np.mean([np.array_equal(w != 0, truth != 0) for w in models]) >= 0.95
    assert np.mean([p.value(mean) for p in problems]) <= 1.01 * np.mean([p.value(truth) for p in problems])
    assert np.linalg.norm(mean - truth) <= 0.02 * np.linalg.norm(truth)


# What goes wrong


def test_a_lost_payload_leaves_its_sender_out() -> None:
    problems = squares(SEED, M, N, S)
    found = federation(problems)
    models = found.run_until(30, lost=lambda k, j, i: j == 2)
    history = oracle.trajectory(
        oracle.Setting(
            [p.gradient for p in problems], N, S, 0.1, kappas(), [2.0] * M, NEIGHBOURS,
            lambda i, k: [j for j in subset(i, k) if j != 2], fixed_c=True,
        ),
        30,
    )  # fmt: skip
    alone = [i for i in range(M) if any(subset(i, k) == [2] for k in range(30))]
    assert not alone
    assert np.array_equal(models, history[30])


def test_who_hears_nobody_keeps_still_and_says_so() -> None:
    found = federation()
    k = min(found.next.values())
    before = found.models(k)
    found.event(k, lost=lambda *_: True)
    due = [i for i in range(M) if kappas()[i] == k]
    assert [(i, m["missed"], m["used"]) for _, i, m in found.metrics] == [(i, 1, 1) for i in due]
    after = found.models(k + 1)
    assert np.linalg.norm(after - before) < 0.2 * np.linalg.norm(before)


def test_a_node_that_has_no_state_of_the_run_says_so_and_begins_anew() -> None:
    found = federation()
    found.run_until(9)
    found.contexts[0].state = RecordDict()
    with pytest.raises(ValueError, match=r"node 0 has no state of run 1: it must get 'query\.hello' first"):
        found.publish(9, [0])
    hello = {"config": ConfigRecord({**SETTINGS, "neighbours": NEIGHBOURS[0]})}
    told = found.ask("query.hello", {0: hello})[0].config_records["hello"]
    assert told["next"] == kappas()[0]
    assert found.publish(9, [0])[0]
    assert found.counts(0)["missed"] == 8 // kappas()[0]
    found.contexts[0].run_id = 2
    with pytest.raises(ValueError, match="no state of run 2"):
        found.publish(9, [0])


def test_a_second_hello_changes_nothing_and_publishing_twice_gives_the_same_bytes() -> None:
    found = federation(codec="1bcs")
    assert found.publish(2, [0, 1]) == found.publish(2, [0, 1])
    found.run_until(9)
    before = found.models(9)
    hello = {
        i: {"config": ConfigRecord({**SETTINGS, "codec": "1bcs", "neighbours": NEIGHBOURS[i]})}
        for i in range(M)
    }
    answers = found.ask("query.hello", hello)
    assert {i: a.config_records["hello"]["next"] for i, a in answers.items()} == found.next
    assert {i: a.config_records["hello"]["want"] for i, a in answers.items()} == found.want
    assert np.array_equal(found.models(9), before)


STRANGER = next(j for j in range(1, M) if j not in NEIGHBOURS[0])


@pytest.mark.parametrize(
    ("kind", "iteration", "records", "text"),
    [
        ("train.update", 12, {"bundle": ConfigRecord({str(STRANGER): bytes(8 * N)})},
            rf"the bundle's senders must be among the neighbours .*got \[{STRANGER}\]"),
        ("train.update", 11, {}, "iteration must be a multiple of kappa = 4, got 11"),
        ("query.publish", 2, {}, "iteration must be .*got 2"),
        ("query.monitor", 9, {"arrays": to_record({"mean": np.zeros(N + 1)})},
            rf"the message's array must have the shape .*got \({N + 1},\)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_a_nodes_state_is_refused(
    kind: str, iteration: int, records: dict[str, Any], text: str
) -> None:
    found = federation(**{"kappa-low": 4, "kappa-high": 4})
    found.run_until(9)
    with pytest.raises(ValueError, match=text):
        found.ask(kind, {0: {"config": ConfigRecord({"iteration": iteration}), **records}})


def test_a_monitor_hears_the_objective_of_the_node_or_of_a_model_that_it_sends() -> None:
    problems = squares(SEED, M, N, S)
    found = federation(problems)
    w, mean = found.models(4), np.linspace(-1, 1, N)
    config = ConfigRecord({"iteration": 4})
    own = found.ask("query.monitor", {2: {"config": config}})[2].metric_records["metrics"]
    told = found.ask("query.monitor", {2: {"config": config, "arrays": to_record({"mean": mean})}})[2]
    assert own["objective"] == problems[2].value(w[2])
    assert told.metric_records["metrics"]["mean-objective"] == problems[2].value(mean)


def test_a_node_may_refuse_to_show_its_model() -> None:
    configs = [{**SETTINGS, "neighbours": NEIGHBOURS[i]} for i in range(M)]
    found = Federation(ceps_client, squares(SEED, M, N, S), configs, monitor=False)
    with pytest.raises(PermissionError, match="this node answers no monitor"):
        found.models(1)


@pytest.mark.parametrize(("mode", "told"), [("none", True), ("paper", True), ("sound", False)])
def test_sound_privacy_tells_no_scalars_of_the_model(mode: str, told: bool) -> None:
    found = federation(privacy=mode)
    found.run_until(6)
    for _, _, metrics in found.metrics:
        assert ("disagreement" in metrics, "change" in metrics) == (told, told)


def test_sound_noise_is_of_the_seed_only_where_a_simulation_asks_and_its_node_does_not_insist() -> None:
    problems, seeded = squares(SEED, M, N, S), {**SETTINGS, "privacy": "sound"}
    entropy = {key: value for key, value in seeded.items() if key != "noise-source"}

    def models(settings: dict[str, Any], **own: Any) -> Array:
        configs = [{**settings, "neighbours": NEIGHBOURS[i]} for i in range(M)]
        return Federation(ceps_client, problems, configs, **own).run_until(6)

    first = models(seeded)
    assert np.array_equal(models(seeded), first)
    assert not np.array_equal(models(entropy), models(entropy))
    assert not np.array_equal(models(seeded, **{"noise-source": "entropy"}), first)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"method": "fedavg"}, "method must be 'ceps' or .*got 'fedavg' in the message's config"),
        ({"s": 0}, "s must be an integer >= 1, got 0"),
        ({"r": 1.5}, r"r must be a number in \(0, 1\], got 1.5"),
        ({"mu": 0.0}, "mu must be a finite number > 0, got 0.0"),
        ({"kappa-high": 1}, "kappa-high must be at least kappa-low = 2, got 1"),
        ({"sigma-rule": "best"}, "sigma-rule must be 'paper' or 'fixed_c', got 'best'"),
        ({"c": -1.0}, "c must be a finite number > 0, got -1.0"),
        ({"privacy": "some"}, "privacy must be 'none' or 'paper' or 'sound', got 'some'"),
        ({"codec": "morse"}, "codec must be one of .*got 'morse'"),
        ({"neighbours": [1, 1]}, r"neighbours must be a list of other nodes, .*got \[1, 1\]"),
        ({"neighbours": [0]}, r"neighbours must be a list of other nodes, .*got \[0\]"),
        ({"num-nodes": 0}, "num-nodes must be an integer >= 1, got 0"),
        ({"privacy": "paper", "epsilon": 0.0}, "epsilon must be a finite number > 0, got 0.0"),
        ({"privacy": "paper", "delta": 0.0}, r"delta must be a number in \(0, 1\), got 0"),
        ({"privacy": "paper", "sens": -1.0}, "sens must be .*got -1.0"),
        ({"privacy": "sound", "clip": 0.0}, "clip must be .*got 0.0"),
        (
            {"privacy": "sound", "sigma-rule": "paper"},
            "sigma-rule must be 'fixed_c' with privacy 'sound', got 'paper'",
        ),
        ({"privacy": "sound", "noise-source": "dice"}, "noise-source must be .*got 'dice'"),
    ],
)
def test_bad_settings_are_refused_by_name(changes: dict[str, Any], text: str) -> None:
    app = ceps_client(lambda own: quadratic(T[0]))
    config = ConfigRecord({**SETTINGS, "neighbours": [1, 2], **changes})
    with pytest.raises(ValueError, match=text):
        answered(app, "query.hello", context(0), RecordDict({"config": config}))
