import math

import numpy as np
import pytest
import torch
from torch import nn

from hedgerow.tasks import (
    CentralMetrics,
    build_model,
    evaluate,
    evaluate_split,
    federated,
    load,
    logit_metrics,
    normalised_utility,
    split_model,
)


class Viewed(nn.Module):
    def forward(self, x):
        return x.view(len(x), -1)


@pytest.fixture
def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(103, 4, generator=generator), torch.randint(0, 3, (103,), generator=generator)


@pytest.mark.parametrize("batch_size", [1, 10, 103, 1000])
def test_loss_and_accuracy_are_those_of_the_definition_whatever_the_batch_size(samples, batch_size):
    x, y = samples
    model = build_model("mlp", (4,), 3, seed=0)
    result = evaluate(model, x, y, batch_size=batch_size)
    p = torch.softmax(model(x).double(), dim=1)
    assert result.loss == pytest.approx(-p[range(103), y].log().mean().item(), rel=1e-6)
    assert result.accuracy == (p.argmax(dim=1) == y).double().mean().item()
    assert result.num_examples == 103


def test_modes_buffers_and_gradients_are_left_as_they_were_where_the_model_fails_too(samples):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.9))
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = evaluate(model, *samples), evaluate(model, *samples)
    with pytest.raises(RuntimeError):
        evaluate(model, torch.ones(2, 5), torch.zeros(2, dtype=torch.int64))
    assert first == second
    assert [module.training for module in model] == [True, False, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_model_on_a_gpu_evaluates_as_on_the_cpu():
    data = load("mnist-5k")
    x, y = torch.from_numpy(data.x_test), torch.from_numpy(data.y_test)
    model = build_model("lenet", data.input_shape, 10, seed=0)
    on_cpu, on_gpu = evaluate(model, x, y), evaluate(model.cuda(), x, y)
    assert on_gpu.loss == pytest.approx(on_cpu.loss, rel=1e-3)


def test_central_metrics_are_those_of_the_state_and_leave_the_model_alone():
    data = federated("mnist-5k", "iid", 2, seed=0)
    model, other = (build_model("logistic", (1, 28, 28), 10, seed=seed) for seed in (0, 1))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    first, again, whole = (CentralMetrics(model, data, n)(other.state_dict()) for n in (500, 500, 0))
    assert whole["loss"] == evaluate(other, data.x, data.y).loss
    assert whole["accuracy"] == evaluate(other, data.x_test, data.y_test).accuracy
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    # The training loss can be taken over a sample, which is always the same.
    assert first == again
    assert first["loss"] != whole["loss"]
    assert first["loss"] == pytest.approx(whole["loss"], rel=0.1)
    assert first["accuracy"] == whole["accuracy"]


def test_central_metrics_take_a_model_that_relies_on_the_layout_of_its_feature_maps():
    data = federated("mnist-5k", "iid", 2, seed=0)
    model = nn.Sequential(nn.Conv2d(1, 2, 5), Viewed(), nn.Linear(2 * 24 * 24, 10))
    assert math.isfinite(CentralMetrics(model, data, 100)(model.state_dict())["loss"])


def test_metrics_of_two_classes_are_those_counted_by_hand():
    logits, y = torch.tensor([[2.0], [1.0], [-1.0], [-2.0]]), torch.tensor([1, 0, 1, 0])
    result = logit_metrics(logits, y)
    assert (result.accuracy, result.precision, result.recall, result.f1) == (0.5, 0.5, 0.5, 0.5)
    assert result.auc == 0.75  # three of the four pairs of a 1 and a 0 are in order
    assert result.auprc == pytest.approx((1 + 2 / 3) / 2)  # precisions at the two ones
    expected = sum(math.log1p(math.exp(s)) for s in (-2, 1, 1, -2)) / 4
    assert result.loss == pytest.approx(expected)


def test_areas_are_the_mean_over_classes_against_the_rest():
    logits = torch.tensor([[3.0, 0, 0], [0, 3, 0], [0, 0, 3], [3, 0, 0]])
    result = logit_metrics(logits, torch.tensor([0, 1, 2, 2]))
    assert result.auc == pytest.approx((5 / 6 + 1 + 0.75) / 3)
    assert result.recall == pytest.approx((1 + 1 + 0.5) / 3)
    # Class 0: one of the two highest. Class 1: first. Class 2: first, and among all.
    assert result.auprc == pytest.approx((1 / 2 + 1 + (1 + 2 / 4) / 2) / 3)
    assert math.isnan(logit_metrics(torch.zeros(3, 1), torch.ones(3, dtype=torch.int64)).auc)


def test_one_logit_is_two_logits_of_which_one_is_zero():
    logits = torch.randn(50, 1, generator=torch.Generator().manual_seed(0))
    y = torch.arange(50) % 2
    one, two = logit_metrics(logits, y), logit_metrics(torch.cat([0 * logits, logits], 1), y)
    assert one.loss == pytest.approx(two.loss)
    assert (one.auc, one.f1) == (two.auc, two.f1)
    with pytest.raises(ValueError, match="logits must be finite, got NaN or infinity"):
        logit_metrics(torch.tensor([[math.nan]]), torch.tensor([0]))


def test_a_split_model_is_evaluated_in_batches_as_at_once_and_invalid_samples_are_named():
    model = split_model("mlp", (4,), (3,), 3, seed=0)
    generator = torch.Generator().manual_seed(0)
    x1, x2 = torch.randn(20, 4, generator=generator), torch.randn(20, 3, generator=generator)
    y = torch.arange(20) % 3
    result = evaluate_split(model, x1, x2, y, batch_size=7)
    whole = logit_metrics(model(x1, x2), y)
    assert result.loss == pytest.approx(whole.loss)
    assert result.accuracy == whole.accuracy
    for sizes, batch_size, reason in (
        ((0, 0, 0), 1, "got 0, 0 and 0"),
        ((2, 2, 1), 1, "2, 2 and 1"),
        ((1, 1, 1), 0, "batch_size must be an integer >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=reason):
            evaluate_split(model, x1[: sizes[0]], x2[: sizes[1]], y[: sizes[2]], batch_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_number_of_threads_changes_no_bit(dtype):
    model = nn.Sequential(nn.Linear(30, 700), nn.Tanh(), nn.Linear(700, 3)).to(dtype)
    x, y = torch.randn(700, 30, dtype=dtype), torch.arange(700) % 3
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(evaluate(model, x, y))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert len(set(found)) == 1
    assert torch.is_grad_enabled()
    assert model.training


PAYOFFS = np.array([[0.0, -0.05], [0.0, 1.0], [-2.0, 0.0], [0.0, -0.05]])


@pytest.mark.parametrize(
    ("told", "utility"),
    [
        ([0, 0, 0, 0], 0.0),
        ([0, 1, 1, 0], 1.0),
        ([1, 1, 1, 1], (0.9 + 2) / 3),  # two false alarms
        ([0, 1, 0, 0], (-1 + 2) / 3),  # one is missed
        ([1, 0, 0, 1], (-2.1 + 2) / 3),  # worse than silence
    ],
)
def test_the_utility_is_normalised_between_silence_and_the_best(told, utility):
    assert normalised_utility(PAYOFFS, np.array(told)) == pytest.approx(utility)
    with pytest.raises(ValueError, match=r"got \(4, 2\) and \(2,\)"):
        normalised_utility(PAYOFFS, np.array(told[:2]))
    with pytest.raises(ValueError, match="payoffs must pay more"):
        normalised_utility(PAYOFFS[[0, 3]], np.array(told[:2]))
