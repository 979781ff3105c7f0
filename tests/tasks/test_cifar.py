import pickle

import numpy as np
import pytest

from hedgerow.tasks.cifar import missing_cifar10, read_cifar10


@pytest.mark.filterwarnings("ignore:numpy.core:DeprecationWarning")
@pytest.mark.parametrize("pickled", [False, True])
def test_both_layouts_are_read_as_written(tmp_path, write_cifar10, pickled):
    pixels, labels = write_cifar10(tmp_path, pickled=pickled)
    images = read_cifar10(tmp_path)
    np.testing.assert_array_equal(images.x_train, pixels[:20])
    np.testing.assert_array_equal(images.y_train, labels[:20])
    np.testing.assert_array_equal(images.x_test, pixels[20:])
    np.testing.assert_array_equal(images.y_test, labels[20:])
    if pickled:  # The inert reader sees what pickle sees.
        batch = pickle.loads((tmp_path / "test_batch").read_bytes(), encoding="bytes")
        np.testing.assert_array_equal(images.x_test.reshape(4, 3072), batch[b"data"])
        assert images.y_test.tolist() == batch[b"labels"]


def test_a_pickle_cannot_run_code(tmp_path, write_cifar10):
    write_cifar10(tmp_path, pickled=True)
    trace = tmp_path / "trace"
    (tmp_path / "test_batch").write_bytes(
        b"cos\nmkdir\n(U" + bytes([len(str(trace))]) + f"{trace}tR.".encode()
    )
    with pytest.raises(ValueError, match=r"test_batch: not a CIFAR-10 batch \(it names os.mkdir\)"):
        read_cifar10(tmp_path)
    assert not trace.exists()


def test_cut_off_and_missing_batches_are_named(tmp_path, write_cifar10):
    write_cifar10(tmp_path, pickled=True)
    path = tmp_path / "data_batch_2"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match="data_batch_2: not a CIFAR-10 batch"):
        read_cifar10(tmp_path)
    for number in range(1, 6):
        (tmp_path / f"data_batch_{number}").unlink()
    (tmp_path / "test_batch").unlink()
    write_cifar10(tmp_path)
    for raw in (b"", bytes(3072), bytes(3074)):
        (tmp_path / "data_batch_3.bin").write_bytes(raw)
        with pytest.raises(ValueError, match=rf"data_batch_3\.bin: corrupt CIFAR-10 batch: {len(raw)} bytes"):
            read_cifar10(tmp_path)
    (tmp_path / "test_batch.bin").unlink()
    assert missing_cifar10(tmp_path) == ["test_batch[.bin]"]
