"""The known parties of a run, which may join, leave, reconnect and restart.

A party's role and group are fixed for the run by its first introduction, and must equal those in the registry
(``registry.py``; the group is the text of its number), if it has any. A party without a valid introduction,
or that cannot follow the agreement, is excluded and queried again after 2, 4, 8, … 64 rounds, or at once if
it reconnects under another node id.
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

__all__ = ["QUESTIONS", "Parties"]

# Queries for an introduction before the first round, for parties that do not answer.
QUESTIONS = 3


class Parties:
    """The parties' introductions, by partition id.

    - ``sealed``: Whether parties must send the keys of sealed links.
    - ``read``: Returns an introduction, or raises PayloadError.
    """

    def __init__(
        self,
        federation: Federation,
        sealed: bool = False,
        read: Callable[[RecordDict], Introduction] = own_introduction,
    ) -> None:
        self._federation, self._read, self._sealed = federation, read, sealed
        self._known: dict[int, Introduction] = {}
        # The node id of each introduction.
        self._node_ids: dict[int, int] = {}
        # Role and group of each party's first introduction.
        self._claims: dict[int, tuple[str, int]] = {}
        # How often each partition and node id was excluded.
        self._times: Counter[tuple[int, int]] = Counter()
        # Excluded parties: the round of the next query, the node id, and the reason.
        self._outside: dict[int, tuple[int, int, str]] = {}
        # Introductions since the last ``take_news``.
        self._news: dict[int, Introduction] = {}

    def present(self, grid: Grid) -> Mapping[int, int]:
        """Return the node ids of online parties, by partition id, ascending."""
        return self._federation.gather(grid).node_ids

    def there(self, grid: Grid) -> dict[int, Introduction]:
        """Return the known parties that are online under the node id of their introduction."""
        present = self.present(grid)
        return {i: one for i, one in self.known.items() if present.get(i) == self._node_ids[i]}

    @property
    def known(self) -> dict[int, Introduction]:
        """The introductions of all parties that are not excluded, online or not."""
        return dict(sorted(self._known.items()))

    def strangers(self, grid: Grid) -> list[int]:
        """Return the unknown online parties for which a query is due."""
        found = []
        for i, node_id in self.present(grid).items():
            if self._node_ids.get(i) == node_id:
                continue
            again, refused, _ = self._outside.get(i, (0, node_id, ""))
            if refused != node_id or again <= self._federation.completed:
                found.append(i)
        return found

    def left_out(self, grid: Grid) -> Counter[str]:
        """Count the excluded parties that are online, by reason."""
        present = self.present(grid)
        return Counter(why for i, (_, node_id, why) in self._outside.items() if present.get(i) == node_id)

    def ask(self, grid: Grid, partitions: Iterable[int], questions: int) -> set[int]:
        """Query parties for introductions, at most so many times; return those now known."""
        talk = Conversation(self._federation, self._federation.completed, booked=False)
        silent, answered = set(partitions), set[int]()
        for _ in range(questions):
            if not silent:
                break
            for reply in self._query(talk, grid, silent):
                answered.add(reply.node.partition_id)
                self._take(reply.node, reply.value)
            silent -= answered
        if silent:
            present = self.present(grid)
            for i in silent & present.keys():
                self.leave_out(i, "left-out-no-introduction", present[i])
            reasons = ", ".join(f"{n} x {reason}" for reason, n in sorted(talk.report.rejected.items()))
            text = "%d nodes gave no valid introduction (%s); their own logs say why."
            log(WARNING, text, len(silent), reasons)
        return answered & self._known.keys()

    def renew(self, grid: Grid, partitions: Iterable[int]) -> None:
        """Query known parties that may have restarted; their new introductions count for their keys alone."""
        talk = Conversation(self._federation, self._federation.completed, booked=False)
        for reply in self._query(talk, grid, partitions):
            self._news[reply.node.partition_id] = reply.value
            self._node_ids[reply.node.partition_id] = reply.node.node_id

    def restarted(self, grid: Grid) -> set[int]:
        """Return the known parties that are online under another node id than that of their introduction."""
        present = self.present(grid)
        return {i for i in self._known.keys() & present.keys() if present[i] != self._node_ids[i]}

    def take_news(self) -> dict[int, Introduction]:
        """Return the known parties' introductions since the last call."""
        news, self._news = self._news, {}
        return {i: one for i, one in sorted(news.items()) if i in self._known}

    def _query(self, talk: Conversation, grid: Grid, partitions: Iterable[int]) -> list[Reply]:
        sealed = {"sealed": True} if self._sealed else {}
        config = ConfigRecord({"seed": self._federation.settings.seed, **sealed})
        contents = [(i, RecordDict({"config": config})) for i in sorted(partitions)]
        timeout = min(self._federation.timeout, self._federation.settings.max_wait)
        return talk.ask(grid, PAIR, contents, lambda _, content: self._read(content), timeout)

    def _take(self, node: Node, one: Introduction) -> None:
        partition, node_id = node.partition_id, node.node_id
        if (reason := _mismatch(node, one, self._federation)) is not None:
            self.leave_out(partition, reason, node_id)
            return
        if self._claims.setdefault(partition, (one.role, one.group)) != (one.role, one.group):
            self.leave_out(partition, "left-out-another-role", node_id)
            return
        self._known[partition], self._node_ids[partition] = one, node_id
        self._news[partition] = one

    def doubt(self, partition: int, reason: str) -> None:
        """Exclude a contradicted party; its next introduction may have another role or group."""
        self.leave_out(partition, reason)
        self._claims.pop(partition, None)

    def settled(self, partitions: Collection[int]) -> None:
        """Note that these parties are ready."""
        self._outside = {i: why for i, why in self._outside.items() if i not in partitions}

    def leave_out(
        self, partition: int, reason: str, node_id: int | None = None, *, soon: bool = False
    ) -> None:
        """Exclude a party for some rounds, twice as many each time; the first time for none if ``soon``."""
        node_id = self._node_ids.get(partition, 0) if node_id is None else node_id
        self._times[partition, node_id] += 1
        times = self._times[partition, node_id]
        rounds = 0 if soon and times == 1 else rounds_away(times)
        self._outside[partition] = self._federation.completed + rounds, node_id, reason
        self._known.pop(partition, None)
        self._node_ids.pop(partition, None)


def _mismatch(node: Node, one: Introduction, federation: Federation) -> str | None:
    """Return the reason if a party's role or group differs from the registered one."""
    if federation.settings.registry is None:
        return None
    for what, claimed in (("role", one.role), ("group", str(one.group))):
        if getattr(node, what) not in ("", claimed):
            return f"left-out-another-{what}-than-registered"
    return None
