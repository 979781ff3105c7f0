"""The ledger adds up what is booked, and keeps the hub's legs apart from the modelled links."""

import json
from itertools import takewhile

from hypothesis import given, settings
from hypothesis import strategies as st

from hedgerow.wire import HUB_TO_NODE, NODE_TO_HUB, Ledger, Traffic, Transfer

LINKS = ("client->edge", "edge->edge", NODE_TO_HUB)
TRANSFERS = st.lists(
    st.builds(
        Transfer,
        round=st.integers(1, 5),
        link=st.sampled_from(LINKS),
        src=st.integers(0, 9),
        dst=st.integers(0, 9),
        nominal_bits=st.integers(0, 10**15),
        payload_bytes=st.integers(0, 10**15),
    )
)


def book(ledger: Ledger, *transfers: Transfer) -> Ledger:
    for t in transfers:
        ledger.book(t.round, t.link, t.src, t.dst, t.nominal_bits, t.payload_bytes)
    return ledger


@settings(deadline=None)
@given(TRANSFERS, TRANSFERS)
def test_totals_are_the_sums_of_the_transfers_and_a_resumed_ledger_ends_as_one_that_never_stopped(
    before: list[Transfer], after: list[Transfer]
) -> None:
    transfers = before + after
    ledger, stopped, resumed = book(Ledger(), *transfers), book(Ledger(), *before), Ledger()
    last = takewhile(lambda t: t.round == transfers[-1].round, reversed(transfers))
    assert ledger.transfers == [*last][::-1]
    for link in LINKS:
        here = [t for t in transfers if t.link == link]
        bits, size = (sum(getattr(t, name) for t in here) for name in ("nominal_bits", "payload_bytes"))
        assert ledger.total(link) == Traffic(len(here), bits, size)
    assert ledger.total() == ledger.total("client->edge") + ledger.total("edge->edge")
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert book(resumed, *after).by_link() == ledger.by_link()


def test_both_legs_through_the_hub_are_outside_the_total_but_booked() -> None:
    ledger = book(Ledger(), Transfer(1, HUB_TO_NODE, 0, 3, 32, 100), Transfer(1, NODE_TO_HUB, 3, 0, 32, 110))
    assert ledger.total() == Traffic()
    assert ledger.total(HUB_TO_NODE) == Traffic(1, 32, 100)
    assert ledger.total(NODE_TO_HUB) == Traffic(1, 32, 110)


def test_links_are_listed_alphabetically_and_transfers_of_the_round_at_hand_alone() -> None:
    ledger = book(Ledger(), *(Transfer(1, link, 0, 0, 1, 1) for link in ("z->a", "a->z", "m->m")))
    assert list(ledger.by_link()) == ["a->z", "m->m", "z->a"]
    first, second = Transfer(1, "a->b", 0, 1, 8, 1), Transfer(2, "a->b", 1, 0, 8, 1)
    assert book(ledger, first, first, second).transfers == [second]
    # A loaded state replaces what was booked.
    ledger.load_state_dict({"b->c": [2, 16, 4]})
    assert ledger.by_link() == {"b->c": Traffic(2, 16, 4)}
    assert ledger.transfers == []
