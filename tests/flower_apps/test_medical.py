from pathlib import Path

import numpy as np
import pytest

from hsgd import medical
from hsgd.medical import Table

MIMIC_COLUMNS = ["Hours", *medical._MIMIC_VARIABLES]


def write_mimic(folder: Path, stays: dict[str, list[dict[str, str]]], labels: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    listed = "".join(f"{name}_timeseries.csv,{labels[name]}\n" for name in stays)
    (folder / "listfile.csv").write_text(f"stay,y_true\n{listed}")
    for name, rows in stays.items():
        lines = [",".join(MIMIC_COLUMNS), *(",".join(row.get(c, "") for c in MIMIC_COLUMNS) for row in rows)]
        (folder / f"{name}_timeseries.csv").write_text("\n".join(lines) + "\n")


@pytest.fixture
def mimic(tmp_path: Path) -> Path:
    rows = [
        {"Hours": "0.5", "Heart Rate": "90", "Glascow coma scale total": "9.0"},
        {"Hours": "0.7", "Heart Rate": "100"},
        {"Hours": "1.0", "Capillary refill rate": "1.0"},
        {"Hours": "5.2", "Heart Rate": "60"},
        {"Hours": "49.0", "Heart Rate": "1"},
    ]
    write_mimic(
        tmp_path / "train", {"7_episode1": rows, "7_episode2": []}, {"7_episode1": "1", "7_episode2": "0"}
    )
    write_mimic(tmp_path / "test", {"8_episode1": []}, {"8_episode1": "0"})
    return tmp_path


def column(table: Table, feature: str) -> np.ndarray:
    features = (*table.hospital_features, *table.device_features)
    return np.concatenate([table.hospital, table.device], axis=-1)[..., features.index(feature)]


def test_a_heartbeat_is_cut_into_its_first_and_its_last_half(tmp_path):
    rows = np.column_stack([[1, 5], np.arange(280).reshape(2, 140)])
    np.savetxt(tmp_path / "ECG5000_TRAIN.tsv", rows, delimiter="\t")
    np.savetxt(tmp_path / "ECG5000_TEST.tsv", rows[:1], delimiter="\t")
    table = medical.read_ecg5000(tmp_path)
    assert table.hospital.shape == table.device.shape == (3, 70, 1)
    assert table.hospital[1, :, 0].tolist() == list(range(140, 210))
    assert table.device[1, :, 0].tolist() == list(range(210, 280))
    assert table.labels.tolist() == [0, 4, 0]
    assert table.test.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((2, 141)), "label must be from 1 to 5, got 0.0"),
        (np.ones((2, 140)), "must have 141 numbers a row, got 140"),
    ],
)
def test_a_bad_heartbeat_file_is_named_with_what_is_valid(tmp_path, rows, message):
    for part in ("TRAIN", "TEST"):
        np.savetxt(tmp_path / f"ECG5000_{part}.tsv", rows, delimiter="\t")
    with pytest.raises(ValueError, match=rf"ECG5000_TRAIN\.tsv.*{message}"):
        medical.read_ecg5000(tmp_path)


def esr_file(folder: Path, rows: list[str]) -> None:
    (folder / "data.csv").write_text(
        "\n".join(['"",' + ",".join(f"X{n}" for n in range(1, 179)) + ",y", *rows])
    )


def test_a_second_of_eeg_is_cut_into_89_and_89_and_a_recording_is_one_person_within_its_class(tmp_path):
    numbers = ",".join(map(str, range(178)))
    rows = [f"X{second}.V1.791,{numbers},{label}" for second, label in ((21, 4), (2, 4), (2, 1))]
    esr_file(tmp_path, rows)
    table = medical.read_esr(tmp_path)
    assert table.hospital[0, :, 0].tolist() == list(range(89))
    assert table.device[0, :, 0].tolist() == list(range(89, 178))
    assert table.labels.tolist() == [3, 3, 0]
    assert table.people[0] == table.people[1] != table.people[2]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["X1.V1.1," + "0," * 178 + "6"], "label must be from 1 to 5, got 6.0"),
        (["X1.V1.1," + "0," * 178 + "one"], "every cell must be a number or empty: .*'one'"),
        (["X1.V1.1,0,0,1"], "row 2 must have 180 cells, got 4"),
        ([], "must have at least one row below the header"),
    ],
)
def test_a_bad_file_of_eeg_is_named_with_what_is_valid(tmp_path, rows, message):
    esr_file(tmp_path, rows)
    with pytest.raises(ValueError, match=rf"data\.csv.*{message}"):
        medical.read_esr(tmp_path)


SUPPORT2_HEADER = "sno,hospdead,meanbp,hrt,resp,temp,wblc,pafi,alb,bili,crea,sod,ph,glucose,bun,urine"


def test_support2_has_vital_signs_on_the_device_and_laboratory_values_at_the_hospital(tmp_path):
    rows = ["1,0, 97.0,69,22,36.0,6,,1,2,3,4,5,6,7,8", "2,1,43,112,34,34.6,17,98,,,,,,,,9"]
    # Who has no vital sign at all is left out.
    rows.append("3,1,,,,,17,98,,,,,,,,9")
    (tmp_path / "support2.csv").write_text("\n".join([SUPPORT2_HEADER, *rows]))
    table = medical.read_support2(tmp_path)
    assert table.ids.tolist() == ["1", "2"]
    assert table.device.tolist()[0] == [97, 69, 22, 36]
    assert table.hospital[1, [0, 1, 9]].tolist() == [17, 98, 9]
    assert np.isnan(table.hospital[0, 1])
    assert np.isnan(table.hospital[1, 2:9]).all()
    assert table.labels.tolist() == [0, 1]
    (tmp_path / "support2.csv").write_text(SUPPORT2_HEADER.replace("resp", "breath"))
    with pytest.raises(ValueError, match=r"support2.csv: no column 'resp'; the columns are sno, hospdead"):
        medical.read_support2(tmp_path)


def test_a_mimic_stay_is_48_hours_of_the_last_value_of_each_and_when_it_was_measured(mimic):
    table = medical.read_mimic3(mimic)
    assert table.hospital.shape == table.device.shape == (3, 48, 38)
    assert table.labels.tolist() == [1, 0, 0]
    assert table.test.tolist() == [False, False, True]
    assert table.people.tolist() == ["7", "7", "8"]
    # The last value of an hour stays until the next; one that was never measured is the normal one.
    assert column(table, "Heart Rate")[0].tolist() == [100] * 5 + [60] * 43
    assert set(column(table, "pH").ravel()) == {np.float32(7.4)}
    assert column(table, "Glascow coma scale verbal response = 5 Oriented").min() == 1
    assert np.flatnonzero(column(table, "Heart Rate measured")[0]).tolist() == [0, 5]
    assert np.flatnonzero(column(table, "Capillary refill rate measured")[0]).tolist() == [0]
    assert column(table, "pH measured").max() == 0


def test_a_mimic_category_is_one_column_of_its_variable_and_a_flag_as_masks_are(mimic):
    table = medical.read_mimic3(mimic)
    total = [name for name in (*table.hospital_features, *table.device_features) if "total = " in name]
    assert column(table, "Glascow coma scale total = 9")[0].tolist() == [1] * 48
    assert sum(column(table, name) for name in total).tolist() == [[1] * 48] * 3
    assert len(table.flags) == 76 - 12
    assert "Heart Rate" not in table.flags
    path = mimic / "train/7_episode1_timeseries.csv"
    path.write_text(path.read_text().replace("9.0", "99"))
    words = r"7_episode1.*Glascow coma scale total must be one of 11, 10.*got '99'"
    with pytest.raises(ValueError, match=words):
        medical.read_mimic3(mimic)
