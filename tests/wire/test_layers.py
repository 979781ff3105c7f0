import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from hedgerow.wire import LayerShape, layers_of
from hedgerow.wire.layers import not_compressible


def test_layers_are_the_linear_and_convolutional_weights_in_module_order():
    model = nn.Sequential(
        nn.Conv2d(4, 6, (3, 5), groups=2), nn.Sequential(nn.ReLU(), nn.Linear(7, 5)), nn.Linear(5, 2)
    )
    keys = {"0.weight": (6, 2, 3, 5), "1.1.weight": (5, 7), "2.weight": (2, 5)}
    assert layers_of(model) == tuple(LayerShape(key, shape) for key, shape in keys.items())
    assert not_compressible(model) == {}
    assert layers_of(nn.Linear(3, 2)) == (LayerShape("weight", (2, 3)),)


@pytest.mark.parametrize(
    ("shape", "m", "n"),
    [((10, 1024), 10, 1024), ((128, 64, 3, 3), 384, 192), ((6, 2, 3, 5), 18, 10), ((5, 1, 7, 1), 35, 1)],
)
def test_a_convolution_is_a_matrix_of_outputs_by_height_and_inputs_by_width(shape, m, n):
    layer = LayerShape("conv", shape)
    assert (layer.m, layer.n, layer.size) == (m, n, torch.zeros(shape).numel())


def test_what_else_has_parameters_is_named_with_its_reason():
    shared = nn.Linear(3, 3)
    frozen = nn.Linear(3, 3)
    frozen.weight.requires_grad_(False)
    tied = nn.Linear(3, 3)
    tied.weight = shared.weight
    model = nn.ModuleDict(
        {
            "norm": nn.BatchNorm2d(4),
            "conv1d": nn.Conv1d(2, 3, 3),
            "normed": parametrizations.weight_norm(nn.Linear(3, 3)),
            "frozen": frozen,
            "shared": shared,
            "tied": tied,
            "relu": nn.ReLU(),
        }
    )
    assert layers_of(model) == ()
    assert not_compressible(model) == {
        "norm": "BatchNorm2d is neither Linear nor Conv2d",
        "conv1d": "Conv1d is neither Linear nor Conv2d",
        "normed": "its weight is computed from other parameters",
        "normed.parametrizations.weight": "ParametrizationList is neither Linear nor Conv2d",
        "frozen": "its weight is not trained",
        "shared": "its weight is also tied.weight",
        "tied": "its weight is also shared.weight",
    }
