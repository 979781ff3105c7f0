"""What is taken of the replies of an exchange: a mean, or a rule that lying nodes cannot ruin."""

from hedgerow.strategies.aggregate.choice import Choice
from hedgerow.strategies.aggregate.mean import Aggregator, Mean, MeanByMetric, Moved, WeightedMean, means_of
from hedgerow.strategies.aggregate.robust import Robust

__all__ = ["Aggregator", "Choice", "Mean", "MeanByMetric", "Moved", "Robust", "WeightedMean", "means_of"]
