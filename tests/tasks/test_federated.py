import numpy as np
import pytest
import torch

from hedgerow.tasks import federated, load, partition


def test_parts_are_the_partition_of_the_set_s_own_arrays():
    data, dataset = federated("mnist-5k", "dirichlet(0.5)", 10, seed=3), load("mnist-5k")
    assert data.dataset is dataset
    assert data.x.data_ptr() == dataset.x_train.ctypes.data
    assert data.x.shape == (4000, 1, 28, 28)
    assert data.y.dtype == torch.int64
    assert (data.x_test.shape, data.y_test.shape) == ((1000, 1, 28, 28), (1000,))
    expected = partition("dirichlet(0.5)", dataset.y_train, 10, seed=3)
    assert all(np.array_equal(a, b) for a, b in zip(data.parts, expected, strict=True))
    assert data.num_partitions == 10
    assert data.sizes == [part.size for part in expected]
    x, y = data.samples(4)
    assert torch.equal(x, data.x[data.parts[4]])
    assert torch.equal(y, data.y[data.parts[4]])
    for partition_id in (-1, 10):
        with pytest.raises(ValueError, match=rf"partition-id must be from 0 to 9, got {partition_id}"):
            data.samples(partition_id)


def test_the_same_question_gives_the_same_object():
    assert federated("mnist-5k", "iid", 10, 0) is federated("mnist-5k", "iid", 10, 0)
    assert federated("mnist-5k", "iid", 10, 0) is not federated("mnist-5k", "iid", 10, 1)


def test_another_data_folder_in_the_environment_is_another_question(tmp_path, write_idx_set, monkeypatch):
    labels = []
    for number in (1, 2):
        write_idx_set(tmp_path / str(number) / "mnist", seed=number)
        monkeypatch.setenv("HEDGEROW_DATA_DIR", str(tmp_path / str(number)))
        labels.append(federated("mnist", "iid", 2, 0).y)
    assert not torch.equal(*labels)


def test_a_copy_on_another_device_is_made_once_and_on_the_own_one_never():
    data = federated("mnist-5k", "iid", 10, seed=0)
    copy = data.to("meta")  # torch's device without storage stands for any other
    assert copy is data.to(torch.device("meta"))
    assert {tensor.device.type for tensor in (copy.x, copy.y, copy.x_test, copy.y_test)} == {"meta"}
    assert copy.parts is data.parts
    assert data.to("cpu") is copy.to("cpu") is data


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_without_and_with_its_number_is_one_device():
    data = federated("mnist-5k", "iid", 10, seed=0)
    assert data.to("cuda") is data.to("cuda:0")
    assert torch.equal(data.to("cuda").samples(2)[0].cpu(), data.samples(2)[0])
