"""The nodes of the app: local epochs on each own partition, coded by the method that the server names."""

from hedgerow.clients import fedmud_client

app = fedmud_client()
