"""The ledger adds up what is booked, and keeps the hub's legs apart from the modelled links."""

import json

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


def test_a_new_ledger_is_empty() -> None:
    assert Ledger().total() == Traffic(0, 0, 0)
    assert Ledger().by_link() == {}


def test_a_link_without_transfers_has_no_traffic() -> None:
    assert Ledger().total("client->edge") == Traffic()


@settings(deadline=None)
@given(TRANSFERS)
def test_totals_are_the_sums_of_the_transfers(transfers: list[Transfer]) -> None:
    ledger = book(Ledger(), *transfers)
    for link in LINKS:
        here = [t for t in transfers if t.link == link]
        assert ledger.total(link) == Traffic(
            len(here), sum(t.nominal_bits for t in here), sum(t.payload_bytes for t in here)
        )


@settings(deadline=None)
@given(TRANSFERS)
def test_the_total_is_that_of_the_modelled_links_alone(transfers: list[Transfer]) -> None:
    ledger = book(Ledger(), *transfers)
    assert ledger.total() == ledger.total("client->edge") + ledger.total("edge->edge")


def test_both_legs_through_the_hub_are_outside_the_total_but_booked() -> None:
    ledger = book(Ledger(), Transfer(1, HUB_TO_NODE, 0, 3, 32, 100), Transfer(1, NODE_TO_HUB, 3, 0, 32, 110))
    assert ledger.total() == Traffic()
    assert ledger.total(HUB_TO_NODE) == Traffic(1, 32, 100)
    assert ledger.total(NODE_TO_HUB) == Traffic(1, 32, 110)


def test_links_are_listed_alphabetically_whatever_was_booked_first() -> None:
    ledger = book(Ledger(), *(Transfer(1, link, 0, 0, 1, 1) for link in ("z->a", "a->z", "m->m")))
    assert list(ledger.by_link()) == ["a->z", "m->m", "z->a"]


def test_only_the_transfers_of_the_round_at_hand_are_kept() -> None:
    first, second = Transfer(1, "a->b", 0, 1, 8, 1), Transfer(2, "a->b", 1, 0, 8, 1)
    assert book(Ledger(), first, first, second).transfers == [second]


@settings(deadline=None)
@given(TRANSFERS)
def test_keep_all_keeps_all_in_order(transfers: list[Transfer]) -> None:
    assert book(Ledger(keep_all=True), *transfers).transfers == transfers


@settings(deadline=None)
@given(TRANSFERS, TRANSFERS)
def test_a_resumed_ledger_ends_as_one_that_never_stopped(
    before: list[Transfer], after: list[Transfer]
) -> None:
    stopped = book(Ledger(), *before)
    resumed = Ledger()
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert book(resumed, *after).by_link() == book(Ledger(), *before, *after).by_link()


def test_a_loaded_state_replaces_what_was_booked() -> None:
    ledger = book(Ledger(), Transfer(1, "a->b", 0, 1, 8, 1))
    ledger.load_state_dict({"b->c": [2, 16, 4]})
    assert ledger.by_link() == {"b->c": Traffic(2, 16, 4)}
    assert ledger.transfers == []
