"""A node of a gossip run between messages: its memory and its links, stored in its context."""

import secrets
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from logging import WARNING
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.common import log

from hedgerow.clients.gossip.node import (
    GossipNode,
    GossipNodeMethod,
    GossipPlace,
    Memory,
    ProblemFn,
    neighbours_in,
)
from hedgerow.clients.gradient_noise import noise_root
from hedgerow.clients.instructions import choice, flag, string
from hedgerow.clients.links import NodeLinks, check_sealed
from hedgerow.clients.mods.guard import check_hello, check_privacy, releases_made
from hedgerow.wire.calls import SECRET_RECORD, Call
from hedgerow.wire.limits import MAX_STEPS, MAX_WORK_BYTES
from hedgerow.wire.onebit import OneBit
from hedgerow.wire.process import is_simulated
from hedgerow.wire.records import PayloadError, config_in, to_record, view
from hedgerow.wire.sealed import UNKNOWN

_ARRAYS, _STATE, _CONFIG = "ceps", "ceps-state", "ceps-config"  # records in context.state
_ROOT = "noise-root"  # the key in SECRET_RECORD
# What a sealed link carries: a payload; the first one is preceded by the sender's seed of sensing matrices.
_PAYLOAD, _FIRST_PAYLOAD = "payload", "seed and payload"
_SEED_BYTES = 16
_SEED = "sensing/"  # prefix of a node's id in the state of the links


@dataclass(frozen=True)
class StoredNode:
    """A node with its method and memory, as stored in its context."""

    node: GossipNode
    method: GossipNodeMethod
    memory: Memory
    run: str
    links: NodeLinks | None

    @classmethod
    def of(
        cls,
        call: Call,
        problem: ProblemFn,
        methods: Mapping[str, GossipNodeMethod],
        told: ConfigRecord | None = None,
    ) -> "StoredNode":
        """Return the node as stored in its context; ValueError if it has no state of this run.

        ``told`` are the settings in a hello: a node without state of this run, or begun with other settings,
        begins with them at k = 0.
        """
        context, state, run = call.context, call.context.state, str(call.context.run_id)
        config, numbers = config_in(state, _CONFIG), dict(config_in(state, _STATE))
        stored = (
            isinstance(state.get(_ARRAYS), ArrayRecord)
            and isinstance(state.get(_CONFIG), ConfigRecord)
            and numbers.pop("run", None) == run
        )
        begins = told is not None and not (stored and dict(config) == dict(told))
        if begins:
            config = cast(ConfigRecord, told)
        elif not stored:
            raise ValueError(
                f"node {call.partition_id} has no state of run {run}: it must get 'query.hello' first"
            )
        iteration = numbers.pop("iteration", None)
        if not begins and (not isinstance(iteration, int) or iteration < 0):
            raise ValueError(f"node {call.partition_id} has a damaged state: it must get 'query.hello' first")
        place = GossipPlace.of(config, call.partition_id)
        links = _links(call, config, place, begin=told is not None)
        # A restored state has no noise root, so draw a new one.
        kept = None if begins else config_in(state, SECRET_RECORD).get(_ROOT)
        root = (
            int.from_bytes(kept)
            if isinstance(kept, bytes)
            else noise_root(config, context.node_config, place.seed)
        )
        sensing = None if links is None else int.from_bytes(links.secrets[f"{_SEED}{links.own}"])
        node = GossipNode(place, problem(context), config, root, sensing)
        check_privacy(node.privacy.mode, node.privacy.multiplier, node.privacy.clip)
        method = methods[choice(config, "method", tuple(methods))]
        if begins:
            return cls(node, method, _begun(node, method, links), run, links)
        arrays = {key: view(array) for key, array in cast(ArrayRecord, state[_ARRAYS]).items()}
        if wrong := [key for key, values in arrays.items() if values.shape != (node.problem.n,)]:
            raise ValueError(
                f"{wrong[0]} must have the shape ({node.problem.n},), got {arrays[wrong[0]].shape} in the "
                "state"
            )
        memory = Memory(arrays, cast(int, iteration), cast(dict[str, int | float], numbers))
        return cls(node, method, memory, run, links)

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

    def prepared(self, k: int) -> "StoredNode":
        """Return the node at iteration k."""
        check_iteration(k, self.memory)
        return replace(self, memory=self.method.prepare(self.node, self.memory, k))

    def published(self, receivers: Any, introductions: ConfigRecord) -> bytes | list[bytes]:
        """Return one payload for all receivers, or one each if sealed or coded by the receiver's matrix."""
        place, k, vector = self.node.place, self.memory.iteration, self.method.message(self.node, self.memory)
        shared = b""
        if place.phi_owner == "sender":
            seed = place.code_seed(place.own, place.own, k, self.node.sensing)
            shared = place.codec.encode(vector, seed)
            if self.links is None:
                return shared
        if not isinstance(receivers, list):
            raise ValueError(f"receivers must be a list of nodes, got {receivers!r} in the message's config")
        if wrong := [i for i in map(int, receivers) if not 0 <= i < place.num_nodes or i == place.own]:
            raise ValueError(
                f"receivers must be other nodes of the graph, got {wrong} in the message's config"
            )
        payloads = []
        for i in map(int, receivers):
            seed = place.code_seed(place.own, i, k, self.node.sensing)
            payload = shared or place.codec.encode(vector, seed)
            payloads.append(payload if self.links is None else self._sealed(i, payload, introductions))
        return payloads

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
            if f"{_SEED}{peer}" not in links.secrets:
                raise PayloadError(UNKNOWN, f"no seed of {peer}")
            return payload
        links.meet(peer, introduction if isinstance(introduction, bytes) else b"")
        both = links.link(peer).open(sealed, k, _FIRST_PAYLOAD)
        links.secrets[f"{_SEED}{peer}"] = both[:_SEED_BYTES]
        return both[_SEED_BYTES:]

    def code_seed(self, sender: int) -> tuple[int, ...]:
        """Return the code seed of a neighbour's message at the current iteration."""
        secret = None if self.links is None else int.from_bytes(self.links.secrets[f"{_SEED}{sender}"])
        return self.node.place.code_seed(sender, self.node.place.own, self.memory.iteration, secret)


def _links(call: Call, config: ConfigRecord, place: GossipPlace, *, begin: bool) -> NodeLinks | None:
    """Return the node's links, with a seed for its sensing matrices; None if the run is not sealed."""
    sealed = flag(config, "sealed", default=False)
    check_sealed(call, sealed)
    if not sealed:
        return None
    run = string(config, "link-run") if "link-run" in config else ""
    links, own = NodeLinks(call, place.seed, begin=begin, run=run), f"{_SEED}{call.partition_id}"
    if own not in links.secrets:
        # A simulation has no secrets; with the run's seed it draws the same matrices sealed or not.
        seed = place.seed if is_simulated() else secrets.randbits(8 * _SEED_BYTES)
        links.secrets[own] = seed.to_bytes(_SEED_BYTES)
    return links


def _begun(node: GossipNode, method: GossipNodeMethod, links: NodeLinks | None) -> Memory:
    """Return the memory at k = 0 of a node that has just been sent its settings."""
    config, place, n = node.config, node.place, node.problem.n
    if links is not None:
        # Nodes that it may ever exchange payloads with; its neighbours unless the config lists others.
        named = ConfigRecord({"neighbours": config.get("peers", config["neighbours"])})
        links.name_neighbours(map(str, neighbours_in(named, place.own, place.num_nodes)))
    if isinstance(place.codec, OneBit) and place.codec.work_bytes(n) > MAX_WORK_BYTES:
        raise ValueError(
            f"8 d min(2 s, {n}), the bytes to decode a message, must be at most {MAX_WORK_BYTES}, got d "
            f"= {place.codec.d} and s = {place.codec.s} in the message's config"
        )
    check_hello()
    return method.begin(node)


def check_iteration(k: int, memory: Memory) -> None:
    """Raise ValueError if k is in the past, or more than MAX_STEPS local steps ahead."""
    if k < memory.iteration:
        raise ValueError(f"iteration must be at least the node's own, {memory.iteration}, got {k}")
    if k - memory.iteration > MAX_STEPS:
        raise ValueError(
            f"iteration must be at most {MAX_STEPS} after the node's own, {memory.iteration}, got {k}"
        )
