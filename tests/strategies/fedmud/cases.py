"""A FedMUD of the linear federation, and the claim that every method of the family makes of resumed runs."""

from typing import Any

from tests.strategies.linear_federation import MODEL

from hedgerow.strategies import FedMUD


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
