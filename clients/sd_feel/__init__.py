"""SD-FEEL: clients, and edge servers that are nodes."""

from hedgerow.clients.sd_feel.client import sd_feel_client

__all__ = ["sd_feel_client"]
