"""A wrong keyword argument is named with the class that was called and with what that class takes."""

from typing import Any

import pytest
from flwr.serverapp.strategy import Strategy

import hedgerow.strategies
from hedgerow.strategies import (
    Acknowledgements,
    Compressed,
    ErrorFeedback,
    FedAvg,
    FederatedStrategy,
    Method,
    SDFeel,
    SimilarityFree,
    WeightedMean,
)
from hedgerow.strategies.federation import FederationOptions

STRATEGIES = [
    value
    for name in hedgerow.strategies.__all__
    if isinstance(value := getattr(hedgerow.strategies, name), type)
    and issubclass(value, Strategy)
    # What methods are built on; no method itself.
    and value not in (FederatedStrategy, Method)
]


@pytest.mark.parametrize("kind", STRATEGIES, ids=lambda kind: kind.__name__)
def test_an_unknown_option_names_the_class_that_was_called_and_those_that_it_takes(kind: Any) -> None:
    with pytest.raises(
        TypeError, match=rf"^{kind.__name__}\(\) has no parameter 'sead'; its parameters are "
    ) as error:
        kind(sead=1)
    known = {"compressor"} if kind is Compressed else FederationOptions.__annotations__.keys()
    assert all(name in str(error.value) for name in known)


@pytest.mark.parametrize("option", FederationOptions.__annotations__)
@pytest.mark.parametrize("value", [object(), [object()]], ids=["an object", "a list of one"])
def test_an_option_of_another_kind_is_one_error_that_names_it(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{option} must be "):
        FedAvg(**{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [WeightedMean, Acknowledgements, FedAvg, None, 3, ["mean"]])
def test_a_class_or_another_thing_in_place_of_an_object_is_refused(value: Any) -> None:
    for take in (
        lambda: FedAvg(aggregation=value),
        lambda: FedAvg(parts=[value]),
        lambda: FedAvg(server_step=value or 1),
        lambda: Compressed(value, "topk(0.1)"),
        lambda: ErrorFeedback(value, True),
        lambda: SimilarityFree(schedule=value),
    ):
        with pytest.raises(ValueError, match=r"^\w+ must be "):
            take()


def test_a_name_that_is_nearly_right_is_suggested() -> None:
    with pytest.raises(TypeError, match="Did you mean 'participation'"):
        SDFeel(participations=0.5)  # type: ignore[call-arg]


def test_a_class_that_takes_anything_is_left_to_itself() -> None:
    class Own(SDFeel):
        def __init__(self, **anything: Any) -> None:
            self.taken = anything

    assert Own(sead=1).taken == {"sead": 1}
