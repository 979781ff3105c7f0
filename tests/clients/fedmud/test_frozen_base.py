"""The base that a node keeps: whoever was away, for however long, comes back to the server's bits."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.clients.contexts import context
from torch import Tensor

from hedgerow.clients.fedmud.frozen_base import Bases, Evolution
from hedgerow.wire import Call, Factorisation, LayerShape, lazy_array, to_record, view

RUN_SEED, ROUNDS = 7, 12
LAYERS = (LayerShape("a.weight", (6, 5)), LayerShape("b.weight", (4, 2, 3, 3)))
VARIANTS = ("mud", "mud+f", "mud+aad", "mud+bkd", "mud+bkd+aad")
PLANS = {
    variant: Factorisation.plan(
        LAYERS,
        variant=variant,
        ratio=0.5,
        budget="layer",
        num_parameters=102,
        skip_front=0,
        skip_back=0,
    )
    for variant in VARIANTS
}


def noise(shape: tuple[int, ...], *key: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(key).normal(size=shape).astype(np.float32))


def first_base() -> dict[str, Tensor]:
    return {layer.key: noise(layer.shape, 99, i) for i, layer in enumerate(LAYERS)}


def factors(plan: Factorisation, version: int) -> dict[str, Tensor]:
    return {key: noise(shape, version, i) for i, (key, shape) in enumerate(plan.shapes.items())}


def evolution(plan: Factorisation) -> Evolution:
    return Evolution(
        {layer.key: layer.shape for layer in LAYERS},
        "merges",
        lambda base, version, update: plan.merge(base, update, plan.frozen(RUN_SEED, version)),
    )


@lru_cache
def server_bases(plan: Factorisation) -> list[dict[str, Tensor]]:
    bases = [first_base()]
    for version in range(ROUNDS):
        bases.append(plan.merge(bases[-1], factors(plan, version), plan.frozen(RUN_SEED, version)))
    return bases


def merges(plan: Factorisation, first: int, version: int) -> ArrayRecord:
    return to_record(
        {f"{v}/{key}": value for v in range(first, version) for key, value in factors(plan, v).items()}
    )


def call(
    own: Context,
    version: int,
    first: int | None = None,
    plan: Factorisation = PLANS["mud"],
    keep: bool = True,
    **records: ArrayRecord,
) -> Call:
    """A message for a node at version ``first``; with no ``first`` it holds the base."""
    content: dict[str, Any] = dict(records)
    if first is None:
        content["base"] = to_record(server_bases(plan)[version])
    elif first < version:
        content.setdefault("merges", merges(plan, first, version))
    start = version if first is None else first
    config = ConfigRecord({"version": version, "from-version": start, "keep-base": keep})
    return Call(RecordDict({**content, "config": config}), own, "train")


def current(one: Call, plan: Factorisation = PLANS["mud"]) -> dict[str, Tensor] | None:
    return Bases().current(one, one.content.config_records["config"], evolution(plan))


def same(a: Mapping[str, Tensor] | None, b: Mapping[str, Tensor]) -> bool:
    return a is not None and a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in b)


def at(version: int, plan: Factorisation = PLANS["mud"]) -> Context:
    own = context()
    assert current(call(own, version, plan=plan), plan) is not None
    return own


@settings(deadline=None, max_examples=40)
@given(variant=st.sampled_from(VARIANTS), present=st.sets(st.integers(1, ROUNDS)))
def test_whoever_missed_any_resets_holds_what_one_who_never_left_holds(
    variant: str, present: set[int]
) -> None:
    plan, always, sometimes = PLANS[variant], at(0, PLANS[variant]), at(0, PLANS[variant])
    held = 0
    for version in range(1, ROUNDS + 1):
        stayed = current(call(always, version, version - 1, plan), plan)
        assert same(stayed, server_bases(plan)[version])
        if version in present | {ROUNDS}:
            assert same(current(call(sometimes, version, held, plan), plan), stayed or {})
            held = version


@pytest.mark.parametrize(
    ("held", "version", "first"), [(5, 8, 2), (3, 6, 3), (4, 4, 4), (7, 2, None)],
    ids=["has some updates", "has none", "is at the version", "is sent the base"],
)  # fmt: skip
def test_whatever_a_node_held_it_holds_the_version_of_the_message_which_may_come_twice(
    held: int, version: int, first: int | None
) -> None:
    own = at(held)
    message = call(own, version, first)
    for _ in range(2):
        assert same(current(message), server_bases(PLANS["mud"])[version])
        assert own.state.config_records["base-status"]["version"] == version


def test_nothing_is_kept_where_nothing_is_to_be_kept() -> None:
    own = context()
    assert current(call(own, 3, keep=False)) is not None
    assert not own.state


def forget(own: Context) -> None:
    own.state = RecordDict()


def damage(own: Context) -> None:
    damaged = view(own.state.array_records["base"]["a.weight"]).copy()
    damaged[0, 0] = np.nextafter(damaged[0, 0], np.float32(9))
    own.state.array_records["base"]["a.weight"] = lazy_array(damaged)


SPOILT: dict[str, tuple[Callable[[Context], object], int, int]] = {
    "no base": (forget, 4, 0),
    "of another run": (lambda own: setattr(own, "run_id", 2), 4, 3),
    "of another model": (lambda own: own.state.array_records["base"].pop("b.weight"), 4, 3),
    "damaged": (damage, 4, 3),
    "updates too late": (lambda own: None, 6, 4),
    "node ahead": (lambda own: None, 2, 2),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_base_that_does_not_fit_does_not_count_and_the_one_that_is_then_sent_heals_the_node(
    name: str,
) -> None:
    spoil, version, first = SPOILT[name]
    own = at(3)
    spoil(own)
    assert current(call(own, version, first)) is None
    # What is of another version is kept.
    assert first == 3 or not own.state or own.state.config_records["base-status"]["version"] == 3
    assert current(call(own, 4)) is not None
    assert same(current(call(own, 6, 4)), server_bases(PLANS["mud"])[6])


def test_nodes_of_one_version_share_one_base_in_memory() -> None:
    plan, bases, contexts = PLANS["mud+aad"], Bases(), [at(2, PLANS["mud+aad"]) for _ in range(3)]
    shared = call(contexts[0], 5, 2, plan)
    for own in contexts:
        one = Call(shared.content, own, "train")
        bases.current(one, one.content.config_records["config"], evolution(plan))
    first, *others = (view(own.state.array_records["base"]["a.weight"]) for own in contexts)
    assert all(np.shares_memory(first, other) for other in others)


def test_a_base_survives_the_nodes_serialised_state() -> None:
    own = at(3)
    plain = RecordDict()
    plain["base"] = ArrayRecord(
        {k: torch.tensor(view(a)) for k, a in own.state.array_records["base"].items()}
    )
    plain["base-status"] = own.state.config_records["base-status"]
    own.state = plain
    assert same(current(call(own, 5, 3)), server_bases(PLANS["mud"])[5])


def test_what_is_wrong_with_a_message_is_named() -> None:
    with pytest.raises(ValueError, match=r"the message's merges must have version 3, got \['4'\]"):
        current(call(at(3), 5, 3, merges=merges(PLANS["mud"], 4, 5)))
    message = call(context(), 0)
    del message.content.array_records["base"]["a.weight"]
    with pytest.raises(ValueError, match="the message's base must have the shapes"):
        current(message)
    for key in ("version", "from-version", "keep-base"):
        message = call(context(), 0)
        message.content.config_records["config"][key] = -1
        with pytest.raises(ValueError, match=rf"{key} must be .*got -1 in the message's config"):
            current(message)
