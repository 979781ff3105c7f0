import gzip

import numpy as np
import pytest

from hedgerow.tasks.image_files import missing_idx, read_idx, read_idx_set


@pytest.mark.parametrize("packed", [False, True])
def test_a_set_is_read_as_written_plain_or_packed(tmp_path, write_idx_set, packed):
    x_train, y_train, x_test, y_test = write_idx_set(tmp_path, packed=packed)
    images = read_idx_set(tmp_path)
    np.testing.assert_array_equal(images.x_train, x_train[:, None])
    np.testing.assert_array_equal(images.y_train, y_train)
    np.testing.assert_array_equal(images.x_test, x_test[:, None])
    np.testing.assert_array_equal(images.y_test, y_test)


def test_missing_files_are_named_and_images_without_their_labels_are_an_error(tmp_path, write_idx_set):
    write_idx_set(tmp_path)
    path = tmp_path / "t10k-labels-idx1-ubyte"
    path.unlink()
    assert missing_idx(tmp_path) == ["t10k-labels-idx1-ubyte[.gz]"]
    path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 1, 7]))
    with pytest.raises(ValueError, match="10 images, but 1 labels"):
        read_idx_set(tmp_path)


@pytest.mark.parametrize(
    ("name", "raw", "reason"),
    [
        ("labels", b"", "not an IDX file: it begins with , not 00000801"),
        ("labels", bytes([0, 0, 8, 3]), "begins with 00000803"),
        ("labels", bytes([0, 0, 13, 1]), "begins with 00000d01"),
        ("labels", bytes([0, 0, 8, 1, 0, 0]), "6 bytes, the header alone has 8"),
        ("labels", bytes([0, 0, 8, 1, 0, 0, 0, 3, 1, 2]), "10 bytes, its header says 11"),
        ("labels", bytes([0, 0, 8, 1, 0, 0, 0, 1, 1, 2]), "10 bytes, its header says 9"),
        ("labels.gz", b"no gzip at all", "corrupt gzip file"),
        ("labels.gz", gzip.compress(bytes(range(200)), mtime=0)[:-9], "corrupt gzip file"),
    ],
)
def test_a_corrupt_file_is_an_error_that_says_where_and_why(tmp_path, name, raw, reason):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ValueError, match=rf"{name}: .*{reason}"):
        read_idx(tmp_path / name, axes=1)
