"""The frozen arrays of a model: those that no training changes, which every node holds from the start.

These are the parameters without gradient and the constant buffers. Messages have their checksum alone. A node
takes them from its own model, or from the run's initial one; if neither has the checksum, its reply fails,
and the server sends them to it once.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from hedgerow.global_draws import GlobalDraws
from hedgerow.kept_values import values_kept
from hedgerow.wire.records import checksum, to_record

# The config entry of messages, and the ArrayRecord that a node which lacks the arrays is sent.
FROZEN_CHECKSUM, FROZEN = "frozen-checksum", "frozen"
# The config entry of messages to nodes that train and keep some layers themselves: their patterns. The
# initial values of these layers are frozen arrays of the run.
LOCAL_LAYERS = "local-layers"
# Buffers of normalisation, which move in training.
_MOVING = ("running_mean", "running_var", "num_batches_tracked")


def frozen_keys(model: nn.Module, x: Tensor | None = None) -> tuple[str, ...]:
    """Return the keys of a model's state dict that no training changes, in its order.

    - ``model``: Its parameters with ``requires_grad=False``, unless none else is left to train.
    - ``x``: A batch of inputs. A buffer is constant if a forward pass of it in training mode does not change
      it; without ``x``, or if the pass fails, none is. The model is left as it was.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    state = model.state_dict(keep_vars=True)
    buffers = {key: value for key, value in state.items() if key not in parameters}
    constant = set[str]()
    if x is not None and any(not key.endswith(_MOVING) for key in buffers):
        constant = _constant(model, {k: v for k, v in buffers.items() if isinstance(v, Tensor)}, x)
    frozen = {key for key, value in parameters.items() if not value.requires_grad} | constant
    return tuple(key for key in state if key in frozen) if parameters.keys() - frozen else ()


def _constant(model: nn.Module, buffers: Mapping[str, Tensor], x: Tensor) -> set[str]:
    """Return the buffers that a forward pass in training mode leaves as they are."""
    before = {key: value.clone() for key, value in buffers.items()}
    training = model.training
    try:
        with torch.no_grad(), GlobalDraws.restored(), values_kept(model):
            model.train()
            model(x)
            return {key for key, value in buffers.items() if _same(before[key], model.state_dict()[key])}
    except Exception:  # Not a batch that the model takes.
        return set()
    finally:
        model.train(training)
        with torch.no_grad():
            for key, value in buffers.items():
                if not _same(before[key], value):
                    value.copy_(before[key])


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def checksum_of(state: Mapping[str, Any], keys: Iterable[str]) -> str:
    """Return the checksum of some entries of a state dict, in the order of their names."""
    return checksum(to_record({key: state[key] for key in sorted(keys)}))


def local_keys(patterns: str, keys: Iterable[str]) -> tuple[str, ...]:
    """Return the keys that match one of the patterns, such as ``*bn*`` or ``head.*,bn?.*``, in order."""
    wanted = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    return tuple(key for key in keys if any(fnmatchcase(key, pattern) for pattern in wanted))
