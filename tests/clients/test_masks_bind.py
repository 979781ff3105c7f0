"""A member's masks cancel only if its whole instruction and its whole state are those of the others."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies.summed_methods import METHODS, N, run, task
from tests.strategies.summing import LossyGrid

from hedgerow.clients import BatchClientApp, Refusal
from hedgerow.clients.mods import mask
from hedgerow.clients.stored_settings import UNBOUND_RECORDS, store_settings
from hedgerow.sim import flower_identity
from hedgerow.wire import MASKED_SUM, SECRET_RECORD, Call, to_record, view
from hedgerow.wire.masked_sums import COARSEST_STEP, SumPlan, clips_of
from hedgerow.wire.process import simulated

__all__: list[str] = []

NODE = 2


@dataclass(frozen=True)
class Member:
    """A member of a sum at the moment when it is asked to train, in a real run."""

    app: BatchClientApp
    call: Call

    def key(self, content: RecordDict | None = None, context: Context | None = None) -> Any:
        """Return the key of its masks for this content and context; None if it refuses them."""
        handler = self.app.batch_handler("train")
        assert handler is not None
        own = context or copied(self.call.context)
        with simulated(), flower_identity(own.run_id):
            (answer,) = handler([replace(self.call, content=content or self.call.content, context=own)])
        return None if isinstance(answer, Exception) else own.state[SECRET_RECORD]["masked-sum/key"]  # type: ignore[index]


def copied(context: Context) -> Context:
    other = copy.copy(context)
    other.state = context.state.copy()
    for name in other.state:
        other.state[name] = copy.copy(other.state[name])
    other.run_config = dict(context.run_config)
    return other


@cache
def member(name: str) -> Member:
    """Return a member in the second round of a method, where nodes have a state if they keep one."""
    make, client = METHODS[name]
    app, found = client(task), list[Call]()
    train = app.batch_handler("train")
    assert train is not None

    def spying(calls: Sequence[Call]) -> Sequence[Any]:
        found.extend(
            replace(call, context=copied(call.context)) for call in calls if call.partition_id == NODE
        )
        return train(calls)

    run(
        make(secure_sum=True),
        LossyGrid(N, client=BatchClientApp({**app._handlers, "train": spying})),
        rounds=2,
    )
    return Member(app, found[-1])


def other(value: Any) -> Any:
    """Return another value of the same type."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return np.nextafter(value, np.inf).item()
        case str():
            return value + " "
        case bytes():
            return value + b" "
    return [*value, value[-1]] if value else [1]


def changed(record: Any, key: str) -> Any:
    values = {name: record[name] for name in record}
    if isinstance(record, ArrayRecord):
        array = view(values[key]).copy()
        array.flat[-1] = (
            np.nextafter(array.flat[-1], np.inf) if array.dtype.kind == "f" else array.flat[-1] + 1
        )
        return to_record({name: array if name == key else view(one) for name, one in values.items()})
    return type(record)({**values, key: other(values[key])})


def contents(sent: RecordDict) -> Iterator[tuple[str, RecordDict]]:
    """Yield instructions with one value changed, left out or added."""
    for name in sent:
        if name == MASKED_SUM:
            continue
        record = sent[name]
        for key in record:
            yield f"{name}/{key}", RecordDict({**sent, name: changed(record, key)})
            left = {one: record[one] for one in record if one != key}
            yield f"{name}/{key} left out", RecordDict({**sent, name: type(record)(left)})
        if isinstance(record, ArrayRecord) and len(record) > 1:
            first, *rest = record
            yield (
                f"{name}: another order",
                RecordDict({**sent, name: ArrayRecord({k: record[k] for k in (*rest, first)})}),
            )
        if isinstance(record, ConfigRecord):
            yield f"{name}: one more", RecordDict({**sent, name: ConfigRecord({**record, "another": 1})})
    yield "one more record", RecordDict({**sent, "another": ConfigRecord({"key": 1})})


def states(context: Context) -> Iterator[tuple[str, Context]]:
    """Yield contexts with one value of the stored state or the run config changed, or added."""

    def with_state(change: Callable[[Context], object]) -> Context:
        own = copied(context)
        change(own)
        return own

    for name in context.state:
        if name not in UNBOUND_RECORDS:
            for key in context.state[name]:
                record = changed(context.state[name], key)
                yield f"state {name}/{key}", with_state(lambda c, n=name, r=record: c.state.update({n: r}))  # type: ignore[misc]
    added = ConfigRecord({"by": "a server"})
    yield "a record in the state", with_state(lambda c: c.state.update({"another": added}))
    yield (
        "arrays in the state",
        with_state(lambda c: c.state.update({"another": to_record({"w": np.ones(2)})})),
    )
    yield "settings to keep", with_state(lambda c: store_settings(c, "standardise", {"std": [1e30]}))
    yield "settings of its own", with_state(lambda c: store_settings(c, "terms", {}, {"people": 1}))
    yield "the run config", with_state(lambda c: c.run_config.update({"another": 1}))


@pytest.mark.parametrize("name", METHODS)
def test_no_other_instruction_and_no_other_state_has_masks_that_cancel(name: str) -> None:
    one = member(name)
    key = one.key()
    assert key is not None
    assert one.key() == key
    tried = 0
    for what, content in contents(one.call.content):
        assert one.key(content) != key, what
        tried += 1
    for what, context in states(one.call.context):
        assert one.key(context=context) != key, what
        tried += 1
    assert tried > 20


PLANNED = [key for key in SumPlan(1, (0,), (bytes(64),), 1, 0, 1.0, 1.0, "").record()]


@pytest.mark.parametrize("key", [key for key in PLANNED if key != "introductions"])
def test_no_other_plan_has_masks_that_cancel(key: str) -> None:
    one = member("sd-feel")
    plan = one.call.content[MASKED_SUM]
    assert isinstance(plan, ConfigRecord)
    content = RecordDict({**one.call.content, MASKED_SUM: changed(plan, key)})
    assert one.key(content) != one.key()


@settings(max_examples=60, deadline=None)
@given(clip=st.floats(1e-9, 1e30), weight=st.floats(1e-9, 1e30))
def test_under_any_plan_a_member_refuses_or_its_update_keeps_its_resolution(
    clip: float, weight: float
) -> None:
    one, terms = member("fedavg by examples"), list[tuple[SumPlan, Any]]()
    real = mask.masked

    def spying(plan: SumPlan, own: int, numbers: Any, seeds: Any) -> Any:
        terms.append((plan, numbers))
        return real(plan, own, numbers, seeds)

    plan = one.call.content[MASKED_SUM]
    assert isinstance(plan, ConfigRecord)
    mask.masked = spying
    try:
        found = one.key(
            RecordDict(
                {**one.call.content, MASKED_SUM: ConfigRecord({**plan, "clip": clip, "max-weight": weight})}
            )
        )
    finally:
        mask.masked = real
    if found is None:
        assert not terms
        return
    ((asked, words),) = terms
    start = {key: view(array) for key, array in one.call.content["arrays"].items()}
    clips = clips_of(start, asked)
    values = asked.grid.decode(words, clips)[: sum(array.size for array in start.values())]
    samples = len(task(one.call.context).part)
    share = min(samples / weight, 1.0)
    trained, _ = run_alone(one)
    exact = np.clip(trained, -clip, clip)
    assert np.abs(values / share - exact).max() <= COARSEST_STEP * (1 + 1e-6)


def run_alone(one: Member) -> tuple[Any, Any]:
    """Return the member's update without a sum."""
    handler = one.app.batch_handler("train")
    assert handler is not None
    plain = RecordDict({name: one.call.content[name] for name in one.call.content if name != MASKED_SUM})
    with simulated(), flower_identity(one.call.context.run_id):
        (answer,) = handler([replace(one.call, content=plain, context=copied(one.call.context))])
    assert isinstance(answer, RecordDict)
    start, end = plain["arrays"], answer["arrays"]
    moves = [view(end[key]).astype(float).ravel() - view(start[key]).ravel() for key in start]  # type: ignore[index]
    return np.concatenate(moves), answer["metrics"]


def test_a_refusal_names_the_plan() -> None:
    one = member("sd-feel")
    plan = one.call.content[MASKED_SUM]
    assert isinstance(plan, ConfigRecord)
    handler = one.app.batch_handler("train")
    assert handler is not None
    content = RecordDict({**one.call.content, MASKED_SUM: ConfigRecord({**plan, "max-weight": 1e12})})
    with simulated(), flower_identity(one.call.context.run_id):
        (answer,) = handler([replace(one.call, content=content, context=copied(one.call.context))])
    assert isinstance(answer, Refusal)
    assert "max-weight = 1e+12 must let this node's update have steps of at most" in str(answer.__cause__)
