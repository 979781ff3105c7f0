"""Who is matched with whom by hashes, and what a server does with parties that lie."""

from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict

from hedgerow.strategies.hsgd.membership import Introduction, form_of, introduction, match
from hedgerow.strategies.hsgd.own_data import BINS, Scores, score_metrics
from hedgerow.wire import PayloadError


def ids(*numbers: int) -> tuple[str, ...]:
    return tuple(f"{n:032x}" for n in numbers)


def one(role: str, *people: int, group: int = 0, shape: int = 2, **more: Any) -> Introduction:
    classes = ("no", "yes") if role == "hospital" else ()
    return Introduction(role, group, ids(*people), (shape,), **{"classes": classes, **more})


def matched(*parties: Introduction, **options: Any) -> Any:
    told = dict(enumerate(parties))
    form = form_of(told)
    assert form is not None
    return match(told, form, **options)


def test_people_of_both_sides_are_in_the_order_of_hashes() -> None:
    found = matched(one("hospital", 5, 3, 9), one("edge", 9, 5, 4))
    assert found.groups[0].ids == ids(5, 9)
    assert found.groups[0].node_of == dict.fromkeys(ids(5, 9), 1)
    assert +found.counts == {"matched": 2, "unmatched-hospital": 1, "unmatched-device": 1}


def test_of_two_hospitals_the_one_with_more_matches_counts() -> None:
    found = matched(one("hospital", 70, 71, 72), one("hospital", 5, 3), one("device", 5), one("device", 3))
    assert found.groups[0].hospital == 1
    assert found.counts["left-out-second-hospital"] == 1


def test_a_device_that_claims_anothers_person_is_left_out() -> None:
    found = matched(one("hospital", 5, 3), one("device", 5), one("device", 5), one("device", 3))
    assert found.groups[0].node_of == {ids(5)[0]: 1, ids(3)[0]: 3}
    assert found.counts["left-out-second-device"] == 1


def test_a_side_with_other_columns_than_most_is_left_out() -> None:
    found = matched(
        *(one("hospital", 5, group=m, features=("a", "b")) for m in range(2)),
        one("hospital", 5, group=2, features=("a", "c")),
        *(one("edge", 5, group=m) for m in range(3)),
    )
    assert [group.number for group in found.groups] == [0, 1]
    assert found.counts["left-out-other-form"] == 1
    assert found.counts["left-out-no-hospital"] == 1


def test_columns_in_another_order_are_the_same_form() -> None:
    parties = {0: one("hospital", 5, features=("a", "b")), 1: one("edge", 5)}
    parties[2] = one("hospital", 5, group=1, features=("b", "a"))
    form = form_of(parties)
    assert form is not None
    assert form.hospital_features == ("a", "b")
    assert form.fits(parties[2])


def test_classes_are_sorted_as_numbers_where_they_are() -> None:
    for told, expected in (
        (("10", "9"), ("9", "10")),
        (("b", "a"), ("a", "b")),
        (("10", "x"), ("10", "x")),
    ):
        form = form_of({0: one("hospital", 5, classes=told), 1: one("edge", 5)})
        assert form is not None
        assert form.classes == expected


def test_who_is_held_out_stays_so_when_others_join() -> None:
    few, many = range(1, 200), range(1, 400)
    before, after = (
        matched(one("hospital", *people), one("edge", *people), holdout=0.3, seed=4) for people in (few, many)
    )
    held = set(before.held_out[0].ids)
    assert held == set(after.held_out[0].ids) & set(ids(*few))
    assert 0.2 < len(held) / len(few) < 0.4
    assert not held & set(before.groups[0].ids)


def test_who_comes_later_takes_nobodys_place() -> None:
    before = {1: one("hospital", 5, 3), 2: one("device", 5), 3: one("device", 3)}
    form = form_of(before)
    assert form is not None
    standing = match(before, form).standing
    # A hospital with as many matches, a host of a person that another has, and a gateway for all.
    later = {**before, 0: one("hospital", 5, 3), -1: one("device", 5), 4: one("edge", 5, 3)}
    assert match(later, form).groups[0].hosted
    found = match(later, form, standing=standing)
    assert found.standing == standing
    refused = {key: found.counts[key] for key in ("left-out-second-hospital", "left-out-second-device")}
    assert refused == {"left-out-second-hospital": 1, "left-out-second-device": 1}
    assert found.counts["left-out-beside-devices"] == 1
    # Whose owner is away gives its place up.
    del later[1], later[2]
    found = match(later, form, standing=standing)
    assert (found.groups[0].hospital, found.groups[0].node_of) == (0, {ids(5)[0]: -1, ids(3)[0]: 3})


def test_an_edge_that_is_there_keeps_its_devices() -> None:
    before = {1: one("hospital", 5, 3), 2: one("edge", 5, 3)}
    form = form_of(before)
    assert form is not None
    found = match({**before, 0: one("edge", 3, 5, 7)}, form, standing=match(before, form).standing)
    assert set(found.groups[0].node_of.values()) == {2}


BAD: dict[str, Any] = {
    "role": "cloud",
    "group": -1,
    "ids": ["patient-1"],
    "shape": [2**20, 2**20],
    "features": ["one"],
    "classes": [1],
}


@pytest.mark.parametrize("key", BAD)
def test_a_bad_introduction_is_refused(key: str) -> None:
    good: dict[str, Any] = {
        "role": "hospital",
        "group": 0,
        "ids": list(ids(1)),
        "shape": [2],
        "labelled": True,
    }
    good |= {"features": ["a", "b"], "classes": ["0"]}
    assert introduction(RecordDict({"pair": ConfigRecord(good)}), own=True).ids == ids(1)
    for told in ({**good, key: BAD[key]}, {**good, "ids": [*ids(1), *ids(1)]}):
        with pytest.raises(PayloadError):
            introduction(RecordDict({"pair": ConfigRecord(told)}), own=True)


# Metrics of histograms, against scikit-learn's of the scores themselves


def told(p: np.ndarray, y: np.ndarray) -> Scores:
    places = np.minimum((p * BINS).astype(int), BINS - 1)
    scores = np.stack([np.bincount(places[y == c], minlength=BINS) for c in (0, 1)])[None].astype(float)
    sure = np.maximum(p, 1 - p)
    bins = np.minimum((sure * 15).astype(int), 14)
    right = ((p > 0.5) == y).astype(float)
    calibration = np.stack([np.bincount(bins, w, 15) for w in (np.ones(len(p)), right, sure)])
    return Scores(len(p), 0.5, float(right.mean()), scores, calibration)


def test_metrics_pooled_over_hospitals_are_those_of_all_scores() -> None:
    from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

    rng = np.random.default_rng(0)
    p = (rng.integers(0, BINS, 400) + 0.5) / BINS  # so that bins lose nothing
    y = (rng.random(400) < p).astype(int)
    parts = {m: told(p[m::3], y[m::3]) for m in range(3)}
    metrics = score_metrics(parts, 0.9)
    fpr, tpr, _ = roc_curve(y, p)
    assert metrics["auc"] == pytest.approx(roc_auc_score(y, p), abs=1e-12)
    assert metrics["auprc"] == pytest.approx(average_precision_score(y, p), abs=1e-12)
    assert metrics["sensitivity"] == pytest.approx(tpr[fpr <= 0.1 + 1e-12].max(), abs=1e-12)
    assert metrics["ece"] < 0.1
    assert metrics["evaluated"] == 400
    assert metrics["worst-accuracy"] == min(one.accuracy for one in parts.values())


def test_calibration_error_is_the_gap_between_confidence_and_truth() -> None:
    p, y = np.full(100, 0.9), np.zeros(100, int)
    y[:60] = 1
    assert score_metrics({0: told(p, y)}, 0.9)["ece"] == pytest.approx(0.3)


def test_metrics_that_nobody_defines_are_left_out() -> None:
    assert "auc" not in score_metrics({0: told(np.full(3, 0.2), np.zeros(3, int))}, 0.9)
    assert score_metrics({}, 0.9) == {}
