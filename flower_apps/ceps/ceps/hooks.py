"""CEPS's hooks: its rows in ``hedgerow check``, and the graph in a report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hedgerow.sim import CheckedNodes, CheckedRounds, Hooks, Verdict

if TYPE_CHECKING:
    from hedgerow.sim import DrawnNetwork, RecordedRun


def check(nodes: CheckedNodes) -> Iterator[Verdict]:
    """Send two events, then a request for a payload alone."""
    yield _events(nodes).verdict("CEPS", "app = ceps_client(problem)  # from hedgerow.clients")
    yield _router(nodes)


def _events(nodes: CheckedNodes) -> CheckedRounds:
    from flwr.app import ArrayRecord

    from hedgerow.strategies import CEPS, Gossip

    own = nodes.own
    dim = (
        own.method.dim if isinstance(own, Gossip) else sum(a.numpy().size for a in nodes.some_arrays.values())
    )
    options = {key: value for key, value in nodes.options.items() if key == "min_available_nodes"}
    strategy = CEPS(
        dim=dim, sparsity=max(1, dim // 10), codec="sparse32", topology="complete", interval=1,
        sigma_rule="fixed_c", c=10.0, num_iterations=2, max_repeats=0, **options,
    )  # fmt: skip
    return nodes.run(strategy, ArrayRecord(), rounds=2)


def _router(nodes: CheckedNodes) -> Verdict:
    import networkx as nx

    from hedgerow.strategies import Roster, Router
    from hedgerow.wire.ledger import Ledger
    from hedgerow.wire.message_types import PUBLISH

    name = "Router"
    with nodes.grid() as (grid, replies):
        router = Router(nx.complete_graph(nodes.least), _AnyBytes(), Ledger())
        out = CheckedRounds(router, replies)
        try:
            router.route(grid, Roster.gather(grid, nodes.least, 60.0), 1, 0, {0: [1], 1: [0]}, timeout=60.0)
        except Exception as error:
            out.error = error
    if out.error is None and router.report.deliveries == nodes.least:
        return Verdict(name, "yes")
    set_up = _events(nodes)
    if set_up.served and set_up.of(PUBLISH):
        return Verdict(name, "partly", f"publishes only after a Gossip strategy's set-up: {out.reason}")
    published = "RecordDict({'payload': ConfigRecord({'bytes': payload})})"
    raised = [reply.error.reason for reply in out.of(PUBLISH) if reply.has_error()]
    reason = out.reason if raised else ", ".join(router.report.lost)
    return Verdict(
        name,
        "no",
        reason,
        f"@app.query('publish')  # the function returns Message({published}, reply_to=message)",
    )


class _AnyBytes:
    """A codec of arbitrary payloads."""

    max_bytes = 1 << 30
    per_receiver = False

    def bits(self, payload: bytes) -> int:
        return 8 * len(payload)


def network(run: RecordedRun) -> DrawnNetwork | None:
    """Return the nodes' graph."""
    from hedgerow.sim import DrawnNetwork
    from hedgerow.sim.runs.diagram import MOST_DRAWN
    from hedgerow.strategies.ceps.strategy import neighbourhood_graph
    from hedgerow.strategies.topology import as_digraph

    topology, clients = run.settings.get("topology"), run.settings.get("num-clients")
    if not isinstance(topology, str) or type(clients) is not int or run.seed < 0:
        return None
    if "node->node" not in (run.rounds[-1].get("by_link") or {}) or not 1 <= clients <= MOST_DRAWN:
        return None
    try:
        if not topology:
            return DrawnNetwork("node", clients, sorted(neighbourhood_graph(None, clients, run.seed).edges))
        drawn = as_digraph(topology, clients, run.seed)
    except ValueError:
        # No such graph exists for this number of nodes, so this is not a run of CEPS.
        return None
    directed = any(not drawn.has_edge(b, a) for a, b in drawn.edges)
    both = drawn if directed else drawn.to_undirected()
    return DrawnNetwork("node", clients, sorted(both.edges), directed=directed)


HOOKS = Hooks(check=check, network=network)
