"""The members of an HSGD run, updated before each round.

With own data, people are matched again and new parties join. With dealt data, parties that were contradicted
are queried again.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from hedgerow.strategies.exchange import Steps
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.hsgd.conversation import Conversation
from hedgerow.strategies.hsgd.groups import Group, PairingError
from hedgerow.strategies.hsgd.introductions import introduction
from hedgerow.strategies.hsgd.links import PartyLinks
from hedgerow.strategies.hsgd.matching import Matching
from hedgerow.strategies.hsgd.own import Agreed, OwnDataSetup, OwnSetup
from hedgerow.strategies.hsgd.parties import introduced
from hedgerow.strategies.hsgd.setup import DealtSetup
from hedgerow.strategies.hsgd.system import MethodVariant
from hedgerow.strategies.inbox import ExchangeReport
from hedgerow.strategies.parts import Part
from hedgerow.strategies.roster import RAISED
from hedgerow.strategies.run import Run

__all__ = ["Members"]


class Members(Part):
    """The groups of a run.

    - ``own``: None for dealt data.
    - ``num_groups``: M; None for the number of hospitals.
    - ``check``: Raises PairingError if a run cannot start with these groups.
    - ``groups``: The round's groups.
    - ``encodings``: e1 and e2.
    - ``matching``: The last matching, with the held-out people.
    - ``agreed``: The agreement of parties with their own data.
    - ``sizes``: People per group; 0 for a group that has not taken part yet.
    - ``counts``: Excluded parties and unmatched people, by reason.
    - ``report``: The report over all exchanges of a round's last attempt.
    """

    name = "members"

    def __init__(
        self,
        federation: Federation,
        own: OwnDataSetup | None,
        num_groups: int | None,
        variant: MethodVariant,
        links: PartyLinks,
        check: Callable[[Matching], None],
    ) -> None:
        self._federation, self.own, self.num_groups = federation, own, num_groups
        self._variant, self._links, self._check = variant, links, check
        self.forget()

    def forget(self) -> None:
        """Forget all parties."""
        self.groups: list[Group] = []
        self.encodings = (0, 0)
        self.matching: Matching | None = None
        self.agreed: Agreed | None = None
        self.sizes: list[int] = []
        self.counts: Counter[str] = Counter()
        self.report = ExchangeReport()
        self._setup: OwnSetup | None = None
        self._dealt: DealtSetup | None = None
        self._matched_at = 0
        # The largest number of people seen per group.
        self._most: dict[int, int] = {}
        # The node id, or with own data the reply, of each party's last introduction.
        self._greeted: dict[int, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the agreement and the groups' sizes, for a checkpoint."""
        agreed = None if self.agreed is None else asdict(self.agreed)
        return {"agreed": agreed, "sizes": list(self.sizes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        self.sizes = [int(size) for size in state["sizes"]]
        self.agreed = None if state["agreed"] is None else Agreed.restored(state["agreed"])

    @property
    def due(self) -> int:
        """The expected number of groups in a round."""
        return len(self.groups) if self._dealt is None else max(len(self.groups), self.num_groups or 0)

    def people(self) -> dict[int, float]:
        """Return the largest weight of each group's parties: all matched people, held out or not.

        With dealt data a party also counts people that no other party has: at most as many again.
        """
        held = {} if self.matching is None else self.matching.held_out
        for group in self.groups:
            m, matched = group.number, group.size + (held[group.number].size if group.number in held else 0)
            claimed = self._most.get(m, 0) if self._dealt is None else self._dealt.sizes.get(m, 0)
            self._most[m] = max(matched, min(claimed, 2 * matched))
        return {m: float(most) for m, most in self._most.items()}

    # Before a run.

    def match(self, grid: Grid) -> ArrayRecord | None:
        """With own data, match people once and return the initial model."""
        own = self.own
        if own is None or self.matching is not None:
            return None
        if own.trained is not None:
            self.agreed = Agreed.restored(own.trained["parts"]["members"]["agreed"])
        self._setup = OwnSetup(self._federation, own, self.num_groups, self._links.sealed)
        matching, self.agreed = self._setup.run(grid, self.agreed)
        if own.trained is not None:
            matching.held_out = {group.number: group for group in matching.groups}
        self._check_merged(matching)
        if own.trained is None:
            self._check(matching)
        self._take_part(matching, self._setup)
        self._take_links(self._setup, grid)
        self._links.log()
        self._matched_at = self._federation.completed
        form = matching.form
        return own.build(form.hospital_shape, form.device_shape, len(form.classes))

    def pair(self, grid: Grid) -> None:
        """With dealt data, form the groups once."""
        if self.groups or self.own is not None:
            return
        layout = self._federation.known_layout()
        shapes = zip(layout.keys, layout.shapes, strict=True)
        widths = {shape[1] for key, shape in shapes if key.startswith("head.") and len(shape) > 1}
        dealt = DealtSetup(self._federation, self.num_groups, self._links.sealed, widths)
        matching = dealt.run(grid, {m: size for m, size in enumerate(self.sizes) if size})
        self._check_merged(matching)
        self._check(matching)
        self._dealt = dealt
        self._take_introductions(dealt, matching, set(dealt.parties.known), grid)
        self._links.log()

    def _check_merged(self, matching: Matching) -> None:
        if self._variant.merged and len(matching.groups) > 1:
            raise PairingError(
                f"{self._variant.method} must have one hospital, or aggregate=False, got "
                f"{len(matching.groups)} hospitals"
            )

    # Before a round.

    def opened(self, run: Run) -> Steps[None]:
        """Update the groups, and get the keys of new parties."""
        raised = {i for i, error in self.report.errors.items() if error.code == RAISED}
        self.report = run.whole
        assert run.grid is not None
        if self._dealt is not None:
            self._take_introductions(self._dealt, *self._dealt.refresh(run.grid), run.grid)
        if self._setup is not None and self.agreed is not None:
            self._refresh(self._setup, self.agreed, raised, run.grid)
        self._exchange_keys(raised, run.grid)
        yield from ()

    def ended(self, run: Run) -> None:
        """Report lost groups, excluded parties and unmatched people."""
        run.told["lost-groups"] = self.due - run.told["groups"]
        run.told |= {reason: number for reason, number in sorted(self.counts.items()) if number}

    def _refresh(self, setup: OwnSetup, agreed: Agreed, raised: set[int], grid: Grid) -> None:
        assert self.own is not None
        completed, every = self._federation.completed, self.own.rematch_every
        due = every > 0 and completed - self._matched_at >= every
        matching = setup.refresh(grid, agreed, raised, reread=due)
        if due:
            self._matched_at = completed
        if matching is not None:
            if self._variant.merged:  # Only the first hospital.
                matching.groups = [group for group in matching.groups if group.number in setup.first]
            self._take_part(matching, setup)
        self._take_links(setup, grid)
        roster = self._federation.gather(grid)
        missed = len(roster)
        if self._federation.places is None:  # Places that were never taken are not missed.
            missed = sum(not node.vacant for node in roster.nodes)
        if away := missed - len(roster.online):
            self.report.rejected["offline"] += away

    def _exchange_keys(self, raised: set[int], grid: Grid) -> None:
        """Query parties that are new, have another node id, or raised an error, for their introductions."""
        if not self._links.sealed or self.own is not None:
            return
        there = self._federation.gather(grid).node_ids
        new = [i for i, node_id in there.items() if i in raised or self._greeted.get(i) != node_id]
        taking_part = {i for group in self.groups for i in group.partitions} if new else set()
        if not (asked := taking_part.intersection(new)):
            return
        talk = Conversation(self._federation, self._federation.completed, booked=False)
        for reply in introduced(talk, self._federation, grid, asked, introduction, sealed=True):
            self._links.introduced(reply.node.partition_id, reply.value.link)
            self._greeted[reply.node.partition_id] = reply.node.node_id

    def _take_links(self, setup: OwnSetup, grid: Grid) -> None:
        """With own data, take new introductions."""
        if not self._links.sealed:
            return
        for i, one in setup.parties.there(grid).items():
            if self._greeted.get(i) is not one:
                self._links.introduced(i, one.link)
                self._greeted[i] = one

    def _take_introductions(
        self, dealt: DealtSetup, matching: Matching | None, answered: set[int], grid: Grid
    ) -> None:
        """With dealt data, take the introductions of parties that answered, and the groups."""
        if self._links.sealed:
            nodes = self._federation.gather(grid).nodes
            for i, party in dealt.parties.known.items():
                if i in answered:
                    self._links.introduced(i, party.link)
                    self._greeted[i] = nodes[i].node_id
        self.counts = dealt.counts
        if matching is not None:
            self._take_part(matching, dealt)

    def _take_part(self, matching: Matching, setup: OwnSetup | DealtSetup) -> None:
        self.matching, self.counts = matching, setup.counts
        self.groups, self.encodings = matching.groups, setup.encodings
        self._links.place([*matching.groups, *matching.held_out.values()])
        if isinstance(setup, DealtSetup):
            self.sizes = [setup.sizes.get(m, 0) for m in range(max(setup.sizes) + 1)]
        else:
            self.sizes = [group.size for group in self.groups]
