"""ResNet-18 for small images: a 3x3 stem without pooling, as is usual on CIFAR.

Paper: K. He et al., "Deep Residual Learning for Image Recognition"; used by Li et al. (FedMUD), experiments,
who do not state the stem.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from .layout import ChannelsLast

__all__ = ["ResNet"]


class ResNet(nn.Module):
    """Stages of two basic blocks each, then the mean over the image and a linear classifier.

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
