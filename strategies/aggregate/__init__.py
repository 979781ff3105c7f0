"""Aggregation of an exchange's replies: the weighted mean, or a Byzantine-robust rule."""

from hedgerow.strategies.aggregate.choice import Choice
from hedgerow.strategies.aggregate.mean import Aggregator, Mean, MeanByMetric, Moved, WeightedMean, means_of
from hedgerow.strategies.aggregate.robust import Robust

__all__ = ["Aggregator", "Choice", "Mean", "MeanByMetric", "Moved", "Robust", "WeightedMean", "means_of"]
