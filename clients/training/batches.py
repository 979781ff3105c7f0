"""A node's mini-batches, each a function of (seed, node, iteration or round) alone.

Whole local epochs follow S. Li et al., "The Panaceas for Improving Low-Rank Decomposition in
Communication-Efficient Federated Learning" (FedMUD), Section 5: E epochs over a node's samples, reshuffled
in each.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from hedgerow.global_draws import GlobalDraws
from hedgerow.tasks import augmented
from hedgerow.wire.checks import at_least
from hedgerow.wire.seeds import Purpose, generator, generators

# The values of ``drop-last``: leave out an epoch's last batch if the model fails on it, if shorter, or never.
DROP_LAST = ("auto", "always", "never")

Work = TypeVar("Work", bound=Any)

_fails_on_one: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def batch_indices(
    seed: int, partition_id: int, iteration: int, num_samples: int, batch_size: int
) -> NDArray[np.int64]:
    """Return a client's mini-batch in one iteration (from 1), drawn without replacement.

    It is all ``num_samples``, in order, if there are no more than ``batch_size``.
    """
    if num_samples <= batch_size:
        return np.arange(num_samples)
    stream = generator(seed, round=iteration, partition_id=partition_id, purpose=Purpose.BATCH)
    return stream.choice(num_samples, batch_size, replace=False)


def step_batches(
    parts: Sequence[NDArray[np.int64]],
    *,
    seed: int,
    partition_ids: Sequence[int],
    done: int,
    steps: Sequence[int],
    batch_size: int,
) -> list[list[NDArray[np.int64]]]:
    """Return each client's mini-batches of the iterations done + 1 to done + steps.

    They equal those of ``batch_indices``, but all streams are seeded at once.
    """
    iterations = [
        range(done + 1, done + n + 1) if len(p) > batch_size else ()
        for p, n in zip(parts, steps, strict=True)
    ]
    rounds = [k for own in iterations for k in own]
    nodes = [i for i, own in zip(partition_ids, iterations, strict=True) for _ in own]
    streams = iter(generators(seed, rounds, nodes, Purpose.BATCH))
    return [
        [part[next(streams).choice(len(part), batch_size, replace=False)] for _ in own] if own else [part] * n
        for part, own, n in zip(parts, iterations, steps, strict=True)
    ]


def epoch_batches(
    part: NDArray[np.int64],
    *,
    seed: int,
    round: int,
    partition_id: int,
    epochs: int,
    batch_size: int,
    shortest: int = 1,
) -> list[NDArray[np.int64]]:
    """Return the batches of a node's local epochs; each epoch contains every sample once.

    - ``part``: The node's samples, at least one.
    - ``seed``, ``round``, ``partition_id``: The stream of the order, each >= 0.
    - ``epochs``, ``batch_size``: E and B, each >= 1. An epoch's last batch may be shorter.
    - ``shortest``: Smallest last batch, >= 1; a shorter one is left out, unless it is the only one.
    """
    at_least(1, epochs=epochs, batch_size=batch_size, shortest=shortest)
    if not len(part):
        raise ValueError(f"part of node {partition_id} must have at least 1 sample to train on, got 0")
    stream = generator(seed, round=round, partition_id=partition_id, purpose=Purpose.BATCH)
    ends = range(batch_size, len(part), batch_size)
    orders = [np.split(stream.permutation(part), ends) for _ in range(epochs)]
    return [batch for batches in orders for batch in batches if batch is batches[0] or len(batch) >= shortest]


def fails_on_one(model: nn.Module, sample: Tensor) -> bool:
    """Return whether a model cannot train on one sample (1, ...), as batch normalisation often cannot.

    It is tried once per model; the model and the global generators stay as they are.
    """
    if model not in _fails_on_one:
        was_training = model.training
        model.train()
        try:
            held = {key: value.clone() for key, value in (*model.named_parameters(), *model.named_buffers())}
            with GlobalDraws.restored(), torch.no_grad():
                functional_call(model, held, (sample,))
            _fails_on_one[model] = False
        except ValueError:  # batch normalisation: more than one value per channel is needed
            _fails_on_one[model] = True
        except Exception:  # training raises it again, as this node's answer
            _fails_on_one[model] = False
        finally:
            model.train(was_training)
    return _fails_on_one[model]


def augmented_work(work: Work, name: str, *, seed: int, round: int, partition_id: int) -> Work:
    """Return the work with augmented samples; a sample in several batches is augmented anew for each.

    - ``work``: Has ``x``, ``y`` and ``batches``. The result has its own ``x`` and ``y``, with one sample for
      each index in the batches.
    - ``name``: One of ``tasks.AUGMENTATIONS``; ``"none"`` returns the work itself.
    - ``seed``, ``round``, ``partition_id``: The stream of flips and crops, each >= 0.
    """
    if name == "none" or not len(work.batches):
        return work
    taken = torch.as_tensor(np.concatenate(work.batches)).to(work.x.device)
    stream = generator(seed, round=round, partition_id=partition_id, purpose=Purpose.AUGMENTATION)
    ends = np.cumsum([len(batch) for batch in work.batches])
    batches = np.split(np.arange(len(taken)), ends[:-1])
    return replace(work, x=augmented(work.x[taken], name, stream), y=work.y[taken], batches=batches)
