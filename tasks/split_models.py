"""Models in three pieces: the hospital's encoder, the device's encoder, and the head over both encodings.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", experiments: convolutions without fully connected
layers for images, LSTMs for series. The text lacks the figure with the layers' sizes, so the sizes are ours,
as are the networks for tables. There is no batch normalisation, because a device's batch is one sample.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from hedgerow.global_draws import GlobalDraws, seed_global_draws

from .checks import at_least
from .imports import call_imported, is_import_path
from .lstm import LSTM
from .models import _torch_seed, initialise, weight_generator
from .modes import evaluating

Shape = tuple[int, ...]


class SplitModel(nn.Module):
    """The three pieces; ``model(x1, x2)`` is ``head(hospital(x1), device(x2))``.

    Parameters
    ----------
    head : Module
        theta_0: (batch, e_1) and (batch, e_2) to logits (batch, classes), or (batch, 1) for two classes.
    hospital, device : Module
        theta_1 and theta_2: (batch, ...) to encodings (batch, e_1) and (batch, e_2).
    hospital_encoding, device_encoding : int
        e_1 and e_2, >= 1.

    Raises
    ------
    ValueError
        If an encoding's length is not an integer >= 1, or the pieces have buffers: the method does not
        average or exchange running statistics.
    """

    def __init__(
        self,
        head: nn.Module,
        hospital: nn.Module,
        device: nn.Module,
        hospital_encoding: int,
        device_encoding: int,
    ) -> None:
        super().__init__()
        at_least(1, hospital_encoding=hospital_encoding, device_encoding=device_encoding)
        self.head, self.hospital, self.device = head, hospital, device
        self.hospital_encoding, self.device_encoding = hospital_encoding, device_encoding
        buffers = sorted(set(self.state_dict()) - {name for name, _ in self.named_parameters()})
        if buffers:
            raise ValueError(f"the model must have trainable parameters only, got {buffers[0]!r}")

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Return the logits of samples with the parts x1 and x2."""
        logits: Tensor = self.head(self.hospital(x1), self.device(x2))
        return logits


class _Head(nn.Module):
    """Layers over both encodings, concatenated."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        logits: Tensor = self.layers(torch.cat([z1, z2], -1))
        return logits


def split_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Return each sample's cross-entropy in nats, (batch,).

    Parameters
    ----------
    logits : Tensor, (batch, classes)
        One column is the logit of class 1 against class 0.
    y : Tensor of int64, (batch,)
        Classes.
    """
    if logits.shape[-1] == 1:
        return functional.binary_cross_entropy_with_logits(
            logits.squeeze(-1), y.to(logits.dtype), reduction="none"
        )
    return functional.cross_entropy(logits, y, reduction="none")


@lru_cache(maxsize=8)
def weighted_loss(weights: tuple[float, ...]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return ``split_loss`` times the weight of a sample's class, cached by weights.

    Parameters
    ----------
    weights : tuple of float
        One for each class, > 0; empty for ``split_loss`` itself.
    """
    if not weights:
        return split_loss

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return split_loss(logits, y) * torch.tensor(weights, dtype=logits.dtype)[y]

    return loss


def split_model(
    name: str, hospital_shape: Shape, device_shape: Shape, num_classes: int, seed: int
) -> SplitModel:
    """Return a model in three pieces, on the CPU and in float32.

    Parameters
    ----------
    name : str
        - ``"auto"``: by the larger number of axes of the parties' samples, 1 ``mlp``, 2 ``lstm``, 3 ``cnn``.
        - ``"cnn"``: for both, two 5x5 convolutions of stride 2 (8, 16 channels) with ReLU, and max-pooling
          by 2; a head with a hidden layer of 64. 28x28 gray images, both parties' on the whole canvas:
          e = 144, 3,424 parameters per encoder; 19,211 in the head of 11 classes.
        - ``"lstm"``: for both, an LSTM of 16 units, e = 16; a linear head.
        - ``"mlp"``: for both, a hidden layer of 16 and e = 8, or half the number of features if that is less:
          from an encoding as long as the features they could be reconstructed. A head with a hidden layer of
          16.
        - ``module:function``: a function (hospital_shape, device_shape, num_classes) that returns a
          ``SplitModel``.
    hospital_shape, device_shape : tuple of int
        The shape of one sample's part: (channels, height, width) of at least 8 pixels a side for ``cnn``,
        (steps, features) for ``lstm``, any for ``mlp``.
    num_classes : int
        At least 2; two classes have one logit.
    seed : int
        The run's seed, >= 0. Layers are initialized as torch does by default, from their own generator;
        torch's global generator is restored.

    Raises
    ------
    ValueError
        If an argument is out of range, or the user's function did not return such a model.
    """
    if name == "auto":
        name = _BY_AXES.get(max(len(hospital_shape), len(device_shape)), "mlp")
    if name not in SPLIT_MODELS and not is_import_path(name):
        known = ", ".join(("auto", *SPLIT_MODELS))
        raise ValueError(f"model must be one of {known}, or an import path module:function, got {name!r}")
    for key, shape in (("hospital_shape", hospital_shape), ("device_shape", device_shape)):
        if not shape or min(shape) < 1:
            raise ValueError(f"{key} must be positive lengths, got {shape}")
    at_least(2, num_classes=num_classes)
    at_least(0, seed=seed)
    if is_import_path(name):
        return _build_own(name, hospital_shape, device_shape, num_classes, seed)
    with GlobalDraws.restored():  # as in ``build_model``
        hospital, e1 = _ENCODERS[name](hospital_shape)
        device, e2 = _ENCODERS[name](device_shape)
        logits = 1 if num_classes == 2 else num_classes
        model = SplitModel(_HEADS[name](e1 + e2, logits), hospital, device, e1, e2)
    generator = weight_generator(seed)
    for piece in (model.head, model.hospital, model.device):
        initialise(piece, generator)
        for layer in piece.modules():
            if isinstance(layer, LSTM):
                layer.reset(generator)
    return model


def _cnn_encoder(shape: Shape) -> tuple[nn.Module, int]:
    if len(shape) != 3 or min(shape[1:]) < 8:
        raise ValueError(f"model = 'cnn': a sample must have the shape (C, H, W) with H, W >= 8, got {shape}")
    sides = [(length + 3) // 4 // 2 for length in shape[1:]]  # two strides round up, the pool down
    layers = nn.Sequential(
        nn.Conv2d(shape[0], 8, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    return layers, 16 * math.prod(sides)


def _lstm_encoder(shape: Shape) -> tuple[nn.Module, int]:
    if len(shape) != 2:
        raise ValueError(f"model = 'lstm': a sample must have the shape (steps, features), got {shape}")
    return LSTM(shape[1], 16), 16


def _mlp_encoder(shape: Shape) -> tuple[nn.Module, int]:
    features = math.prod(shape)
    encoding = max(1, min(8, features // 2))
    layers = nn.Sequential(
        nn.Flatten(), nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, encoding), nn.ReLU()
    )
    return layers, encoding


def _hidden_head(hidden: int) -> Callable[[int, int], nn.Module]:
    return lambda encodings, logits: _Head(nn.Linear(encodings, hidden), nn.ReLU(), nn.Linear(hidden, logits))


def _linear_head(encodings: int, logits: int) -> nn.Module:
    return _Head(nn.Linear(encodings, logits))


def _build_own(
    path: str, hospital_shape: Shape, device_shape: Shape, num_classes: int, seed: int
) -> SplitModel:
    # A user's constructors draw from the global generator, which is seeded for them and then restored.
    with GlobalDraws.restored():
        seed_global_draws(_torch_seed(seed))
        model = call_imported("model", path, hospital_shape, device_shape, num_classes)
    if not isinstance(model, SplitModel):
        raise ValueError(f"model = {path!r} must return a SplitModel, got a {type(model).__name__}")
    dtype = next(model.parameters()).dtype
    with evaluating(model), GlobalDraws.restored():
        z1 = model.hospital(torch.zeros(2, *hospital_shape, dtype=dtype))
        z2 = model.device(torch.zeros(2, *device_shape, dtype=dtype))
        shapes = tuple(z1.shape), tuple(z2.shape), tuple(model.head(z1, z2).shape)
    logits = 1 if num_classes == 2 else num_classes
    valid = (2, model.hospital_encoding), (2, model.device_encoding), (2, logits)
    if shapes != valid and shapes != (*valid[:2], (2, num_classes)):
        raise ValueError(f"model = {path!r} must give the shapes {valid} for two samples, got {shapes}")
    return model


_ENCODERS: dict[str, Callable[[Shape], tuple[nn.Module, int]]] = {
    "cnn": _cnn_encoder,
    "lstm": _lstm_encoder,
    "mlp": _mlp_encoder,
}
_HEADS: dict[str, Callable[[int, int], nn.Module]] = {
    "cnn": _hidden_head(64),
    "lstm": _linear_head,
    "mlp": _hidden_head(16),
}

SPLIT_MODELS = tuple(_ENCODERS)
# Features, steps x features, channels x height x width.
_BY_AXES = {1: "mlp", 2: "lstm", 3: "cnn"}
