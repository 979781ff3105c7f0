"""What is known to be wrong, each by a test that fails until it is right."""

from collections.abc import Mapping
from typing import Any

import pytest
from tests.strategies.quadratic import Quadratics, run

from hedgerow.strategies import FedAvg


@pytest.mark.xfail(strict=True, reason="a method's state and the base's share one dict without namespaces")
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
