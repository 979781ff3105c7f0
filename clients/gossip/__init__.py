"""The node side of decentralised methods whose messages pass through a router.

A ``GossipNodeMethod`` defines the arithmetic: a node's initial memory, the vector it publishes, and its
update from the neighbours' vectors. ``app.py`` decodes messages; ``stored_node.py`` keeps the node's state.

In a sealed run each payload is sealed for its receiver. The first one to a receiver also carries the sender's
secret seed of sensing matrices.
"""

from hedgerow.clients.gossip.app import gossip_app
from hedgerow.clients.gossip.node import (
    GossipNode,
    GossipNodeMethod,
    GossipPlace,
    Memory,
    Problem,
    ProblemFn,
)

__all__ = ["GossipNode", "GossipNodeMethod", "GossipPlace", "Memory", "Problem", "ProblemFn", "gossip_app"]
