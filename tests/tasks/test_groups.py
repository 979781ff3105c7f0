import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hedgerow.tasks import group_split, match_ids

ESR_LABELS = np.repeat(np.arange(5), 1840)

schemes = st.sampled_from(["iid", "pairs(6, 2)", "pairs(4, 0)", "rates(1)", "rates(0.1)", "rates(100)"])


@settings(deadline=None, max_examples=60)
@given(
    scheme=schemes,
    labels=st.lists(st.integers(0, 4), min_size=40, max_size=90).filter(lambda labels: len(set(labels)) > 1),
    num_groups=st.integers(1, 5),
    seed=st.integers(0, 100),
)
def test_groups_are_disjoint_equally_large_and_cover_what_they_may(scheme, labels, num_groups, seed):
    split = group_split(scheme, np.array(labels), num_groups, seed)
    size = {"pairs(6, 2)": 8, "pairs(4, 0)": 4}.get(scheme, len(labels) // num_groups)
    dealt = np.concatenate(split)
    assert [len(group) for group in split] == [size] * num_groups
    assert np.unique(dealt).size == dealt.size
    assert dealt.min() >= 0
    assert dealt.max() < len(labels)


@pytest.mark.parametrize("scheme", ["iid", "pairs(700, 220)", "rates(1)"])
def test_the_same_seed_gives_the_same_groups(scheme):
    one, two, other = (group_split(scheme, ESR_LABELS, 10, seed) for seed in (3, 3, 4))
    assert all(map(np.array_equal, one, two))
    assert not all(map(np.array_equal, one, other))


def test_the_paper_s_esr_groups_use_every_pair_of_classes_and_every_sample():
    split = group_split("pairs(700, 220)", ESR_LABELS, 10, 0)
    counts = np.array([np.bincount(ESR_LABELS[group], minlength=5) for group in split])
    assert np.unique(np.concatenate(split)).size == 9200
    assert np.array_equal(np.sort(counts, axis=1), [[73, 73, 74, 350, 350]] * 10)
    assert len({tuple(np.flatnonzero(row == 350)) for row in counts}) == 10
    assert [len(group) for group in split] == [920] * 10


def test_two_labels_dominate_a_group_and_a_minority_is_spread_over_the_others():
    totals = [1956, 1390, 1357, 1474, 3963, 3817, 6164, 3919, 3929, 3031, 3581]
    labels = np.repeat(np.arange(11), totals)
    split = group_split("pairs(3000, 458)", labels, 10, 0)
    assert [len(group) for group in split] == [3458] * 10
    assert all(np.sort(np.bincount(labels[group]))[-2:].sum() >= 3000 for group in split)
    labels = np.repeat(np.arange(10), 400)
    for group in group_split("pairs(200, 80)", labels, 10, 0):
        minor = np.sort(np.bincount(labels[group], minlength=10))[:-2]
        assert minor.max() - minor.min() <= 20


def test_every_group_has_both_labels_and_a_small_concentration_skews_the_rates():
    few, many = np.repeat([0, 1], [1270, 198]), np.repeat([0, 1], [8000, 2000])
    for concentration in (0.01, 1, 100):
        split = group_split(f"rates({concentration})", few, 10, 0)
        assert all(np.unique(few[group]).size == 2 for group in split)
    skewed, even = (
        np.std([many[group].mean() for group in group_split(f"rates({c})", many, 10, 0)]) for c in (1, 10_000)
    )
    assert skewed > 0.1
    assert even < 0.02


@settings(deadline=None, max_examples=30)
@given(held=st.lists(st.text("abc-1", min_size=1), min_size=1, unique=True), data=st.data())
def test_rows_of_two_parties_meet_by_sample_id(held, data):
    wanted = data.draw(st.lists(st.sampled_from(held)))
    assert [held[place] for place in match_ids(wanted, held)] == wanted
    with pytest.raises(ValueError, match="wanted must be among the 2 ids held, got 'x' and 1 more"):
        match_ids(["a", "x", "y"], ["a", "b"])
    with pytest.raises(ValueError, match="held must have each id once, got 1 twice"):
        match_ids(["a"], ["a", "a"])


# Sites, and people of several samples

SITES = np.repeat(["north", "south", "west"], [60, 30, 12])
PEOPLE = np.array([f"{site}-{number // 3}" for number, site in enumerate(SITES)])


@pytest.mark.parametrize("people", [None, PEOPLE])
def test_a_group_is_of_one_site_and_each_site_has_groups_by_its_people(people):
    split = group_split("sites", np.zeros(102, int), 7, 0, people=people, sites=SITES)
    of_groups = [set(SITES[group].tolist()) for group in split]
    assert all(len(sites) == 1 for sites in of_groups)
    assert [next(iter(sites)) for sites in of_groups] == ["north"] * 4 + ["south"] * 2 + ["west"]
    dealt = np.concatenate(split)
    assert np.unique(dealt).size == dealt.size


@pytest.mark.parametrize("scheme", ["iid", "sites"])
def test_all_samples_of_a_person_are_in_one_group_and_groups_have_equally_many_people(scheme):
    people = np.array([f"{site}-{number % 9}" for number, site in enumerate(SITES)])
    split = group_split(scheme, np.zeros(102, int), 4, 1, people=people, sites=SITES)
    homes = [set(people[group].tolist()) for group in split]
    assert sum(map(len, homes)) == len(set.union(*homes))
    dealt = np.concatenate(split)
    assert all((people == person).sum() == (people[dealt] == person).sum() for person in set(people[dealt]))
    split = group_split("iid", np.zeros(102, int), 5, 1, people=PEOPLE)
    assert [len(set(PEOPLE[group].tolist())) for group in split] == [34 // 5] * 5


@pytest.mark.parametrize(
    ("options", "num_groups", "message"),
    [
        ({}, 4, "partition must not be 'sites' with data that do not tell"),
        (
            {"sites": SITES},
            2,
            "num-groups must be at least 3, the number of sites, with partition = 'sites', got 2",
        ),
        ({"sites": SITES[:-1]}, 4, r"sites must have the shape \(102,\).*got \(101,\)"),
        ({"sites": SITES, "people": np.full(102, "one")}, 4, "one site each, got someone from two"),
        ({"sites": SITES, "people": PEOPLE}, 40, "num-groups must be at most .*, the number of people, got "),
    ],
)
def test_sites_that_do_not_fit_are_named(options, num_groups, message):
    with pytest.raises(ValueError, match=message):
        group_split("sites", np.zeros(102, int), num_groups, 0, **options)
