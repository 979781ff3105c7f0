"""CEPS's Algorithm 1 at node i: its initialisation, and its steps (3) and (4).

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning"::

    Initialise W^0 = 0; kappa_i, sigma_i, gamma_i, Phi_i; m_i = |N_i|, u_i = -grad f_i(0)      ``begin``
    for k = 0, 1, 2, ... do
        if k in K_i = {kappa_i, 2 kappa_i, ...} then
            draw N_i^k, which contains i, and request from each other j in it z_j^k
                                                                           ``GossipPlace.wants``
            z_j^k = 1BCS(w_j^k, Phi, gamma), Algorithm 2      ``message``, ``hedgerow.wire.OneBit``
            draw xi from N(0, rho_i I)                                      ``GossipNode.noised``
            m_i = |N_i^k|, mean = sum of z_j^k over N_i^k / m_i, c = sigma_i m_i,
            u_i = c mean - grad f_i(mean), w_i^{k+1} = P((u_i + xi) / c)         (3), ``update``
        else
            w_i^{k+1} = P((u_i + mu w_i^k) / (c + mu))                          (4), ``prepare``

P keeps the s largest entries; ties go to the smallest index. ``strategies/gossip/algorithm.py`` has the same
iteration as the server sees it. Ours: in the mode ``sound`` the noise stays in u, while the paper's is in one
model and gone after a few local steps. A node that received none of its neighbours' models only takes a local
step, where (3) would take a huge step from its own model alone. Beside the mean of (3) there are rules that
withstand a Byzantine minority: L. He, S. P. Karimireddy, M. Jaggi, "Byzantine-Robust Decentralized Learning
via ClippedGossip", 2022, in which a neighbour moves the mean by at most tau over the number of models; D. Yin
et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", 2018 (median, trimmed
mean), here over the node itself and the neighbours that it heard.
"""

from collections.abc import Mapping

import numpy as np
from flwr.app import ConfigRecord
from numpy.typing import NDArray

from hedgerow.clients.gossip import GossipNode, GossipNodeMethod, Memory
from hedgerow.clients.gossip.node import Metrics
from hedgerow.clients.instructions import choice, nonnegative, positive, whole
from hedgerow.wire import checks
from hedgerow.wire.robust_means import Aggregation, cut
from hedgerow.wire.thresholding import largest, project

Vector = NDArray[np.float64]


class Algorithm1(GossipNodeMethod):
    """Algorithm 1 at a node.

    The memory's arrays are the model w and the frozen drift u, (n,). u reveals as much as a gradient: it must
    not leave the node. Its counts are ``participants``, m_i of the last communication, the node included;
    ``gradients``, the accesses to the data, which is the number of releases; ``missed`` communications; and
    ``sigma``, which is sigma_i > 0, or with ``sigma-rule`` = ``fixed_c`` the constant c.
    """

    def begin(self, node: GossipNode) -> Memory:
        """Return the memory at k = 0. In the mode ``sound`` u has noise."""
        whole(node.config, "s", 1)
        positive(node.config, "mu")
        neighbourhood_of(node.config)
        sigma = _sigma(node)
        checks.positive(sigma=sigma)
        w = np.zeros(node.problem.n)
        u = -node.problem.gradient(w, node.privacy.clip)
        if node.privacy.mode == "sound":
            u = node.noised(u, 0)
        counts = {"participants": len(node.place.neighbours) + 1, "gradients": 1, "missed": 0, "sigma": sigma}
        return Memory({"w": w, "u": u}, 0, counts)

    def prepare(self, node: GossipNode, memory: Memory, k: int) -> Memory:
        """Take local steps, (4), up to iteration k; communications in between count as missed."""
        s, mu = whole(node.config, "s", 1), positive(node.config, "mu")
        w, u, steps = memory.arrays["w"], memory.arrays["u"], k - memory.iteration
        divisor = _inverse_step(node, memory, memory.count("participants")) + mu
        while steps > 0:
            v = (u + mu * w) / divisor  # (4)
            kept = largest(np.abs(v), s)
            outside = np.abs(u) / divisor
            outside[kept] = 0.0
            bar, own, values = outside.max(initial=0.0), u[kept], v[kept]
            steps -= 1
            # Off the support w is 0 and stays so: while the support is the same, (4) changes s numbers only,
            # which soon converge.
            while steps > 0:
                moved = (own + mu * values) / divisor  # (4)
                if not np.abs(moved).min() > bar:
                    break
                steps = 0 if np.array_equal(moved, values) else steps - 1
                values = moved
            w = np.zeros_like(u)
            w[kept] = values
        missed = memory.count("missed") + node.place.communications(memory.iteration, k)
        return Memory({"w": w, "u": u}, k, {**memory.counts, "missed": missed})

    def message(self, node: GossipNode, memory: Memory) -> Vector:
        """Return w_i^k."""
        return memory.arrays["w"]

    def update(
        self,
        node: GossipNode,
        memory: Memory,
        received: Mapping[int, Vector],
        mixing: Mapping[int, float] | None,
    ) -> tuple[Memory, Metrics]:
        """Return the memory after a communication, (3), and metrics; ValueError if it is not finite.

        ``received`` are z_j of the other participants. In the mode ``sound`` the noise is added to the
        gradient, of which nothing else is then used; in ``paper`` to the update.
        """
        own, w, mode = node.place.own, memory.arrays["w"], node.privacy.mode
        config, s, mean = node.config, whole(node.config, "s", 1), neighbour_mean(own, w, received)
        if not received and node.place.neighbours:
            after = self.prepare(node, memory, memory.iteration + 1)
        else:
            participants = 1 + len(received)
            c = _inverse_step(node, memory, participants)
            center = mean
            if "aggregation" in config:
                center = combined(neighbourhood_of(config), own, w, received)
            gradient = node.problem.gradient(center, node.privacy.clip)
            k = memory.iteration
            u = c * center + (node.noised(-gradient, k) if mode == "sound" else -gradient)  # (3)
            noisy = node.noised(u, k) if mode == "paper" else u
            if not np.isfinite(noisy).all():
                raise ValueError(f"sigma must be larger: with c = {c:g} the update is not finite")
            arrays = {"w": project(noisy / c, s), "u": u}  # (3)
            counts = {"participants": participants, "gradients": memory.count("gradients") + 1}
            after = Memory(arrays, k + 1, {**memory.counts, **counts})
        metrics: Metrics = {}
        if mode != "sound":
            metrics["disagreement"] = float(np.sum((w - mean) ** 2)) / s
            change, norm = float(np.linalg.norm(after.arrays["w"] - w)), float(np.linalg.norm(w))
            metrics["change"] = change / norm if norm > 0 else float(change > 0)
        return after, metrics

    def look(self, node: GossipNode, memory: Memory, k: int) -> tuple[Memory, Vector]:
        """Return w_i^k."""
        memory = self.prepare(node, memory, k)
        return memory, memory.arrays["w"]


# sigma_i, and c_i.


def _inverse_step(node: GossipNode, memory: Memory, participants: int) -> float:
    """Return c_i = sigma_i m_i, or the fixed c, as in the paper's analysis."""
    sigma = memory.counts["sigma"]
    return sigma if node.config["sigma-rule"] == "fixed_c" else sigma * participants


def _sigma(node: GossipNode) -> float:
    """Return sigma_i, or the fixed c. lambda_max is expensive: this is called once per run."""
    config, place, problem = node.config, node.place, node.problem
    if choice(config, "sigma-rule", ("paper", "fixed_c")) == "fixed_c":
        return positive(config, "c")
    if node.privacy.mode == "sound":
        raise ValueError(
            "sigma-rule must be 'fixed_c' with privacy 'sound', got 'paper' in the message's config: the "
            "paper's rule reads the data and nothing accounts for it"
        )
    by_bits = "sigma-d" in config and choice(config, "sigma-d", ("samples", "bits")) == "bits"
    d = whole(config, "d", 1) if by_bits else problem.num_examples
    return penalty(problem.largest_eigenvalue, place.num_nodes, place.r, d)


def penalty(largest_eigenvalue: float, num_nodes: int, r: float, d: int) -> float:
    """Return the paper's sigma_i = lambda_max(A_i^T A_i) / (m (2 r + 0.1) d_i), Section V-B."""
    return largest_eigenvalue / (num_nodes * (2 * r + 0.1) * d)


# The mean of (3), and rules in its place.


def neighbour_mean(own: int, w: Vector, received: Mapping[int, Vector]) -> Vector:
    """Return the mean of a node's and the received models, summed in the order of their ids."""
    total = np.zeros_like(w)
    for j in sorted({own, *received}):
        total += w if j == own else received[j]
    return total / (1 + len(received))


def neighbourhood_of(config: ConfigRecord) -> Aggregation:
    """Read ``aggregation`` (absent: the mean) and its ``aggregation-number``; ValueError if one is invalid.

    The number is b of ``trimmed-mean`` in [0, 0.5), the share cut off at each end, or tau > 0 of ``clipped``.
    """
    if "aggregation" not in config:
        return Aggregation("mean")
    rule = choice(config, "aggregation", ("mean", "median", "trimmed-mean", "clipped"))
    if rule == "clipped":
        return Aggregation(rule, (positive(config, "aggregation-number"),))
    if rule == "trimmed-mean":
        return Aggregation(rule, (nonnegative(config, "aggregation-number", below=0.5),))
    return Aggregation(rule)


def combined(rule: Aggregation, own: int, w: Vector, received: Mapping[int, Vector]) -> Vector:
    """Return the combination of a node's model (n,) and the received ones, by sender.

    ``clipped`` is the mean of its own model and the neighbours', each moved to within tau of its own in norm.
    """
    if rule.name == "clipped":
        received = {j: w + cut(z - w, *rule.arguments) for j, z in received.items()}
    if rule.name in ("mean", "clipped"):
        return neighbour_mean(own, w, received)
    models = np.stack([w if j == own else received[j] for j in sorted({own, *received})])
    return rule.combined(models, np.ones(len(models)))
