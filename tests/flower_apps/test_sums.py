"""Secure sums and their noise in runs of the apps."""

import math
from pathlib import Path
from typing import Any

import pytest
from tests.flower_apps.cases import FEDMUD, SD_FEEL, SIMILARITY_FREE, AppCase

NOISE = {"secure-sum": True, "upload-clip": 1.0, "upload-noise-multiplier": 2.0}


@pytest.mark.parametrize(
    ("case", "values"),
    [
        (SIMILARITY_FREE, {"algorithm": "fedpaq", "compressor": "randk(0.5)"}),
        (FEDMUD, {"clients-per-round": 4, "num-clients": 4, "sync": "dense"}),
        (SD_FEEL, {"num-servers": 2}),
        (SD_FEEL, {"method": "feel"}),
    ],
    ids=lambda value: value.name if isinstance(value, AppCase) else str(value),
)
def test_a_run_of_secure_sums_is_the_plain_one_within_the_rounding(
    case: AppCase, values: dict[str, Any], tmp_path: Path
) -> None:
    small = {**values, "training-mode": "loop"}
    plain, summed = (case.run(tmp_path, **small, **{"secure-sum": on}) for on in (False, True))
    for one, other in zip(plain, summed, strict=True):
        assert other["central"] == pytest.approx(one["central"], abs=2e-3)
        assert other["accepted"] == one["accepted"]
    assert [one["central"] for one in plain] != [one["central"] for one in summed]
    assert all("clipped" in record["train"] for record in summed[1:])
    assert not any("clipped" in record["train"] for record in plain)


def test_a_run_with_noise_tells_epsilon_in_every_record(tmp_path: Path) -> None:
    rounds = SD_FEEL.run(tmp_path, **NOISE, **{"num-servers": 1, "method": "fedavg"})[1:]
    told = [record["train"] for record in rounds]
    assert [one["releases"] for one in told] == list(range(1, len(told) + 1))
    assert all(0 < one["epsilon"] == one["releases-epsilon"] < math.inf for one in told)
    assert told[0]["epsilon"] < told[-1]["epsilon"]
