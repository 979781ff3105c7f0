"""Aggregation of an exchange's replies: the weighted mean, or a Byzantine-robust rule."""

from hedgerow.strategies.aggregate.choice import Choice
from hedgerow.strategies.aggregate.flower import FlowerAggregation
from hedgerow.strategies.aggregate.mean import (
    Aggregator,
    Mean,
    MeanByMetric,
    ServerUpdate,
    WeightedMean,
    means_of,
)
from hedgerow.strategies.aggregate.robust import Robust

__all__ = [
    "Aggregator",
    "Choice",
    "FlowerAggregation",
    "Mean",
    "MeanByMetric",
    "Robust",
    "ServerUpdate",
    "WeightedMean",
    "means_of",
]
