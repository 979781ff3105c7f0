"""Who takes part: nodes that are drawn anew each round."""

from hedgerow.strategies.federation import Federation
from hedgerow.wire.checks import int_at_least
from hedgerow.wire.seeds import Purpose, generator

__all__ = ["Participants"]


class Participants:
    """K of a federation's N nodes, drawn uniformly without replacement, a stream a round.

    Parameters
    ----------
    federation : Federation
        The nodes, and the run's seed.
    num_clients_per_round : int or None
        K, 1 to N; None for all.

    Raises
    ------
    ValueError
        If there are not so many nodes, or the count is none.
    """

    def __init__(self, federation: Federation, num_clients_per_round: int | None) -> None:
        self.num_clients = federation.num_clients
        self.seed = federation.settings.seed
        count = self.num_clients if num_clients_per_round is None else num_clients_per_round
        int_at_least(1, num_clients_per_round=count)
        if count > self.num_clients:
            raise ValueError(
                f"num_clients_per_round is {count!r}; valid is 1 to the {self.num_clients} clients"
            )
        self.count = count

    def drawn(self, server_round: int) -> list[int]:
        """Return the partition ids that train in a round, ascending."""
        stream = generator(self.seed, round=server_round, purpose=Purpose.SCHEDULE)
        chosen = stream.choice(self.num_clients, self.count, replace=False)
        return sorted(int(client) for client in chosen)
