"""The nodes of the app: local SGD or a proximal step on each node's own partition, then the uplink."""

from hedgerow.clients import similarity_free_client

app = similarity_free_client()
