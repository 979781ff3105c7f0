"""HSGD's model and messages at the server: records, the checks of each reply, and the booking of transfers.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", Algorithm 1, lines 5 to 21, and cost (19), whose
terms are the nominal bits.
Differs: nodes reach each other through Flower's server only, which relays encodings and heads. Every transfer
is booked with its payload's bytes, see ``costs.py``. Devices keep nothing between local intervals, so in JFL
too they send their models in each interval; the paper counts only the last. Without failures and sealing, the
sums equal ``costs.traffic`` and ``costs.paper_bytes``.

``hedgerow.clients.hsgd_client`` documents the messages. Encodings are shares: a row (e,) that the server can
read, or bytes that it only relays, of a compressed row, or sealed. On sealed links, hospital and devices
exchange bytes in the ConfigRecord ``sealed`` of a reply and ``payload`` of an update: ``zeta2`` and ``zeta1``
are lists with a share per peer (a device, or the group's edge). A share of ``zeta1`` begins with the pairs'
heads, or with the key and digest of the common ``head``, which is sealed once. ``peers`` in the config names
the peers, and the record ``introductions`` has the keys of new ones. The record ``refused`` of a reply has
the refused peers, by reason; a withheld share is empty.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from hedgerow.strategies.hsgd.costs import MethodVariant
from hedgerow.strategies.inbox import checked_metrics
from hedgerow.wire.ledger import Ledger
from hedgerow.wire.parties import MALFORMED, REFUSED
from hedgerow.wire.records import Layout, PayloadError, config_in, records_of, to_record, view
from hedgerow.wire.sealed import HEAD_KEY_BYTES, REASONS, SEAL_BYTES
from hedgerow.wire.sparse_rows import row_bytes

Vector = NDArray[Any]
# Encodings of one person, (e,), or bytes that the server relays: of one person, or sealed for all of a batch.
Share = NDArray[Any] | bytes
# One head (n0,), a head per pair (a, n0), or bytes; empty if there is none.
Head = NDArray[Any] | bytes

_NOMINAL_BITS = 32
_COMPRESSED_BITS = 7  # kappa 32 with kappa = 7 / 32


class Theta(NamedTuple):
    """Head (n0,), hospital's encoder (n1,) and devices' encoder (n2,), as vectors."""

    head: Vector
    hospital: Vector
    device: Vector

    @property
    def whole(self) -> Vector:
        """The concatenated blocks, (n0 + n1 + n2,)."""
        joined: Vector = np.concatenate(self)
        return joined

    def split(self, whole: Vector) -> "Theta":
        """Split a vector (n0 + n1 + n2,) into blocks of this model's lengths."""
        return Theta(*np.split(whole, np.cumsum([len(block) for block in self])[:-1]))

    def like(self, whole: Vector) -> "Theta":
        """Split a vector into blocks of this model's lengths and types."""
        parts = zip(self.split(whole), self, strict=True)
        return Theta(*(part.astype(block.dtype) for part, block in parts))


class ThetaBlocks:
    """The positions of the blocks in a model's flat vector: keys ``head.*``, ``hospital.*``, ``device.*``."""

    def __init__(self, layout: Layout) -> None:
        where: dict[str, list[NDArray[np.intp]]] = {name: [] for name in Theta._fields}
        for (key, part), dtype in zip(layout.slices.items(), layout.dtypes, strict=True):
            block = key.partition(".")[0]
            if block not in where:
                raise ValueError(
                    f"initial_arrays must have the keys head.*, hospital.* and device.*, got {key!r}"
                )
            if np.dtype(dtype).kind != "f":
                raise ValueError(f"initial_arrays[{key!r}] must be of a floating-point type, got {dtype}")
            where[block].append(np.arange(part.start, part.stop))
        for block, parts in where.items():
            if not parts or not sum(map(len, parts)):
                raise ValueError(f"initial_arrays must have at least one key {block}.* with entries")
        self._where = Theta(*(np.concatenate(parts) for parts in where.values()))
        self.sizes = tuple(map(len, self._where))

    def split(self, vector: Vector) -> Theta:
        """Return a flat vector's blocks, each in key order."""
        return Theta(*(vector[where] for where in self._where))

    def join(self, theta: Theta) -> Vector:
        """Return the flat vector of the blocks."""
        vector = np.empty(sum(self.sizes), np.result_type(*theta))
        for where, block in zip(self._where, theta, strict=True):
            vector[where] = block
        return vector


def records(**parts: Vector | bytes | Sequence[Share]) -> dict[str, ArrayRecord | ConfigRecord]:
    """Return the records ``arrays`` and ``payload`` with these arrays and bytes; empty ones are left out.

    A sequence of rows is one array.
    """
    arrays: dict[str, Vector] = {}
    coded: dict[str, Any] = {}
    for key, part in parts.items():
        if isinstance(part, np.ndarray):
            arrays[key] = part
        elif isinstance(part, bytes) or isinstance(part[0], bytes):
            coded |= {key: part} if part else {}
        else:
            arrays[key] = np.stack(part)
    found: dict[str, ArrayRecord | ConfigRecord] = {"arrays": to_record(arrays)} if arrays else {}
    return {**found, "payload": ConfigRecord(coded)} if coded else found


def refused_peers(content: RecordDict) -> tuple[RecordDict, dict[str, tuple[str, ...]]]:
    """Split a reply on sealed links into its other records and the refused peers' names, by reason."""
    record = content.get(REFUSED)
    if not isinstance(record, ConfigRecord):
        return content, {}
    refused = {}
    for reason in (*REASONS, MALFORMED):
        names = record.get(reason)
        if isinstance(names, list) and names:
            refused[reason] = tuple(dict.fromkeys(map(str, names)))
    return RecordDict({key: record for key, record in content.items() if key != REFUSED}), refused


@dataclass(frozen=True)
class Schema:
    """The sizes and types of valid replies; a reply must have exactly these arrays, with finite values.

    The methods that read a reply raise PayloadError if it is invalid.
    """

    # n0, n1 and n2 of the model.
    head: int
    hospital: int
    device: int
    # e1 and e2, the lengths of an encoding.
    zeta1: int
    zeta2: int
    dtype: np.dtype[Any]  # The model's, a floating-point type.
    compressed: bool = False  # Whether head and encodings are sent as top-k payloads.
    pairs: bool = False  # Whether every pair has its own model.
    protected: bool = False  # Whether uploads are noisy; hospitals then report no loss.
    sealed: bool = False  # Whether heads and encodings are sealed.

    def coded(self, length: int) -> int:
        """Return the bytes of a head or a row of encodings."""
        return row_bytes(length) if self.compressed else self.dense(length)

    def dense(self, length: int) -> int:
        """Return the bytes of a block of the model."""
        return length * self.dtype.itemsize

    def hospital_exchange(self, content: RecordDict, a: int, hosted: bool) -> tuple[Head, Sequence[Share]]:
        """Return head and zeta1 of ``a`` people; ``hosted`` if one edge has all their devices.

        On sealed links there is one share per peer, empty if withheld. With pairs their heads are in it.
        """
        if not (self.sealed or self.compressed):
            head = (a, self.head) if self.pairs else (self.head,)
            arrays = self._arrays(content, {"head": head, "zeta1": (a, self.zeta1)})
            return arrays["head"], list(arrays["zeta1"])
        common, row = self.coded(self.head), self.coded(self.zeta1)
        if not self.sealed:
            return self._relayed(content, "zeta1", a, row, common)
        shares = 1 if hosted else a
        if self.pairs:
            return self._relayed(content, "zeta1", shares, a // shares * (common + row) + SEAL_BYTES)
        size = HEAD_KEY_BYTES + a // shares * row + SEAL_BYTES
        return self._relayed(content, "zeta1", shares, size, common + SEAL_BYTES)

    def device_exchange(self, content: RecordDict, a: int, sealed_as: str = "zeta2") -> Sequence[Share]:
        """Return zeta2 of a device (a = 1) or edge, on sealed links as one share, empty if withheld."""
        row = self.coded(self.zeta2)
        if self.sealed:
            return self._relayed(content, sealed_as, 1, a * row + SEAL_BYTES)[1]
        if self.compressed:
            return self._relayed(content, "zeta2", a, row)[1]
        return list(self._arrays(content, {"zeta2": (a, self.zeta2)})["zeta2"])

    def _relayed(
        self, content: RecordDict, key: str, count: int, size: int, head: int | None = None
    ) -> tuple[bytes, list[Share]]:
        """Return a head and shares of bytes, checked for number and size only."""
        where = "sealed" if self.sealed else "payload"
        _only_records(content, {where})
        record = config_in(content, where)
        _same_keys(record, {key: None, **({} if head is None else {"head": None})})
        shares, common = record[key], record.get("head", b"")
        if not isinstance(shares, list) or len(shares) != count:
            raise PayloadError("wrong shape", f"{key!r} must have {count} shares")
        sizes = (0, size) if self.sealed else (size,)
        if not all(isinstance(one, bytes) and len(one) in sizes for one in shares):
            raise PayloadError("wrong size", f"{key!r} is not of {size} bytes a share")
        if not isinstance(common, bytes) or len(common) != (head or 0):
            raise PayloadError("wrong size", f"'head' is not of {head} bytes")
        return common, cast(list[Share], shares)

    def hospital_update(
        self, content: RecordDict, a: int, upload: bool
    ) -> tuple[float | None, Vector, Vector]:
        """Return the loss (None if ``protected``), and head and hospital, both empty unless ``upload``."""
        metrics = checked_metrics(content, "num-examples")
        loss = None if self.protected else metrics.get("loss")
        if not self.protected and not isinstance(loss, float | int):
            raise PayloadError("bad metrics", f"loss={loss!r}, expected a number")
        rows = (a,) if self.pairs else ()
        shapes = {"head": (*rows, self.head), "hospital": (*rows, self.hospital)}
        arrays = self._arrays(content, shapes if upload else {}, metrics=True)
        nothing = np.zeros(0, self.dtype)
        loss = None if loss is None else float(loss)  # type: ignore[arg-type]
        return loss, arrays.get("head", nothing), arrays.get("hospital", nothing)

    def device_update(self, content: RecordDict, upload: bool) -> Vector:
        """Return a device's model or an edge's mean (n2,); empty unless ``upload``."""
        checked_metrics(content, "num-examples")
        arrays = self._arrays(content, {"device": (self.device,)} if upload else {}, metrics=True)
        return arrays.get("device", np.zeros(0, self.dtype))

    def _arrays(
        self, content: RecordDict, shapes: Mapping[str, tuple[int, ...]], metrics: bool = False
    ) -> dict[str, Vector]:
        _only_records(content, ({"arrays"} if shapes else set()) | ({"metrics"} if metrics else set()))
        record = records_of(content, ArrayRecord).get("arrays", ArrayRecord())
        _same_keys(record, shapes)
        values = {key: view(record[key]) for key in shapes}
        for key, shape in shapes.items():
            if values[key].shape != shape:
                raise PayloadError("wrong shape", f"{key!r} has {values[key].shape}, expected {shape}")
            if values[key].dtype != self.dtype:
                raise PayloadError("wrong dtype", f"{key!r} is {values[key].dtype}, expected {self.dtype}")
            if not np.isfinite(values[key]).all():
                raise PayloadError("non-finite", f"NaN or infinity in {key!r}")
        return values


def _only_records(content: RecordDict, expected: set[str]) -> None:
    if set(content) != expected:
        raise PayloadError("unknown record", f"{sorted(content)}, expected {sorted(expected)}")


def _same_keys(record: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    if missing := [key for key in expected if key not in record]:
        raise PayloadError("missing key", f"{missing[0]!r}")
    if unknown := [key for key in record if key not in expected]:
        raise PayloadError("unknown key", f"{unknown[0]!r}")


@dataclass(frozen=True)
class Books:
    """Books the transfers of a group with number m on all its links, in a round."""

    ledger: Ledger
    schema: Schema
    # TDCD has no link to the cloud, and its cost is stated per original group, each with a head.
    variant: MethodVariant
    round: int

    def models_down(self, m: int, a: int, *, to_group: bool, to_devices: bool) -> None:
        """Book the global model, sent to the group, and theta_2, sent to ``a`` devices."""
        sizes = self.schema
        if to_group and self.variant.has_cloud:
            self._book("cloud->hospital", m, sizes.dense(sizes.head + sizes.hospital))
            self._book("cloud->edge", m, sizes.dense(sizes.device))
        if to_devices:
            self._book("edge->device", m, sizes.dense(a * sizes.device))

    def encodings_to_edge(self, m: int, a: int, hosted: bool, *, hospital: bool) -> None:
        """Book zeta2 of ``a`` devices, or the hospital's head (in JFL one per pair) and zeta1."""
        sizes = self.schema
        seals = self._seals(a, hosted, hospital=hospital, edge=hospital)
        if not hospital:
            self._book("device->edge", m, a * sizes.coded(sizes.zeta2) + seals)
            return
        heads = a if sizes.pairs else 1
        payload = heads * sizes.coded(sizes.head) + a * sizes.coded(sizes.zeta1) + seals
        scalars = heads * sizes.head * self.variant.system.original_groups + a * sizes.zeta1
        self._book("hospital->edge", m, payload, scalars * self._bits_of_encoding)

    def encodings_relayed(self, m: int, a: int, hosted: bool) -> None:
        """Book the batch's zeta2, sent to the hospital, and the head and one row of zeta1 for each device."""
        sizes = self.schema
        payload = a * sizes.coded(sizes.zeta2) + self._seals(a, hosted, hospital=False, edge=True)
        self._book("edge->hospital", m, payload, a * sizes.zeta2 * self._bits_of_encoding)
        one = sizes.coded(sizes.head) + sizes.coded(sizes.zeta1)
        self._book("edge->device", m, a * one + self._seals(a, hosted, hospital=True, edge=False))

    def models_to_edge(self, m: int, a: int, counted: bool) -> None:
        """Book the models of ``a`` devices; the paper counts a pair's only at the end of a round."""
        scalars = a * self.schema.device
        self._book("device->edge", m, self.schema.dense(scalars), scalars * _NOMINAL_BITS if counted else 0)

    def to_cloud(self, m: int, a: int) -> None:
        """Book head and hospital's encoder (in JFL per pair), and the edge's theta_2."""
        if not self.variant.has_cloud:
            return
        sizes, pairs = self.schema, a if self.schema.pairs else 1
        head, hospital = pairs * sizes.head, pairs * sizes.hospital
        # (19) omits the head. The paper gives no cost of JFL, so all is counted.
        counted = hospital + head if sizes.pairs else hospital
        self._book("hospital->cloud", m, sizes.dense(head + hospital), counted * _NOMINAL_BITS)
        self._book("edge->cloud", m, sizes.dense(sizes.device))

    def raw_data(self, raw_bytes: float) -> None:
        """Book TDCD's one-off transfer of raw features, ``raw_bytes`` per original group."""
        moved = round(raw_bytes * self.variant.system.original_groups)
        self.ledger.book(self.round, "hospital->hospital", 0, 0, 8 * moved, moved)

    @property
    def _bits_of_encoding(self) -> int:
        return _COMPRESSED_BITS if self.schema.compressed else _NOMINAL_BITS

    def _seals(self, a: int, hosted: bool, *, hospital: bool, edge: bool) -> int:
        """Return the bytes that sealing adds to a transfer of the hospital's or the devices' ``a`` rows.

        ``edge`` if it is between edge and hospital: devices on an edge node seal nothing between them and it.
        """
        if not self.schema.sealed or (hosted and not edge):
            return 0
        shares = 1 if hosted else a
        if not hospital or self.schema.pairs:
            return shares * SEAL_BYTES
        heads = 1 if edge else shares
        return shares * (SEAL_BYTES + HEAD_KEY_BYTES) + heads * SEAL_BYTES

    def _book(self, link: str, m: int, payload: int, bits: int = 0) -> None:
        self.ledger.book(self.round, link, m, m, bits, payload)
