import gzip

import numpy as np
import pytest

from hedgerow.tasks.idx import missing_idx, read_idx, read_idx_set


@pytest.mark.parametrize("packed", [False, True])
def test_a_set_is_read_as_written_plain_or_packed(tmp_path, write_idx_set, packed):
    x_train, y_train, x_test, y_test = write_idx_set(tmp_path, packed=packed)

    images = read_idx_set(tmp_path)

    np.testing.assert_array_equal(images.x_train, x_train[:, None])
    np.testing.assert_array_equal(images.y_train, y_train)
    np.testing.assert_array_equal(images.x_test, x_test[:, None])
    np.testing.assert_array_equal(images.y_test, y_test)


def test_missing_files_are_named(tmp_path, write_idx_set):
    write_idx_set(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()

    assert missing_idx(tmp_path) == ["t10k-labels-idx1-ubyte[.gz]"]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "not an IDX file: it begins with , not 00000801"),
        (bytes([0, 0, 8, 3]), "begins with 00000803"),
        (bytes([0, 0, 13, 1]), "begins with 00000d01"),
        (bytes([0, 0, 8, 1, 0, 0]), "6 bytes, the header alone has 8"),
        (bytes([0, 0, 8, 1, 0, 0, 0, 3, 1, 2]), "10 bytes, its header says 11"),
        (bytes([0, 0, 8, 1, 0, 0, 0, 1, 1, 2]), "10 bytes, its header says 9"),
    ],
)
def test_a_corrupt_file_is_an_error_that_says_where_and_why(tmp_path, raw, reason):
    path = tmp_path / "labels"
    path.write_bytes(raw)

    with pytest.raises(ValueError, match=rf"labels: .*{reason}"):
        read_idx(path, axes=1)


@pytest.mark.parametrize("raw", [b"no gzip at all", gzip.compress(bytes(range(200)), mtime=0)[:-9]])
def test_a_corrupt_packed_file_is_an_error(tmp_path, raw):
    path = tmp_path / "labels.gz"
    path.write_bytes(raw)

    with pytest.raises(ValueError, match=r"labels\.gz: corrupt gzip file"):
        read_idx(path, axes=1)


def test_images_without_their_labels_are_an_error(tmp_path, write_idx_set):
    write_idx_set(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 1, 7]))

    with pytest.raises(ValueError, match="10 images, but 1 labels"):
        read_idx_set(tmp_path)
