"""Who communicates when: a state is never changed, and a checkpoint holds all of it."""

import json
from copy import deepcopy

from flwr.app import Error
from hypothesis import given
from hypothesis import strategies as st

from hedgerow.strategies.gossip.state import Appointment, State
from hedgerow.strategies.inbox import RAISED

START = State().introduced({i: Appointment(10 + i, 2 + i % 2, 2 + i % 2, [1 - i]) for i in range(2)})


@given(kappa=st.integers(1, 9), first=st.integers(0, 30), k=st.integers(-1, 60))
def test_what_was_missed_is_skipped_up_to_the_next_communication(kappa: int, first: int, k: int) -> None:
    after = Appointment(7, kappa, first, [3]).past(k)
    assert after.next == next(at for at in range(first, 200, kappa) if at > k)
    assert (after.kappa, after.want) == (kappa, [3])


def test_an_event_makes_another_state_and_leaves_the_one_before() -> None:
    before = deepcopy(START)
    after = START.after(2, {0: (4, [1])}, deprived=[], errors={}, lost=0)
    assert before == START
    assert (after.iterations, after.next_event, after.missed) == (3, 3, 0)
    assert after.communicated == {0}


def test_who_is_due_and_silent_or_got_no_payload_has_missed_the_event_once() -> None:
    assert START.after(2, {}, deprived=[0], errors={}, lost=1).missed == 1
    assert START.after(2, {0: (4, [])}, deprived=[0], errors={}, lost=0).missed == 1


def test_a_node_that_raised_is_asked_anew_and_began_anew_if_it_is_at_its_first_communication() -> None:
    later = START.after(2, {0: (4, [1])}, deprived=[], errors={}, lost=0)
    raised = later.after(4, {}, deprived=[], errors={0: Error(RAISED, "no")}, lost=1)
    assert raised.refusing == {0}
    anew = raised.introduced({0: Appointment(10, 2, 2, [1])})
    assert (anew.refusing, anew.communicated, anew.restarted) == (frozenset(), frozenset(), 1)
    assert anew.appointments[0].next == 6
    known = raised.introduced({0: Appointment(10, 2, 6, [1])})
    assert (known.communicated, known.restarted) == ({0}, 0)


def test_a_checkpoint_holds_all_of_a_state() -> None:
    state = START.after(3, {1: (6, [0])}, deprived=[0], errors={0: Error(RAISED, "no")}, lost=2)
    assert State.from_dict(json.loads(json.dumps(state.state_dict()))) == state
