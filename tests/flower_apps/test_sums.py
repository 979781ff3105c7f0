"""Secure sums and their noise in runs of the apps."""

import math
from pathlib import Path

from tests.flower_apps.cases import SD_FEEL

NOISE = {"secure-sum": True, "upload-clip": 1.0, "upload-noise-multiplier": 2.0}


def test_a_run_with_noise_tells_epsilon_in_every_record(tmp_path: Path) -> None:
    rounds = SD_FEEL.run(tmp_path, **NOISE, **{"num-servers": 1, "method": "fedavg"})[1:]
    told = [record["train"] for record in rounds]
    assert [one["releases"] for one in told] == list(range(1, len(told) + 1))
    assert all(0 < one["epsilon"] == one["releases-epsilon"] < math.inf for one in told)
    assert told[0]["epsilon"] < told[-1]["epsilon"]
