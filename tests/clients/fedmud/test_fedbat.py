"""FedBAT at a node: goldens of the stochastic binariser, its gradients, and two halves of local training."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.clients.training.cases import torch_seeded
from torch import Tensor, nn

from hedgerow.clients import LocalWork, Trained, local_sgd
from hedgerow.clients.fedmud.fedbat import BinarisedWork, binarise, step_size, train_binarised

ALPHA = torch.tensor(0.01)
# Golden: alpha = 0.01.
X = torch.tensor([-0.02, -0.005, 0.0, 0.005, 0.02])
MEAN = torch.tensor([-0.01, -0.005, 0.0, 0.005, 0.01])


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_mean_is_the_entry_within_alpha_and_alpha_beyond() -> None:
    n = 40_000
    uniform = torch.rand(n, 5, generator=stream())
    mean = binarise(X.expand(n, 5), ALPHA, uniform).mean(0)
    assert (mean - MEAN).abs().max() < 4 * 0.01 / math.sqrt(n)


@settings(deadline=None, max_examples=40)
@given(x=st.floats(-3, 3, width=32), u=st.floats(0, 1, exclude_max=True, width=32))
def test_values_are_one_alpha_up_or_down(x: float, u: float) -> None:
    value = float(binarise(torch.tensor([x]), torch.tensor(0.5), torch.tensor([u])))
    assert value in (-0.5, 0.5)
    if abs(x) > 0.5:
        assert math.copysign(1, value) == math.copysign(1, x)


def test_the_gradients_of_x_and_of_alpha_are_the_papers() -> None:
    x = torch.tensor([-0.02, -0.01, -0.005, 0.0, 0.01, 0.0101], requires_grad=True)
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    (binarise(x, ALPHA, torch.rand(6, generator=stream())) * weights).sum().backward()
    assert x.grad is not None
    # Passed on within alpha alone.
    assert x.grad.tolist() == [0.0, 2.0, 3.0, 4.0, 5.0, 0.0]
    x, alpha = torch.tensor([-0.02, 0.02, 0.005, 0.005, -0.005]), torch.tensor(0.01, requires_grad=True)
    uniform = torch.tensor([0.5, 0.5, 0.9, 0.1, 0.9])  # b = 0, 1, 1, 0, 1
    weights = torch.tensor([1.0, 10.0, 100.0, 1000.0, 10000.0])
    signs = binarise(x, alpha, uniform)
    assert signs.sign().tolist() == [-1, 1, 1, -1, 1]
    (signs * weights).sum().backward()
    assert alpha.grad is not None
    # -1 and +1 beyond alpha; 2 b - (x / alpha + 1) within: 2 - 1.5, 0 - 1.5, 2 - 0.5.
    assert float(alpha.grad) == pytest.approx(-1 + 10 + 100 * 0.5 - 1000 * 1.5 + 10000 * 1.5, rel=1e-6)


def test_the_step_size_starts_at_the_mean_magnitude_and_stays_in_its_bounds() -> None:
    zero = torch.tensor(0.0)
    assert float(step_size(torch.tensor(0.01), zero)) == pytest.approx(0.01)
    assert float(step_size(torch.tensor(0.01), torch.tensor(0.1))) == pytest.approx(0.01 * math.exp(0.6))
    assert float(step_size(torch.tensor(1.0), zero)) == pytest.approx(5e-2)
    assert float(step_size(zero, zero)) == pytest.approx(5e-4)


# Local training.


def model() -> nn.Module:
    return torch_seeded(
        lambda: nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3)
        )
    )


COMPRESSED = ("3.weight",)


def work(steps: int, lr: float = 0.1, seed: int = 0) -> BinarisedWork:
    rng = np.random.default_rng(4)
    x = torch.as_tensor(rng.normal(size=(30, 6))).float()
    y = torch.as_tensor(rng.integers(0, 3, 30))
    start = {key: value.clone() for key, value in model().state_dict().items()}
    batches = [rng.permutation(30)[:8] for _ in range(steps)]
    base = {key: start[key] for key in COMPRESSED}
    return BinarisedWork(LocalWork(start, x, y, batches, lr), base, stream(seed))


def decoded(trained: Trained, key: str = "3.weight", shape: tuple[int, ...] = (7, 8)) -> Tensor:
    bits = np.unpackbits(trained.state[f"{key}:bits"].numpy(), count=math.prod(shape))
    signs = torch.from_numpy(bits.astype(np.float32)).reshape(shape) * 2 - 1
    return signs * trained.state[f"{key}:alpha"]


def test_it_sends_bits_a_step_size_and_what_is_not_compressed() -> None:
    state = train_binarised(model(), work(6)).state
    plain = model().state_dict().keys() - set(COMPRESSED)
    assert state.keys() == plain | {"3.weight:bits", "3.weight:alpha"}
    assert (state["3.weight:bits"].dtype, tuple(state["3.weight:bits"].shape)) == (torch.uint8, (7,))
    assert (state["3.weight:alpha"].dtype, tuple(state["3.weight:alpha"].shape)) == (torch.float32, (1,))


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_first_half_rounded_down_is_plain_sgd(steps: int) -> None:
    task = work(steps)
    plain = LocalWork(task.sgd.start, task.sgd.x, task.sgd.y, task.sgd.batches[: steps // 2], task.sgd.lr)
    (expected,) = local_sgd(model(), [plain], mode="loop")
    scratch = model()
    trained = train_binarised(scratch, task)
    assert torch.equal(scratch.state_dict()["3.weight"], expected.state["3.weight"])
    # Of one step nothing is warm-up, and alpha is at its lower bound.
    assert steps > 1 or float(trained.state["3.weight:alpha"]) == pytest.approx(5e-4)


class WarmUpAlone:
    """A loss whose gradient is zero from the second step on: what is sent is the first one's update."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.steps += 1
        return nn.functional.cross_entropy(outputs, targets, reduction="none") * (self.steps == 1)


def first_update(task: BinarisedWork) -> Tensor:
    (plain,) = local_sgd(model(), [replace(task.sgd, batches=task.sgd.batches[:1])], mode="loop")
    return plain.state["3.weight"] - task.sgd.start["3.weight"]


def test_warm_up_sets_alpha_to_the_mean_magnitude_and_signs_are_unbiased_for_an_update_within_it() -> None:
    update, n = first_update(work(2)), 200
    draws = torch.stack([decoded(train_binarised(model(), work(2, seed=i), WarmUpAlone())) for i in range(n)])
    alpha = float(draws.abs().max())
    assert alpha == pytest.approx(min(max(float(update.abs().mean()), 5e-4), 5e-2), rel=1e-6)
    expected = update.clamp(-alpha, alpha)
    assert (draws.mean(0) - expected).abs().max() < 5 * alpha / math.sqrt(n)


def test_only_drawn_weights_send_a_sign_and_set_alpha() -> None:
    kept = np.array([0, 5, 9, 17, 55])
    task = replace(work(2), kept={"3.weight": kept})
    state = train_binarised(model(), task, WarmUpAlone()).state
    assert tuple(state["3.weight:bits"].shape) == (1,)
    update = first_update(task).flatten()[torch.from_numpy(kept)]
    assert float(state["3.weight:alpha"]) == pytest.approx(float(update.abs().mean().clamp(5e-4)), rel=1e-6)


def test_the_step_size_is_learnt() -> None:
    # Both have one batch of warm-up; a half of three batches is one too.
    task = work(2)
    longer = replace(task, sgd=replace(task.sgd, batches=[*task.sgd.batches, task.sgd.batches[1]]))
    before, after = (
        float(train_binarised(model(), one).state["3.weight:alpha"]) for one in (work(2), longer)
    )
    assert before != after


def test_the_stream_gives_the_bits_and_the_base_stays() -> None:
    task = work(6)
    before = {key: value.clone() for key, value in task.base.items()}
    first, second, other = (train_binarised(model(), one) for one in (task, work(6), work(6, seed=1)))
    assert first.mean_loss == second.mean_loss
    assert all(torch.equal(first.state[key], second.state[key]) for key in first.state)
    assert not torch.equal(first.state["3.weight:bits"], other.state["3.weight:bits"])
    assert all(torch.equal(task.base[key], value) for key, value in before.items())
