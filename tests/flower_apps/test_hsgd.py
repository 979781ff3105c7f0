"""The app of HSGD: its nodes and its strategy together follow the plain algorithm, and tell no data."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.common.serde import recorddict_to_proto
from tests.clients.hsgd.federation import parties
from tests.flower_apps.cases import HSGD as CASE
from tests.flower_apps.cases import Run
from tests.oracles.hsgd import pairs, top_k
from tests.oracles.hsgd import run as oracle
from tests.oracles.test_hsgd_oracle import FINALS, START, flat, shrinking
from tests.strategies.hsgd.nodes import Parties
from tests.strategies.hsgd.nodes import run as play
from tests.strategies.hsgd.test_strategy import LAYOUTS, hsgd, network_parties, toy

from hedgerow.clients import BatchClientApp, hsgd_client
from hedgerow.sim import InProcessGrid, SettingsError, flower_identity
from hedgerow.strategies import HSGD, DivergenceError
from hedgerow.strategies.hsgd.exchange import Group, batch_size, draw
from hedgerow.tasks import (
    DatasetNotFound,
    VerticalDataset,
    evaluate_split,
    normalised_utility,
    split_loss,
    split_model,
)
from hedgerow.wire import to_record
from hsgd import settings
from hsgd.parties import AllParties as Dealt
from hsgd.parties import deal, node_party
from hsgd.server_app import SplitMetrics

METHODS = pytest.mark.parametrize("method", ["hsgd", "jfl", "c-hsgd"])
TOLERANCE = 1e-9


def golden(values: Sequence[float], tolerance: float = TOLERANCE) -> Any:
    return pytest.approx(values, abs=tolerance, rel=0)


# The golden trajectories, nodes and strategy together


@LAYOUTS
@pytest.mark.parametrize(("method", "P", "Q", "T", "final"), FINALS)
def test_every_method_ends_at_its_golden_model(
    method: str, P: int, Q: int, T: int, final: tuple[float, ...], edges: bool
) -> None:
    nodes = toy(method, edges=edges)
    ended, _, grid = play(hsgd(nodes, P, Q, method=method), nodes, START, T // P)
    assert ended == golden(final)
    # Nodes keep nothing between rounds.
    assert not any(len(node.state) for node in grid._nodes.values())


@LAYOUTS
def test_regulariser_and_compression_end_at_their_golden_models(edges: bool) -> None:
    nodes = toy(edges=edges)
    # The regulariser pulls both encoders and not the head.
    ended, _, _ = play(hsgd(nodes, 2, 2, mu=0.1), nodes, START, 1)
    assert ended == golden((1.0394740651, 0.5363481150, 0.3452297105, 0.4381876563))
    # A compressed head stops the devices that lost their weight; values travel in 32 bits.
    ended, _, _ = play(hsgd(nodes, method="c-hsgd"), nodes, START, 1)
    assert ended == golden((1.01675, 0.5185, 0.28375, 0.4), 1e-8)


# A random network against the plain algorithm


def drawn(nodes: Parties, alpha: float, seed: int) -> Callable[[int, int], list[int]]:
    """Return the strategy's draws as the oracle asks for them."""

    def choose(m: int, t: int) -> list[int]:
        names = list(nodes.parties[m].ids)
        group = Group(m, m, tuple(names), {}, False)
        return [names.index(one) for one in draw(group, batch_size(alpha, len(names)), seed=seed, t=t)]

    return choose


@LAYOUTS
@METHODS
def test_a_network_follows_the_plain_algorithm(method: str, edges: bool) -> None:
    nodes, start = network_parties(1, edges=edges)
    choose = drawn(nodes, 0.5, 3)
    options = {"learning_rate": 0.5, "halving_period": 4, "participation": 0.5, "seed": 3}
    ended, _, _ = play(hsgd(nodes, 4, 2, method=method, **options), nodes, start, 3)
    plain = oracle(
        nodes.model,
        start,
        pairs(nodes.groups, choose) if method == "jfl" else nodes.groups,
        P=4,
        Q=2,
        T=12,
        eta=shrinking,
        choose=None if method == "jfl" else choose,
        squeeze=top_k if method == "c-hsgd" else lambda vector: vector,
    )
    # Compressed values travel in 32 bits.
    assert ended == golden(flat(plain.final), 1e-6 if method == "c-hsgd" else TOLERANCE)


# Privacy: whatever is sent, to or from anyone, holds no value of anyone's data


def raw_values(nodes: Parties) -> set[float]:
    values = {float(v) for party in nodes.parties for v in party.x.ravel()}
    return values | {float(v) for party in nodes.parties for v in party.y if v not in (0.0, 1.0)}


def serialised(messages: Iterable[tuple[str, int, RecordDict]]) -> bytes:
    return b"".join(recorddict_to_proto(content).SerializeToString() for _, _, content in messages)


@LAYOUTS
@METHODS
def test_no_message_of_a_run_has_a_feature_or_a_label_in_its_bytes(method: str, edges: bool) -> None:
    nodes, start = network_parties(5, edges=edges)
    # Labels that no other number of the run is.
    nodes.parties = [replace(one, y=one.y * 0.98765431 + 0.0123) for one in nodes.parties]
    one = hsgd(nodes, 2, 1, method=method, participation=0.6)
    _, _, grid = play(one, nodes, start, 3)

    held = [("state", i, node.state) for i, node in enumerate(grid._nodes.values())]
    told = serialised([*grid.sent, *grid.replies, *held])
    values = raw_values(nodes)
    assert len(values) > 100
    for value in values:
        for form in (np.float64, np.float32):
            assert form(value).tobytes() not in told
            assert form(value).byteswap().tobytes() not in told
    assert np.float64(start.head[0]).tobytes() in told  # the scan finds what is there


@pytest.mark.parametrize(
    ("name", "shapes", "classes"),
    [
        ("cnn", ((1, 28, 28), (1, 28, 28)), 11),
        ("lstm", ((12, 3), (12, 1)), 2),
        ("mlp", ((15,), (15,)), 2),
    ],
)
def test_the_papers_networks_train_in_stacks_as_in_a_loop(
    name: str, shapes: tuple[tuple[int, ...], ...], classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = split_model(name, *shapes, classes, seed=0).double()
    rng = np.random.default_rng(0)
    groups = [
        (*(rng.normal(size=(2, *shape)) for shape in shapes), rng.integers(0, classes, 2)) for _ in range(2)
    ]
    nodes = parties(model, groups, "devices", split_loss)  # type: ignore[arg-type]
    app = hsgd_client(lambda context: nodes[int(context.node_config["partition-id"])])

    def trained() -> Any:
        grid, both = InProcessGrid(app, len(nodes)), {"global_interval": 2, "local_interval": 2}
        one = HSGD(learning_rate=0.1, min_available_nodes=len(nodes), **both)
        with flower_identity(1):
            result = one.start(grid, to_record(model.state_dict()), num_rounds=1)
        return np.concatenate([array.numpy().ravel() for array in result.arrays.values()])

    stacks = trained()
    monkeypatch.setattr(BatchClientApp, "batch_handler", lambda self, message_type: None)
    assert stacks == pytest.approx(trained(), abs=1e-12, rel=0)


# Who holds what


def values_of(**changes: Any) -> dict[str, Any]:
    return {**CASE.defaults, **CASE.small, **changes}


def dealt(**changes: Any) -> Dealt:
    return deal(values_of(**changes))


def context_of(partition: int, node_config: dict[str, Any] | None = None, **changes: Any) -> Context:
    config = {"partition-id": partition, **(node_config or {})}
    return Context(
        run_id=1, node_id=9, node_config=config, state=RecordDict(), run_config=values_of(**changes)
    )


def test_hospitals_come_first_then_their_edges() -> None:
    places = [dealt().party(partition) for partition in range(4)]
    assert [(one.role, one.group) for one in places] == [
        ("hospital", 0),
        ("hospital", 1),
        ("edge", 0),
        ("edge", 1),
    ]


def test_devices_come_group_by_group_with_one_person_each() -> None:
    found = dealt(layout="devices")
    devices = [found.party(partition) for partition in range(2, found.num_nodes)]
    assert [one.group for one in devices] == [0] * 10 + [1] * 10
    assert [*map(list, (one.ids for one in devices))] == [
        [str(i)] for i in found.data.ids_train[found.people]
    ]
    assert found.party(2).ids == list(found.party(0).ids)[:1]


@pytest.mark.parametrize(
    ("node_config", "message"),
    [
        ({"role": "device"}, r"role of partition-id 1 must be 'hospital'.*got 'device' in the node config"),
        ({"group": 0}, r"group of partition-id 1 must be 1.*got 0 in the node config"),
    ],
)
def test_a_node_that_is_told_to_be_another_party_names_both(
    node_config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        node_party(context_of(1, node_config))


def test_a_nodes_own_data_folder_goes_before_the_runs(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFound, match=re.escape(str(tmp_path))):
        node_party(context_of(0, {"data-dir": str(tmp_path)}, dataset="ecg5000", **{"data-dir": "/nowhere"}))


def test_a_partition_beyond_the_parties_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"partition-id must be an integer from 0 to 3 \(2 hospitals and 2 edges\), got 4"
    ):
        node_party(context_of(4))


def test_a_federation_of_another_size_than_its_people_is_refused() -> None:
    values = settings.read(values_of(layout="devices"))
    with pytest.raises(SettingsError, match=r"num-clients must be 22: 2 hospitals and 20 devices, got 4"):
        settings.check_size(values, deal(values.run_config))


@pytest.mark.parametrize(
    ("dataset", "model", "encoding"), [("breast-cancer", "mlp", 7), ("mnist-5k", "cnn", 144)]
)
def test_the_model_fits_the_data(dataset: str, model: str, encoding: int) -> None:
    # Of a seed of its own, as earlier runs in this process train the model that equal settings share.
    found = dealt(dataset=dataset, seed=90)
    assert found.model.hospital_encoding == encoding
    named = dealt(dataset=dataset, model=model, seed=90).model.state_dict()
    assert all(torch.equal(named[key], value) for key, value in found.model.state_dict().items())


@pytest.mark.parametrize(
    ("layout", "method", "dataset", "partition", "groups", "there"),
    [
        ("edges", "hsgd", "breast-cancer", "iid", 4, 114),
        ("devices", "tdcd", "breast-cancer", "rates(1.0)", 5, 91),
        ("edges", "tdcd", "mnist-5k", "iid", 10, 400),
    ],
)
def test_asking_for_more_people_than_there_are_names_how_many_there_are(
    layout: str, method: str, dataset: str, partition: str, groups: int, there: int
) -> None:
    changes = {"layout": layout, "method": method, "dataset": dataset, "partition": partition}
    asked = {"num-groups": groups, "patients-per-group": there}
    assert len(dealt(**changes, **asked).people) == groups * there
    with pytest.raises(
        ValueError, match=rf"patients-per-group must be at most {there}, .*, got {there + 1};"
    ):
        dealt(**changes, **{**asked, "patients-per-group": there + 1})


def test_weights_whose_logits_overflow_are_told_as_divergence() -> None:
    found = dealt()
    state = {key: 1e30 * value for key, value in found.model.state_dict().items()}
    assert all(value.isfinite().all() for value in state.values())
    with pytest.raises(DivergenceError, match="the run diverges"):
        SplitMetrics(found)(state)


@pytest.mark.parametrize(
    ("key", "most", "where"),
    [("probe-batch", 10, "of the smallest group"), ("train-loss-samples", 20, "at all hospitals")],
)
def test_samples_of_more_people_than_there_are_are_refused(key: str, most: int, where: str) -> None:
    settings.check_size(settings.read(values_of(**{key: most})), dealt())
    with pytest.raises(
        SettingsError, match=rf"{key} must be at most {most}, the people {where} \(0: all\), got {most + 1}"
    ):
        settings.check_size(settings.read(values_of(**{key: most + 1})), dealt())


def two_sites(_folder: object) -> VerticalDataset:
    """Return 4 patients of 3 hours each at either of two sites, of whom one is septic; and payoffs."""
    x = np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32)
    people = np.array([f"p{number // 3}" for number in range(24)])
    ids = np.array([f"{person}@{number}" for number, person in enumerate(people)])
    y = (np.arange(24) % 8 == 0).astype(np.int64)
    payoffs = np.where(y[:6, None] == 1, [-2.0, 1.0], [0.0, -0.05])
    sites = np.repeat(["A", "B"], 12)
    halves = (x, x[:, :4], y, ids), (x[:6], x[:6, :4], y[:6], np.char.add("test", ids[:6]))
    return VerticalDataset(
        "two sites", *halves[0], *halves[1], ("no", "yes"),
        people_train=people, sites_train=sites, payoffs_test=payoffs,
    )  # fmt: skip


SITES = {
    "dataset": f"{__name__}:two_sites",
    "partition": "sites",
    "patients-per-group": 0,
    "num-groups": 4,
    "num-clients": 8,
}


def test_a_hospital_has_people_of_one_site_and_all_hours_of_each() -> None:
    found = dealt(**SITES)
    groups = [{found.data.people_train[row] for row in group} for group in found.groups]  # type: ignore[index]
    assert [len(people) for people in groups] == [2] * 4
    assert len(set.union(*groups)) == 8
    assert [{found.data.sites_train[row] for row in group} for group in found.groups] == [  # type: ignore[index]
        {"A"}, {"A"}, {"B"}, {"B"},
    ]  # fmt: skip


def test_what_a_class_told_is_worth_is_measured_where_the_data_say_it() -> None:
    found = dealt(**SITES)
    state = found.model.state_dict()
    x1, x2 = map(torch.from_numpy, (found.data.hospital_test, found.data.device_test))
    found.model.load_state_dict(state)
    told = (found.model(x1, x2)[:, 0] > 0).long().numpy()
    assert SplitMetrics(found)(state)["utility"] == normalised_utility(found.data.payoffs_test, told)
    assert "utility" not in SplitMetrics(dealt())(dealt().model.state_dict())


# Weights of classes


@pytest.mark.parametrize(("stated", "expected"), [("balanced", (24 / 42, 24 / 6)), ("0.5,3", (0.5, 3.0))])
def test_classes_weigh_in_every_party_s_loss_and_in_the_training_loss(
    stated: str, expected: tuple[float, float]
) -> None:
    found = dealt(**SITES, **{"class-weights": stated})
    assert found.class_weights == pytest.approx(expected)
    logits, y = torch.tensor([[0.3], [-0.2]]), torch.tensor([0, 1])
    parties = [found.party(partition) for partition in range(8)]
    for party in parties:
        assert torch.equal(party.loss(logits, y), split_loss(logits, y) * torch.tensor(found.class_weights))
    # One object, or parties would not be worked on together.
    assert len({id(party.loss) for party in parties}) == 1
    state, data, rows = found.model.state_dict(), found.data, found.people
    logits = found.model(
        torch.from_numpy(data.hospital_train[rows]), torch.from_numpy(data.device_train[rows])
    )
    y = torch.from_numpy(data.y_train[rows])
    due = (split_loss(logits.double(), y) * torch.tensor(found.class_weights).double()[y]).mean().item()
    told, plain = SplitMetrics(found)(state), SplitMetrics(dealt(**SITES))(state)
    assert told["loss"] == pytest.approx(due)
    assert told["test-loss"] == plain["test-loss"]


def test_weights_of_other_classes_than_there_are_are_named() -> None:
    with pytest.raises(
        ValueError, match="class-weights must be one number for each of 2 classes, got '1,2,3'"
    ):
        dealt(**{"class-weights": "1,2,3"})


# Metrics


def test_metrics_are_of_the_test_set_and_the_loss_of_the_training_set() -> None:
    found = dealt()
    told = SplitMetrics(found)(found.model.state_dict())
    data, rows = found.data, found.people
    test = evaluate_split(
        found.model, *map(torch.from_numpy, (data.hospital_test, data.device_test, data.y_test))
    )
    parts = (data.hospital_train[rows], data.device_train[rows], data.y_train[rows])
    assert told["loss"] == evaluate_split(found.model, *map(torch.from_numpy, parts)).loss
    assert told["test-loss"] == test.loss
    assert (told["auc"], told["precision"], told["recall"], told["f1"]) == (
        test.auc,
        test.precision,
        test.recall,
        test.f1,
    )


# Runs of the app


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    return partial(CASE.run, tmp_path)  # type: ignore[return-value]


def test_a_device_each_and_an_edge_for_all_end_alike(run: Run) -> None:
    edges = run()
    devices = run(layout="devices", **{"num-clients": 22})
    assert [one["central"] for one in devices] == [one["central"] for one in edges]
    assert [one["bits"] for one in devices] == [one["bits"] for one in edges]


def test_merged_tdcd_runs_with_two_nodes_and_is_charged_for_raw_data(run: Run) -> None:
    plain = {"method": "tdcd", "tdcd": "merged", "num-clients": 2}
    cheap, charged = run(**plain), run(**plain, **{"raw-bytes-per-group": 1000.0, "raw-seconds": 9.0})
    assert charged[-1]["bits"] - cheap[-1]["bits"] == 2 * 8000
    assert charged[-1]["sim_seconds"] - cheap[-1]["sim_seconds"] == pytest.approx(9.0)
    assert charged[-1]["central"] == cheap[-1]["central"]


def test_noise_is_told_with_its_epsilon(run: Run) -> None:
    noise = {"clip": 1.0, "noise-multiplier": 2.0}
    told = run(**noise)[-1]["train"]
    assert told["epsilon"] == float("inf")
    assert told["unprotected-uploads"] == 1
    uploads = {"upload-clip": 0.05, "upload-noise-multiplier": 20.0}
    first, last = (run(**uploads)[k]["train"] for k in (1, -1))
    assert 0 < first["epsilon"] < last["epsilon"] < float("inf")
    assert not any(key.startswith("unprotected") for key in last)
    seeded = run(**uploads, **{"noise-source": "seed"})[-1]["train"]
    assert seeded["epsilon"] == float("inf")
    assert seeded["unprotected-seeded-noise"] == 1


def test_an_observing_run_tells_the_constants_and_trains_as_without(run: Run) -> None:
    plain, observed = run(), run(adaptive="observe", **{"probe-steps": 2, "probe-batches": 2})
    assert {"rho", "delta-g", "F0", "gradient2"} <= observed[1]["train"].keys()
    assert [one["central"] for one in observed] == [one["central"] for one in plain]


def test_an_adaptive_run_ends_with_the_iterations_that_it_was_planned_for(run: Run) -> None:
    rounds = run(adaptive="strategy2+3", iterations=40, **{"probe-steps": 2, "probe-batches": 2})
    P = rounds[1]["train"]["P"]
    assert rounds[1]["train"]["Q"] == P
    assert 40 <= rounds[-1]["iterations"] < 40 + P
    assert len(rounds) - 1 == -(-40 // P)


def test_batches_are_held_against_rules_before_the_run() -> None:
    devices = {"layout": "devices", "patients-per-group": 20, "num-clients": 84}
    read = settings.read({**CASE.defaults, **devices, "device-aggregation": "krum(1)"})
    says = r"must be a rule of at most 4 models, the smallest batch, and 'krum\(1\)' needs 5"
    with pytest.raises(SettingsError, match=says):
        settings.check_size(read, deal(read.run_config))
