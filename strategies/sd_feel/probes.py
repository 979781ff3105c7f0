"""The constants of bound (15) from a run's own nodes, for the planner.

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data", Assumption 1, whose constants the paper does not give. Ours: before a round each
client tells grad F_i(u), and of its samples curvature and mini-batch variance. What is found holds at the
models that a run visits: estimates from below. Nothing of it enters the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from hedgerow.strategies.federation import Federation, only_arrays
from hedgerow.strategies.inbox import Inbox, Node, checked_metrics, collect
from hedgerow.wire.message_types import GRADIENT
from hedgerow.wire.printable import quoted
from hedgerow.wire.records import PayloadError, payload_bytes

__all__ = ["CURVATURE", "VARIANCE", "Seen", "Told", "probed"]

CURVATURE, VARIANCE = "curvature", "gradient-variance"


@dataclass(frozen=True)
class Told:
    """What one client tells of its loss at u.

    Parameters
    ----------
    gradient : NDArray
        grad F_i(u), (M,).
    curvature : float
        Of its loss, an estimate of L from below, >= 0.
    variance : float
        Of a mini-batch gradient, an estimate of sigma^2, >= 0.
    """

    gradient: NDArray[np.float64]
    curvature: float
    variance: float


@dataclass(frozen=True)
class Seen:
    """What the clients that answered show of the constants at u.

    Parameters
    ----------
    curvature, variance : float
        The largest of the clients', for L and sigma^2.
    dissimilarity : float
        The largest ||grad F_i(u) - grad F(u)||^2, for kappa^2.
    gradient2 : float
        ||grad F(u)||^2, what (15) bounds the mean of.
    clients : int
        How many answered, >= 1.
    """

    curvature: float
    variance: float
    dissimilarity: float
    gradient2: float
    clients: int

    def metrics(self) -> MetricRecord:
        """Return the figures by the names of a round's record."""
        return MetricRecord(
            {
                CURVATURE: self.curvature,
                VARIANCE: self.variance,
                "gradient-dissimilarity": self.dissimilarity,
                "gradient2": self.gradient2,
                "probed-clients": self.clients,
            }
        )


def probed(
    federation: Federation,
    grid: Grid,
    server_round: int,
    u: ArrayRecord,
    config: ConfigRecord,
    servers: Mapping[int, int],
    weights: NDArray[np.float64],
    links: tuple[str, str],
) -> tuple[Seen | None, int]:
    """Ask clients for their gradients at u; return what they show, None of none, and how many were lost.

    Parameters
    ----------
    federation : Federation
        Whose clients they are; what travels is booked beside the method's links.
    grid : Grid
        Where they are.
    server_round : int
        The round that begins.
    u : ArrayRecord
        The model.
    config : ConfigRecord
        What they are told to train with: ``batch-size`` and ``seed`` count.
    servers : Mapping[int, int]
        The clients, by partition id: each one's server.
    weights : NDArray
        |S_i| by partition id, (C,).
    links : (str, str)
        The method's, down to a client and up from it.
    """
    settings, layout = federation.settings, federation.known_layout()
    down, up = links
    nodes, _ = federation.online(grid, sorted(servers))
    told = RecordDict({
        settings.arrayrecord_key: u,
        settings.configrecord_key: ConfigRecord({**config, "server-round": server_round}),
    })  # fmt: skip
    group, sizes = f"{server_round} {GRADIENT}", (payload_bytes(u), payload_bytes(told))
    messages = [
        Message(told, node.node_id, GRADIENT, ttl=federation.timeout, group_id=group) for node in nodes
    ]
    for node in nodes:
        client = node.partition_id
        federation.book_down(server_round, f"{down} probe", servers[client], client, 0, sizes)

    def checked(node: Node, reply: RecordDict) -> Told:
        gradient = layout.flatten(only_arrays(reply), np.float64)
        return _told(checked_metrics(reply, settings.weighted_by_key), gradient)

    exchange = Inbox(nodes, group, checked)
    answers = []
    for reply in exchange.accept(collect(grid, messages, federation.timeout) if messages else ()):
        client = reply.node.partition_id
        arrays = only_arrays(reply.content)
        federation.book_up(server_round, f"{up} probe", client, servers[client], 0, arrays, reply)
        answers.append((float(weights[client]), reply.value))
    return _seen(answers), exchange.report.sent - exchange.report.accepted


def _told(metrics: MetricRecord, gradient: NDArray[np.float64]) -> Told:
    """Return what a valid reply tells beside its gradient (M,); PayloadError where it tells none."""
    estimates = []
    for key in (CURVATURE, VARIANCE):
        value = metrics.get(key)
        if not (isinstance(value, int | float) and value >= 0):
            raise PayloadError("bad metrics", f"{key} is {quoted(value)}; valid is a number >= 0")
        estimates.append(float(value))
    return Told(gradient, *estimates)


def _seen(answers: Sequence[tuple[float, Told]]) -> Seen | None:
    """Return what clients of weights |S_i| show together; None of none of them."""
    if not answers:
        return None
    weights = np.array([weight for weight, _ in answers])
    gradients = np.stack([one.gradient for _, one in answers])  # (clients, M)
    mean = (weights / weights.sum()) @ gradients
    apart = gradients - mean
    return Seen(
        max(one.curvature for _, one in answers),
        max(one.variance for _, one in answers),
        float(np.einsum("ij,ij->i", apart, apart).max()),
        float(mean @ mean),
        len(answers),
    )
