"""The assignment of clients to edge servers: given, in equal contiguous parts, or by the nodes' groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Steps
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.node import Node
from hedgerow.strategies.parts.part import Part
from hedgerow.strategies.whoami import RosterError

# Each client's server, ``BY_GROUP`` for the nodes' groups, or None for contiguous clusters.
Chosen = Sequence[int] | str | None
BY_GROUP = "group"
# The server of a client that has not joined yet.
_NO_SERVER = -1


def contiguous_clusters(num_clients: int, num_servers: int) -> tuple[int, ...]:
    """Return each client's server, floor(i D / C) for client i: sizes differ by at most one."""
    if num_servers > num_clients:
        raise ValueError(
            f"num_servers must be from 1 to {num_clients}, the number of clients, got {num_servers}"
        )
    return tuple(i * num_servers // num_clients for i in range(num_clients))


class Clusters(Part):
    """Each client's edge server.

    If clusters depend on the nodes, the first round determines them; a client that joins later gets its
    group's server, or the one with the fewest clients. ``chosen`` is as ``clusters`` of
    ``ClusteredStrategy``; the last ``others`` places of the federation are not clients. ``of`` has the server
    of each client, by partition id; -1 for one that has not joined yet.
    """

    name = "clusters"

    def __init__(self, chosen: Chosen, num_servers: int, federation: Federation, others: int = 0) -> None:
        self.chosen, self.num_servers = chosen, num_servers
        self.federation, self._others = federation, others
        self.of = self._first = self._checked()
        self.forget()
        if chosen == BY_GROUP:
            admits = federation.members.admits
            federation.members.admits = lambda node: (admits and admits(node)) or self._with_group(node)

    def forget(self) -> None:
        """Reset the clusters."""
        self.of = self._first
        self._groups: dict[str, int] = {}
        self._begun = False
        # Cached samples of each cluster, with the clusters and the number of known sizes that they hold for.
        self._sizes: tuple[tuple[int, ...], int, NDArray[np.float64]] | None = None

    def _checked(self) -> tuple[int, ...]:
        chosen = self.chosen
        if isinstance(chosen, str) and chosen != BY_GROUP:
            raise ValueError(f"clusters must be a server for each client, or {BY_GROUP!r}, got {chosen!r}")
        if chosen is None or isinstance(chosen, str):
            places = self.federation.members.places
            clients = (places or self.federation.members.quorum) - self._others
            contiguous = contiguous_clusters(clients, self.num_servers)
            return contiguous if places is not None else ()
        if set(chosen) != set(range(self.num_servers)):
            raise ValueError(
                f"clusters must name each server from 0 to {self.num_servers - 1}, got {sorted(set(chosen))}"
            )
        return tuple(int(server) for server in chosen)

    @property
    def smallest(self) -> int | None:
        """The number of clients of the smallest cluster; None if it depends on the nodes."""
        return min(Counter(self.of).values(), default=None)

    def among(self, clients: Iterable[int]) -> list[int]:
        """Return the given clients that have a server."""
        return [i for i in clients if self.of[i] != _NO_SERVER]

    def members(self, clients: Iterable[int]) -> dict[int, list[int]]:
        """Return the clients of each server that has any, both ascending."""
        clusters: dict[int, list[int]] = {}
        for i in clients:
            clusters.setdefault(self.of[i], []).append(i)
        return dict(sorted(clusters.items()))

    def sizes(self, by_examples: bool) -> NDArray[np.float64]:
        """Return the clusters' samples, or clients, (D,); a client of unknown size counts as the mean one."""
        known = len(self.federation.limits.claims.sizes)
        if self._sizes is None or self._sizes[0] is not self.of or self._sizes[1] != known:
            of = np.array(self.of, np.int64)
            there = of != _NO_SERVER
            weights = self.federation.limits.weights(len(of))[there] if by_examples else None
            sums = np.bincount(of[there], weights, minlength=self.num_servers).astype(np.float64)
            self._sizes = self.of, known, sums
        return self._sizes[2]

    # Clusters that depend on the nodes.

    @property
    def _found(self) -> bool:
        return self.chosen == BY_GROUP or self.federation.members.places is None

    def opened(self, run: RoundContext) -> Steps[None]:
        """Determine the clusters at the start of a run, and the servers of nodes that have joined since.

        RosterError if the nodes do not introduce themselves, or have no group for each server.
        """
        begins, self._begun = not self._begun, True
        if begins and self.chosen is not None and not self.federation.members.introduced:
            raise RosterError(
                "clusters says which edge server each partition belongs to, but no node says which partition "
                "it has: use ClientApp(mods=[introduce]), with 'from hedgerow.clients import introduce', or "
                "leave clusters out"
            )
        if self._found:
            nodes = self.federation.members.nodes
            if begins and not self.federation.completed:
                self._settle(nodes)
            self._welcome(nodes)
        yield from ()

    def _settle(self, nodes: Sequence[Node]) -> None:
        self.of = ()
        if self.chosen == BY_GROUP:
            self._groups = _servers_of([node.group for node in nodes], self.num_servers)
        else:
            servers = contiguous_clusters(len(nodes), self.num_servers)
            self._place({node.partition_id: s for node, s in zip(nodes, servers, strict=True)})

    def _welcome(self, nodes: Sequence[Node]) -> None:
        """Assign clients without a server to that of their group, else to the one with the fewest clients."""
        for node in nodes:
            if node.partition_id < len(self.of) and self.of[node.partition_id] != _NO_SERVER:
                continue
            if self.chosen != BY_GROUP:
                counts = Counter(self.of)
                self._place({node.partition_id: min(range(self.num_servers), key=lambda d: counts[d])})
            elif node.group in self._groups:
                self._place({node.partition_id: self._groups[node.group]})
            else:
                self.federation.members.refuse(node, "unknown group", self.federation.completed)
        self._place({})

    def _place(self, servers: Mapping[int, int]) -> None:
        """Store the servers of some clients, by partition id."""
        come = self.federation.num_clients - self._others
        clients = max([len(self.of), *(i + 1 for i in servers), come])
        known = dict(enumerate(self.of)) | dict(servers)
        self.of = tuple(known.get(i, _NO_SERVER) for i in range(clients))

    def _with_group(self, node: Node) -> str | None:
        """Return why a node cannot belong to a cluster; None if it can, or is not a client."""
        places = self.federation.members.places
        if places is not None and node.partition_id >= places - self._others:
            return None
        if not node.group:
            return "no group"
        return "unknown group" if self._groups and node.group not in self._groups else None

    def state_dict(self) -> dict[str, Any]:
        """Return the clusters, if they depend on the nodes."""
        return {"of": list(self.of), "groups": self._groups} if self._found else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        self.of = tuple(int(server) for server in state.get("of", self.of))
        self._groups = {str(name): int(server) for name, server in state.get("groups", {}).items()}


def _servers_of(groups: Sequence[str], num_servers: int) -> dict[str, int]:
    """Return the servers of the ``num_servers`` largest groups; nodes with a wrong group stop no others."""
    sizes = Counter(groups)
    names = [name for name, _ in sizes.most_common(num_servers)]
    smallest = min((sizes[name] for name in names), default=0)
    if len(names) < num_servers or any(sizes[name] >= smallest for name in sizes.keys() - set(names)):
        raise RosterError(
            f"clusters is {BY_GROUP!r}, so the node configs must name a group for each of the {num_servers} "
            f"edge servers, got {sorted(sizes)}: --node-config 'group=\"north\"'"
        )
    numbers = all(name.isdecimal() for name in names)
    return {name: server for server, name in enumerate(sorted(names, key=int if numbers else str))}
