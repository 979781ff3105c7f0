"""HSGD's messages at the server: their records, and the checks of each reply.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", Algorithm 1, lines 5 to 21.
Differs: nodes reach each other through Flower's server only, which relays encodings and heads.

``hedgerow.clients.hsgd_client`` documents the messages. On sealed links, hospital and devices exchange bytes
that the server cannot read, in the ConfigRecord ``sealed`` of a reply and ``payload`` of an update: ``zeta2``
and ``zeta1`` are lists with a share per peer (a device, or the group's edge). A share of ``zeta1`` begins
with the pairs' heads, or with the key and digest of the common ``head``, which is sealed once. ``peers`` in
the config names the peers, and the record ``introductions`` has the keys of new ones. The record ``refused``
of a reply has the refused peers, by reason; a withheld share is empty.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from hedgerow.strategies.inbox import checked_metrics
from hedgerow.wire.records import PayloadError, config_in, records_of, to_record, view
from hedgerow.wire.sealed import HEAD_KEY_BYTES, SEAL_BYTES
from hedgerow.wire.sparse_rows import row_bytes

__all__ = ["Encodings", "Heads", "Schema", "SealedForAll", "picked", "records"]

Vector = NDArray[Any]
# A row per person: dense (a, e), or each row's bytes.
Encodings = NDArray[Any] | list[bytes]
# One head (n0,), a head per pair (a, n0), or a compressed head's bytes.
Heads = NDArray[Any] | bytes


class SealedForAll(list[bytes]):
    """One sealed share for all people of a batch, between an edge and its hospital."""


def records(**parts: Vector | bytes | list[bytes]) -> dict[str, ArrayRecord | ConfigRecord]:
    """Return the records ``arrays`` and ``payload`` with these arrays and bytes."""
    arrays = {key: part for key, part in parts.items() if isinstance(part, np.ndarray)}
    coded: dict[str, Any] = {
        key: list(part) if isinstance(part, list) else part
        for key, part in parts.items()
        if key not in arrays
    }
    found: dict[str, ArrayRecord | ConfigRecord] = {"arrays": to_record(arrays)} if arrays else {}
    return {**found, "payload": ConfigRecord(coded)} if coded else found


def picked(rows: Encodings, chosen: Sequence[int]) -> Encodings:
    """Return the chosen rows; a share that is sealed for all rows stays whole."""
    if isinstance(rows, SealedForAll):
        return rows
    return [rows[i] for i in chosen] if isinstance(rows, list) else rows[list(chosen)]


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

    def hospital_shares(self, content: RecordDict, a: int, peers: int) -> tuple[bytes, list[bytes]]:
        """Return the sealed head (empty with pairs), and each peer's share (empty if withheld)."""
        rows, head = a // peers, self.coded(self.head)
        common = rows * head if self.pairs else HEAD_KEY_BYTES
        shares = self._shares(content, "zeta1", peers, common + rows * self.coded(self.zeta1), not self.pairs)
        if self.pairs:
            return b"", shares
        sealed = records_of(content, ConfigRecord)["sealed"].get("head")
        if not isinstance(sealed, bytes) or len(sealed) != head + SEAL_BYTES:
            raise PayloadError("wrong size", f"head is not of {head + SEAL_BYTES} sealed bytes")
        return sealed, shares

    def device_share(self, content: RecordDict, a: int, key: str) -> list[bytes]:
        """Return the single share from a device, or from an edge with a people, for its hospital."""
        return self._shares(content, key, 1, a * self.coded(self.zeta2), False)

    def _shares(self, content: RecordDict, key: str, count: int, size: int, head: bool) -> list[bytes]:
        _only_records(content, {"sealed"})
        record = config_in(content, "sealed")
        _same_keys(record, {key: None, **({"head": None} if head else {})})
        shares = record[key]
        if not isinstance(shares, list) or len(shares) != count:
            raise PayloadError("wrong shape", f"{key!r} must have {count} shares")
        if not all(isinstance(one, bytes) and len(one) in (0, size + SEAL_BYTES) for one in shares):
            raise PayloadError("wrong size", f"{key!r} is not of {size + SEAL_BYTES} sealed bytes")
        return cast(list[bytes], shares)

    def coded(self, length: int) -> int:
        """Return the bytes of a head or a row of encodings."""
        return row_bytes(length) if self.compressed else self.dense(length)

    def dense(self, length: int) -> int:
        """Return the bytes of a block of the model."""
        return length * self.dtype.itemsize

    def hospital_exchange(self, content: RecordDict, a: int) -> tuple[Heads, Encodings]:
        """Return head and zeta1 (a, e1)."""
        if self.compressed:
            coded = self._coded(content, {"head": None, "zeta1": a})
            return coded["head"][0], coded["zeta1"]
        head = (a, self.head) if self.pairs else (self.head,)
        arrays = self._arrays(content, {"head": head, "zeta1": (a, self.zeta1)})
        return arrays["head"], arrays["zeta1"]

    def device_exchange(self, content: RecordDict, a: int) -> Encodings:
        """Return zeta2 (a, e2) of a device (a = 1) or edge."""
        if self.compressed:
            return self._coded(content, {"zeta2": a})["zeta2"]
        return self._arrays(content, {"zeta2": (a, self.zeta2)})["zeta2"]

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

    def _coded(self, content: RecordDict, counts: Mapping[str, int | None]) -> dict[str, list[bytes]]:
        """Return rows of bytes, checked for number and size only; a count of None is a single value.

        The server relays them without decoding.
        """
        _only_records(content, {"payload"})
        record = config_in(content, "payload")
        _same_keys(record, counts)
        lengths = {"head": self.head, "zeta1": self.zeta1, "zeta2": self.zeta2}
        coded = {}
        for key, count in counts.items():
            rows = [record[key]] if count is None else record[key]
            if not isinstance(rows, list) or len(rows) != (count or 1):
                raise PayloadError("wrong shape", f"{key!r} must have {count} rows")
            size = row_bytes(lengths[key])
            if not all(isinstance(one, bytes) and len(one) == size for one in rows):
                raise PayloadError("wrong size", f"{key!r} is not of {size} bytes a row")
            coded[key] = cast(list[bytes], rows)
        return coded


def _only_records(content: RecordDict, expected: set[str]) -> None:
    if set(content) != expected:
        raise PayloadError("unknown record", f"{sorted(content)}, expected {sorted(expected)}")


def _same_keys(record: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    if missing := [key for key in expected if key not in record]:
        raise PayloadError("missing key", f"{missing[0]!r}")
    if unknown := [key for key in record if key not in expected]:
        raise PayloadError("unknown key", f"{unknown[0]!r}")
