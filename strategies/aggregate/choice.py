"""The value of the option ``aggregation``: a rule's text, a rule, or the user's own aggregator."""

from __future__ import annotations

from dataclasses import dataclass

from hedgerow.strategies.aggregate.mean import Aggregator
from hedgerow.strategies.aggregate.robust import Robust
from hedgerow.wire.printable import quoted
from hedgerow.wire.robust_means import Aggregation, parse_aggregation


@dataclass(frozen=True)
class Choice:
    """A rule, or the user's own aggregator (``rule`` is then the mean)."""

    rule: Aggregation
    own: Aggregator | None = None

    @classmethod
    def of(cls, aggregation: str | Aggregation | Aggregator) -> Choice:
        """Return the choice; ValueError if it is neither a rule nor an aggregator."""
        if isinstance(aggregation, Aggregation):
            return cls(aggregation)
        if callable(getattr(aggregation, "means", None)) and not isinstance(aggregation, type):
            return cls(Aggregation("mean"), aggregation)  # type: ignore[arg-type]
        if not isinstance(aggregation, str):
            raise ValueError(
                "aggregation must be a rule such as 'median', or an object with a method 'means', as "
                f"hedgerow.strategies.WeightedMean has, got {quoted(aggregation)}"
            )
        return cls(parse_aggregation(aggregation))

    @property
    def is_mean(self) -> bool:
        """Whether it is the plain weighted mean."""
        return self.own is None and self.rule.is_mean

    def check(self, most: int, whose: str) -> None:
        """Raise ValueError if the rule needs more updates than a round has at most."""
        if self.rule.least > most:
            raise ValueError(
                f"aggregation must be a rule for at most {most} updates, {whose}, got '{self}', which needs "
                f"{self.rule.least}"
            )

    def aggregator(self, mean: Aggregator) -> Aggregator:
        """Return the aggregator, given a method's mean."""
        return self.own or (mean if self.rule.is_mean else Robust(self.rule))

    def __str__(self) -> str:
        return str(self.rule) if self.own is None else type(self.own).__name__
