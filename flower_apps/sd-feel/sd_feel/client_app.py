"""The nodes of the app: mini-batch SGD on each node's own partition, and edge servers that are nodes."""

from hedgerow.clients import sd_feel_client

app = sd_feel_client()
