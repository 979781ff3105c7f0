"""SD-FEEL: edge clusters whose edge servers gossip, and its baselines."""

from hedgerow.strategies.sd_feel.asynchronous import AsynchronousSDFeel
from hedgerow.strategies.sd_feel.baselines import FedAvg, Feel, HierFAvg
from hedgerow.strategies.sd_feel.edge_server import EdgeServerSDFeel
from hedgerow.strategies.sd_feel.monitor import EdgeMonitor
from hedgerow.strategies.sd_feel.stragglers import Stragglers
from hedgerow.strategies.sd_feel.strategy import SDFeel

__all__ = [
    "AsynchronousSDFeel",
    "EdgeMonitor",
    "EdgeServerSDFeel",
    "FedAvg",
    "Feel",
    "HierFAvg",
    "SDFeel",
    "Stragglers",
]
