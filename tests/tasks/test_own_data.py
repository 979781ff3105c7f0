"""A node's own data: what every reader makes of a good file, and what it says of a bad one."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hedgerow.tasks import (
    Classes,
    OwnData,
    OwnSource,
    Standardisation,
    moments,
    parse_classes,
    parse_standardise,
    read_own,
)

pandas = pytest.importorskip("pandas")

X = np.arange(24, dtype=np.float32).reshape(6, 4)
Y = np.array([0, 1, 0, 1, 1, 0])


def read(path: object, classes: str = "", **config: Any) -> OwnData:
    return read_own(OwnSource.of({"data": str(path), **config}), parse_classes(classes))


def npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def csv(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def parquet(path: Path, **columns: Any) -> Path:
    pytest.importorskip("pyarrow")
    pandas.DataFrame(columns).to_parquet(path)
    return path


# What is read.


def test_arrays_are_read_as_they_are_with_the_classes_that_file_or_run_tells(tmp_path: Path) -> None:
    data = read(npz(tmp_path / "a.npz", x=X, y=Y))
    assert data.x.dtype == np.float32
    assert data.x.tolist() == X.tolist()
    assert data.y.tolist() == Y.tolist()
    assert (data.num_classes, data.input_shape, data.dtype) == (2, (4,), "float32")
    assert read(npz(tmp_path / "a.npz", x=X, y=Y), classes="5").num_classes == 5
    assert read(npz(tmp_path / "a.npz", x=X, y=Y, classes=7)).num_classes == 7
    # Names of classes are in the order of the run, and can be numbers.
    numbered = npz(tmp_path / "b.npz", x=X[:3], y=np.array([-1, 1, -1]))
    assert read(numbered, classes="-1,1").y.tolist() == [0, 1, 0]
    named = csv(tmp_path / "a.csv", "a,label\n1,sick\n2,well\n3,sick\n")
    assert read(named, classes="well,sick").y.tolist() == [1, 0, 1]
    assert read(named, classes="sick,well,dead").num_classes == 3
    assert parse_classes("") == Classes()


@pytest.mark.parametrize("classes", ["2", "false,true", "False,True", "0,1", "0.0,1.0"])
@pytest.mark.parametrize(
    "labels", [[True, False, True], [1, 0, 1], [1.0, 0.0, 1.0]], ids=["flags", "whole", "float"]
)
def test_sites_whose_files_write_labels_in_other_forms_have_the_same_classes(
    tmp_path: Path, labels: list[Any], classes: str
) -> None:
    table = {"a": [0.5, 1.5, 2.5], "label": labels}
    pandas.DataFrame(table).to_csv(tmp_path / "t.csv", index=False)
    for path in (tmp_path / "t.csv", parquet(tmp_path / "t.parquet", **table)):
        assert read(path, classes=classes).y.tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match="distinct"):
        parse_classes("1,True")


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_table_is_read_in_the_order_of_its_columns(tmp_path: Path, form: str) -> None:
    table = {"b": [1.5, 2.5], "label": [1, 0], "a": [3, 4], "flag": [True, False]}
    if form == "csv":
        pandas.DataFrame(table).to_csv(path := tmp_path / "t.csv", index=False)
    else:
        path = parquet(tmp_path / "t.parquet", **table)
    data = read(path)
    assert data.x.tolist() == [[1.5, 3, 1], [2.5, 4, 0]]
    assert data.y.tolist() == [1, 0]
    assert data.features == ("b", "a", "flag")


def test_a_node_names_its_columns_and_nodes_whose_columns_differ_are_told_apart(tmp_path: Path) -> None:
    path = csv(tmp_path / "a.csv", "id,a,b,outcome\nx7,1,2,0\nx8,3,4,1\n")
    assert read(path, label="outcome", features="b, a").x.tolist() == [[2, 1], [4, 3]]
    one = read(csv(tmp_path / "1.csv", "a,b,label\n1,2,0\n"))
    same = read(csv(tmp_path / "2.csv", "a,b,label\n7,8,1\n"))
    turned = read(csv(tmp_path / "3.csv", "b,a,label\n1,2,0\n"))
    assert one.dtype == same.dtype != turned.dtype
    assert "a" not in one.dtype.removeprefix("float32").strip("[]") or len(one.dtype) == len("float32[]") + 16


def test_a_table_of_several_chunks_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hedgerow.tasks.files._CHUNK_CELLS", 12)
    rows = [f"{i},{2 * i},{i % 3}" for i in range(50)]
    data = read(csv(tmp_path / "a.csv", "a,b,label\n" + "\n".join(rows) + "\n"), classes="3", features="a,b")
    assert data.x[:, 1].tolist() == [2 * i for i in range(50)]
    assert data.y.tolist() == [i % 3 for i in range(50)]
    bad = [*rows[:40], "nan,1,1", *rows[40:]]
    with pytest.raises(ValueError, match=r"row 42, column 'a'"):
        read(csv(tmp_path / "b.csv", "a,b,label\n" + "\n".join(bad) + "\n"))


@pytest.mark.slow
def test_a_table_is_read_in_a_bounded_memory(tmp_path: Path) -> None:
    """Of 200 MB of text the peak is what is returned, 80 MB, and a chunk in the making."""
    path = tmp_path / "big.csv"
    line = ",".join(f"0.{j:07d}" for j in range(20)) + ",1\n"
    with path.open("w") as file:
        file.write(",".join(f"c{j}" for j in range(20)) + ",label\n")
        for _ in range(100):
            file.write(line * 10_000)
    script = (
        "import resource, sys; from hedgerow.tasks import OwnSource, read_own, parse_classes\n"
        "import pandas; before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "data = read_own(OwnSource.of({'data': sys.argv[1]}), parse_classes('2'))\n"
        "print(len(data.y), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    told = subprocess.run(
        [sys.executable, "-c", script, str(path)], check=True, capture_output=True, text=True
    )
    count, kib = map(int, told.stdout.split())
    assert count == 1_000_000
    assert kib < 600 * 1024


def image(path: Path, shape: tuple[int, ...], value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pytest.importorskip("PIL.Image").fromarray(np.full(shape, value, np.uint8)).save(path)


def test_a_folder_of_class_folders_is_read(tmp_path: Path) -> None:
    image(tmp_path / "cat" / "1.png", (5, 6, 3), 255)
    image(tmp_path / "dog" / "2.png", (5, 6, 3), 0)
    image(tmp_path / "dog" / "3.bmp", (5, 6, 3), 51)
    data = read(tmp_path, classes="dog,cat")
    assert data.x.shape == (3, 3, 5, 6)
    assert data.y.tolist() == [1, 0, 0]
    assert [float(x[0, 0, 0]) for x in data.x] == pytest.approx([1.0, 0.0, 0.2])
    image(tmp_path / "grey" / "0" / "1.png", (5, 6), 255)
    assert read(tmp_path / "grey").input_shape == (1, 5, 6)


def test_a_saved_data_set_of_hugging_face_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = {"a": [1.0, 2.0], "b": [3, 4], "label": ["x", "y"]}
    datasets.Dataset.from_dict(table).save_to_disk(str(tmp_path / "table"))
    data = read(tmp_path / "table", classes="y,x")
    assert (data.x.tolist(), data.y.tolist(), data.features) == ([[1, 3], [2, 4]], [1, 0], ("a", "b"))
    arrays = {"series": [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], "label": [0, 1]}
    datasets.Dataset.from_dict(arrays).save_to_disk(str(tmp_path / "arrays"))
    assert read(tmp_path / "arrays").x.tolist() == arrays["series"]


def test_what_reads_a_form_may_not_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs the package datasets.*pip install 'hedgerow\[datasets\]'"):
        read(tmp_path)


SOURCE = """
import numpy as np
KEPT = np.arange(6, dtype=np.float32).reshape(3, 2)
def load(config):
    return KEPT * config["partition-id"], np.array(["b", "a", "b"])
def same(config):
    return KEPT, [0, 1, 0]
def alone(config):
    return KEPT
"""


def test_a_function_is_given_the_node_config_and_keeps_what_it_returns(
    write_module: Callable[[str, str], None],
) -> None:
    write_module("own_loader", SOURCE)
    config = {"allow-imports": "other:f, own_loader:load", "partition-id": 2}
    data = read("own_loader:load", classes="a,b", **config)
    assert (data.x.tolist(), data.y.tolist()) == ([[0, 2], [4, 6], [8, 10]], [1, 0, 1])
    data = read("own_loader:same", **{"allow-imports": "own_loader:same"})
    Standardisation((1.0,), (2.0,)).apply(data.x)
    assert sys.modules["own_loader"].KEPT.tolist() == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match=r"must return \(x, y\), got a ndarray"):
        read("own_loader:alone", **{"allow-imports": "own_loader:alone"})


# What is refused.


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": X}, "no array y"),
        ({"x": X, "y": Y[:5]}, r"y must be integers or texts of shape \(6,\).*got int64 of shape \(5,\)"),
        ({"x": X, "y": Y + 0.5}, "y must be .*got float64"),
        ({"x": X[:0], "y": Y[:0]}, "must be a non-empty array"),
        ({"x": X[:, 0], "y": Y}, "two axes or more"),
        ({"x": np.where(X == 13, np.nan, X), "y": Y}, r"x\[3, 1\] must be .*got nan"),
        ({"x": X.astype(np.float64) * 1e38 * 10, "y": Y}, r"x\[0, 1\] must be .*got 1e\+39"),
        ({"x": X.astype(str), "y": Y}, "must be an array of numbers"),
        ({"x": np.array([[object()]]), "y": Y[:1]}, "allow_pickle"),
        ({"x": X, "y": Y - 1}, r"y\[0\] must be an integer from 0.*got '-1'"),
        ({"x": X, "y": np.array(list("ababab"))}, r"y\[0\] must be .* key classes .*got 'a'"),
        ({"x": X, "y": Y, "classes": 1}, "must be one integer >= 2"),
        ({"x": X, "y": Y + 5, "classes": 6}, r"y\[1\] must be an integer from 0 to 5 .*got '6'"),
    ],
)
def test_bad_arrays_are_refused(tmp_path: Path, arrays: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        read(npz(tmp_path / "a.npz", **arrays))
    assert str(tmp_path / "a.npz") in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there must be a header, got no columns"),
        ("a,label\n", "there must be at least one row"),
        ("a,b\n1,2\n", "no column 'label'; the columns are 'a', 'b'"),
        ("label\n1\n", "must be one column or more"),
        ("a,label\n1,0\n,1\n", "row 3, column 'a' must be .*got ''"),
        ("a,label\n1,0\nlow,1\n", "row 3, column 'a' must be a finite number, got 'low'"),
        ("a,label\ninf,0\n", "row 2, column 'a' must be .*got 'inf'"),
        ("a,label\n1e39,0\n", "row 2, column 'a' must be .*got '1e39'"),
        ("a,label\n1,0\n2,\n", "row 3, column 'label' must be a label, got an empty cell"),
        ("a,label\n1,0\n2,1.5\n", "row 3, column 'label' must be an integer.*got '1.5'"),
        ("a,label\n1,0\n2,yes\n", "row 3, column 'label' must be .*got 'yes'"),
        ("a,label\n1,0\n2,1,9\n", "row 3 must have 2 cells, as the header has, got 3"),
        ("a,label\n1,0,9\n", "row 2 must have 2 cells, as the header has, got 3"),
        ("a,label\n1,0\n2\n", "row 3 must have 2 cells, as the header has, got 1"),
        ('a,label\n1,"0\n', "unexpected end of data"),
        ("a,a,label\n1,2,0\n", "each column must have a name of its own, got 'a' twice"),
    ],
)
def test_a_bad_table_is_refused_by_row_and_column(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        read(csv(tmp_path / "a.csv", text))
    assert str(tmp_path / "a.csv") in str(refused.value)


def test_bad_cells_of_parquet_and_labels_that_the_run_does_not_name_are_refused(tmp_path: Path) -> None:
    path = csv(tmp_path / "a.csv", "a,label\n1,sick\n2,unknown\n")
    with pytest.raises(
        ValueError, match="row 3, column 'label' must be one of 'well', 'sick', got 'unknown'"
    ):
        read(path, classes="well,sick")
    with pytest.raises(ValueError, match=r"row 2, column 'a' must be .*got 'nan'"):
        read(parquet(tmp_path / "a.parquet", a=[1.0, None], label=[0, 1]))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"b\.parquet"):
        read(tmp_path / "b.parquet")


def test_bad_images_are_refused_by_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no images in class folders"):
        read(tmp_path)
    image(tmp_path / "0" / "1.png", (5, 6), 1)
    image(tmp_path / "1" / "2.png", (5, 7), 1)
    with pytest.raises(ValueError, match=r"2\.png must have the shape .*got \(1, 5, 7\)"):
        read(tmp_path)
    (tmp_path / "1" / "2.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"1/2\.png must be an image that Pillow reads"):
        read(tmp_path)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the file does not exist"):
        read(tmp_path / "a.npz")
    with pytest.raises(ValueError, match="must be a file"):
        read(csv(tmp_path / "a.txt", "1"))
    (tmp_path / "b.npz").write_bytes(b"PK torn")
    with pytest.raises(ValueError, match=r"b\.npz"):
        read(tmp_path / "b.npz")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "data is missing in the node config"),
        ({"data": 3}, "data must be .*got 3"),
        ({"data": "os:getcwd"}, "allow-imports of the same config"),
        ({"data": "os:getcwd", "allow-imports": "os:getpid"}, "now os:getpid"),
    ],
)
def test_a_bad_node_config_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OwnSource.of(config)


# Moments.


@pytest.mark.parametrize("shape", [(50, 3), (20, 7, 3), (10, 3, 4, 5)])
def test_moments_are_those_of_the_features(shape: tuple[int, ...]) -> None:
    x = (np.random.default_rng(0).normal(1e4, 1.0, shape)).astype(np.float32)
    by_feature = (np.moveaxis(x, 1, -1) if x.ndim == 4 else x).reshape(-1, 3).astype(np.float64)
    found = moments(x)
    assert found.count == len(by_feature)
    assert found.mean == pytest.approx(by_feature.mean(axis=0), rel=1e-12)
    assert found.squares == pytest.approx(by_feature.var(axis=0) * len(by_feature), rel=1e-9)
    Standardisation(tuple(found.mean), tuple(np.sqrt(found.squares / found.count))).apply(x)
    assert moments(x).mean == pytest.approx(np.zeros(3), abs=1e-3)
    assert moments(x).squares / found.count == pytest.approx(np.ones(3), rel=1e-3)
    assert parse_standardise("none") is parse_standardise("federated") is None
    assert parse_standardise("1, 2") == Standardisation((1.0,), (2.0,))
