"""The rules that a server may take in place of the weighted mean, for strategies and apps.

They stand in ``hedgerow.wire``, since nodes that are edge servers take them too.
"""

from hedgerow.wire.robust_means import (
    AGGREGATIONS,
    NEIGHBOURHOOD_RULES,
    Aggregation,
    neighbourhood_rule,
    parse_aggregation,
)

__all__ = ["AGGREGATIONS", "NEIGHBOURHOOD_RULES", "Aggregation", "neighbourhood_rule", "parse_aggregation"]
