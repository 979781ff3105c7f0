"""SD-FEEL's baselines HierFAVG, FEEL and FedAvg, on the same messages, ledger and clock.

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data", the baselines of section V.
"""

from collections.abc import Sequence
from typing import Unpack

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.edges.clusters import Chosen
from hedgerow.strategies.edges.mixers import CloudMean
from hedgerow.strategies.sd_feel.clusters import ClusteredOptions, ClusteredStrategy
from hedgerow.strategies.sd_feel.theory import SystemName
from hedgerow.wire.checks import int_at_least


class HierFAvg(ClusteredStrategy):
    """HierFAVG: as SD-FEEL, but a cloud takes the exact mean of the servers' models.

    Parameters
    ----------
    num_servers : int (default: 2)
        Edge servers, 1 to the number of clients.
    tau1, tau2 : int (default: 1)
        Edge period in local iterations, cloud period in edge aggregations, >= 1.
    clusters : Sequence[int], "group" or None (default: None)
        The server of each client; see ``ClusteredStrategy``.
    **options
        See ``ClusteredStrategy``.
    """

    scheme = SystemName.HIERFAVG

    def __init__(
        self,
        *,
        num_servers: int = 2,
        tau1: int = 1,
        tau2: int = 1,
        clusters: Chosen = None,
        **options: Unpack[ClusteredOptions],
    ) -> None:
        super().__init__(
            clusters=clusters,
            num_servers=num_servers,
            local_steps=tau1,
            tau2=tau2,
            mixer=CloudMean(),
            **options,
        )


class Feel(ClusteredStrategy):
    """FEEL: one edge server with few channels, which schedules a few random clients per round.

    Parameters
    ----------
    clients_per_round : int (default: 5)
        Clients per round, >= 1, drawn uniformly without replacement from the online ones of the pool.
    tau1 : int (default: 1)
        Local iterations per round, >= 1.
    pool : Sequence[int] or None (default: None)
        The partition ids to draw from; None for all.
    **options
        See ``ClusteredStrategy``; ``participation`` then thins out the scheduled clients.
    """

    scheme = SystemName.FEEL

    def __init__(
        self,
        *,
        clients_per_round: int = 5,
        tau1: int = 1,
        pool: Sequence[int] | None = None,
        **options: Unpack[ClusteredOptions],
    ) -> None:
        super().__init__(clusters=None, num_servers=1, local_steps=tau1, **options)
        self.pool = None if pool is None else sorted(set(pool))
        places = self.federation.members.places
        known: Sequence[int] = range(self.num_clients) if self.pool is None else self.pool
        most = self.num_clients - 1
        if places is not None and not (known and known[0] >= 0 and known[-1] <= most):
            raise ValueError(f"pool must hold partition ids from 0 to {most}, got {known}")
        int_at_least(1, clients_per_round=clients_per_round)
        if places is not None and clients_per_round > len(known):
            raise ValueError(f"clients_per_round must be from 1 to {len(known)}, got {clients_per_round}")
        self.clients_per_round = clients_per_round

    def participants(self, server_round: int, there: Sequence[int] | None = None) -> list[int]:
        """Return the scheduled clients that take part, drawn from all clients or from the online ones."""
        pool: Sequence[int] = range(self.num_clients) if there is None else there
        if self.pool is not None:
            online = set(pool)
            pool = [i for i in self.pool if i in online]
        scheduled = self.federation.members.scheduled(server_round, pool, self.clients_per_round)
        return self._taking_part(server_round, scheduled)

    def scheduled(self, run: RoundContext) -> list[int]:
        """Return the scheduled clients that take part, drawn from the online ones."""
        return self.participants(run.round, run.online)


class FedAvg(ClusteredStrategy):
    """FedAvg of all clients with the cloud, on the same messages, ledger and clock.

    Parameters
    ----------
    local_steps : int (default: 1)
        Local iterations per round (SD-FEEL's tau1 * tau2), >= 1.
    **options
        See ``ClusteredStrategy``.
    """

    scheme = SystemName.FEDAVG
    up_link = "client->cloud"
    down_link = "cloud->client"

    def __init__(self, *, local_steps: int = 1, **options: Unpack[ClusteredOptions]) -> None:
        super().__init__(clusters=None, num_servers=1, local_steps=local_steps, **options)
