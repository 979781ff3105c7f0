"""A wrong keyword argument is named with the class that was called and with what that class takes."""

from typing import Any

import pytest
from flwr.serverapp.strategy import Strategy

import hedgerow.strategies
from hedgerow.strategies import Compressed, FederatedStrategy, Method, SDFeel
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


def test_a_name_that_is_nearly_right_is_suggested() -> None:
    with pytest.raises(TypeError, match="Did you mean 'participation'"):
        SDFeel(participations=0.5)  # type: ignore[call-arg]


def test_a_class_that_takes_anything_is_left_to_itself() -> None:
    class Own(SDFeel):
        def __init__(self, **anything: Any) -> None:
            self.taken = anything

    assert Own(sead=1).taken == {"sead": 1}
