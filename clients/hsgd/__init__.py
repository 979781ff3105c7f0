"""HSGD: hospitals and devices."""

from hedgerow.clients.hsgd.node import hsgd_client
from hedgerow.clients.hsgd.step import Party

__all__ = ["Party", "hsgd_client"]
