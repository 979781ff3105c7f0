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
    ("arguments", "parameters", "encodings", "logits"),
    [
        (("cnn", IMAGE, IMAGE, 11), (19_211, 3_424, 3_424), (144, 144), 11),
        (("lstm", (48, 38), (48, 38), 2), (33, 3_584, 3_584), (16, 16), 1),
        (("lstm", (89, 1), (89, 1), 5), (165, 1_216, 1_216), (16, 16), 5),
        (
            ("mlp", (10,), (4,), 2),
            (145, 261, 114),
            (5, 2),
            1,
        ),
        (("mlp", (1,), (1,), 5), None, None, 5),
    ],
)
def test_a_model_has_the_sizes_that_are_planned_with(arguments, parameters, encodings, logits):
    model = split_model(*arguments, seed=0)
    x1, x2 = (torch.ones(3, *shape) for shape in arguments[1:3])
    found = (model.hospital_encoding, model.device_encoding)
    assert parameters in (None, sizes(model))
    assert encodings in (None, found)
    assert (model.hospital(x1).shape, model.device(x2).shape) == ((3, found[0]), (3, found[1]))
    assert model(x1, x2).shape == (3, logits)
    blocks = [key.partition(".")[0] for key in model.state_dict()]
    assert blocks == sorted(blocks, key=["head", "hospital", "device"].index)


def test_an_encoding_of_a_table_is_shorter_than_its_features():
    for features in range(2, 40):
        assert split_model("mlp", (features,), (features,), 2, seed=0).device_encoding < features


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


def test_the_lstm_and_its_gradients_are_torchs():
    own, torchs = own_and_torchs()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 11, 3, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(7, 5, dtype=torch.float64, generator=generator)
    outputs = own(x), torchs(x)[1][0][0]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-14)
    found = torch.autograd.grad((outputs[0] * weight).sum(), [x, *own.parameters()])
    expected = torch.autograd.grad((outputs[1] * weight).sum(), [x, *torchs.parameters()])
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
        of_one = torch.autograd.grad(alone.sum(), list(one.values()))
        for found, expected in zip(gradients, of_one, strict=True):
            torch.testing.assert_close(found[member], expected, rtol=0, atol=1e-13)
    # Of shared weights too.
    torch.testing.assert_close(vmap(own)(x), torch.stack([own(one) for one in x]), rtol=0, atol=1e-14)


def test_one_logit_is_the_cross_entropy_of_two_classes():
    logits, y = torch.tensor([[1.5], [-0.5]]), torch.tensor([0, 1])
    expected = split_loss(torch.cat([torch.zeros(2, 1), logits], 1), y)
    torch.testing.assert_close(split_loss(logits, y), expected)


def test_a_users_own_model_plugs_in_by_import_path_and_a_wrong_one_is_an_error(write_module):
    write_module("own_split", OWN_MODEL)
    one, two = (split_model("own_split:build", (3,), (2,), 5, seed=1) for _ in range(2))
    assert np.array_equal(one.head.weight.weight.detach(), two.head.weight.weight.detach())
    for function, message in {
        "wrong": r"must give the shapes \(\(2, 4\), \(2, 3\).* for two samples, got",
        "nothing": "must return a SplitModel, got a Linear",
    }.items():
        with pytest.raises(ValueError, match=message):
            split_model(f"own_split:{function}", (3,), (2,), 5, seed=1)


def test_running_statistics_are_refused():
    pieces = (nn.Linear(2, 1), nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), nn.Linear(1, 1))
    with pytest.raises(
        ValueError, match=r"trainable parameters only, got 'hospital\.1\.num_batches_tracked'"
    ):
        SplitModel(*pieces, 1, 1)
