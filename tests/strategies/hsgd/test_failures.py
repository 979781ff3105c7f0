"""What HSGD's server does about parties that are silent, wrong or not paired, and what it refuses."""

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ConfigRecord, RecordDict
from tests.oracles.hsgd import Group
from tests.oracles.hsgd import run as oracle
from tests.oracles.test_hsgd_oracle import START, TOY, ScalarModel, flat, tenth
from tests.strategies.hsgd.nodes import Parties, Spy, run
from tests.strategies.hsgd.test_strategy import LAYOUTS, hsgd, toy

from hedgerow.sim.engine._compat import NodeInfo
from hedgerow.strategies import PairingError, Registry, TooFewRepliesError
from hedgerow.strategies.hsgd.membership import Introduction, introduction
from hedgerow.strategies.registry import Registered
from hedgerow.wire import PayloadError


class Silent:
    """Lets some partitions raise at some messages: (kind, partition, t)."""

    def __init__(self, *misses: tuple[str, int, int]) -> None:
        self.misses = set(misses)

    def __call__(self, kind: str, partition: int, t: int, reply: RecordDict) -> RecordDict:
        if (kind, partition, t) in self.misses:
            raise RuntimeError("silent")
        return reply


def run_without(
    *misses: tuple[str, int, int],
    P: int = 2,
    Q: int = 2,
    rounds: int = 1,
    edges: bool = False,
    **options: Any,
) -> tuple[np.ndarray, list[Any]]:
    parties = toy(options.get("method", "hsgd"), edges=edges, sabotage=Silent(*misses))
    ended, ends, _ = run(hsgd(parties, P, Q, **options), parties, START, rounds)
    return ended, ends


# Partitions of the toy: hospitals 0 and 1; devices 2, 3, 4 of the first and 5 of the second; or edges 2, 3.


def test_a_device_silent_before_the_swap_is_not_in_the_batch() -> None:
    ended, ends = run_without(("exchange", 3, 0))
    plain = oracle(
        ScalarModel(), START, TOY, P=2, Q=2, T=2, eta=tenth, choose=lambda m, t: [0] if m else [0, 2]
    )
    assert ended == pytest.approx(flat(plain.final), abs=1e-12)
    assert ends[-1].rejected == {"error 2": 1}


def test_a_device_silent_after_the_swap_is_not_in_the_mean() -> None:
    ended, _ = run_without(("update", 3, 0))
    devices = oracle(ScalarModel(), START, TOY, P=2, Q=2, T=2, eta=tenth).states[2].devices
    mean = (devices[0][0] + devices[0][2]) / 2
    assert ended[3] == pytest.approx(float(0.75 * mean[0] + 0.25 * devices[1][0][0]), abs=1e-12)
    undisturbed = run(hsgd(toy(), 2, 2), toy(), START, 1)[0]
    assert ended[:3] == pytest.approx(undisturbed[:3], abs=1e-15)


def test_theta_2_stays_where_no_device_answers_after_the_swap() -> None:
    ended, ends = run_without(*(("update", device, 0) for device in (2, 3, 4)))
    alone = oracle(ScalarModel(), START, TOY, P=2, Q=2, T=2, eta=tenth).states[2].devices[1][0][0]
    assert ended[3] == pytest.approx(float(0.75 * 0.4 + 0.25 * alone), abs=1e-12)
    assert ends[-1].train["lost-groups"] == 0


def alone(P: int, Q: int, T: int) -> np.ndarray:
    """Return the model of the first group alone."""
    return flat(oracle(ScalarModel(), START, [TOY[0]._replace(weight=1.0)], P=P, Q=Q, T=T, eta=tenth).final)


@LAYOUTS
@pytest.mark.parametrize("kind", ["exchange", "update"])
def test_a_group_whose_hospital_misses_the_last_interval_is_left_out_and_weights_are_renormalised(
    kind: str, edges: bool
) -> None:
    ended, ends = run_without((kind, 1, 2), P=4, edges=edges)
    assert ended == pytest.approx(alone(4, 2, 4), abs=1e-12)
    assert [ends[-1].train[key] for key in ("groups", "lost-groups", "missed-intervals")] == [1, 1, 1]


def behind(P: int, missed: int) -> np.ndarray:
    """Return the model where the second group missed intervals of two steps."""
    first, second = (
        oracle(ScalarModel(), START, [group._replace(weight=1.0)], P=steps, Q=2, T=steps, eta=tenth).final
        for group, steps in zip(TOY, (P, P - 2 * missed), strict=True)
    )
    return np.asarray(0.75 * flat(first) + 0.25 * flat(second))


TIMES = pytest.mark.parametrize("times", [(0,), (2,), (0, 2), (2, 4), (0, 4)], ids=str)


@LAYOUTS
@TIMES
@pytest.mark.parametrize("kind", ["exchange", "update"])
def test_a_group_whose_hospital_is_silent_sits_out_those_intervals_alone(
    kind: str, times: tuple[int, ...], edges: bool
) -> None:
    """Both sides have made an update's steps, the hospital without the server's hearing of it."""
    ended, ends = run_without(*((kind, 1, t) for t in times), P=8, edges=edges)
    assert ended == pytest.approx(behind(8, len(times)), abs=1e-12)
    assert [ends[-1].train[key] for key in ("lost-groups", "missed-intervals")] == [0, len(times)]


@LAYOUTS
def test_a_lost_group_is_back_in_the_next_round(edges: bool) -> None:
    _, ends = run_without(("update", 1, 0), rounds=2, edges=edges)
    assert [end.train["lost-groups"] for end in ends[1:]] == [1, 0]


@pytest.mark.parametrize("kind", ["exchange", "update"])
def test_a_silent_edge_costs_its_group_that_interval(kind: str) -> None:
    ended, _ = run_without((kind, 3, 2), P=4, edges=True)
    assert ended == pytest.approx(alone(4, 2, 4), abs=1e-12)
    for t in (0, 2):
        ended, _ = run_without((kind, 3, t), P=6, edges=True)
        assert ended == pytest.approx(behind(6, 1), abs=1e-12)


def test_a_group_without_any_encoding_of_its_devices_sits_out() -> None:
    for t in (0, 2):
        ended, _ = run_without(("exchange", 5, t), P=6)
        assert ended == pytest.approx(behind(6, 1), abs=1e-12)
    ended, ends = run_without(("exchange", 5, 0))
    assert ended == pytest.approx(alone(2, 2, 2), abs=1e-12)
    assert ends[-1].train["lost-groups"] == 1


def test_a_pair_without_its_device_ends_with_the_interval_that_lost_it() -> None:
    _, ends = run_without(("exchange", 3, 2), P=4, method="jfl")
    parties = toy("jfl", sabotage=Silent(("exchange", 3, 2)))
    run(hsgd(parties, 6, 2, method="jfl"), parties, START, 1)
    batches = [
        len(ids) for kind, role, p, _, ids in parties.trace if (kind, role, p) == ("exchange", "hospital", 0)
    ]
    assert batches == [3, 3, 2]
    assert ends[-1].train["lost-groups"] == 0


def test_groups_kept_apart_keep_what_they_had() -> None:
    parties = toy(edges=True, sabotage=Silent(("update", 1, 0)))
    strategy = hsgd(parties, 2, 2, aggregate=False)
    run(strategy, parties, START, 1)
    kept = np.concatenate([array.numpy() for array in strategy.models()[1].values()])
    assert kept.tolist() == flat(START).tolist()


def test_a_round_with_too_few_groups_is_repeated_and_then_ends_the_run() -> None:
    with pytest.raises(TooFewRepliesError, match="Round 1"):
        run_without(("update", 1, 0), min_train_nodes=2, max_repeats=1)


def test_a_round_in_which_nobody_is_left_changes_nothing() -> None:
    with pytest.raises(TooFewRepliesError):
        run_without(("exchange", 0, 0), ("exchange", 1, 0), max_repeats=1)


# Replies that are not what was agreed on


def wrong(where: str, change: Any) -> Any:
    def sabotage(kind: str, partition: int, t: int, reply: RecordDict) -> RecordDict:
        if (kind, partition) == (where, 1):
            change(reply)
        return reply

    return sabotage


def more_arrays(reply: RecordDict) -> None:
    reply["arrays"]["x1"] = Array(np.zeros(3))  # type: ignore[index]


def not_finite(reply: RecordDict) -> None:
    reply["arrays"]["head"] = Array(np.array([1.0, np.nan]))  # type: ignore[index]


def longer(reply: RecordDict) -> None:
    reply["arrays"]["head"] = Array(np.zeros(3))  # type: ignore[index]


def whole_numbers(reply: RecordDict) -> None:
    reply["arrays"]["head"] = Array(np.zeros(2, np.int64))  # type: ignore[index]


def none(reply: RecordDict) -> None:
    del reply["arrays"]


def more_records(reply: RecordDict) -> None:
    reply["labels"] = ConfigRecord({"y": [1]})


@pytest.mark.parametrize("where", ["exchange", "update"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (more_arrays, "unknown key"),
        (not_finite, "non-finite"),
        (longer, "wrong shape"),
        (whole_numbers, "wrong dtype"),
        (none, "unknown record"),
        (more_records, "unknown record"),
    ],
)
def test_a_reply_off_the_white_list_is_lost(where: str, change: Any, reason: str) -> None:
    parties = toy(sabotage=wrong(where, change))
    ended, ends, _ = run(hsgd(parties, 1, 1), parties, START, 1)
    assert ends[-1].rejected == {reason: 1}
    assert ended == pytest.approx(alone(1, 1, 1), abs=1e-12)


# Pairing


def start(ids: dict[int, list[str]], groups: list[Group] = TOY, **options: Any) -> list[Any]:
    parties = Parties(ScalarModel(), groups, options.pop("edges", True), ids=ids)
    return run(hsgd(parties, **options), parties, START, 1)[1]


def left_out(end: Any) -> dict[str, float]:
    return {key: n for key, n in end.train.items() if key.startswith(("left-out", "unmatched"))}


@pytest.mark.parametrize(
    ("ids", "counts"),
    [
        ({2: ["0-0", "0-1"]}, {"unmatched-hospital": 1}),
        ({2: ["0-0", "0-1", "0-2", "x"]}, {"unmatched-device": 1}),
        ({0: ["0-0", "0-0", "0-2"]}, {"left-out-away": 1, "left-out-no-group": 1}),
        ({2: ["a"]}, {"left-out-no-group": 2, "unmatched-hospital": 3, "unmatched-device": 1}),
    ],
)
def test_people_that_one_side_lacks_are_left_out_and_counted(
    ids: dict[int, list[str]], counts: dict[str, int]
) -> None:
    assert left_out(start(ids)[-1]) == counts


def test_where_no_group_is_left_all_faults_are_named() -> None:
    says = "group 0: no device of '0-0', '0-1', '0-2'.*group 1: no device of '1-0'"
    with pytest.raises(PairingError, match=says):
        start({2: ["a"], 3: ["b"]})


def test_a_group_too_many_is_left_out() -> None:
    assert left_out(start({}, num_groups=1)[-1]) == {"left-out-no-such-group": 2}


def test_a_group_too_few_is_lost() -> None:
    assert start({}, num_groups=3)[-1].train["lost-groups"] == 1


def test_merged_training_takes_one_hospital() -> None:
    with pytest.raises(PairingError, match="2 hospitals"):
        start({}, method="tdcd")


def test_the_training_of_a_checkpoint_goes_on_with_the_same_people_only() -> None:
    parties = toy()
    strategy = hsgd(parties)
    run(strategy, parties, START, 1)
    another = Parties(ScalarModel(), [TOY[0], TOY[0]])
    second = hsgd(another)
    second.load_state_dict(strategy.state_dict())
    _, ends, _ = run(second, another, START, 2)
    assert left_out(ends[-1]) == {"left-out-other-size": 1, "left-out-no-group": 3}
    swapped = Parties(ScalarModel(), [TOY[1], TOY[0]])
    third = hsgd(swapped)
    third.load_state_dict(strategy.state_dict())
    with pytest.raises(PairingError, match="checkpoint"):
        run(third, swapped, START, 2)


# One party that tells what others contradict


class Lie:
    """Lets a partition tell something else of itself; the truth from the given question on."""

    def __init__(self, partition: int, until: int = 10**6, **told: Any) -> None:
        self.partition, self.until, self.told, self.asked = partition, until, told, 0

    def __call__(self, kind: str, partition: int, t: int, reply: RecordDict) -> RecordDict:
        if (kind, partition) == ("pair", self.partition):
            self.asked += 1
            if self.asked <= self.until:
                reply["pair"] = ConfigRecord({**reply.config_records["pair"], **self.told})
        return reply


G0 = ["0-0", "0-1", "0-2"]
LIES: dict[str, tuple[Lie, list[int], dict[str, int]]] = {
    # Device 2 comes before the device whose person it claims.
    "another's person": (Lie(2, ids=["0-1"]), [2], {"unmatched-hospital": 1, "left-out-contradicted": 1}),
    "person of another group": (
        Lie(2, group=1, ids=["1-0"]), [2], {"unmatched-hospital": 1, "left-out-contradicted": 1},
    ),
    "nobody's person": (Lie(3, ids=["x"]), [3], {"unmatched-hospital": 1, "left-out-contradicted": 1,
                                                "unmatched-device": 1}),
    "a device as the edge of all": (
        Lie(4, role="edge", ids=G0), [4], {"unmatched-hospital": 1, "left-out-contradicted": 1},
    ),
    "a device as the hospital": (
        Lie(3, role="hospital", ids=G0), [3], {"unmatched-hospital": 1, "left-out-contradicted": 1},
    ),
    "a device's encoding": (
        Lie(2, encoding=7), [2], {"unmatched-hospital": 1, "left-out-other-form": 1},
    ),
    "a device's group that is nowhere": (
        Lie(2, group=10**12), [2], {"unmatched-hospital": 1, "left-out-no-such-group": 1},
    ),
    "a device that says nothing": (
        Lie(2, role="nurse"), [2], {"unmatched-hospital": 1, "left-out-away": 1},
    ),
    "a hospital as that of another group": (
        Lie(0, group=1, ids=["1-0"]), [0, 2, 3, 4], {"left-out-contradicted": 1, "left-out-no-group": 3},
    ),
    "a hospital with all people of another group": (
        Lie(1, group=0, ids=[*G0, "x"]), [1, 5], {"left-out-contradicted": 1, "left-out-no-group": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_one_contradiction_costs_its_party_alone(name: str) -> None:
    lie, out, counts = LIES[name]
    lie.asked = 0
    parties = toy(sabotage=lie)
    _, ends, _ = run(hsgd(parties), parties, START, 1)
    assert {p for kind, _, p, _, _ in parties.trace if kind == "update"} == set(range(6)) - set(out)
    assert left_out(ends[-1]) == counts


@pytest.mark.parametrize(
    ("lie", "out"),
    [
        (Lie(3, group=0, ids=[*G0, "x"]), {1, 3}),
        (Lie(0, group=1, ids=["1-0"]), {0, 2}),
        (Lie(2, role="device", ids=["0-1"]), {2, 0}),
    ],
)
def test_a_group_whose_edge_or_hospital_contradicts_sits_out(lie: Lie, out: set[int]) -> None:
    parties = toy(edges=True, sabotage=lie)
    ended, ends, _ = run(hsgd(parties, 1, 1, num_groups=2), parties, START, 1)
    assert {p for kind, _, p, _, _ in parties.trace if kind == "update"} == {0, 1, 2, 3} - out
    assert ends[-1].train["lost-groups"] == 1
    if 1 in out:
        assert ended == pytest.approx(alone(1, 1, 1), abs=1e-12)


def test_who_was_contradicted_is_asked_again_and_taken_in() -> None:
    """Partition 0 is a hospital; told after two rounds, its truth brings its group back."""
    parties = toy(sabotage=Lie(0, until=1, group=1, ids=["1-0"]))
    _, ends, _ = run(hsgd(parties, 1, 1, num_groups=2), parties, START, 4)
    assert [end.train["lost-groups"] for end in ends[1:]] == [1, 1, 0, 0]
    assert [bool(left_out(end)) for end in ends[1:]] == [True, True, False, False]
    # One that keeps to its lie is asked after 2, 4, … more rounds.
    lie = Lie(2, ids=["0-1"])
    parties = toy(sabotage=lie)
    run(hsgd(parties, 1, 1), parties, START, 9)
    assert lie.asked == 3


def test_a_run_goes_on_from_a_checkpoint_beside_a_liar() -> None:
    whole = toy(sabotage=Lie(0, group=1, ids=["1-0"]))
    expected, _, _ = run(hsgd(whole, 1, 1), whole, START, 1)
    first = hsgd(whole, 1, 1)
    run(first, whole, START, 1)
    second = hsgd(whole, 1, 1)
    second.load_state_dict(first.state_dict())
    honest = toy()
    _, ends, _ = run(second, honest, START, 2)
    assert (ends[-1].train["groups"], left_out(ends[-1])) == (2, {})
    assert np.isfinite(expected).all()


def test_a_party_that_does_not_say_who_it_is_is_left_out() -> None:
    parties = toy(sabotage=Silent(("pair", 4, -1)))
    _, ends, _ = run(hsgd(parties), parties, START, 1)
    assert left_out(ends[-1]) == {"left-out-no-introduction": 1, "unmatched-hospital": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"role": "doctor"},
        {"group": -1},
        {"group": 1.5},
        {"ids": []},
        {"ids": [1]},
        {"ids": ["a", "a"]},
        {"encoding": 0},
    ],
)
def test_an_introduction_is_checked(change: dict[str, Any]) -> None:
    told: dict[str, Any] = {"role": "edge", "group": 0, "ids": ["a"], "encoding": 2}
    assert introduction(RecordDict({"pair": ConfigRecord(told)})) == Introduction("edge", 0, ("a",), (2,))
    with pytest.raises(PayloadError, match="bad pair"):
        introduction(RecordDict({"pair": ConfigRecord({**told, **change})}))


# Who may be what


def registered() -> Registry:
    """Return the registry of the toy's parties, each with its name, role and group."""
    roles = ["hospital"] * 2 + ["device"] * 4
    groups = [0, 1, 0, 0, 0, 1]
    nodes = [
        Registered(name=f"n{i}", partition=i, role=role, group=str(m))
        for i, (role, m) in enumerate(zip(roles, groups, strict=True))
    ]
    return Registry(nodes)


class Known(Spy):
    """A grid that has the names under which keys were registered."""

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=i, name=f"n{at}") for i, at in self.partitions.items()]


GROUP, ROLE = "left-out-another-group-than-registered", "left-out-another-role-than-registered"


@pytest.mark.parametrize(
    ("lie", "out", "counts"),
    [
        (Lie(2, group=1, ids=["1-0"]), {2}, {GROUP: 1, "unmatched-hospital": 1}),
        (Lie(3, role="edge", ids=G0), {3}, {ROLE: 1, "unmatched-hospital": 1}),
        # A hospital as that of another group, with as many matches; and a device as one.
        (Lie(0, group=1, ids=["1-0"]), {0, 2, 3, 4}, {GROUP: 1, "left-out-no-group": 3}),
        (
            Lie(5, role="hospital", group=0, ids=G0),
            {1, 5},
            {ROLE: 1, "left-out-no-group": 1, "unmatched-hospital": 1},
        ),
    ],
)
def test_a_claim_that_is_not_what_was_registered_is_refused_and_counted(
    lie: Lie, out: set[int], counts: dict[str, int]
) -> None:
    lie.asked = 0
    parties = toy(sabotage=lie)
    grid = Known(parties)
    _, ends, _ = run(hsgd(parties, 1, 1, registry=registered()), parties, START, 2, grid=grid)
    assert {p for kind, _, p, _, _ in parties.trace if kind == "update"} == set(range(6)) - out
    assert left_out(ends[-1]) == counts
    # It is asked again later, and taken in when it tells what was registered.
    honest = toy(sabotage=Lie(lie.partition, until=1, **lie.told))
    grid = Known(honest)
    _, ends, _ = run(hsgd(honest, 1, 1, registry=registered()), honest, START, 4, grid=grid)
    assert [bool(left_out(end)) for end in ends[1:]] == [True, True, False, False]


def test_whose_claims_are_as_registered_takes_part() -> None:
    parties = toy()
    grid = Known(parties)
    ended, ends, _ = run(hsgd(parties, 1, 1, registry=registered()), parties, START, 1, grid=grid)
    assert left_out(ends[-1]) == {}
    assert ended.tolist() == run(hsgd(other := toy(), 1, 1), other, START, 1)[0].tolist()
