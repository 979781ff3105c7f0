"""Sealed messages between the hospital and devices of a group, which the server cannot read.

Each share of encodings is sealed for one peer and bound to the iteration, its kind and its people, so a share
that the server delivers to another peer or at another iteration does not open. The common head of all devices
is sealed once, with a key inside each share. Opened data are checked here, because the server cannot.
"""

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from flwr.common import log
from numpy.typing import NDArray

from hedgerow.clients.instructions import flag, whole
from hedgerow.clients.links import NodeLinks, check_sealed
from hedgerow.wire.calls import Call
from hedgerow.wire.parties import INTRODUCTIONS, MALFORMED, REFUSED
from hedgerow.wire.records import PayloadError, config_in
from hedgerow.wire.sealed import ALTERED, HEAD_KEY_BYTES, KEY_BYTES, Link
from hedgerow.wire.sparse_rows import decode_rows, encode_rows, row_bytes

__all__ = ["Channel", "NotOpenedError", "introduction_of", "is_sealed"]

Vector = NDArray[Any]

_SEALED = "sealed"


class NotOpenedError(Exception):
    """No share could be opened; ``reply`` is the node's reply."""

    def __init__(self, reply: RecordDict) -> None:
        super().__init__(REFUSED)
        self.reply = reply


def introduction_of(call: Call, config: ConfigRecord) -> dict[str, Any]:
    """Return a node's introduction on sealed links: its name, keys, and whether it pins others'.

    Raises Refusal if the run is not sealed and the node's owner requires it.
    """
    if not is_sealed(call, config):
        return {}
    links = NodeLinks(call, whole(config, "seed", 0), begin=True)
    links.keep(call.context)
    return {"name": links.own, "introduction": links.identity.introduction, "pinned": links.pinned}


def is_sealed(call: Call, config: ConfigRecord) -> bool:
    """Return whether a run's links are sealed; Refusal as in ``introduction_of``."""
    sealed = flag(config, _SEALED, default=False)
    check_sealed(call, sealed)
    return sealed


@dataclass
class Channel:
    """A node's links to its peers, for one message."""

    call: Call
    links: NodeLinks
    peers: tuple[str, ...]  # One for each person of the batch, or one for all.
    t: int  # The iteration.
    compress: bool  # Whether rows are coded as top-k.
    # Refused peers, by reason.
    refused: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, call: Call, config: ConfigRecord) -> "Channel | None":
        """Take a message's introductions and return its channel; None if the run is not sealed.

        Raises ValueError if the node has no key of the run or the config names no peers, and Refusal as in
        ``introduction_of``.
        """
        if not is_sealed(call, config):
            return None
        peers = config.get("peers")
        if not isinstance(peers, list) or not peers or not all(isinstance(one, str) for one in peers):
            raise ValueError(f"peers must be a list of nodes' names, got {peers!r} in the message's config")
        links = NodeLinks(call, whole(config, "seed", 0))
        names, t = tuple(map(str, peers)), whole(config, "t", 0)
        channel = cls(call, links, names, t, flag(config, "compress", default=False))
        new: Mapping[str, Any] = config_in(call.content, INTRODUCTIONS)
        if new:
            links.name_neighbours(new)
        for name in dict.fromkeys(names):
            if new.get(name):
                try:
                    links.meet(name, new[name] if isinstance(new[name], bytes) else b"")
                except PayloadError as error:
                    channel._refuse(name, error)
        return channel

    def _refuse(self, peer: str, error: PayloadError) -> None:
        log(WARNING, "Node %s is refused, nothing is accepted from it or sent to it: %s", peer, error)
        if peer not in self.refused[error.reason]:
            self.refused[error.reason].append(peer)

    def _shares(self, count: int) -> list[tuple[str, list[int]]]:
        """Return each peer with its rows."""
        if len(self.peers) == 1:
            return [(self.peers[0], list(range(count)))]
        if len(self.peers) != count:
            raise ValueError(
                f"peers must have one name, or one for each of {count} people, got {len(self.peers)} in the "
                "message's config"
            )
        return [(peer, [row]) for row, peer in enumerate(self.peers)]

    # Sending.

    def sealed(self, ids: Sequence[str], kind: str, rows: Vector, head: Vector | None = None) -> RecordDict:
        """Seal each peer's rows of (ids, n); a refused peer's share is empty.

        - ``kind``: Kind of the shares, to which they are bound, and their key in the reply.
        - ``head``: (n,) for all peers, or (ids, n) with a row per person.
        """
        record = ConfigRecord()
        common = b""
        if head is not None and head.ndim == 1:
            key = os.urandom(KEY_BYTES)
            sealed = Link(key, self.links.run, self.links.own, "").seal(
                self._coded(head[None]), self.t, "head"
            )
            # All devices have the key. The digest keeps one of them from replacing the head.
            common, record["head"], head = key + sha256(sealed).digest(), sealed, None
        shares = []
        for peer, own in self._shares(len(ids)):
            heads = b"" if head is None else self._coded(head[own])
            contents = common + heads + self._coded(rows[own])
            shares.append(self._share(peer, contents, _purpose(kind, [ids[row] for row in own])))
        record[kind] = shares
        return self.kept(RecordDict({_SEALED: record}))

    def _share(self, peer: str, contents: bytes, purpose: str) -> bytes:
        if any(peer in names for names in self.refused.values()):
            return b""
        try:
            return self.links.link(peer).seal(contents, self.t, purpose)
        except PayloadError as error:
            self._refuse(peer, error)
            return b""

    def kept(self, content: RecordDict) -> RecordDict:
        """Store the links, and return a reply with the refused peers."""
        self.links.keep(self.call.context)
        if self.refused:
            content[REFUSED] = ConfigRecord({reason: list(names) for reason, names in self.refused.items()})
        return content

    def _coded(self, rows: Vector) -> bytes:
        if self.compress:
            return b"".join(encode_rows(rows))
        return np.ascontiguousarray(rows, rows.dtype.newbyteorder("<")).tobytes()

    # Receiving.

    def opened(self, ids: Sequence[str], kind: str, length: int, dtype: Any) -> tuple[list[int], Vector]:
        """Return the positions in ``ids`` of opened encodings, and these (positions, length).

        Raises NotOpenedError if none opens.
        """
        there: list[int] = []
        parts: list[Vector] = []
        payload: Any = self._payload(kind)
        for (peer, own), share in zip(self._shares(len(ids)), payload, strict=False):
            try:
                contents = self._opened(peer, share, _purpose(kind, [ids[row] for row in own]))
                parts.append(self._rows(contents, len(own), length, dtype))
                there += own
            except PayloadError as error:
                self._refuse(peer, error)
        if not there:
            raise NotOpenedError(self.kept(RecordDict()))
        return there, np.concatenate(parts)

    def opened_with_head(
        self, ids: Sequence[str], kind: str, lengths: tuple[int, int], dtype: Any, own_heads: bool
    ) -> tuple[Vector, Vector]:
        """Return the single peer's head, (n0,) or with ``own_heads`` (ids, n0), and encodings (ids, e).

        Raises NotOpenedError if they do not open.
        """
        peer, count = self.peers[0], len(ids)
        try:
            payload: Any = self._payload(kind)
            contents = self._opened(peer, payload[0] if payload else b"", _purpose(kind, ids))
            if own_heads:
                size = count * self._row_bytes(lengths[0], dtype)
                head = self._rows(contents[:size], count, lengths[0], dtype)
                return head, self._rows(contents[size:], count, lengths[1], dtype)
            rows = self._rows(contents[HEAD_KEY_BYTES:], count, lengths[1], dtype)
            sealed = config_in(self.call.content, "payload").get("head")
            sealed = sealed if isinstance(sealed, bytes) else b""
            if sha256(sealed).digest() != contents[KEY_BYTES:HEAD_KEY_BYTES]:
                raise PayloadError(ALTERED, "the head is not the peer's")
            coded = Link(contents[:KEY_BYTES], self.links.run, "", peer).open(sealed, self.t, "head")
            return self._rows(coded, 1, lengths[0], dtype)[0], rows
        except PayloadError as error:
            self._refuse(peer, error)
            raise NotOpenedError(self.kept(RecordDict())) from error

    def _payload(self, kind: str) -> list[Any]:
        payload = config_in(self.call.content, "payload").get(kind)
        return payload if isinstance(payload, list) else []

    def _opened(self, peer: str, share: Any, purpose: str) -> bytes:
        return self.links.link(peer).open(share if isinstance(share, bytes) else b"", self.t, purpose)

    def _row_bytes(self, length: int, dtype: Any) -> int:
        return row_bytes(length) if self.compress else length * np.dtype(dtype).itemsize

    def _rows(self, contents: bytes, count: int, length: int, dtype: Any) -> Vector:
        """Decode rows (count, length); PayloadError if a peer sealed anything else."""
        size = self._row_bytes(length, dtype)
        if len(contents) != count * size:
            raise PayloadError(MALFORMED, f"{len(contents)} bytes, expected {count * size}")
        if self.compress:
            try:
                coded = [contents[start : start + size] for start in range(0, len(contents), size)]
                return decode_rows(coded, count, length).astype(dtype, copy=False)
            except PayloadError as error:
                raise PayloadError(MALFORMED, str(error)) from error
        rows = np.frombuffer(contents, np.dtype(dtype).newbyteorder("<")).reshape(count, length)
        if not np.isfinite(rows).all():
            raise PayloadError(MALFORMED, "NaN or infinity")
        return rows.astype(dtype)


def _purpose(kind: str, ids: Sequence[str]) -> str:
    return json.dumps([kind, *ids])
