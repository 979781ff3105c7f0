"""SD-FEEL: edge clusters whose edge servers gossip, and its baselines."""

from hedgerow.strategies.sd_feel.strategy import FedAvg, Feel, HierFAvg, SDFeel

__all__ = ["FedAvg", "Feel", "HierFAvg", "SDFeel"]
