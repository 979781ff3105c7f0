"""Decentralised methods: nodes send each other messages along a graph."""

from hedgerow.strategies.gossip.exposure import NoisyReleases
from hedgerow.strategies.gossip.links import SET_UP
from hedgerow.strategies.gossip.method import GossipMethod, PayloadSizes
from hedgerow.strategies.gossip.monitor import Monitor
from hedgerow.strategies.gossip.sites import Site
from hedgerow.strategies.gossip.strategy import Gossip
from hedgerow.strategies.round_end import DivergenceError

__all__ = [
    "SET_UP",
    "DivergenceError",
    "Gossip",
    "GossipMethod",
    "Monitor",
    "NoisyReleases",
    "PayloadSizes",
    "Site",
]
