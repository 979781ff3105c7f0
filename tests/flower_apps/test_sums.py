"""Secure sums and their noise as settings of the apps: what must fit together, and what a run tells."""

import math
from pathlib import Path
from typing import Any

import pytest
from tests.flower_apps.cases import FEDMUD, SD_FEEL, SIMILARITY_FREE, AppCase
from tests.flower_apps.test_apps import problems

NOISE = {"secure-sum": True, "upload-clip": 1.0, "upload-noise-multiplier": 2.0}


@pytest.mark.parametrize(
    ("case", "values", "expected"),
    [
        (
            SIMILARITY_FREE,
            {"compressor": "sign"},
            "compressor = 'sign'; valid with secure-sum is",
        ),
        (SIMILARITY_FREE, {"compressor": "randk(0.1)", "probe-rounds": 2}, "probe-rounds = 2; valid with"),
        (SIMILARITY_FREE, {"algorithm": "fedavg", "aggregation": "median"}, "aggregation = 'median'; valid"),
        (SIMILARITY_FREE, {"algorithm": "fedavg", "num-clients": 2}, "sum-min-nodes = 3; valid is at most 2"),
        (
            FEDMUD,
            {"method": "fedhm"},
            "secure-sum = True; valid with method = 'fedhm' is False: the mean",
        ),
        (
            FEDMUD,
            {"method": "fedbat"},
            "secure-sum = True; valid with method = 'fedbat' is False: nodes",
        ),
        (FEDMUD, {"measure-bias": True}, "measure-bias = True; valid with secure-sum is False"),
        (FEDMUD, {"clients-per-round": 2}, "sum-min-nodes = 3; valid is at most 2"),
        (SD_FEEL, {"upload-clip": 1.0}, "upload-clip = 1.0, upload-noise-multiplier = 0.0; valid is both"),
        (
            SD_FEEL,
            {**NOISE, "secure-sum": False},
            "upload-clip = 1.0; valid without secure-sum is 0",
        ),
    ],
)
def test_settings_that_do_not_fit(case: AppCase, values: dict[str, Any], expected: str) -> None:
    (problem,) = problems(case, **{"secure-sum": True, **values})
    assert problem.startswith(expected)


def test_without_a_compressor_its_setting_does_not_matter() -> None:
    values = {**SIMILARITY_FREE.defaults, "algorithm": "fedavg", "secure-sum": True}
    assert SIMILARITY_FREE.settings.read(values)["compressor"] == "topk(0.01)"


@pytest.mark.parametrize(
    ("case", "values"),
    [(SIMILARITY_FREE, {"compressor": "randk(0.5)"}), (FEDMUD, {"clients-per-round": 4, "num-clients": 4})],
    ids=["similarity_free", "fedmud"],
)
def test_a_run_of_secure_sums_is_the_plain_one_within_the_rounding(
    case: AppCase, values: dict[str, Any], tmp_path: Path
) -> None:
    small = {**values, "training-mode": "loop"}
    plain, summed = (case.run(tmp_path, **small, **{"secure-sum": on}) for on in (False, True))
    for one, other in zip(plain, summed, strict=True):
        assert other["central"] == pytest.approx(one["central"], abs=2e-3)
        assert other["accepted"] == one["accepted"]
    assert all("clipped" in record["train"] for record in summed[1:])
    assert not any("clipped" in record["train"] for record in plain)


def test_a_run_with_noise_tells_epsilon_in_every_record(tmp_path: Path) -> None:
    rounds = SD_FEEL.run(tmp_path, **NOISE, **{"num-servers": 1, "method": "fedavg"})[1:]
    told = [record["train"] for record in rounds]
    assert [one["releases"] for one in told] == list(range(1, len(told) + 1))
    assert all(0 < one["epsilon"] == one["releases-epsilon"] < math.inf for one in told)
    assert told[0]["epsilon"] < told[-1]["epsilon"]
