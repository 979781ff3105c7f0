"""What every method keeps for a checkpoint."""

from collections.abc import Mapping
from typing import Any

from tests.strategies.quadratic import Quadratics, run

from hedgerow.strategies import FedAvg


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
