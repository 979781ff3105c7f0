"""Federated learning without data similarity: FedAvg and FedProx, error feedback, step-size schedules."""

from hedgerow.strategies.similarity_free.strategy import InnerSolver, SimilarityFree

__all__ = ["InnerSolver", "SimilarityFree"]
