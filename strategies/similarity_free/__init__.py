"""Federated learning without data similarity: FedAvg and FedProx, error feedback, step-size schedules."""

from hedgerow.strategies.similarity_free.algorithm import InnerSolver
from hedgerow.strategies.similarity_free.strategy import SimilarityFree

__all__ = ["InnerSolver", "SimilarityFree"]
