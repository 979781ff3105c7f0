"""HSGD's server on the toy of the golden table and on a small network: numbers, costs, privacy, resume."""

import json
import math
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles.hsgd import Group, Theta, merged
from tests.oracles.hsgd import run as oracle
from tests.oracles.test_hsgd_oracle import (
    FINALS,
    START,
    TOLERANCE,
    TOY,
    ScalarModel,
    flat,
    network,
)
from tests.strategies.hsgd.nodes import Parties, Spy, record_of, run, theta_of

from hedgerow.sim import flower_identity
from hedgerow.strategies import HSGD, EmbeddingNoise, ModelledSystem, UploadNoise
from hedgerow.strategies.hsgd.exchange import batch_size
from hedgerow.strategies.hsgd.privacy import RecordExposure
from hedgerow.strategies.hsgd.theory import (
    MethodName,
    Sizes,
    paper_bytes,
    round_parts,
    round_seconds,
    traffic,
)
from hedgerow.wire import gaussian_epsilon

LAYOUTS = pytest.mark.parametrize("edges", [False, True], ids=["devices", "edges"])


def toy(method: str = "hsgd", *, edges: bool = False, **options: Any) -> Parties:
    groups = merged(TOY) if "tdcd" in method else TOY
    return Parties(ScalarModel(), groups, edges, **options)


def hsgd(parties: Parties, P: int = 1, Q: int = 1, **options: Any) -> HSGD:
    defaults: dict[str, Any] = {"learning_rate": 0.1, "min_available_nodes": len(parties.parties)}
    return HSGD(global_interval=P, local_interval=Q, **{**defaults, **options})


# A network with random data, uneven groups, sampled devices and a schedule.


def network_parties(seed: int, *, edges: bool = False, dtype: str = "float64") -> tuple[Parties, Theta]:
    model, start, groups = network(seed)
    return Parties(model, groups, edges, dtype), start


def test_single_precision_stays_single_on_the_wire() -> None:
    parties = toy(dtype="float32")
    ended, _, grid = run(hsgd(parties, 4, 2), parties, START, 1)
    kinds = {
        array.dtype
        for _, _, content in grid.sent
        for r in content.array_records.values()
        for array in r.values()
    }
    assert kinds == {"float32"}
    assert ended == pytest.approx(FINALS[8][4], rel=1e-5)


# Draws


def test_draws_depend_neither_on_the_global_interval_nor_on_the_layout() -> None:
    seen = []
    for P, edges in ((2, False), (4, False), (8, True)):
        parties, start = network_parties(5, edges=edges)
        run(hsgd(parties, P, 2, participation=0.5, seed=4), parties, start, 8 // P)
        seen.append(
            {
                (p, t): ids
                for kind, role, p, t, ids in parties.trace
                if (kind, role) == ("exchange", "hospital")
            }
        )
    assert seen[0] == seen[1] == seen[2]


def test_the_batch_changes_at_local_intervals_and_of_pairs_at_rounds() -> None:
    for method, changes in (("hsgd", 6), ("jfl", 2)):
        parties, start = network_parties(6, edges=True)
        run(hsgd(parties, 6, 2, method=method, participation=0.3, seed=2), parties, start, 2)
        batches = [ids for kind, _, p, _, ids in parties.trace if kind == "exchange" and p == 2]
        assert len(batches) == 6
        assert len({tuple(ids) for ids in batches}) == changes


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 300), st.integers(1, 300))
def test_a_share_of_the_people_is_that_many(part: int, size: int) -> None:
    part = min(part, size)
    assert batch_size(part / size, size) == part
    assert batch_size(1e-9, size) == 1


# Costs

LINKS = ("device->edge", "edge->device", "edge->hospital", "hospital->edge")
CLOUD = ("hospital->cloud", "cloud->hospital", "edge->cloud", "cloud->edge")


def sizes_of(parties: Parties, start: Theta, alpha: float) -> list[Sizes]:
    lengths = (*map(len, start), *parties.lengths)
    return [Sizes(*lengths, batch_size(alpha, len(g.y))) for g in parties.groups]


@LAYOUTS
@pytest.mark.parametrize("method", ["hsgd", "c-hsgd", "tdcd", "c-tdcd"])
def test_what_is_booked_is_the_closed_form(method: str, edges: bool) -> None:
    parties, start = network_parties(7, edges=edges, dtype="float32")
    options: dict[str, Any] = {"aggregate": False} if "tdcd" in method else {}
    strategy = hsgd(parties, 4, 2, method=method, participation=0.5, **options)
    run(strategy, parties, start, 2)
    sizes = sizes_of(parties, start, 0.5)
    booked = {link: entry.payload_bytes for link, entry in strategy.ledger.by_link().items()}
    forms = [traffic(one, P=4, Q=2, T=8, compressed=method.startswith("c-")) for one in sizes]
    for link in LINKS + (CLOUD if "hsgd" in method else ()):
        assert booked[link] == sum(form[link] for form in forms)
    assert "tdcd" not in method or not set(CLOUD) & set(booked)
    nominal = sum(paper_bytes(one, P=4, Q=2, T=8, method=method) for one in sizes)
    assert strategy.ledger.total().nominal_bits == 8 * nominal


@LAYOUTS
def test_pairs_are_booked_as_the_paper_would_count_them(edges: bool) -> None:
    parties, start = network_parties(7, edges=edges, dtype="float32")
    strategy = hsgd(parties, 4, 2, method="jfl", participation=0.5)
    run(strategy, parties, start, 2)
    nominal = sum(paper_bytes(one, P=4, Q=2, T=8, method="jfl") for one in sizes_of(parties, start, 0.5))
    assert strategy.ledger.total().nominal_bits == 8 * nominal


def test_a_merged_group_is_counted_for_each_that_it_was() -> None:
    parties, start = network_parties(8, edges=True, dtype="float32")
    K = 8
    whole = Group(1.0, *(np.concatenate([g[i] for g in parties.groups])[: 3 * K] for i in (1, 2, 3)))
    whole_group = Parties(parties.model, [whole], True, "float32")
    strategy = hsgd(
        whole_group,
        4,
        2,
        method="tdcd",
        system=ModelledSystem(original_groups=3, raw_bytes=1000.0, raw_seconds=7.0),
    )
    run(strategy, whole_group, start, 1)
    each = Sizes(*map(len, start), *parties.lengths, K)
    per_group = paper_bytes(each, P=4, Q=2, T=4, method="tdcd", raw_bytes=1000.0)
    assert strategy.ledger.total().nominal_bits == 8 * 3 * per_group
    together = Sizes(*map(len, start), *parties.lengths, 3 * K)
    parts = round_parts(together, method=MethodName.TDCD)
    seconds = 7.0 + round_seconds(parts, P=4, Q=2, compute_seconds=0.0)
    assert strategy.federation.clock.seconds == pytest.approx(seconds)


def test_the_clock_is_the_slowest_groups() -> None:
    parties, start = network_parties(9)
    strategy = hsgd(parties, 4, 2, system=ModelledSystem(0.05))
    run(strategy, parties, start, 3)
    seconds = max(
        3 * round_seconds(round_parts(one), P=4, Q=2, compute_seconds=0.05)
        for one in sizes_of(parties, start, 1.0)
    )
    assert strategy.federation.clock.seconds == pytest.approx(seconds)


def test_an_interval_takes_two_messages_a_party() -> None:
    parties = toy()
    _, ends, _ = run(hsgd(parties, 4, 2), parties, START, 1)
    assert (ends[-1].sent, ends[-1].accepted) == (24, 24)
    assert ends[-1].train["iterations"] == ends[-1].iterations == 4
    assert {key: ends[-1].train[key] for key in ("P", "Q", "eta", "groups", "lost-groups")} == {
        "P": 4, "Q": 2, "eta": 0.1, "groups": 2, "lost-groups": 0,
    }  # fmt: skip


def test_the_hospitals_loss_is_told() -> None:
    parties = toy()
    _, ends, _ = run(hsgd(parties), parties, START, 2)
    assert [end.train["loss"] for end in ends[1:]] == pytest.approx([0.4325, 0.3556094348], abs=TOLERANCE)


# Privacy


@LAYOUTS
@pytest.mark.parametrize("method", ["hsgd", "jfl"])
def test_a_party_is_sent_no_more_than_it_may_see(method: str, edges: bool) -> None:
    parties, start = network_parties(10, edges=edges)
    _, _, grid = run(hsgd(parties, 4, 2, method=method, participation=0.5), parties, start, 2)
    allowed = {
        ("train.exchange", "hospital"): {"head", "hospital"},
        ("train.exchange", "device"): {"device"},
        ("train.exchange", "edge"): {"device"},
        ("train.update", "hospital"): {"zeta2"},
        ("train.update", "device"): {"head", "zeta1"},
        ("train.update", "edge"): {"head", "zeta1"},
    }
    for kind, partition, content in grid.sent:
        role = parties.parties[partition].role
        names = {key for record in content.array_records.values() for key in record}
        assert names <= allowed.get((kind, role), set())
        if (kind, role) == ("train.update", "device"):
            assert content["arrays"]["zeta1"].shape == (1, parties.lengths[0])
    # A device tells one row and its model, and no more.
    told = {
        (key, array.numpy().size)
        for _, partition, content in grid.replies
        for record in content.array_records.values()
        for key, array in record.items()
        if parties.parties[partition].role == "device"
    }
    assert told <= {("zeta2", parties.lengths[1]), ("device", len(start.device))}


def test_a_device_is_sent_its_own_row_alone() -> None:
    parties, start = network_parties(11)
    _, _, grid = run(hsgd(parties, 1, 1), parties, start, 1)
    rows = {p: c["arrays"]["zeta1"].numpy() for k, p, c in grid.sent if k == "train.update" and p >= 3}
    whole = np.concatenate([parties.model.encode1(start.hospital, g.x1) for g in parties.groups])
    assert np.concatenate([rows[p] for p in sorted(rows)]) == pytest.approx(whole, rel=1e-12)


def test_noise_is_asked_for_and_accounted_exactly() -> None:
    parties = toy()
    noise = EmbeddingNoise(1.5, 0.01, 1e-6, "seed")
    _, ends, grid = run(hsgd(parties, 2, 1, noise=noise, seed=6), parties, START, 3)
    configs = [content["config"] for kind, _, content in grid.sent if kind == "train.exchange"]
    told = {(c["clip"], c["noise-multiplier"], c["noise-source"], c["seed"]) for c in configs}
    assert told == {(1.5, 0.01, "seed", 6)}
    assert ends[-1].train["encodings-released"] == 12
    assert ends[-1].train["uploads-released"] == 0
    assert ends[-1].train["epsilon"] == math.inf


def exposure(**how: Any) -> RecordExposure:
    """Return the account of encodings with a multiplier of 4 and uploads with one of 2."""
    return RecordExposure(**{"noise": EmbeddingNoise(1.0, 4.0), "uploads": UploadNoise(1.0, 2.0), **how})


def test_the_account_is_of_the_person_of_whom_most_was_told_and_composes_all_releases() -> None:
    account = exposure()
    account.exchange({0: ["a", "b"]}, starts=True)
    account.exchange({0: ["a"], 1: ["a"]}, starts=True)
    account.update(0, ("a", "b"), hosted=False, pairs=False, ends=True)
    told = account.report()
    assert (told.encodings, told.uploads, told.unprotected) == (4, 2, ())
    assert told.epsilon == gaussian_epsilon((4 * (2 / 4) ** 2 + 2 * (2 / 2) ** 2) ** 0.5, 1e-5)
    assert exposure().report().epsilon == 0
    again = exposure()
    again.load_state_dict(json.loads(json.dumps(account.state_dict())))
    resumed = again.report()
    assert (resumed.encodings, resumed.uploads, resumed.unprotected) == (4, 2, ("lost-rounds",))


@pytest.mark.parametrize(
    ("hosted", "pairs", "expected"),
    # Of a device: its own two, and those of the others after it trained; and what the hospital uploads.
    [(False, False, 2 + 2 + 1), (False, True, 2 + 1), (True, False, 2), (True, True, 2)],
)
def test_what_others_upload_after_a_person_trained_counts_for_that_person(
    hosted: bool, pairs: bool, expected: int
) -> None:
    account = exposure()
    for ids, ends in ((("a", "b"), False), (("a", "c", "d"), True)):
        account.update(0, ids, hosted=hosted, pairs=pairs, ends=ends)
    assert account.report().uploads == expected
    # In the next round all begin from what the server told them.
    assert list(account.opened(None)) == []
    account.update(0, ("e",), hosted=hosted, pairs=pairs, ends=True)
    assert account.report().uploads == expected


def test_epsilon_is_infinite_with_its_reason_where_a_path_is_open() -> None:
    def account(**how: Any) -> RecordExposure:
        made = exposure(**how)
        made.update(0, ("a",), hosted=True, pairs=False, ends=True)
        return made

    assert account(uploads=None).report().unprotected == ("uploads",)
    assert account(noise=None).report().unprotected == ("encodings",)
    assert account(noise=None, hidden=True).report().unprotected == ()
    seeded = UploadNoise(1.0, 2.0, source="seed")
    assert account(uploads=seeded).report().unprotected == ("seeded-noise",)
    between = account()
    between.exchange({0: ["a"]}, starts=False)
    told = between.report()
    assert told.metrics()["epsilon"] == math.inf
    assert told.metrics()["unprotected-heads"] == 1
    assert "epsilon = infinity: heads are sent without noise" in str(told)


def test_a_resumed_run_promises_nothing_for_nobody_knows_what_was_released_after_its_checkpoint() -> None:
    parties = toy(edges=True)

    def strategy(source: Any) -> HSGD:
        both = {"noise": EmbeddingNoise(1.0, 9.0, source=source)}
        return hsgd(parties, 2, 2, **both, upload_noise=UploadNoise(1.0, 9.0, source=source))

    for source, reason in (("entropy", "lost-rounds"), ("seed", "seeded-noise")):
        stopped, resumed = strategy(source), strategy(source)
        run(stopped, parties, START, 1)
        resumed.load_state_dict(stopped.state_dict())
        _, ends, _ = run(resumed, parties, START, 2)
        told = ends[-1].train
        assert told["uploads-released"] == 4
        assert told["epsilon"] == math.inf
        assert {key for key in told if key.startswith("unprotected")} == {f"unprotected-{reason}"}


@pytest.mark.parametrize(("Q", "reasons"), [(1, {"heads"}), (2, set())])
def test_heads_between_aggregations_are_a_path_of_a_plain_run_alone(Q: int, reasons: set[str]) -> None:
    parties, both = (
        toy(edges=True),
        {"noise": EmbeddingNoise(1.0, 9.0), "upload_noise": UploadNoise(1.0, 9.0)},
    )
    _, ends, _ = run(hsgd(parties, 2, Q, **both), parties, START, 1)
    told = ends[-1].train
    assert {key.removeprefix("unprotected-") for key in told if key.startswith("unprotected")} == reasons
    assert (told["epsilon"] == math.inf) == bool(reasons)


# Groups kept apart


@LAYOUTS
def test_groups_kept_apart_are_runs_of_their_own(edges: bool) -> None:
    parties, start = network_parties(14, edges=edges)
    strategy = hsgd(parties, 4, 2, method="tdcd", aggregate=False)
    shown, _, _ = run(strategy, parties, start, 2)
    own = [theta_of(model) for model in strategy.models()]
    for m, group in enumerate(parties.groups):
        alone = [group._replace(weight=1.0)]
        plain = oracle(parties.model, start, alone, P=4, Q=2, T=8, eta=lambda _: 0.1)
        assert own[m] == pytest.approx(flat(plain.final), abs=1e-12)
    assert shown == pytest.approx(np.average(own, axis=0, weights=[g.weight for g in parties.groups]))


# What is refused


@pytest.mark.parametrize("key", ["tail.weight", "head.counter"])
def test_arrays_of_no_split_model_are_refused(key: str) -> None:
    arrays = record_of(START)
    arrays[key] = ArrayRecord([np.arange(2)])["0"]
    parties = toy()
    with flower_identity(1), pytest.raises(ValueError, match=key):
        hsgd(parties).start(Spy(parties), arrays, num_rounds=1)


def test_the_train_config_reaches_every_party() -> None:
    parties = toy()
    grid = Spy(parties)
    with flower_identity(1):
        hsgd(parties).start(grid, record_of(START), num_rounds=1, train_config=ConfigRecord({"tag": "x"}))
    contents: list[RecordDict] = [c for kind, _, c in grid.sent if kind.startswith("train")]
    assert all(content["config"]["tag"] == "x" for content in contents)


def test_a_second_start_is_a_run_of_its_own() -> None:
    parties = toy()
    strategy = hsgd(parties, 2, 2)
    one, _, _ = run(strategy, parties, START, 2)
    other, _, _ = run(strategy, parties, START, 2)
    assert one.tobytes() == other.tobytes()
