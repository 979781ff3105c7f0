from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hedgerow.tasks import DatasetNotFound, VerticalDataset
from hedgerow.tasks import load_vertical as load_known
from hsgd.medical import _MIMIC_VARIABLES, SETS

SUPPORT2_COLUMNS = "sno,hospdead,meanbp,hrt,resp,temp,wblc,pafi,alb,bili,crea,sod,ph,glucose,bun,urine"
OWN_DATA = """
import numpy as np
from hedgerow.tasks import VerticalDataset

def load(data_dir):
    x, y = np.ones((2, 3), np.float32), np.array([0, 1])
    return VerticalDataset(f"own at {data_dir}", x, x, y, np.array(["a", "b"]),
                           x, x, y, np.array(["c", "d"]), ("no", "yes"))

def wrong(data_dir):
    return [1, 2]
"""


def load_vertical(name: str, data_dir: Path | None = None) -> VerticalDataset:
    """Load one of tasks' sets or of HSGD's."""
    return load_known(name, data_dir, SETS)


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("HEDGEROW_DATA_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def small() -> VerticalDataset:
    x, y = np.zeros((4, 3), np.float32), np.array([0, 1, 0, 1])
    train, test = np.array(["a", "b", "c", "d"]), np.array(["e", "f"])
    return VerticalDataset("small", x, x[:, :2], y, train, x[:2], x[:2, :2], y[:2], test, ("no", "yes"))


def write_support2(folder: Path, seed: int = 0, changed: dict[str, float] | None = None) -> None:
    """Write 50 patients, some of whose values are missing; all values of a changed one are one number."""
    rng = np.random.default_rng(seed)
    values = rng.normal(50, 10, (50, 14))
    missing = rng.random((50, 14)) < 0.2
    missing[:, [0, 4]] = False
    lines = [SUPPORT2_COLUMNS]
    for patient in range(50):
        cells = np.where(missing[patient], "", values[patient].round(4).astype(str)).tolist()
        if changed and str(patient) in changed:
            cells = [str(changed[str(patient)])] * 14
        lines.append(f"{patient},{patient % 2}," + ",".join(cells))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "support2.csv").write_text("\n".join(lines))


def write_sepsis(folder: Path, patients: int = 10) -> None:
    """Write as many septic patients as others; HR is the hour, measured in even hours from the second."""
    for number in range(2 * patients):
        lines = [
            "|".join(
                [*(f"v{n}" for n in range(8)), *(f"lab{n}" for n in range(26)), *"ABCDEF", "SepsisLabel"]
            )
        ]
        for hour in range(20):
            cells = ["NaN"] * 41
            cells[0] = str(hour) if hour % 2 == 0 and hour >= 2 else "NaN"
            cells[9] = str(number)
            cells[-1] = str(int(number < patients and hour >= 12))
            lines.append("|".join(cells))
        path = folder / f"set_{'AB'[number % 2]}" / f"p{number}.psv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines))


def write_mimic(folder: Path, **parts: list[str]) -> None:
    """Write stays whose heart rate is measured once: 60 and 20 more for each patient's number."""
    columns = ["Hours", *_MIMIC_VARIABLES]
    for part, stays in parts.items():
        (folder / part).mkdir()
        listed = "".join(f"{stay}_timeseries.csv,0\n" for stay in stays)
        (folder / part / "listfile.csv").write_text("stay,y_true\n" + listed)
        for stay in stays:
            row = dict.fromkeys(columns, "") | {"Hours": "1", "Heart Rate": str(60 + 20 * int(stay[0]))}
            lines = [",".join(columns), ",".join(row.values())]
            (folder / part / f"{stay}_timeseries.csv").write_text("\n".join(lines))


def write_organs(path: Path, **changed: np.ndarray) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", 22), ("val", 3), ("test", 11)):
        arrays[f"{part}_images"] = rng.integers(0, 256, (count, 28, 28)).astype(np.uint8)
        arrays[f"{part}_labels"] = (np.arange(count) % 11).astype(np.uint8)[:, None]
    arrays |= changed
    np.savez(path, **arrays)
    return arrays


def test_the_default_set_gives_a_fifth_of_each_class_to_the_test_set_and_is_scaled_by_the_rest():
    data = load_vertical("breast-cancer")
    assert load_vertical("breast-cancer") is data
    assert data.hospital_train.shape == data.device_train.shape == (456, 15)
    assert len(data.hospital_test) == len(data.device_test) == len(data.y_test) == 113
    assert data.num_classes == 2
    assert np.bincount(data.y_train).tolist() == [170, 286]
    assert np.bincount(data.y_test).tolist() == [42, 71]
    for x in (data.hospital_train, data.device_train):
        np.testing.assert_allclose(x.mean(axis=0, dtype=np.float64), 0, atol=1e-6)
        np.testing.assert_allclose(x.std(axis=0, dtype=np.float64), 1, atol=1e-5)


def test_no_test_sample_moves_the_training_set(tmp_path):
    write_support2(tmp_path / "one/support2")
    one = load_vertical("support2", tmp_path / "one")
    write_support2(tmp_path / "two/support2", changed={name: 1e6 for name in one.ids_test})
    two = load_vertical("support2", tmp_path / "two")
    assert np.array_equal(one.hospital_train, two.hospital_train)
    assert np.array_equal(one.device_train, two.device_train)
    assert two.device_test.min() > 1000


def test_a_missing_value_of_a_table_is_the_training_set_s_median(tmp_path):
    write_support2(tmp_path / "support2")
    cells = [line.split(",") for line in (tmp_path / "support2/support2.csv").read_text().splitlines()[1:]]
    missing = {row[0]: row[3] == "" for row in cells}
    data = load_vertical("support2", tmp_path)
    train_missing = np.array([missing[name] for name in data.ids_train])
    test_missing = np.array([missing[name] for name in data.ids_test])
    median = np.median(data.device_train[~train_missing, 1])
    np.testing.assert_array_equal(data.device_train[train_missing, 1], median)
    np.testing.assert_array_equal(data.device_test[test_missing, 1], median)


def test_a_feature_that_nobody_measured_becomes_zeros(tmp_path):
    write_support2(tmp_path / "support2")
    path = tmp_path / "support2/support2.csv"
    header, *rows = path.read_text().splitlines()
    path.write_text("\n".join([header, *(",".join([*row.split(",")[:-1], ""]) for row in rows)]))
    data = load_vertical("support2", tmp_path)
    assert not data.hospital_train[:, -1].any()
    assert not data.hospital_test[:, -1].any()


def test_a_series_keeps_its_last_value_and_is_scaled_by_what_a_mask_tells_was_measured(tmp_path):
    write_sepsis(tmp_path / "sepsis2019")
    data = load_vertical("sepsis2019", tmp_path)
    rate, measured = data.device_train[0, -12:, 0], data.device_train[0, -12:, 8]
    assert measured.tolist() == [0, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert rate[:2].tolist() == [0, 0]
    assert np.array_equal(rate[2::2], rate[3::2])
    assert (np.diff(rate[2::2]) > 0).all()
    seen = data.device_train[..., 0][data.device_train[..., 8] == 1]
    assert seen.mean() == pytest.approx(0, abs=1e-6)
    assert seen.std() == pytest.approx(1, abs=1e-6)
    # Masks have names beside the features; patients are balanced, and in one part only.
    assert (data.device_train.shape[1:], data.hospital_train.shape[1:]) == ((48, 16), (48, 52))
    assert data.device_features[8] == "v0 measured"
    assert np.bincount(data.y_train).tolist() == [8, 8]
    assert np.bincount(data.y_test).tolist() == [2, 2]
    assert not set(data.ids_train) & set(data.ids_test)


def test_no_recording_of_eeg_is_in_both_parts(tmp_path):
    rows = [
        f"X{second}.V1.{recording}," + ",".join(["1"] * 178) + f",{1 + recording % 5}"
        for recording in range(50)
        for second in range(23)
    ]
    (tmp_path / "data.csv").write_text("\n".join([",".join(["c"] * 180), *rows]))
    data = load_vertical("esr", tmp_path)
    recordings = [{name.split(".")[2] for name in ids} for ids in (data.ids_train, data.ids_test)]
    assert not recordings[0] & recordings[1]
    assert np.bincount(data.y_train).tolist() == [8 * 23] * 5
    assert np.bincount(data.y_test).tolist() == [2 * 23] * 5


def test_a_flag_of_mimic_is_not_scaled_and_a_person_in_both_of_the_owners_parts_is_an_error(tmp_path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir()
    bad.mkdir()
    write_mimic(good, train=["1_episode1", "2_episode1"], test=["3_episode1"])
    data = load_vertical("mimic3", good)
    rate, measured = (data.device_features.index(name) for name in ("Heart Rate", "Heart Rate measured"))
    assert set(data.device_train[..., measured].ravel()) == {0, 1}
    np.testing.assert_allclose(data.device_train[:, 0, rate], [-1, 1], atol=1e-6)
    assert data.hospital_train.shape[1:] == data.device_train.shape[1:] == (48, 38)
    write_mimic(bad, train=["7_episode1"], test=["7_episode2"])
    with pytest.raises(ValueError, match="a person must be in training or test set, got '7' in both"):
        load_vertical("mimic3", bad)


def test_images_of_another_size_are_refused(tmp_path):
    write_organs(tmp_path / "organamnist.npz", train_images=np.zeros((22, 32, 32), np.uint8))
    with pytest.raises(ValueError, match=r"images must be 28x28, got \(32, 32\)"):
        load_vertical("organamnist", tmp_path)


def test_a_party_s_canvas_is_zero_where_it_sees_nothing():
    data = load_vertical("mnist-5k")
    hospital, device = (half.any(axis=(0, 1)) for half in (data.hospital_train, data.device_train))
    assert data.hospital_train.shape == data.device_train.shape == (4000, 1, 28, 28)
    centre = np.zeros((28, 28), bool)
    centre[3:25, 3:25] = True
    # Scaled to [-1, 1], a pixel is 0 only where its party does not see it.
    assert (hospital == centre).all()
    assert (device == ~centre).all()
    assert (centre.sum(), (~centre).sum()) == (484, 300)
    assert abs(data.hospital_train).max() == 1


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_the_full_sets_of_28x28_images_are_cut_as_well(write_idx_set, tmp_path, name):
    x_train, y_train, _, _ = write_idx_set(tmp_path / name)
    data = load_vertical(name, tmp_path)
    pixels = (data.hospital_train + data.device_train + 1) * 127.5
    np.testing.assert_allclose(pixels[:, 0], x_train, atol=1e-3)
    assert data.y_train.tolist() == y_train.tolist()
    assert data.ids_test[0] == "test-0"


def test_the_two_canvases_of_an_organ_together_are_the_image_and_bad_files_are_named(tmp_path):
    arrays = write_organs(tmp_path / "organamnist.npz")
    data = load_vertical("organamnist", tmp_path)
    pixels = (data.hospital_test + data.device_test + 1) * 127.5
    np.testing.assert_allclose(pixels[:, 0], arrays["test_images"], atol=1e-3)
    assert data.y_train.tolist() == arrays["train_labels"].ravel().tolist()
    assert data.num_classes == 11
    for name, words in (
        ("other", r"test_images must be uint8 .*got float64 of shape"),
        ("few", "got no train_labels, test_images, test_labels"),
    ):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "organamnist.npz"
        if name == "other":
            write_organs(file, test_images=np.zeros((11, 28, 28)))
        else:
            np.savez(file, train_images=np.zeros((1, 28, 28), np.uint8))
        with pytest.raises(ValueError, match=words):
            load_vertical("organamnist", tmp_path / name)


def test_a_set_that_is_not_there_tells_where_it_was_looked_for_and_how_to_say_where(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"dataset must be one of breast-cancer, ecg5000.*got 'mimic'"):
        load_vertical("mimic")
    with pytest.raises(
        DatasetNotFound,
        match=rf"{tmp_path}/sepsis2019: no such folder\n  {tmp_path}: no set_A, set_B\nTo get it",
    ):
        load_vertical("sepsis2019", tmp_path)
    with pytest.raises(DatasetNotFound, match="set data-dir or the variable HEDGEROW_DATA_DIR"):
        load_vertical("esr")
    write_support2(tmp_path / "support2")
    monkeypatch.setenv("HEDGEROW_DATA_DIR", str(tmp_path))
    assert load_vertical("support2").name == "support2"


def test_a_user_s_own_set_plugs_in_by_import_path_and_must_be_a_vertical_one(write_module, tmp_path):
    write_module("own_vertical", OWN_DATA)
    assert load_vertical("own_vertical:load", tmp_path).name == f"own at {tmp_path}"
    with pytest.raises(ValueError, match="must return a VerticalDataset, got a list"):
        load_vertical("own_vertical:wrong")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes": ("no",)}, "classes must be at least 2 different names, got "),
        ({"classes": ("no", "no")}, "classes must be at least 2 different names, got "),
        ({"y_train": np.array([0, 1, 2, 0])}, r"y_train must be from 0 to 1, got 0 to 2"),
        ({"y_train": np.zeros(4)}, "y_train must be a non-empty int64 array .*got float64 of shape"),
        (
            {"hospital_train": np.zeros((3, 3), np.float32)},
            r"hospital_train must be .*float32 array \(4, ...\), got ",
        ),
        ({"device_test": np.zeros((2, 2))}, r"device_test must be .*float32 array \(2, ...\), got float64"),
        (
            {"device_train": np.full((4, 2), np.nan, np.float32)},
            "device_train must be finite, got NaN or infinity",
        ),
        (
            {"device_test": np.ones((2, 5), np.float32)},
            r"device_test must be samples of shape \(2,\), .*got \(5,\)",
        ),
        ({"ids_train": np.array(["a", "a", "b", "c"])}, "ids_train must be different ids, got 'a' 2 times"),
        ({"ids_train": np.arange(4)}, r"ids_train must be a str array of shape \(4,\), got int64"),
        ({"ids_test": np.array(["d", "e"])}, "ids_test must be ids that are not in ids_train, got 'd'"),
        ({"hospital_features": ("one",)}, "hospital_features must be 3 names, or none, got 1 names"),
        ({"people_train": np.array(["a"])}, r"people_train must be a str array of shape \(4,\), got "),
        ({"sites_train": np.zeros(4)}, r"sites_train must be a str array of shape \(4,\), got "),
        ({"payoffs_test": np.zeros((4, 2))}, r"payoffs_test must be a float64 array of shape \(2, 2\), got "),
        ({"payoffs_test": np.full((2, 2), np.nan)}, "payoffs_test must be finite, got NaN or infinity"),
    ],
)
def test_a_bad_field_is_named_with_what_is_valid(small, change, message):
    with pytest.raises(ValueError, match=f"data set 'small': {message}"):
        replace(small, **change)
