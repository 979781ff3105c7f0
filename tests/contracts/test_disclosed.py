"""However a run ends, its folder tells what its nodes may have disclosed, for every method with noise."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
from flwr.app import Error
from tests.contracts.plays import VARIANTS, Interrupted, Method, Passed, interrupted, passing, play
from tests.flower_apps.cases import HSGD

from hedgerow.sim import read_rounds
from hedgerow.wire.failures import RunFailedError

NOISE = {"clip": 1.0, "noise-multiplier": 0.5, "upload-clip": 1.0, "upload-noise-multiplier": 0.01}
NOISY = [
    *(one for one in VARIANTS if "upload-noise-multiplier" in one.changes or "privacy" in one.changes),
    Method(HSGD, "hsgd", {**NOISE, "sealed": False}),
]
COUNTS = ("releases", "encodings-released")


def count(record: object) -> int:
    assert isinstance(record, dict)
    return int(next(record[key] for key in COUNTS if key in record))


@pytest.mark.parametrize("method", NOISY, ids=str)
def test_a_run_whose_round_fails_tells_what_its_nodes_may_have_sent(method: Method, tmp_path: Path) -> None:
    """The replies of a later round are lost: nodes made them, and the record of rounds has none of them."""
    with passing() as passed:
        whole = play(method, tmp_path)
    told = json.loads((whole.folder / "privacy.json").read_text())
    assert told["at-most"] == bool(any(sum(end["rejected"].values()) for end in whole.rounds))
    assert count(told) == count(whole.rounds[-1]["train"])
    trained = [one for one in passed if one.kind.startswith("train")]
    seen = 0

    def lose(one: Passed) -> Error | None:
        nonlocal seen
        seen += one.kind.startswith("train")
        return Error(3) if one.kind.startswith("train") and seen > len(trained) // 2 else None

    (tmp_path / "failed").mkdir()
    with passing(lose), suppress(RunFailedError):
        play(method, tmp_path / "failed")
    (folder,) = (tmp_path / "failed").iterdir()
    told = json.loads((folder / "privacy.json").read_text())
    assert told["at-most"]
    recorded = count(read_rounds(folder)[-1]["train"])
    # CEPS records lost events, the others no failed round.
    assert count(told) == recorded if method.case.name == "ceps" else count(told) > recorded


@pytest.mark.parametrize("method", NOISY[:1], ids=str)
def test_a_run_that_is_interrupted_tells_it_too(method: Method, tmp_path: Path) -> None:
    with interrupted(1), suppress(Interrupted):
        play(method, tmp_path)
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "privacy.json").read_text())["at-most"]
