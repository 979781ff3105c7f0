"""HSGD's messages at a node: reading requests, writing replies, and the memory between messages.

``node.py`` has the table of messages. Every error is a ``ValueError`` that names the fault; for invalid
arrays and payloads it is a ``PayloadError``.

The server cannot read sealed messages between the hospital and devices of a group. Each share of encodings
is sealed for one peer and bound to the iteration, its kind and its people, so a share that the server
delivers to another peer or at another iteration does not open. The common head of all devices is sealed once,
with a key inside each share. Opened data are checked here, because the server cannot.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.common import log
from numpy.typing import NDArray

from hedgerow.clients.gradient_noise import noise_root
from hedgerow.clients.grid_noise import GridNoise, noise_key
from hedgerow.clients.hsgd.step import Party
from hedgerow.clients.instructions import flag, nonnegative, positive, strings, whole
from hedgerow.clients.links import NodeLinks, check_sealed
from hedgerow.clients.mods.guard import check_privacy, check_release
from hedgerow.wire.calls import Call
from hedgerow.wire.parties import INTRODUCTIONS, MALFORMED, REFUSED
from hedgerow.wire.records import PayloadError, config_in, finite_views, to_record, view
from hedgerow.wire.sealed import ALTERED, HEAD_KEY_BYTES, KEY_BYTES, Link
from hedgerow.wire.sparse_rows import decode_rows, encode_rows, row_bytes

Vector = NDArray[Any]

_ARRAYS, _CONFIG, _PAYLOAD = "arrays", "config", "payload"
_STATE, _STATE_AT = "hsgd", "hsgd-at"  # Records in context.state.
# The memory before the last steps, which are undone if the server did not receive the reply.
_BEFORE, _BEFORE_AT = "hsgd-before", "hsgd-before-at"
_START = "start-"  # Prefix of a block's name there.
_SEALED = "sealed"  # In a config, and the record of a sealed reply.


def config_of(call: Call) -> ConfigRecord:
    """Return the message's ConfigRecord ``config``."""
    config = call.content.get(_CONFIG)
    if not isinstance(config, ConfigRecord):
        raise ValueError(
            f"the message must have a ConfigRecord 'config', got the records {sorted(call.content)}"
        )
    return config


def seed_of(call: Call) -> int:
    """Return the seed of the message, or of the run config if the message has none."""
    config = config_of(call)
    return whole(config if "seed" in config else ConfigRecord({**call.context.run_config}), "seed", 0)


def batch_of(config: ConfigRecord, party: Party) -> tuple[str, ...]:
    """Return the people of the message's batch; a device's is its one person."""
    if party.role == "device":
        return (str(party.ids[0]),)
    if (ids := config.get("ids")) is None:
        raise ValueError(
            f"ids is missing in the message's config: it must be a list of ids for a {party.role}"
        )
    if not isinstance(ids, list) or not ids or not all(isinstance(name, str) for name in ids):
        raise ValueError(f"ids must be a non-empty list of sample ids, got {ids!r} in the message's config")
    if len(set(ids)) < len(ids):
        raise ValueError(
            f"ids must have each id once, got {len(ids) - len(set(ids))} twice in the message's config"
        )
    return tuple(map(str, ids))


@dataclass(frozen=True)
class Release:
    """Clipping and noise of each row of encodings before it leaves the node."""

    clip: float | None = None  # Largest L2 norm of a row, > 0; None for no clipping.
    noise_multiplier: float = 0.0  # Standard deviation of the Gaussian noise in units of ``clip``, >= 0.

    @classmethod
    def of(cls, config: ConfigRecord) -> "Release | None":
        """Read ``clip`` and ``noise-multiplier``; None without them."""
        if "clip" not in config and "noise-multiplier" not in config:
            return None
        clip = positive(config, "clip") if "clip" in config else None
        multiplier = nonnegative(config, "noise-multiplier") if "noise-multiplier" in config else 0.0
        if multiplier and clip is None:
            raise ValueError(
                f"noise-multiplier must come with clip, got {multiplier} alone in the message's config"
            )
        return cls(clip, multiplier)

    def __call__(self, rows: Vector, t: int, call: Call) -> Vector:
        """Return the released encodings (rows, e) at iteration t."""
        if self.clip is None:
            return rows
        if self.noise_multiplier:
            return _noised(rows, self.clip, self.noise_multiplier, t, call).astype(rows.dtype)
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        clipped = rows * np.minimum(1.0, self.clip / np.maximum(norms, np.finfo(rows.dtype).tiny))
        return np.asarray(clipped, rows.dtype)


# Separates the seeded noise of a model from that of the same iteration's encodings.
_UPLOADS = 1 << 60


@dataclass(frozen=True)
class ProtectedUpload:
    """Clipping and noise of a model's change, as a whole, before it leaves the node.

    The change always has a norm of at most ``clip``, so another record moves it by at most 2 ``clip``.
    """

    clip: float  # Largest L2 norm of the change, > 0.
    noise_multiplier: float  # Standard deviation of the Gaussian noise in units of ``clip``, > 0.

    @classmethod
    def of(cls, config: ConfigRecord) -> "ProtectedUpload | None":
        """Read ``upload-clip`` and ``upload-noise-multiplier``; None without them."""
        if "upload-clip" not in config and "upload-noise-multiplier" not in config:
            return None
        return cls(positive(config, "upload-clip"), positive(config, "upload-noise-multiplier"))

    def __call__(
        self, arrays: Mapping[str, Vector], start: Mapping[str, Vector], t: int, call: Call
    ) -> dict[str, Vector]:
        """Return a model's released blocks at iteration t; ValueError if the node did not keep its start.

        - ``arrays``: The blocks, (n,) each; or (pairs, n), and each pair's change is clipped separately.
        - ``start``: The blocks that the server sent, (n,) or as ``arrays``.
        """
        if start.keys() != arrays.keys():
            raise ValueError(
                "upload-clip must be in the config of the round's first exchange if it is in this "
                "message's config"
            )
        blocks = [arrays[key].astype(np.float64) - start[key] for key in arrays]
        change = np.concatenate([np.atleast_2d(block) for block in blocks], axis=1)  # (pairs, n)
        change = _noised(change, self.clip, self.noise_multiplier, _UPLOADS + t, call)
        ends = np.cumsum([block.shape[-1] for block in blocks])[:-1]
        parts = zip(arrays.items(), np.split(change, ends, axis=1), strict=True)
        return {key: (start[key] + part.reshape(own.shape)).astype(own.dtype) for (key, own), part in parts}


def _noised(rows: Vector, clip: float, multiplier: float, index: int, call: Call) -> Vector:
    """Clip each row of (rows, n), add the noise of one release, and record it in the ledger.

    Another record moves one row, by at most 2 ``clip``. The node's output depends only on these points of a
    grid and on the server's messages.
    """
    check_privacy("sound", multiplier / 2, clip)
    grid = GridNoise.of(multiplier / 2, clip, rows.shape[1])
    root = noise_root(config_of(call), call.context.node_config, seed_of(call))
    check_release(root, index, multiplier / 2)
    # A row that overflowed must reveal no more than any other.
    rows = np.where(np.isfinite(rows).all(axis=1, keepdims=True), rows, 0.0).astype(np.float64)
    longest = np.abs(rows).max(axis=1, keepdims=True, initial=0.0)
    scale = np.where(longest > 0, longest, 1.0)
    norms = scale * np.linalg.norm(rows / scale, axis=1, keepdims=True)
    clipped = rows * np.minimum(1.0, clip / np.maximum(norms, np.finfo(np.float64).tiny))
    return grid(clipped, noise_key(root, call.partition_id, index))


def received(call: Call, shapes: Mapping[str, tuple[int, ...]], dtype: Any) -> dict[str, Vector]:
    """Return arrays of the message in the model's dtype; PayloadError if one is missing or invalid.

    They are in the record ``arrays``, or in ``payload`` with top-k rows along the last axis of their shape.
    """
    payload, arrays = config_in(call.content, _PAYLOAD), call.content.get(_ARRAYS)
    found: dict[str, Vector] = {}
    for key, shape in shapes.items():
        if key in payload:
            coded, count = payload[key], int(np.prod(shape[:-1], dtype=np.int64))
            rows = decode_rows(coded if isinstance(coded, list) else [coded], count, shape[-1])
            found[key] = rows.reshape(shape).astype(dtype, copy=False)
            continue
        if not isinstance(arrays, ArrayRecord) or key not in arrays:
            raise PayloadError("missing key", f"{key!r}, as an array or as top-k rows")
        values = view(arrays[key])
        if values.shape != shape:
            raise PayloadError("wrong shape", f"{key!r} has {values.shape}, expected {shape}")
        if values.dtype.kind != "f":
            raise PayloadError("wrong dtype", f"{key!r} is {values.dtype}, expected {np.dtype(dtype)}")
        if not np.isfinite(values).all():
            raise PayloadError("non-finite", f"NaN or infinity in {key!r}")
        found[key] = values.astype(dtype, copy=False)
    return found


def reply(arrays: Mapping[str, Vector], *, compress: bool = False) -> RecordDict:
    """Return a reply with arrays: dense, or as top-k bytes, which for a matrix are a list of rows."""
    if not arrays:
        return RecordDict()
    if not compress:
        return RecordDict({_ARRAYS: to_record(arrays)})
    coded = ConfigRecord()
    for key, values in arrays.items():
        rows = encode_rows(np.atleast_2d(values))
        coded[key] = rows if values.ndim > 1 else rows[0]
    return RecordDict({_PAYLOAD: coded})


@dataclass(frozen=True)
class PartyMemory:
    """A node's memory between two messages of a round."""

    t: int  # Iteration of the model.
    # ``head`` and ``hospital``, or ``device``: (n,), or (ids, n) if every pair has its own.
    arrays: Mapping[str, Vector]
    ids: tuple[str, ...] = ()  # The batch A_m, in the order of the exchange.
    pairs: bool = False  # Whether every pair has its own model.
    # The blocks (n,) at the start of the round, if the upload is to be protected.
    start: Mapping[str, Vector] = field(default_factory=dict)
    made_at: int | None = None  # Iteration of the arrays if the group missed those up to t; None for t.

    @classmethod
    def of(cls, context: Context, t: int, since: int | None = None) -> "PartyMemory":
        """Return the memory of iteration t, or of the model that began iteration ``since``.

        The latter is the current or the previous one. ValueError if there is none, or it is not finite.
        """
        state, wanted = context.state, t if since is None else since
        for where, at in ((_STATE, _STATE_AT), (_BEFORE, _BEFORE_AT))[: 1 if since is None else 2]:
            about, kept = config_in(state, at), state.get(where)
            made: Any = about.get("t")
            begun = made if since is None else about.get("made-at", made)
            if isinstance(kept, ArrayRecord) and begun == wanted:
                ids: Any = about.get("ids", [])
                views = finite_views(kept)
                start = {
                    key.removeprefix(_START): one for key, one in views.items() if key.startswith(_START)
                }
                arrays = {key: one for key, one in views.items() if not key.startswith(_START)}
                return cls(made, arrays, tuple(ids), about.get("pairs") is True, start)
        made = config_in(state, _STATE_AT).get("t")
        raise ValueError(
            f"{'t' if since is None else 'since'} is {wanted} in the message's config, so the message must "
            f"have a model: the node holds {'none' if made is None else f'that of iteration {made!r}'}"
        )

    def keep(self, context: Context, *, stepped: bool = False) -> None:
        """Store the memory in ``context.state``; after steps (``stepped``), also keep the previous one.

        Without steps, the server has received all earlier replies.
        """
        state = context.state
        state.pop(_BEFORE, None)
        state.pop(_BEFORE_AT, None)
        if stepped and _STATE in state and _STATE_AT in state:
            state[_BEFORE], state[_BEFORE_AT] = state[_STATE], state[_STATE_AT]
        start = {_START + key: block for key, block in self.start.items()}
        state[_STATE] = to_record({**self.arrays, **start})
        about = ConfigRecord({"t": self.t, "ids": list(self.ids), "pairs": self.pairs})
        if self.made_at is not None:
            about["made-at"] = self.made_at
        state[_STATE_AT] = about

    @staticmethod
    def forget(context: Context) -> None:
        """Remove the memory from ``context.state``."""
        for record in (_STATE, _STATE_AT, _BEFORE, _BEFORE_AT):
            context.state.pop(record, None)

    def places(self, ids: Sequence[str]) -> list[int]:
        """Return the positions of ids in the batch; ValueError if one is not in it."""
        place = {name: number for number, name in enumerate(self.ids)}
        if strangers := [name for name in ids if name not in place]:
            raise ValueError(
                f"ids must be those of the batch at iteration {self.t}, got {strangers[:3]} in the "
                f"message's config, {len(strangers)} in all"
            )
        return [place[name] for name in ids]

    def of_pairs(self, ids: Sequence[str]) -> dict[str, Vector]:
        """Return the arrays with a row per id, (ids, n)."""
        if self.pairs:
            rows = self.places(ids)
            return {key: array[rows] for key, array in self.arrays.items()}
        return {key: np.repeat(array[None], len(ids), axis=0) for key, array in self.arrays.items()}


class NotOpenedError(Exception):
    """No share could be opened; ``reply`` is the node's reply."""

    def __init__(self, reply: RecordDict) -> None:
        super().__init__(REFUSED)
        self.reply = reply


def introduction_of(call: Call, config: ConfigRecord) -> dict[str, Any]:
    """Return a node's introduction on sealed links: its name, keys, and whether it pins others'.

    Raises Refusal if the run is not sealed and the node's owner requires it.
    """
    check_sealed(call, flag(config, _SEALED, default=False))
    if not config.get(_SEALED):
        return {}
    links = NodeLinks(call, whole(config, "seed", 0), begin=True)
    links.keep(call.context)
    return {"name": links.own, "introduction": links.identity.introduction, "pinned": links.pinned}


@dataclass
class Channel:
    """A node's links to its peers, for one message."""

    call: Call
    links: NodeLinks
    peers: Sequence[str]  # Names: one for each person of the batch, or one for all.
    compress: bool  # Whether rows are coded as top-k.
    t: int  # The iteration.
    # Refused peers, by reason.
    refused: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, call: Call, config: ConfigRecord, t: int) -> "Channel | None":
        """Take the introductions of a message of iteration t and return its channel; None if not sealed.

        Raises ValueError if the node has no key of the run, and Refusal as in ``introduction_of``.
        """
        if not flag(config, _SEALED, default=False):
            check_sealed(call, False)
            return None
        if not (peers := strings(config, "peers")):
            raise ValueError("peers must have a name or more, got none in the message's config")
        seed, compress = whole(config, "seed", 0), flag(config, "compress", default=False)
        channel = cls(call, NodeLinks(call, seed), peers, compress, t)
        if INTRODUCTIONS in call.content:
            new = config_in(call.content, INTRODUCTIONS)
            channel.links.name_neighbours(new)
            for name in dict.fromkeys(peers):
                if introduction := new.get(name):
                    try:
                        channel.links.meet(name, introduction if isinstance(introduction, bytes) else b"")
                    except PayloadError as error:
                        channel._refuse(name, error)
        return channel

    def _refuse(self, peer: str, error: PayloadError) -> None:
        log(WARNING, "Node %s is refused, nothing is accepted from it or sent to it: %s", peer, error)
        names = self.refused.setdefault(error.reason, [])
        if peer not in names:
            names.append(peer)

    def _rows_of(self, count: int) -> list[tuple[str, list[int]]]:
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
        for peer, own in self._rows_of(len(ids)):
            heads = b"" if head is None else self._coded(head[own])
            contents, share = common + heads + self._coded(rows[own]), b""
            if not any(peer in names for names in self.refused.values()):
                try:
                    purpose = json.dumps([kind, *(ids[row] for row in own)])
                    share = self.links.link(peer).seal(contents, self.t, purpose)
                except PayloadError as error:
                    self._refuse(peer, error)
            shares.append(share)
        record[kind] = shares
        return self.kept(RecordDict({_SEALED: record}))

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
        for at, (peer, own) in enumerate(self._rows_of(len(ids))):
            try:
                contents = self._opened(kind, at, peer, [ids[row] for row in own])
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
            contents = self._opened(kind, 0, peer, ids)
            if own_heads:
                size = count * self._row_bytes(lengths[0], dtype)
                head = self._rows(contents[:size], count, lengths[0], dtype)
                return head, self._rows(contents[size:], count, lengths[1], dtype)
            rows = self._rows(contents[HEAD_KEY_BYTES:], count, lengths[1], dtype)
            sealed = config_in(self.call.content, _PAYLOAD).get("head")
            sealed = sealed if isinstance(sealed, bytes) else b""
            if sha256(sealed).digest() != contents[KEY_BYTES:HEAD_KEY_BYTES]:
                raise PayloadError(ALTERED, "the head is not the peer's")
            coded = Link(contents[:KEY_BYTES], self.links.run, "", peer).open(sealed, self.t, "head")
            return self._rows(coded, 1, lengths[0], dtype)[0], rows
        except PayloadError as error:
            self._refuse(peer, error)
            raise NotOpenedError(self.kept(RecordDict())) from error

    def _opened(self, kind: str, at: int, peer: str, ids: Sequence[str]) -> bytes:
        """Return the contents of the message's share ``at`` a position, which a peer sealed for these people.

        PayloadError if it does not open.
        """
        shares: Any = config_in(self.call.content, _PAYLOAD).get(kind)
        share = shares[at] if isinstance(shares, list) and at < len(shares) else b""
        sealed = share if isinstance(share, bytes) else b""
        return self.links.link(peer).open(sealed, self.t, json.dumps([kind, *ids]))

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
