"""A node's side of secure sums against a server that orders what it should not, with keys of a device."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from tests.clients.contexts import answer
from tests.clients.sums import APP, N, Nodes, instruction
from tests.strategies.summing import app

from hedgerow.clients import Refusal
from hedgerow.wire import (
    MASKED,
    MASKED_SUM,
    RESTORE,
    SECRET_RECORD,
    STATE,
    Call,
    SealingKey,
    to_record,
)

pytestmark = pytest.mark.usefixtures("devices")


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


def test_devices_that_follow_the_protocol_give_the_sum(nodes: Nodes) -> None:
    plan = nodes.plan()
    total, bad = nodes.total(plan, nodes.told(plan), [0, 1, 3, 4])
    assert total is not None
    assert bad == []


# Of two thirds n - 1 shares of two kinds, with those of (n - 1) / 3 colluders, are twice as many as needed.
HOSTILE: dict[str, Callable[[], tuple[Nodes, dict[str, Any]]]] = {
    "two members": lambda: (Nodes(), {"members": [0, 1]}),
    "a threshold of a half": lambda: (Nodes(), {"threshold": 3}),
    "few neighbours": lambda: (Nodes(), {"neighbours": 2}),
    "somebody else's sum": lambda: (Nodes(), {"members": [1, 2, 3, 4]}),
    "opened by two lists of 4": lambda: (Nodes(4), {"threshold": 3}),
    "opened by two lists of 7": lambda: (Nodes(7), {"threshold": 5}),
    "fewer members than the owner wants": lambda: (Nodes(**{"min-sum-nodes": 6}), {}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_sums_that_do_not_hide_are_refused(name: str) -> None:
    nodes, parts = HOSTILE[name]()
    with pytest.raises(Refusal, match="takes no part in such a sum"):
        nodes.train(0, nodes.plan(**parts))


def test_a_sum_is_taken_part_in_once_and_no_earlier_one_after_it(nodes: Nodes) -> None:
    nodes.train(0, nodes.plan(number=3))
    for number in (3, 2):
        with pytest.raises(Refusal, match="such a sum"):
            nodes.train(0, nodes.plan(number=number))


@pytest.mark.parametrize("survivors", [[0, 1, 2], [0], [1, 2, 3, 4], [0, 0, 1, 2], [3, 2, 1, 0]])
def test_hostile_lists_of_survivors_are_refused_and_shares_are_told_once_whatever_the_survivors(
    survivors: list[int], nodes: Nodes
) -> None:
    plan = nodes.plan()
    told = nodes.told(plan)
    with pytest.raises(Refusal, match="such a sum"):
        nodes.shares(0, plan, survivors, told)
    nodes.shares(0, plan, [0, 1, 2, 3], told)
    for more in ([0, 1, 2, 3], [0, 1, 2, 4], list(range(N))):
        with pytest.raises(Refusal, match="such a sum"):
            nodes.shares(0, plan, more, told)


def test_shares_of_an_earlier_sum_are_not_opened(nodes: Nodes) -> None:
    first, second = nodes.plan(number=1), nodes.plan(number=2)
    told = nodes.told(first)
    for i in range(N):
        nodes.train(i, second)
    with pytest.raises(Refusal, match="such a sum"):
        nodes.shares(0, first, [0, 1, 2, 3], told)
    # What was sealed for the first, in the name of the second: there is no share in the answer.
    assert not any(nodes.shares(0, second, [0, 1, 2, 3], told))


def test_a_state_that_is_set_back_has_no_sum_to_open(nodes: Nodes) -> None:
    plan = nodes.plan()
    told = nodes.told(plan)
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
    told = nodes.told(plan)
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
    monkeypatch.setattr("hedgerow.wire.process._open", 0)
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
        told = nodes.told(plan)
        assert nodes.shares(0, plan, list(range(N)), told)
    with pytest.raises(Refusal, match="budget is spent"):
        nodes.train(0, nodes.plan(number=5, **NOISY))
    assert (tmp_path / "ledger0.jsonl").read_text().count('"what": "release"') == 3


def test_a_node_adds_fresh_noise_from_the_operating_system_unless_a_simulation_says_seed(
    nodes: Nodes,
) -> None:
    def told(nodes: Nodes, number: int, **parts: Any) -> Any:
        """Return the sum of all members, of which noise is all that differs."""
        plan = nodes.plan(number=number, **{**NOISY, **parts})
        total, _ = nodes.total(plan, nodes.told(plan))
        assert total is not None
        return total

    assert not np.array_equal(told(nodes, 1), told(nodes, 2))
    seeded = told(nodes, 3, noise_source="seed")
    assert not np.array_equal(seeded, told(nodes, 4, noise_source="seed"))
    np.testing.assert_array_equal(seeded, told(Nodes(), 3, noise_source="seed"))
    # An owner that wants no noise of a seed gets none.
    careful = Nodes(**{"noise-source": "entropy"})
    assert not np.array_equal(seeded, told(careful, 3, noise_source="seed"))


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

    found = answer(app(train), "train", nodes.contexts[0], instruction(nodes.plan()))
    assert isinstance(found, Exception)


def test_nodes_of_one_call_fail_alone(nodes: Nodes) -> None:
    handler = APP.batch_handler("train")
    assert handler is not None
    good, bad = instruction(nodes.plan()), instruction(nodes.plan([1, 2, 3, 4]))
    calls = [Call(good, nodes.contexts[1], "train"), Call(bad, nodes.contexts[0], "train")]
    first, second = handler(calls)
    assert isinstance(first, RecordDict)
    assert isinstance(second, Refusal)
