"""The Gaussian mechanism of a node: its variance, its streams, and where its root comes from."""

from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord

from hedgerow.clients import gaussian_variance, privacy_of
from hedgerow.clients.gradient_noise import noise, noise_root


@pytest.mark.parametrize(
    ("epsilon", "variance"),
    [(0.1, 1.8325814637), (0.5, 0.0733032585), (1.0, 0.0183258146), (2.0, 0.0045814537)],
)
def test_the_variance_is_that_of_equation_13(epsilon: float, variance: float) -> None:
    assert gaussian_variance(epsilon, 0.5, 0.1) == pytest.approx(variance, abs=1e-10)


def test_the_noise_has_its_variance_and_is_independent_over_nodes_and_iterations() -> None:
    draws = [noise(7, i, k, 100_000, 0.25) for i, k in ((0, 0), (0, 1), (1, 0))]
    assert np.var(draws, axis=1) == pytest.approx([0.25] * 3, rel=0.02)
    assert np.abs(np.mean(draws, axis=1)).max() < 0.01
    assert np.abs(np.corrcoef(draws)[~np.eye(3, dtype=bool)]).max() < 0.03
    assert not noise(7, 3, 20, 50, 0.0).any()


def config(**values: Any) -> ConfigRecord:
    return ConfigRecord({"epsilon": 0.5, "delta": 0.5, "sens": 0.1, "clip": 3.0, **values})


def test_only_the_sound_mode_clips_and_has_the_sensitivity_of_clipped_records() -> None:
    printed, sound = (privacy_of(config(privacy=mode), 100) for mode in ("paper", "sound"))
    assert printed.variance == pytest.approx(0.0733032585, abs=1e-10)
    assert sound.variance == pytest.approx(gaussian_variance(0.5, 0.5, 2 * 3.0 / 100))
    assert (printed.clip, sound.clip) == (np.inf, 3.0)
    # Without privacy nothing else is read.
    assert privacy_of(ConfigRecord({"privacy": "none"}), 1).variance == 0


@pytest.mark.parametrize(
    ("values", "own", "known"),
    [
        ({"privacy": "paper"}, {}, True),
        ({"privacy": "sound"}, {}, False),
        ({"privacy": "sound", "noise-source": "seed"}, {}, True),
        ({"privacy": "paper", "noise-source": "entropy"}, {}, False),
        ({"privacy": "sound", "noise-source": "seed"}, {"noise-source": "entropy"}, False),
    ],
)
def test_the_root_is_the_seed_only_where_that_was_asked_for(
    values: dict[str, Any], own: dict[str, Any], known: bool
) -> None:
    one, other = (noise_root(config(**values), own, 7) for _ in range(2))
    assert (one == 7) == (one == other) == known
