"""A SuperNode that hangs: it keeps its connection and never answers."""

from pathlib import Path

import pytest
from tests.deployment.trials import APPS, Lapse, different, engine, trial

from hedgerow.sim import read_rounds

pytestmark = pytest.mark.slow

TIMEOUT = 20
# A message ends with its round: the SuperLink may say so a moment before the round does.
LATE = ({"no reply": 1}, {"error 3": 1})
CONFIG = "num-servers=2 topology=path tau1=1 tau2=1 iterations=5 batch-size=5 model=logistic evaluate-every=1"


def test_a_node_that_hangs_costs_a_round_its_deadline_and_its_late_answer_is_not_used(tmp_path: Path) -> None:
    with trial(APPS / "sd-feel", 2, f"{CONFIG} round-timeout={TIMEOUT}", tmp_path / "there") as one:
        node = one.deployment.nodes[1]
        one.wait_for_round(1)
        one.wait_until_at_work(node)
        node.suspend()
        one.wait_for_round(2)
        node.resume()
        run = one.end()
        assert one.folder is not None
        seconds = read_rounds(one.folder)[2]["wall_seconds"]
    assert TIMEOUT <= seconds < TIMEOUT + 5
    assert run.lost[0] == run.lost[-1] == {}
    assert run.lost[1] in LATE
    # It works off what it was sent in the meantime: one more round may end before it is through.
    assert all(lost in LATE for lost in run.lost if lost)
    missed = {number + 1 for number, lost in enumerate(run.lost, start=1) if lost}
    here = engine("sd_feel", 2, CONFIG, tmp_path / "here", Lapse(1, missed))
    assert different(run.model, here.model) == []
