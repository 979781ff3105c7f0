"""Edge servers: the assignment of clients, and the mixing of models."""

from hedgerow.strategies.edges.clusters import BY_GROUP, Clusters, contiguous_clusters
from hedgerow.strategies.edges.mixers import Alone, CloudMean, GossipMixer, Mixer

__all__ = ["BY_GROUP", "Alone", "CloudMean", "Clusters", "GossipMixer", "Mixer", "contiguous_clusters"]
