"""Models of many nodes as the rows of one tensor."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hedgerow.clients.sent_models import state_rows
from hedgerow.clients.training.work import StackRow


def stack(nodes: int) -> dict[str, Tensor]:
    return {
        "w": torch.randn(nodes, 2, 3),
        "empty": torch.zeros(nodes, 0),
        "scale": torch.randn(nodes),
        "frozen": torch.randn(1, 4).expand(nodes, 4),
        "batches": torch.arange(nodes),
    }


def test_each_state_is_a_row_whatever_stacks_they_lie_in_and_in_which_order() -> None:
    first, second = stack(4), stack(3)
    alone = {key: value[0].clone() for key, value in stack(1).items()}
    states: list[Mapping[str, Tensor]] = [StackRow(first, row, {"frozen"}) for row in (2, 0)]
    states += [alone, *(StackRow(second, row) for row in range(3)), StackRow(first, 3), alone]
    keys = ["frozen", "w", "empty", "batches", "scale"]
    expected = torch.stack([torch.cat([state[key].flatten().float() for key in keys]) for state in states])
    assert torch.equal(state_rows(states, keys), expected)


def test_one_double_makes_the_rows_double() -> None:
    states = [{"a": torch.tensor([0.1]), "b": torch.tensor([0.1], dtype=torch.float64)}]
    assert state_rows(states, ["a", "b"]).dtype == torch.float64
    assert state_rows(states, ["a"]).dtype == torch.float32
