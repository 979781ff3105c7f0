import numpy as np
import pytest
import torch
from torch import nn

from hedgerow.tasks import MODELS, build_model, count_parameters, forward_macs

OWN_MODEL = """
from torch import nn

def build(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0], 7), nn.BatchNorm1d(7),
                         nn.Dropout(), nn.Linear(7, num_classes))

def wrong_shape(input_shape, num_classes):
    return nn.Linear(input_shape[0], num_classes + 1)

def no_model(input_shape, num_classes):
    return "model"
"""


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    ("name", "input_shape", "parameters"),
    [
        ("lenet", (1, 28, 28), 21_840),
        ("lenet", (3, 28, 28), 22_340),
        ("lenet", (1, 32, 32), 30_840),
        ("lenet", (3, 32, 32), 31_340),
        ("cnn-431k", (1, 28, 28), 431_080),
        ("logistic", (1, 28, 28), 7_850),
        ("mlp", (1, 28, 28), 159_010),
    ],
)
def test_models_have_the_papers_parameter_counts(name, input_shape, parameters):
    assert count_parameters(build_model(name, input_shape, 10, seed=0)) == parameters


def test_frozen_parameters_are_not_counted():
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)

    assert count_parameters(model) == 6


@pytest.mark.parametrize(
    ("name", "input_shape", "macs"),
    [("lenet", (1, 28, 28), 480_500), ("lenet", (3, 32, 32), 1_113_500), ("logistic", (1, 28, 28), 7_840)],
)
def test_a_forward_pass_costs_the_papers_multiply_accumulates(name, input_shape, macs):
    assert forward_macs(build_model(name, input_shape, 10, seed=0), input_shape) == macs


def test_counting_multiply_accumulates_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout())
    model[2].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    forward_macs(model, (3,))

    assert [module.training for module in model] == [True, True, False]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_lenet_applies_relu_after_max_pooling():
    layers = [type(layer).__name__ for layer in build_model("lenet", (1, 28, 28), 10, seed=0)]

    assert layers == [
        *("Conv2d", "MaxPool2d", "ReLU"),
        *("Conv2d", "MaxPool2d", "ReLU"),
        *("Flatten", "Linear", "ReLU", "Linear"),
    ]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("input_shape", [(1, 28, 28), (3, 32, 32), (2, 17, 20)])
def test_models_map_images_to_logits(name, input_shape):
    model = build_model(name, input_shape, 7, seed=0)

    assert model(torch.zeros(5, *input_shape)).shape == (5, 7)


@pytest.mark.parametrize("name", MODELS)
def test_models_are_in_training_mode_and_trainable(name):
    model = build_model(name, (1, 28, 28), 10, seed=0)

    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_the_same_seed_gives_the_same_bits(name):
    first, second = (flat(build_model(name, (1, 28, 28), 10, seed=3)) for _ in range(2))

    assert torch.equal(first, second)


@pytest.mark.parametrize("name", MODELS)
def test_distinct_seeds_give_distinct_models(name):
    first, second = (flat(build_model(name, (1, 28, 28), 10, seed=seed)) for seed in (0, 1))

    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.1


@pytest.mark.parametrize("name", MODELS)
def test_building_leaves_the_global_generator_as_it_was(name):
    before = torch.get_rng_state()

    build_model(name, (1, 28, 28), 10, seed=0)

    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", MODELS)
def test_initialisation_is_that_of_torch_s_own_layers(name):
    model = build_model(name, (1, 28, 28), 10, seed=5)
    word = np.random.SeedSequence([5, 0, 0, 1]).generate_state(1, np.uint64)[0]

    with torch.random.fork_rng():
        torch.default_generator.manual_seed(int(word >> np.uint64(1)))
        for layer in model:
            if isinstance(layer, nn.Conv2d):
                expected = nn.Conv2d(layer.in_channels, layer.out_channels, layer.kernel_size)
            elif isinstance(layer, nn.Linear):
                expected = nn.Linear(layer.in_features, layer.out_features)
            else:
                continue
            assert torch.equal(flat(layer), flat(expected))


def test_dropout_adds_no_parameters_and_changes_no_initial_bit():
    plain, dropping = (build_model("lenet", (1, 28, 28), 10, 0, dropout=p) for p in (0.0, 0.5))

    assert torch.equal(flat(plain), flat(dropping))
    assert plain.state_dict().keys() == dropping.state_dict().keys()


def test_dropout_acts_in_training_only():
    model = build_model("lenet", (1, 28, 28), 10, 0, dropout=0.5)
    x = torch.ones(2, 1, 28, 28)

    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), build_model("lenet", (1, 28, 28), 10, 0)(x))


def test_a_user_s_own_model_is_built_from_the_seed_alone(write_module):
    write_module("own_model_a", OWN_MODEL)
    before = torch.get_rng_state()

    first, second, other = (build_model("own_model_a:build", (4,), 3, seed=seed) for seed in (1, 1, 2))

    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(flat(first), flat(second))
    assert not torch.equal(flat(first), flat(other))
    assert all(module.training for module in first.modules())


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("wrong_shape", r"gives shape \(2, 4\) for two samples of \(5,\), must give \(2, 3\)"),
        ("no_model", "returned a str, must return a Module"),
    ],
)
def test_a_user_s_function_that_gives_no_such_model_is_an_error(write_module, function, reason):
    write_module("own_model_b", OWN_MODEL)

    with pytest.raises(ValueError, match=rf"model = 'own_model_b:{function}': {reason}"):
        build_model(f"own_model_b:{function}", (5,), 3, seed=0)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"name": "resnet"}, "model = 'resnet': must be one of lenet, .*module:function"),
        (
            {"input_shape": (1, 15, 28)},
            r"input_shape = \(1, 15, 28\): lenet needs \(C, H, W\) with H, W >= 16",
        ),
        ({"input_shape": (784,)}, r"input_shape = \(784,\): lenet needs"),
        ({"input_shape": ()}, r"input_shape = \(\), must be positive"),
        ({"num_classes": 1}, "num_classes = 1, must be at least 2"),
        ({"seed": -1}, "seed = -1, must be >= 0"),
        ({"dropout": 1.0}, r"dropout = 1.0, must be in \[0, 1\)"),
        ({"name": "mlp", "dropout": 0.5}, "dropout = 0.5: mlp has none"),
    ],
)
def test_an_invalid_argument_is_an_error_that_names_it(arguments, reason):
    valid = {"name": "lenet", "input_shape": (1, 28, 28), "num_classes": 10, "seed": 0}

    with pytest.raises(ValueError, match=reason):
        build_model(**(valid | arguments))
