"""Regression data: Example 1 by seed, pairs of classes, LIBSVM files; each dealt to nodes."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import dump_svmlight_file

from hedgerow.tasks import LinearData, linear_part, sparse_truth
from hedgerow.tasks.regression import binary_images, binary_libsvm

SMALL = LinearData(n=40, s=5, samples=(10, 20))


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 60), share=st.floats(0.01, 1))
def test_the_truth_has_s_nonzeros_between_a_half_and_two_of_both_signs(
    seed: int, n: int, share: float
) -> None:
    s = max(1, int(share * n))
    truth = sparse_truth(LinearData(n=n, s=s), seed)
    magnitudes = np.abs(truth[truth != 0])
    assert magnitudes.size == s
    assert 0.5 <= magnitudes.min() <= magnitudes.max() <= 2
    assert 30 < (sparse_truth(LinearData(n=200, s=100), 0) > 0).sum() < 70


def test_a_nodes_data_depend_on_the_seed_and_the_node_alone() -> None:
    (A, b), (again, same) = linear_part(SMALL, 3, 7), linear_part(SMALL, 3, 7)
    assert np.array_equal(A, again)
    assert np.array_equal(b, same)
    for node, seed in ((2, 7), (3, 8)):
        other, _ = linear_part(SMALL, node, seed)
        assert other.shape != A.shape or not np.array_equal(other, A)
    counts = {len(linear_part(LinearData(4, 1, samples=(2, 5)), node, 0)[1]) for node in range(60)}
    assert counts == {2, 3, 4, 5}


def test_targets_are_the_truth_and_noise_of_its_deviation() -> None:
    data = LinearData(n=20, s=5, noise=0.5, samples=(20_000, 20_000))
    A, b = linear_part(data, 0, 1)
    residuals = b - A @ sparse_truth(data, 1)
    assert residuals.std() == pytest.approx(0.5, rel=0.02)
    assert A.std() == pytest.approx(1, rel=0.01)


# Pairs of classes


def test_images_of_two_classes_are_dealt_by_the_seed_without_remainder() -> None:
    parts = binary_images("mnist-5k", (3, 8), 7, 0)
    assert sum(len(y) for _, y in parts) == 800
    assert {len(y) for _, y in parts} == {114, 115}
    assert sum(y.sum() for _, y in parts) == 400
    x = np.concatenate([x for x, _ in parts])
    assert x.shape == (800, 784)
    assert (x.min(), x.max()) == (0, 1)
    assert len(np.unique(x, axis=0)) > 790
    first, same, other = (binary_images("mnist-5k", (3, 8), 4, seed)[0][1] for seed in (1, 1, 2))
    assert np.array_equal(first, same)
    assert not np.array_equal(first, other)
    for classes in ((3, 3), (0, 10), (-1, 2)):
        with pytest.raises(ValueError, match="must be two of 0 to 9"):
            binary_images("mnist-5k", classes, 2, 0)


def libsvm(folder: Path, y: list[float]) -> Path:
    x = np.random.default_rng(0).integers(0, 3, (len(y), 6)).astype(float)
    path = folder / "data.svm"
    dump_svmlight_file(x, y, str(path))
    return path


def test_a_libsvm_file_becomes_sparse_parts_with_labels_zero_and_one(tmp_path: Path) -> None:
    parts = binary_libsvm(libsvm(tmp_path, [-1, 1, 1, -1, 1]), 2, 0, n_features=9)
    assert [x.shape for x, _ in parts] == [(3, 9), (2, 9)]
    assert sorted(np.concatenate([y for _, y in parts])) == [0, 0, 1, 1, 1]


def test_what_cannot_be_dealt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_nodes must be an integer from 1 to 5 samples, got 6"):
        binary_libsvm(libsvm(tmp_path, [-1, 1, 1, -1, 1]), 6, 0)
    with pytest.raises(ValueError, match="must be a file with two labels"):
        binary_libsvm(libsvm(tmp_path, [1, 2, 3]), 1, 0)
    with pytest.raises(ValueError, match="must be an existing file"):
        binary_libsvm(tmp_path / "nothing", 1, 0)
