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


def test_the_noise_has_its_variance() -> None:
    xi = noise(7, 3, 20, 100_000, 0.25)
    assert np.var(xi) == pytest.approx(0.25, rel=0.02)
    assert abs(np.mean(xi)) < 0.01


def test_the_noise_of_different_nodes_and_iterations_is_independent() -> None:
    draws = [noise(7, i, k, 20_000, 1.0) for i, k in ((0, 0), (0, 1), (1, 0))]
    off = np.corrcoef(draws)[~np.eye(3, dtype=bool)]
    assert np.abs(off).max() < 0.03


def test_no_variance_is_no_noise() -> None:
    assert not noise(7, 3, 20, 50, 0.0).any()


def config(**values: Any) -> ConfigRecord:
    return ConfigRecord({"epsilon": 0.5, "delta": 0.5, "sens": 0.1, "clip": 3.0, **values})


def test_the_printed_mode_takes_the_sensitivity_for_granted_and_clips_nothing() -> None:
    privacy = privacy_of(config(privacy="paper"), 100)
    assert privacy.variance == pytest.approx(0.0733032585, abs=1e-10)
    assert privacy.clip == np.inf


def test_the_sound_mode_has_the_sensitivity_of_clipped_records() -> None:
    privacy = privacy_of(config(privacy="sound"), 100)
    assert privacy.variance == pytest.approx(gaussian_variance(0.5, 0.5, 2 * 3.0 / 100))
    assert privacy.clip == 3.0


def test_no_privacy_reads_nothing_else() -> None:
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
    assert (noise_root(config(**values), own, 7) == 7) == known


def test_roots_from_the_operating_system_differ() -> None:
    assert noise_root(config(privacy="sound"), {}, 7) != noise_root(config(privacy="sound"), {}, 7)
