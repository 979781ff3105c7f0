"""Signs and step sizes as both sides code them, and which weights' signs travel."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hedgerow.wire import PayloadError
from hedgerow.wire.sign_shares import SignUpdates, drawn_weights, signs_by_layer

CODE = SignUpdates({"w0": 3, "w1": 9}, signs=12, seed=3)
UPDATE: dict[str, Any] = {
    "w0:bits": np.packbits([1, 0, 1]),
    "w0:alpha": np.array([0.5], np.float32),
    "w1:bits": np.packbits([0] * 9),
    "w1:alpha": np.array(0.25, np.float32),
}


def test_updates_are_signs_times_step_sizes() -> None:
    assert {key: step.tolist() for key, step in CODE.read(UPDATE, 0).items()} == {
        "w0": [0.5, -0.5, 0.5],
        "w1": [-0.25] * 9,
    }


@pytest.mark.parametrize(
    ("reason", "key", "value"),
    [
        ("missing key", "w0:bits", None),
        ("wrong dtype", "w0:bits", np.zeros(1, np.int64)),
        ("wrong dtype", "w0:alpha", np.ones(1)),
        ("wrong shape", "w1:bits", np.zeros(1, np.uint8)),
        ("bad scale", "w0:alpha", np.array([-1.0], np.float32)),
        ("bad scale", "w0:alpha", np.array([np.nan], np.float32)),
        ("unknown key", "w0:gamma", np.ones(1, np.float32)),
    ],
)
def test_an_update_of_other_weights_is_refused(reason: str, key: str, value: Any) -> None:
    update = {**UPDATE, key: value} if value is not None else {k: v for k, v in UPDATE.items() if k != key}
    with pytest.raises(PayloadError) as refused:
        CODE.read(update, 0)
    assert refused.value.reason == reason


def test_an_update_moves_no_weight_that_was_not_drawn() -> None:
    code = SignUpdates({"w0": 64}, signs=8, seed=1)
    update = {"w0:bits": np.full(1, 255, np.uint8), "w0:alpha": np.ones(1, np.float32)}
    for version in range(3):
        kept = drawn_weights({"w0": 64}, 8, seed=1, version=version)["w0"]
        assert kept is not None
        assert len(kept) == 8
        assert np.flatnonzero(code.read(update, version)["w0"]).tolist() == kept.tolist()


@settings(deadline=None, max_examples=40)
@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=5), share=st.floats(0, 2))
def test_layers_share_the_signs_by_size_and_each_has_one(sizes: list[int], share: float) -> None:
    signs, by_key = int(share * sum(sizes)), {str(i): size for i, size in enumerate(sizes)}
    counts = signs_by_layer(by_key, signs)
    assert all(1 <= counts[key] <= size for key, size in by_key.items())
    assert sum(counts.values()) <= max(signs, 0) + len(sizes)
    if signs >= sum(sizes):
        assert counts == by_key
