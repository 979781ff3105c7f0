"""One local interval of HSGD over messages: requests, checks of replies, failed parties, and bookings.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", Algorithm 1, lines 5 to 26, and cost (19), whose
terms are the nominal bits. ``algorithm.py`` states the effect of failures. If a group skips an interval after
one side has made its steps, that side undoes them (``since``).
Differs: nodes reach each other through Flower's server only, which relays encodings and heads. Every transfer
is booked with its payload's bytes, see ``theory.py``. Devices keep nothing between local intervals, so in JFL
too they send their models in each interval; the paper counts only the last. Without failures and sealing, the
sums equal ``theory.traffic`` and ``theory.paper_bytes``.

``hedgerow.clients.hsgd_client`` documents the messages. Encodings are shares: a row (e,) that the server can
read, or bytes that it only relays, of a compressed row, or sealed. On sealed links, hospital and devices
exchange bytes in the ConfigRecord ``sealed`` of a reply and ``payload`` of an update: ``zeta2`` and ``zeta1``
are lists with a share per peer (a device, or the group's edge). A share of ``zeta1`` begins with the pairs'
heads, or with the key and digest of the common ``head``, which is sealed once. ``peers`` in the config names
the peers, and the record ``introductions`` has the keys of new ones. The record ``refused`` of a reply has
the refused peers, by reason; a withheld share is empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common import log
from numpy.typing import NDArray

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Ask, Exchange, Row, Steps, Together
from hedgerow.strategies.hsgd.privacy import RecordExposure
from hedgerow.strategies.inbox import checked_metrics
from hedgerow.strategies.introductions import Introductions
from hedgerow.strategies.parts import Part
from hedgerow.wire.ledger import Ledger
from hedgerow.wire.limits import MAX_PLACES
from hedgerow.wire.message_types import EXCHANGE, UPDATE
from hedgerow.wire.parties import INTRODUCTIONS, MALFORMED, REFUSED
from hedgerow.wire.records import Layout, PayloadError, to_record, view
from hedgerow.wire.sealed import HEAD_KEY_BYTES, REASONS, SEAL_BYTES
from hedgerow.wire.seeds import Purpose, generator
from hedgerow.wire.sparse_rows import row_bytes

Vector = NDArray[Any]
# Encodings of one person, (e,), or bytes that the server relays: of one person, or sealed for all of a batch.
Share = NDArray[Any] | bytes
# One head (n0,), a head per pair (a, n0), or bytes; empty if there is none.
Head = NDArray[Any] | bytes
Scalar = bool | int | float | str
# Takes an updated block of the model, the block that was sent, and its name; PayloadError if too far apart.
Hold = Callable[[Vector, Vector, str], None]

_NOMINAL_BITS = 32
# Of a scalar of a head or encoding, also if compressed: kappa 32 with kappa = 7 / 32.
_BITS_OF_ENCODING = {False: _NOMINAL_BITS, True: 7}


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

    def split(self, whole: Vector) -> Theta:
        """Split a vector (n0 + n1 + n2,) into blocks of this model's lengths."""
        return Theta(*np.split(whole, np.cumsum([len(block) for block in self])[:-1]))


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


# Groups.


@dataclass(frozen=True)
class Group:
    """One hospital, its people, and their devices."""

    number: int  # m, from 0.
    hospital: int  # The hospital's partition id.
    ids: tuple[str, ...]  # The people, in the order of the hospital's rows.
    node_of: Mapping[str, int]  # Partition id of the node with each person's device.
    hosted: bool  # Whether one edge node has all devices.

    @property
    def size(self) -> int:
        """K_m, the group's people."""
        return len(self.ids)

    @property
    def partitions(self) -> set[int]:
        """The partition ids of all its nodes."""
        return {self.hospital, *self.node_of.values()}

    def people_at(self, node: int) -> list[str]:
        """Return whose devices a node has."""
        return [person for person in self.ids if self.node_of[person] == node]


def batch_size(participation: float, size: int) -> int:
    """Return |A_m| = max(1, floor(alpha K_m)); an alpha of a / K_m is taken for a, whatever its rounding."""
    return max(1, int(participation * size * (1 + 1e-12)))


def draw(
    group: Group, count: int, *, seed: int, t: int, purpose: Purpose = Purpose.PARTICIPATION, number: int = 0
) -> list[str]:
    """Return A_m of the interval that starts at t: ``count`` people, in the hospital's order.

    It depends only on seed, t and m, not on P, the order of nodes or other draws. ``number`` distinguishes
    several draws of one purpose at one t.
    """
    stream = generator(seed, round=t, partition_id=group.number, purpose=purpose)
    for _ in range(number + 1):
        chosen = stream.choice(group.size, count, replace=False)
    return [group.ids[i] for i in sorted(chosen.tolist())]


@dataclass(frozen=True, eq=False)
class Local:
    """A group in a round."""

    group: Group
    start: Theta  # The model at the round's start.
    ids: tuple[str, ...] = ()  # A_m of the current interval, without people whose party did not answer.
    # theta_{2,m,n} of the devices that trained in the interval; in JFL, in the round.
    device_models: Mapping[str, Vector] = field(default_factory=dict)
    at: int | None = None  # The iteration of its model; None for the model of the round's start.
    lost: str = ""  # Why it skips the current interval; empty if it does not.
    missed: int = 0  # Number of skipped intervals.
    loss: float | None = None  # The hospital's last reported loss.
    # Head and hospital's encoder, once uploaded: (n0 + n1,), in JFL (pairs, n0 + n1).
    uploaded: Vector | None = None
    averaged: Vector | None = None  # theta_{2,m}, (n2,), if it has changed in the round.

    @property
    def device(self) -> Vector:
        """theta_{2,m}, (n2,)."""
        return self.start.device if self.averaged is None else self.averaged

    @property
    def people_of(self) -> dict[int, Sequence[str]]:
        """The nodes with this interval's devices, each with its people."""
        if self.group.hosted:
            return {self.group.node_of[self.ids[0]]: self.ids}
        return {self.group.node_of[person]: [person] for person in self.ids}

    @property
    def model(self) -> Theta | None:
        """The group's model at the end of the round; None if it missed the last interval."""
        if self.lost or self.uploaded is None:
            return None
        head = len(self.start.head)
        return Theta(self.uploaded[:head], self.uploaded[head:], self.device)

    def skipping(self, reason: str) -> Local:
        """Return this group when it skips the current interval."""
        return replace(self, lost=reason, missed=self.missed + 1)


# Sealed links.


@dataclass(frozen=True)
class LinkIntroduction:
    """A party's introduction to its peers on sealed links: its name, keys, and whether it pins theirs."""

    name: str
    introduction: bytes
    pinned: bool


class PartyLinks(Part):
    """The links of hospital and devices: open, or sealed, of which the server knows public keys.

    On sealed links an exchange also carries the introductions of peers that are new to each other. They are
    not booked, because a resumed run repeats them.

    - ``sealed``: Whether they are sealed; open links need nothing of this class.
    - ``introductions``: The parties' public keys.
    - ``names``: Each party's name by partition id; a party without one takes no part.
    - ``withheld``, ``unopened``: The round's shares that senders withheld, and that receivers refused, by
      reason.
    """

    name = "links"

    def __init__(self, sealed: bool, seed: int) -> None:
        self.sealed = sealed
        # The config of every message on sealed links; simulated nodes derive their keys from the seed.
        self.config: dict[str, bool | int] = {"sealed": True, "seed": seed} if sealed else {}
        self.forget()

    def forget(self) -> None:
        """Forget all parties."""
        self.introductions = Introductions()
        self.names: dict[int, str] = {}
        # All possible peers of a party, by partition id.
        self._neighbours: dict[int, set[int]] = {}
        self._of_name: dict[str, int] = {}
        self.withheld = 0
        self.unopened: Counter[str] = Counter()

    def place(self, groups: Iterable[Group]) -> None:
        """Make each hospital and the nodes of its people's devices neighbours."""
        for group in groups:
            self._neighbours.setdefault(group.hospital, set()).update(group.node_of.values())
            for node in group.node_of.values():
                self._neighbours.setdefault(node, set()).add(group.hospital)

    def introduced(self, i: int, link: LinkIntroduction | None) -> None:
        """Take a party's introduction; without one, or under another party's name, it takes no part."""
        claimed = link is None or self._of_name.get(link.name, i) != i or _is_anothers(link.name, i)
        if link is None or claimed or self.names.get(i, link.name) != link.name:
            log(WARNING, "Partition %d sent no introduction, or one under another name.", i)
            return
        if i in self.names:  # A new introduction means that it may have lost its peers' introductions.
            self.introductions.confirm(i, (), list(self.introductions.of))
        self.names[i], self._of_name[link.name] = link.name, i
        self.introductions.take(i, link.introduction, link.pinned)

    def opened(self, run: RoundContext) -> Steps[None]:
        """Reset the round's counts."""
        self.withheld, self.unopened = 0, Counter()
        yield from ()

    def ended(self, run: RoundContext) -> None:
        """Report the round's counts."""
        run.metrics |= self.introductions.metrics(self.withheld, self.unopened)

    def lacking(self, peers_of: Mapping[int, Iterable[int]]) -> dict[int, ConfigRecord]:
        """Return the introductions that parties lack, by partition id and name; parties with all are missing.

        The first record names all neighbours, with empty bytes for those whose introduction comes later: a
        party trusts no name that is added afterwards.
        """
        records = {}
        for i, peers in peers_of.items():
            if new := self.introductions.for_receiver(i, peers):
                named = {j: b"" for j in sorted(self._neighbours.get(i, ())) if j in self.names}
                records[i] = ConfigRecord({self.names[j]: keys for j, keys in {**named, **new}.items()})
        return records

    def refused_in(self, content: RecordDict, peers: Collection[int]) -> tuple[RecordDict, dict[int, str]]:
        """Split a reply into its other records, and the peers that the party refused with the reasons."""
        record = content.get(REFUSED)
        if not isinstance(record, ConfigRecord):
            return content, {}
        refused = dict[int, str]()
        for reason in (*REASONS, MALFORMED):
            names = record.get(reason)
            for name in names if isinstance(names, list) else ():
                if (peer := self._of_name.get(str(name))) is not None and peer in peers:
                    refused.setdefault(peer, reason)
        return RecordDict({key: record for key, record in content.items() if key != REFUSED}), refused


def _is_anothers(name: str, i: int) -> bool:
    """Return whether a name is another party's partition id; numbers from MAX_PLACES on are no ids."""
    return name.isascii() and name.isdigit() and int(name) < MAX_PLACES and int(name) != i


# Records.


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
        record = _record(content, where, ConfigRecord, [key] if head is None else [key, "head"])
        shares, common = record[key], record.get("head", b"")
        if not isinstance(shares, list) or len(shares) != count:
            raise PayloadError("wrong shape", f"{key!r} must have {count} shares")
        sizes = (0, size) if self.sealed else (size,)
        if not all(isinstance(share, bytes) and len(share) in sizes for share in shares):
            raise PayloadError("wrong size", f"{key!r} is not of {size} bytes a share")
        if not isinstance(common, bytes) or len(common) != (head or 0):
            raise PayloadError("wrong size", f"'head' is not of {head} bytes")
        return common, cast(list[Share], shares)

    def hospital_update(
        self, content: RecordDict, a: int, upload: bool
    ) -> tuple[float | None, Vector, Vector]:
        """Return the loss (None if ``protected``), and head and hospital, both empty unless ``upload``.

        ``a`` is the number of people that it must report.
        """
        metrics = _counted(content, a)
        loss = None if self.protected else metrics.get("loss")
        if not self.protected and not isinstance(loss, float | int):
            raise PayloadError("bad metrics", f"loss={loss!r}, expected a number")
        rows = (a,) if self.pairs else ()
        shapes = {"head": (*rows, self.head), "hospital": (*rows, self.hospital)}
        arrays = self._arrays(content, shapes if upload else {}, metrics=True)
        nothing = np.zeros(0, self.dtype)
        loss = None if loss is None else float(loss)  # type: ignore[arg-type]
        return loss, arrays.get("head", nothing), arrays.get("hospital", nothing)

    def device_update(self, content: RecordDict, a: int, upload: bool) -> Vector:
        """Return a device's model (a = 1) or an edge's mean (n2,); empty unless ``upload``."""
        _counted(content, a)
        arrays = self._arrays(content, {"device": (self.device,)} if upload else {}, metrics=True)
        return arrays.get("device", np.zeros(0, self.dtype))

    def _arrays(
        self, content: RecordDict, shapes: Mapping[str, tuple[int, ...]], metrics: bool = False
    ) -> dict[str, Vector]:
        record = _record(content, "arrays", ArrayRecord, shapes, ["metrics"] if metrics else [])
        values = {key: view(record[key]) for key in shapes}
        for key, shape in shapes.items():
            if values[key].shape != shape:
                raise PayloadError("wrong shape", f"{key!r} has {values[key].shape}, expected {shape}")
            if values[key].dtype != self.dtype:
                raise PayloadError("wrong dtype", f"{key!r} is {values[key].dtype}, expected {self.dtype}")
            if not np.isfinite(values[key]).all():
                raise PayloadError("non-finite", f"NaN or infinity in {key!r}")
        return values


def _record(
    content: RecordDict,
    name: str,
    kind: type[ArrayRecord | ConfigRecord],
    keys: Collection[str],
    others: Iterable[str] = (),
) -> Any:
    """Return a reply's record of a kind with exactly these keys; beside it are exactly the ``others``.

    Without keys the reply must not have the record.
    """
    expected = {name, *others} if keys else set(others)
    if set(content) != expected:
        raise PayloadError("unknown record", f"{sorted(content)}, expected {sorted(expected)}")
    record = content.get(name)
    if not isinstance(record, kind):
        record = kind()
    if missing := [key for key in keys if key not in record]:
        raise PayloadError("missing key", f"{missing[0]!r}")
    if unknown := [key for key in record if key not in keys]:
        raise PayloadError("unknown key", f"{unknown[0]!r}")
    return record


def _counted(content: RecordDict, count: int) -> MetricRecord:
    """Return a reply's metrics; PayloadError unless they are of ``count`` people."""
    metrics = checked_metrics(content, "num-examples")
    if metrics["num-examples"] != count:
        raise PayloadError("bad weight", f"num-examples={metrics['num-examples']!r}, expected {count}")
    return metrics


# One local interval.


@dataclass(frozen=True)
class Interval:
    """A local interval: its settings, the same for every party, and what its exchanges need."""

    t: int  # Its first iteration, counted from the start of the run.
    steps: int  # Q.
    starts: bool  # Whether it is the first of its round.
    uploads: bool  # Whether it is the last of its round.
    eta0: float  # Learning rate of iteration 0.
    eta_period: int  # Iterations between halvings; 0 for never.
    mu: float  # L2 regularisation of both encoders.
    noise: Mapping[str, Scalar]  # Config of the noise on encodings.
    uploads_noise: Mapping[str, Scalar]  # Config of the noise on uploads.
    schema: Schema
    links: PartyLinks
    books: Books
    exposure: RecordExposure | None = None  # None without noise.
    hold: Hold | None = None  # None for no bounds.
    over_grid: bool = False  # Whether it is no part of the round's training.


class Swap(NamedTuple):
    """A group after the exchange, with each person's encodings unless it skips the interval."""

    local: Local
    head: Head = b""  # The hospital's; with pairs that the server can read, one per person of ``zeta1``.
    zeta1: Mapping[str, Share] = {}
    zeta2: Mapping[str, Share] = {}


class ExchangeReply(NamedTuple):
    """A party's reply to an exchange, with the peers that it refused and the reasons."""

    head: Head  # Empty from a device or edge.
    shares: Sequence[Share]  # One per person, or one for all.
    refused: Mapping[int, str]


class UpdateReply(NamedTuple):
    """A party's reply to an update, with the peers that it refused and the reasons."""

    refused: Mapping[int, str]
    blocks: Vector | None = None  # None if the party could open nothing that it received.
    loss: float | None = None
    metrics: RecordDict | None = None  # A hospital's.


Reply = TypeVar("Reply", ExchangeReply, UpdateReply)


class AskedNode(NamedTuple):
    """A node that is asked in an interval."""

    local: Local
    hospital: bool
    people: Sequence[str]
    peers: Sequence[int]  # The nodes at the other side of its links: one per person, or one for all.


def _asked(groups: Iterable[Local]) -> dict[int, AskedNode]:
    """Return the nodes of the groups that do not skip the interval, the hospital of each group first."""
    asked = {}
    for local in groups:
        if local.lost:
            continue
        group, people_of = local.group, local.people_of
        peers = [*people_of] if group.hosted else [group.node_of[person] for person in local.ids]
        asked[group.hospital] = AskedNode(local, True, local.ids, peers)
        asked |= {i: AskedNode(local, False, ids, [group.hospital]) for i, ids in people_of.items()}
    return asked


# Bookings.


@dataclass(frozen=True)
class Books:
    """Books the transfers of groups in a round, with nominal bits as the paper counts them.

    m is a group's number, ``a`` the people of its batch.
    """

    ledger: Ledger
    round: int
    schema: Schema
    cloud: bool  # Whether groups send their models to a cloud; TDCD has none.
    original_groups: int = 1  # Groups that TDCD merged, each with a head: its cost is stated per group.

    def _book(self, link: str, rows: Sequence[tuple[int, int, int]]) -> None:
        """Book transfers over a link: each with a group, its bytes and its nominal bits."""
        if rows:
            groups, payloads, bits = zip(*rows, strict=True)
            self.ledger.book_all(self.round, link, groups, groups, bits, payloads)

    def models_down(self, groups: Sequence[Local]) -> None:
        """Book the global model to groups that start a round, and theta_2 to devices that keep none."""
        sizes, whole = self.schema, [local.group.number for local in groups if local.at is None]
        if self.cloud:
            self._book("cloud->hospital", [(m, sizes.dense(sizes.head + sizes.hospital), 0) for m in whole])
            self._book("cloud->edge", [(m, sizes.dense(sizes.device), 0) for m in whole])
        # Devices keep no model between a round's intervals, but pairs on an edge node do.
        those = [local for local in groups if local.at is None or not (sizes.pairs and local.group.hosted)]
        down = [(local.group.number, sizes.dense(len(local.ids) * sizes.device), 0) for local in those]
        self._book("edge->device", down)

    def encodings_to_edge(self, nodes: Iterable[AskedNode]) -> None:
        """Book the devices' zeta2, and the hospitals' heads (in JFL one per pair) and zeta1."""
        sizes, up, down = self.schema, [], []
        for node in nodes:
            group, a = node.local.group, len(node.people)
            seals = self._seals(a, group.hosted, hospital=node.hospital, edge=node.hospital)
            if not node.hospital:
                up.append((group.number, a * sizes.coded(sizes.zeta2) + seals, 0))
                continue
            heads = a if sizes.pairs else 1
            payload = heads * sizes.coded(sizes.head) + a * sizes.coded(sizes.zeta1) + seals
            scalars = heads * sizes.head * self.original_groups + a * sizes.zeta1
            down.append((group.number, payload, scalars * _BITS_OF_ENCODING[sizes.compressed]))
        self._book("device->edge", up)
        self._book("hospital->edge", down)

    def encodings_relayed(self, groups: Iterable[Local]) -> None:
        """Book zeta2 to the hospitals, and the head and a row of zeta1 to each device."""
        sizes, up, down = self.schema, [], []
        for local in groups:
            m, a, hosted = local.group.number, len(local.ids), local.group.hosted
            payload = a * sizes.coded(sizes.zeta2) + self._seals(a, hosted, hospital=False, edge=True)
            up.append((m, payload, a * sizes.zeta2 * _BITS_OF_ENCODING[sizes.compressed]))
            payload = a * (sizes.coded(sizes.head) + sizes.coded(sizes.zeta1))
            down.append((m, payload + self._seals(a, hosted, hospital=True, edge=False), 0))
        self._book("edge->hospital", up)
        self._book("edge->device", down)

    def models_to_edge(self, m: int, batches: Iterable[int], counted: bool) -> None:
        """Book the models of nodes with so many devices; of pairs the paper counts only the round's last."""
        sizes = [a * self.schema.device for a in batches]
        self._book("device->edge", [(m, self.schema.dense(n), n * _NOMINAL_BITS * counted) for n in sizes])

    def to_cloud(self, groups: Iterable[Local]) -> None:
        """Book head and hospital's encoder (in JFL per pair), and the edges' theta_2."""
        if not self.cloud:
            return
        sizes, of_hospitals, of_edges = self.schema, [], []
        for local in groups:
            m, pairs = local.group.number, len(local.ids) if sizes.pairs else 1
            head, hospital = pairs * sizes.head, pairs * sizes.hospital
            # (19) omits the head. The paper gives no cost of JFL, so all is counted.
            counted = hospital + head if sizes.pairs else hospital
            of_hospitals.append((m, sizes.dense(head + hospital), counted * _NOMINAL_BITS))
            of_edges.append((m, sizes.dense(sizes.device), 0))
        self._book("hospital->cloud", of_hospitals)
        self._book("edge->cloud", of_edges)

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


# The exchange: encodings.


def exchanged(interval: Interval, groups: Iterable[Local], run: RoundContext) -> Steps[list[Swap]]:
    """Let hospitals send their heads and zeta_1, and devices zeta_2; return each group with its encodings.

    Batches are reduced to the people with both encodings.
    """
    t, schema, links = interval.t, interval.schema, interval.links
    groups = [replace(local, lost="") for local in groups]
    if interval.exposure is not None:
        interval.exposure.exchange({g.group.number: g.ids for g in groups}, starts=interval.starts)
    if links.sealed:
        groups = [_introduced(local, links.names) for local in groups]
    asked, hospitals, devices = _asked(groups), list[Ask](), list[Ask]()
    # A party that misses its peers' keys gets them with the first request of an interval.
    keys = links.lacking({i: node.peers for i, node in asked.items()}) if links.sealed else {}
    grouping = "pairs" if schema.pairs else "group"
    for local in groups:
        if local.lost:
            continue
        group, starts = local.group, local.at is None
        config: dict[str, Any] = {"ids": list(local.ids), "grouping": grouping, "compress": schema.compressed}
        if local.at not in (None, t):
            config["since"] = local.at
        blocks = records(head=local.start.head, hospital=local.start.hospital) if starts else {}
        hospitals.append(_request(links, asked, config, {group.hospital: blocks}, keys))
        if not group.hosted:
            config = {"compress": schema.compressed}
        devices.append(_request(links, asked, config, _device_models(local), keys))
    interval.books.models_down([local for local in groups if not local.lost])
    config = {"t": t, **interval.noise, **interval.uploads_noise}
    sides = hospitals, devices
    replies = yield from _made(interval, EXCHANGE, config, sides, asked, _exchange_reply, run)
    return _swapped(interval, groups, asked, replies)


def _introduced(local: Local, names: Mapping[int, str]) -> Local:
    """Return a group without people whose party is not introduced; sealed links need the parties' keys."""
    there = tuple(person for person in local.ids if local.group.node_of[person] in names)
    if not there or local.group.hospital not in names:
        return local.skipping("not introduced")
    return replace(local, ids=there)


def _device_models(local: Local) -> dict[int, Mapping[str, Any]]:
    """Return the records with which each device node starts its interval."""
    if local.group.hosted:
        blocks = records(device=local.device) if local.at is None else {}
        return dict.fromkeys(local.people_of, blocks)
    average = local.device
    models = {i: local.device_models.get(person, average) for i, (person,) in local.people_of.items()}
    # One record per distinct model.
    made = {id(model): records(device=model) for model in models.values()}
    return {node: made[id(model)] for node, model in models.items()}


def _request(
    links: PartyLinks,
    asked: Mapping[int, AskedNode],
    config: Mapping[str, Any],
    parts: Mapping[int, Mapping[str, Any]],
    keys: Mapping[int, ConfigRecord] = {},
) -> Ask:
    """Return the request to one side of a group: each node's records, and the peers' keys that it lacks."""
    records_of: dict[str, dict[int, Any]] = {}
    for i, made in parts.items():
        for name, record in made.items():
            records_of.setdefault(name, {})[i] = record
    node = asked[next(iter(parts))]
    if links.sealed:
        config = {**config, "peers": [links.names[j] for j in node.peers]}
        if lacking := {i: keys[i] for i in parts if i in keys}:
            records_of[INTRODUCTIONS] = lacking
    return Ask([*parts], None, config, records_of, pool=node.local.group.number)


def _made(
    interval: Interval,
    kind: str,
    config: Mapping[str, Any],
    sides: Iterable[Sequence[Ask]],
    asked: Mapping[int, AskedNode],
    read: Callable[[Interval, AskedNode, RecordDict], Reply],
    run: RoundContext,
) -> Steps[dict[int, Reply]]:
    """Send the requests of both sides at once; return the replies by partition id, hospitals first."""
    common = {**config, **interval.links.config}
    exchanges = [
        Exchange(
            kind, asks, common, unbooked=(INTRODUCTIONS,), over_grid=interval.over_grid,
            reads=lambda node, content: Row(read(interval, asked[node.partition_id], content), 0),
        )
        for asks in sides
    ]  # fmt: skip
    replies = yield Together(tuple(exchange.prepared(run) for exchange in exchanges))
    return {
        node: reply
        for chunks in replies
        for columns in chunks
        for node, reply in zip(columns.nodes, columns.rows, strict=True)
    }


def _exchange_reply(interval: Interval, node: AskedNode, content: RecordDict) -> ExchangeReply:
    """Return a party's valid reply to the exchange; PayloadError otherwise."""
    schema, start, refused = interval.schema, node.local.start, dict[int, str]()
    if schema.sealed:
        content, refused = interval.links.refused_in(content, node.peers)
    if not node.hospital:
        return ExchangeReply(b"", schema.device_exchange(content, len(node.people)), refused)
    head, shares = schema.hospital_exchange(content, len(node.people), node.local.group.hosted)
    if isinstance(head, np.ndarray) and interval.hold is not None:
        # In a round's first exchange the hospital returns the head that it was sent.
        interval.hold(head, start.head, "first head" if node.local.at is None else "head in a round")
    return ExchangeReply(head, shares, refused)


def _swapped(
    interval: Interval,
    groups: Sequence[Local],
    asked: Mapping[int, AskedNode],
    replies: Mapping[int, ExchangeReply],
) -> list[Swap]:
    """Return each group with its encodings, and the people that have both."""
    links, of_hospital = interval.links, dict[int, tuple[Head, Mapping[str, Share]]]()
    zeta2: dict[int, dict[str, Share]] = {local.group.number: {} for local in groups}
    if links.sealed:
        for i, reply in replies.items():
            links.introductions.confirm(i, asked[i].peers, reply.refused)
        links.withheld += sum(not len(share) for reply in replies.values() for share in reply.shares)
    for i, reply in replies.items():
        node, shares = asked[i], reply.shares
        m, people = node.local.group.number, node.people
        each = shares if len(shares) == len(people) else [shares[0]] * len(people)
        found = {person: share for person, share in zip(people, each, strict=True) if len(share)}
        if node.hospital:
            of_hospital[m] = reply.head, found
        else:
            zeta2[m] |= found
    interval.books.encodings_to_edge(asked[i] for i in replies)
    swaps = []
    for local in groups:
        m = local.group.number
        if local.lost:
            swaps.append(Swap(local))
            continue
        head, zeta1 = of_hospital.get(m, (b"", {}))
        there = [p for p in local.ids if p in zeta2[m] and (p in zeta1 or m not in of_hospital)]
        after = replace(local, ids=tuple(there) or local.ids)
        if not there or m not in of_hospital:
            after = after.skipping("no encodings")
        swaps.append(Swap(after, head, zeta1, zeta2[m]))
    return swaps


# The update: steps.


def stepped(interval: Interval, swaps: Sequence[Swap], run: RoundContext) -> Steps[list[Local]]:
    """Let both sides make Q steps with the other's encodings; return the groups with their models."""
    schema, links = interval.schema, interval.links
    asked, hospitals, devices = _asked(swap.local for swap in swaps), list[Ask](), list[Ask]()
    coding = {"compress": schema.compressed, "pairs": schema.pairs} if links.sealed else {}
    for swap in swaps:
        local, group = swap.local, swap.local.group
        if local.lost:
            continue
        if interval.exposure is not None:
            m, hosted = group.number, group.hosted
            interval.exposure.update(m, local.ids, hosted=hosted, pairs=schema.pairs, ends=interval.uploads)
        batch = {"ids": list(local.ids), "upload": interval.uploads, **coding}
        # Between a hospital and its edge, all encodings are in one sealed share.
        shared = links.sealed and group.hosted
        zeta2 = records(zeta2=[swap.zeta2[p] for p in (local.ids[:1] if shared else local.ids)])
        hospitals.append(_request(links, asked, batch, {group.hospital: zeta2}))
        parts = {i: _for_devices(schema, swap, ids, shared) for i, ids in local.people_of.items()}
        devices.append(_request(links, asked, batch if group.hosted else coding, parts))
    interval.books.encodings_relayed(swap.local for swap in swaps if not swap.local.lost)
    config = {
        "t": interval.t, "steps": interval.steps, "eta0": interval.eta0, "eta-period": interval.eta_period,
        "mu": interval.mu, **interval.uploads_noise,
    }  # fmt: skip
    replies = yield from _made(interval, UPDATE, config, (hospitals, devices), asked, _update_reply, run)
    if links.sealed:
        for i, reply in replies.items():
            links.introductions.confirm(i, asked[i].peers, reply.refused)
            links.unopened.update(reply.refused.values())
    if not interval.over_grid:
        run.contents += [reply.metrics for reply in replies.values() if reply.metrics is not None]
    after = [swap.local if swap.local.lost else _trained(interval, swap, replies) for swap in swaps]
    if interval.uploads:
        interval.books.to_cloud(local for local in after if not local.lost)
    return after


def _for_devices(schema: Schema, swap: Swap, ids: Sequence[str], shared: bool) -> Mapping[str, Any]:
    """Return the head and only these people's rows of zeta_1, of which ``shared`` ones are one share."""
    zeta1, head = [swap.zeta1[person] for person in (ids[:1] if shared else ids)], swap.head
    if schema.pairs and isinstance(head, np.ndarray):
        # A row per person that the hospital was asked for.
        rows = [list(swap.zeta1).index(person) for person in ids]
        head = head[rows if swap.local.group.hosted else rows[0]]
    return records(head=head, zeta1=zeta1)


def _update_reply(interval: Interval, node: AskedNode, content: RecordDict) -> UpdateReply:
    """Return a party's valid reply to the update; PayloadError otherwise."""
    schema, hold, local = interval.schema, interval.hold, node.local
    count, refused, uploads = len(node.people), dict[int, str](), interval.uploads
    if schema.sealed:
        content, refused = interval.links.refused_in(content, node.peers)
        if refused and not len(content):
            return UpdateReply(refused)
        if refused and node.hospital:
            count -= len(_unread(local, refused))
    if not node.hospital:
        device = schema.device_update(content, count, uploads or not local.group.hosted)
        if device.size and hold is not None:
            hold(device, local.device_models.get(node.people[0], local.device), "device")
        return UpdateReply(refused, device)
    loss, head, hospital = schema.hospital_update(content, count, uploads)
    if uploads and hold is not None:
        hold(head, local.start.head, "head")
        hold(hospital, local.start.hospital, "hospital")
    metrics = RecordDict({key: one for key, one in content.items() if isinstance(one, MetricRecord)})
    return UpdateReply(refused, np.concatenate([head, hospital], axis=-1), loss, metrics)


def _unread(local: Local, refused: Mapping[int, str]) -> set[str]:
    """Return the people whose encodings a hospital of devices could not open."""
    if local.group.hosted:
        return set()
    return {person for person in local.ids if local.group.node_of[person] in refused}


def _trained(interval: Interval, swap: Swap, replies: Mapping[int, UpdateReply]) -> Local:
    """Return a group with the models of its hospital and of its devices whose steps count."""
    local, group, uploads, pairs = swap.local, swap.local.group, interval.uploads, interval.schema.pairs
    people_of = local.people_of
    made = dict[int, Vector]()
    for i in (group.hospital, *people_of):
        if i in replies and (blocks := replies[i].blocks) is not None:
            made[i] = blocks
    hospital = replies.get(group.hospital)
    unread = set[str]() if hospital is None else _unread(local, hospital.refused)
    trained = [i for i in sorted(people_of) if i in made and unread.isdisjoint(people_of[i])]
    device_models, averaged = dict(local.device_models), local.averaged
    if uploads or not (pairs and group.hosted):
        batches = [len(people_of[i]) for i in trained]
        interval.books.models_to_edge(group.number, batches, counted=uploads or not pairs)
    for i in trained:
        if not group.hosted:
            device_models[people_of[i][0]] = made[i]
        elif uploads:  # An edge node sends its mean at the end of the round.
            averaged = made[i]
    needed = {group.hospital, *(people_of if group.hosted else ())}
    if hospital is None or not needed <= made.keys():
        return local.skipping("no update")
    left = tuple(person for person in local.ids if person not in unread)
    return replace(
        local, ids=left, averaged=averaged, loss=hospital.loss,
        device_models={p: model for p, model in device_models.items() if p not in unread},
        uploaded=made[group.hospital] if uploads else None, at=interval.t + interval.steps,
    )  # fmt: skip
