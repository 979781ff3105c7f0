"""An app runs on Flower's own engine with the same plan, the same numbers and a true exit status."""

from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.sim.tiny_app import MakeApp, result

from hedgerow.sim import find_app, load_app, plan_run, run_app
from hedgerow.sim.deploy.flower_run import flower_run


def superlinks() -> list[psutil.Process]:
    """Return the SuperLinks that this process started: others on the machine may have theirs."""
    started = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
    return [one for one in started if any("flower-superlink" in word for word in one.cmdline())]


def test_flowers_engine_gives_the_same_numbers_and_leaves_nothing_running(
    make_app: MakeApp, tmp_path: Path
) -> None:
    loaded = load_app(make_app())
    run_app(loaded, plan_run(loaded.spec, ["output-dir=here"], num_nodes=3))
    assert flower_run(loaded.spec, plan_run(loaded.spec, ["output-dir=there"], num_nodes=3)) == 0
    here, there = result(tmp_path / "here"), result(tmp_path / "there")
    # FedAvg sums in the order of the replies, which is not Flower's to promise.
    np.testing.assert_allclose(there.pop("arrays"), here.pop("arrays"), rtol=1e-12)
    assert there == here
    assert superlinks() == []


@pytest.mark.slow
def test_a_run_that_fails_on_flowers_engine_exits_with_1(make_app: MakeApp) -> None:
    spec = find_app(make_app())
    assert flower_run(spec, plan_run(spec, ["fail=true"])) == 1
    assert superlinks() == []
