"""CEPS's baselines: what each adds to ``Decentralised``, i.e. its name, settings and network.

Papers: D-PSGD (X. Lian et al., 2017), DCD-PSGD (H. Tang et al., 2018), DFedAvgM (T. Sun et al., 2022),
DFedSAM (Y. Shi et al., 2023), MATCHA (J. Wang et al., 2019), CHOCO-SGD (A. Koloskova, S. Stich, M. Jaggi,
2019), BEER (H. Zhao et al., 2022), SGP (A. Nedic, A. Olshevsky, 2016; M. Assran et al., 2019) and DP-DSGT,
differentially private gradient tracking; in the settings of S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse
Decentralized Federated Learning", section V, which adds D-PSGD over dynamic networks and with partial
communication.
Below, g_i is node i's gradient, W the mixing matrix and N the number of local steps. ``Decentralised``
documents the differences from the papers, and the common options and errors.
"""

from dataclasses import dataclass
from functools import partial
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from hedgerow.strategies.ceps.decentralised import (
    LARGEST_STEP,
    BaselineOptions,
    Decentralised,
    Network,
    NetworkOptions,
    dynamic_network,
    fixed_network,
    push_network,
)
from hedgerow.strategies.ceps.matcha import Activation
from hedgerow.strategies.ceps.privacy import Privacy
from hedgerow.strategies.ceps.strategy import Topology, neighbourhood_graph
from hedgerow.strategies.gossip.method import Scalar
from hedgerow.strategies.gossip.strategy import places_in
from hedgerow.strategies.router import graph_at
from hedgerow.wire.checks import in_range, int_at_least, int_between, require


class DPSGD(Decentralised):
    """Decentralized parallel SGD: every ``local_steps`` iterations the step starts from the neighbors' mean.

    x_i <- sum_j W_ij x_j - eta g_i(x_i) at a communication, x_i <- x_i - eta g_i(x_i) otherwise.

    Parameters
    ----------
    learning_rate : float (default: 0.1)
        eta > 0.
    local_steps : int (default: 10)
        Iterations between communications, >= 1.
    dynamic : bool (default: False)
        Draw a new graph for every communication (D-PSGD-DN); ``topology`` must then name a random one, or be
        None.
    participation : float (default: 1.0)
        In (0, 1]; below 1, which excludes ``dynamic``, this is D-PSGD-PC.
    sparsity : int or None (default: None)
        Keep this many of the largest entries after each communication, >= 1; None keeps all, as in the
        comparison of CEPS.
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
        if dynamic and participation != 1:
            raise ValueError(f"participation must be 1 in a dynamic network, got {participation!r}")
        keys: dict[str, Scalar] = {}
        if sparsity is not None:
            int_at_least(1, sparsity=sparsity)
            keys = {"threshold": True, "s": sparsity}
        name = "d-psgd-dn" if dynamic else "d-psgd-pc" if participation != 1 else "d-psgd"
        network = dynamic_network if dynamic else fixed_network
        super().__init__(name, learning_rate, keys, local_steps, participation, network=network, **options)


class DFedAvgM(Decentralised):
    """Decentralized FedAvg with momentum: ``local_steps`` heavy-ball steps, then one step of mixing.

    y <- y - eta g_i(y) + theta (y - y_before), N times from x_i; x_i <- sum_j W_ij y_j.

    Parameters
    ----------
    learning_rate : float (default: 0.02)
        eta > 0.
    momentum : float (default: 0.9)
        theta in [0, 1); restarts after each communication.
    local_steps : int (default: 10)
        N >= 1, the iterations between communications.
    participation : float (default: 1.0)
        In (0, 1]. The comparison of CEPS uses that of CEPS.
    bits : int or None (default: None)
        Bits per entry of the quantized change of a round, 2 to 16; None sends models.
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
        in_range("momentum", momentum, 0.0, 1.0, open_above=True)
        if bits is not None:
            int_between(2, 16, bits=bits)
        keys, codec = {"theta": momentum}, "dense64" if bits is None else f"quantised{bits}"
        super().__init__("dfedavgm", learning_rate, keys, local_steps, participation, codec=codec, **options)


class DFedSAM(Decentralised):
    """Decentralized sharpness-aware minimization: gradients at the worst nearby point.

    y <- y - eta g_i(y + rho g_i(y) / ||g_i(y)||), N times from x_i; x_i <- sum_j W_ij y_j.

    Parameters
    ----------
    learning_rate : float (default: 0.1)
        eta > 0.
    rho : float (default: 0.05)
        Distance of that point, in [0, 10^6]; 0 is plain local SGD.
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
    """D-PSGD with difference compression: nodes hold replicas of their neighbors' models.

    q_i = C(sum_j W_ij x^_j - eta g_i(x_i) - x_i); x_i <- x_i + q_i, and every replica x^_i likewise.

    C quantizes. A replica of x_i equals x_i until a message is lost, and differs from then on.

    Parameters
    ----------
    learning_rate : float (default: 0.1)
        eta > 0.
    bits : int (default: 8)
        Bits per entry, 2 to 16. With too few the method diverges.
    **options
        See ``BaselineOptions``.
    """

    def __init__(
        self, *, learning_rate: float = 0.1, bits: int = 8, **options: Unpack[BaselineOptions]
    ) -> None:
        int_between(2, 16, bits=bits)
        super().__init__("dcd-psgd", learning_rate, codec=f"quantised{bits}", **options)


@dataclass(frozen=True)
class _Compressor:
    """The compressor of CHOCO-SGD and BEER: the largest of n entries, quantised ones, or all."""

    bits: int | None
    top_k: int | None
    n: int

    def __post_init__(self) -> None:
        int_at_least(1, dim=self.n)
        if self.top_k is not None:
            int_at_least(1, top_k=self.top_k)
            if self.bits is not None:
                raise ValueError(f"bits must be None with top_k, got {self.bits!r}: its values have 32 bits")
            require("top_k", self.top_k, f"an integer from 1 to dim = {self.n}", self.top_k <= self.n)
        elif self.bits is not None:
            int_between(2, 16, bits=self.bits)

    @property
    def codec(self) -> str:
        if self.top_k is not None:
            return "sparse32"
        return "dense64" if self.bits is None else f"quantised{self.bits}"

    @property
    def quality(self) -> float:
        """delta with E||C(x) - x||^2 <= (1 - delta) ||x||^2 for all x; <= 0 if there is none."""
        if self.top_k is not None:
            return self.top_k / self.n
        # Random rounding gives a variance of at most step^2 / 4 per entry; a step is at most ||x|| / levels.
        return 1.0 if self.bits is None else 1 - self.n / (4 * (2 ** (self.bits - 1) - 1) ** 2)

    def step(self, gamma: float | None, delta: float | None, options: BaselineOptions) -> float:
        """Return the consensus step: gamma, or the theory's for delta or for the guaranteed quality."""
        if delta is not None:
            in_range("delta", delta, 0.0, 1.0, open_below=True)
        if gamma is not None:
            in_range("step_gamma", gamma, 0.0, 1.0, open_below=True)
            return gamma
        quality = self.quality if delta is None else delta
        if quality <= 0:
            raise ValueError(
                f"step_gamma must be a number in (0, 1] with bits = {self.bits} and dim = {self.n}, or "
                "delta be given: so few bits guarantee no contraction"
            )
        network = fixed_network(options.get("topology"), places_in(options), options.get("seed", 0))
        return choco_step(network.matrix(0), quality)


def choco_step(matrix: NDArray[np.float64], delta: float) -> float:
    """Return the consensus step gamma of CHOCO-Gossip that is proved to converge.

    gamma = rho^2 delta / (16 rho + rho^2 + 4 beta^2 + 2 rho beta^2 - 8 rho delta), rho = 1 - |lambda_2(W)|
    and beta = ||I - W||: A. Koloskova, S. Stich, M. Jaggi, "Decentralized Stochastic Optimization and Gossip
    Algorithms with Compressed Communication", Theorem 2. It is very conservative.

    ``matrix`` is W (m, m), symmetric, with rows that sum to one, of a connected graph. ``delta`` in (0, 1] is
    the compressor's quality: E||C(x) - x||^2 <= (1 - delta) ||x||^2.

    Examples
    --------
    >>> choco_step(np.full((2, 2), 0.5), 1.0)  # rho = 1, beta = 1
    0.06666666666666667
    """
    in_range("delta", delta, 0.0, 1.0, open_below=True)
    values = np.linalg.eigvalsh(matrix)  # ascending, the last is 1
    rho = 1 - float(np.abs(values[:-1]).max(initial=0.0))
    beta = 1 - float(values[0])
    return rho**2 * delta / (16 * rho + rho**2 + 4 * beta**2 + 2 * rho * beta**2 - 8 * rho * delta)


class ChocoSGD(Decentralised):
    """CHOCO-SGD: nodes send compressed changes of estimates, and move towards their neighbors' estimates.

    x_i^1/2 = N gradient steps from x_i; q_i = C(x_i^1/2 - x^_i); x^_i <- x^_i + q_i, at the node and at its
    neighbors; x_i <- x_i^1/2 + gamma sum_j W_ij (x^_j - x^_i).

    What C leaves out stays in x_i - x^_i, and is sent later. Without compression and with gamma = 1 this is
    D-PSGD in which each node steps before it mixes. After a lost message a neighbor is no longer heard, as
    in DCD-PSGD.

    Parameters
    ----------
    learning_rate : float (default: 0.1)
        eta > 0.
    bits : int or None (default: 8)
        C quantizes to this many bits per entry, 2 to 16; None with ``top_k`` None sends all.
    top_k : int or None (default: None)
        C keeps this many of the largest entries, 1 to ``dim``, as 32-bit values with indices; with ``bits``
        None.
    step_gamma : float or None (default: None)
        gamma in (0, 1]. None is ``baselines.choco_step``, which is small.
    delta : float or None (default: None)
        In (0, 1], C's quality for that rule. None is the quality that C guarantees for every vector: k / n,
        or 1 - n / (2 (2^(b - 1) - 1))^2.
    local_steps : int (default: 10)
        N >= 1, the iterations between communications; 1 in the paper.
    **options
        See ``BaselineOptions``.
    """

    def __init__(
        self,
        *,
        learning_rate: float = 0.1,
        bits: int | None = 8,
        top_k: int | None = None,
        step_gamma: float | None = None,
        delta: float | None = None,
        local_steps: int = 10,
        **options: Unpack[BaselineOptions],
    ) -> None:
        compressor = _Compressor(bits, top_k, options["dim"])
        keys: dict[str, Scalar] = {"step-gamma": compressor.step(step_gamma, delta, options)}
        super().__init__(
            "choco-sgd", learning_rate, keys, local_steps, codec=compressor.codec, sparsity=top_k, **options
        )


class BEER(Decentralised):
    """BEER: gradient tracking with models and trackers sent as compressed changes.

    x_i <- x_i + gamma sum_j W_ij (h_j - h_i) - eta v_i;
    v_i <- v_i + gamma sum_j W_ij (u_j - u_i) + g_i(new x_i) - g_i(old x_i);
    h_i <- h_i + C(x_i - h_i) and u_i <- u_i + C(v_i - u_i), at the node and at its neighbors.

    Each iteration sends two compressed vectors. Without compression and with gamma = 1 it is gradient
    tracking. After a lost message a neighbor is no longer heard, as in DCD-PSGD.

    Parameters
    ----------
    learning_rate : float (default: 0.1)
        eta > 0.
    bits, top_k, step_gamma, delta
        As in ``ChocoSGD``, with ``top_k`` for each vector. BEER's paper does not give the constants of gamma;
        None is the rule of CHOCO-Gossip here too.
    **options
        See ``BaselineOptions``.
    """

    def __init__(
        self,
        *,
        learning_rate: float = 0.1,
        bits: int | None = 8,
        top_k: int | None = None,
        step_gamma: float | None = None,
        delta: float | None = None,
        **options: Unpack[BaselineOptions],
    ) -> None:
        compressor = _Compressor(bits, top_k, options["dim"])
        keys: dict[str, Scalar] = {"step-gamma": compressor.step(step_gamma, delta, options)}
        super().__init__(
            "beer", learning_rate, keys, codec=compressor.codec, sparsity=top_k, vectors=2, **options
        )


class SGP(Decentralised):
    """Stochastic gradient push: D-PSGD on a directed graph: nodes need not hear their receivers.

    Node i keeps x_i and a weight w_i, initially 1; its model is z_i = x_i / w_i. N times
    x_i <- x_i - eta g_i(x_i / w_i); then x_i <- sum_j P_ij x_j and w_i <- sum_j P_ij w_j, where j runs over i
    itself and its senders.

    Columns of P sum to one: each node splits its x and w into equal parts for its receivers and itself. This
    preserves the sums of x and of w, so that all z_i converge to sum_j x_j / sum_j w_j, the plain mean, while
    a mean over senders would weigh nodes by the graph. If all nodes have the same in-degree and out-degree,
    every w_i is 1. Otherwise a node's model moves by eta / w_i, so that eta must suit the smallest weight: w
    converges to m times the vector that P preserves, and a graph with few senders to some node needs a small
    eta.

    A lost message scales x and w alike, so that z remains a mean of models. A node learns how many receivers
    heard it and keeps the parts of those offline: the sums are preserved. Parts are lost for good if a
    receiver refuses them, or fails before adding them; a node that misses an update keeps also what it gave
    away. Then sum_j w_j is no longer m, and a step counts m / sum_j w_j times. ``push-weight`` in a round's
    record is the mean of w by records. A node with all its senders offline runs out of weight: choose a graph
    that is strongly connected without any one node.

    Parameters
    ----------
    learning_rate : float (default: 0.1)
        eta > 0.
    local_steps : int (default: 10)
        N >= 1, the iterations between communications; 1 in the papers.
    dynamic : bool (default: False)
        Draw a new graph for every communication (``sgp-dn``); ``topology`` must then name a random one, or be
        None.
    **options
        See ``BaselineOptions``; ``topology`` as in ``decentralised.push_network``: a name of
        ``DIRECTED_TOPOLOGIES`` or ``one-peer-exponential``, a ``networkx.DiGraph``, or an undirected graph,
        with edges in both directions.
    """

    def __init__(
        self,
        *,
        learning_rate: float = 0.1,
        local_steps: int = 10,
        dynamic: bool = False,
        **options: Unpack[BaselineOptions],
    ) -> None:
        int_at_least(1, local_steps=local_steps)
        network = partial(push_network, interval=local_steps, dynamic=dynamic)
        name = "sgp-dn" if dynamic else "sgp"
        # A message has w_i beside x_i.
        super().__init__(name, learning_rate, None, local_steps, scalars=1, network=network, **options)


class DPDSGT(Decentralised):
    """Differentially private gradient tracking: models and trackers of the mean gradient are both mixed.

    x_i <- sum_j W_ij (x_j - eta y_j); y_i <- sum_j W_ij y_j + g_i(new x_i) - g_i(old x_i).

    Each iteration sends x_j and y_j, two dense vectors.

    Parameters
    ----------
    privacy : Privacy
        Clipping and noise; ``Privacy.for_run`` finds the noise for a run.
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
    """MATCHA: each iteration communicates over randomly drawn matchings of the graph.

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
        The matchings, their activation probabilities, and their weight.
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
