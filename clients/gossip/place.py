"""A node's place in the graph, its neighbours and their weights, as the server sends them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
from flwr.app import ConfigRecord
from numpy.typing import NDArray

from hedgerow.clients.instructions import choice, positive, string, whole
from hedgerow.wire.codec import Codec
from hedgerow.wire.onebit import OneBit
from hedgerow.wire.seeds import Purpose, generator
from hedgerow.wire.vector_codecs import Quantised, parse_codec

Vector = NDArray[np.float64]

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
        Fraction of the neighbours that each communication requests, in (0, 1].
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
            raise ValueError(
                f"kappa-high must be at least kappa-low = {low}, got {high} in the message's config"
            )
        settings = {key.replace("-", "_"): config[key] for key in _CODEC_SETTINGS if key in config}
        codec, phi_owner = parse_codec(string(config, "codec"), **settings), "sender"
        if "phi-owner" in config:
            phi_owner = choice(config, "phi-owner", ("sender", "receiver"))
        return cls(
            own,
            neighbours_in(config, own, num_nodes),
            num_nodes,
            seed,
            r,
            drawn_interval(seed, own, low, high),
            codec,
            phi_owner if isinstance(codec, OneBit) else "sender",
        )

    def communication(self, k: int) -> int:
        """Return the iteration, >= k, of the node's next communication."""
        return self.kappa * max(1, -(-k // self.kappa))

    def wants(self, k: int) -> list[int]:
        """Return N_i^k without i: max(1, round(r |N_i|)) neighbours drawn at random, ascending."""
        if not self.neighbours:
            return []
        count = max(1, round(self.r * len(self.neighbours)))
        stream = generator(self.seed, round=k, partition_id=self.own, purpose=Purpose.SUBSET)
        return sorted(map(int, stream.choice(self.neighbours, count, replace=False)))

    def code_seed(self, sender: int, receiver: int, k: int, secret: int | None = None) -> tuple[int, ...]:
        """Return the seed of a message's code: per message for a quantiser, else of its owner's matrix.

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
