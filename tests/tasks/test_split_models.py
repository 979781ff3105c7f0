import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from hedgerow.tasks import SplitModel, split_loss, split_model
from hedgerow.tasks.lstm import LSTM

IMAGE = (1, 28, 28)
OWN_MODEL = """
from torch import nn
from hedgerow.tasks import SplitModel

class Head(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.weight = nn.Linear(4, classes)

    def forward(self, z1, z2):
        return self.weight(z1 + z2)

def build(hospital_shape, device_shape, num_classes):
    return SplitModel(Head(num_classes), nn.Linear(hospital_shape[0], 4), nn.Linear(device_shape[0], 4), 4, 4)

def wrong(hospital_shape, device_shape, num_classes):
    return SplitModel(Head(num_classes), nn.Linear(hospital_shape[0], 4), nn.Linear(device_shape[0], 4), 4, 3)

def nothing(hospital_shape, device_shape, num_classes):
    return nn.Linear(1, 1)
"""


def sizes(model):
    blocks = (model.head, model.hospital, model.device)
    return tuple(sum(p.numel() for p in block.parameters()) for block in blocks)


@pytest.mark.parametrize(
    ("arguments", "parameters", "encodings"),
    [
        (("cnn", IMAGE, IMAGE, 11), (19_211, 3_424, 3_424), (144, 144)),
        (("lstm", (48, 38), (48, 38), 2), (33, 3_584, 3_584), (16, 16)),
        (("lstm", (89, 1), (89, 1), 5), (165, 1_216, 1_216), (16, 16)),
        (("mlp", (10,), (4,), 2), (16 * 8 + 1, 10 * 16 + 16 + 17 * 5, 4 * 16 + 16 + 17 * 2), (5, 2)),
    ],
)
def test_a_model_has_the_sizes_that_are_planned_with(arguments, parameters, encodings):
    model = split_model(*arguments, seed=0)
    if arguments[0] == "mlp":
        parameters = ((7 + 1) * 16 + 17, *parameters[1:])

    assert sizes(model) == parameters
    assert (model.hospital_encoding, model.device_encoding) == encodings


@pytest.mark.parametrize(
    ("name", "shape", "classes", "logits"),
    [("cnn", IMAGE, 11, 11), ("lstm", (7, 3), 2, 1), ("mlp", (15,), 5, 5), ("mlp", (1,), 2, 1)],
)
def test_its_encodings_and_logits_have_the_declared_lengths(name, shape, classes, logits):
    model = split_model(name, shape, shape, classes, seed=0)
    x = torch.ones(3, *shape)

    assert model.hospital(x).shape == (3, model.hospital_encoding)
    assert model.device(x).shape == (3, model.device_encoding)
    assert model(x, x).shape == (3, logits)


def test_an_encoding_of_a_table_is_shorter_than_its_features():
    for features in range(2, 40):
        assert split_model("mlp", (features,), (features,), 2, seed=0).device_encoding < features


def test_state_keys_start_with_their_block():
    keys = split_model("lstm", (4, 1), (4, 1), 2, seed=0).state_dict()
    assert [key.partition(".")[0] for key in keys] == ["head"] * 2 + ["hospital"] * 4 + ["device"] * 4


def test_the_same_seed_gives_the_same_bits_and_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    one, two, other = (split_model("lstm", (4, 1), (4, 1), 2, seed=seed).state_dict() for seed in (1, 1, 2))

    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not torch.equal(one["device.weight_hh_l0"], other["device.weight_hh_l0"])
    assert not torch.equal(one["device.weight_hh_l0"], one["hospital.weight_hh_l0"])
    assert torch.equal(before, torch.get_rng_state())


def own_and_torchs():
    own, torchs = LSTM(3, 5).double(), nn.LSTM(3, 5, batch_first=True).double()
    own.reset(np.random.default_rng(0))
    torchs.load_state_dict(own.state_dict())
    return own, torchs


def test_the_lstm_is_torchs():
    own, torchs = own_and_torchs()
    x = torch.randn(7, 11, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    torch.testing.assert_close(own(x), torchs(x)[1][0][0], rtol=0, atol=1e-14)


def test_its_gradients_are_torchs():
    own, torchs = own_and_torchs()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 11, 3, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(7, 5, dtype=torch.float64, generator=generator)

    found = torch.autograd.grad((own(x) * weight).sum(), [x, *own.parameters()])
    expected = torch.autograd.grad((torchs(x)[1][0][0] * weight).sum(), [x, *torchs.parameters()])

    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_a_stack_of_lstms_is_the_loop():
    own, _ = own_and_torchs()
    stack = {key: torch.stack([s * p.detach() for s in (1, 2, 3)]) for key, p in own.named_parameters()}
    leaves = {key: value.requires_grad_() for key, value in stack.items()}
    x = torch.randn(3, 2, 11, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    out = vmap(lambda p, x: functional_call(own, p, (x,)))(leaves, x)
    gradients = torch.autograd.grad(out.sum(), list(leaves.values()))

    for member in range(3):
        one = {key: value[member].detach().requires_grad_() for key, value in stack.items()}
        alone = functional_call(own, one, (x[member],))
        torch.testing.assert_close(alone, out[member], rtol=0, atol=1e-14)
        for found, expected in zip(
            gradients, torch.autograd.grad(alone.sum(), list(one.values())), strict=True
        ):
            torch.testing.assert_close(found[member], expected, rtol=0, atol=1e-13)


def test_shared_weights_over_a_stack_of_inputs_are_the_loop():
    own, _ = own_and_torchs()
    x = torch.randn(3, 2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out = vmap(own)(x)
    torch.testing.assert_close(out, torch.stack([own(one) for one in x]), rtol=0, atol=1e-14)


def test_one_logit_is_the_cross_entropy_of_two_classes():
    logits, y = torch.tensor([[1.5], [-0.5]]), torch.tensor([0, 1])
    expected = split_loss(torch.cat([torch.zeros(2, 1), logits], 1), y)
    torch.testing.assert_close(split_loss(logits, y), expected)


def test_a_users_own_model_plugs_in_by_import_path(write_module):
    write_module("own_split", OWN_MODEL)
    one, two = (split_model("own_split:build", (3,), (2,), 5, seed=1) for _ in range(2))
    assert np.array_equal(one.head.weight.weight.detach(), two.head.weight.weight.detach())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("wrong", r"gives shapes .* for two samples; valid is \(\(2, 4\), \(2, 3\)"),
        ("nothing", "returned a Linear; valid is a SplitModel"),
    ],
)
def test_a_users_wrong_model_is_an_error(write_module, function, message):
    write_module(f"own_split_{function}", OWN_MODEL)
    with pytest.raises(ValueError, match=message):
        split_model(f"own_split_{function}:{function}", (3,), (2,), 5, seed=1)


def test_running_statistics_are_refused():
    pieces = (nn.Linear(2, 1), nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), nn.Linear(1, 1))
    with pytest.raises(
        ValueError, match=r"'hospital\.1\.num_batches_tracked'; valid are trainable parameters"
    ):
        SplitModel(*pieces, 1, 1)
