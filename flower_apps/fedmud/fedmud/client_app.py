"""The nodes of the app: local epochs on each node's own partition, encoded by the server's method."""

from hedgerow.clients import fedmud_client

app = fedmud_client()
