"""The Gaussian mechanism on a node's gradient: how much noise, on what, from which stream.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", eq. (13). As printed
nothing is clipped, so that the sensitivity is hoped for and nothing is guaranteed; in the mode ``sound`` each
record's gradient is clipped first, and discrete noise is put on the mean on a grid (``grid_noise.py``). The
normal numbers of ``paper`` are floating-point ones of PCG64: attacks on their lowest bits, or on the
generator, are not defended against.
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

__all__ = ["GradientPrivacy", "gaussian_variance", "noise", "noise_root", "noised", "privacy_of"]

Vector = NDArray[np.float64]

MODES = ("none", "paper", "sound")


@dataclass(frozen=True)
class GradientPrivacy:
    """What is done to a gradient before anything depends on it.

    Parameters
    ----------
    mode : {"none", "paper", "sound"}
        ``paper`` uses the noise in one update and forgets it: no guarantee. ``sound`` clips, and keeps it.
    variance : float (default: 0.0)
        Of the noise, per coordinate, >= 0.
    clip : float (default: inf)
        C, the largest norm of a record's gradient, > 0; finite in the mode ``sound`` only.
    records : int (default: 1)
        m >= 1, of whose gradients the gradient is the mean; read in the mode ``sound`` only.
    """

    mode: str = "none"
    variance: float = 0.0
    clip: float = inf
    records: int = 1

    @property
    def multiplier(self) -> float:
        """The noise's deviation in sensitivities, 2 C / m, of the mode ``sound``; else infinite."""
        if self.mode != "sound":
            return inf
        return sqrt(self.variance) * self.records / (2 * self.clip)


def gaussian_variance(epsilon: float, delta: float, sensitivity: float) -> float:
    """Return 2 ln(1.25 / delta) sensitivity^2 / epsilon^2, eq. (13)."""
    return 2 * log(1.25 / delta) * sensitivity**2 / epsilon**2


def privacy_of(config: ConfigRecord, num_examples: int) -> GradientPrivacy:
    """Return what a message's config asks for.

    Read: ``privacy``; unless it is ``none`` also ``epsilon`` > 0 and ``delta`` in (0, 1), of one release;
    ``sens`` > 0, the sensitivity that ``paper`` takes for granted, or ``clip`` C > 0, of which ``sound``
    has 2 C / ``num_examples``.

    Raises
    ------
    ValueError
        If a value is not valid.
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
    """Return the noise (n,) of the mode ``paper`` for a node's ``index``-th gradient; zeros for none."""
    if variance == 0:
        return np.zeros(n)
    stream = generator(root, round=index, partition_id=partition_id, purpose=Purpose.NOISE)
    return sqrt(variance) * stream.standard_normal(n)


def noised(root: int, partition_id: int, index: int, vector: Vector, privacy: GradientPrivacy) -> Vector:
    """Return a vector with a node's noise of its ``index``-th gradient.

    Parameters
    ----------
    root : int
        Of the node's noise, as ``noise_root`` returns it.
    partition_id, index : int
        The node, and which of its gradients it is.
    vector : NDArray (n,)
        The gradient. In the mode ``sound`` it is rounded to a grid, and what is returned is a point of it:
        nothing else of the gradient may be used.
    privacy : GradientPrivacy
        How much noise.

    Raises
    ------
    ValueError
        If there is no grid for such noise.
    """
    if privacy.mode != "sound":
        return vector + noise(root, partition_id, index, vector.size, privacy.variance)
    grid = GridNoise.of(privacy.multiplier, privacy.clip, vector.size, privacy.records)
    return grid(vector, noise_key(root, partition_id, index))


def noise_root(config: ConfigRecord, node_config: Mapping[str, object], seed: int) -> int:
    """Return the root of a node's noise.

    The config's ``noise-source`` is ``entropy``, from the operating system and known to nobody, or ``seed``,
    the run's, for simulations that can be repeated: whoever knows the seed can take the noise off. Absent, it
    is ``entropy`` in the mode ``sound``. A node whose own config says ``entropy``, or that has a policy which
    does not say ``seed``, never uses the seed.
    """
    source = "entropy" if config.get("privacy") == "sound" else "seed"
    if "noise-source" in config:
        source = choice(config, "noise-source", ("entropy", "seed"))
    own = needs_entropy() or node_config.get("noise-source") == "entropy"
    return secrets.randbits(8 * KEY_BYTES) if own or source == "entropy" else seed
