"""The algorithm without any network, against the paper's plain loop."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from flwr.app import RecordDict
from tests.oracles.hsgd import pairs
from tests.oracles.hsgd import run as oracle
from tests.oracles.test_hsgd_oracle import flat, shrinking
from tests.strategies.hsgd.nodes import Parties, record_of
from tests.strategies.hsgd.test_strategy import LAYOUTS, chosen, hsgd, network_parties

from hedgerow.strategies import HSGD, Columns, Exchange, Node, Run
from hedgerow.strategies.hsgd.groups import Group

States = dict[int, RecordDict]


def grouped(parties: Parties) -> list[Group]:
    """Return the groups that the parties make up."""
    found = []
    for m in range(len(parties.groups)):
        devices = [i for i, (role, of, _) in enumerate(parties.parties) if of == m and role != "hospital"]
        hosts = {person: i for i in devices for person in parties.names(i)}
        found.append(Group(m, m, tuple(parties.names(m)), hosts, parties.edges))
    return found


def replies(exchange: Exchange, run: Run, parties: Parties, states: States) -> Columns:
    """Return what the parties answer, as the strategy reads it."""
    work = parties.exchange if exchange.kind == "train.exchange" else parties.update
    nodes = list(exchange.asked)
    answers = [work(i, run.instruction(exchange, i), states.setdefault(i, RecordDict())) for i in nodes]
    assert exchange.reads is not None
    rows = [exchange.reads(Node(i, i), told).vector for i, told in zip(nodes, answers, strict=True)]
    return Columns(nodes, [exchange.asked[i].pool for i in nodes], rows, [1.0] * len(nodes), [])


def rounds(method: HSGD, parties: Parties, start: Any, count: int) -> np.ndarray:
    """Return the model after some rounds, each of which is made twice and ends in the same state."""
    arrays = record_of(start)
    method.state = method.begin(method.federation.vector(arrays))
    method.members.groups, method.members.encodings = grouped(parties), parties.lengths
    states: States = {}
    for number in range(1, count + 1):
        ends = []
        for kept in (deepcopy(states), states):
            run = Run(method.federation, number, {}, range(len(parties.parties)), ())
            steps, told = method.round(method.state, run), None
            while True:
                try:
                    made = steps.send(told)
                except StopIteration as end:
                    ends.append(end.value)
                    break
                told = tuple(iter([replies(one, run, parties, kept)]) for one in made.exchanges)
        assert method.model(ends[0]).tobytes() == method.model(ends[1]).tobytes()
        method.state = ends[1]
    return method.model(method.state)


@LAYOUTS
@pytest.mark.parametrize(("name", "P", "Q"), [("hsgd", 4, 2), ("hsgd", 2, 2), ("hsgd", 1, 1), ("jfl", 4, 2)])
def test_rounds_are_the_papers_loop(name: str, P: int, Q: int, edges: bool) -> None:
    parties, start = network_parties(2, edges=edges)
    method = hsgd(parties, P, Q, method=name, learning_rate=0.5, halving_period=4, participation=0.5, seed=3)
    choose = chosen(parties, 0.5, 3)
    if name == "jfl":
        plain = oracle(parties.model, start, pairs(parties.groups, choose), P=P, Q=Q, T=3 * P, eta=shrinking)
    else:
        plain = oracle(parties.model, start, parties.groups, P=P, Q=Q, T=3 * P, eta=shrinking, choose=choose)
    assert rounds(method, parties, start, 3) == pytest.approx(flat(plain.final), abs=1e-12)
