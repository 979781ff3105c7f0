"""Local SGD: one model after the other, or a stack of them at once."""

from hedgerow.clients.training.batches import batch_indices
from hedgerow.clients.training.sgd import local_sgd
from hedgerow.clients.training.work import LocalWork, Trained

__all__ = ["LocalWork", "Trained", "batch_indices", "local_sgd"]
