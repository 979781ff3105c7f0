"""A run may be lengthened where its earlier rounds do not depend on its length; else the error says why."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.flower_apps.cases import CASES, FEDMUD, SIMILARITY_FREE, AppCase

from hedgerow.sim import plan_run, read_rounds, run_app
from hedgerow.sim.runs.plan import resumed_config

LENGTHS = {case.name: "num-rounds" if "num-rounds" in case.defaults else "iterations" for case in CASES}


def run(case: AppCase, parent: Path, length: int, resume: Path | None = None, **settings: Any) -> Path:
    key = LENGTHS[case.name]
    asked = {**case.small, "quiet": True, "evaluate-every": 1, **settings, key: length}
    before = resumed_config(case.spec, str(resume)) if resume else []
    plan = plan_run(
        case.spec,
        [*before, *(f"{key}={json.dumps(value)}" for key, value in asked.items()), f"output-dir='{parent}'"],
    )
    run_app(case.loaded, plan)
    (folder,) = parent.iterdir()
    return folder


@pytest.mark.parametrize(
    ("case", "settings"),
    [(case, {}) for case in CASES if case is not SIMILARITY_FREE]
    + [(FEDMUD, {"method": method}) for method in ("fedbat", "ef21-p", "fedlmt")]
    + [(SIMILARITY_FREE, {"schedule": schedule}) for schedule in ("diminishing", "step-decay")],
    ids=str,
)
def test_a_lengthened_run_is_one_of_that_length(
    case: AppCase, settings: dict[str, Any], tmp_path: Path
) -> None:
    length = int(case.small.get(LENGTHS[case.name], case.defaults[LENGTHS[case.name]]))
    whole = run(case, tmp_path / "whole", 2 * length, **settings)
    half = run(case, tmp_path / "half", length, **settings)
    run(case, tmp_path / "half", 2 * length, half, **settings)
    learnt = [[record["central"] for record in read_rounds(folder)] for folder in (whole, half)]
    assert learnt[0] == learnt[1]
    for model in whole.glob("model.npz"):
        assert model.read_bytes() == (half / "model.npz").read_bytes()


def test_a_length_that_earlier_rounds_depend_on_is_kept(tmp_path: Path) -> None:
    half = run(SIMILARITY_FREE, tmp_path, 2, schedule="fixed")
    with pytest.raises(
        ValueError, match=r"num-rounds must be 2, as before, got 4: .* c / sqrt\(num-rounds\)"
    ):
        run(SIMILARITY_FREE, tmp_path, 4, half, schedule="fixed")
