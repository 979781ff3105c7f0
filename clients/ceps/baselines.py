"""The node's side of the methods that CEPS is compared with, on the same messages.

Papers: D-PSGD (X. Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?"), DFedAvgM
(T. Sun, D. Li, B. Wang, "Decentralized Federated Averaging"), DFedSAM (Y. Shi et al., "Improving the Model
Consistency of Decentralized Federated Learning"), DCD-PSGD (H. Tang et al., "Communication Compression for
Decentralized Training"), MATCHA (J. Wang et al., "MATCHA: Speeding Up Decentralized SGD via Matching
Decomposition Sampling") and DP-DSGT, gradient tracking with noise. Ours: full local gradients, since the
problems are small; noise of eq. (13) of Sha et al. on every gradient, where it is asked for; a neighbour that
does not answer leaves its weight to the node itself; and several local steps in DCD-PSGD.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from hedgerow.clients.app import BatchClientApp
from hedgerow.clients.ceps.step import neighbour_mean
from hedgerow.clients.gossip import GossipMethod, Memory, Metrics, Node, ProblemFn, Vector, gossip_app
from hedgerow.clients.instructions import flag, local_steps, nonnegative, positive, whole
from hedgerow.wire.thresholding import project
from hedgerow.wire.vector_codecs import Quantised

__all__ = ["BASELINES", "decentralised_client", "mix"]


def mix(
    own: int, vector: Vector, received: Mapping[int, Vector], mixing: Mapping[int, float] | None
) -> Vector:
    """Return sum_j W_ij x_j, in the order of the ids.

    Parameters
    ----------
    own : int
        i, the node's id.
    vector : NDArray (n,)
        x_i.
    received : Mapping[int, NDArray]
        x_j of the neighbours that answered.
    mixing : Mapping[int, float] or None
        Row i of W, with i; a neighbour that did not answer leaves its weight to i. None: equal weights of
        all that are there.
    """
    if mixing is None:
        return neighbour_mean(own, vector, received)
    total = np.zeros_like(vector)
    for j in sorted(mixing):
        total += mixing[j] * received.get(j, vector)
    return total


class _Budget:
    """Gradients of one call, each with noise of its own."""

    def __init__(self, node: Node, memory: Memory) -> None:
        self._node, self.used = node, memory.count("gradients")

    def gradient(self, x: Vector) -> Vector:
        gradient = self._node.problem.gradient(x, self._node.privacy.clip) + self._node.noise(self.used)
        self.used += 1
        return gradient


def _begin(node: Node, arrays: Mapping[str, Vector]) -> Memory:
    config = node.config
    positive(config, "eta")
    if config.get("kappa-low") != config.get("kappa-high"):
        raise ValueError(
            f"kappa-high is {config.get('kappa-high')!r} in the message's config; valid is kappa-low, "
            f"{config.get('kappa-low')!r}: the nodes of this method communicate at the same iterations"
        )
    return Memory(arrays, 0, {"gradients": 0, "missed": 0})


def _at(node: Node, memory: Memory, k: int, arrays: Mapping[str, Vector], gradients: int) -> Memory:
    """Return the memory at iteration k; communications in between, and one not finished, are missed."""
    kappa = node.place.kappa
    lost = max(k - 1, 0) // kappa - max(memory.iteration - 1, 0) // kappa
    return Memory(arrays, k, {"gradients": gradients, "missed": memory.count("missed") + lost})


def _after(memory: Memory, arrays: Mapping[str, Vector], gradients: int) -> Memory:
    """Return the memory after the communication at its iteration."""
    return Memory(arrays, memory.iteration + 1, {**memory.counts, "gradients": gradients})


@dataclass(frozen=True)
class _DPSGD:
    """x_i <- sum_j W_ij x_j - eta g_i(x_i); iterations without communication are plain gradient steps.

    Read: ``eta`` > 0; ``threshold`` (absent: false): keep the ``s`` largest entries of what was mixed.
    """

    def begin(self, node: Node) -> Memory:
        if flag(node.config, "threshold", default=False):
            whole(node.config, "s", 1)
        return _begin(node, {"x": np.zeros(node.problem.n)})

    def prepare(self, node: Node, memory: Memory, k: int) -> Memory:
        x, budget, eta = memory.arrays["x"], _Budget(node, memory), positive(node.config, "eta")
        for _ in range(memory.iteration, k):
            x = x - eta * budget.gradient(x)
        return _at(node, memory, k, {"x": x}, budget.used)

    def message(self, node: Node, memory: Memory) -> Vector:
        return memory.arrays["x"]

    def update(
        self, node: Node, memory: Memory, received: Mapping[int, Vector], mixing: Mapping[int, float] | None
    ) -> tuple[Memory, Metrics]:
        x, budget = memory.arrays["x"], _Budget(node, memory)
        step = positive(node.config, "eta") * budget.gradient(x)
        mixed = mix(node.place.own, x, received, mixing) - step
        if flag(node.config, "threshold", default=False):
            mixed = project(mixed, whole(node.config, "s", 1))
        return _after(memory, {"x": _finite(mixed)}, budget.used), {}

    def look(self, node: Node, memory: Memory, k: int) -> tuple[Memory, Vector]:
        memory = self.prepare(node, memory, k)
        return memory, memory.arrays["x"]


def _finite(x: Vector) -> Vector:
    if not np.isfinite(x).all():
        raise ValueError("eta makes the model not finite; valid is a smaller one")
    return x


@dataclass(frozen=True)
class _AdaptThenCombine:
    """z_i = K local steps from x_i; x_i <- sum_j W_ij z_j, at every communication.

    With a quantising codec q_i = Q(z_i - x_i) travels instead, and x_i <- x_i + sum_j W_ij q_j.

    Read: ``eta`` > 0 and ``local-steps`` K >= 1; ``theta`` in [0, 1) of DFedAvgM, reset each round;
    ``rho-sam`` >= 0 of DFedSAM.

    Parameters
    ----------
    momentum, ascent : bool
        DFedAvgM's local steps, DFedSAM's; neither are plain gradient steps, MATCHA's.
    """

    momentum: bool = False
    ascent: bool = False

    def begin(self, node: Node) -> Memory:
        self._constants(node)
        return _begin(node, {"x": np.zeros(node.problem.n)})

    def prepare(self, node: Node, memory: Memory, k: int) -> Memory:
        x, budget = memory.arrays["x"], _Budget(node, memory)
        if "z" in memory.arrays:
            if memory.iteration == k:
                return memory
            # The communication was lost: the node learnt, and nobody mixed.
            x = x + self._own(node, memory) if _quantised(node) else memory.arrays["z"]
        z = self._local(node, x, budget)
        return _at(node, memory, k, {"x": x, "z": _finite(z)}, budget.used)

    def message(self, node: Node, memory: Memory) -> Vector:
        x, z = memory.arrays["x"], memory.arrays["z"]
        return z - x if _quantised(node) else z

    def update(
        self, node: Node, memory: Memory, received: Mapping[int, Vector], mixing: Mapping[int, float] | None
    ) -> tuple[Memory, Metrics]:
        if _quantised(node):
            x = memory.arrays["x"] + mix(node.place.own, self._own(node, memory), received, mixing)
        else:
            x = mix(node.place.own, memory.arrays["z"], received, mixing)
        return _after(memory, {"x": x}, memory.count("gradients")), {}

    def look(self, node: Node, memory: Memory, k: int) -> tuple[Memory, Vector]:
        return memory, memory.arrays["x"]

    def _own(self, node: Node, memory: Memory) -> Vector:
        return node.place.as_received(self.message(node, memory), memory.iteration)

    def _constants(self, node: Node) -> tuple[int, float, float]:
        theta = nonnegative(node.config, "theta", below=1.0) if self.momentum else 0.0
        return (
            local_steps(node.config, "local-steps"),
            theta,
            nonnegative(node.config, "rho-sam") if self.ascent else 0.0,
        )

    def _local(self, node: Node, x: Vector, budget: _Budget) -> Vector:
        (K, theta, rho), eta = self._constants(node), positive(node.config, "eta")
        y, before = x, x
        for _ in range(K):
            g = budget.gradient(y)
            if self.ascent:
                norm = float(np.linalg.norm(g))
                g = budget.gradient(y + rho * g / norm if norm > 0 else y)
            y, before = y - eta * g + theta * (y - before), y
        return y


def _quantised(node: Node) -> bool:
    return isinstance(node.place.codec, Quantised)


@dataclass(frozen=True)
class _DCD:
    """x_i^+ = sum_j W_ij x^_j + (K local steps from x_i) - x_i; q_i = C(x_i^+ - x_i) moves x_i and replicas.

    Read: ``eta`` > 0, ``local-steps`` (absent: 1), and ``weights``, which do not change. C is the run's
    codec: an unbiased and mild quantiser. A replica whose q was lost is no longer its owner's x, and is
    given up: its weight goes to the node itself.
    """

    def begin(self, node: Node) -> Memory:
        zero = np.zeros(node.problem.n)
        replicas = {f"replica-{j}": zero for j in node.place.neighbours}
        self._steps(node)
        return _begin(node, {"x": zero, **replicas})

    def prepare(self, node: Node, memory: Memory, k: int) -> Memory:
        if "plus" in memory.arrays:
            if memory.iteration == k:
                return memory
            at = self.update(node, memory, {}, None)[0]
            memory = replace(memory, arrays=at.arrays)
        x, budget, eta = memory.arrays["x"], _Budget(node, memory), positive(node.config, "eta")
        y = x
        for _ in range(self._steps(node)):
            y = y - eta * budget.gradient(y)
        plus = mix(node.place.own, x, _replicas(memory), node.mixing) + (y - x)
        return _at(node, memory, k, {**memory.arrays, "plus": _finite(plus)}, budget.used)

    def message(self, node: Node, memory: Memory) -> Vector:
        return memory.arrays["plus"] - memory.arrays["x"]

    def update(
        self, node: Node, memory: Memory, received: Mapping[int, Vector], mixing: Mapping[int, float] | None
    ) -> tuple[Memory, Metrics]:
        q = node.place.as_received(self.message(node, memory), memory.iteration)
        known = _replicas(memory)
        replicas = {f"replica-{j}": known[j] + received[j] for j in known if j in received}
        arrays = {"x": memory.arrays["x"] + q, **replicas}
        return _after(memory, arrays, memory.count("gradients")), {"replicas": len(replicas)}

    def look(self, node: Node, memory: Memory, k: int) -> tuple[Memory, Vector]:
        return memory, memory.arrays["x"]

    def _steps(self, node: Node) -> int:
        return local_steps(node.config, "local-steps") if "local-steps" in node.config else 1


def _replicas(memory: Memory) -> dict[int, Vector]:
    return {
        int(key.removeprefix("replica-")): array
        for key, array in memory.arrays.items()
        if key.startswith("replica-")
    }


@dataclass(frozen=True)
class _DSGT:
    """x_i <- sum_j W_ij (x_j - eta y_j); y_i <- sum_j W_ij y_j + g_i(new x_i) - g_i(old x_i).

    Read: ``eta`` > 0. A message holds x and y, 2 n numbers; nothing happens between communications.
    """

    def begin(self, node: Node) -> Memory:
        zero = np.zeros(node.problem.n)
        return _begin(node, {"x": zero, "y": zero, "g": zero})

    def prepare(self, node: Node, memory: Memory, k: int) -> Memory:
        return _at(node, memory, k, memory.arrays, memory.count("gradients"))

    def message(self, node: Node, memory: Memory) -> Vector:
        return np.concatenate([memory.arrays["x"], memory.arrays["y"]])

    def update(
        self, node: Node, memory: Memory, received: Mapping[int, Vector], mixing: Mapping[int, float] | None
    ) -> tuple[Memory, Metrics]:
        own, eta, n = node.place.own, positive(node.config, "eta"), node.problem.n
        x, y, old = (memory.arrays[key] for key in ("x", "y", "g"))
        stepped = {j: vector[:n] - eta * vector[n:] for j, vector in received.items()}
        trackers = {j: vector[n:] for j, vector in received.items()}
        x = _finite(mix(own, x - eta * y, stepped, mixing))
        budget = _Budget(node, memory)
        new = budget.gradient(x)
        y = mix(own, y, trackers, mixing) + new - old
        return _after(memory, {"x": x, "y": y, "g": new}, budget.used), {}

    def look(self, node: Node, memory: Memory, k: int) -> tuple[Memory, Vector]:
        return memory, memory.arrays["x"]


# Which row of W a node uses comes with the messages: fixed, another one each time (d-psgd-dn, matcha), or
# none, which is equal weights of the node and those neighbours that it drew (d-psgd-pc).
BASELINES: Mapping[str, GossipMethod] = {
    "d-psgd": _DPSGD(),
    "d-psgd-dn": _DPSGD(),
    "d-psgd-pc": _DPSGD(),
    "dfedavgm": _AdaptThenCombine(momentum=True),
    "dfedsam": _AdaptThenCombine(ascent=True),
    "matcha": _AdaptThenCombine(),
    "dcd-psgd": _DCD(),
    "dp-dsgt": _DSGT(),
}


def decentralised_client(problem: ProblemFn) -> BatchClientApp:
    """Return the ClientApp of the methods that CEPS is compared with, ``BASELINES``.

    It answers the messages of ``ceps_client``. The config of ``query.hello`` holds

    - ``method``, ``run-seed``, ``num-nodes``, ``neighbours``, ``codec``, ``r`` and ``privacy`` as there;
    - ``local-steps``, which is kappa unless ``kappa-low`` and ``kappa-high``, equal, are there;
    - ``weights`` (absent: equal weights of the node and those it drew): this node's row of the mixing
      matrix, a number for each of ``neighbours`` and the node's own at the end. The config of
      ``train.update`` may have both anew, for a communication on another graph;
    - ``eta`` > 0; ``theta`` in [0, 1) for ``dfedavgm``; ``rho-sam`` >= 0 for ``dfedsam``; ``threshold``
      (absent: false) with ``s`` for ``d-psgd``, which then keeps s entries of each mixed model.

    Parameters
    ----------
    problem : Callable[[Context], Problem]
        Finds a node's objective. It is asked in each call: keep what is dear to make.
    """
    return gossip_app(problem, BASELINES)
