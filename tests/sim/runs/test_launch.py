"""An app folder runs here with one call."""

from pathlib import Path

import numpy as np
from tests.sim.tiny_app import MakeApp, result

from hedgerow.sim import load_app, plan_run, run_app


def test_a_plans_faults_reach_the_nodes(make_app: MakeApp, tmp_path: Path) -> None:
    loaded = load_app(make_app())
    run_app(loaded, plan_run(loaded.spec, ["output-dir=out fault-crash=2:1"], num_nodes=4))
    # One of four nodes is dead from the start: mean(1, 2, 4), and then three are left.
    assert result(tmp_path / "out")["nodes"] == 3
    np.testing.assert_allclose(result(tmp_path / "out")["arrays"], [7 / 3] * 3)
