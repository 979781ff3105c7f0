"""Every app whose nodes train on a GPU ends there with the numbers of the CPU, on both engines."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.flower_apps.cases import CASES, AppCase, losses

from hedgerow.sim import read_rounds
from hedgerow.sim.runs.plan import toml_text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
on_gpu = pytest.mark.parametrize(
    "case", [case for case in CASES if "device" in case.defaults], ids=lambda case: case.name
)
# Kernels sum in other orders, and a run carries that on.
CLOSE = 0.02


def close(found: list[float], expected: list[float]) -> bool:
    assert len(found) == len(expected) > 1
    return all(math.isclose(a, b, rel_tol=CLOSE) for a, b in zip(found, expected, strict=True))


@on_gpu
def test_our_engine_trains_on_the_gpu_what_it_trains_on_the_cpu(case: AppCase, tmp_path: Path) -> None:
    here, there = (losses(case.run(tmp_path, device=device, workers=1)) for device in ("cpu", "cuda"))
    assert close(there, here)


@on_gpu
def test_flowers_engine_shares_the_gpu_among_clients(case: AppCase, tmp_path: Path) -> None:
    here = losses(case.run(tmp_path))
    settings = tmp_path / "settings.toml"
    out = tmp_path / "flower"
    settings.write_text(toml_text({**case.small, "device": "cuda", "output-dir": str(out)}))
    command = [sys.executable, "-m", "hedgerow.sim", "run", str(case.folder), "--engine", "flower"]
    subprocess.run([*command, "--client-gpus", "0.25", "-c", str(settings)], check=True, timeout=600)
    (folder,) = out.iterdir()
    assert close(losses(read_rounds(folder)), here)
