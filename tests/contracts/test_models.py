"""What a model may hold, in every method that averages: all dtypes that can travel, integers bit for bit."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from tests.exercises.test_objects_of_ones_own import AVERAGING, CONFIG, NODES, OPTIONS, PARTS, X, Y
from torch import Tensor, nn

from hedgerow.clients import LocalTask
from hedgerow.sim import InProcessGrid, flower_identity
from hedgerow.wire import Layout, to_record, view

LARGE = [2038074743, 16777217, -(2**63), 2**63 - 1]
every_averaging_method = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in AVERAGING]
)


class Mixed(nn.Module):
    """Linear layers of some dtypes, with buffers of others: constants, and a counter of forward passes."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [8, 12, 12, 3]
        self.layers = nn.ModuleList(
            nn.Linear(n, m, dtype=dtype) for n, m, dtype in zip(sizes[:-1], sizes[1:], dtypes, strict=True)
        )
        self.register_buffer("hashes", torch.tensor(LARGE))
        self.register_buffer("bytes", torch.arange(256, dtype=torch.uint8))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("passes", torch.tensor(2**40))
        self.passes: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        for layer in self.layers:
            x = layer(torch.relu(x).to(layer.weight.dtype))  # type: ignore[operator]
        return x.float()


DTYPES = {
    "bf16": [torch.bfloat16] * 3,
    "float16": [torch.float16] * 3,
    "mixed": [torch.bfloat16, torch.float32, torch.float16],
    "double": [torch.float32, torch.float64, torch.bfloat16],
}


def ended(name: str, model: nn.Module, rounds: int = 2, **options: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return the arrays after a run of a method, and its rounds."""
    make, client = AVERAGING[name]
    if isinstance(make, partial) and make.args and isinstance(make.args[0], nn.Module):
        make = partial(make.func, model, **make.keywords)
    ends: list[Any] = []
    strategy = make(**OPTIONS, on_round_end=[ends.append], **options)

    def task(context: Any) -> LocalTask:
        return LocalTask(model, X, Y, PARTS[int(context.node_config["partition-id"])])

    start = to_record({key: value.clone() for key, value in model.state_dict().items()})
    with InProcessGrid(client(task), NODES) as grid, flower_identity(1):
        result = strategy.start(grid, start, num_rounds=rounds, train_config=ConfigRecord(CONFIG))
    return {key: view(array) for key, array in result.arrays.items()}, ends


@pytest.mark.parametrize("kind", DTYPES)
@every_averaging_method
def test_parameters_of_any_float_are_trained_and_integers_keep_every_bit(name: str, kind: str) -> None:
    model = Mixed(*DTYPES[kind])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    arrays, ends = ended(name, model)
    assert [end.accepted for end in ends[1:]] == [end.sent for end in ends[1:]]
    for key, value in before.items():
        assert arrays[key].shape == tuple(value.shape)
        if not value.is_floating_point():
            assert arrays[key].dtype == value.numpy().dtype
        if key in ("hashes", "bytes", "mask"):
            np.testing.assert_array_equal(arrays[key], value.numpy())
    assert 2**40 < arrays["passes"] < 2**40 + 1000
    trained = [key for key in before if key.endswith("weight")]
    assert all(np.isfinite(arrays[key]).all() for key in trained)
    assert any(not np.array_equal(arrays[key], before[key].float().numpy()) for key in trained)


def state(key: str, value: Any) -> dict[str, Any]:
    return {"w": torch.zeros(3), key: value}


REFUSED: dict[str, Callable[[], Any]] = {
    "complex64": lambda: torch.zeros(2, dtype=torch.complex64),
    "sparse_coo": lambda: torch.eye(2).to_sparse(),
    "qint8": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "meta": lambda: torch.zeros(2, device="meta"),
    "dict": lambda: {"extra": 1},
    "complex128": lambda: np.zeros(2, np.complex128),
    "<U1": lambda: np.array(["a"]),
}


@pytest.mark.filterwarnings("ignore:.*quantiz.*")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_travel_is_one_error_that_names_the_array_and_the_remedy(kind: str) -> None:
    with pytest.raises(ValueError, match=rf"'table' of the model must be .*{kind}.*persistent=False"):
        Layout.of(to_record(state("table", REFUSED[kind]())))
