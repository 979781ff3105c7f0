"""Nodes' shares of a test set are the test set."""

import pytest
import torch

from hedgerow.tasks import federated


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
