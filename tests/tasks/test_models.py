import numpy as np
import pytest
import torch
from torch import nn

from hedgerow.tasks import MODELS, ChannelsLast, build_model, check_takes, count_parameters, forward_macs
from hedgerow.tasks.models import OF_IDS

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


BATCH_NORMALISED = ("cnn4", "cnn8", "cnn10", "resnet18")
OF_IMAGES = tuple(name for name in MODELS if name not in OF_IDS)
PLAIN = tuple(name for name in OF_IMAGES if name not in BATCH_NORMALISED)
SMALLEST = {"cnn10": (1, 32, 32), "text-transformer": (9,)}


def smallest(name: str) -> tuple[int, ...]:
    return SMALLEST.get(name, (1, 28, 28))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.ndim > 1])


@pytest.mark.parametrize(
    ("name", "input_shape", "num_classes", "parameters"),
    [
        ("lenet", (1, 28, 28), 10, 21_840), ("lenet", (3, 28, 28), 10, 22_340),
        ("lenet", (1, 32, 32), 10, 30_840), ("lenet", (3, 32, 32), 10, 31_340),
        ("cnn-431k", (1, 28, 28), 10, 431_080), ("logistic", (1, 28, 28), 10, 7_850),
        ("mlp", (1, 28, 28), 10, 159_010), ("cnn4", (1, 28, 28), 10, 390_880),
        ("cnn4", (3, 32, 32), 10, 399_136), ("cnn8", (3, 32, 32), 10, 1_183_456),
        ("cnn8", (3, 32, 32), 100, 1_275_616), ("cnn10", (3, 32, 32), 10, 4_719_328),
        ("cnn10", (3, 32, 32), 100, 4_765_408), ("resnet18", (3, 32, 32), 10, 11_173_962),
        ("resnet18", (3, 32, 32), 200, 11_271_432), ("text-transformer", (48,), 3, 201_411),
    ],
)  # fmt: skip
def test_models_have_the_papers_parameter_counts(name, input_shape, num_classes, parameters):
    assert count_parameters(build_model(name, input_shape, num_classes, seed=0)) == parameters


CNN10 = [864, 9_216, 18_432, 36_864, 73_728, 147_456, 294_912, 589_824, 1_179_648, 2_359_296]


@pytest.mark.parametrize(
    ("name", "weights", "scalars"),
    [("cnn4", [864, 18_432, 73_728, 294_912], 960), ("cnn8", None, 1_920), ("cnn10", CNN10, 3_968)],
)
def test_convolutions_and_normalisation_have_the_papers_weights_and_no_bias(name, weights, scalars):
    model = build_model(name, (3, 32, 32), 10, seed=0)
    found = [layer.weight.numel() for layer in model if isinstance(layer, nn.Conv2d)]
    assert weights in (None, found)
    assert all(layer.bias is None for layer in model if isinstance(layer, nn.Conv2d | nn.Linear))
    assert sum(count_parameters(layer) for layer in model if isinstance(layer, nn.BatchNorm2d)) == scalars


@pytest.mark.parametrize("name", BATCH_NORMALISED)
def test_models_with_batch_normalisation_start_small_and_normal_and_train_on_a_single_sample(name):
    model = build_model(name, (3, 32, 32), 10, seed=0)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            spread = 0.01 / layer.weight.numel() ** 0.5
            assert abs(layer.weight.mean()) < 5 * spread
            assert abs(layer.weight.std() - 0.01) < 5 * spread
            assert layer.bias is None or not layer.bias.any()
        elif isinstance(layer, nn.BatchNorm2d):
            assert (layer.weight == 1).all()
            assert not layer.bias.any()
            assert (layer.running_var == 1).all()
            assert not layer.running_mean.any()
            assert layer.num_batches_tracked == 0
    model(torch.ones(1, 3, 32, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_resnet_halves_the_image_three_times_and_widens_with_a_shortcut():
    model = build_model("resnet18", (3, 32, 32), 10, seed=0)
    assert model.blocks(torch.zeros(1, 64, 32, 32)).shape == (1, 512, 4, 4)
    assert [isinstance(block.shortcut, nn.Identity) for block in model.blocks] == [
        *(True, True),
        *(False, True) * 3,
    ]


def test_frozen_parameters_are_not_counted_and_counting_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout())
    model[0].bias.requires_grad_(False)
    model[2].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    forward_macs(model, (3,))
    assert count_parameters(model) == 12 + 8
    assert [module.training for module in model] == [True, True, False]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "input_shape", "macs"),
    [("lenet", (1, 28, 28), 480_500), ("lenet", (3, 32, 32), 1_113_500), ("logistic", (1, 28, 28), 7_840)],
)
def test_a_forward_pass_costs_the_papers_multiply_accumulates(name, input_shape, macs):
    assert forward_macs(build_model(name, input_shape, 10, seed=0), input_shape) == macs


@pytest.mark.parametrize("own_class", [False, True], ids=["by layers", "by operators"])
def test_multiply_accumulates_of_strides_groups_and_several_passes_are_counted(own_class):
    class Own(nn.Sequential):
        pass

    layers = [
        nn.Conv2d(4, 6, (3, 5), stride=2, groups=2, bias=False),  # to 6 x 4 x 3, each of 2 x 15
        nn.AvgPool2d(2),
        nn.Linear(1, 3),  # on 6 x 2 places
        nn.Flatten(),
    ]
    model = Own(*layers) if own_class else nn.Sequential(*layers)
    assert forward_macs(model, (4, 9, 9)) == 6 * 4 * 3 * 30 + 6 * 2 * 3


def test_the_lenet_applies_relu_after_max_pooling():
    layers = [type(layer).__name__ for layer in build_model("lenet", (1, 28, 28), 10, seed=0)]
    assert layers == [
        "ChannelsLast",
        *("Conv2d", "MaxPool2d", "ReLU"),
        *("Conv2d", "MaxPool2d", "ReLU"),
        *("Flatten", "Linear", "ReLU", "Linear"),
    ]


@pytest.mark.parametrize("name", OF_IMAGES)
@pytest.mark.parametrize("input_shape", [(1, 28, 28), (3, 32, 32), (2, 17, 20), (1, 35, 40)])
def test_models_map_images_to_logits(name, input_shape):
    if name == "cnn10" and min(input_shape[1:]) < 32:
        pytest.skip("five times halved, this image is gone")
    model = build_model(name, input_shape, 7, seed=0)
    assert model(torch.zeros(5, *input_shape)).shape == (5, 7)


@pytest.mark.parametrize("name", [name for name in OF_IMAGES if name not in ("logistic", "mlp")])
@pytest.mark.parametrize("channels", [1, 3])
def test_feature_maps_on_a_cpu_are_channels_last_which_changes_no_value(name, channels):
    model, seen = build_model(name, (channels, 32, 32), 10, seed=0), []
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(lambda layer, inputs, output: seen.append(output.stride()))
    x = torch.randn(2, channels, 32, 32, generator=torch.Generator().manual_seed(0))
    model(x)
    assert seen
    assert all(stride[1] == 1 for stride in seen)
    assert torch.equal(ChannelsLast()(x), x)


@pytest.mark.parametrize("name", MODELS)
def test_models_are_of_their_seed_alone_in_training_mode_and_trainable(name):
    before = torch.get_rng_state()
    model, again, other = (build_model(name, smallest(name), 10, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(flat(model), flat(again))
    assert abs(torch.corrcoef(torch.stack([weights(model), weights(other)]))[0, 1]) < 0.1


@pytest.mark.parametrize("name", PLAIN)
def test_initialisation_has_the_distribution_of_torchs_own_layers(name):
    model = build_model(name, (1, 28, 28), 10, seed=5)
    for layer in model:
        if not isinstance(layer, nn.Conv2d | nn.Linear):
            continue
        bound = layer.weight[0].numel() ** -0.5
        scaled = torch.cat([layer.weight.flatten(), layer.bias]).detach().double().numpy() / bound
        assert np.abs(scaled).max() <= 1
        # Of n draws from U(-1, 1) mean and variance lie within five deviations of 0 and 1/3.
        assert abs(scaled.mean()) < 5 * (3 * scaled.size) ** -0.5
        assert abs(scaled.var() - 1 / 3) < 5 * (4 / 45 / scaled.size) ** 0.5


def test_initial_weights_are_numpys_whatever_the_processor():
    drawn = np.random.default_rng(np.random.SeedSequence([5, 0, 0, 1])).random((10, 1, 5, 5))
    weight = build_model("lenet", (1, 28, 28), 10, seed=5).state_dict()["conv1.weight"]
    assert np.array_equal(weight.numpy(), ((2 * drawn - 1) / 5).astype(np.float32))


def test_dropout_changes_no_initial_bit_and_acts_in_training_only():
    plain, dropping = (build_model("lenet", (1, 28, 28), 10, 0, dropout=p) for p in (0.0, 0.5))
    x = torch.ones(2, 1, 28, 28)
    assert torch.equal(flat(plain), flat(dropping))
    assert plain.state_dict().keys() == dropping.state_dict().keys()
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        assert not torch.equal(dropping(x), dropping(x))
    assert torch.equal(dropping.eval()(x), plain(x))


def test_a_user_s_own_model_is_built_from_the_seed_alone_and_another_one_is_an_error(write_module):
    write_module("own_model", OWN_MODEL)
    before = torch.get_rng_state()
    first, second, other = (build_model("own_model:build", (4,), 3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(flat(first), flat(second))
    assert not torch.equal(flat(first), flat(other))
    assert all(module.training for module in first.modules())
    for function, reason in {
        "wrong_shape": r"must give the shape \(2, 3\) for two samples of \(5,\), got \(2, 4\)",
        "no_model": "must return a Module, got a str",
    }.items():
        with pytest.raises(ValueError, match=rf"model = 'own_model:{function}' {reason}"):
            build_model(f"own_model:{function}", (5,), 3, seed=0)


# Token ids


@pytest.mark.parametrize("vocabulary", [2**11, 2**40])
def test_a_text_transformer_takes_any_ids_and_does_not_see_what_follows_a_row(vocabulary):
    model = build_model("text-transformer", (12,), 3, seed=0)
    x = torch.randint(0, vocabulary, (5, 12), generator=torch.Generator().manual_seed(0))
    short = x.clone()
    short[:, 7:] = -1
    alone = build_model("text-transformer", (7,), 3, seed=0)
    state = model.state_dict()
    alone.load_state_dict({**state, "position.weight": state["position.weight"][:7]})
    torch.testing.assert_close(model(short), alone(x[:, :7]))
    assert not torch.allclose(model(short), model(x))
    short[2] = -1  # A row without tokens.
    assert model(short).isfinite().all()


def test_a_text_transformer_reads_the_order_of_its_ids():
    model = build_model("text-transformer", (6,), 3, seed=0)
    x = torch.arange(6)[None]
    assert not torch.allclose(model(x), model(x.flip(1)))


def test_the_layers_of_a_text_transformer_have_the_names_of_an_encoder():
    linear = {
        name.split(".")[-1]
        for name, layer in build_model("text-transformer", (6,), 3, seed=0).named_modules()
        if isinstance(layer, nn.Linear)
    }
    assert linear == {"query", "key", "value", "dense", "dense_in", "dense_out", "head"}


def test_an_embedding_is_drawn_by_numpy_with_rows_of_norm_one():
    model = build_model("text-transformer", (6,), 3, seed=5)
    weight = model.state_dict()["embedding.weight"]
    drawn = np.random.default_rng(np.random.SeedSequence([5, 0, 0, 1])).standard_normal((2048, 64))
    assert np.array_equal(weight.numpy(), (drawn / 8).astype(np.float32))


def test_a_text_transformer_counts_products_of_every_layer():
    width, length = 64, 10
    layer = length * (4 * width * width + 4 * width * width) + 2 * length * length * width
    assert forward_macs(build_model("text-transformer", (length,), 3, 0), (length,)) == 2 * layer + 3 * width


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("lenet", "int64", "model must be text-transformer, or an import path .*got 'lenet': .*are int64"),
        ("text-transformer", "float32", "'text-transformer', which takes ids: the samples are float32"),
        ("text-transformer", "int64", None),
        ("lenet", "float32", None),
        ("own:model", "int64", None),
    ],
)
def test_models_of_ids_get_ids_and_others_measurements(name, dtype, reason):
    if reason is None:
        check_takes(name, dtype)
    else:
        with pytest.raises(ValueError, match=reason):
            check_takes(name, dtype)
