"""The node's side: ClientApps that learn on local data."""

from hedgerow.clients.app import BatchClientApp, introduce, introduced, whoami
from hedgerow.clients.ceps.baselines import decentralised_client
from hedgerow.clients.ceps.client import ceps_client
from hedgerow.clients.ceps.problems import LinearRegression, LogisticRegression, Problem, TorchProblem
from hedgerow.clients.error_feedback import compress_reply, compressed
from hedgerow.clients.fedmud.client import fedmud_client
from hedgerow.clients.fedmud.factored_model import FactoredModel, wrap
from hedgerow.clients.hsgd.client import hsgd_client
from hedgerow.clients.hsgd.party import Party
from hedgerow.clients.local_task import (
    TASK_TEXTS,
    LocalTask,
    global_task,
    initial_model,
    local_task,
    resolve_device,
)
from hedgerow.clients.sd_feel.client import sd_feel_client
from hedgerow.clients.similarity_free.client import similarity_free_client
from hedgerow.clients.similarity_free.proximal import parse_inner_lr
from hedgerow.clients.training.batches import batch_indices
from hedgerow.clients.training.sgd import LocalWork, Trained, local_sgd

__all__ = [
    "TASK_TEXTS",
    "BatchClientApp",
    "FactoredModel",
    "LinearRegression",
    "LocalTask",
    "LocalWork",
    "LogisticRegression",
    "Party",
    "Problem",
    "TorchProblem",
    "Trained",
    "batch_indices",
    "ceps_client",
    "compress_reply",
    "compressed",
    "decentralised_client",
    "fedmud_client",
    "global_task",
    "hsgd_client",
    "initial_model",
    "introduce",
    "introduced",
    "local_sgd",
    "local_task",
    "parse_inner_lr",
    "resolve_device",
    "sd_feel_client",
    "similarity_free_client",
    "whoami",
    "wrap",
]
