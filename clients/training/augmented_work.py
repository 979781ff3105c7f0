"""Local training on augmented samples: those of each mini-batch are transformed anew."""

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from hedgerow.tasks import augmented
from hedgerow.wire.seeds import Purpose, generator

__all__ = ["augmented_work"]


Work = TypeVar("Work", bound=Any)


def augmented_work(work: Work, name: str, *, seed: int, round: int, partition_id: int) -> Work:
    """Return the work on its batches' samples, transformed; a sample of several batches differs in each.

    - ``work``: What has ``x``, ``y`` and ``batches``. The new one has its own ``x`` and ``y``, of as many
      samples as its batches have in all.
    - ``name``: One of ``tasks.AUGMENTATIONS``; ``"none"`` returns the work itself.
    - ``seed``, ``round``, ``partition_id``: What flips and crops are drawn from, each >= 0.
    """
    if name == "none" or not len(work.batches):
        return work
    taken = torch.as_tensor(np.concatenate(work.batches)).to(work.x.device)
    stream = generator(seed, round=round, partition_id=partition_id, purpose=Purpose.AUGMENTATION)
    ends = np.cumsum([len(batch) for batch in work.batches])
    batches = np.split(np.arange(len(taken)), ends[:-1])
    return replace(work, x=augmented(work.x[taken], name, stream), y=work.y[taken], batches=batches)
