"""The node's side: ClientApps that learn on local data."""

from hedgerow.clients.app import BatchClientApp, whoami
from hedgerow.clients.batches import batch_indices
from hedgerow.clients.ceps import ceps_client
from hedgerow.clients.decentralised import decentralised_client
from hedgerow.clients.error_feedback import compress_reply, compressed
from hedgerow.clients.factored_model import FactoredModel, wrap
from hedgerow.clients.fedmud import fedmud_client
from hedgerow.clients.hsgd import hsgd_client
from hedgerow.clients.hsgd_party import Party
from hedgerow.clients.local_task import TASK_TEXTS, LocalTask, global_task, local_task, resolve_device
from hedgerow.clients.problems import LinearRegression, LogisticRegression, Problem, TorchProblem
from hedgerow.clients.proximal import parse_inner_lr
from hedgerow.clients.sd_feel import sd_feel_client
from hedgerow.clients.similarity_free import similarity_free_client
from hedgerow.clients.training import LocalWork, Trained, local_sgd

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
    "local_sgd",
    "local_task",
    "parse_inner_lr",
    "resolve_device",
    "sd_feel_client",
    "similarity_free_client",
    "whoami",
    "wrap",
]
