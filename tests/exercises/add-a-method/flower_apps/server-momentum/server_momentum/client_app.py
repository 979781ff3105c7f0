"""The nodes of the app."""

from hedgerow.clients.server_momentum import server_momentum_client

app = server_momentum_client()
