"""CEPS and its baselines: nodes."""

from hedgerow.clients.ceps.client import ceps_client
from hedgerow.clients.ceps.problems import LinearRegression, LogisticRegression, TorchProblem

__all__ = [
    "LinearRegression",
    "LogisticRegression",
    "TorchProblem",
    "ceps_client",
]
