"""The methods that CEPS is compared with: what each adds to ``Decentralised``, its name, keys and network.

Papers: D-PSGD (X. Lian et al., 2017), DCD-PSGD (H. Tang et al., 2018), DFedAvgM (T. Sun et al., 2022),
DFedSAM (Y. Shi et al., 2023), MATCHA (J. Wang et al., 2019) and DP-DSGT, differentially private gradient
tracking; in the settings of S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning",
section V, which adds D-PSGD over dynamic networks and with partial communication.
Below, g_i is node i's gradient, W the mixing matrix and N the number of local steps. ``Decentralised`` says
what differs from the papers, which options all of them take, and which errors they raise.
"""

from typing import Unpack

from hedgerow.strategies.ceps.decentralised import (
    LARGEST_STEP,
    BaselineOptions,
    Decentralised,
    Network,
    NetworkOptions,
    dynamic_network,
    fixed_network,
)
from hedgerow.strategies.ceps.matcha import Activation
from hedgerow.strategies.ceps.strategy import Topology, neighbourhood_graph
from hedgerow.strategies.gossip.method import Scalar
from hedgerow.strategies.privacy import Privacy
from hedgerow.strategies.router import graph_at
from hedgerow.wire.checks import in_range, int_at_least, require

__all__ = ["DCDPSGD", "DPDSGT", "DPSGD", "DFedAvgM", "DFedSAM", "Matcha"]


class DPSGD(Decentralised):
    """Decentralised parallel SGD: every ``local_steps`` iterations the step starts from the neighbours' mean.

    x_i <- sum_j W_ij x_j - eta g_i(x_i) at a communication, x_i <- x_i - eta g_i(x_i) otherwise.

    Parameters
    ----------
    learning_rate : float (default: 0.1)
        eta > 0.
    local_steps : int (default: 10)
        Iterations from one communication to the next, >= 1.
    dynamic : bool (default: False)
        Whether every communication draws a new graph (D-PSGD-DN); then ``topology`` is a random one's name
        or None.
    participation : float (default: 1.0)
        In (0, 1]; below 1, which a dynamic network does not go with, it is D-PSGD-PC.
    sparsity : int or None (default: None)
        Keep this many of the largest entries after each communication, >= 1; the comparison of CEPS leaves
        its rivals dense. None keeps all.
    **options
        See ``BaselineOptions``.
    """

    def __init__(
        self,
        *,
        learning_rate: float = 0.1,
        local_steps: int = 10,
        dynamic: bool = False,
        participation: float = 1.0,
        sparsity: int | None = None,
        **options: Unpack[BaselineOptions],
    ) -> None:
        if dynamic and participation < 1:
            raise ValueError(f"participation is {participation!r}; valid in a dynamic network is 1")
        keys: dict[str, Scalar] = {}
        if sparsity is not None:
            int_at_least(1, sparsity=sparsity)
            keys = {"threshold": True, "s": sparsity}
        name = "d-psgd-dn" if dynamic else "d-psgd-pc" if participation < 1 else "d-psgd"
        network = dynamic_network if dynamic else fixed_network
        super().__init__(name, learning_rate, keys, local_steps, participation, network=network, **options)


class DFedAvgM(Decentralised):
    """Decentralised FedAvg with momentum: ``local_steps`` heavy-ball steps, then one step of mixing.

    y <- y - eta g_i(y) + theta (y - y_before), N times from x_i; x_i <- sum_j W_ij y_j.

    Parameters
    ----------
    learning_rate : float (default: 0.02)
        eta > 0.
    momentum : float (default: 0.9)
        theta in [0, 1); starts anew after each communication.
    local_steps : int (default: 10)
        N >= 1, the iterations between communications.
    participation : float (default: 1.0)
        In (0, 1]. The comparison of CEPS takes CEPS's.
    bits : int or None (default: None)
        Bits of an entry of what is sent, the quantised change of a round, 2 to 16; None sends models.
    **options
        See ``BaselineOptions``.
    """

    def __init__(
        self,
        *,
        learning_rate: float = 0.02,
        momentum: float = 0.9,
        bits: int | None = None,
        local_steps: int = 10,
        participation: float = 1.0,
        **options: Unpack[BaselineOptions],
    ) -> None:
        require("momentum", momentum, "a number in [0, 1)", 0 <= momentum < 1)
        keys, codec = {"theta": momentum}, "dense64" if bits is None else f"quantised{bits}"
        super().__init__("dfedavgm", learning_rate, keys, local_steps, participation, codec=codec, **options)


class DFedSAM(Decentralised):
    """Decentralised sharpness-aware minimisation: gradients are taken where the loss is worst nearby.

    y <- y - eta g_i(y + rho g_i(y) / ||g_i(y)||), N times from x_i; x_i <- sum_j W_ij y_j.

    Parameters
    ----------
    learning_rate : float (default: 0.1)
        eta > 0.
    rho : float (default: 0.05)
        How far away, in [0, 10^6]; 0 is plain local SGD.
    local_steps, participation
        As in ``DFedAvgM``.
    **options
        See ``BaselineOptions``.
    """

    def __init__(
        self,
        *,
        learning_rate: float = 0.1,
        rho: float = 0.05,
        local_steps: int = 10,
        participation: float = 1.0,
        **options: Unpack[BaselineOptions],
    ) -> None:
        in_range("rho", rho, 0.0, LARGEST_STEP)
        keys = {"rho-sam": rho}
        super().__init__("dfedsam", learning_rate, keys, local_steps, participation, gradients=2, **options)


class DCDPSGD(Decentralised):
    """D-PSGD with difference compression: nodes hold replicas of their neighbours, moved by what is sent.

    q_i = C(sum_j W_ij x^_j - eta g_i(x_i) - x_i); x_i <- x_i + q_i, and every replica x^_i with it.

    C quantises. Every replica of x_i is x_i itself as long as no message is lost; a lost one leaves the
    replica behind for good.

    Parameters
    ----------
    learning_rate : float (default: 0.1)
        eta > 0.
    bits : int (default: 8)
        Bits of an entry, 2 to 16. Too few let the method diverge.
    **options
        See ``BaselineOptions``.
    """

    def __init__(
        self, *, learning_rate: float = 0.1, bits: int = 8, **options: Unpack[BaselineOptions]
    ) -> None:
        super().__init__("dcd-psgd", learning_rate, codec=f"quantised{bits}", **options)


class DPDSGT(Decentralised):
    """Differentially private gradient tracking: models and trackers of the mean gradient, both mixed.

    x_i <- sum_j W_ij (x_j - eta y_j); y_i <- sum_j W_ij y_j + g_i(new x_i) - g_i(old x_i).

    Each iteration sends x_j and y_j, two dense vectors.

    Parameters
    ----------
    privacy : Privacy
        Clipping and noise; ``Privacy.for_run`` finds the noise of a run.
    learning_rate : float (default: 0.1)
        eta > 0.
    **options
        See ``BaselineOptions``.
    """

    def __init__(
        self, *, privacy: Privacy, learning_rate: float = 0.1, **options: Unpack[NetworkOptions]
    ) -> None:
        super().__init__("dp-dsgt", learning_rate, vectors=2, privacy=privacy, **options)


class Matcha(Decentralised):
    """MATCHA: each iteration communicates over some matchings of the graph, drawn at random.

    x_i <- sum_j W_ij (x_j - eta g_j(x_j)).

    Parameters
    ----------
    learning_rate : float (default: 0.1)
        eta > 0.
    budget : float (default: 0.5)
        C_b in (0, 1]: the share of the whole graph's communication.
    **options
        See ``BaselineOptions``.

    Attributes
    ----------
    activation : Activation
        The matchings, how often each communicates, and with what weight.
    """

    activation: Activation

    def __init__(
        self, *, learning_rate: float = 0.1, budget: float = 0.5, **options: Unpack[BaselineOptions]
    ) -> None:
        def drawn(topology: Topology, num_nodes: int, seed: int) -> Network:
            self.activation = activation = Activation(neighbourhood_graph(topology, num_nodes, seed), budget)
            graph = graph_at(lambda k: activation.active(seed, k))
            return Network.weighted(graph, activation.matrix, changes=True)

        super().__init__("matcha", learning_rate, network=drawn, **options)
