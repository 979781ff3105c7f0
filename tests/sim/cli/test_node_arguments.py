"""What ``hedgerow node`` says of its arguments before the SuperNode starts."""

import pytest

from hedgerow.sim.cli.node import misspelt_keys
from hedgerow.sim.cli.options import known_node_keys


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ('labl="outcome" data="x.csv"', ["labl", "label"]),
        ('label="outcome" min-samples=5', []),
        ('my-own-key="what the app reads"', []),
    ],
)
def test_a_key_that_is_almost_a_known_one_is_told(config: str, told: list[str]) -> None:
    warnings = list(misspelt_keys(["--superlink", "a:1", f"--node-config={config}"], known_node_keys()))
    assert len(warnings) == bool(told)
    assert all(word in warning for warning in warnings for word in told)
