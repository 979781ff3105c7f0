"""A fifth of the nodes collude in whole apps on real images: the mean fails, and the right rule holds."""

from dataclasses import replace

import pytest
from benchmarks.poison import APPS, NO_ATTACK, Job, accuracy, liars_of, with_numbers

ROUNDS = 5


@pytest.mark.parametrize("app", APPS)
def test_a_fifth_of_colluding_nodes_ruins_the_mean_and_not_the_right_rule(app: str) -> None:
    job = Job(app, "iid", "sign-flip", "mean", 0.2, 0)
    honest = accuracy(replace(job, attack=NO_ATTACK), rounds=ROUNDS)
    rule = with_numbers("multi-krum", APPS[app].group, 0.0)
    assert honest > 0.6
    assert accuracy(job, rounds=ROUNDS) < 0.3
    assert accuracy(replace(job, rule=rule), rounds=ROUNDS) > honest - 0.03


def test_liars_are_as_many_as_asked_and_spread_over_both_clusters() -> None:
    for share, count in ((0.1, 2), (0.2, 4), (0.3, 6)):
        liars = liars_of(share)
        assert len(set(liars)) == count
        assert sum(i < 10 for i in liars) == count / 2
