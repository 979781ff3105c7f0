"""The node's side of CEPS's baselines, on the same messages.

Papers: D-PSGD (X. Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?"), DFedAvgM
(T. Sun, D. Li, B. Wang, "Decentralized Federated Averaging"), DFedSAM (Y. Shi et al., "Improving the Model
Consistency of Decentralized Federated Learning"), DCD-PSGD (H. Tang et al., "Communication Compression for
Decentralized Training"), MATCHA (J. Wang et al., "MATCHA: Speeding Up Decentralized SGD via Matching
Decomposition Sampling"), CHOCO-SGD (A. Koloskova, S. Stich, M. Jaggi, "Decentralized Stochastic Optimization
and Gossip Algorithms with Compressed Communication", Algorithm 2), BEER (H. Zhao et al., "BEER: Fast O(1/T)
Rate for Decentralized Nonconvex Optimization with Communication Compression", Algorithm 1), SGP (A. Nedic,
A. Olshevsky, "Stochastic Gradient-Push for Strongly Convex Functions on Time-Varying Directed Graphs";
M. Assran, N. Loizou, N. Ballas, M. Rabbat, "Stochastic Gradient Push for Distributed Deep Learning",
Algorithm 1) and DP-DSGT, gradient tracking with noise. Ours: full local gradients, since the problems are
small; optional noise of eq. (13) of Sha et al. on every gradient; several local steps in DCD-PSGD, CHOCO-SGD
and SGP; and the weight of a neighbour that does not answer goes to the node itself, except in SGP, where it
never was the node's.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from flwr.app import ConfigRecord

from hedgerow.clients.ceps.algorithm import neighbour_mean
from hedgerow.clients.gossip import GossipNode, GossipNodeMethod, Memory
from hedgerow.clients.gossip.node import Metrics, Vector
from hedgerow.clients.instructions import flag, local_steps, nonnegative, positive, whole
from hedgerow.wire.codec import Codec
from hedgerow.wire.thresholding import project
from hedgerow.wire.vector_codecs import Quantised, Sparse

Arrays = Mapping[str, Vector]
Reads = tuple[Callable[[ConfigRecord], object], ...]


def mix(
    own: int, vector: Vector, received: Mapping[int, Vector], mixing: Mapping[int, float] | None
) -> Vector:
    """Return sum_j W_ij x_j, in the order of the ids.

    ``received`` are x_j of the neighbours that answered. ``mixing`` is row i of W, with i; the weight of a
    neighbour that did not answer goes to i. None gives all models present equal weights.
    """
    if mixing is None:
        return neighbour_mean(own, vector, received)
    total = np.zeros_like(vector)
    for j in sorted(mixing):
        total += mixing[j] * received.get(j, vector)
    return total


class _Call:
    """One call at one node: its memory and received models, its step size, and its noisy gradients."""

    def __init__(
        self,
        node: GossipNode,
        memory: Memory,
        received: Mapping[int, Vector] | None = None,
        mixing: Mapping[int, float] | None = None,
    ) -> None:
        self.node, self.memory, self.arrays = node, memory, memory.arrays
        self.received, self.mixing = received or {}, mixing
        self.eta = positive(node.config, "eta")
        self.gradients = memory.count("gradients")

    def gradient(self, x: Vector) -> Vector:
        """Return g_i(x), with noise of its own."""
        gradient = self.node.problem.gradient(x, self.node.privacy.clip)
        noisy = self.node.noised(gradient, self.gradients)
        self.gradients += 1
        return noisy

    def descend(self, x: Vector, steps: int) -> Vector:
        """Return x after some steps x <- x - eta g_i(x)."""
        for _ in range(steps):
            x = x - self.eta * self.gradient(x)
        return x

    def mix(self, x: Vector, received: Mapping[int, Vector]) -> Vector:
        """Return sum_j W_ij x_j."""
        return mix(self.node.place.own, x, received, self.mixing)


class _Baseline(GossipNodeMethod):
    """The common part: all methods start at 0, and count gradients and missed communications.

    A method defines a node's work up to a communication (``prepared``) and in it (``communicated``): each
    returns the arrays that the node stores.
    """

    # The array that exists only between ``prepared`` and ``communicated``; None if there is none.
    ready: str | None = None
    # Readers of the method's config keys beside ``eta``; they raise ValueError if a value is invalid.
    reads: Reads = ()

    def begin(self, node: GossipNode) -> Memory:
        config = node.config
        positive(config, "eta")
        if config.get("kappa-low") != config.get("kappa-high"):
            raise ValueError(
                f"kappa-high must equal kappa-low, {config.get('kappa-low')!r}, got "
                f"{config.get('kappa-high')!r} in the message's config: the nodes of this method "
                "communicate at the same iterations"
            )
        for read in self.reads:
            read(config)
        arrays = dict.fromkeys(self.names(node), np.zeros(node.problem.n))
        return Memory(arrays, 0, {"gradients": 0, "missed": 0})

    def prepare(self, node: GossipNode, memory: Memory, k: int) -> Memory:
        if memory.iteration == k and self.ready in memory.arrays:
            return memory
        call = _Call(node, memory)
        arrays = self.prepared(call, k)
        # Communications in between, and an unfinished one, are missed.
        missed = memory.count("missed") + node.place.communications(memory.iteration, k)
        counts = {"gradients": call.gradients, "missed": missed}
        return Memory(arrays, k, {**memory.counts, **counts})

    def message(self, node: GossipNode, memory: Memory) -> Vector:
        return memory.arrays["x"]

    def update(
        self,
        node: GossipNode,
        memory: Memory,
        received: Mapping[int, Vector],
        mixing: Mapping[int, float] | None,
    ) -> tuple[Memory, Metrics]:
        call = _Call(node, memory, received, mixing)
        arrays = self.communicated(call)
        counts = {**memory.counts, "gradients": call.gradients}
        return Memory(arrays, memory.iteration + 1, counts), self.metrics(arrays)

    def look(self, node: GossipNode, memory: Memory, k: int) -> tuple[Memory, Vector]:
        return memory, memory.arrays["x"]

    def names(self, node: GossipNode) -> list[str]:
        """Return the names of a node's initial arrays."""
        return ["x"]

    @abstractmethod
    def prepared(self, call: _Call, k: int) -> Arrays:
        """Return the arrays at iteration k, before its communication."""

    @abstractmethod
    def communicated(self, call: _Call) -> Arrays:
        """Return the arrays after a communication."""

    def sent(self, call: _Call) -> Vector:
        """Return this node's own message as others decode it."""
        return call.node.place.as_received(self.message(call.node, call.memory), call.memory.iteration)

    def metrics(self, arrays: Arrays) -> Metrics:
        """Return the metrics of a communication."""
        return {}


def _finite(x: Vector) -> Vector:
    if not np.isfinite(x).all():
        raise ValueError("eta must be smaller: it makes the model not finite")
    return x


# Readers of config keys.


def _kept(config: ConfigRecord) -> int | None:
    return whole(config, "s", 1) if flag(config, "threshold", default=False) else None


_steps = partial(local_steps, key="local-steps")
_theta = partial(nonnegative, key="theta", below=1.0)
_rho = partial(nonnegative, key="rho-sam")


def _steps_or_one(config: ConfigRecord) -> int:
    return _steps(config) if "local-steps" in config else 1


def _gamma(config: ConfigRecord) -> float:
    if (gamma := positive(config, "step-gamma")) > 1:
        raise ValueError(f"step-gamma must be a number in (0, 1], got {gamma!r} in the message's config")
    return gamma


def _weights(config: ConfigRecord) -> None:
    if "weights" not in config:
        raise ValueError("weights is missing in the message's config: it must hold the parts that are taken")


class _DPSGD(_Baseline):
    """x_i <- sum_j W_ij x_j - eta g_i(x_i); iterations without communication are plain gradient steps.

    Read: ``eta`` > 0; ``threshold`` (absent: false): keep the ``s`` largest entries of what was mixed.
    """

    reads = (_kept,)

    def prepared(self, call: _Call, k: int) -> Arrays:
        return {"x": call.descend(call.arrays["x"], k - call.memory.iteration)}

    def communicated(self, call: _Call) -> Arrays:
        x, s = call.arrays["x"], _kept(call.node.config)
        x = call.mix(x, call.received) - call.eta * call.gradient(x)
        return {"x": _finite(x if s is None else project(x, s))}

    def look(self, node: GossipNode, memory: Memory, k: int) -> tuple[Memory, Vector]:
        return super().look(node, self.prepare(node, memory, k), k)


class _AdaptThenCombine(_Baseline):
    """z_i = K local steps from x_i; x_i <- sum_j W_ij z_j, at every communication. This class is MATCHA.

    With a quantising codec q_i = Q(z_i - x_i) is sent instead, and x_i <- x_i + sum_j W_ij q_j.

    Read: ``eta`` > 0 and ``local-steps`` K >= 1.
    """

    ready = "z"
    reads: Reads = (_steps,)

    def local(self, call: _Call, x: Vector, K: int) -> Vector:
        """Return z_i: y <- y - eta g_i(y), K times from x_i."""
        return call.descend(x, K)

    def prepared(self, call: _Call, k: int) -> Arrays:
        x = call.arrays["x"]
        if "z" in call.arrays:
            # The communication was lost: the node keeps its local steps, unmixed.
            x = x + self.sent(call) if _quantised(call.node) else call.arrays["z"]
        return {"x": x, "z": _finite(self.local(call, x, _steps(call.node.config)))}

    def message(self, node: GossipNode, memory: Memory) -> Vector:
        x, z = memory.arrays["x"], memory.arrays["z"]
        return z - x if _quantised(node) else z

    def communicated(self, call: _Call) -> Arrays:
        if _quantised(call.node):
            return {"x": call.arrays["x"] + call.mix(self.sent(call), call.received)}
        return {"x": call.mix(call.arrays["z"], call.received)}


class _SGP(_AdaptThenCombine):
    """y <- y - eta g_i(y / w_i), K times from x_i; x_i <- sum_j P_ij y_j and w_i <- sum_j P_ij w_j.

    A message holds y_i and w_i, n + 1 numbers. The model, used for gradients and monitoring, is x_i / w_i;
    w_i is initially 1. Also read: ``weights``, the parts P_ij that this node takes of the others' models and
    its own. P's columns sum to one, its rows need not. A lost part is added nowhere.
    """

    reads = (_steps, _weights)

    def local(self, call: _Call, x: Vector, K: int) -> Vector:
        w = _push_weight(call.memory)
        for _ in range(K):
            x = x - call.eta * call.gradient(x / w)
        return x

    def message(self, node: GossipNode, memory: Memory) -> Vector:
        return np.append(memory.arrays["z"], _push_weight(memory))

    def norm(self, node: GossipNode, vector: Vector) -> float:
        # Of the model: honest x differ as their weights do. A run's weights sum to m if nothing is lost;
        # nodes that restart add some.
        w = float(vector[-1])
        if not 0 < w <= 2 * node.place.num_nodes:
            return np.inf
        with np.errstate(over="ignore"):
            return float(np.linalg.norm(vector[:-1] / w))

    def update(
        self,
        node: GossipNode,
        memory: Memory,
        received: Mapping[int, Vector],
        mixing: Mapping[int, float] | None,
    ) -> tuple[Memory, Metrics]:
        parts = mixing or {}
        if min(parts.values()) < 0 or not 0 < parts[node.place.own] <= 1:
            raise ValueError(
                f"weights must be numbers >= 0, the node's own in (0, 1], got {list(parts.values())!r} in "
                "the message's config"
            )
        both = {**received, node.place.own: self.message(node, memory)}
        total = sum((parts[j] * both[j] for j in sorted(both)), np.zeros(node.problem.n + 1))
        x, w = _finite(total[:-1]), float(total[-1])
        after = Memory({"x": x}, memory.iteration + 1, {**memory.counts, "push-weight": w})
        return after, {"push-weight": w}

    def look(self, node: GossipNode, memory: Memory, k: int) -> tuple[Memory, Vector]:
        return memory, memory.arrays["x"] / _push_weight(memory)


def _push_weight(memory: Memory) -> float:
    w = float(memory.counts.get("push-weight", 1.0))
    # A node that heard no other for a thousand communications has given all away.
    if not 0 < w < np.inf:
        raise ValueError(f"push-weight must be a finite number > 0, got {w!r} in the state")
    return w


class _DFedAvgM(_AdaptThenCombine):
    """Local steps with momentum. Also read: ``theta`` in [0, 1)."""

    reads = (_steps, _theta)

    def local(self, call: _Call, x: Vector, K: int) -> Vector:
        """Return z_i: y <- y - eta g_i(y) + theta (y - y_before), K times from x_i; at first y_before = y."""
        theta = _theta(call.node.config)
        y, before = x, x
        for _ in range(K):
            y, before = y - call.eta * call.gradient(y) + theta * (y - before), y
        return y


class _DFedSAM(_AdaptThenCombine):
    """Local steps with the gradient at the worst nearby point. Also read: ``rho-sam`` >= 0."""

    reads = (_steps, _rho)

    def local(self, call: _Call, x: Vector, K: int) -> Vector:
        """Return z_i: y <- y - eta g_i(y + rho g_i(y) / ||g_i(y)||), K times from x_i."""
        rho, y = _rho(call.node.config), x
        for _ in range(K):
            g = call.gradient(y)
            norm = float(np.linalg.norm(g))
            y = y - call.eta * call.gradient(y + rho * g / norm if norm > 0 else y)
        return y


def _quantised(node: GossipNode) -> bool:
    return isinstance(node.place.codec, Quantised)


class _Replicating(_Baseline):
    """Methods with replicas of the neighbours' arrays at each node, updated by their messages.

    A replica with a lost update differs from its original and is dropped: its weight goes to the node itself.
    A lost communication updates the node's own arrays, and no replica.
    """

    # A node's initial arrays, and those of them with replicas.
    own: tuple[str, ...]
    copied: tuple[str, ...]

    def names(self, node: GossipNode) -> list[str]:
        return [*self.own, *(f"{name}-{j}" for name in self.copied for j in node.place.neighbours)]

    def before(self, call: _Call) -> Arrays:
        """Return the arrays before an iteration, updated for a lost communication."""
        return self.communicated(call) if self.ready in call.arrays else call.arrays

    def metrics(self, arrays: Arrays) -> Metrics:
        return {"replicas": len(_copies(arrays, self.copied[0]))}


def _copies(arrays: Arrays, name: str) -> dict[int, Vector]:
    prefix = f"{name}-"
    return {int(key[len(prefix) :]): x for key, x in arrays.items() if key.startswith(prefix)}


def _moved(arrays: Arrays, name: str, q_of: Mapping[int, Vector]) -> dict[str, Vector]:
    """Return the updated replicas, without those that lost an update."""
    known = _copies(arrays, name)
    return {f"{name}-{j}": known[j] + q_of[j] for j in known if j in q_of}


def _pull(call: _Call, arrays: Arrays, name: str) -> Vector:
    """Return gamma sum_j W_ij (x^_j - x^_i) for the estimates x^ of that name."""
    own = arrays[name]
    mixed = mix(call.node.place.own, own, _copies(arrays, name), call.node.mixing)
    return _gamma(call.node.config) * (mixed - own)


def _room(codec: Codec, vector: Vector, vectors: int = 1) -> Vector:
    """Return the entries that fit into a message: the largest with a sparse codec, else all."""
    return project(vector, codec.s // vectors) if isinstance(codec, Sparse) else vector


class _DCD(_Replicating):
    """x_i^+ = sum_j W_ij x^_j + (K local steps from x_i) - x_i; q_i = C(x_i^+ - x_i) moves x_i and replicas.

    Read: ``eta`` > 0, ``local-steps`` (absent: 1), and ``weights``, which do not change. C is the run's
    codec: an unbiased and mild quantiser.
    """

    ready = "plus"
    reads = (_steps_or_one,)
    own, copied = ("x",), ("replica",)

    def prepared(self, call: _Call, k: int) -> Arrays:
        arrays = self.before(call)
        x = arrays["x"]
        mixed = mix(call.node.place.own, x, _copies(arrays, "replica"), call.node.mixing)
        plus = mixed + (call.descend(x, _steps_or_one(call.node.config)) - x)
        return {**arrays, "plus": _finite(plus)}

    def message(self, node: GossipNode, memory: Memory) -> Vector:
        return memory.arrays["plus"] - memory.arrays["x"]

    def communicated(self, call: _Call) -> Arrays:
        return {"x": call.arrays["x"] + self.sent(call), **_moved(call.arrays, "replica", call.received)}


class _CHOCO(_Replicating):
    """x_i^1/2 = K local steps from x_i; q_i = C(x_i^1/2 - x^_i) moves x^_i and the neighbours' copies of it;
    x_i <- x_i^1/2 + gamma sum_j W_ij (x^_j - x^_i).

    Read: ``eta`` > 0, ``step-gamma`` in (0, 1], ``local-steps`` (absent: 1), and ``weights``, which do not
    change. C is the run's codec: a quantiser, or the s largest entries with a sparse one.
    """

    ready = "half"
    reads = (_gamma, _steps_or_one)
    own, copied = ("x", "hat"), ("hat",)

    def prepared(self, call: _Call, k: int) -> Arrays:
        arrays = self.before(call)
        half = call.descend(arrays["x"], _steps_or_one(call.node.config))
        return {**arrays, "half": _finite(half)}

    def message(self, node: GossipNode, memory: Memory) -> Vector:
        return _room(node.place.codec, memory.arrays["half"] - memory.arrays["hat"])

    def communicated(self, call: _Call) -> Arrays:
        after = {"hat": call.arrays["hat"] + self.sent(call), **_moved(call.arrays, "hat", call.received)}
        return {"x": call.arrays["half"] + _pull(call, after, "hat"), **after}


class _BEER(_Replicating):
    """x_i <- x_i + gamma sum_j W_ij (h_j - h_i) - eta v_i; v_i <- v_i + gamma sum_j W_ij (u_j - u_i)
    + g_i(new x_i) - g_i(old x_i); h_i <- h_i + C(x_i - h_i); u_i <- u_i + C(v_i - u_i), all copies with them.

    Read: ``eta`` > 0, ``step-gamma`` in (0, 1], and ``weights``, which do not change. v_i begins as g_i(x_i),
    h and u (G in the paper) as 0. A message holds both compressed changes.
    """

    ready = "x-next"
    reads = (_gamma,)
    own, copied = ("x", "v", "g", "h", "u"), ("h", "u")

    def prepared(self, call: _Call, k: int) -> Arrays:
        arrays = self.before(call)
        x, v, g = (arrays[key] for key in ("x", "v", "g"))
        if call.gradients == 0:
            v = g = call.gradient(x)
        x = _finite(x + _pull(call, arrays, "h") - call.eta * v)
        new = call.gradient(x)
        v = _finite(v + _pull(call, arrays, "u") + new - g)
        return {**arrays, "x-next": x, "v-next": v, "g-next": new}

    def message(self, node: GossipNode, memory: Memory) -> Vector:
        arrays, codec = memory.arrays, node.place.codec
        changes = (arrays["x-next"] - arrays["h"], arrays["v-next"] - arrays["u"])
        return np.concatenate([_room(codec, change, 2) for change in changes])

    def communicated(self, call: _Call) -> Arrays:
        arrays = call.arrays
        halves = {j: np.split(message, 2) for j, message in call.received.items()}
        after = {key: arrays[f"{key}-next"] for key in ("x", "v", "g")}
        for place, (name, q) in enumerate(zip(self.copied, np.split(self.sent(call), 2), strict=True)):
            after[name] = arrays[name] + q
            after |= _moved(arrays, name, {j: half[place] for j, half in halves.items()})
        return after


class _DSGT(_Baseline):
    """x_i <- sum_j W_ij (x_j - eta y_j); y_i <- sum_j W_ij y_j + g_i(new x_i) - g_i(old x_i).

    Read: ``eta`` > 0. A message holds x and y, 2 n numbers; nothing happens between communications.
    """

    def names(self, node: GossipNode) -> list[str]:
        return ["x", "y", "g"]

    def prepared(self, call: _Call, k: int) -> Arrays:
        return call.arrays

    def message(self, node: GossipNode, memory: Memory) -> Vector:
        return np.concatenate([memory.arrays["x"], memory.arrays["y"]])

    def communicated(self, call: _Call) -> Arrays:
        x, y, old = (call.arrays[key] for key in ("x", "y", "g"))
        models, trackers = {}, {}
        for j, message in call.received.items():
            models[j], trackers[j] = np.split(message, 2)
        stepped = {j: models[j] - call.eta * trackers[j] for j in models}
        x = _finite(call.mix(x - call.eta * y, stepped))
        new = call.gradient(x)
        y = call.mix(y, trackers) + new - old
        return {"x": x, "y": y, "g": new}


# A node's row of W comes with the messages: fixed, another one each time (d-psgd-dn, matcha), or none, which
# gives equal weights to the node and the neighbours that it drew (d-psgd-pc).
BASELINES: Mapping[str, GossipNodeMethod] = {
    "d-psgd": _DPSGD(),
    "d-psgd-dn": _DPSGD(),
    "d-psgd-pc": _DPSGD(),
    "dfedavgm": _DFedAvgM(),
    "dfedsam": _DFedSAM(),
    "matcha": _AdaptThenCombine(),
    "dcd-psgd": _DCD(),
    "choco-sgd": _CHOCO(),
    "beer": _BEER(),
    "sgp": _SGP(),
    "sgp-dn": _SGP(),
    "dp-dsgt": _DSGT(),
}
