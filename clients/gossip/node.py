"""A node of a gossip method: its place in the graph, its objective and memory, and what a method defines."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import inf
from typing import Protocol, cast

import numpy as np
from flwr.app import ConfigRecord, Context
from numpy.typing import NDArray

from hedgerow.clients.gradient_noise import GradientPrivacy, noised, privacy_of
from hedgerow.clients.instructions import choice, positive, string, whole
from hedgerow.clients.mods.guard import check_release
from hedgerow.wire.codec import Codec
from hedgerow.wire.onebit import OneBit
from hedgerow.wire.seeds import Purpose, generator
from hedgerow.wire.vector_codecs import Quantised, parse_codec

Vector = NDArray[np.float64]
Metrics = dict[str, int | float]

# Config keys of the one-bit codec's settings.
_CODEC_SETTINGS = ("s", "d", "gamma", "expand", "compand", "decoder", "phi", "phi-density")


def drawn_interval(seed: int, own: int, low: int, high: int) -> int:
    """Return kappa_i of node ``own``, drawn from [low, high]."""
    return int(generator(seed, partition_id=own, purpose=Purpose.SCHEDULE).integers(low, high + 1))


@dataclass(frozen=True)
class GossipPlace:
    """A node's position in the graph and the format of its messages.

    Parameters
    ----------
    own : int
        The node's partition id.
    neighbours : tuple[int, ...]
        Partition ids, ascending.
    num_nodes : int
        Nodes in the graph.
    seed : int
        The run's seed.
    r : float
        Fraction of the neighbors that each communication requests, in (0, 1].
    kappa : int
        Iterations between communications, which happen at kappa, 2 kappa, ...
    codec : Codec
        Encodes messages.
    phi_owner : {"sender", "receiver"}
        The node whose sensing matrix measures a message.
    """

    own: int
    neighbours: tuple[int, ...]
    num_nodes: int
    seed: int
    r: float
    kappa: int
    codec: Codec
    phi_owner: str

    @classmethod
    def of(cls, config: ConfigRecord, own: int) -> "GossipPlace":
        """Read a node's place from the config of ``query.hello``; ValueError for an invalid value."""
        return _place(_PlaceKey(own, repr(dict(config)), config))

    def communication(self, k: int) -> int:
        """Return the iteration, >= k, of the node's next communication."""
        return self.kappa * max(1, -(-k // self.kappa))

    def communications(self, start: int, end: int) -> int:
        """Return the number of communications at iterations k with start <= k < end."""
        return max(end - 1, 0) // self.kappa - max(start - 1, 0) // self.kappa

    def wants(self, k: int) -> list[int]:
        """Return N_i^k without i: max(1, round(r |N_i|)) neighbors drawn at random, ascending."""
        if not self.neighbours:
            return []
        count = max(1, round(self.r * len(self.neighbours)))
        stream = generator(self.seed, round=k, partition_id=self.own, purpose=Purpose.SUBSET)
        return sorted(map(int, stream.choice(self.neighbours, count, replace=False)))

    def code_seed(self, sender: int, receiver: int, k: int, secret: int | None = None) -> tuple[int, ...]:
        """Return the seed of a message's code: per message for a quantizer, else of its owner's matrix.

        ``secret`` is the sender's seed of sensing matrices; None for the run's seed, which is public.
        """
        if isinstance(self.codec, Quantised):
            return (self.seed, k, sender, int(Purpose.COMPRESSION))
        owner = sender if self.phi_owner == "sender" else receiver
        return (self.seed if secret is None else secret, owner, int(Purpose.SENSING))

    def as_received(self, vector: Vector, k: int) -> Vector:
        """Return the vector that other nodes decode from this node's message."""
        seed = self.code_seed(self.own, self.own, k)
        decoded = self.codec.decode(self.codec.encode(vector, seed), vector.size, seed)
        return np.zeros_like(vector) if decoded is None else decoded


@dataclass(frozen=True)
class _PlaceKey:
    """The settings of a node as a cache key."""

    own: int
    text: str
    config: ConfigRecord = field(compare=False)


# Each message is answered by a node's settings; they follow from the config of its hello.
@lru_cache(maxsize=2**12)
def _place(settings_of: _PlaceKey) -> GossipPlace:
    own, config = settings_of.own, settings_of.config
    num_nodes, seed = whole(config, "num-nodes", 1), whole(config, "run-seed", 0)
    if own >= num_nodes:
        raise ValueError(f"num-nodes must be above {own}, got {num_nodes} in the message's config")
    if (r := positive(config, "r")) > 1:
        raise ValueError(f"r must be a number in (0, 1], got {r!r} in the message's config")
    if "kappa-low" in config:
        low, high = whole(config, "kappa-low", 1), whole(config, "kappa-high", 1)
    else:
        low = high = whole(config, "local-steps", 1)
    if high < low:
        raise ValueError(f"kappa-high must be at least kappa-low = {low}, got {high} in the message's config")
    settings = {key.replace("-", "_"): config[key] for key in _CODEC_SETTINGS if key in config}
    codec, phi_owner = parse_codec(string(config, "codec"), **settings), "sender"
    if "phi-owner" in config:
        phi_owner = choice(config, "phi-owner", ("sender", "receiver"))
    return GossipPlace(
        own,
        neighbours_in(config, own, num_nodes),
        num_nodes,
        seed,
        r,
        drawn_interval(seed, own, low, high),
        codec,
        phi_owner if isinstance(codec, OneBit) else "sender",
    )


def neighbours_in(config: ConfigRecord, own: int, num_nodes: int) -> tuple[int, ...]:
    """Return the partition ids in ``neighbours``, ascending; ValueError if they are not valid."""
    value = config.get("neighbours")
    if (
        not isinstance(value, list)
        or not all(isinstance(j, int) and 0 <= j < num_nodes and j != own for j in value)
        or len(set(value)) != len(value)
    ):
        raise ValueError(
            f"neighbours must be a list of other nodes, 0 to {num_nodes - 1}, each once, got {value!r} in "
            "the message's config"
        )
    return tuple(sorted(cast(list[int], value)))


def mixing_in(config: ConfigRecord, place: GossipPlace) -> tuple[tuple[int, ...], Mapping[int, float] | None]:
    """Return an event's neighbours and mixing weights; in the config the node's own weight comes last."""
    weights = config.get("weights")
    if weights is None:
        return place.neighbours, None
    neighbours_in(config, place.own, place.num_nodes)
    ids = [*cast(list[int], config["neighbours"]), place.own]
    if not isinstance(weights, list) or len(weights) != len(ids):
        raise ValueError(
            f"weights must be {len(ids)} numbers, the neighbours' and the node's own, got {weights!r} in "
            "the message's config"
        )
    row = [float(weight) for weight in weights]
    if not np.isfinite(row).all():
        raise ValueError(f"weights must be finite numbers, got {weights!r} in the message's config")
    return tuple(ids[:-1]), dict(zip(ids, row, strict=True))


class Problem(Protocol):
    """What a node minimizes."""

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
        one record moves the mean by at most 2 C / m_i. A regularizer reads no data and is not clipped.
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

    @cached_property
    def privacy(self) -> GradientPrivacy:
        """How gradients are clipped and noised."""
        return privacy_of(self.config, self.problem.num_examples)

    @cached_property
    def mixing(self) -> Mapping[int, float] | None:
        """This node's row of the mixing matrix; None for equal weights of the nodes that are present."""
        return mixing_in(self.config, self.place)[1]

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
