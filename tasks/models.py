"""Models by name, initialised from a seed.

``lenet`` is the 21,840-parameter network of Sun et al., Semi-Decentralized Federated Edge Learning,
experiments (after the network of Liu et al., Client-Edge-Cloud Hierarchical Federated Learning);
``cnn-431k`` is that of Beikmohammadi, Khirirat and Magnússon, On the Convergence of Federated Learning
Algorithms without Data Similarity, experiments. Both apply ReLU after max-pooling; the order is immaterial.
``cnn4``, ``cnn8``, ``cnn10`` and ``resnet18`` are those of Li et al., The Panaceas for Improving Low-Rank
Decomposition in Communication-Efficient Federated Learning (FedMUD), experiments: its text gives the CIFAR
network eight convolutions, its authors' code ten.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from hedgerow.global_draws import GlobalDraws, seed_global_draws

from .checks import at_least, is_number
from .imports import call_imported, is_import_path
from .layout import ChannelsLast
from .modes import evaluating

Shape = tuple[int, ...]

# Random streams are keyed (seed, 0, 0, purpose), as in the whole suite; 1 is the purpose "model".
_PURPOSE = 1


def build_model(
    name: str, input_shape: Shape, num_classes: int, seed: int, *, dropout: float = 0.0
) -> nn.Module:
    """Return a model on the CPU, in training mode, that maps (N, *input_shape) to logits (N, num_classes).

    Parameters
    ----------
    name : str
        - ``"lenet"``: two 5x5 convolutions (10, 20 channels) and a hidden layer of 50.
        - ``"cnn-431k"``: two 5x5 convolutions (20, 50 channels) and a hidden layer of 500.
        - ``"cnn4"``: four blocks of a 3x3 convolution without bias (32, 64, 128, 256 channels), batch
          normalization, ReLU and max-pooling by 2; a classifier without bias.
        - ``"cnn8"``: the same with eight convolutions, two of each width, pooling after every second.
        - ``"cnn10"``: the same with ten, up to 512 channels.
        - ``"resnet18"``: ResNet-18 with a 3x3 stem without pooling.
        - ``"logistic"``: softmax regression.
        - ``"mlp"``: one hidden layer of 200.
        - ``"text-transformer"``: two encoder layers of width 64 on token ids (T,), see ``TextTransformer``.
        - ``module:function``: a function (input_shape, num_classes) that returns a ``torch.nn.Module``.
    input_shape : tuple of int
        The shape of one sample; (C, H, W) with H, W >= 16 for the convolutional ones, >= 32 for
        ``"cnn10"``; (T,) for ``"text-transformer"``.
    num_classes : int
        Number of classes, at least 2.
    seed : int
        The run's seed, >= 0. Layers are initialized as torch does by default, except in models with batch
        normalization, whose weights are N(0, 0.01^2) and biases 0. The draws come from their own generator:
        the same seed gives the same bits, and torch's global generator is restored.
    dropout : float (default: 0.0)
        ``"lenet"`` only, in [0, 1): dropout after the second convolution and the hidden layer; 0 for none.
        Its masks come from torch's global generator, which the suite's clients seed for each node and round.

    Raises
    ------
    ValueError
        If an argument is out of range, or the user's function did not return such a model.
    """
    _check_arguments(name, input_shape, num_classes, seed, dropout)
    if is_import_path(name):
        return _build_own(name, input_shape, num_classes, seed)
    options = {"dropout": dropout} if name == "lenet" else {}
    # Layers draw on construction; the meta device would not, but takes half a second to import.
    with GlobalDraws.restored():
        model: nn.Module = _BUILDERS[name](input_shape, num_classes, **options)
    draw = _initialise_normal if name in _BATCH_NORMALISED else initialise
    draw(model, weight_generator(seed))
    return model


def input_type(model: nn.Module, input_shape: Shape) -> torch.dtype:
    """Return the type of samples that a model takes: float32, or int64 if it takes ids only.

    What the model raises for float32 is raised if it takes neither.
    """
    return _outputs(model, input_shape, num_samples=2)[1]


def check_takes(name: str, dtype: str) -> None:
    """Raise ValueError if a model of the suite would get ids (integers) for measurements, or the reverse."""
    if name not in MODELS or dtype.startswith(("int", "uint")) == (name in OF_IDS):
        return
    if name in OF_IDS:
        raise ValueError(
            f"model must be one of measurements, got {name!r}, which takes ids: the samples are {dtype}"
        )
    raise ValueError(
        f"model must be {', '.join(OF_IDS)}, or an import path module:function of a model of ids, got "
        f"{name!r}: the samples are {dtype}, and integers stay as they are. If they are measurements, save "
        "them as float32"
    )


def count_parameters(model: nn.Module) -> int:
    """Return the number of trainable scalars."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def forward_macs(model: nn.Module, input_shape: Shape) -> int:
    """Return the multiply-accumulates of one sample's forward pass, in matrix products and convolutions.

    Biases, activations, pooling and normalization are not counted.

    Parameters
    ----------
    model : Module
        Any model that takes a batch (N, *input_shape).
    input_shape : tuple of int
        The shape of one sample.
    """
    if all(type(module) in (*_WITH_PRODUCTS, *_WITHOUT_PRODUCTS) for module in model.modules()):
        return _products(model, input_shape)
    _, dtype = _outputs(model, input_shape, num_samples=2)
    counter = FlopCounterMode(display=False)
    with counter:
        _logits(model, input_shape, 2, dtype)  # One sample has no batch statistics.
    return counter.get_total_flops() // 4  # Of two samples; a multiply-accumulate is two operations.


def _products(model: nn.Module, input_shape: Shape) -> int:
    """Count from the layers' outputs, because PyTorch's counter takes most of a second to import."""
    counts: list[int] = []

    def count(module: Any, inputs: Any, output: torch.Tensor) -> None:
        counts.append(output.numel() * module.weight[0].numel())

    layers = [module for module in model.modules() if type(module) in _WITH_PRODUCTS]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    try:
        _logits(model, input_shape, 1, torch.float32)
    finally:
        for hook in hooks:
            hook.remove()
    return sum(counts)


def _check_arguments(name: str, input_shape: Shape, num_classes: int, seed: int, dropout: float) -> None:
    if name not in _BUILDERS and not is_import_path(name):
        known = ", ".join(MODELS)
        raise ValueError(f"model must be one of {known}, or an import path module:function, got {name!r}")
    if not input_shape or min(input_shape) < 1:
        raise ValueError(f"input_shape must be positive lengths, got {input_shape}")
    side = _SMALLEST_SIDE.get(name)
    if side is not None and (len(input_shape) != 3 or min(input_shape[1:]) < side):
        raise ValueError(f"input_shape must be (C, H, W) with H, W >= {side} for {name}, got {input_shape}")
    if name in OF_IDS and len(input_shape) != 1:
        raise ValueError(f"input_shape must be (T,) token ids for {name}, got {input_shape}")
    at_least(2, num_classes=num_classes)
    at_least(0, seed=seed)
    if not is_number(dropout) or not 0 <= dropout < 1:
        raise ValueError(f"dropout must be a number in [0, 1), got {dropout!r}")
    if dropout and name != "lenet":
        raise ValueError(f"dropout must be 0 with {name}, which has none, got {dropout}")


def _lenet(input_shape: Shape, num_classes: int, dropout: float) -> nn.Module:
    return _two_convolutions(input_shape, num_classes, channels=(10, 20), hidden=50, dropout=dropout)


def _cnn_431k(input_shape: Shape, num_classes: int) -> nn.Module:
    return _two_convolutions(input_shape, num_classes, channels=(20, 50), hidden=500)


def _two_convolutions(
    input_shape: Shape, num_classes: int, channels: tuple[int, int], hidden: int, dropout: float = 0.0
) -> nn.Module:
    height, width = (((length - 4) // 2 - 4) // 2 for length in input_shape[1:])
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        layout=ChannelsLast(),
        conv1=nn.Conv2d(input_shape[0], channels[0], 5),
        pool1=nn.MaxPool2d(2),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(channels[0], channels[1], 5),
        drop2=nn.Dropout2d(dropout),
        pool2=nn.MaxPool2d(2),
        relu2=nn.ReLU(),
        flatten=nn.Flatten(),
        linear1=nn.Linear(channels[1] * height * width, hidden),
        relu3=nn.ReLU(),
        drop3=nn.Dropout(dropout),
        linear2=nn.Linear(hidden, num_classes),
    )
    if not dropout:
        del layers["drop2"], layers["drop3"]
    return nn.Sequential(layers)


def _cnn4(input_shape: Shape, num_classes: int) -> nn.Module:
    return _plain_cnn(input_shape, num_classes, widths=(32, 64, 128, 256), convolutions=1)


def _cnn8(input_shape: Shape, num_classes: int) -> nn.Module:
    return _plain_cnn(input_shape, num_classes, widths=(32, 64, 128, 256), convolutions=2)


def _cnn10(input_shape: Shape, num_classes: int) -> nn.Module:
    return _plain_cnn(input_shape, num_classes, widths=(32, 64, 128, 256, 512), convolutions=2)


def _plain_cnn(input_shape: Shape, num_classes: int, widths: tuple[int, ...], convolutions: int) -> nn.Module:
    """Return blocks of ``convolutions`` each, without biases; each block halves the image."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(layout=ChannelsLast())
    channels, number = input_shape[0], 0
    for block, width in enumerate(widths, start=1):
        for _ in range(convolutions):
            number += 1
            layers[f"conv{number}"] = nn.Conv2d(channels, width, 3, padding=1, bias=False)
            layers[f"bn{number}"] = nn.BatchNorm2d(width)
            layers[f"relu{number}"] = nn.ReLU()
            channels = width
        layers[f"pool{block}"] = nn.MaxPool2d(2)
    height, width = (length >> len(widths) for length in input_shape[1:])
    layers["flatten"] = nn.Flatten()
    layers["linear"] = nn.Linear(channels * height * width, num_classes, bias=False)
    return nn.Sequential(layers)


def _resnet18(input_shape: Shape, num_classes: int) -> nn.Module:
    return ResNet(input_shape[0], num_classes)


def _logistic(input_shape: Shape, num_classes: int) -> nn.Module:
    return nn.Sequential(
        OrderedDict(flatten=nn.Flatten(), linear=nn.Linear(math.prod(input_shape), num_classes))
    )


def _mlp(input_shape: Shape, num_classes: int, hidden: int = 200) -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            linear1=nn.Linear(math.prod(input_shape), hidden),
            relu1=nn.ReLU(),
            linear2=nn.Linear(hidden, num_classes),
        )
    )


def _text_transformer(input_shape: Shape, num_classes: int) -> nn.Module:
    return TextTransformer(input_shape[0], num_classes)


def initialise(model: nn.Module, generator: np.random.Generator) -> None:
    """Draw every weight and bias from U(-b, b), b = 1 / sqrt(inputs of a unit), as torch does by default.

    An embedding's are N(0, 1 / width), so that its rows have norm 1 on average.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            bound = 1 / math.sqrt(layer.weight[0].numel())  # weight[0]: the inputs of one unit
            draw_uniform(layer.weight, bound, generator)
            if layer.bias is not None:
                draw_uniform(layer.bias, bound, generator)
        elif isinstance(layer, nn.Embedding):
            draw_normal(layer.weight, 1 / math.sqrt(layer.embedding_dim), generator)


def _initialise_normal(model: nn.Module, generator: np.random.Generator) -> None:
    """Draw every weight from N(0, 0.01^2); biases are 0, batch normalisation is the identity."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            draw_normal(layer.weight, 0.01, generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.BatchNorm2d):
            layer.reset_parameters()


def _torch_seed(seed: int) -> int:
    word = np.random.SeedSequence([seed, 0, 0, _PURPOSE]).generate_state(1, np.uint64)[0]
    return int(word >> np.uint64(1))


def _build_own(path: str, input_shape: Shape, num_classes: int, seed: int) -> nn.Module:
    # A user's constructors draw from the global generator, which is seeded for them and then restored.
    with GlobalDraws.restored():
        seed_global_draws(_torch_seed(seed))
        model = call_imported("model", path, input_shape, num_classes)
        if not isinstance(model, nn.Module):
            raise ValueError(f"model = {path!r} must return a Module, got a {type(model).__name__}")
        try:
            shape = tuple(_outputs(model, input_shape, num_samples=2)[0].shape)
        except Exception as error:  # a user's model may raise anything
            raise ValueError(
                f"model = {path!r} must take inputs of shape {input_shape} and return a tensor of logits "
                f"({error})"
            ) from error
    if shape != (2, num_classes):
        raise ValueError(
            f"model = {path!r} must give the shape {(2, num_classes)} for two samples of {input_shape}, got "
            f"{shape}"
        )
    return model


def _outputs(model: nn.Module, input_shape: Shape, num_samples: int) -> tuple[torch.Tensor, torch.dtype]:
    """Return a model's outputs for zeros, and the type of these: float32, or int64 if it takes ids only."""
    try:
        return _logits(model, input_shape, num_samples, torch.float32), torch.float32
    except Exception as error:  # a user's model may raise anything
        try:
            return _logits(model, input_shape, num_samples, torch.int64), torch.int64
        except Exception:
            raise error from None


def _logits(model: nn.Module, input_shape: Shape, num_samples: int, dtype: torch.dtype) -> torch.Tensor:
    parameter = next(model.parameters(), torch.empty(0))
    with evaluating(model), GlobalDraws.restored():
        zeros = torch.zeros(num_samples, *input_shape, dtype=dtype, device=parameter.device)
        return torch.as_tensor(model(zeros))


_WITH_PRODUCTS = (nn.Conv2d, nn.Linear)
_WITHOUT_PRODUCTS = (
    nn.Sequential, nn.Flatten, nn.Identity, nn.ReLU, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
    nn.Dropout, nn.Dropout2d, nn.BatchNorm2d, nn.GroupNorm, ChannelsLast,
)  # fmt: skip

_BUILDERS: dict[str, Callable[..., Any]] = {
    "lenet": _lenet,
    "cnn-431k": _cnn_431k,
    "cnn4": _cnn4,
    "cnn8": _cnn8,
    "cnn10": _cnn10,
    "resnet18": _resnet18,
    "logistic": _logistic,
    "mlp": _mlp,
    "text-transformer": _text_transformer,
}
_SMALLEST_SIDE = {"lenet": 16, "cnn-431k": 16, "cnn4": 16, "cnn8": 16, "cnn10": 32, "resnet18": 16}
_BATCH_NORMALISED = {"cnn4", "cnn8", "cnn10", "resnet18"}
# Models of token ids; all others take measurements.
OF_IDS = ("text-transformer",)

MODELS = tuple(_BUILDERS)


class ResNet(nn.Module):
    """ResNet-18 for small images: a 3x3 stem without pooling, as is usual on CIFAR.

    Paper: K. He et al., "Deep Residual Learning for Image Recognition"; used by Li et al. (FedMUD), who do
    not state the stem. Stages of two basic blocks each, then the mean over the image and a linear classifier.

    Parameters
    ----------
    in_channels, num_classes : int
        Channels of an image; classes.
    widths : sequence of int (default: (64, 128, 256, 512))
        Channels of the stages; each stage after the first halves the image. The default is ResNet-18.
    """

    def __init__(
        self, in_channels: int, num_classes: int, widths: Sequence[int] = (64, 128, 256, 512)
    ) -> None:
        super().__init__()
        self.layout = ChannelsLast()
        self.conv1 = _conv3x3(in_channels, widths[0])
        self.bn1 = nn.BatchNorm2d(widths[0])
        blocks: list[nn.Module] = []
        for stage, (before, width) in enumerate(zip((widths[0], *widths), widths, strict=False)):
            blocks += [_BasicBlock(before, width, stride=2 if stage else 1), _BasicBlock(width, width)]
        self.blocks = nn.Sequential(*blocks)
        self.linear = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, num_classes) of images (N, in_channels, H, W)."""
        features = self.blocks(functional.relu(self.bn1(self.conv1(self.layout(x)))))
        logits: Tensor = self.linear(features.mean(dim=(2, 3)))
        return logits


class _BasicBlock(nn.Module):
    def __init__(self, in_channels: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = _conv3x3(in_channels, channels, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv3x3(channels, channels)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(hidden)) + self.shortcut(x))


def _conv3x3(in_channels: int, channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)


class TextTransformer(nn.Module):
    """A small encoder of token ids, the mean over a row's tokens, and a linear classifier.

    Paper: A. Vaswani et al., "Attention Is All You Need", Section 3.1 (encoder). Differs: normalisation comes
    before each block, positions are learned, and there is no dropout.

    Parameters
    ----------
    length, num_classes : int
        Ids per row T, and classes.
    vocabulary : int (default: 2048)
        Rows of the embedding; an id uses row id modulo this, so ids of any tokenizer work.
    width, layers, heads : int (default: 64, 2, 4)
        Width of a token, a multiple of ``heads``; encoder layers; heads of their attention. With the
        defaults, T = 48 and three classes it has 201,411 parameters.
    """

    def __init__(
        self,
        length: int,
        num_classes: int,
        vocabulary: int = 2048,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.layers = nn.ModuleList(_EncoderLayer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, num_classes) of token ids (N, T); -1 is no token."""
        mask = x >= 0
        hidden = self.embedding(x.clamp(min=0) % self.embedding.num_embeddings) + self.position.weight
        for layer in self.layers:
            hidden = layer(hidden, mask)  # (N, T, width)
        tokens = mask[..., None].to(hidden.dtype)
        mean = (self.norm(hidden) * tokens).sum(1) / tokens.sum(1).clamp(min=1)
        logits: Tensor = self.head(mean)
        return logits


class _EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dense = nn.Linear(width, width)
        self.dense_in, self.dense_out = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        hidden = hidden + self._attention(self.norm1(hidden), mask)
        out: Tensor = hidden + self.dense_out(functional.relu(self.dense_in(self.norm2(hidden))))
        return out

    def _attention(self, hidden: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            layer(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (N, heads, T, width / heads)
            for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])  # (N, heads, T, T)
        # Not -inf, which gives NaN for a row without tokens.
        scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        mixed: Tensor = self.dense((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        return mixed


def weight_generator(seed: int) -> np.random.Generator:
    """Return the random stream of a run's initial weights.

    They are drawn by NumPy, the same on every processor: torch's own draws (``torch.nn.init``) differ in the
    last bits from one instruction set to another.
    """
    return np.random.default_rng(np.random.SeedSequence([seed, 0, 0, _PURPOSE]))


def draw_uniform(parameter: Tensor, bound: float, generator: np.random.Generator) -> None:
    """Fill a parameter with draws from U(-bound, bound)."""
    _fill(parameter, bound * (2 * generator.random(tuple(parameter.shape)) - 1))


def draw_normal(parameter: Tensor, deviation: float, generator: np.random.Generator) -> None:
    """Fill a parameter with draws from N(0, deviation^2)."""
    _fill(parameter, deviation * generator.standard_normal(tuple(parameter.shape)))


def _fill(parameter: Tensor, values: np.ndarray) -> None:
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(values))
