"""A node's side of secure sums against a server that orders what it should not, with keys of a device."""

import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from tests.strategies.summing import app

import hedgerow.clients.links
from hedgerow.clients import Refusal
from hedgerow.wire import (
    MASKED,
    MASKED_SUM,
    RESTORE,
    SECRET_RECORD,
    STATE,
    SUM_KEYS,
    SUM_SHARES,
    Call,
    SealingKey,
    default_neighbours,
    survivors_needed,
    to_record,
    view,
)
from hedgerow.wire.masked_sums import SumPlan, Unmasking, told_content

N = 5
APP = app()


class Nodes:
    """The devices of a federation, and what a server that is at hand asks them."""

    def __init__(self, n: int = N, **config: Any) -> None:
        self.contexts = [
            Context(7, 100 + i, {"partition-id": i, **config}, RecordDict(), {}) for i in range(n)
        ]
        told = [self.ask(i, SUM_KEYS, RecordDict({"config": ConfigRecord({"seed": 0})})) for i in range(n)]
        self.keys = [one[MASKED_SUM]["introduction"] for one in told]

    def ask(self, node: int, kind: str, content: RecordDict) -> RecordDict:
        handler = APP.batch_handler(kind)
        assert handler is not None
        (answer,) = handler([Call(content, self.contexts[node], kind)])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def plan(self, members: list[int] | None = None, **parts: Any) -> SumPlan:
        members = list(range(len(self.contexts))) if members is None else members
        n = len(members)
        plan = SumPlan(
            number=1,
            members=tuple(members),
            introductions=tuple(self.keys[i] for i in members),
            threshold=survivors_needed(n),
            neighbours=default_neighbours(n),
            clip=8.0,
            max_weight=1000.0,
            weighted_by="num-examples",
        )
        return replace(plan, **parts)

    def train(self, node: int, plan: SumPlan) -> RecordDict:
        return self.ask(node, "train", instruction(plan))

    def shares(self, node: int, plan: SumPlan, survivors: list[int], told: dict[int, RecordDict]) -> bytes:
        parts = []
        for other in survivors:
            if other != node:
                at, size = plan.members.index(node), plan.share_bytes
                place = at - (at > plan.members.index(other))
                parts.append(told[other]["shares"]["sealed"][size * place : size * (place + 1)])
        config = ConfigRecord(
            {"number": plan.number, "survivors": survivors, "sealed": b"".join(parts), "seed": 0}
        )
        answer = self.ask(node, SUM_SHARES, RecordDict({"config": config}))
        shares = answer["shares"]["shares"]
        assert isinstance(shares, bytes)
        return shares


def instruction(plan: SumPlan, steps: int = 1) -> RecordDict:
    return RecordDict(
        {
            "arrays": to_record({"w": np.zeros(40)}),
            "config": ConfigRecord({"server-round": 1, "local-steps": steps}),
            MASKED_SUM: ConfigRecord({**plan.record(), "seed": 0}),
        }
    )


@pytest.fixture(autouse=True)
def _devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The nodes have keys of their own, which no seed tells; Flower's home is here."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setattr(hedgerow.clients.links, "is_simulated", lambda: False)


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


def test_devices_that_follow_the_protocol_give_the_sum(nodes: Nodes) -> None:
    plan = nodes.plan()
    told = {i: nodes.train(i, plan) for i in range(N)}
    content = instruction(plan)
    about = plan.about(told_content(RecordDict({k: content[k] for k in ("arrays", "config")})))
    alive = [0, 1, 3, 4]
    words = {i: view(told[i][MASKED][MASKED]) for i in alive}
    solving = Unmasking(plan, about, words, {i: told[i]["shares"]["commitments"] for i in alive})
    for i in alive:
        solving.take(i, solving.check(i, nodes.shares(i, plan, alive, told)))
    total, bad = solving.total()
    assert total is not None
    assert bad == []


HOSTILE: dict[str, Callable[[Nodes], SumPlan]] = {
    "two members": lambda nodes: nodes.plan([0, 1]),
    "a threshold of a half": lambda nodes: nodes.plan(threshold=3),
    "few neighbours": lambda nodes: nodes.plan(neighbours=2),
    "somebody else's sum": lambda nodes: nodes.plan([1, 2, 3, 4]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_sums_that_do_not_hide_are_refused(name: str, nodes: Nodes) -> None:
    with pytest.raises(Refusal, match="takes no part in such a sum"):
        nodes.train(0, HOSTILE[name](nodes))


@pytest.mark.parametrize("n", [4, 7])
def test_a_sum_that_two_lists_would_open_is_refused(n: int) -> None:
    nodes = Nodes(n)
    # Two thirds: n - 1 shares of two kinds, with those of (n - 1) / 3 colluders, are twice as many as needed.
    with pytest.raises(Refusal, match="takes no part in such a sum"):
        nodes.train(0, nodes.plan(threshold=2 * n // 3 + 1))


def test_an_owner_may_want_more_members() -> None:
    nodes = Nodes(**{"min-sum-nodes": 6})
    with pytest.raises(Refusal, match="such a sum"):
        nodes.train(0, nodes.plan())


def test_a_sum_is_taken_part_in_once_and_no_earlier_one_after_it(nodes: Nodes) -> None:
    nodes.train(0, nodes.plan(number=3))
    for number in (3, 2):
        with pytest.raises(Refusal, match="such a sum"):
            nodes.train(0, nodes.plan(number=number))


def test_shares_are_told_once_whatever_the_survivors(nodes: Nodes) -> None:
    plan = nodes.plan()
    told = {i: nodes.train(i, plan) for i in range(N)}
    nodes.shares(0, plan, [0, 1, 2, 3], told)
    for survivors in ([0, 1, 2, 3], [0, 1, 2, 4], list(range(N))):
        with pytest.raises(Refusal, match="such a sum"):
            nodes.shares(0, plan, survivors, told)


@pytest.mark.parametrize("survivors", [[0, 1, 2], [0], [1, 2, 3, 4], [0, 0, 1, 2], [3, 2, 1, 0]])
def test_hostile_lists_of_survivors_are_refused(survivors: list[int], nodes: Nodes) -> None:
    plan = nodes.plan()
    told = {i: nodes.train(i, plan) for i in range(N)}
    with pytest.raises(Refusal, match="such a sum"):
        nodes.shares(0, plan, survivors, told)


def test_shares_of_an_earlier_sum_are_not_opened(nodes: Nodes) -> None:
    first, second = nodes.plan(number=1), nodes.plan(number=2)
    told = {i: nodes.train(i, first) for i in range(N)}
    for i in range(N):
        nodes.train(i, second)
    with pytest.raises(Refusal, match="such a sum"):
        nodes.shares(0, first, [0, 1, 2, 3], told)
    # What was sealed for the first, in the name of the second: there is no share in the answer.
    assert not any(nodes.shares(0, second, [0, 1, 2, 3], told))


def test_a_state_that_is_set_back_has_no_sum_to_open(nodes: Nodes) -> None:
    plan = nodes.plan()
    told = {i: nodes.train(i, plan) for i in range(N)}
    before = nodes.ask(0, STATE, RecordDict())
    assert SECRET_RECORD not in before
    nodes.shares(0, plan, [0, 1, 2, 3], told)
    nodes.ask(0, RESTORE, before)
    with pytest.raises((Refusal, ValueError)):
        nodes.shares(0, plan, [0, 1, 2, 4], told)


def test_a_key_that_changed_is_refused(nodes: Nodes) -> None:
    nodes.train(0, nodes.plan())
    nodes.keys[2] = SealingKey.drawn().public + SealingKey.drawn().public
    with pytest.raises(Refusal, match="such a sum"):
        nodes.train(0, nodes.plan(number=2))


def test_members_that_a_server_made_up_are_refused_where_keys_are_pinned(tmp_path: Path) -> None:
    honest = Nodes()
    pins = tmp_path / "pins.toml"
    pins.write_text(
        "\n".join(f'{i} = "{base64.b64encode(key[:32]).decode()}"' for i, key in enumerate(honest.keys))
    )
    pinning = Nodes(**{"neighbour-keys": str(pins)})
    # All but node 0 are the server's own.
    made_up = [SealingKey.drawn().public + SealingKey.drawn().public for _ in range(N - 1)]
    pinning.keys[1:] = made_up
    with pytest.raises(Refusal, match="such a sum"):
        pinning.train(0, pinning.plan())
    # Who pins nobody takes part, and the server, which knows all others' masks, reads what it tells.
    honest.keys[1:] = made_up
    assert MASKED in honest.train(0, honest.plan())


def test_a_guarded_node_tells_its_shares_once_though_asked_twice_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hedgerow.clients.policy.is_simulated", lambda: False)
    nodes = Nodes()
    plan = nodes.plan()
    told = {i: nodes.train(i, plan) for i in range(N)}
    # The second question meets the context as it was: an answer has not left yet.
    earlier = RecordDict(dict(nodes.contexts[0].state))
    nodes.shares(0, plan, [0, 1, 2, 3], told)
    nodes.contexts[0].state = earlier
    with pytest.raises(Refusal, match="as often as it may"):
        nodes.shares(0, plan, [0, 1, 2, 4], told)
    assert '"what": "sum"' in (tmp_path / "hedgerow-ledger.jsonl").read_text()


def guarded(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> Nodes:
    """Nodes each of which has this policy, and a ledger of its own."""
    monkeypatch.setattr("hedgerow.clients.policy.is_simulated", lambda: False)
    monkeypatch.setattr("hedgerow.wire.simulated._open", 0)
    nodes = Nodes()
    for i, context in enumerate(nodes.contexts):
        file = folder / f"policy{i}.toml"
        file.write_text(f'{text}\nledger = "ledger{i}.jsonl"\n')
        context.node_config["policy"] = str(file)
    return nodes


@pytest.mark.parametrize("text", ['secure-sums = "required"', ""])
def test_an_owner_may_want_nothing_but_sums(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nodes = guarded(monkeypatch, tmp_path, text)
    if not text:  # The node config says the same.
        nodes.contexts[0].node_config["secure-sum"] = True
    plain = instruction(nodes.plan())
    del plain[MASKED_SUM]
    with pytest.raises(Refusal, match="secure-sums: this node's policy does not cover"):
        nodes.ask(0, "train", plain)
    assert MASKED in nodes.train(0, nodes.plan())


NOISY = {"weighted_by": "", "norm": 1.0, "multiplier": 8.0}


def test_a_policy_with_noise_is_content_with_noisy_sums_and_keeps_a_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    budget = "privacy = 'sound'\nmin-noise-multiplier = 4.0\nmax-clip = 1.0\nmax-epsilon = 1.8\ndelta = 1e-5"
    nodes = guarded(monkeypatch, tmp_path, budget)
    for weaker in ({}, {**NOISY, "multiplier": 7.9}, {**NOISY, "norm": 1.1}):
        with pytest.raises(Refusal, match=r"weaker than .* owner allows|does not cover"):
            nodes.train(0, nodes.plan(**weaker))  # type: ignore[arg-type]
    # At 1e-5 one release of multiplier 4 is 0.93, two are 1.36, three 1.70, four 1.99.
    for number in (2, 3, 4):
        plan = nodes.plan(number=number, **NOISY)
        told = {i: nodes.train(i, plan) for i in range(N)}
        assert nodes.shares(0, plan, list(range(N)), told)
    with pytest.raises(Refusal, match="budget is spent"):
        nodes.train(0, nodes.plan(number=5, **NOISY))
    assert (tmp_path / "ledger0.jsonl").read_text().count('"what": "release"') == 3


def test_a_node_adds_fresh_noise_from_the_operating_system_unless_a_simulation_says_seed(
    nodes: Nodes,
) -> None:
    def told(number: int, **parts: Any) -> Any:
        """Return two members' numbers, less their masks: what each added."""
        plan = nodes.plan(number=number, **{**NOISY, **parts})
        answers = {i: nodes.train(i, plan) for i in range(N)}
        words = {i: view(one[MASKED][MASKED]) for i, one in answers.items()}
        content = instruction(plan)
        about = plan.about(told_content(RecordDict({key: content[key] for key in ("arrays", "config")})))
        commitments = {i: one["shares"]["commitments"] for i, one in answers.items()}
        solving = Unmasking(plan, about, words, commitments)
        for i in range(N):
            solving.take(i, solving.check(i, nodes.shares(i, plan, list(range(N)), answers)))
        total, _ = solving.total()
        assert total is not None
        return total

    assert not np.array_equal(told(1), told(2))
    seeded = told(3, noise_source="seed")
    assert not np.array_equal(seeded, told(4, noise_source="seed"))
    again = Nodes()
    nodes.contexts, nodes.keys = again.contexts, again.keys
    np.testing.assert_array_equal(seeded, told(3, noise_source="seed"))
    # An owner that wants no noise of a seed gets none.
    careful = Nodes(**{"noise-source": "entropy"})
    nodes.contexts, nodes.keys = careful.contexts, careful.keys
    assert not np.array_equal(seeded, told(3, noise_source="seed"))


@pytest.mark.parametrize(
    "parts",
    [
        {"norm": 1.0}, {"norm": -1.0, "multiplier": 1.0}, {"norm": 1.0, "multiplier": 1e-9},
        {**NOISY, "weighted_by": "num-examples"}, {**NOISY, "metrics": ("train-loss",)},
        {**NOISY, "noise_source": "dice"},
    ],
)  # fmt: skip
def test_plans_whose_noise_is_none_are_no_plans(parts: dict[str, Any], nodes: Nodes) -> None:
    with pytest.raises(ValueError, match="masked sum"):
        nodes.plan(**parts)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content.__setitem__(MASKED_SUM, ConfigRecord()),
        lambda content: content.__setitem__(MASKED_SUM, MetricRecord()),
        lambda content: content.__setitem__(MASKED_SUM, ConfigRecord({**content[MASKED_SUM], "clip": 1})),
        lambda content: content.__setitem__(
            MASKED_SUM, ConfigRecord({**content[MASKED_SUM], "members": [5]})
        ),
        lambda content: content.__setitem__("arrays", to_record({"w": np.full(40, np.nan)})),
        lambda content: content.__delitem__("arrays"),
    ],
)
def test_instructions_that_are_none_are_refused(spoil: Callable[[RecordDict], None], nodes: Nodes) -> None:
    content = instruction(nodes.plan())
    spoil(content)
    with pytest.raises(Refusal, match="such a sum"):
        nodes.ask(0, "train", content)


@pytest.mark.parametrize("learnt", [np.full(40, np.inf), np.zeros(39)])
def test_what_is_no_update_does_not_leave(learnt: Any, nodes: Nodes) -> None:
    def train(call: Call) -> RecordDict:
        metrics = MetricRecord({"num-examples": 3, "num-steps": 1})
        return RecordDict({"arrays": ArrayRecord(to_record({"w": learnt})), "metrics": metrics})

    handler = app(train).batch_handler("train")
    assert handler is not None
    (answer,) = handler([Call(instruction(nodes.plan()), nodes.contexts[0], "train")])
    assert isinstance(answer, Exception)


def test_nodes_of_one_call_fail_alone(nodes: Nodes) -> None:
    handler = APP.batch_handler("train")
    assert handler is not None
    good, bad = instruction(nodes.plan()), instruction(nodes.plan([1, 2, 3, 4]))
    calls = [Call(good, nodes.contexts[1], "train"), Call(bad, nodes.contexts[0], "train")]
    first, second = handler(calls)
    assert isinstance(first, RecordDict)
    assert isinstance(second, Refusal)
