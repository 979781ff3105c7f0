import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from hedgerow.wire import LayerShape, layers_of
from hedgerow.wire.layers import held_layers, trained_numbers


def test_layers_are_the_linear_and_convolutional_weights_in_module_order():
    model = nn.Sequential(
        nn.Conv2d(4, 6, (3, 5), groups=2), nn.Sequential(nn.ReLU(), nn.Linear(7, 5)), nn.Linear(5, 2)
    )
    keys = {"0.weight": (6, 2, 3, 5), "1.1.weight": (5, 7), "2.weight": (2, 5)}
    assert layers_of(model) == tuple(LayerShape(key, shape) for key, shape in keys.items())
    assert layers_of(nn.Linear(3, 2)) == (LayerShape("weight", (2, 3)),)


@pytest.mark.parametrize(
    ("shape", "m", "n"),
    [((10, 1024), 10, 1024), ((128, 64, 3, 3), 384, 192), ((6, 2, 3, 5), 18, 10), ((5, 1, 7, 1), 35, 1)],
)
def test_a_convolution_is_a_matrix_of_outputs_by_height_and_inputs_by_width(shape, m, n):
    layer = LayerShape("conv", shape)
    assert (layer.m, layer.n, layer.size) == (m, n, torch.zeros(shape).numel())


def test_without_names_a_weight_that_is_computed_frozen_or_shared_is_no_layer():
    shared, frozen, tied = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    frozen.weight.requires_grad_(False)
    tied.weight = shared.weight
    normed = parametrizations.weight_norm(nn.Linear(3, 3))
    others = {"norm": nn.BatchNorm2d(4), "conv1d": nn.Conv1d(2, 3, 3), "table": nn.Embedding(4, 3)}
    model = nn.ModuleDict({**others, "normed": normed, "frozen": frozen, "shared": shared, "tied": tied})
    assert layers_of(model) == ()


class Transposed(nn.Module):
    """A linear layer like those of GPT-2, which hold (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 5))


def network() -> nn.ModuleDict:
    attention = nn.MultiheadAttention(4, 2)
    layers = {"attention": attention, "table": nn.Embedding(7, 4), "c_attn": Transposed()}
    return nn.ModuleDict({**layers, "conv": nn.Conv2d(1, 2, 3), "norm": nn.LayerNorm(4)})


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        ("*.in_proj_weight", ["attention.in_proj_weight"]),
        ("attention.*,table", ["attention.in_proj_weight", "attention.out_proj.weight", "table.weight"]),
        (" c_attn , conv ", ["c_attn.weight", "conv.weight"]),
        ("conv,*", [key for key, value in network().named_parameters() if value.ndim in (2, 4)]),
    ],
)
def test_names_are_patterns_of_keys_or_modules_of_any_matrix_or_convolution_also_a_frozen_one(names, keys):
    model = network().requires_grad_(False)
    layers = layers_of(model, names)
    assert [layer.key for layer in layers] == keys
    assert all(layer.shape == tuple(model.get_parameter(layer.key).shape) for layer in layers)
    assert held_layers(model, keys) == layers
    assert trained_numbers(model, layers) == sum(layer.size for layer in layers)


def test_a_name_without_a_weight_and_a_shared_weight_are_errors():
    with pytest.raises(ValueError, match=r"layers must match a matrix .*, got 'querry'; it has 5, such as "):
        layers_of(network(), "conv,querry")
    with pytest.raises(ValueError, match="got 'norm'"):
        layers_of(network(), "norm")
    tied = nn.ModuleDict({"table": nn.Embedding(7, 4), "head": nn.Linear(4, 7)})
    tied["head"].weight = tied["table"].weight
    with pytest.raises(ValueError, match=r"shared by modules, got table\.weight and head\.weight"):
        layers_of(tied, "table")
