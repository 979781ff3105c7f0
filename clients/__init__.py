"""The node's side: ClientApps that learn on local data."""

from hedgerow.clients.app import BatchClientApp, whoami
from hedgerow.clients.local_task import LocalTask, local_task, resolve_device
from hedgerow.clients.sd_feel import batch_indices, sd_feel_client
from hedgerow.clients.training import LocalWork, Trained, local_sgd

__all__ = [
    "BatchClientApp",
    "LocalTask",
    "LocalWork",
    "Trained",
    "batch_indices",
    "local_sgd",
    "local_task",
    "resolve_device",
    "sd_feel_client",
    "whoami",
]
