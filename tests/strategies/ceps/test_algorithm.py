"""The algorithm without a network, against the paper's plain loop."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import networkx as nx
import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from tests.oracles.ceps import Select, Setting, keep_largest, trajectory

from hedgerow.strategies import CEPS, Columns, Exchange, Federation, Node, Reply, Roster, Run
from hedgerow.wire import HELLO, PUBLISH, UPDATE, Layout, Ledger

M, N, S, MU, C, K = 6, 8, 3, 0.1, 1.6, 14
KAPPA = [2, 3, 2, 4, 3, 5]
GRAPH = nx.cycle_graph(M)
TARGETS = np.random.default_rng(0).standard_normal((M, N))
ROSTER = Roster([Node(i, 100 + i) for i in range(M)], introduced=True)


def drawn(i: int, k: int) -> list[int]:
    return [(i + (1 if k % 2 else -1)) % M]


def first(i: int, k: int) -> list[int]:
    """Return who replies first of the two neighbours."""
    return [min(GRAPH[i])]


SETTING = Setting(
    gradients=[lambda w, t=t: w - t for t in TARGETS],
    n=N, s=S, mu=MU, kappa=KAPPA, sigma=[C] * M, neighbours=[sorted(GRAPH[i]) for i in range(M)],
    select=drawn, fixed_c=True,
)  # fmt: skip


class Nodes:
    """Equations (3) and (4) at each node, local steps when it is next asked for anything."""

    def __init__(self, select: Select) -> None:
        self.select = select
        self.k, self.w = [0] * M, np.zeros((M, N))
        self.u = [-gradient(np.zeros(N)) for gradient in SETTING.gradients]

    def advance(self, i: int, k: int) -> None:
        for _ in range(k - self.k[i]):
            self.w[i] = keep_largest((self.u[i] + MU * self.w[i]) / (C + MU), S)  # (4)
        self.k[i] = k

    def answer(self, kind: str, i: int, told: dict[str, Any], records: dict[str, Any]) -> RecordDict:
        if kind == HELLO:
            assert told["neighbours"] == sorted(GRAPH[i])
            return RecordDict({"hello": following(i, KAPPA[i], kappa=KAPPA[i])})
        k = told["iteration"]
        self.advance(i, k)
        if kind == PUBLISH:
            return RecordDict({"payload": ConfigRecord({"bytes": self.w[i].tobytes()})})
        assert kind == UPDATE
        heard = {int(j): np.frombuffer(payload) for j, payload in records["bundle"].items()}
        assert sorted(heard) == self.select(i, k)
        z = {**heard, i: self.w[i]}
        mean = sum((z[j] for j in sorted(z)), np.zeros(N)) / len(z)
        self.u[i] = C * mean - SETTING.gradients[i](mean)
        self.w[i], self.k[i] = keep_largest(self.u[i] / C, S), k + 1  # (3)
        metrics = MetricRecord({"num-examples": 1})
        return RecordDict({"next": following(i, k + KAPPA[i]), "metrics": metrics})


def following(i: int, k: int, **more: int) -> ConfigRecord:
    return ConfigRecord({"next": k, "want": drawn(i, k), **more})


def replies(exchange: Exchange, nodes: Nodes) -> Iterator[Columns]:
    assert exchange.reads is not None
    for i, ask in exchange.asked.items():
        told = {**exchange.config, **ask.config}
        content = nodes.answer(exchange.kind, i, told, dict(ask.records))
        node = ROSTER.nodes[i]
        row = exchange.reads(node, content)
        yield Columns([i], [ask.pool], [row], [1.0], [Reply(node, content, row)])


def after(method: CEPS, state: Any, run: Run, nodes: Nodes) -> Any:
    steps, came = method.round(state, run), None
    while True:
        try:
            exchange = steps.send(came)  # type: ignore[arg-type]
        except StopIteration as end:
            return end.value
        assert isinstance(exchange, Exchange)
        came = replies(exchange, nodes)


@pytest.mark.parametrize(("stragglers", "select"), [(False, drawn), (True, first)])
def test_rounds_without_a_network_are_the_papers_loop(stragglers: bool, select: Select) -> None:
    """Each is made twice, and ends in the same state."""
    method = CEPS(
        dim=N, sparsity=S, codec="dense64", topology=GRAPH, interval=(2, 5), mu=MU, sigma_rule="fixed_c", c=C,
        num_iterations=K, min_available_nodes=M, max_repeats=K, stragglers=stragglers,
    )  # fmt: skip
    method.federation.layout = Layout((), (), ())
    history: Sequence[Any] = trajectory(SETTING._replace(select=select), K)
    state, nodes, events = method.begin(np.empty(0)), Nodes(select), []
    for number in range(1, K + 1):
        run = Run(Federation.of(ROSTER, Ledger(), 1.0), number, {}, range(M), ())
        again = after(method, state, run, deepcopy(nodes))
        state = after(method, state, run, nodes)
        assert state == again
        if state.iterations in events:  # Nothing is left to do.
            break
        events.append(state.iterations)
        for i in range(M):
            if nodes.k[i] == state.iterations:
                assert np.array_equal(nodes.w[i], history[state.iterations][i])
    assert events == sorted({k + 1 for kappa in KAPPA for k in range(kappa, K, kappa)})
