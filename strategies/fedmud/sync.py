"""What a node is sent so that it holds the current base: the updates that it missed, or the base itself.

Paper: S. Li et al., "The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient Federated
Learning" (FedMUD), eq. (5): the base is the sum of all merged updates, so a node that was away lacks some.
Differs: the paper counts one update a round, which is true only where every node listens to every round.
Here that is one of three ways, and what the other two would have sent is counted beside it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from hedgerow.wire.checks import one_of
from hedgerow.wire.records import payload_bytes, to_record, view

__all__ = ["SYNCS", "Downlink", "Download", "Post", "Sync", "UpdateLog"]

Sync = Literal["catchup", "dense", "broadcast"]
SYNCS: tuple[Sync, ...] = get_args(Sync)


@dataclass(frozen=True)
class Download:
    """Traffic from the server to nodes.

    Parameters
    ----------
    messages : int
        Messages.
    bits : int
        What their arrays carry, without headers and keys: 32 a parameter, 64 with its index, 1 a sign.
    payload_bytes : int
        Their arrays as they are serialised, with headers and keys.
    """

    messages: int = 0
    bits: int = 0
    payload_bytes: int = 0

    @classmethod
    def of(cls, *records: ArrayRecord) -> "Download":
        """Return what some records carry."""
        bits = sum(8 * view(array).nbytes for record in records for array in record.values())
        return cls(0, bits, sum(payload_bytes(record) for record in records))

    @property
    def parameters(self) -> float:
        """The bits as float32 parameters."""
        return self.bits / 32

    def __add__(self, other: "Download") -> "Download":
        return Download(
            self.messages + other.messages,
            self.bits + other.bits,
            self.payload_bytes + other.payload_bytes,
        )

    def __mul__(self, times: int) -> "Download":
        return Download(self.messages * times, self.bits * times, self.payload_bytes * times)


class UpdateLog:
    """The updates of the base by version, as far back as they are fewer bits than the base.

    Parameters
    ----------
    update_bits : int
        Bits of one update, >= 0.
    base_bits : int
        Bits of the base; 0 where there is none, and nodes keep nothing between rounds.
    """

    def __init__(self, update_bits: int, base_bits: int) -> None:
        self.update_bits = update_bits
        self.base_bits = base_bits
        self.reset()

    def reset(self) -> None:
        """Forget the run."""
        self.version = 0
        self._updates: dict[int, ArrayRecord] = {}

    def __len__(self) -> int:
        return len(self._updates)

    def append(self, arrays: Mapping[str, Tensor | NDArray[Any]]) -> None:
        """Log the update that leads to the next version, and drop those that nobody will be sent."""
        self._updates[self.version] = to_record({f"{self.version}/{key}": a for key, a in arrays.items()})
        self.version += 1
        reach = self.base_bits // max(1, self.update_bits)
        for version in [v for v in self._updates if v < self.version - reach]:
            del self._updates[version]

    def covers(self, version: int) -> bool:
        """Return whether the updates since a version are fewer bits than the base."""
        return (self.version - version) * self.update_bits < self.base_bits

    def since(self, version: int) -> ArrayRecord:
        """Return the updates that lead from a version to the current one, as one record."""
        merged = ArrayRecord()
        for step in range(version, self.version):
            for key, array in self._updates[step].items():
                merged[key] = array
        return merged

    def size_since(self, version: int) -> Download:
        """Return what ``since`` carries."""
        return Download.of(*(self._updates[step] for step in range(version, self.version)))

    def state_dict(self) -> dict[str, Any]:
        """Return version and updates, for a checkpoint."""
        updates = {str(v): {k: view(a) for k, a in record.items()} for v, record in self._updates.items()}
        return {"version": self.version, "updates": updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        self.version = int(state["version"])
        self._updates = {int(v): to_record(arrays) for v, arrays in state["updates"].items()}


class Downlink:
    """Which version each node holds, what it is sent next, and what each way of sending costs.

    Parameters
    ----------
    sync : {"catchup", "dense", "broadcast"}
        ``catchup`` sends a node the updates since the version it acknowledged, ``dense`` sends everyone the
        base every time, ``broadcast`` sends every update to every node, also to those that do not train.
        Whoever holds nothing, or has missed more than the base is worth, is sent the base.
    num_clients : int
        Nodes N of the federation.
    log : UpdateLog
        The updates; whoever moves the base appends to it.
    Raises
    ------
    ValueError
        If ``sync`` is none of the three.
    """

    def __init__(self, sync: Sync, num_clients: int, log: UpdateLog) -> None:
        one_of("sync", sync, SYNCS)
        self.sync = sync
        self.num_clients = num_clients
        self.log = log
        self.traffic = dict.fromkeys(SYNCS, Download())
        # None for a node that is known to hold nothing.
        self._held: dict[Sync, dict[int, int | None]] = {way: {} for way in SYNCS}
        # Of a broadcast that is not made, what all hold of so many nodes, but those in ``_held``.
        self._others: tuple[int | None, int] = None, 0
        # The version that a node holds which was never heard of: 0 where it draws it, None for nothing.
        self.initial: int | None = None

    def set_initial(self, version: int | None) -> None:
        """Say what a node holds which was never heard of: 0 where it draws that itself, None for nothing."""
        self.initial = version
        if not self._others[1]:
            self._others = version, 0

    def start(self, client: int) -> int | None:
        """Return the version from which on a node is sent updates, or None if it is sent the base."""
        return self._start(self.sync, client)

    def behind(self, clients: Iterable[int]) -> list[int]:
        """Return those who must hear something before they hold the current base."""
        return [client for client in clients if self.start(client) != self.log.version]

    def acknowledge(self, client: int) -> None:
        """Note that a node that trains holds the current version, as it would whatever the way."""
        for held in self._held.values():
            held[client] = self.log.version

    def heard(self, client: int) -> None:
        """Note that a node that only listens holds the current version."""
        self._held["broadcast"][client] = self.log.version

    def forget(self, client: int) -> None:
        """Note that a node holds nothing, or what it can draw, unless that is what it has just failed to."""
        failed = self.start(client) in (None, self.initial)
        for held in self._held.values():
            held[client] = None if failed else self.initial

    def again(self, client: int, own: Download, base: Download) -> None:
        """Count a second message to a node that trains, of the way that is taken."""
        self.traffic[self.sync] += self._missing(self.sync, client, base) + own + Download(messages=1)

    def book(self, trainers: Sequence[int], listeners: Sequence[int], own: Download, base: Download) -> None:
        """Count one round's messages, each way.

        Parameters
        ----------
        trainers, listeners : sequence of int
            The nodes that are sent an instruction, and those that are sent the updates alone. For the ways
            that are not taken it is assumed that every node is there and every message arrives.
        own : Download
            What every instruction carries beside updates or base.
        base : Download
            The base.
        """
        for way in SYNCS:
            total = self.traffic[way]
            for client in trainers:
                total += self._missing(way, client, base) + own + Download(messages=1)
            if way == "broadcast":
                if way != self.sync:
                    total += self._inform_all(trainers, base)
                else:
                    for client in listeners:
                        total += self._missing(way, client, base) + Download(messages=1)
            self.traffic[way] = total

    def state_dict(self) -> dict[str, Any]:
        """Return log, versions held and traffic, for a checkpoint."""
        return {
            "log": self.log.state_dict(),
            "held": {way: {str(c): v for c, v in sorted(held.items())} for way, held in self._held.items()},
            "others": list(self._others),
            "traffic": {way: [t.messages, t.bits, t.payload_bytes] for way, t in self.traffic.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        self.log.load_state_dict(state["log"])
        version, count = state.get("others", (None, 0))
        self._others = None if version is None else int(version), int(count)
        for way in SYNCS:
            held = state["held"][way].items()
            self._held[way] = {int(c): None if v is None else int(v) for c, v in held}
            self.traffic[way] = Download(*map(int, state["traffic"][way]))

    def _start(self, way: Sync, client: int) -> int | None:
        return self._start_of(way, self._holds(way, client))

    def _start_of(self, way: Sync, held: int | None) -> int | None:
        if not self.log.base_bits:
            return self.log.version
        return None if way == "dense" or held is None or not self.log.covers(held) else held

    def _holds(self, way: Sync, client: int) -> int | None:
        version, count = self._others
        unheard = version if way == "broadcast" and client < count else self.initial
        return self._held[way].get(client, unheard)

    def _inform_all(self, trainers: Sequence[int], base: Download) -> Download:
        """Count what a broadcast sends to all nodes but those that train, and note that they heard it.

        All but a few of a million hold the same: those are counted, not gone through.
        """
        held, (version, count) = self._held["broadcast"], self._others
        if version != self.initial:  # Who came since holds what a newcomer does.
            held |= dict.fromkeys(range(count, self.num_clients), self.initial)
        training = {client: self._holds("broadcast", client) for client in trainers}
        listening = [(held[client], 1) for client in held.keys() - training.keys()]
        total = Download()
        for holds, number in [*listening, (version, self.num_clients - len(held.keys() | training.keys()))]:
            if (start := self._start_of("broadcast", holds)) != self.log.version:
                total += (self._since(start, base) + Download(messages=1)) * number
        self._held["broadcast"], self._others = training, (self.log.version, self.num_clients)
        return total

    def _missing(self, way: Sync, client: int, base: Download) -> Download:
        return self._since(self._start(way, client), base)

    def _since(self, start: int | None, base: Download) -> Download:
        return base if start is None else self.log.size_since(start)


class Post:
    """The contents of one round's messages: one object for all nodes that lack the same.

    Parameters
    ----------
    own : Mapping[str, ArrayRecord or ConfigRecord]
        What every participant is sent, by the records' names.
    base : ArrayRecord
        The current base, sent as ``base``.
    updates : str
        The name of the record in which updates travel.
    log : UpdateLog
        The updates.
    config : tuple[str, Mapping]
        The name of the ConfigRecord, and what stands in it beside ``from-version``.
    """

    def __init__(
        self,
        own: Mapping[str, ArrayRecord | ConfigRecord],
        base: ArrayRecord,
        updates: str,
        log: UpdateLog,
        config: tuple[str, Mapping[str, Any]],
    ) -> None:
        self.own = own
        self.base = base
        self._updates = updates
        self._log = log
        self._config_key, self._config = config
        self._missing: dict[int | None, dict[str, ArrayRecord]] = {}
        self._contents: dict[tuple[int | None, bool], RecordDict] = {}

    @property
    def arrays(self) -> list[ArrayRecord]:
        """The arrays of ``own``."""
        return [record for record in self.own.values() if isinstance(record, ArrayRecord)]

    def instruction(self, start: int | None) -> RecordDict:
        """Return what a participant is sent, from the version on that ``Downlink.start`` gives for it."""
        return self._content(start, trains=True)

    def news(self, start: int | None) -> RecordDict:
        """Return what a node is sent that only listens."""
        return self._content(start, trains=False)

    def _content(self, start: int | None, trains: bool) -> RecordDict:
        if (start, trains) not in self._contents:
            first = self._log.version if start is None else start
            config = {self._config_key: ConfigRecord({**self._config, "from-version": first})}
            own = self.own if trains else {}
            self._contents[start, trains] = RecordDict({**own, **self._lacking(start), **config})
        return self._contents[start, trains]

    def _lacking(self, start: int | None) -> dict[str, ArrayRecord]:
        if start not in self._missing:
            if start is None:
                self._missing[start] = {"base": self.base}
            elif start == self._log.version:
                self._missing[start] = {}
            else:
                self._missing[start] = {self._updates: self._log.since(start)}
        return self._missing[start]
