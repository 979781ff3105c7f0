"""Who takes part in a run: places, online nodes, late joiners, and nodes in quarantine."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from logging import INFO
from typing import Any

from flwr.common import log
from flwr.serverapp import Grid

from hedgerow.strategies.node import Node, Shapes
from hedgerow.strategies.options import FederationSettings
from hedgerow.strategies.roster import Admits, Roster
from hedgerow.wire.seeds import Purpose, generator


class Membership:
    """The nodes of a run, of which some are online and some in quarantine.

    Parameters
    ----------
    settings : FederationSettings
        The strategy's options.
    places : int or None
        Number of places; None for no limit.
    quorum : int
        How many nodes must be online when the run starts.
    """

    def __init__(self, settings: FederationSettings, places: int | None, quorum: int) -> None:
        self._settings = settings
        self.places, self.quorum = places, quorum
        # Returns why a node is excluded (the reason is counted), or None.
        self.admits: Admits | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the run."""
        self.roster: Roster | None = None
        # From a checkpoint: names, shapes, and quarantined nodes.
        self._names: dict[str, int] = {}
        self._shapes: Shapes | None = None
        self._rested: dict[str, list[int]] = {}
        # Refused replies in a row, by client.
        self._strikes: Counter[int] = Counter()
        # Places of nodes that were excluded for good reason; a round does not wait for them.
        self._barred: set[int] = set()
        # A round, and the nodes excluded in it, by reason.
        self._left_out: tuple[int, Counter[str]] = 0, Counter()

    @property
    def num_clients(self) -> int:
        """Number of clients; without a limit, of those that have come so far."""
        if self.places is not None:
            return self.places
        return len(self.roster) if self.roster is not None else max(self._names.values(), default=-1) + 1

    @property
    def nodes(self) -> Sequence[Node]:
        """The nodes with a place, as of the last ``gather``."""
        return [] if self.roster is None else [node for node in self.roster.nodes if not node.vacant]

    @property
    def introduced(self) -> bool | None:
        """Whether the nodes introduce themselves; None before they were queried."""
        return None if self.roster is None else self.roster.introduced

    def nodes_of(self, clients: Iterable[int]) -> list[Node]:
        """Return the nodes of some partitions, in this order."""
        assert self.roster is not None, "the nodes were gathered"
        nodes = self.roster.nodes
        return [nodes[client] for client in clients]

    def shapes(self) -> Shapes:
        """Return the shapes of the nodes' data; unknown before they were queried."""
        return Shapes() if self.roster is None else self.roster.shapes

    def gather(self, grid: Grid, timeout: float, server_round: int) -> Roster:
        """Return the roster: gathered on the first call, refreshed later."""
        if self.roster is not None:
            self.roster.refresh(grid, timeout, server_round)
            return self.roster
        self.roster = self._gathered(grid, timeout, server_round)
        if self._rested:
            self.roster.put_to_rest(self._rested)
            self.roster.refresh(grid, timeout, server_round)
        return self.roster

    def _gathered(self, grid: Grid, timeout: float, server_round: int) -> Roster:
        settings = self._settings
        if settings.roster is not None:
            roster = settings.roster.continued(self._names, self._shapes, self.admits)
            roster.refresh(grid, timeout, server_round)
            return roster
        if settings.registry is None and not self._names and self._shapes is None:
            known = Roster.of_known(grid, self.places, self.admits)
            if known is not None:
                return known
        return Roster.gather(
            grid,
            self.places,
            settings.max_wait,
            quorum=self.quorum,
            names=self._names,
            shapes=self._shapes,
            admits=self.admits,
            registry=settings.registry,
        )

    # Who is asked.

    def scheduled(self, server_round: int, pool: Sequence[int], count: int) -> list[int]:
        """Return ``count`` of a pool's partitions, ascending, drawn uniformly, or all if there are fewer."""
        count = min(count, len(pool))
        stream = generator(self._settings.seed, round=server_round, purpose=Purpose.SCHEDULE)
        return sorted(pool[i] for i in stream.choice(len(pool), count, replace=False)) if count else []

    def uniform(self, server_round: int, client: int) -> float:
        """Return a client's draw in [0, 1) for its participation in a round."""
        stream = generator(
            self._settings.seed, round=server_round, partition_id=client, purpose=Purpose.PARTICIPATION
        )
        return float(stream.random())

    def select_online(self, chosen: Iterable[int]) -> tuple[list[Node], int]:
        """Return the chosen nodes that were online at the last ``gather``, and how many were not."""
        roster = self.roster
        assert roster is not None
        places, online = roster.nodes, roster.online
        nodes = [places[i] for i in chosen]
        if self.places is None:  # Vacant places do not count as offline.
            nodes = [node for node in nodes if not node.vacant]
        elif self._barred:
            nodes = [node for node in nodes if not (node.vacant and node.partition_id in self._barred)]
        there = [node for node in nodes if node.node_id in online]
        log(INFO, "configure_train: Sampled %d nodes (out of %d)", len(there), len(roster))
        return there, len(nodes) - len(there)

    # Who is not.

    def refuse(self, node: Node, reason: str, server_round: int) -> None:
        """Exclude a node that has a place; the reason is counted."""
        if self.roster is not None:
            self.roster.refuse(node.node_id, reason, server_round)

    def bar(self, clients: Collection[int], reason: str, server_round: int) -> None:
        """Exclude the nodes of places for which no round waits until another node has them."""
        assert self.roster is not None
        for client in clients:
            for node in self.roster.nodes[client : client + 1]:
                if not node.vacant:
                    self._barred.add(client)
                    self.roster.refuse(node.node_id, reason, server_round)

    def judge(self, refused: Collection[int], used: Collection[int], server_round: int) -> None:
        """Quarantine nodes after repeatedly refused replies or errors, but never half of the online nodes."""
        for client in used:
            self._strikes.pop(client, None)
        self._strikes.update(refused)
        if not self._settings.quarantine_after:
            return
        for client in sorted(refused):
            struck = self._strikes[client] >= self._settings.quarantine_after
            if struck and self.roster is not None and self.roster.rest(client, server_round):
                del self._strikes[client]

    def fails(self, client: int) -> bool:
        """Return whether a node's last reply was refused, or an error of its own."""
        return self._strikes[client] > 0

    def left_out(self, server_round: int) -> Counter[str]:
        """Return how many nodes were excluded since the round began, by reason."""
        began, reasons = self._left_out
        reasons = reasons if began == server_round else Counter()
        if self.roster is not None:
            reasons = reasons + self.roster.take_refusals()
        self._left_out = server_round, reasons
        return reasons

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return names (unless each is ``partition-i``), data shapes, strikes and quarantine, if any."""
        names = self._names if self.roster is None else self.roster.names
        shapes = self._shapes if self.roster is None else self.roster.shapes
        plain = all(name == f"partition-{at}" for name, at in names.items())
        kept: dict[str, Any] = {} if plain else {"names": dict(sorted(names.items()))}
        if shapes is not None and shapes != Shapes():
            kept["shapes"] = asdict(shapes)
        if self._strikes:
            kept["strikes"] = {str(client): count for client, count in sorted(self._strikes.items())}
        if resting := self._rested if self.roster is None else self.roster.resting():
            kept["resting"] = resting
        return kept

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        self._strikes = Counter({int(client): int(n) for client, n in state.get("strikes", {}).items()})
        self._rested = {str(at): list(since) for at, since in state.get("resting", {}).items()}
        self._names = {str(name): int(at) for name, at in state.get("names", {}).items()}
        if (shapes := state.get("shapes")) is not None:
            axes = shapes["input_shape"]
            self._shapes = Shapes(**{**shapes, "input_shape": None if axes is None else tuple(axes)})
