import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.clients.training.cases import IMAGES, STACKABLE, ragged_works, torch_seeded
from torch import nn

from hedgerow.clients import LocalWork, local_sgd
from hedgerow.clients.training import stack as stacking
from hedgerow.clients.training.stack import stackable
from hedgerow.tasks import build_model
from hedgerow.tasks.threads import map_on_threads

LENGTHS = [(4, 4), (2, 4, 1), (), (4, 4), (4,), (2, 4, 1), (4, 4, 4)]


def _same_bits(ours, theirs) -> bool:
    return all(
        a.mean_loss == b.mean_loss and all(torch.equal(a.state[key], b.state[key]) for key in b.state)
        for a, b in zip(ours, theirs, strict=True)
    )


def _work_of(model: nn.Module, lengths) -> list[LocalWork]:
    """Return work on a model that takes what the small one takes."""
    start = {key: value.clone() for key, value in model.state_dict().items()}
    return [LocalWork(start, w.x, w.y, w.batches, w.lr) for w in ragged_works(_small(), lengths)]


def _small() -> nn.Module:
    return build_model("logistic", IMAGES, 10, 0)


@pytest.mark.parametrize("name", STACKABLE)
def test_all_modes_agree_and_neither_chunks_nor_neighbours_change_a_bit_of_a_stack(name):
    model = build_model(name, IMAGES, 10, 0)
    works = ragged_works(model, LENGTHS)
    loop, stack = (local_sgd(model, works, mode=mode) for mode in ("loop", "stack"))
    worst = max(
        (a.state[k] - b.state[k]).abs().max() for a, b in zip(loop, stack, strict=True) for k in a.state
    )
    assert worst < 1e-6
    assert np.allclose([a.mean_loss for a in loop], [b.mean_loss for b in stack], rtol=1e-6)
    assert _same_bits(local_sgd(model, works, mode="stack", max_nodes=2), stack)
    assert _same_bits([local_sgd(model, [work], mode="stack")[0] for work in works], stack)


@pytest.mark.parametrize("mode", ["loop", "stack"])
def test_the_step_is_that_of_sgd(mode):
    model = _small()
    (work,) = ragged_works(model, [(5, 5, 3)])
    (trained,) = local_sgd(model, [work], mode=mode)
    w, b = (work.start[key].double() for key in ("linear.weight", "linear.bias"))
    for batch in work.batches:
        x = work.x[torch.as_tensor(batch)].flatten(1).double()
        residual = torch.softmax(x @ w.T + b, 1) - nn.functional.one_hot(work.y[torch.as_tensor(batch)], 10)
        to_w, to_b = residual.T @ x / len(batch), residual.mean(0)
        w, b = w - work.lr * to_w, b - work.lr * to_b
    assert torch.allclose(trained.state["linear.weight"].double(), w, atol=1e-6)
    assert torch.allclose(trained.state["linear.bias"].double(), b, atol=1e-6)


@pytest.mark.parametrize("mode", ["loop", "stack", "auto"])
def test_no_step_returns_the_start_and_results_share_nothing_with_it(mode):
    model = _small()
    works = ragged_works(model, [(3, 3), (3,), ()])
    before = [{key: value.clone() for key, value in work.start.items()} for work in works]
    found = local_sgd(model, works, mode=mode)
    assert found[2].mean_loss == 0
    assert all(torch.equal(found[2].state[key], works[2].start[key]) for key in works[2].start)
    for trained in found:
        for value in trained.state.values():
            value.fill_(7)
    assert all(torch.equal(w.start[key], b[key]) for w, b in zip(works, before, strict=True) for key in b)


@pytest.mark.parametrize("mode", ["loop", "stack"])
def test_frozen_parameters_stay(mode):
    model = build_model("mlp", IMAGES, 10, 0)
    model.linear1.requires_grad_(False)
    works = ragged_works(model, [(3, 3), (3,)])
    for work, trained in zip(works, local_sgd(model, works, mode=mode), strict=True):
        assert torch.equal(trained.state["linear1.weight"], work.start["linear1.weight"])
        assert not torch.equal(trained.state["linear2.weight"], work.start["linear2.weight"])


@pytest.mark.parametrize("mode", ["loop", "stack"])
def test_nothing_global_is_changed(mode):
    model = build_model("lenet", IMAGES, 10, 0)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    local_sgd(model, ragged_works(model, LENGTHS), mode=mode)
    seen = []
    fresh = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    fresh.start()
    fresh.join()
    assert torch.equal(torch.get_rng_state(), state)
    assert (torch.get_num_threads(), *seen) == (threads, threads)


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 10), nn.Linear(10, 10), nn.Linear(10, 10))
    model[3].weight = model[2].weight
    return model


REFUSED = {
    "averages over all earlier batches": lambda: nn.Sequential(
        nn.BatchNorm2d(1, momentum=None), nn.Flatten(), nn.Linear(256, 10)
    ),
    "draws dropout": lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(256, 10)),
    "shared between layers": _tied,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_stack_is_refused_with_the_reason_and_loops_under_auto(reason):
    model = torch_seeded(REFUSED[reason])
    works = _work_of(model, [(4, 4), (4,)])
    assert reason in stackable(model)
    with pytest.raises(ValueError, match=f"(?s)mode must be 'loop' here, got 'stack': .*{reason}"):
        local_sgd(model, works, mode="stack")
    assert len(local_sgd(model, works)) == 2


class Noisy(nn.Module):
    """Draws where no layer tells: the order of the nodes decides what each one gets."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(256, 10)

    def forward(self, x):
        return self.linear(x.flatten(1) + torch.randn(x.shape[0], 256))


def test_a_model_that_draws_loops_in_the_order_of_the_nodes():
    model = torch_seeded(Noisy)
    works = _work_of(model, LENGTHS)
    runs = [torch_seeded(lambda: local_sgd(model, works)) for _ in range(3)]
    assert _same_bits(runs[1], runs[0])
    assert _same_bits(runs[2], runs[0])


class Viewing(nn.Module):
    """The network of PyTorch's tutorial, which calls ``view`` on its feature maps."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 5)
        self.linear = nn.Linear(6 * 6 * 6, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(nn.functional.relu(self.conv(x)), 2)
        return self.linear(x.view(-1, 6 * 6 * 6))


@pytest.mark.parametrize("mode", ["loop", "auto"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_model_may_rely_on_the_layout_of_its_feature_maps(mode, nodes):
    model = torch_seeded(Viewing)
    works = ragged_works(model, [(4, 4)] * nodes)
    trained = local_sgd(model, works, mode=mode)
    assert all(torch.isfinite(each.state["conv.weight"]).all() for each in trained)
    assert not any(
        torch.equal(each.state["conv.weight"], work.start["conv.weight"])
        for each, work in zip(trained, works, strict=True)
    )


@pytest.mark.parametrize(("name", "shape"), [("lenet", (3, 16, 16)), ("cnn-431k", (1, 28, 28))])
def test_auto_loops_networks_that_lie_channels_last(name, shape):
    model = build_model(name, shape, 10, 0)
    works = ragged_works(model, LENGTHS, shape)
    assert _same_bits(local_sgd(model, works), local_sgd(model, works, mode="loop"))


class Branching(nn.Module):
    """A flow of control that depends on values, which vmap cannot take."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(256, 10)

    def forward(self, x):
        out = self.linear(x.flatten(1))
        return out if out.sum() > 0 else 2 * out


@pytest.mark.parametrize("mode", ["auto", "stack"])
def test_nodes_are_looped_where_vmap_cannot_take_the_forward_pass(mode):
    model = torch_seeded(Branching)
    works = _work_of(model, LENGTHS)
    assert _same_bits(local_sgd(model, works, mode=mode), local_sgd(model, works, mode="loop"))


@pytest.mark.parametrize("mode", ["loop", "stack"])
def test_a_start_that_does_not_fit_names_the_node_and_what_is_wrong(mode):
    model = _small()
    good, bad = ragged_works(model, [(2,), (2,)])
    start = {"linear.weight": bad.start["linear.weight"][:, :5], "other": torch.zeros(1)}
    bad = LocalWork(start, bad.x, bad.y, bad.batches, bad.lr)
    with pytest.raises(
        ValueError,
        match=r"works\[1\].start must have .*got linear.weight: \(10, 5\), linear.bias: missing, other",
    ):
        local_sgd(model, [good, bad], mode=mode)


def test_norms_can_stack_and_no_work_is_no_result():
    norms = nn.GroupNorm(1, 2), nn.LayerNorm(4), nn.InstanceNorm2d(2), nn.BatchNorm2d(2), nn.BatchNorm1d(2)
    assert stackable(nn.Sequential(*norms)) is None
    assert local_sgd(_small(), []) == []


def test_a_full_device_says_what_to_change(monkeypatch):
    model = _small()

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    local_sgd(model, ragged_works(model, [(2,)]), mode="stack")  # two nodes fit
    monkeypatch.setattr(stacking, "train_stack", full)
    with pytest.raises(RuntimeError, match="with 1 nodes in one stack: set the run config's stack-nodes"):
        local_sgd(model, ragged_works(model, [(2,)]), mode="stack")


def test_an_error_on_a_thread_reaches_the_caller_and_the_setting_is_put_back():
    before = torch.get_num_threads()

    def fail(item):
        raise ArithmeticError(f"item {item}")

    with pytest.raises(ArithmeticError, match="item 0"):
        map_on_threads(fail, range(8), 2)
    assert torch.get_num_threads() == before
    assert map_on_threads(lambda item: (item, torch.get_num_threads()), range(3), 2) == [
        (0, 1),
        (1, 1),
        (2, 1),
    ]


@pytest.mark.parametrize("lr", [0.0, -0.1, float("nan"), float("inf"), 1e39])
def test_a_step_size_must_be_positive_and_finite_in_float32(lr):
    works = ragged_works(_small(), [[4], [4]])
    with pytest.raises(ValueError, match=r"works\[1\].lr must be a finite number > 0, also in float32, got "):
        local_sgd(_small(), [works[0], replace(works[1], lr=lr)])


def _corrected(model: nn.Module, works: list[LocalWork]) -> list[LocalWork]:
    stream = torch.Generator().manual_seed(3)
    shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    return [
        replace(work, correction={k: torch.randn(s, generator=stream) for k, s in shapes.items()})
        for work in works
    ]


@pytest.mark.parametrize("name", STACKABLE)
def test_a_correction_is_added_to_every_gradient_in_the_loop_and_in_a_stack(name):
    model = build_model(name, IMAGES, 10, 0)
    works = _corrected(model, ragged_works(model, LENGTHS))
    loop, stack = (local_sgd(model, works, mode=mode) for mode in ("loop", "stack"))
    for one, other, work in zip(loop, stack, works, strict=True):
        for key in one.state:
            torch.testing.assert_close(one.state[key], other.state[key], rtol=1e-5, atol=1e-5)
        if len(work.batches) == 1:  # One step differs from an uncorrected one by lr times the correction.
            (plain,) = local_sgd(model, [replace(work, correction=None)], mode="loop")
            for key, value in (work.correction or {}).items():
                moved = plain.state[key] - one.state[key]
                torch.testing.assert_close(moved, work.lr * value, rtol=1e-4, atol=1e-6)
    assert _same_bits([local_sgd(model, [work], mode="stack")[0] for work in works], stack)


def test_a_correction_of_zeros_changes_no_value_and_a_wrong_one_is_refused():
    model = _small()
    plain = ragged_works(model, LENGTHS)
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for mode in ("loop", "stack"):
        found = local_sgd(model, [replace(work, correction=zeros) for work in plain], mode=mode)
        for one, other in zip(found, local_sgd(model, plain, mode=mode), strict=True):
            assert all(torch.equal(one.state[key], other.state[key]) for key in one.state)
    works = _corrected(model, plain)
    for bad in (None, {}, {**zeros, "linear.bias": torch.zeros(3)}, {"linear.bias": torch.zeros(10)}):
        with pytest.raises(ValueError, match=r"works\[1\].correction must have"):
            local_sgd(model, [works[0], replace(works[1], correction=bad)])
