"""SD-FEEL's hooks: its planner, its rows in ``hedgerow check``, and the graph in a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from hedgerow.sim import CheckedNodes, CheckedRounds, Hooks, Verdict
from sd_feel.plan import plan

if TYPE_CHECKING:
    from flwr.app import Message

    from hedgerow.sim import DrawnNetwork, RecordedRun
    from hedgerow.strategies import SDFeel

_FEW, _MORE = 1, 4
# Part of Flower's error about a missing handler.
_NO_HANDLER = "function registered"


def check(nodes: CheckedNodes) -> Iterator[Verdict]:
    """Request few steps and then more, then a compressed update, then a secure sum."""
    yield _sd_feel(nodes)
    yield _compressed(nodes)
    yield _secure_sum(nodes)


def _strategy(nodes: CheckedNodes, steps: int) -> SDFeel:
    from hedgerow.strategies import SDFeel

    return SDFeel(
        num_servers=nodes.least, topology="complete", tau1=steps, tau2=1, max_repeats=0,
        min_train_nodes=nodes.least, **nodes.options,
    )  # fmt: skip


def _sd_feel(nodes: CheckedNodes) -> Verdict:
    name = "SDFeel, HierFAvg, Feel, FedAvg"

    honours, few, more = nodes.honours(partial(_strategy, nodes), _FEW, _MORE)
    take = "for step in range(config['local-steps']):  # in the ClientApp's train, one mini-batch step each"
    tell = "metrics['num-steps'] = steps  # how many mini-batch steps the ClientApp's train took"
    wrong = "num-steps is not local-steps"
    if wrong in few.rejected or wrong in more.rejected:
        return Verdict(name, "no", "num-steps of the replies differ from config['local-steps']", take)
    if not (few.served and more.served):
        bad = more if few.served else few
        return Verdict(
            name, "no", bad.reason, _mend_train(bad, "app = sd_feel_client()  # from hedgerow.clients")
        )
    reports = all("num-steps" in _metrics(reply) for reply in few.of("train"))
    if honours is False:
        reports_too = ", although they report num-steps" if reports else ""
        return Verdict(
            name, "no", f"nodes train the same model for {_FEW} and {_MORE} local-steps{reports_too}", take
        )
    if honours is None:
        lacks = "equal instructions give different models, or training changes nothing: local-steps is unseen"
        return Verdict(name, "unknown", lacks, "" if reports else tell)
    if not reports:
        lacks = "replies lack num-steps: iterations and simulated seconds are unknown"
        return Verdict(name, "partly", lacks, tell)
    return Verdict(name, "yes")


def _metrics(reply: Message) -> Any:
    return next(iter(reply.content.metric_records.values()), {}) if reply.has_content() else {}


def _mend_train(outcome: CheckedRounds, client: str) -> str:
    """Return the remedy for a failing train: a handler, the config that it lacks, or a reply."""
    if _NO_HANDLER in outcome.reason:
        return client
    if any(reply.has_error() for reply in outcome.of("train")):
        return "start(train_config=ConfigRecord({...}))  # what the ClientApp reads from its messages"
    return (
        "return Message(RecordDict({'arrays': ArrayRecord(model.state_dict()), "
        "'metrics': MetricRecord({'num-examples': n})}), reply_to=message)"
    )


def _compressed(nodes: CheckedNodes) -> Verdict:
    from hedgerow.strategies import Compressed

    # Its messages have everything that those of a strategy on plain models have.
    wrapped = _strategy(nodes, _FEW)
    mend = "app = ClientApp(mods=[compress_reply])  # from hedgerow.clients; before mods that see arrays"
    return nodes.run(Compressed(wrapped, "topk(0.5)")).verdict("Compressed", mend)


def _secure_sum(nodes: CheckedNodes) -> Verdict:
    from hedgerow.strategies import SDFeel, SecureSum

    name, least = "secure_sum=True", SecureSum().min_nodes
    if nodes.plan.num_nodes < least:
        return Verdict(name, "unknown", f"a sum needs {least} nodes", f"hedgerow check APP --nodes {least}")
    strategy = SDFeel(
        num_servers=1, topology="complete", tau1=_FEW, tau2=1, max_repeats=0, secure_sum=True,
        min_train_nodes=least, **{**nodes.options, "min_available_nodes": least},
    )  # fmt: skip
    mend = "app = sd_feel_client(train=...)  # from hedgerow.clients: it masks what your loop has learnt"
    return nodes.run(strategy).verdict(name, mend)


def network(run: RecordedRun) -> DrawnNetwork | None:
    """Return the edge servers' graph, with their clients if these are assigned in order."""
    from hedgerow.sim import DrawnNetwork
    from hedgerow.sim.runs.diagram import MOST_DRAWN
    from hedgerow.strategies.edges import contiguous_clusters
    from hedgerow.strategies.topology import graph

    said, links = run.settings, run.rounds[-1].get("by_link") or {}
    topology, servers, clients = (said.get(key) for key in ("topology", "num-servers", "num-clients"))
    if not isinstance(topology, str) or type(clients) is not int or run.seed < 0:
        return None
    if "edge->edge" not in links or type(servers) is not int or not 1 <= servers <= MOST_DRAWN:
        return None
    try:
        edges = sorted(graph(topology, servers, run.seed).edges)
    except ValueError:
        # No such graph exists for this number of servers, so this is not a run of SD-FEEL.
        return None
    hanging: list[int] = []
    # Records do not have the nodes' groups.
    if said.get("clusters") == "contiguous" and servers <= clients <= 1_000_000:
        members = Counter(contiguous_clusters(clients, servers))
        hanging = [members[server] for server in range(servers)]
    return DrawnNetwork("edge", servers, edges, "client", hanging)


HOOKS = Hooks(plan=plan, check=check, network=network)
