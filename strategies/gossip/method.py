"""The protocol of gossip methods: communication graph, choice of neighbours, and message sizes.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", section III: 64 + d bits
for a one-bit message, against 64 n for a dense one. Ours: sparse and quantised vectors.
A relay needs only the sizes; it must not be able to decode payloads.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hedgerow.strategies.router import GraphAt
from hedgerow.strategies.topology import neighbours
from hedgerow.wire.checks import int_at_least, require

Scalar = bool | int | float | str | list[int] | list[float]


@dataclass(frozen=True)
class PayloadSizes:
    """The size of payloads if all have the same, for a ``Router``.

    Parameters
    ----------
    message_bits : int
        Information bits of one directed message, >= 0.
    max_bytes : int
        Bytes of the largest payload, >= 0; larger ones are lost.
    per_receiver : bool (default: False)
        Whether a sender encodes separately for each receiver, or once for all.
    """

    message_bits: int
    max_bytes: int
    per_receiver: bool = False

    def __post_init__(self) -> None:
        int_at_least(0, message_bits=self.message_bits, max_bytes=self.max_bytes)

    def bits(self, payload: bytes) -> int:
        """Return the information bits of any payload."""
        return self.message_bits


def coded_sizes(
    codec: str,
    dim: int,
    sparsity: int | None = None,
    measurements: int | None = None,
    *,
    vectors: int = 1,
    per_receiver: bool = False,
) -> PayloadSizes:
    """Return the size of a message of some vectors, each padded to whole bytes.

    Parameters
    ----------
    codec : str
        ``1bcs`` (a norm and d signs), ``sparse16``, ``sparse32``, ``sparse64`` (s values and indices),
        ``dense32``, ``dense64`` (n values) or ``quantised<b>`` (a scale and n values of b bits, 2 to 16).
    dim : int
        Model dimension n, >= 1.
    sparsity : int or None (default: None)
        s of a vector, 1 to n; needed by the sparse codecs.
    measurements : int or None (default: None)
        d, >= 1; needed by ``1bcs``.
    vectors : int (default: 1)
        Vectors per message, >= 1.
    per_receiver : bool (default: False)
        Whether a sender encodes separately for each receiver.
    """
    int_at_least(1, dim=dim, vectors=vectors)
    if sparsity is not None:
        int_at_least(1, sparsity=sparsity)
        require("sparsity", sparsity, f"from 1 to dim = {dim}", sparsity <= dim)
    if measurements is not None:
        int_at_least(1, measurements=measurements)
    if codec == "1bcs":
        bits = 64 + _needed("measurements", measurements, codec)
    elif match := re.fullmatch("dense(32|64)", codec):
        bits = int(match[1]) * dim
    elif match := re.fullmatch("sparse(16|32|64)", codec):
        # ceil(log2) of the number of entries of all vectors, which have consecutive indices.
        index = (vectors * dim - 1).bit_length()
        bits = _needed("sparsity", sparsity, codec) * (int(match[1]) + index)
    elif (match := re.fullmatch("quantised([0-9]+)", codec)) and 2 <= int(match[1]) <= 16:
        bits = 32 + int(match[1]) * dim
    else:
        raise ValueError(
            "codec must be one of 1bcs, sparse16, sparse32, sparse64, dense32, dense64, quantised<b> with "
            f"b from 2 to 16, got {codec!r}"
        )
    return PayloadSizes(vectors * bits, vectors * -(-bits // 8), per_receiver)


def _needed(key: str, value: int | None, codec: str) -> int:
    if value is None:
        raise ValueError(f"{key} must be an integer >= 1 with codec {codec!r}")
    return value


class GossipMethod(Protocol):
    """A gossip method, as the strategy sees it.

    Attributes
    ----------
    name : str
        The method's name, as nodes know it.
    num_nodes, dim : int
        Nodes m, and the model's dimension n.
    graph : GraphAt
        The communication graph of an iteration.
    sizes : PayloadSizes
        The size of a message.
    """

    name: str
    num_nodes: int
    dim: int
    graph: GraphAt
    sizes: PayloadSizes

    def instructions(self, node: int) -> Mapping[str, Scalar]:
        """Return the settings that a node is sent once."""

    @property
    def set_up_bytes(self) -> int:
        """Bytes that a node sends each neighbor before its first message."""
        return 0

    def peers(self, node: int) -> Sequence[int]:
        """Return the nodes that a node exchanges payloads with at any iteration, ascending."""
        return neighbours(self.graph(0), node)

    def wants(self, node: int, k: int) -> Sequence[int] | None:
        """Return the neighbors that a node gets payloads from at iteration k; None if the node chooses."""
        return None

    def first(self, node: int) -> int | None:
        """Return how many payloads a node takes, the first that arrive; None for all that it wants."""
        return None

    def event(self, node: int, k: int, readers: Sequence[int]) -> Mapping[str, Scalar]:
        """Return a node's config for iteration k; ``readers`` are its payload's receivers, ascending."""
        return {}

    def describe(self) -> Iterable[str]:
        """Return the settings in a few lines."""
        return []
