"""HSGD: hospitals and devices."""

from hedgerow.clients.hsgd.client import hsgd_client
from hedgerow.clients.hsgd.party import Party

__all__ = ["Party", "hsgd_client"]
