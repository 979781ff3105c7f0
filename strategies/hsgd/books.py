"""Booking of HSGD's transfers: the bytes on each link, and the paper's nominal bits.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning": cost (19), whose terms are the nominal bits.
Differs: every transfer is booked with its payload's bytes, while (19) counts neither downlinks, nor an
encoding's hop from device to edge, nor head and device encoder of a global aggregation. Devices keep nothing
between local intervals, so in JFL too they send their models in each interval; the paper counts only the
last. Without failures and sealing, the sums equal ``costs.traffic`` and ``costs.paper_bytes``. ``seals`` are
the bytes that sealing adds to a transfer.
"""

from dataclasses import dataclass

from hedgerow.strategies.hsgd.messages import Schema
from hedgerow.strategies.hsgd.system import MethodVariant
from hedgerow.wire.ledger import Ledger

__all__ = ["Books"]

_NOMINAL_BITS = 32
_COMPRESSED_BITS = 7  # kappa 32 with kappa = 7 / 32


@dataclass(frozen=True)
class Books:
    """Books one group's transfers; m is the group's number on all its links."""

    ledger: Ledger
    schema: Schema
    # TDCD has no link to the cloud, and its cost is stated per original group, each with a head.
    variant: MethodVariant

    def model_to_devices(self, server_round: int, m: int, a: int) -> None:
        """Book theta_2, sent to a devices."""
        self._book(server_round, "edge->device", m, self.schema.dense(a * self.schema.device))

    def encodings_to_edge(self, server_round: int, m: int, a: int, seals: int = 0) -> None:
        """Book zeta2 of a devices."""
        self._book(server_round, "device->edge", m, a * self.schema.coded(self.schema.zeta2) + seals)

    def encodings_to_hospital(self, server_round: int, m: int, a: int, seals: int = 0) -> None:
        """Book the batch's zeta2."""
        zeta2 = self.schema.zeta2
        payload, bits = a * self.schema.coded(zeta2) + seals, a * zeta2 * self._bits_of_encoding
        self._book(server_round, "edge->hospital", m, payload, bits)

    def head_and_encodings_to_edge(self, server_round: int, m: int, a: int, seals: int = 0) -> None:
        """Book the hospital's head (in JFL one per pair), and the batch's zeta1."""
        heads = a if self.schema.pairs else 1
        scalars = heads * self.schema.head * self.variant.system.original_groups + a * self.schema.zeta1
        head, zeta1 = self.schema.coded(self.schema.head), self.schema.coded(self.schema.zeta1)
        payload = heads * head + a * zeta1 + seals
        self._book(server_round, "hospital->edge", m, payload, scalars * self._bits_of_encoding)

    def head_and_encodings_to_devices(self, server_round: int, m: int, a: int, seals: int = 0) -> None:
        """Book the head and one row of zeta1 for each of a devices."""
        one = self.schema.coded(self.schema.head) + self.schema.coded(self.schema.zeta1)
        self._book(server_round, "edge->device", m, a * one + seals)

    def models_to_edge(self, server_round: int, m: int, a: int, counted: bool = True) -> None:
        """Book the models of a devices; the paper counts a pair's only at the end of a round."""
        scalars = a * self.schema.device
        bits = scalars * _NOMINAL_BITS if counted else 0
        self._book(server_round, "device->edge", m, self.schema.dense(scalars), bits)

    def to_cloud(self, server_round: int, m: int, a: int) -> None:
        """Book head and hospital's encoder (in JFL per pair), and the edge's theta_2."""
        if not self.variant.has_cloud:
            return
        pairs = a if self.schema.pairs else 1
        head, hospital = pairs * self.schema.head, pairs * self.schema.hospital
        # (19) omits the head. The paper gives no cost of JFL, so all is counted.
        counted = hospital + head if self.schema.pairs else hospital
        bits = counted * _NOMINAL_BITS
        self._book(server_round, "hospital->cloud", m, self.schema.dense(head + hospital), bits)
        self._book(server_round, "edge->cloud", m, self.schema.dense(self.schema.device))

    def from_cloud(self, server_round: int, m: int) -> None:
        """Book the global model."""
        if not self.variant.has_cloud:
            return
        down = self.schema.dense(self.schema.head + self.schema.hospital)
        self._book(server_round, "cloud->hospital", m, down)
        self._book(server_round, "cloud->edge", m, self.schema.dense(self.schema.device))

    def raw_data(self, server_round: int, raw_bytes: float) -> None:
        """Book TDCD's one-off transfer of raw features, ``raw_bytes`` per original group."""
        moved = round(raw_bytes * self.variant.system.original_groups)
        self.ledger.book(server_round, "hospital->hospital", 0, 0, 8 * moved, moved)

    @property
    def _bits_of_encoding(self) -> int:
        return _COMPRESSED_BITS if self.schema.compressed else _NOMINAL_BITS

    def _book(self, server_round: int, link: str, m: int, payload: int, bits: int = 0) -> None:
        self.ledger.book(server_round, link, m, m, bits, payload)
