"""Who is known of the parties of a run, which come, go, come back, and start again.

What a party is stands for the run: its role and its group are those that it told first, and where a registry
says them (``registry.py``, the group as the text of its number) no other than those. One that gives no
valid introduction, or cannot go by what was agreed on, is left out and asked again after 2, 4, 8, … 64
rounds, and at once when it comes back under another node id.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from logging import WARNING

from flwr.app import ConfigRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from hedgerow.strategies.federation import Federation
from hedgerow.strategies.hsgd.conversation import Conversation
from hedgerow.strategies.hsgd.introductions import Introduction, own_introduction
from hedgerow.strategies.inbox import Node, Reply
from hedgerow.strategies.roster import rounds_away
from hedgerow.wire.message_types import PAIR

__all__ = ["QUESTIONS", "Parties", "introduced"]

# How often silent parties are asked who they are, before the first round.
QUESTIONS = 3


def introduced(
    talk: Conversation,
    federation: Federation,
    grid: Grid,
    partitions: Iterable[int],
    read: Callable[[RecordDict], Introduction],
    *,
    sealed: bool,
) -> list[Reply]:
    """Ask parties who they are; ``read`` returns an answer, or raises PayloadError."""
    config = ConfigRecord({"seed": federation.settings.seed, **({"sealed": True} if sealed else {})})
    contents = [(i, RecordDict({"config": config})) for i in sorted(partitions)]
    timeout = min(federation.timeout, federation.settings.max_wait)
    return talk.ask(grid, PAIR, contents, lambda _, content: read(content), timeout)


class Parties:
    """The introductions of those that answered, by partition id.

    - ``sealed``: Whether they are asked for the keys of sealed links.
    - ``read``: Returns a party's answer, or raises PayloadError.
    """

    def __init__(
        self,
        federation: Federation,
        sealed: bool = False,
        read: Callable[[RecordDict], Introduction] = own_introduction,
    ) -> None:
        self._federation = federation
        self._read = read
        self._sealed = sealed
        self._known: dict[int, Introduction] = {}
        # Under which node id each of them told.
        self._node_ids: dict[int, int] = {}
        self._claims: dict[int, tuple[str, int]] = {}
        # How often each was left out under a node id.
        self._times: Counter[tuple[int, int]] = Counter()
        # Who is left out: from which round on it is asked again, under which node id, and why.
        self._outside: dict[int, tuple[int, int, str]] = {}

    def present(self, grid: Grid) -> Mapping[int, int]:
        """Return the node ids of those that are there, by partition id, ascending."""
        return self._federation.gather(grid).node_ids

    def there(self, grid: Grid) -> dict[int, Introduction]:
        """Return who is known and there, under the node id that it told under."""
        present = self.present(grid)
        return {i: one for i, one in self.known.items() if present.get(i) == self._node_ids[i]}

    @property
    def known(self) -> dict[int, Introduction]:
        """What each party told that is not left out, whether it is there or not."""
        return {i: self._known[i] for i in sorted(self._known)}

    def strangers(self, grid: Grid) -> list[int]:
        """Return who is there and not known, and whose time it is to be asked."""
        found = []
        for i, node_id in self.present(grid).items():
            if self._node_ids.get(i) == node_id:
                continue
            again, refused, _ = self._outside.get(i, (0, node_id, ""))
            if refused != node_id or again <= self._federation.completed:
                found.append(i)
        return found

    def left_out(self, grid: Grid) -> Counter[str]:
        """Return how many of those that are there are left out, by reason."""
        present = self.present(grid)
        return Counter(why for i, (_, node_id, why) in self._outside.items() if present.get(i) == node_id)

    def ask(self, grid: Grid, partitions: Iterable[int], questions: int) -> set[int]:
        """Ask parties who they are, at most so many times; return those that told it validly."""
        talk = Conversation(self._federation, self._federation.completed, booked=False)
        waiting = set(partitions)
        told: set[int] = set()
        for _ in range(questions):
            if told >= waiting:
                break
            asked = waiting - told
            for reply in introduced(talk, self._federation, grid, asked, self._read, sealed=self._sealed):
                told.add(reply.node.partition_id)
                self._take(reply.node, reply.value)
        if silent := waiting - told:
            present = self.present(grid)
            for i in silent & present.keys():
                self.leave_out(i, "left-out-no-introduction", present[i])
            reasons = ", ".join(f"{n} x {reason}" for reason, n in sorted(talk.report.rejected.items()))
            text = "%d nodes gave no valid introduction (%s); their own logs say why."
            log(WARNING, text, len(silent), reasons)
        return told & self._known.keys()

    def _take(self, node: Node, one: Introduction) -> None:
        partition, node_id = node.partition_id, node.node_id
        if (reason := _mismatch(node, one, self._federation)) is not None:
            self.leave_out(partition, reason, node_id)
            return
        if self._claims.setdefault(partition, (one.role, one.group)) != (one.role, one.group):
            self.leave_out(partition, "left-out-another-role", node_id)
            return
        self._known[partition], self._node_ids[partition] = one, node_id

    def doubt(self, partitions: Iterable[int], reason: str) -> None:
        """Leave parties out whom others contradict; asked again, they may tell another role or group."""
        for i in partitions:
            self.leave_out(i, reason)
            self._claims.pop(i, None)

    def settled(self, partitions: Collection[int]) -> None:
        """Note that these are ready."""
        self._outside = {i: why for i, why in self._outside.items() if i not in partitions}

    def leave_out(
        self, partition: int, reason: str, node_id: int | None = None, *, soon: bool = False
    ) -> None:
        """Leave a party out for some rounds, twice as many each time; at first for none, if ``soon``."""
        node_id = self._node_ids.get(partition, 0) if node_id is None else node_id
        self._times[partition, node_id] += 1
        times = self._times[partition, node_id]
        rounds = 0 if soon and times == 1 else rounds_away(times)
        self._outside[partition] = self._federation.completed + rounds, node_id, reason
        self._known.pop(partition, None)
        self._node_ids.pop(partition, None)


def _mismatch(node: Node, one: Introduction, federation: Federation) -> str | None:
    """Return which claim of a party is not what was registered, or what the node said when it came."""
    if federation.settings.registry is None:
        return None
    for what, claimed in (("role", one.role), ("group", str(one.group))):
        if getattr(node, what) not in ("", claimed):
            return f"left-out-another-{what}-than-registered"
    return None
