"""What a model may hold, in every method that averages: all dtypes that can travel, integers bit for bit."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from tests.strategies.averaging import AVERAGING, CONFIG, NODES, OPTIONS, PARTS, X, Y
from tests.strategies.recording_grid import RecordingGrid
from torch import Tensor, nn

from hedgerow.clients import LocalTask, frozen_part
from hedgerow.clients.training.stack import node_bytes
from hedgerow.sim import InProcessGrid, flower_identity
from hedgerow.strategies import TooFewRepliesError
from hedgerow.strategies.fedmud import UP
from hedgerow.tasks import forward_macs
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


# Frozen arrays


class Frozen(nn.Module):
    """A frozen table and layer, constant buffers (one of them with -inf), and layers that are trained."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(40, 8).requires_grad_(False)
        self.fixed = nn.Linear(8, 8, dtype=torch.bfloat16).requires_grad_(False)
        self.first, self.second, self.head = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 3)
        self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1))
        self.register_buffer("hashes", torch.tensor(LARGE))
        self.register_buffer("passes", torch.zeros(()))
        self.passes: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        x = x + self.table(x[:, 0].long().abs() % 40)
        x = torch.relu(self.first(self.fixed(x.bfloat16()).float()))
        return self.head(torch.relu(self.second(x)))  # type: ignore[no-any-return]


HOME = {"table.weight", "fixed.weight", "fixed.bias", "mask", "hashes"}


def keys_in(content: Any) -> set[str]:
    """Return the keys of all arrays of a message, without a version in front or a factor behind."""
    found = {key for record in content.array_records.values() for key in record}
    return {key.split("/")[-1].split(":")[0] for key in found}


class Watched(RecordingGrid):
    """An engine that records which arrays were sent: the keys of trained ones, the number of frozen ones."""

    @property
    def keys(self) -> set[str]:
        return {
            key
            for _, _, content in self.sent + self.replies
            for key in keys_in(RecordDict({k: v for k, v in content.items() if k != "frozen"}))
        }

    @property
    def frozen(self) -> int:
        return sum("frozen" in content for _, _, content in self.sent)


def played(
    name: str, models: Callable[[], nn.Module], server: nn.Module | None = None, **options: Any
) -> tuple[Any, Any, Any]:
    """Return strategy, engine, arrays and rounds of a run of nodes with these models."""
    server = server or models()
    make, client = AVERAGING[name]
    if isinstance(make, partial) and make.args and isinstance(make.args[0], nn.Module):
        make = partial(make.func, server, **make.keywords)
    ends: list[Any] = []
    strategy = make(**{**OPTIONS, "fraction_evaluate": 1.0}, on_round_end=[ends.append], **options)
    own = {i: models() for i in range(NODES)}

    def task(context: Any) -> LocalTask:
        i = int(context.node_config["partition-id"])
        return LocalTask(own[i], X, Y, PARTS[i])

    start = to_record({key: value.clone() for key, value in server.state_dict().items()})
    with Watched(client(task, "loop"), NODES) as grid, flower_identity(1):
        result = strategy.start(grid, start, num_rounds=2, train_config=ConfigRecord(CONFIG))
    return strategy, grid, ({key: view(array) for key, array in result.arrays.items()}, ends)


@every_averaging_method
def test_no_frozen_key_is_in_any_message_of_any_method(name: str) -> None:
    strategy, grid, (arrays, ends) = played(name, Frozen)
    assert [end.accepted for end in ends[1:]] == [end.sent for end in ends[1:]]
    assert not grid.keys & HOME
    assert not grid.frozen
    assert {"head.weight", "passes"} <= grid.keys
    before = Frozen().state_dict()
    assert list(arrays) == list(before)
    for key in HOME:
        np.testing.assert_array_equal(
            arrays[key], before[key].float().numpy() if "fixed" in key else before[key].numpy()
        )
    assert (
        strategy.federation.num_parameters
        == sum(p.numel() for p in Frozen().parameters() if p.requires_grad) + 1
    )


@pytest.mark.parametrize("name", ["SD-FEEL", "ef-fedavg", "FedMUD"])
def test_nodes_that_lack_the_frozen_arrays_are_sent_them_once(name: str) -> None:
    # Weights of a seed that no other test's process has verified.
    seed = 100 + list(AVERAGING).index(name)
    _, grid, (arrays, ends) = played(name, partial(Frozen, 7), Frozen(seed))
    assert grid.frozen == NODES
    assert ends[-1].accepted == ends[-1].sent
    assert not grid.keys & HOME
    np.testing.assert_array_equal(arrays["table.weight"], Frozen(seed).table.weight.numpy())


def test_a_run_that_goes_on_has_its_frozen_arrays() -> None:
    strategy, _, (arrays, _) = played("FedAvg", Frozen)
    make, _ = AVERAGING["FedAvg"]
    again = make(**OPTIONS)
    again.load_state_dict(strategy.state_dict())
    record = again.current_arrays()
    assert list(record) == list(arrays)
    assert all(np.array_equal(view(record[key]), arrays[key]) for key in arrays)


class Counting(Frozen):
    """A model that changes a constant in its second pass."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.passes > 1:
            self.hashes += 1  # type: ignore[operator]
        return super().forward(x)


def test_training_that_changes_what_stays_at_home_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TooFewRepliesError), caplog.at_level("INFO", "flwr"):
        played("FedAvg", Counting, max_repeats=0)
    assert "training must leave 'hashes' as it is" in caplog.text
    _, grid, _ = played("FedAvg", Counting, frozen=HOME - {"hashes"})
    assert "hashes" in grid.keys


class Large(Frozen):
    """The same with larger layers that are trained, so that headers are small beside them."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.first, self.second, self.head = nn.Linear(8, 300), nn.Linear(300, 300), nn.Linear(300, 3)


CODECS = ["topk(0.05)", "topk(500)", "randk(0.1)", "sign", "ternary"]
HEADER = 128  # Of an array, as NumPy writes it.


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in AVERAGING] + [("ef-fedavg", {"compressor": codec}) for codec in CODECS],
)
def test_payload_and_nominal_bits_agree_beside_a_frozen_part(name: str, options: dict[str, Any]) -> None:
    strategy, _, _ = played(name, Large, **options)
    link = next(
        link
        for link in strategy.ledger.by_link()
        if link in ("client->edge", "client->cloud", "worker->server", UP)
    )
    total = strategy.ledger.total(link)
    bits = total.nominal_bits
    arrays = 40 * total.messages  # At most, with a key each.
    assert 0.98 * bits <= 8 * total.payload_bytes <= 1.02 * bits + 8 * arrays * (HEADER + 20)


@pytest.mark.parametrize("name", ["SD-FEEL", "FedAvg", "fedavg", "fedprox"])
def test_an_engine_that_answers_in_columns_ends_with_the_same_bits(name: str) -> None:
    columns, _ = ended(name, Frozen())
    _, _, (messages, _) = played(name, Frozen)
    assert all(np.array_equal(columns[key], messages[key]) for key in messages)


@pytest.mark.parametrize("name", ["FedAvg", "fedavg", "FedMUD", "FedMUD's FedAvg"])
def test_secure_sums_leave_frozen_arrays_at_home(name: str) -> None:
    sync = {"sync": "dense"} if name == "FedMUD" else {}
    _, grid, (arrays, ends) = played(name, Frozen, secure_sum=True, **sync)
    assert [end.accepted for end in ends[1:]] == [end.sent for end in ends[1:]]
    assert not grid.keys & HOME
    plain = played(name, Frozen)[2][0]
    # A sum clips each number, also the large counter.
    assert all(np.allclose(arrays[key], plain[key], atol=1e-4) for key in plain if key != "passes")


@pytest.mark.parametrize("trained", [False, True])
def test_entries_that_share_memory_are_an_error_that_names_the_array(trained: bool) -> None:
    model = nn.Linear(3, 2)
    shared = torch.ones(1).expand(4)
    if trained:
        model.shared = nn.Parameter(shared)
    else:
        model.register_buffer("shared", shared)
    with pytest.raises(ValueError, match=r"'shared' of the model must have memory for each entry.*clone it"):
        frozen_part(model, torch.ones(2, 3))


def test_a_model_that_takes_no_single_sample_is_counted_and_trained() -> None:
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(norm, nn.Tanh()), nn.Linear(4, 2))
    assert forward_macs(model, (3,)) == 3 * 4 + 4 * 2
    assert node_bytes(model, torch.zeros(1, 3), 2) > 0
