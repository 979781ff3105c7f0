"""The app's nodes: hospitals, and their patients' devices or the edges that host them."""

from hedgerow.clients import hsgd_client
from hsgd.parties import is_own, node_party, node_sizes

app = hsgd_client(node_party, own=is_own, sizes=node_sizes)
