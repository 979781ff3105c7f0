"""SD-FEEL: clusters of clients with edge servers that gossip; and its baselines."""

from hedgerow.strategies.edges.clusters import contiguous_clusters
from hedgerow.strategies.sd_feel.baselines import FedAvg, Feel, HierFAvg
from hedgerow.strategies.sd_feel.clusters import ClusteredStrategy
from hedgerow.strategies.sd_feel.edge_server import EdgeServerSDFeel
from hedgerow.strategies.sd_feel.simulated_time import Stragglers
from hedgerow.strategies.sd_feel.strategy import SDFeel
from hedgerow.strategies.sd_feel.theory import PRESETS, System, latency, preset, traffic

__all__ = [
    "PRESETS",
    "ClusteredStrategy",
    "EdgeServerSDFeel",
    "FedAvg",
    "Feel",
    "HierFAvg",
    "SDFeel",
    "Stragglers",
    "System",
    "contiguous_clusters",
    "latency",
    "preset",
    "traffic",
]
