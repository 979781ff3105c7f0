"""The nodes of the app."""

from hedgerow.clients.scaffold import scaffold_client

app = scaffold_client()
