from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.clients.training.cases import IMAGES, STACKABLE, ragged_works, torch_seeded
from torch import Tensor, nn

from hedgerow.clients import LocalWork, Trained, wrap
from hedgerow.clients.training import stack as stacks
from hedgerow.clients.training.loop import train_one
from hedgerow.clients.training.stack import chunk_size, node_bytes, split, train_stack, train_stacks
from hedgerow.clients.training.stacked_layers import stacked_layers
from hedgerow.tasks import build_model
from hedgerow.tasks.models import ResNet

# Of the start's norm: a few roundings a step, over the longest case's five steps.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def check(model, works: Sequence[LocalWork], stacked: Sequence[Trained]) -> None:
    """Hold a stack against the loop; all failures are told at once."""
    model = model.to(next(iter(works[0].start.values())).dtype)
    failures = []
    for node, (work, ours) in enumerate(zip(works, stacked, strict=True)):
        failures += _differences(f"node {node}", train_one(model, work), ours)
    assert not failures, "\n".join(failures)


def layers_of(model: nn.Module, form: str):
    layers = stacked_layers(model, 3) if form == "layers" else None
    if form == "layers" and layers is None:
        pytest.skip("has no stacked layers")
    return layers


def _differences(where: str, oracle: Trained, ours: Trained) -> list[str]:
    if list(ours.state) != list(oracle.state):
        return [f"{where}: names {list(ours.state)}, loop has {list(oracle.state)}"]
    failures = []
    pairs: Mapping[str, tuple[Tensor, Tensor]] = {
        **{key: (oracle.state[key], ours.state[key]) for key in oracle.state},
        "loss": (_double(oracle.mean_loss), _double(ours.mean_loss)),
    }
    for key, (expected, actual) in pairs.items():
        if not expected.numel() or not expected.is_floating_point():
            failures += [] if torch.equal(actual, expected) else [f"{where} {key}: {actual}, loop {expected}"]
            continue
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            failures.append(f"{where} {key}: {actual.shape} {actual.dtype}, loop {expected.shape}")
            continue
        error = float((actual - expected).norm() / expected.norm().clamp(min=1e-30))
        limit = TOLERANCE[next(iter(oracle.state.values())).dtype]
        if not error <= limit:
            failures.append(f"{where} {key}: relative error {error:.2e} > {limit:.0e}")
    return failures


def _double(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def _groups_and_norms() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(),
        nn.LayerNorm(4 * 8 * 8), nn.Linear(4 * 8 * 8, 10),
    )  # fmt: skip


def _every_known_layer() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, (3, 5), stride=(1, 2), padding=(1, 2)), nn.Tanh(), nn.MaxPool2d((3, 2)),
        nn.Sequential(nn.Conv2d(3, 4, 2, bias=False), nn.GELU(), nn.Dropout(0.0)),
        nn.Flatten(), nn.Linear(4 * 4 * 3, 7), nn.Sigmoid(), nn.Linear(7, 10, bias=False), nn.Identity(),
    )  # fmt: skip


def _frozen() -> nn.Module:
    model = build_model("lenet", IMAGES, 10, 0)
    for name in ("conv1.weight", "linear1.bias"):
        model.get_parameter(name).requires_grad_(False)
    return model


def _overlapping_windows() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.MaxPool2d(3, stride=2), nn.Flatten(), nn.Linear(3 * 6 * 6, 10)
    )


def _every_pooling() -> nn.Module:
    return nn.Sequential(
        nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False),
        nn.MaxPool2d(2, padding=1, ceil_mode=True, dilation=2), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(2 * 2, 10),
    )  # fmt: skip


CASES = {
    **{name: lambda name=name: build_model(name, IMAGES, 10, 0) for name in STACKABLE},
    "groups and norms": lambda: torch_seeded(_groups_and_norms),
    "every known layer": lambda: torch_seeded(_every_known_layer),
    "frozen": _frozen,
    "overlapping windows": lambda: torch_seeded(_overlapping_windows),
    "every pooling": lambda: torch_seeded(_every_pooling),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("form", ["layers", "vmap"])
def test_a_stack_of_padded_batches_and_different_steps_and_rates_equals_the_loop(name, dtype, form):
    model = CASES[name]().to(dtype)
    works = ragged_works(model, [(4, 7, 2, 1, 5), (3, 3), (6,), ()])
    check(CASES[name](), works, train_stack(model, works, layers=layers_of(model, form)))


def _normalised_features() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4, affine=False, momentum=0.3), nn.ReLU(),
        nn.BatchNorm2d(4, track_running_stats=False), nn.Flatten(), nn.Linear(4 * 7 * 7, 6),
        nn.BatchNorm1d(6, eps=1e-3), nn.Tanh(), nn.Linear(6, 10),
    )  # fmt: skip


NORMALISED = {
    "cnn4": lambda: build_model("cnn4", IMAGES, 10, 0),
    "features": lambda: torch_seeded(_normalised_features),
    "residual": lambda: torch_seeded(lambda: ResNet(1, 10, widths=(3, 4))),
    "factors": lambda: wrap(build_model("cnn4", IMAGES, 10, 0), variant="mud+bkd+aad", ratio=1 / 16),
    "products": lambda: wrap(build_model("cnn4", IMAGES, 10, 0), variant="mud+aad", ratio=1 / 16),
    "weights": lambda: wrap(build_model("cnn4", IMAGES, 10, 0), variant="para", ratio=1 / 16),
}


@pytest.mark.parametrize("name", NORMALISED)
@pytest.mark.parametrize("form", ["layers", "vmap"])
def test_a_stack_with_batch_statistics_equals_the_loop_and_counts_the_batches_of_each_node(name, form):
    model = NORMALISED[name]().double()
    works = ragged_works(model, [(5, 7, 5), (5, 7), (5,), ()])
    works[1] = LocalWork(works[0].start, works[1].x, works[1].y, works[1].batches, 0.05)
    trained = train_stack(model, works, layers=layers_of(model, form))
    check(NORMALISED[name](), works, trained)
    seen = [key for key in works[0].start if key.endswith("num_batches_tracked")]
    assert seen
    assert all(int(trained[0].state[key]) - int(works[0].start[key]) == 3 for key in seen)


@pytest.mark.parametrize("name", NORMALISED)
def test_stacks_of_nodes_in_groups_of_equal_batches_equal_the_loop(name):
    model = NORMALISED[name]().double()
    works = ragged_works(model, [(4, 4), (6, 2), (4,), (6, 2, 3), ()])
    check(NORMALISED[name](), works, train_stacks(model, works, max_nodes=3))


def test_nodes_share_what_stays_and_get_a_copy_back():
    model = NORMALISED["factors"]().double()
    (one, other) = ragged_works(model, [(4,), (4,)])
    fixed = {name for name, p in model.named_parameters() if not p.requires_grad}
    start = {key: one.start[key] if key in fixed else value for key, value in other.start.items()}
    works = [one, LocalWork(start, other.x, other.y, other.batches, other.lr)]
    trained = train_stack(model, works, layers=stacked_layers(model, 3))
    for work, ours in zip(works, trained, strict=True):
        assert not _differences("", train_one(model, work), ours)
        for key in fixed:
            ours.state[key].fill_(7)
    assert all(torch.equal(one.start[key], start[key]) for key in fixed)
    assert not any((one.start[key] == 7).all() for key in fixed if one.start[key].numel())


def test_batches_of_other_lengths_are_never_padded_where_statistics_are_of_a_batch():
    model = NORMALISED["cnn4"]()
    works = ragged_works(model, [(4, 4), (3, 4)])
    with pytest.raises(ValueError, match="must have one length for statistics over a batch"):
        train_stack(model, works, layers=stacked_layers(model, 3))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, dilation=2), nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), nn.MaxPool2d(2, return_indices=True),
        nn.LPPool2d(2, 2), nn.GroupNorm(2, 4), nn.Linear(4, 4), nn.Flatten(2), nn.Dropout(0.5),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_stacked_layers_do_not_know_has_none(layer):
    assert stacked_layers(nn.Sequential(layer), 3) is None


def test_the_built_in_models_without_batch_statistics_have_stacked_layers_unless_hooked():
    assert all(stacked_layers(build_model(name, IMAGES, 10, 0), 3) for name in STACKABLE)
    model = build_model("mlp", IMAGES, 10, 0)
    model.linear1.register_forward_hook(lambda *_: None)
    assert stacked_layers(model, 3) is None


def test_equal_maxima_pass_their_gradient_to_the_first_as_in_torch():
    x = torch.randint(0, 2, (3, 2, 6, 6, 5), generator=torch.Generator().manual_seed(0)).float()
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    pooled = stacked_layers(nn.Sequential(nn.MaxPool2d(2)), 3)({}, ours.movedim(-1, 1))
    expected = nn.functional.max_pool2d(theirs.permute(0, 4, 1, 2, 3).flatten(0, 1), 2)
    weights = torch.arange(expected.numel(), dtype=torch.float32).view(expected.shape)
    (pooled.flatten(0, 1) * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)


def test_nodes_may_hold_data_of_their_own():
    model = build_model("mlp", IMAGES, 10, 0)
    shared = ragged_works(model, [(3, 3), (3, 3)])
    own = [LocalWork(w.start, w.x.clone(), w.y.flip(0), w.batches, w.lr) for w in shared]
    stacked = train_stack(model, own, layers=stacked_layers(model, 3))
    failures = [
        _differences(str(i), train_one(model, w), s)
        for i, (w, s) in enumerate(zip(own, stacked, strict=True))
    ]
    assert not any(failures), failures


@settings(deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 4), max_size=4).map(tuple), min_size=1, max_size=12),
    size=st.integers(1, 5),
    pad=st.booleans(),
)
def test_chunks_hold_every_node_once_by_falling_steps_and_without_padding_batches_of_one_length(
    lengths, size, pad
):
    x = torch.zeros(1, 1)
    works = [LocalWork({}, x, x, [np.zeros(n, np.int64) for n in node], 0.1) for node in lengths]
    chunks = split(works, size, pad=pad)
    assert sorted(i for chunk in chunks for i in chunk) == list(range(len(lengths)))
    for chunk in chunks:
        steps = [len(lengths[i]) for i in chunk]
        assert len(chunk) <= size
        assert steps == sorted(steps, reverse=True)
        longest = lengths[chunk[0]]
        assert pad or all(lengths[i] == longest[: len(lengths[i])] for i in chunk)


def test_a_node_s_bytes_count_parameters_outputs_and_patches():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 5))
    estimate = node_bytes(model, torch.zeros(1, 1, 4, 4), batch_size=3)
    parameters = 2 * 9 + 2 + 5 * 8 + 5
    outputs = 8 + 8 + 5
    patches = 9 * 4
    assert estimate == 4 * (4 * parameters + 3 * (16 + 3 * outputs + 2 * patches))


def test_on_cuda_a_stack_fills_four_fifths_of_free_memory_or_has_max_nodes(monkeypatch):
    monkeypatch.setattr(stacks, "_free_bytes", lambda device: 1000)
    device = torch.device("cuda")
    assert chunk_size(100, 50, device) == 16
    assert chunk_size(10, 50, device) == 10
    assert chunk_size(10, 5000, device) == 1
    assert chunk_size(100, 50, device, max_nodes=40) == 40
    assert chunk_size(1000, 1, torch.device("cpu"), max_nodes=3) == 3


def test_the_split_of_a_cuda_device_is_told_to_the_user_once(monkeypatch, caplog):
    monkeypatch.setattr(stacks, "_free_bytes", lambda device: 2**30)
    told = []
    monkeypatch.setattr(stacks, "log", lambda level, text, *values: told.append(text % values))
    stacks._announce.cache_clear()
    for _ in range(3):
        chunk_size(1000, 2**23, torch.device("cuda"))
    assert told == ["Local training on cuda: 1000 nodes, at most 102 in one stack (8.0 MiB each)"]
