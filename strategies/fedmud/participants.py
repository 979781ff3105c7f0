"""Who takes part: nodes that are drawn anew each round."""

from collections.abc import Sequence

from hedgerow.strategies.federation import Federation
from hedgerow.wire.checks import int_at_least
from hedgerow.wire.seeds import Purpose, generator

__all__ = ["Participants"]


class Participants:
    """K of a federation's N nodes, drawn uniformly without replacement of those there, a stream a round.

    Parameters
    ----------
    federation : Federation
        The nodes, and the run's seed.
    num_clients_per_round : int or None
        K, 1 to N; all that are there where they are fewer. None for all.

    Raises
    ------
    ValueError
        If there are not so many nodes, or the count is none.
    """

    def __init__(self, federation: Federation, num_clients_per_round: int | None) -> None:
        self.federation = federation
        self.count = num_clients_per_round
        if num_clients_per_round is None:
            return
        int_at_least(1, num_clients_per_round=num_clients_per_round)
        if federation.places is not None and num_clients_per_round > federation.places:
            raise ValueError(
                f"num_clients_per_round is {num_clients_per_round!r}; valid is 1 to the {federation.places} "
                "clients"
            )

    def drawn(self, server_round: int, there: Sequence[int] | None = None) -> list[int]:
        """Return the partition ids that train in a round, ascending.

        ``there`` are those of the nodes that are there; None is everyone.
        """
        everyone = range(self.federation.num_clients)
        if self.count is None:
            return list(everyone)
        there = everyone if there is None else there
        stream = generator(self.federation.settings.seed, round=server_round, purpose=Purpose.SCHEDULE)
        count = min(self.count, len(there))
        if not count:
            return []
        return sorted(there[i] for i in stream.choice(len(there), count, replace=False))
