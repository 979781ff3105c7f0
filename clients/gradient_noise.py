"""The Gaussian mechanism on a node's gradient.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", eq. (13). The paper does
not clip, so its sensitivity is an assumption and there is no guarantee. The mode ``sound`` clips the gradient
of each record and adds discrete noise to the mean on a grid (``grid_noise.py``). The mode ``paper`` draws
floating-point normals from PCG64, without protection against attacks on the lowest bits or the generator.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, log, sqrt

import numpy as np
from flwr.app import ConfigRecord
from numpy.typing import NDArray

from hedgerow.clients.grid_noise import GridNoise, noise_key
from hedgerow.clients.instructions import choice, nonnegative, positive
from hedgerow.clients.mods.guard import needs_entropy
from hedgerow.wire.discrete_gaussian import KEY_BYTES
from hedgerow.wire.seeds import Purpose, generator

Vector = NDArray[np.float64]

MODES = ("none", "paper", "sound")


@dataclass(frozen=True)
class GradientPrivacy:
    """Clipping and noise of a gradient.

    Parameters
    ----------
    mode : {"none", "paper", "sound"}
        ``paper`` noises one update only, without a guarantee. ``sound`` clips, and keeps the noise.
    variance : float (default: 0.0)
        Noise variance per coordinate, >= 0.
    clip : float (default: inf)
        C, the largest norm of a record's gradient, > 0; finite only in the mode ``sound``.
    records : int (default: 1)
        m >= 1, the number of records whose gradients are averaged; used only in the mode ``sound``.
    """

    mode: str = "none"
    variance: float = 0.0
    clip: float = inf
    records: int = 1

    @property
    def multiplier(self) -> float:
        """The noise deviation in units of the sensitivity 2 C / m in the mode ``sound``; else infinite."""
        if self.mode != "sound":
            return inf
        return sqrt(self.variance) * self.records / (2 * self.clip)


def gaussian_variance(epsilon: float, delta: float, sensitivity: float) -> float:
    """Return 2 ln(1.25 / delta) sensitivity^2 / epsilon^2, eq. (13)."""
    return 2 * log(1.25 / delta) * sensitivity**2 / epsilon**2


def privacy_of(config: ConfigRecord, num_examples: int) -> GradientPrivacy:
    """Return the privacy that a message's config requests; ValueError for an invalid value.

    It has ``privacy`` and, unless that is ``none``, ``epsilon`` > 0 and ``delta`` in (0, 1) of one release.
    ``paper`` also reads the assumed sensitivity ``sens`` > 0; ``sound`` reads ``clip`` C > 0, and its
    sensitivity is 2 C / ``num_examples``.
    """
    mode = choice(config, "privacy", MODES)
    if mode == "none":
        return GradientPrivacy()
    epsilon, delta = positive(config, "epsilon"), nonnegative(config, "delta", below=1.0)
    if delta == 0:
        raise ValueError("delta must be a number in (0, 1), got 0 in the message's config")
    if mode == "paper":
        return GradientPrivacy(mode, gaussian_variance(epsilon, delta, positive(config, "sens")))
    clip = positive(config, "clip")
    return GradientPrivacy(
        mode, gaussian_variance(epsilon, delta, 2 * clip / num_examples), clip, num_examples
    )


def noise(root: int, partition_id: int, index: int, n: int, variance: float) -> Vector:
    """Return the noise (n,) of the mode ``paper`` for a node's ``index``-th gradient; zeros at variance 0."""
    if variance == 0:
        return np.zeros(n)
    stream = generator(root, round=index, partition_id=partition_id, purpose=Purpose.NOISE)
    return sqrt(variance) * stream.standard_normal(n)


def noised(root: int, partition_id: int, index: int, vector: Vector, privacy: GradientPrivacy) -> Vector:
    """Return a gradient (n,) with the noise of a node's ``index``-th gradient.

    ``root`` is the node's noise root, see ``noise_root``. In the mode ``sound`` the result is a point of a
    grid; use nothing else of the gradient. ValueError if there is no grid for such noise.
    """
    if privacy.mode != "sound":
        return vector + noise(root, partition_id, index, vector.size, privacy.variance)
    grid = GridNoise.of(privacy.multiplier, privacy.clip, vector.size, privacy.records)
    return grid(vector, noise_key(root, partition_id, index))


def noise_root(config: ConfigRecord, node_config: Mapping[str, object], seed: int) -> int:
    """Return the seed of a node's noise.

    The config's ``noise-source`` is ``entropy``, secret randomness from the operating system, or ``seed``,
    the run's seed, for repeatable simulations: anyone who knows the seed can remove the noise. The default is
    ``entropy`` in the mode ``sound``. A node with ``entropy`` in its own config, or with a policy that does
    not allow ``seed``, never uses the seed.
    """
    source = "entropy" if config.get("privacy") == "sound" else "seed"
    if "noise-source" in config:
        source = choice(config, "noise-source", ("entropy", "seed"))
    own = needs_entropy() or node_config.get("noise-source") == "entropy"
    return secrets.randbits(8 * KEY_BYTES) if own or source == "entropy" else seed
