"""Files of samples that have ids, as a party of a vertical federation has them; others: test_own_data."""

from pathlib import Path

import numpy as np
import pytest

from hedgerow.tasks.files import FileColumns, FileData, read_constants, read_file

GOOD = "id,pulse,label,spo2\np-1,61.5,sick,0.97\n p-2 ,70,well,0.99\n"
PARTY = FileColumns(id="id", labelled=False)
HOSPITAL = FileColumns(id="id")


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "half.csv"
    path.write_text(text)
    return path


def labels(data: FileData) -> list[str] | None:
    if data.labels is None:
        return None
    names = [*data.labels.first]
    return [names[number] for number in data.labels.numbers(range(len(names)))]


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_table_gives_ids_features_and_labels(tmp_path: Path, form: str) -> None:
    path = written(tmp_path, GOOD)
    if form == "parquet":
        pytest.importorskip("pyarrow")
        pandas = pytest.importorskip("pandas")
        pandas.read_csv(path).to_parquet(path := tmp_path / "half.parquet")
    half = read_file(path, HOSPITAL)
    assert half.ids == ("p-1", "p-2")
    assert half.features == ("pulse", "spo2")
    assert labels(half) == ["sick", "well"]
    assert half.x.dtype == np.float32
    assert half.x.tolist() == [[61.5, np.float32(0.97)], [70.0, np.float32(0.99)]]


def test_columns_have_the_names_that_the_node_says_and_a_device_needs_no_labels(tmp_path: Path) -> None:
    path = written(tmp_path, "mrn,pulse,sepsis\n007,61,0\n")
    half = read_file(path, FileColumns("sepsis", id="mrn"))
    assert (half.ids, labels(half), half.features) == (("007",), ["0"], ("pulse",))
    assert read_file(written(tmp_path, "id,pulse\np-1,61\n"), PARTY).labels is None


def test_rows_are_counted_as_the_file_has_them(tmp_path: Path) -> None:
    path = written(tmp_path, "\ufeffid,pulse,label\n\n'p-1',61,sick\n\np-2,,well\n")
    with pytest.raises(ValueError, match="row 5, column 'pulse' must be a finite number, got ''"):
        read_file(path, HOSPITAL)


def test_arrays_are_read_with_their_shape(tmp_path: Path) -> None:
    x = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    np.savez(tmp_path / "half.npz", ids=np.array(["a", "b"]), x=x, y=np.array([0, 1]))
    half = read_file(tmp_path / "half.npz", HOSPITAL)
    assert np.array_equal(half.x, x)
    assert (half.ids, labels(half)) == (("a", "b"), ["0", "1"])


def test_images_are_known_by_their_names_and_have_labels_in_class_folders_alone(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image").fromarray(np.full((2, 3), 51, np.uint8))
    for name in ("hospital/sick/p-2.png", "hospital/well/p-1.png", "edge/p-1.png", "edge/p-2.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(tmp_path / name)
    hospital = read_file(tmp_path / "hospital", HOSPITAL)
    assert (hospital.ids, labels(hospital)) == (("p-2", "p-1"), ["sick", "well"])
    edge = read_file(tmp_path / "edge", PARTY)
    assert (edge.ids, edge.labels, edge.x.shape) == (("p-1", "p-2"), None, (2, 1, 2, 3))
    with pytest.raises(ValueError, match="no images in class folders"):
        read_file(tmp_path / "edge", HOSPITAL)


# What any table or array is refused for is in test_own_data.
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("person,pulse,label\np-1,61,sick\n", "no column 'id'; the columns are 'person', 'pulse', 'label'"),
        ("id,pulse,label\np-7,61,a\np-1,61,b\np-7,61,a\n", "samples 1 and 3 must not have the same id"),
        ("id,pulse,label\n  ,61,sick\n", "the id of sample 1 must not be empty"),
        ("id,pulse,label\np-1," + "6" * 200_000 + ",sick\n", "field larger than field limit"),
    ],
)
def test_a_bad_table_is_one_error_with_file_row_and_column(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"half\.csv: ") as error:
        read_file(written(tmp_path, text), HOSPITAL)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.ones((1, 2))}, "there must be arrays x, ids, got no array ids"),
        ({"ids": np.array(["a"])}, "got no array x"),
        ({"ids": np.array(["a"]), "x": np.ones((2, 2))}, "ids must be texts of shape (2,)"),
        ({"ids": np.array([1]), "x": np.ones((1, 2))}, "ids must be texts of shape (1,)"),
        ({"ids": np.array(["a"], object), "x": np.ones((1, 2))}, "allow_pickle"),
    ],
)
def test_bad_arrays_are_one_error(arrays: dict[str, np.ndarray], words: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "half.npz", **arrays)
    with pytest.raises(ValueError, match=r"half\.npz: ") as error:
        read_file(tmp_path / "half.npz", PARTY)
    assert words in str(error.value)


def test_constants_are_those_of_the_columns_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "constants.csv"
    path.write_text("feature,mean,std\nspo2,0.97,0.02\npulse,70,12\nage,1,0\n")
    assert read_constants(path, ["pulse", "spo2"]) == ([70.0, 0.97], [12.0, 0.02])
    for name in ("age", "weight"):
        with pytest.raises(ValueError, match=f"feature '{name}'"):
            read_constants(path, [name])
    path.write_text("feature,mean\nspo2,0.97\n")
    with pytest.raises(ValueError, match=r"constants\.csv: the columns must be feature, mean and std"):
        read_constants(path, ["spo2"])
