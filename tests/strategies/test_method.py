"""What every algorithm leaves to others, and what every method keeps for a checkpoint."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.registry import REGISTRY
from tests.strategies.quadratic import Quadratics, run

from hedgerow.strategies import FedAvg

ROOM = Path(__file__).parents[2] / "strategies"
CONCERNS = re.compile(r"secure|mask|robust|seal|nois|privac|bound|ledger|roster|checkpoint", re.IGNORECASE)


@pytest.mark.parametrize("app", [one.app for one in REGISTRY])
def test_an_algorithms_file_has_the_paper_and_no_other_concern(app: str) -> None:
    lines = (ROOM / app.replace("-", "_") / "algorithm.py").read_text().splitlines()
    assert len(lines) <= 190
    assert not [line for line in lines if CONCERNS.search(line)]


def test_a_methods_state_overwrites_none_of_the_bases() -> None:
    class Named(FedAvg):
        def _state(self) -> dict[str, Any]:
            return {**super()._state(), "sizes": "the method's own"}

        def _restore(self, state: Mapping[str, Any]) -> None:
            super()._restore(state)
            assert state["sizes"] == "the method's own"

    problem = Quadratics(sizes=[3, 2], centres=[1.0, 2.0])
    strategy = Named(min_available_nodes=2, fraction_evaluate=0.0)
    run(strategy, problem, 1)
    again = Named(min_available_nodes=2, fraction_evaluate=0.0)
    again.load_state_dict(strategy.state_dict())
    assert dict(again.federation.sizes) == dict(strategy.federation.sizes)
