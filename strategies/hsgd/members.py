"""The members of an HSGD run: its groups and their links, updated before each round."""

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from hedgerow.strategies.exchange import Steps
from hedgerow.strategies.hsgd.groups import Group, PairingError
from hedgerow.strategies.hsgd.links import PartyLinks
from hedgerow.strategies.hsgd.matching import Matching
from hedgerow.strategies.hsgd.setup import Setup
from hedgerow.strategies.hsgd.system import MethodVariant
from hedgerow.strategies.inbox import ExchangeReport
from hedgerow.strategies.parts import Part
from hedgerow.strategies.run import Run
from hedgerow.strategies.whoami import RAISED

__all__ = ["Members"]


class Members(Part):
    """The groups of a run.

    - ``new_setup``: Returns how the parties of a run form groups.
    - ``check``: Raises PairingError if a run cannot start with these groups.
    - ``groups``: The round's groups.
    - ``matching``: The last matching, with the held-out people.
    - ``sizes``: People per group; 0 for a group that has not taken part yet.
    - ``report``: The report over all exchanges of a round's last attempt.
    """

    name = "members"

    def __init__(
        self,
        new_setup: Callable[[], Setup],
        variant: MethodVariant,
        links: PartyLinks,
        check: Callable[[Matching], None],
    ) -> None:
        self._new_setup, self._variant, self._links, self._check = new_setup, variant, links, check
        self.forget()

    def forget(self) -> None:
        """Forget all parties."""
        self.setup = self._new_setup()
        self.groups: list[Group] = []
        self.matching: Matching | None = None
        self.sizes: list[int] = []
        self.report = ExchangeReport()
        # The groups that the run started with.
        self._first: set[int] = set()

    def state_dict(self) -> dict[str, Any]:
        """Return the parties' agreement and the groups' sizes, for a checkpoint."""
        return {"agreed": self.setup.state_dict(), "sizes": list(self.sizes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        self.sizes = [int(size) for size in state["sizes"]]
        self.setup.load_state_dict(state["agreed"], {m: size for m, size in enumerate(self.sizes) if size})

    @property
    def encodings(self) -> tuple[int, int]:
        """The lengths e1 and e2 of encodings."""
        return self.setup.encodings

    def begin(self, grid: Grid) -> ArrayRecord | None:
        """Form the groups, once per run; return the initial model if it depends on the parties' data."""
        if self.matching is not None:
            return None
        matching = self.setup.begin(grid)
        if self._variant.merged and len(matching.groups) > 1:
            raise PairingError(
                f"{self._variant.method} must have one hospital, or aggregate=False, got "
                f"{len(matching.groups)} hospitals"
            )
        if self.setup.trains:
            self._check(matching)
        self._first = {group.number for group in matching.groups}
        self._take_part(matching)
        self._introduce()
        self._links.log()
        return self.setup.initial_model(matching.form)

    def opened(self, run: Run) -> Steps[None]:
        """Update the groups, and get the keys of new parties."""
        raised = {i for i, error in self.report.errors.items() if error.code == RAISED}
        self.report = run.whole
        assert run.grid is not None
        if self.matching is not None:
            matching = self.setup.refresh(run.grid, raised)
            if matching is not None:
                if self._variant.merged:  # Only the first hospital.
                    matching.groups = [group for group in matching.groups if group.number in self._first]
                self._take_part(matching)
            self._introduce()
            if self.setup.away:
                self.report.rejected["offline"] += self.setup.away
        yield from ()

    def ended(self, run: Run) -> None:
        """Report lost groups, excluded parties and unmatched people."""
        run.metrics["lost-groups"] = max(len(self.groups), self.setup.due) - run.metrics["groups"]
        run.metrics |= {reason: number for reason, number in sorted(self.setup.counts.items()) if number}

    def _introduce(self) -> None:
        for i, one in self.setup.parties.take_news().items() if self._links.sealed else ():
            self._links.introduced(i, one.link)

    def _take_part(self, matching: Matching) -> None:
        self.matching, self.groups = matching, matching.groups
        self._links.place([*matching.groups, *matching.held_out.values()])
        sizes = self.setup.sizes or {at: group.size for at, group in enumerate(self.groups)}
        self.sizes = [sizes.get(m, 0) for m in range(max(sizes, default=-1) + 1)]
