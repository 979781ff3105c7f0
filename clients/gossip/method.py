"""What a gossip method defines at a node: its memory, its messages and its updates."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Protocol

import numpy as np
from flwr.app import ConfigRecord, Context

from hedgerow.clients.gossip.place import GossipPlace, Vector, mixing_in
from hedgerow.clients.gradient_noise import GradientPrivacy, noised, privacy_of
from hedgerow.clients.mods.guard import check_privacy, check_release
from hedgerow.wire.limits import MAX_WORK_BYTES
from hedgerow.wire.onebit import OneBit

Metrics = dict[str, int | float]


class Problem(Protocol):
    """What a node minimises."""

    @property
    def n(self) -> int:
        """The dimension of w."""

    @property
    def num_examples(self) -> int:
        """Records, m_i."""

    @property
    def largest_eigenvalue(self) -> float:
        """lambda_max(A_i^T A_i), from which the paper derives sigma_i."""

    @property
    def curvature(self) -> float:
        """A Lipschitz constant of the gradient, or an estimate."""

    def value(self, w: Vector) -> float:
        """Return f_i(w)."""

    def gradient(self, w: Vector, clip: float = inf) -> Vector:
        """Return the gradient (n,) at w (n,).

        A finite ``clip`` C > 0 scales each record's gradient g_t by min(1, C / ||g_t||), so that replacing
        one record moves the mean by at most 2 C / m_i. A regulariser reads no data and is not clipped.
        """


ProblemFn = Callable[[Context], Problem]


@dataclass(frozen=True)
class Memory:
    """A node's state between two messages.

    Parameters
    ----------
    arrays : Mapping[str, NDArray]
        Vectors (n,), never changed in place.
    iteration : int
        k, >= 0.
    counts : Mapping[str, int | float]
        Counters of the method; ``gradients`` and ``missed`` are reported to the server.
    """

    arrays: Mapping[str, Vector]
    iteration: int
    counts: Mapping[str, int | float] = field(default_factory=dict)

    def count(self, key: str) -> int:
        """Return an integer of ``counts``, 0 if it is missing."""
        return int(self.counts.get(key, 0))


@dataclass(frozen=True)
class GossipNode:
    """One node in one call."""

    place: GossipPlace
    problem: Problem
    config: ConfigRecord
    root: int
    # Secret seed of this node's sensing matrices; None if they use the run's seed.
    sensing: int | None = None

    def __post_init__(self) -> None:
        codec, n = self.place.codec, self.problem.n
        if isinstance(codec, OneBit) and codec.work_bytes(n) > MAX_WORK_BYTES:
            raise ValueError(
                f"8 d min(2 s, {n}), the bytes to decode a message, must be at most {MAX_WORK_BYTES}, got d "
                f"= {codec.d} and s = {codec.s} in the message's config"
            )

    @cached_property
    def privacy(self) -> GradientPrivacy:
        """How gradients are clipped and noised."""
        return privacy_of(self.config, self.problem.num_examples)

    @cached_property
    def mixing(self) -> Mapping[int, float] | None:
        """This node's row of the mixing matrix; None for equal weights of the nodes that are present."""
        return mixing_in(self.config, self.place)[1]

    def check_privacy(self) -> None:
        """Raise ``guard.Refusal`` if the config gives less privacy than the node's owner requires."""
        check_privacy(self.privacy.mode, self.privacy.multiplier, self.privacy.clip)

    def noised(self, vector: Vector, index: int) -> Vector:
        """Return a vector with the noise of the ``index``-th gradient, and count its release."""
        if self.privacy.mode == "sound":
            check_release(self.root, index, self.privacy.multiplier)
        return noised(self.root, self.place.own, index, vector, self.privacy)


class GossipNodeMethod(Protocol):
    """A method's arithmetic at one node: memory in, memory out."""

    def begin(self, node: GossipNode) -> Memory:
        """Check the config and return the memory at k = 0."""

    def prepare(self, node: GossipNode, memory: Memory, k: int) -> Memory:
        """Return the memory at iteration k, before its communication; idempotent."""

    def message(self, node: GossipNode, memory: Memory) -> Vector:
        """Return the vector to publish at the memory's iteration."""

    def norm(self, node: GossipNode, vector: Vector) -> float:
        """Return a message's size, used to reject outliers; inf for an invalid message."""
        return float(np.linalg.norm(vector))

    def update(
        self,
        node: GossipNode,
        memory: Memory,
        received: Mapping[int, Vector],
        mixing: Mapping[int, float] | None,
    ) -> tuple[Memory, Metrics]:
        """Return the memory after the communication at its iteration, and metrics.

        ``received`` holds the decoded vectors by sender; ``mixing`` the weight of each node, including this
        one, or None for equal weights of the nodes that are present.
        """

    def look(self, node: GossipNode, memory: Memory, k: int) -> tuple[Memory, Vector]:
        """Return w_i at the start of iteration k >= ``memory.iteration``, and a memory that may be kept."""
