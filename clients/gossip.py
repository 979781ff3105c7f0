"""The node side of decentralised methods whose messages pass through a router.

A ``GossipNodeMethod`` defines the arithmetic: a node's initial memory, the vector it publishes, and its
update from the neighbours' vectors. This file decodes messages and keeps the node's state in its context.

In a sealed run each payload is sealed for its receiver. The first one to a receiver also carries the sender's
secret seed of sensing matrices.
"""

import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from logging import WARNING
from math import inf, isfinite, sqrt
from statistics import median_low
from typing import Any, Protocol, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.common import log
from numpy.typing import NDArray

from hedgerow.clients.app import BatchClientApp, whoami
from hedgerow.clients.gradient_noise import GradientPrivacy, noise_root, noised, privacy_of
from hedgerow.clients.handlers import each
from hedgerow.clients.instructions import choice, flag, only_config, positive, string, whole
from hedgerow.clients.links import NodeLinks, check_sealed
from hedgerow.clients.mods.guard import (
    Refusal,
    Reveals,
    check_hello,
    check_monitor,
    check_privacy,
    check_release,
    is_monitored,
    releases_made,
    reveals,
)
from hedgerow.clients.mods.update import Mod
from hedgerow.wire.calls import SECRET_RECORD, BatchHandler, Call
from hedgerow.wire.limits import MAX_STEPS, MAX_WORK_BYTES
from hedgerow.wire.message_types import HELLO, MONITOR, NO_MONITOR, PUBLISH, UPDATE, WHOAMI
from hedgerow.wire.onebit import OneBit
from hedgerow.wire.records import PayloadError, config_in, records_of, to_record, view
from hedgerow.wire.sealed import UNKNOWN
from hedgerow.wire.seeds import Purpose, generator
from hedgerow.wire.simulated import is_simulated
from hedgerow.wire.vector_codecs import Codec, Quantised, parse_codec

__all__ = ["GossipNode", "GossipNodeMethod", "GossipPlace", "Memory", "Problem", "ProblemFn", "gossip_app"]

Vector = NDArray[np.float64]
Metrics = dict[str, int | float]

_ARRAYS, _STATE, _CONFIG = "ceps", "ceps-state", "ceps-config"  # records in context.state
# Largest accepted ratio of a neighbour's norm to the usual norm; the smallest usual norm, per entry (RMS).
_MAX_NORM_RATIO, _SMALL = 100.0, 0.01
_ROOT = "noise-root"  # the key in SECRET_RECORD
# What a sealed link carries: a payload; the first one is preceded by the sender's seed of sensing matrices.
_PAYLOAD, _FIRST_PAYLOAD = "payload", "seed and payload"
_SEED_BYTES = 16
_SEED = "sensing/"  # prefix of a node's id in the state of the links
# Config keys of the one-bit codec's settings.
_CODEC_SETTINGS = ("s", "d", "gamma", "expand", "compand", "decoder", "phi", "phi-density")


class Problem(Protocol):
    """What a node minimises."""

    @property
    def n(self) -> int:
        """The dimension of w."""

    @property
    def num_examples(self) -> int:
        """Records, m_i."""

    @property
    def largest_eigenvalue(self) -> float:
        """lambda_max(A_i^T A_i), from which the paper derives sigma_i."""

    @property
    def curvature(self) -> float:
        """A Lipschitz constant of the gradient, or an estimate."""

    def value(self, w: Vector) -> float:
        """Return f_i(w)."""

    def gradient(self, w: Vector, clip: float = inf) -> Vector:
        """Return the gradient (n,) at w (n,).

        A finite ``clip`` C > 0 scales each record's gradient g_t by min(1, C / ||g_t||), so that replacing
        one record moves the mean by at most 2 C / m_i. A regulariser reads no data and is not clipped.
        """


ProblemFn = Callable[[Context], Problem]


@dataclass(frozen=True)
class GossipPlace:
    """A node's position in the graph and the format of its messages.

    Parameters
    ----------
    own : int
        The node's partition id.
    neighbours : tuple[int, ...]
        Partition ids, ascending.
    num_nodes : int
        Nodes in the graph.
    seed : int
        The run's seed.
    r : float
        Fraction of the neighbours that each communication requests, in (0, 1].
    kappa : int
        Iterations between communications, which happen at kappa, 2 kappa, ...
    codec : Codec
        Encodes messages.
    phi_owner : {"sender", "receiver"}
        The node whose sensing matrix measures a message.
    """

    own: int
    neighbours: tuple[int, ...]
    num_nodes: int
    seed: int
    r: float
    kappa: int
    codec: Codec
    phi_owner: str

    @classmethod
    def of(cls, config: ConfigRecord, own: int) -> "GossipPlace":
        """Read a node's place from the config of ``query.hello``; ValueError for an invalid value."""
        num_nodes, seed = whole(config, "num-nodes", 1), whole(config, "run-seed", 0)
        if own >= num_nodes:
            raise ValueError(f"num-nodes must be above {own}, got {num_nodes} in the message's config")
        if (r := positive(config, "r")) > 1:
            raise ValueError(f"r must be a number in (0, 1], got {r!r} in the message's config")
        if "kappa-low" in config:
            low, high = whole(config, "kappa-low", 1), whole(config, "kappa-high", 1)
        else:
            low = high = whole(config, "local-steps", 1)
        if high < low:
            raise ValueError(
                f"kappa-high must be at least kappa-low = {low}, got {high} in the message's config"
            )
        stream = generator(seed, partition_id=own, purpose=Purpose.SCHEDULE)
        settings = {key.replace("-", "_"): config[key] for key in _CODEC_SETTINGS if key in config}
        codec, phi_owner = parse_codec(string(config, "codec"), **settings), "sender"
        if "phi-owner" in config:
            phi_owner = choice(config, "phi-owner", ("sender", "receiver"))
        return cls(
            own,
            _neighbours(config, own, num_nodes),
            num_nodes,
            seed,
            r,
            int(stream.integers(low, high + 1)),
            codec,
            phi_owner if isinstance(codec, OneBit) else "sender",
        )

    def communication(self, k: int) -> int:
        """Return the iteration, >= k, of the node's next communication."""
        return self.kappa * max(1, -(-k // self.kappa))

    def wants(self, k: int) -> list[int]:
        """Return N_i^k without i: max(1, round(r |N_i|)) neighbours drawn at random, ascending."""
        if not self.neighbours:
            return []
        count = max(1, round(self.r * len(self.neighbours)))
        stream = generator(self.seed, round=k, partition_id=self.own, purpose=Purpose.SUBSET)
        return sorted(map(int, stream.choice(self.neighbours, count, replace=False)))

    def code_seed(self, sender: int, receiver: int, k: int, secret: int | None = None) -> tuple[int, ...]:
        """Return the seed of a message's code: per message for a quantiser, else of its owner's matrix.

        ``secret`` is the sender's seed of sensing matrices; None for the run's seed, which is public.
        """
        if isinstance(self.codec, Quantised):
            return (self.seed, k, sender, int(Purpose.COMPRESSION))
        owner = sender if self.phi_owner == "sender" else receiver
        return (self.seed if secret is None else secret, owner, int(Purpose.SENSING))

    def as_received(self, vector: Vector, k: int) -> Vector:
        """Return the vector that other nodes decode from this node's message."""
        seed = self.code_seed(self.own, self.own, k)
        decoded = self.codec.decode(self.codec.encode(vector, seed), vector.size, seed)
        return np.zeros_like(vector) if decoded is None else decoded


def _neighbours(config: ConfigRecord, own: int, num_nodes: int) -> tuple[int, ...]:
    value = config.get("neighbours")
    if (
        not isinstance(value, list)
        or not all(isinstance(j, int) and 0 <= j < num_nodes and j != own for j in value)
        or len(set(value)) != len(value)
    ):
        raise ValueError(
            f"neighbours must be a list of other nodes, 0 to {num_nodes - 1}, each once, got {value!r} in "
            "the message's config"
        )
    return tuple(sorted(cast(list[int], value)))


@dataclass(frozen=True)
class Memory:
    """A node's state between two messages.

    Parameters
    ----------
    arrays : Mapping[str, NDArray]
        Vectors (n,), never changed in place.
    iteration : int
        k, >= 0.
    counts : Mapping[str, int | float]
        Counters of the method; ``gradients`` and ``missed`` are reported to the server.
    """

    arrays: Mapping[str, Vector]
    iteration: int
    counts: Mapping[str, int | float] = field(default_factory=dict)

    def count(self, key: str) -> int:
        """Return an integer of ``counts``, 0 if it is missing."""
        return int(self.counts.get(key, 0))


@dataclass(frozen=True)
class GossipNode:
    """One node in one call."""

    place: GossipPlace
    problem: Problem
    config: ConfigRecord
    root: int
    # Secret seed of this node's sensing matrices; None if they use the run's seed.
    sensing: int | None = None

    def __post_init__(self) -> None:
        codec, n = self.place.codec, self.problem.n
        if isinstance(codec, OneBit) and codec.work_bytes(n) > MAX_WORK_BYTES:
            raise ValueError(
                f"8 d min(2 s, {n}), the bytes to decode a message, must be at most {MAX_WORK_BYTES}, got d "
                f"= {codec.d} and s = {codec.s} in the message's config"
            )

    @cached_property
    def privacy(self) -> GradientPrivacy:
        """How gradients are clipped and noised."""
        return privacy_of(self.config, self.problem.num_examples)

    @cached_property
    def mixing(self) -> Mapping[int, float] | None:
        """This node's row of the mixing matrix; None for equal weights of the nodes that are present."""
        return _mixing(self.config, self.place)[1]

    def check_privacy(self) -> None:
        """Raise ``guard.Refusal`` if the config gives less privacy than the node's owner requires."""
        check_privacy(self.privacy.mode, self.privacy.multiplier, self.privacy.clip)

    def noised(self, vector: Vector, index: int) -> Vector:
        """Return a vector with the noise of the ``index``-th gradient, and count its release."""
        if self.privacy.mode == "sound":
            check_release(self.root, index, self.privacy.multiplier)
        return noised(self.root, self.place.own, index, vector, self.privacy)


class GossipNodeMethod(Protocol):
    """A method's arithmetic at one node: memory in, memory out."""

    def begin(self, node: GossipNode) -> Memory:
        """Check the config and return the memory at k = 0."""

    def prepare(self, node: GossipNode, memory: Memory, k: int) -> Memory:
        """Return the memory at iteration k, before its communication; idempotent."""

    def message(self, node: GossipNode, memory: Memory) -> Vector:
        """Return the vector to publish at the memory's iteration."""

    def norm(self, node: GossipNode, vector: Vector) -> float:
        """Return a message's size, used to reject outliers; inf for an invalid message."""
        return float(np.linalg.norm(vector))

    def update(
        self,
        node: GossipNode,
        memory: Memory,
        received: Mapping[int, Vector],
        mixing: Mapping[int, float] | None,
    ) -> tuple[Memory, Metrics]:
        """Return the memory after the communication at its iteration, and metrics.

        ``received`` holds the decoded vectors by sender; ``mixing`` the weight of each node, including this
        one, or None for equal weights of the nodes that are present.
        """

    def look(self, node: GossipNode, memory: Memory, k: int) -> tuple[Memory, Vector]:
        """Return w_i at the start of iteration k >= ``memory.iteration``, and a memory that may be kept."""


def gossip_app(
    problem: ProblemFn,
    methods: Mapping[str, GossipNodeMethod],
    more: Mapping[str, BatchHandler] | None = None,
    mods: Sequence[Mod] = (),
) -> BatchClientApp:
    """Return a ClientApp of gossip methods; ``method`` in the config of ``query.hello`` selects one.

    Parameters
    ----------
    problem : Callable[[Context], Problem]
        Returns a node's objective. Called for every message, so cache what is expensive to build.
    methods : Mapping[str, GossipNodeMethod]
        By name.
    more : Mapping[str, BatchHandler] or None (default: None)
        Further handlers by message type; they replace gossip's own.
    mods : Sequence[Mod] (default: none)
        Flower mods, see ``BatchClientApp``. Update mods are refused: a node publishes a state, not an update
        of the server's model. Noise on gradients protects what it publishes.
    """

    def hello(call: Call) -> RecordDict:
        settings = config_in(call.context.state, _CONFIG)
        knows = _kept(call.context) and dict(settings) == dict(only_config(call))
        known = (
            _Known.of(call, problem, methods, begin=True) if knows else _Known.begin(call, problem, methods)
        )
        known.keep(call.context)
        hello = {"kappa": known.node.place.kappa, **known.request(), **known.introduction()}
        return RecordDict({"hello": ConfigRecord(hello)})

    def publish(call: Call) -> RecordDict:
        config, introductions, _ = _read(call)
        known = _Known.of(call, problem, methods).prepared(whole(config, "iteration", 0))
        payload = known.published(config.get("receivers"), introductions)
        known.keep(call.context)
        return RecordDict({"payload": ConfigRecord({"bytes": payload})})

    def update(calls: Sequence[Call]) -> list[RecordDict | Exception]:
        answers: dict[int, RecordDict | Exception] = {}
        events: dict[int, _Event] = {}
        for position, call in enumerate(calls):
            try:
                events[position] = _Event.of(call, problem, methods)
            except Exception as error:  # one node's bad state or message must not fail the others
                answers[position] = error
        for (position, event), received in zip(events.items(), _decoded(list(events.values())), strict=True):
            try:
                answers[position] = event.answer(calls[position].context, event.believed(received))
            except Exception as error:
                answers[position] = error
        return [answers[position] for position in range(len(calls))]

    handlers: dict[str, BatchHandler] = {
        WHOAMI: whoami(lambda context: problem(context).num_examples),
        HELLO: reveals(Reveals.NOISED, each(hello)),
        PUBLISH: reveals(Reveals.NOISED, each(publish)),
        UPDATE: reveals(Reveals.NOISED, update),
        MONITOR: each(lambda call: _monitored(call, problem, methods)),
        **(more or {}),
    }
    return BatchClientApp(handlers, mods)


def _read(call: Call) -> tuple[ConfigRecord, ConfigRecord, ConfigRecord]:
    """Return a message's config, the introductions in it, and the payloads, both by node."""
    records = records_of(call.content, ConfigRecord)
    introductions = records.pop("introductions", ConfigRecord())
    bundle = records.pop("bundle", ConfigRecord())
    return next(iter(records.values()), ConfigRecord()), introductions, bundle


def _kept(context: Context) -> bool:
    """Return whether the context holds this run's state."""
    state = context.state
    return (
        isinstance(state.get(_ARRAYS), ArrayRecord)
        and isinstance(state.get(_CONFIG), ConfigRecord)
        and config_in(state, _STATE).get("run") == str(context.run_id)
    )


@dataclass(frozen=True)
class _Known:
    """A node with its method and memory, as stored in its context."""

    node: GossipNode
    method: GossipNodeMethod
    memory: Memory
    run: str
    links: NodeLinks | None

    @classmethod
    def begin(cls, call: Call, problem: ProblemFn, methods: Mapping[str, GossipNodeMethod]) -> "_Known":
        config = only_config(call)
        place = GossipPlace.of(config, call.partition_id)
        root = noise_root(config, call.context.node_config, place.seed)
        links = _links(call, config, place, begin=True)
        if links is not None:
            # Nodes that it may ever exchange payloads with; its neighbours unless the config lists others.
            named = ConfigRecord({"neighbours": config.get("peers", config["neighbours"])})
            links.name_neighbours(map(str, _neighbours(named, place.own, place.num_nodes)))
        node = GossipNode(place, problem(call.context), config, root, _sensing(links))
        node.check_privacy()
        check_hello()
        method = methods[choice(config, "method", tuple(methods))]
        return cls(node, method, method.begin(node), str(call.context.run_id), links)

    @classmethod
    def of(
        cls, call: Call, problem: ProblemFn, methods: Mapping[str, GossipNodeMethod], *, begin: bool = False
    ) -> "_Known":
        state, run = call.context.state, str(call.context.run_id)
        if not _kept(call.context):
            raise ValueError(
                f"node {call.partition_id} has no state of run {run}: it must get 'query.hello' first"
            )
        config, numbers = config_in(state, _CONFIG), dict(config_in(state, _STATE))
        place = GossipPlace.of(config, call.partition_id)
        iteration = numbers.pop("iteration", None)
        if not isinstance(iteration, int) or iteration < 0:
            raise ValueError(f"node {call.partition_id} has a damaged state: it must get 'query.hello' first")
        links = _links(call, config, place, begin=begin)
        # A restored state has no noise root, so draw a new one.
        kept = config_in(state, SECRET_RECORD).get(_ROOT)
        root = (
            int.from_bytes(kept)
            if isinstance(kept, bytes)
            else noise_root(config, call.context.node_config, place.seed)
        )
        node = GossipNode(place, problem(call.context), config, root, _sensing(links))
        node.check_privacy()
        arrays = {key: view(array) for key, array in cast(ArrayRecord, state[_ARRAYS]).items()}
        if wrong := [key for key, values in arrays.items() if values.shape != (node.problem.n,)]:
            raise ValueError(
                f"{wrong[0]} must have the shape ({node.problem.n},), got {arrays[wrong[0]].shape} in the "
                "state"
            )
        del numbers["run"]
        memory = Memory(arrays, iteration, cast(dict[str, int | float], numbers))
        return cls(node, methods[choice(config, "method", tuple(methods))], memory, run, links)

    def keep(self, context: Context) -> None:
        """Write everything to the context."""
        numbers: dict[str, Any] = {"run": self.run, "iteration": self.memory.iteration}
        # The root exceeds a record's 64-bit integers.
        root = self.node.root.to_bytes(-(-self.node.root.bit_length() // 8))
        context.state[_ARRAYS] = to_record(self.memory.arrays)
        context.state[_STATE] = ConfigRecord({**self.memory.counts, **numbers})
        context.state[_CONFIG] = self.node.config
        secret = config_in(context.state, SECRET_RECORD)
        if secret.get(_ROOT) != root:
            context.state[SECRET_RECORD] = ConfigRecord({**secret, _ROOT: root})
        if self.links is not None:
            self.links.keep(context)

    def introduction(self) -> dict[str, Any]:
        """Return the node's introduction to its neighbours, and whether its owner pinned their keys."""
        if self.links is None:
            return {}
        return {"introduction": self.links.identity.introduction, "pinned": self.links.pinned}

    def request(self) -> dict[str, Any]:
        """Return the next communication, the requested neighbours, and the releases counted by the ledger."""
        k = self.node.place.communication(self.memory.iteration)
        request: dict[str, Any] = {"next": k, "want": self.node.place.wants(k)}
        if self.node.privacy.mode == "sound" and (made := releases_made()) is not None:
            request["releases"] = list(made)
        return request

    def prepared(self, k: int) -> "_Known":
        """Return the node at iteration k."""
        _check_iteration(k, self.memory)
        return replace(self, memory=self.method.prepare(self.node, self.memory, k))

    def published(self, receivers: Any, introductions: ConfigRecord) -> bytes | list[bytes]:
        """Return one payload for all receivers, or one each if sealed or coded by the receiver's matrix."""
        place, k, vector = self.node.place, self.memory.iteration, self.method.message(self.node, self.memory)

        @cache
        def encoded(owner: int) -> bytes:
            return place.codec.encode(vector, place.code_seed(place.own, owner, k, self.node.sensing))

        shared = place.phi_owner == "sender"
        if shared and self.links is None:
            return encoded(place.own)
        if not isinstance(receivers, list):
            raise ValueError(f"receivers must be a list of nodes, got {receivers!r} in the message's config")
        payloads = [(int(i), encoded(place.own if shared else int(i))) for i in receivers]
        if self.links is None:
            return [payload for _, payload in payloads]
        if wrong := [i for i, _ in payloads if not 0 <= i < place.num_nodes or i == place.own]:
            raise ValueError(
                f"receivers must be other nodes of the graph, got {wrong} in the message's config"
            )
        return [self._sealed(i, payload, introductions) for i, payload in payloads]

    def _sealed(self, receiver: int, payload: bytes, introductions: ConfigRecord) -> bytes:
        """Return a sealed payload; empty if the receiver's identity is not the known one."""
        assert self.links is not None
        peer, k = str(receiver), self.memory.iteration
        try:
            if (introduction := introductions.get(peer)) is None:
                return self.links.link(peer).seal(payload, k, _PAYLOAD)
            self.links.meet(peer, introduction if isinstance(introduction, bytes) else b"")
            seed = cast(int, self.node.sensing).to_bytes(_SEED_BYTES)
            return self.links.link(peer).seal(seed + payload, k, _FIRST_PAYLOAD)
        except PayloadError as error:
            log(WARNING, "No payload for node %d: %s", receiver, error)
            return b""

    def opened(
        self, bundle: ConfigRecord, introductions: ConfigRecord
    ) -> tuple[dict[int, bytes], dict[str, list[int]]]:
        """Return a bundle's payloads by sender, and the refused senders by reason."""
        sealed = {int(j): cast(bytes, payload) for j, payload in bundle.items()}
        if self.links is None:
            return sealed, {}
        opened: dict[int, bytes] = {}
        refused: dict[str, list[int]] = defaultdict(list)
        for j, payload in sealed.items():
            try:
                opened[j] = self._opened(self.links, str(j), payload, introductions.get(str(j)))
            except PayloadError as error:
                log(WARNING, "Payload of node %d rejected: %s", j, error)
                refused[error.reason].append(j)
        return opened, dict(refused)

    def _opened(self, links: NodeLinks, peer: str, sealed: bytes, introduction: Any) -> bytes:
        k = self.memory.iteration
        if introduction is None:
            payload = links.link(peer).open(sealed, k, _PAYLOAD)
            if f"{_SEED}{peer}" not in links.told:
                raise PayloadError(UNKNOWN, f"no seed of {peer}")
            return payload
        links.meet(peer, introduction if isinstance(introduction, bytes) else b"")
        both = links.link(peer).open(sealed, k, _FIRST_PAYLOAD)
        links.told[f"{_SEED}{peer}"] = both[:_SEED_BYTES]
        return both[_SEED_BYTES:]

    def code_seed(self, sender: int) -> tuple[int, ...]:
        """Return the code seed of a neighbour's message at the current iteration."""
        secret = None if self.links is None else int.from_bytes(self.links.told[f"{_SEED}{sender}"])
        return self.node.place.code_seed(sender, self.node.place.own, self.memory.iteration, secret)


def _links(call: Call, config: ConfigRecord, place: GossipPlace, *, begin: bool) -> NodeLinks | None:
    """Return the node's links, with a seed for its sensing matrices; None if the run is not sealed."""
    sealed = flag(config, "sealed", default=False)
    check_sealed(call, sealed)
    if not sealed:
        return None
    run = string(config, "link-run") if "link-run" in config else ""
    links, own = NodeLinks(call, place.seed, begin=begin, run=run), f"{_SEED}{call.partition_id}"
    if own not in links.told:
        # A simulation has no secrets; with the run's seed it draws the same matrices sealed or not.
        seed = place.seed if is_simulated() else secrets.randbits(8 * _SEED_BYTES)
        links.told[own] = seed.to_bytes(_SEED_BYTES)
    return links


def _sensing(links: NodeLinks | None) -> int | None:
    return None if links is None else int.from_bytes(links.told[f"{_SEED}{links.own}"])


@dataclass(frozen=True)
class _Event:
    """One node's communication: the node at its iteration and the payloads it received, still encoded."""

    known: _Known
    bundle: Mapping[int, bytes]
    refused: Mapping[str, list[int]]
    size: int
    norm: float
    mixing: Mapping[int, float] | None
    monitor: bool

    @classmethod
    def of(cls, call: Call, problem: ProblemFn, methods: Mapping[str, GossipNodeMethod]) -> "_Event":
        config, introductions, bundle = _read(call)
        if not all(isinstance(payload, bytes) for payload in bundle.values()):
            raise ValueError("the bundle must hold bytes, a payload for each sender")
        known, k = _Known.of(call, problem, methods), whole(config, "iteration", 1)
        if k % known.node.place.kappa:
            raise ValueError(f"iteration must be a multiple of kappa = {known.node.place.kappa}, got {k}")
        place = known.node.place
        neighbours, mixing = _mixing(config if "weights" in config else known.node.config, place)
        if strangers := sorted({int(j) for j in bundle} - set(neighbours)):
            raise ValueError(
                f"the bundle's senders must be among the neighbours {neighbours}, got {strangers}"
            )
        ready = known.prepared(k)
        payloads, refused = ready.opened(bundle, introductions)
        own = ready.method.message(ready.node, ready.memory)
        return cls(
            ready,
            payloads,
            refused,
            own.size,
            ready.method.norm(ready.node, own),
            mixing,
            flag(config, "monitor", default=False),
        )

    def believed(self, received: Mapping[int, Vector]) -> dict[int, Vector]:
        """Return the received vectors without those far larger than the node's own and the others' median.

        This bounds a malicious neighbour's pull to 100 times the usual norm.
        """
        with np.errstate(over="ignore"):
            norms = {j: self.known.method.norm(self.known.node, v) for j, v in received.items()}
        finite = [norm for norm in norms.values() if isfinite(norm)]
        usual = max(self.norm, median_low(finite) if finite else 0.0, _SMALL * sqrt(self.size))
        within = _MAX_NORM_RATIO * usual
        return {j: v for j, v in received.items() if isfinite(norms[j]) and norms[j] <= within}

    def answer(self, context: Context, received: Mapping[int, Vector]) -> RecordDict:
        """Update, store the state, and return the reply."""
        node, method = self.known.node, self.known.method
        memory, metrics = method.update(node, self.known.memory, received, self.mixing)
        after = replace(self.known, memory=memory)
        if self.monitor and node.privacy.mode != "sound" and is_monitored(node.privacy.mode):
            metrics["objective"] = node.problem.value(method.look(node, memory, memory.iteration)[1])
        counts: Metrics = {
            "num-examples": node.problem.num_examples,
            "used": 1 + len(received),
            "rejected": len(self.bundle) + sum(map(len, self.refused.values())) - len(received),
            "missed": memory.count("missed"),
            "gradients": memory.count("gradients"),
        }
        after.keep(context)
        answer = RecordDict(
            {"next": ConfigRecord(after.request()), "metrics": MetricRecord({**counts, **metrics})}
        )
        if self.refused:
            answer["refused"] = ConfigRecord({**self.refused})
        return answer


def _mixing(config: ConfigRecord, place: GossipPlace) -> tuple[tuple[int, ...], Mapping[int, float] | None]:
    """Return an event's neighbours and mixing weights; in the config the node's own weight comes last."""
    weights = config.get("weights")
    if weights is None:
        return place.neighbours, None
    _neighbours(config, place.own, place.num_nodes)
    ids = [*cast(list[int], config["neighbours"]), place.own]
    if not isinstance(weights, list) or len(weights) != len(ids):
        raise ValueError(
            f"weights must be {len(ids)} numbers, the neighbours' and the node's own, got {weights!r} in "
            "the message's config"
        )
    row = [float(weight) for weight in weights]
    if not np.isfinite(row).all():
        raise ValueError(f"weights must be finite numbers, got {weights!r} in the message's config")
    return tuple(ids[:-1]), dict(zip(ids, row, strict=True))


def _decoded(events: Sequence[_Event]) -> list[dict[int, Vector]]:
    """Return each event's decoded vectors by sender, without undecodable payloads."""
    alike: dict[tuple[Codec, int], list[tuple[int, int, bytes, tuple[int, ...]]]] = {}
    for position, event in enumerate(events):
        messages = alike.setdefault((event.known.node.place.codec, event.size), [])
        for j, payload in event.bundle.items():
            messages.append((position, j, payload, event.known.code_seed(j)))
    received: list[dict[int, Vector]] = [{} for _ in events]
    for (codec, size), messages in alike.items():
        payloads, seeds = [message[2] for message in messages], [message[3] for message in messages]
        vectors = codec.decode_many(payloads, size, seeds)
        for (position, j, _, _), vector in zip(messages, vectors, strict=True):
            if vector is not None:
                received[position][j] = vector
    return received


def _monitored(call: Call, problem: ProblemFn, methods: Mapping[str, GossipNodeMethod]) -> RecordDict:
    """Return w_i at the start of ``iteration`` and f_i(w_i) as ``objective``, for simulations.

    If the message carries a model, return f_i of that model as ``mean-objective`` instead.
    """
    if not call.context.node_config.get("monitor", True):
        raise Refusal(NO_MONITOR)
    known, k = _Known.of(call, problem, methods), whole(only_config(call), "iteration", 0)
    check_monitor(known.node.privacy.mode)
    _check_iteration(k, known.memory)
    memory, w = known.method.look(known.node, known.memory, k)
    replace(known, memory=memory).keep(call.context)
    metrics: Metrics = {"num-examples": known.node.problem.num_examples}
    if sent := list(records_of(call.content, ArrayRecord).values()):
        (array,) = sent[0].values()
        vector = np.asarray(view(array), np.float64)
        if vector.shape != w.shape:
            raise ValueError(f"the message's array must have the shape {w.shape}, got {vector.shape}")
        metrics["mean-objective"] = known.node.problem.value(vector)
    else:
        metrics["objective"] = known.node.problem.value(w)
    return RecordDict({"arrays": to_record({"w": w}), "metrics": MetricRecord({**metrics})})


def _check_iteration(k: int, memory: Memory) -> None:
    """Raise ValueError if k is in the past, or more than MAX_STEPS local steps ahead."""
    if k < memory.iteration:
        raise ValueError(f"iteration must be at least the node's own, {memory.iteration}, got {k}")
    if k - memory.iteration > MAX_STEPS:
        raise ValueError(
            f"iteration must be at most {MAX_STEPS} after the node's own, {memory.iteration}, got {k}"
        )
