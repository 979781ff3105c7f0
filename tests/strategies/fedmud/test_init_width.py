import numpy as np
import pytest
import torch

from hedgerow.strategies.fedmud.init_width import step_gain
from hedgerow.wire import FactoredLayer


def mean_first_step(variant, m, n, a, draws, **size):
    """Return the mean over random factors of <step, -G> / <G, G>, for a step of size 1 from zero."""
    layer, rng = FactoredLayer("w", (m, n), variant, **size), np.random.default_rng(0)

    def uniform(shape):
        return torch.from_numpy(rng.uniform(-a, a, (draws, *shape)))

    frozen = {name: uniform(shape) for name, shape in layer.frozen.items()}
    start = {
        name: (uniform(shape) if name in layer.random else torch.zeros(draws, *shape, dtype=torch.float64))
        for name, shape in layer.trainable.items()
    }
    G = torch.from_numpy(rng.standard_normal((m, n)))
    leaves = {name: value.clone().requires_grad_() for name, value in start.items()}
    (layer.delta(leaves, frozen) * G).sum().backward()
    moved = {name: (leaf - leaf.grad).detach() for name, leaf in leaves.items()}
    step = layer.delta(moved, frozen)  # (draws, m, n)
    along = -(step * G).sum(dim=(1, 2)) / (G * G).sum()
    return float(along.mean())


@pytest.mark.parametrize(
    ("variant", "size", "gain"),
    [
        ("mud", {"rank": 4}, 0.3333),
        ("mud+f", {"rank": 4}, 0.3333),
        ("mud+aad", {"rank": 4}, 0.6667),
        ("mud+bkd", {"blocks": 2, "side": 3}, 0.0833),
        ("mud+bkd+f", {"blocks": 2, "side": 3}, 0.0833),
        ("mud+bkd+aad", {"blocks": 2, "side": 3}, 0.1667),
    ],
)
def test_the_first_step_moves_the_weights_by_its_gain_times_the_gradient(variant, size, gain):
    predicted = step_gain(variant, 0.5, size.get("rank", 1))

    assert predicted == pytest.approx(gain, abs=5e-5)
    assert mean_first_step(variant, 12, 10, 0.5, draws=4_000, **size) == pytest.approx(predicted, rel=0.03)
