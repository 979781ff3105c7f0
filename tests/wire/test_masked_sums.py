"""Masked sums without any network: rounding, masks, dropouts, and what a server cannot learn."""

from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from hedgerow.wire import PayloadError, default_neighbours, lazy_array, survivors_needed
from hedgerow.wire.masked_sums import (
    SEED_BYTES,
    Grid,
    MaskedSum,
    SumPlan,
    Unmasking,
    connected_survivors,
    lost_neighbours,
    masked,
    pair_seed,
    revealed,
    told_content,
)

ABOUT = bytes(range(32))


def plan_of(n: int, **parts: object) -> SumPlan:
    members = tuple(3 * i + 1 for i in range(n))
    plan = SumPlan(
        number=1,
        members=members,
        introductions=tuple(bytes([i]) * 64 for i in range(n)),
        threshold=survivors_needed(n),
        neighbours=default_neighbours(n),
        clip=1.0,
        max_weight=1.0,
        weighted_by="num-examples",
    )
    return replace(plan, **parts)  # type: ignore[arg-type]


def secret_of(u: int, v: int) -> bytes:
    return bytes([min(u, v), max(u, v)]) * 16


def masks(plan: SumPlan, numbers: dict[int, np.ndarray], about: bytes = ABOUT) -> dict[int, MaskedSum]:
    graph = plan.graph(about)
    return {
        u: masked(plan, u, numbers[u], {v: pair_seed(secret_of(u, v), about) for v in graph[u]})
        for u in plan.members
    }


def solved(plan: SumPlan, made: dict[int, MaskedSum], arrived: list[int], answering: list[int]) -> Unmasking:
    graph = plan.graph(ABOUT)
    alive = connected_survivors(plan, graph, arrived)
    kept = {u: made[u] for u in alive}
    solving = Unmasking(
        plan,
        ABOUT,
        {u: one.words for u, one in kept.items()},
        {u: one.commitments for u, one in kept.items()},
    )
    for w in (w for w in alive if w in answering):
        told = revealed(plan, w, graph, alive, {v: kept[v].shares[w] for v in alive if v != w})
        solving.take(w, solving.check(w, told))
    return solving


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 20, 50])
@pytest.mark.parametrize("fate", ["all", "lost before", "lost after"])
def test_the_sum_is_that_of_the_survivors_to_the_last_step(n: int, fate: str) -> None:
    rng = np.random.default_rng(n)
    # One member alone has nobody to hold a share: it is a sum in arithmetic only.
    plan = plan_of(n)
    gone = rng.permutation(plan.members)[: n - survivors_needed(n)].tolist() if n > 2 else []
    if fate != "all" and not gone:
        pytest.skip("nobody may be lost of so few")
    numbers = {u: rng.integers(0, 2**32, 300, dtype=np.uint32) for u in plan.members}
    made = masks(plan, numbers)
    arrived = [u for u in plan.members if fate != "lost before" or u not in gone]
    answering = [u for u in plan.members if u not in gone or fate == "all"]
    if n == 1:
        # Its mask is its own: 16 bytes more than a sum of more takes off.
        assert not np.array_equal(made[1].words, numbers[1])
        return
    solving = solved(plan, made, arrived, answering)
    total, bad = solving.total()
    assert bad == []
    assert total is not None
    expected = sum((numbers[u] for u in solving.survivors), np.zeros(300, np.uint32))
    np.testing.assert_array_equal(total, expected)
    assert len(solving.survivors) >= len(arrived) - 1


def test_below_the_threshold_nothing_is_solved_and_an_answer_of_another_size_is_refused() -> None:
    plan = plan_of(10)
    made = masks(plan, {u: np.arange(5, dtype=np.uint32) for u in plan.members})
    solving = solved(plan, made, list(plan.members), list(plan.members)[: plan.threshold - 1])
    total, bad = solving.total()
    assert total is None
    assert bad
    with pytest.raises(PayloadError, match="bad shares"):
        solving.check(plan.members[0], bytes(7))


def test_lying_about_shares_is_noticed_and_the_others_suffice() -> None:
    plan = plan_of(10)
    numbers = {u: np.full(5, u, np.uint32) for u in plan.members}
    made = masks(plan, numbers)
    alive, graph = plan.members, plan.graph(ABOUT)
    solving = Unmasking(
        plan, ABOUT, {u: m.words for u, m in made.items()}, {u: m.commitments for u, m in made.items()}
    )
    for w in alive:
        told = revealed(plan, w, graph, alive, {v: made[v].shares[w] for v in alive if v != w})
        if w == alive[4]:
            told = bytes([1, *([7] * SEED_BYTES)]) * (len(alive) - 1)
        solving.take(w, solving.check(w, told))
    total, bad = solving.total()
    assert bad == []
    np.testing.assert_array_equal(total, np.full(5, sum(alive), np.uint32))


# What is hidden


def test_a_masked_vector_is_uniform_and_says_nothing_of_what_is_in_it() -> None:
    plan = plan_of(5)
    zeros = masks(plan, {u: np.zeros(65_536, np.uint32) for u in plan.members})
    for one in zeros.values():
        for byte in one.words.view(np.uint8).reshape(-1, 4).T:
            counts = np.bincount(byte, minlength=256)
            assert np.sum((counts - 256.0) ** 2 / 256.0) < 400  # 255 degrees of freedom: once in 2 10^8.
    # With the difference of any two members' vectors it is the same: no mask is used twice.
    a, b = (zeros[u].words for u in plan.members[:2])
    assert np.bincount((a - b) >> 24, minlength=256).min() > 0


def test_what_members_were_told_is_in_their_masks_and_without_common_ones_there_is_no_sum() -> None:
    plan = plan_of(4)
    numbers = {u: np.zeros(1000, np.uint32) for u in plan.members}
    honest, other = masks(plan, numbers), masks(plan, numbers, bytes(32))
    assert all(np.mean(honest[u].words == other[u].words) < 0.01 for u in plan.members)
    mixed = {**honest, plan.members[0]: other[plan.members[0]]}
    solving = solved(plan, mixed, list(plan.members), list(plan.members))
    total, _ = solving.total()
    assert total is None or np.mean(total == 0) < 0.01


def test_no_list_of_survivors_takes_a_members_own_mask_and_those_with_its_neighbours_off() -> None:
    plan = plan_of(50)
    graph, target = plan.graph(ABOUT), plan.members[0]
    alive = tuple(u for u in plan.members if u not in graph[target])
    # All neighbours lost: with the target's own seed its numbers would lie open.
    assert len(plan.members) - len(alive) == plan.neighbours
    opened = {v: bytes(SEED_BYTES * (1 + plan.neighbours)) for v in plan.members}
    with pytest.raises(ValueError, match="neighbours of a survivor"):
        revealed(replace(plan, threshold=len(alive)), alive[1], graph, alive, opened)
    assert target not in connected_survivors(plan, graph, alive)


@pytest.mark.parametrize("n", [4, 9, 16, 30, 50])
def test_a_server_with_two_lists_gets_too_few_shares_of_one_kind(n: int) -> None:
    # Each member answers once. To open the target all seeds with its neighbours and its own are needed, each
    # ``needed`` times; count what members can tell at most over all lists that they accept.
    plan = plan_of(n)
    own = n - 1  # All others say that it survived: else its own seed is safe with the fewer that do.
    pairs = own * min(plan.most_lost, n - plan.threshold)
    assert 2 * plan.needed > n - 1
    assert pairs < plan.neighbours * plan.needed


@pytest.mark.parametrize(
    ("survivors", "match"),
    [
        ([1, 4, 7, 13], "not among"),
        ([4, 1, 7, 10, 13], "ascending"),
        ([1, 4, 10], "must have at least 4"),
        ([10] * 5, "asc"),
    ],
)
def test_hostile_lists_are_refused(survivors: list[int], match: str) -> None:
    plan = plan_of(5)
    with pytest.raises(ValueError, match=match):
        revealed(plan, 10, plan.graph(ABOUT), survivors, {})


def test_of_the_lost_nothing_is_told_but_what_they_share_with_survivors() -> None:
    plan = plan_of(6)
    made = masks(plan, {u: np.zeros(2, np.uint32) for u in plan.members})
    graph, lost = plan.graph(ABOUT), plan.members[2]
    alive = tuple(u for u in plan.members if u != lost)
    own = alive[0]
    told = revealed(plan, own, graph, alive, {v: made[v].shares[own] for v in plan.members if v != own})
    of_the_lost = made[lost].shares[own]
    pieces = {of_the_lost[i : i + SEED_BYTES] for i in range(0, len(of_the_lost), SEED_BYTES)}
    assert not any(piece in told for piece in pieces)
    # Of each survivor: its own seed's share, and the one with who was lost.
    assert len(told) == (len(alive) - 1) * (1 + 2 * SEED_BYTES)


def test_what_a_server_sends_is_in_every_key() -> None:
    content = RecordDict(
        {
            "arrays": ArrayRecord({"w": lazy_array(np.zeros(3))}),
            "config": ConfigRecord({"learning-rate": 0.1}),
        }
    )
    other = RecordDict({**content, "arrays": ArrayRecord({"w": lazy_array(np.array([0.0, 0.0, 1e-9]))})})
    slower = RecordDict({**content, "config": ConfigRecord({"learning-rate": 0.2})})
    plan = plan_of(4)
    abouts = {plan.about(told_content(one)) for one in (content, other, slower)}
    abouts |= {replace(plan, number=2).about(told_content(content)), plan_of(5).about(told_content(content))}
    assert len(abouts) == 5


# Graphs and plans


@pytest.mark.parametrize("n", [2, 3, 10, 17, 50, 255])
def test_the_graph_is_regular_and_symmetric(n: int) -> None:
    plan = plan_of(n)
    graph = plan.graph(ABOUT)
    assert {len(set(others)) for others in graph.values()} == {plan.neighbours}
    assert all(u in graph[v] and u != v for u, others in graph.items() for v in others)


def test_survivors_are_more_than_two_thirds() -> None:
    assert all(3 * survivors_needed(n) > 2 * n or survivors_needed(n) == n for n in range(1, 256))
    assert [survivors_needed(n) for n in (3, 4, 6, 7, 9, 10, 50)] == [3, 4, 5, 6, 7, 8, 34]


def test_those_whose_neighbours_are_lost_are_left_out_and_the_others_accept_the_list() -> None:
    plan = plan_of(100)
    graph, target = plan.graph(ABOUT), plan.members[3]
    # Those nearest on the circle, who are neighbours of most of its neighbours.
    near = sorted(graph[target], key=lambda u: -len(set(graph[u]) & set(graph[target])))
    gone = near[: plan.most_lost + 1]
    alive = connected_survivors(plan, graph, [u for u in plan.members if u not in gone])
    assert set(plan.members) - set(alive) == {*gone, target}
    assert max(map(len, lost_neighbours(graph, alive).values())) <= plan.most_lost
    assert revealed(plan, alive[0], graph, alive, {})


def test_a_plan_travels() -> None:
    plan = plan_of(7, metrics=("train-loss", "a"))
    assert SumPlan.of(plan.record()) == plan
    assert SumPlan.unpacked(plan.packed()) == plan


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("members", [1, 1, 7]), ("members", [7, 4, 1]), ("members", []), ("members", [1.0, 2.0, 3.0]),
        ("introductions", b"x" * 191), ("introductions", b"x" * 192), ("threshold", 4), ("threshold", 0),
        ("neighbours", 3), ("neighbours", -2), ("clip", 0.0), ("clip", float("inf")), ("clip", 1),
        ("max-weight", -1.0), ("number", 0), ("weighted-by", 3), ("metrics", "\n".join(map(str, range(17)))),
    ],
)  # fmt: skip
def test_records_that_are_no_plan_are_refused(key: str, value: object) -> None:
    record = ConfigRecord({**plan_of(3).record(), key: value})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="masked sum"):
        SumPlan.of(record)


# Numbers


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 255), st.floats(1e-3, 1e4), st.integers(0, 2**32))
def test_a_mean_of_any_survivors_is_within_the_stated_bound(n: int, clip: float, seed: int) -> None:
    rng, grid = np.random.default_rng(seed), Grid(n)
    survivors = int(rng.integers(1, n + 1))
    shares = rng.uniform(0.01, 1.0, survivors)
    values = rng.uniform(-clip, clip, (survivors, 40))
    clips = np.append(np.full(40, clip), 1.0)
    coded = [
        grid.encode(np.append(v, 1.0), clips, s, rng.random(41)) for v, s in zip(values, shares, strict=True)
    ]
    told = grid.decode(np.sum(coded, axis=0, dtype=np.uint32), clips)
    mean = shares @ values / shares.sum()
    bound = grid.error(clip, survivors, shares.sum())
    assert np.abs(told[:-1] / told[-1] - mean).max() <= bound * (1 + 1e-9)
    # The bound is no excuse: for equal weights it is 2 n R / 2^31.
    assert grid.error(clip, n, n) <= 2 * n * clip / 2**31 * 1.01


def test_a_value_far_below_a_step_is_in_the_sum_in_the_mean() -> None:
    rng, grid, clip = np.random.default_rng(0), Grid(5), 8.0
    step = clip / grid.largest
    values = np.array([0.01, 0.3, -0.2]) * step
    rounds = [grid.decode(grid.encode(values, clip, 1.0, rng.random(3)), clip) for _ in range(20_000)]
    np.testing.assert_allclose(np.mean(rounds, axis=0), values, atol=4 * 0.5 * step / np.sqrt(20_000))
    assert not np.any(grid.encode(values, clip, 1.0).astype(np.int32))  # to the nearest, none of them is


@pytest.mark.parametrize("n", [1, 2, 3, 50, 254, 255])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_no_sum_wraps_at_the_ends_of_the_range(n: int, sign: float) -> None:
    grid = Grid(n)
    far = [grid.encode(np.array([sign * 1e30, sign * 3.0]), 3.0, 1.0) for _ in range(n)]
    told = grid.decode(np.sum(far, axis=0, dtype=np.uint32), 3.0)
    np.testing.assert_allclose(told, sign * 3.0 * n, rtol=1e-6)
    # One more would.
    more = grid.decode(np.sum([*far, *far[:1], *far[:1]], axis=0, dtype=np.uint32), 3.0)
    assert n > 250 or np.sign(more[0]) == -sign or n == 1
