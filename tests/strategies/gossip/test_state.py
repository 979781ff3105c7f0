"""What nodes spent is a mean of all nodes, whoever is in an event, and outlives a checkpoint."""

import json

from flwr.app import MetricRecord

from hedgerow.strategies.gossip.state import Appointment, Communicated, State


def after(state: State, k: int, told: dict[int, dict[str, float]]) -> State:
    replies = {i: Communicated(k + 2, [], MetricRecord({**metrics})) for i, metrics in told.items()}
    return state.after(k, replies, [], {}, 0)


def begun(nodes: int) -> State:
    return State().introduced({i: Appointment(i, 2, 2, []) for i in range(nodes)})


def test_who_is_not_in_an_event_counts_with_what_it_said_last() -> None:
    state = after(begun(4), 2, {i: {"gradients": 2} for i in range(4)})
    state = State.from_dict(json.loads(json.dumps(state.state_dict())))
    state = after(state, 4, {1: {"gradients": 6}})
    assert state.counts(4) == {"gradients": 3.0, "communications": 1.25, "missed": 3, "restarted": 0}


def test_a_node_that_says_nothing_valid_adds_no_gradients() -> None:
    state = after(after(begun(2), 2, {0: {}}), 4, {1: {"gradients": -3}})
    assert state.counts(2) == {"gradients": 0.0, "communications": 1.0, "missed": 2, "restarted": 0}


def test_one_node_that_is_alone_in_an_event_cannot_report_a_disagreement_for_all() -> None:
    state = after(begun(4), 2, {0: {"disagreement": 1e9}})
    assert state.disagreement == 0.0
    state = after(state, 4, {1: {"disagreement": 1.0}, 2: {"disagreement": 2.0}})
    state = State.from_dict(json.loads(json.dumps(state.state_dict())))
    assert after(state, 6, {0: {"disagreement": 1e9}}).disagreement == 2.0


def test_most_nodes_reports_are_the_runs_disagreement() -> None:
    assert after(begun(4), 2, {i: {"disagreement": 1e9} for i in range(3)}).disagreement == 1e9
    assert after(begun(2), 2, {i: {"disagreement": 1e9} for i in range(2)}).disagreement == 1e9
