"""The nodes of the app: Algorithm 1 or a baseline, on each node's own data."""

from ceps.problems import node_problem
from hedgerow.clients import ceps_client

app = ceps_client(node_problem)
