"""One party's own file: what is read, and what each bad file is told, without a value of it."""

from pathlib import Path

import numpy as np
import pytest

from hedgerow.tasks import load_vertical, write_groups
from hedgerow.tasks.vertical_own import read_constants, read_half

GOOD = "id,pulse,label,spo2\np-1,61.5,sick,0.97\n p-2 ,70,well,0.99\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "half.csv"
    path.write_text(text)
    return path


def test_a_table_gives_ids_features_and_labels(tmp_path: Path) -> None:
    half = read_half(written(tmp_path, GOOD), labelled=True)
    assert half.ids == ("p-1", "p-2")
    assert half.features == ("pulse", "spo2")
    assert half.labels == ("sick", "well")
    assert half.x.dtype == np.float32
    assert half.x.tolist() == [[61.5, np.float32(0.97)], [70.0, np.float32(0.99)]]


def test_columns_have_the_names_that_the_node_says_and_a_device_needs_no_labels(tmp_path: Path) -> None:
    path = written(tmp_path, "mrn,pulse,sepsis\n007,61,0\n")
    half = read_half(path, "mrn", "sepsis", labelled=True)
    assert (half.ids, half.labels, half.features) == (("007",), ("0",), ("pulse",))
    assert read_half(written(tmp_path, "id,pulse\np-1,61\n"), labelled=False).labels is None


def test_arrays_are_read_with_their_shape(tmp_path: Path) -> None:
    x = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    np.savez(tmp_path / "half.npz", ids=np.array(["a", "b"]), x=x, y=np.array([0, 1]))
    half = read_half(tmp_path / "half.npz", labelled=True)
    assert np.array_equal(half.x, x)
    assert (half.ids, half.labels) == (("a", "b"), ("0", "1"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must have the column 'id'"),
        ("id,pulse,label\n", "must have at least one person"),
        ("person,pulse,label\np-1,61,sick\n", "must have the column 'id'"),
        ("id,pulse\np-1,61\n", "has no column 'label'"),
        ("id,label\np-1,sick\n", "at least one feature"),
        ("id,pulse,pulse,label\np-1,61,62,sick\n", "must have each column once, got 'pulse' twice"),
        ("id,pulse,label\np-1,61\n", "row 2 must have 3 cells, as the header has, got 2"),
        (
            "id,pulse,label\np-1,61,sick\np-77,,sick\n",
            "row 3, column 'pulse' must be a finite number, got an empty cell",
        ),
        ("id,pulse,label\np-1,fast-77,sick\n", "row 2, column 'pulse' must be a finite number"),
        ("id,pulse,label\np-1,1e77,sick\n", "column 'pulse' must be a finite number"),
        ("id,pulse,label\np-1,nan,sick\n", "column 'pulse' must be a finite number"),
        (
            "id,pulse,label\np-77,61,sick\np-1,61,sick\np-77,61,sick\n",
            "persons 1 and 3 must not have the same id",
        ),
        ("id,pulse,label\n  ,61,sick\n", "the id of person 1 must not be empty"),
        ("id,pulse,label\np-77,61,\n", "the label of person 1 must not be empty"),
    ],
)
def test_a_bad_table_is_one_error_that_tells_no_value(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must") as error:
        read_half(written(tmp_path, text), labelled=True)
    assert words in str(error.value)
    assert "77" not in str(error.value)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.ones((1, 2))}, "must have an array 'ids'"),
        ({"ids": np.array(["a"])}, "must have an array 'x'"),
        ({"ids": np.array(["a"]), "x": np.ones((2, 2))}, "must be float32 of shape (1, ...)"),
        ({"ids": np.array(["a"]), "x": np.full((1, 2), np.inf)}, "must be finite numbers"),
        (
            {"ids": np.array(["a"]), "x": np.ones((1, 2)), "y": np.array([0.5])},
            "'y' must be classes of shape (n,), got float64",
        ),
        ({"ids": np.array(["a"], object), "x": np.ones((1, 2))}, "plain arrays"),
    ],
)
def test_bad_arrays_are_one_error(arrays: dict[str, np.ndarray], words: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "half.npz", **arrays)
    with pytest.raises(ValueError, match="must") as error:
        read_half(tmp_path / "half.npz", labelled=False)
    assert words in str(error.value)


@pytest.mark.parametrize("name", ["missing.csv", "half.txt", "folder.csv"])
def test_a_file_that_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ValueError, match=rf"data must be .*got '{name}'"):
        read_half(tmp_path / name, labelled=False)


def test_constants_are_those_of_the_columns_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "constants.csv"
    path.write_text("feature,mean,std\nspo2,0.97,0.02\npulse,70,12\nage,1,0\n")
    assert read_constants(path, ["pulse", "spo2"]) == ([70.0, 0.97], [12.0, 0.02])
    for name in ("age", "weight"):
        with pytest.raises(ValueError, match=f"feature '{name}'"):
            read_constants(path, [name])


def test_files_of_a_split_hold_the_same_bits_and_are_their_owners_alone(tmp_path: Path) -> None:
    data = load_vertical("breast-cancer")
    rows = [np.array([3, 1]), np.array([8, 9, 7])]
    configs = write_groups(data, rows, tmp_path, "devices")
    assert [config["role"] for config in configs] == ["hospital"] * 2 + ["device"] * 5
    for m in range(2):
        hospital = read_half(str(configs[m]["data"]), labelled=True)
        assert np.array_equal(hospital.x, data.hospital_train[rows[m]])
        assert hospital.ids == tuple(data.ids_train[rows[m]])
        assert hospital.labels == tuple(data.classes[label] for label in data.y_train[rows[m]])
    device = read_half(str(configs[4]["data"]), labelled=False)
    assert np.array_equal(device.x, data.device_train[[8]])
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.rglob("*") if path.is_file())
    with pytest.raises(ValueError, match="exists already"):
        write_groups(data, rows, tmp_path, "devices")
