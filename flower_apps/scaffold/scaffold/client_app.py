"""The nodes of the app."""

from hedgerow.clients import scaffold_client

app = scaffold_client()
