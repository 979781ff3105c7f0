"""The nodes of a run: each node's place (partition id), and which nodes are online.

Flower's node ids are random per run and unordered, and carry no partition, role or data description, so the
server sends each node a ``query.whoami`` once. A bad answer affects only its sender: that node is excluded
with a reason, and queried again later.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableSet, Sequence
from dataclasses import replace
from itertools import count
from logging import INFO, WARNING
from typing import TypeVar, overload

import numpy as np
from flwr.common import log
from flwr.serverapp import Grid
from numpy.typing import NDArray

from hedgerow.strategies.node import UNKNOWN, VACANT, Node, Shapes
from hedgerow.strategies.registry import Registered, Registry
from hedgerow.strategies.whoami import NodeQuery, RosterError, grid_clock, wait_for_nodes
from hedgerow.wire.calls import KnownNodes
from hedgerow.wire.limits import MAX_PLACES, MAX_WORD
from hedgerow.wire.message_types import WHOAMI
from hedgerow.wire.printable import shown

T = TypeVar("T")

# Longest wait (s) of a round for a node's introduction: with no other node online, and with some.
_PATIENCE, _PATIENCE_OF_OTHERS = 60.0, 15.0
# Rounds until an excluded node is queried again: doubled each time, from the first to the second.
_FEWEST_ROUNDS, _MOST_ROUNDS = 2, 64
_NO_PLACE = "no place"

Admits = Callable[[Node], str | None]
# A node's entry at the SuperLink: the name registered with its key (or empty), and the key.
_Listing = tuple[str, bytes]
# A node, and why it is excluded; None if it is not.
_Claim = tuple[Node, str | None]


def rounds_away(times: int) -> int:
    """Return how many rounds a node is excluded the first, second, … time: 2, 4, 8, … 64."""
    return int(min(_FEWEST_ROUNDS ** min(times, 10), _MOST_ROUNDS))


# The nodes of a grid that knows them all cost as much as those that take part, not as all of them.


class _LazyNodes(Sequence[T]):
    """One node per place, created at the first access."""

    def __init__(self, count: int, make: Callable[[int], T]) -> None:
        self._count, self._make = count, make
        self._made: dict[int, T] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> list[T]: ...
    def __getitem__(self, at: int | slice) -> T | list[T]:
        if isinstance(at, int) and (node := self._made.get(at)) is not None:
            return node
        partitions = range(self._count)[at]
        if isinstance(partitions, range):
            return [self[i] for i in partitions]
        return self._made.setdefault(partitions, self._make(partitions))


class _AllBut(MutableSet[int]):
    """The node ids of all nodes (N,) except ``away``; membership is only tested for ids of these nodes."""

    def __init__(self, node_ids: NDArray[np.uint64], away: set[int]) -> None:
        self._node_ids = node_ids
        self.away = away

    def __contains__(self, node_id: object) -> bool:
        return node_id not in self.away

    def __iter__(self) -> Iterator[int]:
        return (i for i in self._node_ids.tolist() if i not in self.away)

    def __len__(self) -> int:
        return len(self._node_ids) - len(self.away)

    def add(self, node_id: int) -> None:
        """Include a node."""
        self.away.discard(node_id)

    def discard(self, node_id: int) -> None:
        """Exclude a node."""
        self.away.add(node_id)


class Roster:
    """The nodes of a run, ordered by partition id.

    A node's place is bound to its name, so a node that reconnects under another node id keeps it. The first
    node to claim a name or a partition keeps it. A second claimant, a node with a malformed introduction and
    a node whose data shapes differ from the majority's are excluded, counted by reason, and queried again
    after 2, 4, 8, … 64 rounds. If Flower authenticates nodes and their keys are registered with names
    (``flwr supernode register KEY --name NAME``), the registered name overrides the reported one, so that
    no node can take another's name. Without authentication names are self-reported: any node that comes
    while the owner is offline gets its place. A registry also binds keys to places, roles and groups, and
    excludes all other nodes.

    Parameters
    ----------
    nodes : Sequence[Node]
        One node per place.
    introduced : bool
        False if the nodes do not introduce themselves (see ``hedgerow.clients.introduce``): then partition
        ids are the ranks of the sorted node ids, and sizes come from the replies.

    Attributes
    ----------
    nodes : Sequence[Node]
        By partition id; ``vacant`` for a place without a node.
    online : MutableSet[int]
        The node ids of the online nodes.
    places : int or None
        Number of places; None for no limit.
    names : dict[str, int]
        Partition ids by name.
    shapes : Shapes
        The shapes that most of the first nodes reported.
    known : KnownNodes or None
        The fixed nodes of a simulation engine; None if nodes are queried.
    """

    def __init__(self, nodes: Sequence[Node], introduced: bool) -> None:
        self._nodes = sorted(nodes, key=lambda node: node.partition_id)
        self.known: KnownNodes | None = None
        # Replaces ``_nodes`` if ``known`` is given.
        self._lazy: _LazyNodes[Node] | None = None
        self.introduced = introduced
        self.online: MutableSet[int] = {node.node_id for node in nodes if not node.vacant}
        self.places: int | None = len(nodes)
        self.names = {node.name: node.partition_id for node in nodes if node.name is not None}
        self.shapes = Shapes()
        # The introductions by partition id; a resumed run may assign other places.
        self._introductions: dict[int, Node] = {}
        self._question = WHOAMI
        self._admits: Admits = lambda node: None
        self._registry: Registry | None = None
        self._refusals: Counter[str] = Counter()
        self._first_free = 0
        # Excluded nodes, by node id: how often, and the round from which they are queried again.
        self._outside: dict[int, tuple[int, int]] = {}
        # Quarantined nodes, by partition id: how often, and the round from which they take part again.
        self._resting: dict[int, tuple[int, int]] = {}
        # Node ids of quarantined nodes that are online: they keep their places.
        self._kept: set[int] = set()
        self._warnings: list[str] = []

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def nodes(self) -> Sequence[Node]:
        """One per place, by partition id."""
        return self._nodes if self._lazy is None else self._lazy

    @property
    def present(self) -> Sequence[int]:
        """The partition ids of the online nodes, ascending."""
        if self.known is not None and len(self.online) == len(self):
            return range(len(self))
        return [node.partition_id for node in self.nodes if node.node_id in self.online]

    @property
    def node_ids(self) -> Mapping[int, int]:
        """The node ids of the online nodes, by partition id, ascending."""
        return {node.partition_id: node.node_id for node in self.nodes if node.node_id in self.online}

    def take_refusals(self) -> Counter[str]:
        """Return how many nodes with a place were excluded since the last call, by reason."""
        taken, self._refusals = self._refusals, Counter()
        if self.places is not None:
            taken.pop(_NO_PLACE, None)
        return taken

    @classmethod
    def of_known(cls, grid: Grid, expected: int | None, admits: Admits | None = None) -> "Roster | None":
        """Return the roster of a grid that knows its nodes, such as hedgerow's engine; None for others."""
        known: KnownNodes | None = getattr(grid, "known_nodes", lambda: None)()
        if known is None or expected not in (None, len(known.node_ids)):
            return None

        def made(at: int) -> Node:
            size = int(known.sizes[at])
            return Node(at, int(known.node_ids[at]), num_examples=size, name=f"partition-{at}")

        roster = cls([], True)
        roster.known, roster._lazy = known, _LazyNodes(len(known.node_ids), made)
        roster.places, roster.online = len(known.node_ids), _AllBut(known.node_ids, set())
        return None if admits is not None and any(map(admits, roster.nodes)) else roster

    @classmethod
    def gather(
        cls,
        grid: Grid,
        expected: int | None,
        timeout: float,
        *,
        quorum: int | None = None,
        names: Mapping[str, int] | None = None,
        shapes: Shapes | None = None,
        admits: Admits | None = None,
        registry: Registry | None = None,
    ) -> "Roster":
        """Wait for enough nodes and query their introductions.

        Once enough nodes have answered, waits a little longer for the other online nodes.

        Parameters
        ----------
        grid : Grid
            Flower's grid.
        expected : int or None
            Number of places, >= 1; partition ids are below it. None for no limit.
        timeout : float
            Seconds to wait, for the nodes and then for their answers.
        quorum : int or None (default: None)
            How many nodes are enough, >= 1; None for all that are expected.
        names : Mapping[str, int] or None (default: None)
            Partition ids by name, of a resumed run.
        shapes : Shapes or None (default: None)
            The data shapes of a resumed run; None for those that most of the first nodes report.
        admits : Callable[[Node], str or None] or None (default: None)
            Returns why a node is excluded, or None.
        registry : Registry or None (default: None)
            The nodes that may take part; None accepts any node.

        Raises
        ------
        RosterError
            If too few nodes come or have valid introductions, or if there is a registry and nodes do not
            introduce themselves.
        """
        needed = quorum or expected
        if needed is None:
            raise ValueError("quorum must be an integer >= 1 if expected is None")
        node_ids = wait_for_nodes(grid, needed, timeout)
        answers = NodeQuery(grid, timeout)
        # Two nodes at most: if their ClientApp cannot answer, no other can, and each would log an error.
        for witness in sorted(node_ids)[:2]:
            question = answers.try_questions(witness)
            if witness not in answers.raised or question == WHOAMI:
                break
        if answers.raised.keys() >= set(sorted(node_ids)[:2]) and question != WHOAMI:
            answers.finish()
            return cls._by_rank(node_ids, expected, registry)
        roster = cls([], True)
        roster.places, roster._question, roster._registry = expected, question, registry
        roster._admits = admits or roster._admits
        seated = roster._collect(answers, needed, names or {}, shapes)
        answers.finish()
        if not answers.nodes and answers.raised.keys() >= set(node_ids):
            if question == WHOAMI:
                raise RosterError(f"No node can introduce itself. {answers.causes()}")
            return cls._by_rank(node_ids, expected, registry)
        seated._exclude_unusable(answers, 0)
        if len(seated.online) < needed:
            short = seated._too_few(needed, len(answers.nodes), answers.num_asked)
            raise RosterError(" ".join(filter(None, (short, answers.causes()))))
        return seated

    def _collect(
        self, answers: NodeQuery, needed: int, names: Mapping[str, int], shapes: Shapes | None
    ) -> "Roster":
        """Query all online nodes; return the roster once enough have a place, or the time is up."""
        grid, heard = answers.grid, -1
        listed: dict[int, _Listing] = {}
        seated, enough_at = self, None
        while True:
            if (current := _listed(grid)) != listed or heard != answers.num_answers:
                listed, heard = current, answers.num_answers
                seated = self._seated(self._identified(answers.nodes, listed), names, shapes)
            enough = len(seated.online) >= needed
            if enough and enough_at is None:
                enough_at = answers.now()
            silent = answers.silent(listed)
            full = enough and self.places is not None and len(seated.online) == self.places
            waited = enough_at is not None and answers.now() >= enough_at + answers.interval
            if full or (enough and (waited or not silent)) or answers.over:
                return seated
            if not answers.nodes and answers.raised.keys() >= listed.keys():
                return seated
            answers.step(listed, self._question)

    def _seated(self, claims: Sequence[_Claim], names: Mapping[str, int], shapes: Shapes | None) -> "Roster":
        """Return the roster of these nodes."""
        roster = Roster([Node(i, VACANT) for i in range(self.places or 0)], True)
        roster.places, roster._question, roster._admits = self.places, self._question, self._admits
        roster._registry = self._registry
        roster._grow(max(names.values(), default=-1) + 1)
        roster.names = dict(names)
        for name, at in names.items():
            roster._nodes[at] = Node(at, VACANT, name=name)
        welcome = [node for node, refused in claims if refused is None]
        roster.shapes = _most_common(welcome) if shapes is None else shapes
        roster._take_in(claims, 0)
        return roster

    def continued(
        self, names: Mapping[str, int], shapes: Shapes | None = None, admits: Admits | None = None
    ) -> "Roster":
        """Return the roster of the same nodes in the places that they have in a resumed run."""
        if not self.introduced or (self.known and not (names or shapes or admits)):
            return self
        if self.known is not None:
            self._introductions = {node.partition_id: node for node in self.nodes}
        self._admits = admits or self._admits
        roster = self._seated([(node, None) for node in self._introductions.values()], names, shapes)
        roster._outside = {**self._outside, **roster._outside}
        roster._refusals += self._refusals
        roster._warn_of_all()
        return roster

    @classmethod
    def _by_rank(cls, node_ids: list[int], expected: int | None, registry: Registry | None) -> "Roster":
        if registry is not None:
            raise RosterError(
                "No node introduces itself, which a registry requires. Use ClientApp(mods=[introduce]), with "
                "'from hedgerow.clients import introduce'."
            )
        log(
            WARNING,
            "No node introduces itself: partition ids are the ranks of the sorted node ids, which change "
            "from run to run, and sizes come from the replies. ClientApp(mods=[introduce]), with 'from "
            "hedgerow.clients import introduce', keeps each node's own partition id. Two nodes were queried; "
            "you can ignore errors about this in their logs.",
        )
        ranked = sorted(node_ids)[:expected]
        nodes = [Node(rank, node_id) for rank, node_id in enumerate(ranked)]
        roster = cls([*nodes, *(Node(i, VACANT) for i in range(len(nodes), expected or 0))], False)
        roster.places = expected
        return roster

    def refresh(self, grid: Grid, timeout: float, server_round: int = 0) -> None:
        """Update which nodes are online, and add new nodes and nodes that reconnected under a new id.

        If no node is online, as after a network failure, waits up to ``timeout`` seconds for one: empty
        rounds would otherwise end the run before a node can reconnect. Excluded nodes are queried again by
        ``server_round``.
        """
        self._look(grid, timeout, server_round)
        if self.online:
            return
        now, sleep = grid_clock(grid)
        end = now() + timeout
        while not self.online and now() < end:
            sleep(min(1.0, timeout / 10))
            self._look(grid, timeout, server_round)

    def _look(self, grid: Grid, timeout: float, server_round: int) -> None:
        if isinstance(self.online, _AllBut):
            resting = self._at_rest(server_round)
            refused = {i for i, (_, until) in self._outside.items() if server_round < until}
            self._kept, self.online.away = resting, resting | refused
            return
        current = set(grid.get_node_ids())
        self.online = self._taking_part(current, server_round)
        self._outside = {i: since for i, since in self._outside.items() if i in current}
        known = {node.node_id for node in self.nodes}
        room = self.places is None or len(self.online) < self.places
        strangers = [
            i for i in sorted(current - known) if self._outside.get(i, (0, server_round))[1] <= server_round
        ]
        if room and strangers:
            if self.introduced:
                self._meet(grid, strangers, timeout, server_round)
            else:
                self._rank(strangers)
            self.online = self._taking_part(current, server_round)

    def _taking_part(self, current: set[int], server_round: int) -> set[int]:
        self._kept = self._at_rest(server_round) & current
        return ({node.node_id for node in self.nodes} & current) - self._kept

    def _at_rest(self, server_round: int) -> set[int]:
        """Return the node ids of the nodes that are quarantined in a round."""
        resting = [at for at, (_, until) in self._resting.items() if server_round < until]
        return {self.nodes[at].node_id for at in resting if at < len(self)}

    def _meet(self, grid: Grid, strangers: list[int], timeout: float, server_round: int) -> None:
        """Query new nodes, and give each its place."""
        here = self.online | self._kept
        vacancies = {node.partition_id for node in self.nodes if node.node_id not in here}
        patience = _PATIENCE_OF_OTHERS if self.online else _PATIENCE
        answers = NodeQuery(grid, min(timeout, patience))
        full = self.places is not None
        answers.ask(
            strangers,
            self._question,
            enough=lambda: full and vacancies <= {node.partition_id for node in answers.nodes.values()},
        )
        answers.finish()
        self._take_in(self._identified(answers.nodes, _listed(grid)), server_round)
        self._exclude_unusable(answers, server_round)

    def _rank(self, strangers: list[int]) -> None:
        vacant = [node for node in self.nodes if node.node_id not in self.online | self._kept]
        for old, new in zip(vacant, strangers, strict=False):
            self._sit(replace(old, node_id=new))
        if self.places is None:
            for new in strangers[len(vacant) :]:
                self._sit(Node(len(self.nodes), new))

    def _identified(self, nodes: Mapping[int, Node], listed: Mapping[int, _Listing]) -> list[_Claim]:
        """Return the online nodes under their keys' registered names, and why each is refused."""
        claims: list[_Claim] = []
        for node, (name, public_key) in ((nodes[i], listed[i]) for i in nodes if i in listed):
            known = replace(node, name=shown(name, MAX_WORD)) if name else node
            if self._registry is None:
                claims.append((known, None))
            elif (entry := self._registry.find(public_key, name)) is None:
                claims.append((known, "not registered"))
            else:
                claims.append((_as_registered(known, entry), _mismatch(known, entry, self._registry)))
        return claims

    def _take_in(self, claims: Sequence[_Claim], server_round: int) -> None:
        """Give nodes their places: first those that report a partition id, then the others by name."""

        def by_name(claim: _Claim) -> str:  # Independent of the order of arrival.
            return (claim[0].name or "") if claim[0].partition_id == UNKNOWN else ""

        for node, refused in sorted(claims, key=by_name):
            seat, reason = (node, refused) if refused is not None else self._seat(node)
            if reason is None:
                reason = self.shapes.disagreement(node.shapes) or self._admits(seat)
            if reason is not None:
                self._leave_out(seat, reason, server_round)
                continue
            self._introductions[seat.partition_id] = node
            self.shapes = self.shapes.joined(node.shapes)
            self._sit(seat)

    def _seat(self, node: Node) -> tuple[Node, str | None]:
        """Return a node at its place, or why it has none."""
        at, known = node.partition_id, None if node.name is None else self.names.get(node.name)
        if known is not None:
            at = known
        elif at == UNKNOWN:
            at = next(i for i in count(self._first_free) if self._free(i))
            self._first_free = at
        seat = replace(node, partition_id=at, name=f"partition-{at}" if node.name is None else node.name)
        if at >= (MAX_PLACES if self.places is None else self.places):
            return seat, _NO_PLACE
        old = self.nodes[at] if at < len(self) else Node(at, VACANT)
        if old.node_id in self.online | self._kept:
            return seat, "duplicate partition" if known is None else "duplicate name"
        if node.partition_id not in (UNKNOWN, at):
            return seat, "another partition than before"
        unclaimed = old.vacant and old.name in (None, f"partition-{at}")
        if not unclaimed and old.name != seat.name:
            return seat, "duplicate partition"
        # The first reported size counts; a node that reconnects cannot change its weight.
        size = seat.num_examples if old.num_examples is None else old.num_examples
        return replace(seat, num_examples=size), None

    def _free(self, at: int) -> bool:
        if self._registry is not None and at in self._registry.reserved:
            return False
        return at >= len(self) or (self.nodes[at].vacant and self.nodes[at].name is None)

    def _sit(self, node: Node) -> None:
        self._grow(node.partition_id + 1)
        old = self.nodes[node.partition_id]
        if not old.vacant:
            log(INFO, "Partition %d is back as node %d.", node.partition_id, node.node_id)
        if old.name is not None:
            del self.names[old.name]
        if node.name is not None:
            self.names[node.name] = node.partition_id
        self._nodes[node.partition_id] = node
        self.online.discard(old.node_id)
        self.online.add(node.node_id)
        self._outside.pop(node.node_id, None)

    def _grow(self, places: int) -> None:
        self._nodes += [Node(i, VACANT) for i in range(len(self.nodes), places)]

    def refuse(self, node_id: int, reason: str, server_round: int) -> None:
        """Exclude a node for a reason, which is counted; query it again some rounds later."""
        for node in [node for node in self.nodes if node.node_id == node_id]:
            self.online.discard(node_id)
            if self.known is None:  # Another node may take its place.
                at = node.partition_id
                self.names = {name: place for name, place in self.names.items() if place != at}
                self._nodes[at] = Node(at, VACANT)
                self._introductions.pop(at, None)
                self._first_free = 0
            self._leave_out(node, reason, server_round)
        self._warn_of_all()

    def rest(self, partition: int, server_round: int) -> bool:
        """Quarantine a node for 2, 4, 8, … 64 rounds in its place; False if half would be quarantined."""
        if 2 * (len(self._kept) + 1) >= len(self.online) + len(self._kept):
            return False
        times = self._resting.get(partition, (0, 0))[0] + 1
        rounds = rounds_away(times)
        self._resting[partition] = times, server_round + 1 + rounds
        self.online.discard(self.nodes[partition].node_id)
        self._kept.add(self.nodes[partition].node_id)
        self._refusals["quarantined"] += 1
        log(
            WARNING,
            "Partition %d is left out for %d rounds: its replies were refused again and again.",
            partition,
            rounds,
        )
        return True

    def resting(self) -> dict[str, list[int]]:
        """Return how often and until which round nodes are quarantined, by partition id, for a checkpoint."""
        return {str(at): list(since) for at, since in sorted(self._resting.items())}

    def put_to_rest(self, resting: Mapping[str, Sequence[int]]) -> None:
        """Restore what ``resting`` returned."""
        self._resting = {int(at): (int(times), int(until)) for at, (times, until) in resting.items()}

    def _leave_out(self, node: Node, reason: str, server_round: int) -> None:
        times = self._outside.get(node.node_id, (0, 0))[0] + 1
        rounds = rounds_away(times)
        self._outside[node.node_id] = times, server_round + rounds
        self._refusals[reason] += 1
        who = "" if node.name is None else f" ({node.name}, role {node.role!r}, group {node.group!r})"
        self._warnings.append(
            f"Node {node.node_id}{who} is left out: {reason}. It is asked again in {rounds} rounds."
        )

    def _warn_of_all(self) -> None:
        for line in self._warnings:
            log(WARNING, "%s", line)
        self._warnings = []

    def _exclude_unusable(self, answers: NodeQuery, server_round: int) -> None:
        """Exclude the nodes without a usable answer, and log all exclusions."""
        for node_id, reason in answers.unusable.items():
            self._leave_out(Node(UNKNOWN, node_id), reason, server_round)
        self._warn_of_all()

    def _too_few(self, needed: int, answered: int, asked: int) -> str:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in sorted(self._refusals.items()))
        counts = f"({answered} of {asked} nodes answered{f'; left out: {reasons}' if reasons else ''})"
        if needed != self.places:
            return f"{len(self.online)} nodes have their place, but {needed} are needed {counts}."
        missing = [node.partition_id for node in self.nodes if node.node_id not in self.online]
        return (
            f"Expected partitions 0 to {needed - 1}, but no node introduced itself as {missing[:5]}"
            f"{' …' if len(missing) > 5 else ''} {counts}."
        )


def _most_common(nodes: Sequence[Node]) -> Shapes:
    """Return the shapes that most nodes report; on a tie, those of the first by partition and name."""
    ordered = sorted(nodes, key=lambda node: (node.partition_id, node.name or ""))
    counts = Counter(node.shapes for node in ordered if node.shapes != Shapes())
    return max(counts, key=lambda shapes: counts[shapes], default=Shapes())


def _listed(grid: Grid) -> dict[int, _Listing]:
    return {info.node_id: (info.name, info.public_key) for info in grid.get_nodes()}


def _as_registered(node: Node, entry: Registered) -> Node:
    """Return the node with the registry's values; those that it leaves open stay as reported."""
    size, most = node.num_examples, entry.max_examples
    return replace(
        node,
        name=node.name if entry.name is None else entry.name,
        partition_id=node.partition_id if entry.partition is None else entry.partition,
        role=node.role if entry.role is None else entry.role,
        group=node.group if entry.group is None else entry.group,
        num_examples=size if size is None or most is None else min(size, most),
        max_examples=most,
    )


def _mismatch(node: Node, entry: Registered, registry: Registry) -> str | None:
    """Return which claim of a node differs from its registration."""
    at = node.partition_id
    if at not in (entry.partition, UNKNOWN) and (entry.partition is not None or at in registry.reserved):
        return "another partition than registered"
    for what in ("role", "group"):
        claimed, registered = getattr(node, what), getattr(entry, what)
        if registered is not None and claimed not in ("", registered):
            return f"another {what} than registered"
    return None
