"""Federated learning without data similarity: workers."""

from hedgerow.clients.similarity_free.client import similarity_free_client
from hedgerow.clients.similarity_free.proximal import parse_inner_lr

__all__ = ["parse_inner_lr", "similarity_free_client"]
