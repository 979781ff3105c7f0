"""HSGD whose server sees sums alone: the plain run's model, who drops out when, and what can be read."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import RecordDict
from tests.strategies.hsgd.real_nodes import (
    FEATURES,
    PEOPLE,
    Server,
    World,
    arrays_of,
    devices,
    run,
    strategy,
)
from tests.strategies.hsgd.test_leaks import blind, parameters, read_features
from tests.strategies.summing import NOTHING, Loses, LossyGrid

from hedgerow.clients import hsgd_client
from hedgerow.strategies import PairingError, RoundEnd, SecureSum, TooFewRepliesError
from hedgerow.strategies.hsgd.means import RECOMMENDED_SUM_SIZE
from hedgerow.wire import MASKED, view
from hedgerow.wire.masked_sums import Grid

__all__ = ["devices"]

GROUPS = 3
LAYOUTS = pytest.mark.parametrize("layout", ["edges", "devices"])
WORLDS = {layout: World(layout, GROUPS) for layout in ("edges", "devices")}
# What rounding to the grid and the model's own precision move in a round at most.
NEAR = 4 * Grid(PEOPLE).error(8.0, PEOPLE, PEOPLE) + 3e-7
# Partitions: hospitals 0 to 2; then edges 3 to 5, or devices 3 to 26, the first eight of them of group 0.
FIRST = range(GROUPS, GROUPS + PEOPLE)


class Nodes(LossyGrid):
    """The suite's own nodes, whose answers can be lost."""

    def __init__(self, layout: str, loses: Loses = NOTHING, **options: Any) -> None:
        self.world = WORLDS[layout]
        app = hsgd_client(lambda context: self.world.parties[int(context.node_config["partition-id"])])
        super().__init__(len(self.world.parties), loses, app, strict=True, **options)


def ended(
    layout: str,
    loses: Loses = NOTHING,
    *,
    summed: bool | SecureSum = True,
    rounds: int = 1,
    nodes: dict[str, Any] | None = None,
    P: int = 2,
    Q: int = 1,
    **options: Any,
) -> tuple[np.ndarray, list[RoundEnd], Nodes]:
    grid = Nodes(layout, loses, **({} if nodes is None else nodes))
    hsgd = strategy(grid.world, P, Q, **{"sealed": True, "secure_sum": summed, **options})
    model, ends, _ = run(hsgd, grid.world, rounds, grid)  # type: ignore[arg-type]
    return model, ends, grid


@lru_cache
def honest(layout: str, summed: bool = False, **options: Any) -> tuple[np.ndarray, list[RoundEnd], Nodes]:
    return ended(layout, summed=summed, **options)


# The same model


@pytest.mark.parametrize(
    ("layout", "method"),
    [
        ("edges", "hsgd"),
        ("devices", "hsgd"),
        ("edges", "c-hsgd"),
        pytest.param("devices", "c-hsgd", marks=pytest.mark.slow),
    ],
)
def test_sums_end_at_the_plain_runs_model(layout: str, method: str) -> None:
    plain, _, _ = honest(layout, method=method)
    summed, (end,), _ = honest(layout, summed=True, method=method)
    assert np.abs(summed - plain).max() < NEAR
    assert (end.train["groups"], end.train["clipped"], end.rejected) == (GROUPS, 0.0, {})


@pytest.mark.parametrize(("layout", "P"), [("edges", 2), pytest.param("devices", 1, marks=pytest.mark.slow)])
def test_jfls_parties_average_their_pairs_themselves(layout: str, P: int) -> None:
    plain, _, _ = honest(layout, method="jfl", P=P)
    summed, _, grid = honest(layout, summed=True, method="jfl", P=P)
    assert np.abs(summed - plain).max() < NEAR
    uploads = [content for kind, _, content in grid.sent if kind == "train.upload"]
    assert all(array.ndim == 1 for content in uploads for array in arrays_of(content).values())


def test_groups_count_by_their_people() -> None:
    world = World("edges", GROUPS)
    for i in (2, 5):  # Half of a group left.
        one = world.parties[i]
        world.parties[i] = replace(one, ids=one.ids[:4], x=one.x[:4], y=one.y[:4])
    models = []
    for summed in (False, True):
        server = Server(world)
        hsgd = strategy(world, 2, 1, sealed=True, secure_sum=summed)
        models.append(run(hsgd, world, 1, server)[0])
    assert np.abs(models[1] - models[0]).max() < NEAR
    plans = [content["masked-sum"] for kind, _, content in server.sent if kind == "train.upload"]
    assert {(tuple(plan["members"]), plan["max-weight"]) for plan in plans} == {  # type: ignore[arg-type]
        ((0, 1, 2), float(PEOPLE)),
        ((3, 4, 5), float(PEOPLE)),
    }


@LAYOUTS
def test_devices_with_keys_and_guards_of_their_own_end_at_the_same_model(layout: str, devices: Path) -> None:
    summed, (end,), _ = ended(layout, Q=2)
    assert end.rejected == {}
    assert np.abs(summed - ended(layout, summed=False, Q=2)[0]).max() < NEAR


# Who drops out


def of(kind: str, *nodes: int, time: int | None = None) -> Loses:
    return lambda told, node, before: (
        (told, node in nodes) == (kind, True) and (time is None or before == time)
    )


@pytest.mark.parametrize("time", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_device_that_is_lost_in_the_wave_of_sums_is_as_one_that_is_lost_before(time: int) -> None:
    """In the first interval, and in the last, whose sums come with those of the hospitals."""
    plain, _, _ = ended("devices", of("train.update", 5, time=time), summed=False)
    for kind in ("train.update", "train.upload"):
        summed, (end,), _ = ended("devices", of(kind, 5, time=time))
        assert np.abs(summed - plain).max() < NEAR
        assert end.rejected == {"error 0": 1}


def test_a_device_whose_keys_or_shares_are_lost_costs_itself_at_most() -> None:
    plain, _, _ = honest("devices")
    summed, (end,), _ = ended("devices", of("query.sum_shares", 5))
    assert np.abs(summed - plain).max() < NEAR
    without, _, _ = ended("devices", of("train.update", 5), summed=False)
    summed, (end,), _ = ended("devices", of("query.sum_keys", 5))
    assert np.abs(summed - without).max() < NEAR
    assert end.rejected == {"no sum keys": 2}


def test_too_few_of_a_batch_cost_its_group_the_interval_alone() -> None:
    """Theta_2 of the group stays, as where all of its devices are silent; its hospital counts."""
    gone = [*FIRST][2:]
    plain, _, _ = ended("devices", of("train.update", *FIRST, time=1), summed=False)
    summed, (end,), _ = ended("devices", of("train.upload", *gone, time=1))
    assert np.abs(summed - plain).max() < NEAR
    assert end.rejected == {"error 0": 6, "sum below threshold": 2}
    assert end.train["groups"] == GROUPS


@pytest.mark.parametrize("kind", ["train.update", "train.upload", "query.sum_keys", "query.sum_shares"])
@pytest.mark.parametrize("node", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_with_three_hospitals_and_edges_a_lost_one_costs_a_try_of_the_round(kind: str, node: int) -> None:
    """A hospital or an edge that is back at the next try; with three in a sum all must be there."""
    plain, _, _ = honest("edges")
    tries = 1 if kind == "train.update" else 0  # Of two updates the second.
    summed, (end,), grid = ended("edges", of(kind, node, time=tries))
    assert np.abs(summed - plain).max() < NEAR
    starts = [p for k, p, c in grid.sent if k == "train.exchange" and p == 0 and "arrays" in c]
    assert len(starts) == 2
    assert end.train["groups"] == GROUPS


def test_a_round_whose_hospitals_have_no_sum_is_repeated_and_then_ends_the_run() -> None:
    with pytest.raises(TooFewRepliesError, match="sum below threshold"):
        ended("edges", of("train.upload", 1), max_repeats=1)


# Who is refused


@pytest.mark.parametrize("participation", [0.125, 0.25])
def test_a_device_alone_in_its_sum_is_refused_with_the_reason(participation: float) -> None:
    with pytest.raises(
        PairingError,
        match=r"3 \(min_sum_devices\) to 255 devices .*: a smaller sum reveals .*: for a single device",
    ):
        ended("devices", participation=participation)


def test_batches_of_few_devices_have_no_sum_unless_it_is_asked_for() -> None:
    with pytest.raises(
        PairingError, match=r"must have 16 \(min_sum_devices\) to 255 devices with secure_sum"
    ):
        ended("devices", min_sum_devices=RECOMMENDED_SUM_SIZE)
    # Hospitals and edges are no single person's: of them three are enough.
    assert ended("edges", min_sum_devices=RECOMMENDED_SUM_SIZE)[1][-1].rejected == {}


def test_jfls_devices_have_no_sums_within_a_round() -> None:
    with pytest.raises(PairingError, match=r"local_interval must be global_interval in .* secure_sum"):
        ended("devices", method="jfl")


def test_two_hospitals_have_no_sum() -> None:
    world = World("edges", 2)
    with pytest.raises(PairingError, match="groups must be at least 3 with secure_sum, got 2"):
        run(strategy(world, 2, 1, sealed=True, secure_sum=True), world, 1)


def test_an_owner_can_have_its_node_train_for_nothing_but_sums(tmp_path: Path) -> None:
    def guarded(run: int) -> dict[str, Any]:
        (tmp_path / f"{run}.toml").write_text(f'secure-sums = "required"\nledger = "{run}.jsonl"\n')
        own = {"policy": str(tmp_path / f"{run}.toml")}
        return {"node_configs": [{"partition-id": i, **(own if i == 1 else {})} for i in range(6)]}

    _, (end,), _ = ended("edges", nodes=guarded(1))
    assert end.rejected == {}
    _, (end,), grid = ended("edges", summed=False, nodes=guarded(2))
    assert (end.train["groups"], end.rejected) == (2, {"error 2": 2})
    _, (end,), grid = ended("edges", summed=False, sealed=False, nodes=guarded(3))
    assert end.train["groups"] == 2
    assert not any(partition == 1 for kind, partition, _ in grid.replies if kind.startswith("train"))


# What can be read


def masked(grid: Nodes) -> list[tuple[int, RecordDict, np.ndarray]]:
    """Return, of each upload, whose it is, what it was sent, and its masked numbers."""
    waiting: dict[int, list[RecordDict]] = {}
    for kind, i, content in grid.sent:
        if kind == "train.upload":
            waiting.setdefault(i, []).append(content)
    told = [(i, c) for kind, i, c in grid.replies if kind == "train.upload"]
    return [(i, waiting[i].pop(0), view(c.array_records[MASKED][MASKED])) for i, c in told]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    length = float(np.linalg.norm(a) * np.linalg.norm(b))
    return abs(float(a @ b)) / length if length else 0.0


def test_no_feature_of_a_device_can_be_read_from_what_it_uploads() -> None:
    """The attack of test_leaks.py, which reads the features of a plain run, sealed or not."""
    plain = honest("devices")[2]
    starts = {i: arrays_of(c) for kind, i, c in plain.sent if kind == "train.exchange" and i >= GROUPS}
    ends = {i: arrays_of(c) for kind, i, c in plain.replies if kind == "train.update" and i >= GROUPS}
    truth = {i: plain.world.parties[i].x[0].numpy() for i in starts}
    read = [cosine(read_features(starts[i]["device"], ends[i]["device"], "device"), truth[i]) for i in starts]
    assert np.mean(np.array(read) > 0.9999) > 0.8

    found = []
    for i, sent, words in masked(honest("devices", summed=True)[2]):
        if i >= GROUPS:
            before, change = arrays_of(sent)["device"], words.view(np.int32) * (8.0 / Grid(PEOPLE).largest)
            found.append(cosine(read_features(before, before + change[: len(before)], "device"), truth[i]))
    assert len(found) == 2 * GROUPS * PEOPLE
    assert np.mean(found) < blind(len(found), FEATURES[1]) + 4 * 0.25 / np.sqrt(len(found))


def read_of_sums(people: int, batch: int) -> float:
    """Return the share of those in the first sum of each group whom a unit of the mean tells."""
    world = World("devices", GROUPS, people)
    seen: list[tuple[list[str], np.ndarray, np.ndarray]] = []
    hsgd = strategy(world, 2, 1, sealed=True, secure_sum=True, participation=batch / people)
    server = Server(world)
    run(hsgd, world, 1, server)
    sent = [(i, c) for kind, i, c in server.sent if kind == "train.upload" and i >= GROUPS]
    batches = [c["config"]["ids"] for kind, i, c in server.sent if kind == "train.update" and i < GROUPS]
    # What the second exchange sends a group's devices is the mean of the first interval.
    later = [(i, c) for kind, i, c in server.sent if kind == "train.exchange" and i >= GROUPS]
    for m in range(GROUPS):
        before = next(arrays_of(c)["device"] for i, c in sent if world.parties[i].group == m)
        after = next(arrays_of(c)["device"] for i, c in later[::-1] if world.parties[i].group == m)
        seen.append((list(batches[m]), before, after))  # type: ignore[arg-type]
    told = [
        max(cosine(unit, world.x2[world.row(person)].numpy()) for unit in units(before, after)) > 0.9999
        for ids, before, after in seen
        for person in ids
    ]
    return float(np.mean(told))


def units(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return, of each unit of the first layer, the change of its weights over that of its bias."""
    start, end = (parameters("device", one.astype(np.float64)) for one in (before, after))
    weight, bias, *_ = start
    moved = (end[bias] - start[bias]).numpy()
    moved[moved == 0] = np.inf
    ratios: np.ndarray = (end[weight] - start[weight]).numpy() / moved[:, None]
    return ratios


def test_the_sum_of_a_small_batch_tells_of_who_alone_turned_a_unit_on() -> None:
    """What a sum does not hide, and how many people it takes here: it is whose the features are."""
    assert read_of_sums(8, 3) > 0.3
    assert read_of_sums(16, 16) == 0.0


def test_the_losses_and_models_of_single_parties_are_in_no_message() -> None:
    for layout in ("edges", "devices"):
        _, (end,), grid = honest(layout, summed=True)
        assert np.isfinite(end.train["loss"])
        told = [c for kind, _, c in grid.replies if kind == "train.update"]
        assert told
        assert all(set(c) == {"metrics"} and set(c["metrics"]) == {"num-examples"} for c in told)
        arrays = {key for kind, _, c in grid.replies for key in c.array_records}
        assert arrays == {MASKED}
