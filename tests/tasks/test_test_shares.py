"""Nodes' shares of a test set are the test set."""

import numpy as np
import pytest
import torch

from hedgerow.tasks import FederatedData, federated
from hedgerow.tasks.partitions import deal_alike


@pytest.mark.parametrize("nodes", [1, 3, 7, 1000])
def test_the_shares_are_disjoint_and_together_the_test_set(nodes: int) -> None:
    data = federated("mnist-5k", "iid", nodes, 0)
    shares = [data.test_share(i) for i in range(nodes)]
    assert sum(len(y) for _, y in shares) == len(data.y_test)
    rows = torch.cat([x.flatten(1) for x, _ in shares])
    order = torch.cat([torch.arange(len(data.y_test))[i::nodes] for i in range(nodes)])
    assert torch.equal(rows, data.x_test[order].flatten(1))


def test_more_nodes_than_test_samples_have_one_each() -> None:
    data = federated("mnist-5k", "with-replacement(5)", 1003, 0)
    assert {len(data.test_share(i)[1]) for i in range(1003)} == {1}


def classes(labels: torch.Tensor) -> np.ndarray:
    return np.bincount(labels.numpy(), minlength=10)


@pytest.mark.parametrize("seed", range(5))
def test_personal_shares_are_disjoint_and_have_the_classes_of_the_training_samples(seed: int) -> None:
    data = federated("mnist-5k", "dirichlet(0.1)", 20, seed)
    shares = [data.personal_test_share(i) for i in range(20)]
    of_class = classes(data.y_test)
    assert np.array_equal(sum(classes(y) for _, y in shares), of_class)
    rows = {tuple(row.tolist()) for x, _ in shares for row in x.flatten(1)}
    assert len(rows) == len({tuple(row.tolist()) for row in data.x_test.flatten(1)})
    trained = np.stack([classes(data.samples(i)[1]) for i in range(20)])
    for i, (_, y) in enumerate(shares):
        assert np.all(np.abs(classes(y) - of_class * trained[i] / trained.sum(axis=0)) < 1)
    again = FederatedData(**{name: getattr(data, name) for name in FIELDS}, seed=seed)
    other = FederatedData(**{name: getattr(data, name) for name in FIELDS}, seed=seed + 1)
    assert all(torch.equal(again.personal_test_share(i)[0], shares[i][0]) for i in range(20))
    assert any(not torch.equal(other.personal_test_share(i)[0], shares[i][0]) for i in range(20))


FIELDS = ("dataset", "x", "y", "x_test", "y_test", "parts")


def test_every_node_has_a_personal_share() -> None:
    data = federated("mnist-5k", "iid", 4000, 0)
    for i in (0, 1, 17, 3999):
        _, own = data.samples(i)
        _, y = data.personal_test_share(i)
        assert y.tolist() == own.tolist()  # one sample each
    # Nodes that draw from the whole set have its classes.
    drawn = federated("mnist-5k", "with-replacement(5)", 30, 0)
    for one, other in zip(drawn.personal_test_share(3), drawn.test_share(3), strict=True):
        assert torch.equal(one, other)


def test_classes_that_only_one_side_has_are_left_out() -> None:
    labels, others = np.array([0, 0, 1, 1, 5, 5]), np.array([1, 1, 1, 1, 7, 0])
    parts = [np.array([0, 1, 2]), np.array([3]), np.array([4, 5])]
    shares = deal_alike(parts, labels, others, 0)
    assert [sorted(others[share]) for share in shares] == [[0, 1, 1], [1, 1], []]
    few = deal_alike([np.array([0, 1]), np.array([2, 3, 4]), np.array([5])], np.zeros(6, int), np.zeros(1), 0)
    assert [share.tolist() for share in few] == [[0], [0], [0]]
