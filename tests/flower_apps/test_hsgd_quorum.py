"""HSGD on own data whose parties come, go and come back: who is in which round, and what that changes."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord
from tests.flower_apps.hsgd_own import Grid, Played, files, prepared
from tests.strategies.changing_grid import ChangingGrid

from hedgerow.sim import SettingsError, flower_identity
from hedgerow.strategies import PairingError

K = 6  # people of a group


class Comings(Grid, ChangingGrid):
    """Some nodes are away; what happens after which round; and which messages are lost."""


def changing(
    configs: Sequence[Mapping[str, Any]],
    *,
    away: Sequence[int] = (),
    after: Mapping[int, Callable[[Any], Any]] | None = None,
    quorum: int,
    **changes: Any,
) -> Played:
    grid = partial(Comings, away=away, after=after or {})
    played = prepared(configs, grid, **{"min-available-nodes": quorum, "holdout": 0.0, **changes})
    played.strategy.on_round_end = [played.ends.append, played.grid.told]  # type: ignore[attr-defined]
    return played


def go(played: Played, rounds: int) -> Played:
    with flower_identity(1):
        result = played.strategy.start(played.grid, ArrayRecord(), num_rounds=rounds, timeout=60.0)
    played.arrays = {key: array.numpy() for key, array in result.arrays.items()}
    return played


def trained(played: Played) -> list[set[int]]:
    """Return which partitions were to make steps, by round, of rounds of one interval."""
    rounds: list[set[int]] = []
    before = "train.update"
    for kind, partition, _ in played.grid.sent:
        if kind == "train.exchange" and before == "train.update":
            rounds.append(set())
        if kind == "train.update":
            rounds[-1].add(partition)
        before = kind if kind.startswith("train.") else before
    return rounds


WHOLE: dict[str, Any] = {"participation": 1.0, "global-interval": 1, "local-interval": 1, "iterations": 100}


def told(played: Played, key: str) -> list[Any]:
    return [end.train[key] for end in played.ends[1:]]


def test_a_device_joins_in_round_five_and_another_leaves_in_round_three(tmp_path: Path) -> None:
    """Partition 0 is the hospital, 1 to 6 its people's devices."""
    configs = files(tmp_path, K, 1, "devices")
    played = go(
        changing(
            configs, away=[4], quorum=5,
            after={2: lambda g: g.leave(2), 4: lambda g: g.come(4), 6: lambda g: g.come(2)}, **WHOLE,
        ),
        7,
    )  # fmt: skip
    everyone = set(range(K + 1))
    assert trained(played) == [
        everyone - {4}, everyone - {4}, everyone - {2, 4}, everyone - {2, 4}, everyone - {2}, everyone - {2},
        everyone,
    ]  # fmt: skip
    assert told(played, "matched") == [5, 5, 4, 4, 5, 5, 6]
    assert told(played, "lost-groups") == [0] * 7
    assert [end.rejected for end in played.ends[1:]] == [
        {"offline": n} if n else {} for n in (1, 1, 2, 2, 1, 1, 0)
    ]
    # One who was away under the same node id goes by what it was told: only the newcomer was told later.
    setups = [partition for kind, partition, _ in played.grid.sent if kind == "query.setup"]
    assert sorted(setups) == sorted([0, 1, 2, 3, 5, 6, 0, 4])


def test_a_group_without_its_hospital_sits_out_until_that_comes(tmp_path: Path) -> None:
    """Partitions 0 and 1 are hospitals, 2 and 3 their gateways."""
    configs = files(tmp_path, K, 2)
    played = go(changing(configs, away=[1], quorum=3, after={3: lambda g: g.come(1)}, **WHOLE), 5)
    assert trained(played) == [{0, 2}] * 3 + [{0, 1, 2, 3}] * 2
    assert told(played, "groups") == [1, 1, 1, 2, 2]
    assert played.ends[1].train["left-out-no-hospital"] == 1
    # What the late group was standardised by was agreed on before.
    kinds = [(kind, i) for kind, i, content in played.grid.sent if kind == "query.pool"]
    assert kinds.count(("query.pool", 1)) == 1
    pools = [c["config"] for kind, i, c in played.grid.sent if (kind, i) == ("query.pool", 1)]
    assert (pools[0]["sums"], pools[0]["counts"], len(pools[0]["labels-of"])) == (False, False, K)


def test_a_run_waits_for_a_whole_group_not_for_the_quorum_alone(tmp_path: Path) -> None:
    """Two hospitals are two nodes, and no group."""
    configs = files(tmp_path, K, 2)
    played = changing(configs, away=[2, 3], quorum=2)
    start = played.grid.now()
    with pytest.raises(PairingError, match="no hospital, or no device or edge, is online"):
        go(played, 1)
    assert played.grid.now() - start >= 120.0

    played = changing(configs, away=[2, 3], quorum=2, **WHOLE)
    asleep = played.grid.sleep

    def come(seconds: float) -> None:
        asleep(seconds)
        if played.grid.now() > 30.0:
            played.grid.come(3)

    played.grid.sleep = come  # type: ignore[method-assign]
    assert trained(go(played, 1)) == [{1, 3}]


def test_a_party_that_comes_back_with_nothing_in_its_memory_is_told_again(tmp_path: Path) -> None:
    configs = files(tmp_path, K, 2)

    def restart(grid: Any, node_id: int | None) -> None:
        grid._nodes[grid.node_id(3)].state.clear()
        grid.come(3, node_id)

    for number, node_id in ((1, 4242), (2, None)):
        # Under another node id it is introduced before the round; under its own it first says that it forgot.
        played = changing(
            configs, quorum=2, after={2: lambda g, node_id=node_id: restart(g, node_id)}, **WHOLE
        )
        go(played, 5)
        lost = [2, 2, 2, 2, 2] if number == 1 else [2, 2, 1, 2, 2]
        assert told(played, "groups") == lost


def test_a_run_goes_on_with_others_than_it_stopped_with(tmp_path: Path) -> None:
    configs = files(tmp_path, K, 2)
    first = go(changing(configs, away=[1], quorum=2, **WHOLE), 2)
    second = changing(configs, away=[0], quorum=2, **WHOLE)
    second.strategy.load_state_dict(first.strategy.state_dict())
    go(second, 4)
    assert trained(second) == [{1, 3}] * 2
    assert second.strategy.completed_rounds == 4


def test_groups_that_are_kept_apart_stay_as_they_were_while_they_are_away(tmp_path: Path) -> None:
    configs = files(tmp_path, K, 2)
    apart: dict[str, Any] = {**WHOLE, "method": "tdcd", "tdcd": "isolated"}
    played = go(changing(configs, quorum=2, after={2: lambda g: g.leave(1)}, **apart), 4)
    before = go(changing(configs, quorum=2, **apart), 2)
    now, then = (
        [{key: array.numpy() for key, array in model.items()} for model in one.strategy.models()]
        for one in (played, before)
    )
    assert all(np.array_equal(now[1][key], then[1][key]) for key in then[1])
    assert not all(np.array_equal(now[0][key], then[0][key]) for key in then[0])
    # One that comes later starts where all did, not from the others' mean.
    apart["standardise"] = "none"
    late = go(changing(configs, away=[1], quorum=2, after={2: lambda g: g.come(1)}, **apart), 3)
    first = go(changing(configs, quorum=4, **apart), 1)
    one, other = (played.strategy.models()[1] for played in (late, first))
    assert all(np.array_equal(one[key].numpy(), other[key].numpy()) for key in other)


def test_a_quorum_is_of_own_data_and_no_larger_than_the_federation(tmp_path: Path) -> None:
    configs = files(tmp_path, K, 1)
    with pytest.raises(SettingsError, match="min-available-nodes must be at most num-clients = 2, got 3"):
        prepared(configs, **{"min-available-nodes": 3})
    with pytest.raises(SettingsError, match="min-available-nodes must be 0 unless partition = 'own', got 1"):
        prepared(configs, **{"min-available-nodes": 1, "partition": "iid"})
