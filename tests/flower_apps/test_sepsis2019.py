import warnings
from pathlib import Path

import numpy as np
import pytest

from hedgerow.tasks import load_vertical
from hsgd import sepsis2019
from hsgd.medical import SETS, Table
from hsgd.sepsis2019 import payoffs, read_sepsis2019, read_sepsis2019_windows

SEPSIS_COLUMNS = [
    *("HR", "O2Sat", "Temp", "SBP", "MAP", "DBP", "Resp", "EtCO2"),
    *(f"lab{number}" for number in range(26)),
    *("Age", "Gender", "Unit1", "Unit2", "HospAdmTime", "ICULOS", "SepsisLabel"),
]


def write_stay(path: Path, hours: int, onset: int | None = None) -> None:
    """Write one sepsis patient: HR is the hour, the first laboratory value is measured in even hours."""
    lines = ["|".join(SEPSIS_COLUMNS)]
    for hour in range(hours):
        cells = ["NaN"] * 41
        cells[0] = str(hour)
        cells[8] = str(100 + hour) if hour % 2 == 0 else "NaN"
        cells[-1] = str(int(onset is not None and hour >= onset))
        lines.append("|".join(cells))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def sepsis(tmp_path: Path) -> Path:
    """Cases at hours 10 and 60 in set A and at hour 20 in set B, and others who never turned septic."""
    write_stay(tmp_path / "set_A/case10.psv", 16, onset=10)
    write_stay(tmp_path / "set_A/case60.psv", 66, onset=60)
    write_stay(tmp_path / "set_A/early.psv", 12, onset=5)
    write_stay(tmp_path / "set_B/case20.psv", 30, onset=20)
    for number, hours in enumerate((8, 15, 30, 70)):
        write_stay(tmp_path / f"set_A/well{number}.psv", hours)
    for number, hours in enumerate((12, 25)):
        write_stay(tmp_path / f"set_B/well{number}.psv", hours)
    return tmp_path


def test_each_septic_patient_has_a_control_of_its_hospital_at_the_same_hour_each_time(sepsis):
    table, again = read_sepsis2019(sepsis), read_sepsis2019(sepsis)
    assert table.ids.tolist() == again.ids.tolist()
    assert len(set(table.ids)) == 6
    cases, controls = np.flatnonzero(table.labels == 1), np.flatnonzero(table.labels == 0)
    assert len(cases) == len(controls) == 3
    last_hour = table.device[:, -1, 0]
    for case, control in zip(cases, controls, strict=True):
        assert table.ids[case][:5] == table.ids[control][:5]
        assert last_hour[case] == last_hour[control]
    # Who is labelled within six hours is left out, and so is a case without a control.
    assert "set_A/early" not in table.ids
    write_stay(sepsis / "set_B/case40.psv", 50, onset=40)
    assert "set_B/case40" not in read_sepsis2019(sepsis).ids


def test_at_most_the_last_48_hours_before_the_first_labelled_are_seen_of_each_party_s_features(sepsis):
    table = read_sepsis2019(sepsis)
    hours = dict(zip(table.ids.tolist(), table.device[..., 0], strict=True))
    assert [hours[f"set_{case}"][-1] for case in ("A/case10", "A/case60", "B/case20")] == [9, 59, 19]
    assert hours["set_A/case60"].tolist() == list(range(12, 60))
    # Shorter stays begin later.
    assert np.isnan(hours["set_A/case10"][:38]).all()
    assert hours["set_A/case10"][38:].tolist() == list(range(10))
    assert (table.device.shape, table.hospital.shape) == ((6, 48, 8), (6, 48, 26))
    assert table.device_features == tuple(SEPSIS_COLUMNS[:8])
    assert table.hospital_features == tuple(SEPSIS_COLUMNS[8:34])


def test_a_file_with_other_columns_is_named_and_a_folder_without_a_case_is_an_error(sepsis, tmp_path):
    write_stay(tmp_path / "none/set_A/well.psv", 20)
    with pytest.raises(ValueError, match="must have a patient whose sepsis begins after 6 hours"):
        read_sepsis2019(tmp_path / "none")
    path = sepsis / "set_A/case60.psv"
    path.write_text(path.read_text().replace("|SepsisLabel", "|Label"))
    with pytest.raises(ValueError, match=r"case60.psv must have 41 columns.*got 41, the last 'Label'"):
        read_sepsis2019(sepsis)


# Windows


def write_random_stays(folder: Path, each: int = 30) -> None:
    """Write stays of 1 to 40 hours, a third septic; every value but a stay's own facts is there or not."""
    rng = np.random.default_rng(0)
    for part in ("set_A", "set_B"):
        for number in range(each):
            hours = int(rng.integers(1, 41))
            onset = int(rng.integers(0, hours)) if number % 3 == 0 else hours
            values = rng.normal(5, 1, (hours, 41)).round(2)
            values[:, 34:40] = [60, 1, 1, 0, -3, 0]
            # Empty above a row that says something: every hour is a row of 41 cells.
            values[:, :34][rng.random((hours, 34)) < 0.7] = np.nan
            values[:, 40] = np.arange(hours) >= onset
            lines = ["|".join(SEPSIS_COLUMNS)]
            lines += ["|".join("NaN" if np.isnan(cell) else f"{cell:g}" for cell in row) for row in values]
            path = folder / part / f"p{number:03}.psv"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(lines) + "\n")


def stay_of(folder: Path, name: str) -> np.ndarray:
    return np.genfromtxt(folder / f"{name}.psv", delimiter="|", skip_header=1, ndmin=2)


@pytest.fixture(scope="module")
def stays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sepsis")
    write_random_stays(folder)
    return folder


@pytest.fixture(scope="module")
def windows(stays: Path) -> Table:
    return read_sepsis2019_windows(stays)


def hours_of(table: Table) -> dict[str, list[int]]:
    hours: dict[str, list[int]] = {}
    for name in table.ids.tolist():
        person, _, hour = name.partition("@")
        hours.setdefault(person, []).append(int(hour))
    return hours


def test_every_eighth_hour_of_a_stay_is_a_sample_whether_it_ends_in_a_sepsis_or_not(stays, windows):
    found = hours_of(windows)
    assert len({min(hours) for hours in found.values()}) > 4
    for path in stays.glob("set_*/*.psv"):
        person = f"{path.parent.name}/{path.stem}"
        labels = stay_of(stays, person)[:, -1]
        last = len(labels) - 1 if not labels.any() else min(len(labels) - 1, int(labels.argmax()) + 9)
        hours = found.get(person, [])
        assert all(0 <= hour <= last for hour in hours)
        # None is left out between the first and the last that may be there.
        assert np.diff(hours).tolist() == [8] * (len(hours) - 1)
        assert (hours[0] <= 7 and hours[-1] + 8 > last) if hours else last < 7


def test_the_label_is_the_owners_of_that_hour(stays, windows):
    for name, label in zip(windows.ids.tolist(), windows.labels.tolist(), strict=True):
        person, _, hour = name.partition("@")
        assert label == stay_of(stays, person)[int(hour), -1]


def test_the_features_are_those_counted_by_hand(stays, windows):
    device = {name: k for k, name in enumerate(windows.device_features)}
    for row in range(0, len(windows.ids), 5):
        person, _, hour = str(windows.ids[row]).partition("@")
        past = stay_of(stays, person)[: int(hour) + 1, 3]  # SBP
        at = np.flatnonzero(~np.isnan(past))
        recent = at[at > int(hour) - 12]
        told = {what: windows.device[row, device[f"SBP {what}"]] for what in sepsis2019._SUMMARIES}
        assert told["measured"] == float(at.size > 0)
        assert told["count"] == pytest.approx(np.log1p(recent.size))
        if not at.size:
            assert np.isnan([told[what] for what in ("last", "mean", "min", "max")]).all()
            continue
        v = past[recent] if recent.size else past[at[-1:]]
        expected = {"last": past[at[-1]], "mean": v.mean(), "min": v.min(), "max": v.max()}
        expected["trend"] = np.polyfit(recent, v, 1)[0] if recent.size > 1 else 0.0
        assert {key: told[key] for key in expected} == pytest.approx(expected, abs=1e-4)


def test_neither_what_follows_an_hour_nor_a_stay_s_length_moves_its_features(stays, windows, tmp_path):
    write_random_stays(tmp_path / "changed")
    write_random_stays(tmp_path / "longer")
    for path in tmp_path.glob("changed/set_*/*.psv"):
        head, *lines = path.read_text().splitlines()
        # Everything measured from the tenth hour on is another, for as many hours.
        later = ["|".join(["9.5"] * 34 + line.split("|")[34:]) for line in lines[10:]]
        path.write_text("\n".join([head, *lines[:10], *later]) + "\n")
    for path in tmp_path.glob("longer/set_*/*.psv"):
        lines = path.read_text().splitlines()
        path.write_text("\n".join([*lines, *[lines[-1]] * 8]) + "\n")
    changed, longer = (read_sepsis2019_windows(tmp_path / name) for name in ("changed", "longer"))
    assert changed.ids.tolist() == windows.ids.tolist()
    early = np.array([int(name.partition("@")[2]) < 10 for name in windows.ids])
    assert 0 < early.sum() < len(early)
    place = {name: row for row, name in enumerate(longer.ids.tolist())}
    rows = [place[name] for name in windows.ids.tolist()]
    for half in ("hospital", "device"):
        before, after = getattr(windows, half), getattr(changed, half)
        assert np.array_equal(before[early], after[early], equal_nan=True)
        assert not np.array_equal(before[~early], after[~early], equal_nan=True)
        assert np.array_equal(getattr(longer, half)[rows], before, equal_nan=True)


def test_vital_signs_laboratory_values_and_the_admission_are_kept_apart(windows):
    assert windows.device.shape[1] == len(windows.device_features) == 8 * 7
    assert windows.hospital.shape[1] == len(windows.hospital_features) == 26 * 7 + 5
    assert windows.hospital_features[-5:] == ("age", "sex", "unit 1", "unit 2", "hours in hospital")
    assert not any("ICULOS" in name for name in (*windows.hospital_features, *windows.device_features))


def test_no_patient_is_in_both_parts_and_each_hospital_gives_a_fifth_of_both_kinds(stays, windows):
    test = dict(zip(windows.people.tolist(), windows.test.tolist(), strict=True))
    assert all(test[person] == part for person, part in zip(windows.people, windows.test, strict=True))
    assert windows.sites.tolist() == [person.partition("/")[0] for person in windows.people]
    chosen = sepsis2019._test_stays(sepsis2019._read_stays(stays))
    names = np.array(sorted(f"{path.parent.name}/{path.stem}" for path in stays.glob("set_*/*.psv")))
    septic = np.array([stay_of(stays, name)[:, -1].any() for name in names])
    for part in ("set_A", "set_B"):
        at = np.char.startswith(names, part)
        assert [int(chosen[at & (septic == kind)].sum()) for kind in (True, False)] == [2, 4]


def test_the_set_has_its_people_sites_and_payoffs_and_finite_features(stays):
    data = load_vertical("sepsis2019-windows", stays, more=SETS)
    assert data.people_train.shape == data.sites_train.shape == data.y_train.shape
    assert data.payoffs_test.shape == (len(data.y_test), 2)
    assert not set(data.people_train) & {name.partition("@")[0] for name in data.ids_test}
    scaled = [k for k, name in enumerate(data.device_features) if not name.endswith("measured")]
    assert np.abs(data.device_train[:, scaled]).max() <= 5


# What the challenge's scoring pays, by its definition: the onset s is six hours after the first label.


@pytest.mark.parametrize(
    ("hour", "onset", "silent", "told"),
    [
        (0, 20, 0.0, -0.05),  # 26 hours before s: too early is a false alarm
        (14, 20, 0.0, 0.0),  # 12 hours before
        (17, 20, 0.0, 0.5),  # 9 hours before
        (20, 20, 0.0, 1.0),  # 6 hours before, the best
        (23, 20, -2 / 3, 2 / 3),  # 3 hours before
        (26, 20, -4 / 3, 1 / 3),  # at s
        (29, 20, -2.0, 0.0),  # 3 hours after, the last that counts
        (30, 20, 0.0, 0.0),
        (5, -1, 0.0, -0.05),  # never septic
    ],
)
def test_an_hour_pays_what_the_challenge_says(hour, onset, silent, told):
    assert payoffs(np.array([hour]), np.array([onset]))[0].tolist() == pytest.approx([silent, told])


def test_files_are_parsed_once_unless_they_changed_or_what_was_kept_is_damaged(tmp_path, monkeypatch):
    write_random_stays(tmp_path, each=6)
    first = read_sepsis2019_windows(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(sepsis2019, "_hours", None)
        again = read_sepsis2019_windows(tmp_path)
    assert np.array_equal(first.hospital, again.hospital, equal_nan=True)
    assert first.ids.tolist() == again.ids.tolist()
    (kept,) = tmp_path.glob("*.npz")
    kept.write_bytes(kept.read_bytes()[:100])
    assert read_sepsis2019_windows(tmp_path).ids.tolist() == first.ids.tolist()
    assert kept.stat().st_size > 100
    write_stay(tmp_path / "set_A/p999.psv", 40)
    assert len(read_sepsis2019_windows(tmp_path).ids) > len(first.ids)


def test_who_may_not_read_the_files_may_not_read_what_was_kept_of_them(tmp_path):
    write_random_stays(tmp_path, each=2)
    for path in tmp_path.glob("set_*/*.psv"):
        path.chmod(0o640)
    read_sepsis2019_windows(tmp_path)
    (kept,) = tmp_path.glob("*.npz")
    assert kept.stat().st_mode & 0o777 == 0o640


def test_where_the_data_folder_takes_no_file_another_place_does(tmp_path, monkeypatch):
    data, cache = tmp_path / "data", tmp_path / "cache"
    write_random_stays(data, each=6)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    keep = sepsis2019._keep
    monkeypatch.setattr(sepsis2019, "_keep", lambda *a: a[1].parent != data and keep(*a))
    read_sepsis2019_windows(data)
    assert len(list((cache / "hedgerow").glob("sepsis2019-*.npz"))) == 1
    assert not list(data.glob("*.npz"))


@pytest.mark.parametrize(
    ("cell", "problem"),
    [("high", r"p000.psv must have 41 numbers a row.*'high'"), ("1|2", r"p000.psv must have 41")],
)
def test_a_cell_that_is_no_number_is_named(tmp_path, cell, problem):
    write_random_stays(tmp_path, each=6)
    path = tmp_path / "set_A/p000.psv"
    head, *lines = path.read_text().splitlines()
    path.write_text("\n".join([head, lines[0].replace("|60|", f"|{cell}|", 1), *lines[1:]]) + "\n")
    with warnings.catch_warnings(), pytest.raises(ValueError, match=problem):
        read_sepsis2019_windows(tmp_path)


def test_a_label_that_is_neither_0_nor_1_and_a_folder_without_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"must have at least one .psv file in .*set_A or .*set_B"):
        read_sepsis2019_windows(tmp_path)
    write_stay(tmp_path / "set_A/p1.psv", 12)
    path = tmp_path / "set_A/p1.psv"
    path.write_text(path.read_text()[:-2] + "2\n")
    with pytest.raises(ValueError, match=r"p1.psv: SepsisLabel must be 0 or 1, got 2"):
        read_sepsis2019_windows(tmp_path)
