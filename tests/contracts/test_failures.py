"""One participant whose failures or silence must not stop everybody: every app, every message of a round."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from flwr.app import Error
from tests.contracts.plays import METHODS, VARIANTS, Method, Passed, passing, play
from tests.flower_apps.cases import CASES, CEPS

from hedgerow.sim import InProcessGrid
from hedgerow.sim.engine.faults import Fate

# A method of each app, and the ones whose nodes also mix, publish, or merge.
CHOSEN = [
    *(Method(case, case.method) for case in CASES),
    *(one for one in METHODS if one.name in ("matcha", "dp-dsgt", "jfl", "tdcd", "fedhm")),
    *(one for one in VARIANTS if one.changes.get("edge-servers") == "nodes" or one.changes.get("sync")),
    Method(CEPS, "ceps", {"interval-low": 1, "interval-high": 12}),
]


# Kinds of messages at which a node fails while it answers all others.
KINDS = (
    ("train", "evaluate", "query"),
    ("train",),
    pytest.param(("evaluate",), marks=pytest.mark.slow),
    pytest.param(("query",), marks=pytest.mark.slow),
)


@pytest.mark.parametrize("method", CHOSEN, ids=str)
@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_a_node_that_answers_with_errors_does_not_end_a_run(
    method: Method, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    """At all messages, or at those of one kind alone; the others' replies still count."""

    def fail(one: Passed) -> Error | None:
        is_own = one.partition == 1 and one.kind != "query.whoami"
        return Error(2, "no") if is_own and one.kind.startswith(kinds) else None

    with passing(fail) as passed:
        played = play(method, tmp_path)
    asked = [one for one in passed if one.partition == 1 and one.kind != "query.whoami"]
    failed = [one for one in asked if one.kind.startswith(kinds)]
    assert all(one.reply.has_error() for one in failed)
    assert failed or kinds in (("evaluate",), ("query",))  # not every method sends these
    assert sum(end["accepted"] for end in played.rounds) > 0
    assert (played.folder / "summary.json").exists()


@contextmanager
def quiet(fate: Fate, introduced: bool) -> Iterator[list[str]]:
    """Give one node's messages a fate; with an introduction, only those of training. Lists their types."""
    real = InProcessGrid._fate
    met: list[str] = []

    def drawn(self: InProcessGrid, node: Any, turn: Any, key: int) -> Fate:
        kind = turn.kind
        if (
            node.partition_id != 1
            or kind == "query.whoami"
            or not (kind.startswith("train") or not introduced)
        ):
            return real(self, node, turn, key)
        met.append(kind)
        return fate

    with patch.object(InProcessGrid, "_fate", drawn), passing():
        yield met


@pytest.mark.parametrize("method", CHOSEN, ids=str)
@pytest.mark.parametrize(
    ("fate", "introduced"),
    [(Fate(dropped=True), False), (Fate(delay=1e7), True)],
    ids=["never", "late in training"],
)
def test_a_node_that_is_silent_or_late_does_not_end_a_run(
    method: Method, introduced: bool, fate: Fate, tmp_path: Path
) -> None:
    """A strategy is told of both alike: a reply is missing."""
    with quiet(fate, introduced) as met:
        played = play(method, tmp_path)
    assert met
    assert sum(end["accepted"] for end in played.rounds) > 0
    assert (played.folder / "summary.json").exists()
