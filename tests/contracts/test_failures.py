"""One participant whose failures must not stop everybody: every app, every message type of a round."""

from pathlib import Path

import pytest
from flwr.app import Error
from tests.contracts.plays import METHODS, VARIANTS, Method, Passed, passing, play
from tests.flower_apps.cases import CASES, CEPS

# A method of each app, and the ones whose nodes also mix, publish, or merge.
CHOSEN = [
    *(Method(case, case.method) for case in CASES),
    *(one for one in METHODS if one.name in ("matcha", "dp-dsgt", "jfl", "tdcd", "fedhm")),
    *(one for one in VARIANTS if one.changes.get("edge-servers") == "nodes" or one.changes.get("sync")),
    Method(CEPS, "ceps", {"interval-low": 1, "interval-high": 12}),
]


@pytest.mark.parametrize("method", CHOSEN, ids=str)
@pytest.mark.parametrize("introduced", [True, False])
def test_a_node_that_answers_with_errors_does_not_end_a_run(
    method: Method, introduced: bool, tmp_path: Path
) -> None:
    """With or without an introduction that is as it should be; the others' replies still count."""

    def fail(one: Passed) -> Error | None:
        is_own = one.partition == 1 and one.kind != "query.whoami"
        return Error(2, "no") if is_own and (one.kind.startswith("train") or not introduced) else None

    with passing(fail) as passed:
        played = play(method, tmp_path)
    assert any(one.partition == 1 and one.reply.has_error() for one in passed)
    assert sum(end["accepted"] for end in played.rounds) > 0
    assert (played.folder / "summary.json").exists()
