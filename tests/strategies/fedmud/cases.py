"""A FedMUD of the linear federation, and the claim that every method of the family makes of resumed runs."""

from collections.abc import Callable
from typing import Any

from tests.strategies.linear_federation import MODEL, LinearFederation, run, same

from hedgerow.strategies import FedMUD
from hedgerow.strategies.fedmud import CompressedLayers


def fedmud(**parameters: Any) -> FedMUD:
    defaults = {
        "variant": "mud+aad",
        "ratio": 0.2,
        "budget": "layer",
        "init_a": 0.5,
        "learning_rate": 0.1,
        "local_epochs": 2,
        "min_available_nodes": 5,
        "fraction_evaluate": 0.0,
    }
    return FedMUD(**{**MODEL, **defaults, **parameters})


def ends_with_the_same_bits(make: Callable[..., CompressedLayers], **parameters: Any) -> bool:
    """Return whether a run that another strategy object goes on with ends as one without a break."""
    parameters["num_clients_per_round"] = 2
    whole, _ = run(make(**parameters), LinearFederation(), 6)
    federation = LinearFederation()
    grid = federation.grid()
    first, second = make(**parameters), make(**parameters)
    run(first, federation, 3, grid=grid)
    second.load_state_dict(first.state_dict())
    return same(run(second, federation, 6, grid=grid)[0], whole)
