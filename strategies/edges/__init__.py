"""Edge servers: how clients are assigned to them, and how they mix their models."""

from hedgerow.strategies.edges.clusters import BY_GROUP, Clusters, contiguous_clusters
from hedgerow.strategies.edges.mixers import Alone, CloudMean, GossipMixer, Mixer

__all__ = ["BY_GROUP", "Alone", "CloudMean", "Clusters", "GossipMixer", "Mixer", "contiguous_clusters"]
