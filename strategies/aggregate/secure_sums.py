"""Secure sums: the server sees the weighted mean of a group's updates, and nothing of a single node.

``wire/masked_sums.py`` has the protocol. The server gets each node's public keys once (``query.sum_keys``).
In a round, the instructions of the training exchange name the members of their sum, and replies are masked.
In one more exchange (``query.sum_shares``) the survivors send shares with which the server unmasks the sum.
docs/privacy/secure-sums.md describes what a malicious server could try, and which party would notice.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common import log
from numpy.typing import NDArray

from hedgerow.strategies.aggregate.choice import Choice
from hedgerow.strategies.aggregate.mean import Mean
from hedgerow.strategies.aggregate.sum_noise import (
    EVALUATION,
    NO_COUNTERS,
    SumNoise,
    SumPrivacyReport,
    SumReleases,
)
from hedgerow.strategies.exchange import Ask, Exchange, Question, RoundFailedError, Steps, check_update
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.inbox import ExchangeReport
from hedgerow.strategies.messenger import instruction
from hedgerow.strategies.node import Node
from hedgerow.wire.checks import in_range, int_between, positive
from hedgerow.wire.frozen import FROZEN
from hedgerow.wire.masked_sums import (
    LEAST_MEMBERS,
    LEAST_THRESHOLD,
    MASKED,
    MASKED_SUM,
    MAX_MEMBERS,
    SEED_BYTES,
    SumPlan,
    Unmasking,
    clips_of,
    connected_survivors,
    default_neighbours,
    survivors_needed,
    told_content,
)
from hedgerow.wire.message_types import SUM_KEYS, SUM_SHARES
from hedgerow.wire.records import PayloadError, only_record, payload_bytes, view
from hedgerow.wire.sealed import KEY_BYTES, NodeIdentity, SealingKey

# Reasons for the loss of nodes or whole sums.
NO_KEYS, CHANGED_KEY, NO_SIZE = "no sum keys", "another sum key", "no num-examples for the sum"
# The remedy for a node that takes no part in sums because its ClientApp cannot.
NEEDS_CLIENT = (
    "secure_sum needs a ClientApp that masks what it sends: sd_feel_client(), similarity_free_client() or "
    "fedmud_client() of hedgerow.clients, with train= for a loop of your own"
)
TOO_SMALL, TOO_LARGE = "sum too small", "sum too large"
FAILED = "failed in the attempt before"
TOO_FEW, UNSOLVED = "sum below threshold", "sum not unmasked"
BAD_SHARES, DISCONNECTED = "bad sum shares", "too few sum neighbours"


@dataclass(frozen=True)
class SecureSum:
    """The settings of secure sums.

    Parameters
    ----------
    clip : float (default: 8.0)
        R, > 0 and finite: each node clips every number of its update to [-R, R]. The error of the mean of n
        nodes of equal weights is at most 2 n R / 2^31, see ``hedgerow.wire.masked_sums.Grid.error``.
    threshold : float (default: 0.67)
        More than this share of a sum's members must survive, in [2/3, 1); otherwise there is no sum.
    min_nodes : int (default: 3)
        Smallest number of members of a sum, 3 to 255; a group with fewer in a round has no sum.
    metrics : tuple of str (default: ("train-loss",))
        Node metrics that are averaged within the sum. Nodes report no others in a round; with noise, none.
    noise : SumNoise or None (default: None)
        Clipping and noise of the nodes' updates, for node-level differential privacy. ``clip`` then has no
        effect, and all nodes have equal weights.
    """

    clip: float = 8.0
    threshold: float = 0.67
    min_nodes: int = LEAST_MEMBERS
    metrics: tuple[str, ...] = ("train-loss",)
    noise: SumNoise | None = None

    def __post_init__(self) -> None:
        positive(**{"secure_sum.clip": self.clip})
        in_range("secure_sum.threshold", self.threshold, LEAST_THRESHOLD, 1.0, open_above=True)
        int_between(LEAST_MEMBERS, MAX_MEMBERS, **{"secure_sum.min_nodes": self.min_nodes})


def parse_secure_sum(
    value: bool | SecureSum, *aggregations: Choice, probe_rounds: int = 0
) -> SecureSum | None:
    """Return the settings of ``secure_sum``: True for the defaults, False for none.

    ValueError if they are not valid, or a secure sum cannot provide the aggregation or probes.
    """
    if not isinstance(value, bool | SecureSum):
        raise ValueError(f"secure_sum must be True, False or SecureSum(...), got {value!r}")
    if value is False:
        return None
    if (rule := next((one for one in aggregations if not one.is_mean), None)) is not None:
        raise ValueError(
            f"aggregation must be 'mean' with secure_sum, got '{rule}': other rules need single updates"
        )
    if probe_rounds:
        raise ValueError(f"probe_rounds must be 0 with secure_sum, got {probe_rounds}: they are each node's")
    return SecureSum() if value is True else value


@dataclass(frozen=True)
class SummedUpdate:
    """The result of a group's sum."""

    # The survivors' weighted mean update (M,), including integer counters.
    mean: NDArray[np.float64]
    weight: float
    # The survivors' mean metrics, as the reply of one node of this weight.
    metrics: RecordDict
    survivors: tuple[int, ...]


@dataclass(frozen=True)
class _Open:
    """An announced sum."""

    plan: SumPlan
    about: bytes
    clips: NDArray[np.float64]


@dataclass(frozen=True)
class _Masked:
    words: NDArray[np.uint32]
    sealed: bytes
    commitments: bytes


class SecureSums:
    """The server's side of all sums of a run.

    A sum's extra traffic is booked on the links of the modelled system as well as on the legs through the
    hub. ``weighted_by`` is the metric with a node's weight: empty for weights of 1, as with noise; None for
    the federation's.
    """

    def __init__(
        self,
        settings: SecureSum,
        federation: Federation,
        *,
        down_link: str,
        up_link: str,
        weighted_by: str | None = None,
    ) -> None:
        self.settings = settings
        self.federation = federation
        self.down_link, self.up_link = down_link, up_link
        key = federation.settings.weighted_by_key if weighted_by is None else weighted_by
        self.weighted_by = "" if settings.noise else key
        self.forget()

    # Methods may override these.

    @property
    def report(self) -> ExchangeReport:
        """Message counts of the masked exchange."""
        return self.federation.report

    @property
    def noise(self) -> SumNoise | None:
        """The noise that members add to a sum."""
        return self.settings.noise

    def weight_of(self, member: int) -> float:
        """Return the largest weight of a member."""
        return self.federation.limits.weight_of(member)

    def called(self, group: int) -> str:
        """Return the name of a group in logs."""
        return f"Group {group}"

    def book(self, server_round: int, member: int, carried: int, *, down: bool) -> None:
        """Book the bytes of a member's keys or shares on the modelled link."""
        ends = (self._group_of[member], member) if down else (member, self._group_of[member])
        link = self.down_link if down else self.up_link
        self.federation.ledger.book(server_round, link, *ends, 0, carried)

    # Before a run, and a round.

    def forget(self) -> None:
        """Forget the run."""
        self._number = self._round = 0
        # By partition id: the node id and its keys; and the first long-lived key.
        self._keys: dict[int, tuple[int, bytes]] = {}
        self._trusted: dict[int, bytes] = {}
        self._open: dict[int, _Open] = {}
        self._group_of: dict[int, int] = {}
        # In how many attempts of the round a member's masked update has not arrived.
        self._missing = Counter[int]()
        # Nodes with shares that restored no seed.
        self._excluded: set[int] = set()
        self._told_of_sizes = False
        self._left_out: Counter[str] = Counter()
        self.releases = SumReleases()

    def privacy_report(self) -> SumPrivacyReport | None:
        """Return the privacy guarantee of the sums so far for the most exposed node; None without noise."""
        if self.noise is None:
            return None
        open_paths = {EVALUATION} if self.federation.settings.fraction_evaluate else set()
        return self.releases.report(self.noise, open_paths)

    def metrics(self) -> dict[str, float]:
        """Return the privacy metrics of a round's record; empty without noise."""
        report = self.privacy_report()
        return {} if report is None else report.metrics()

    def state_dict(self) -> dict[str, Any]:
        """Return the releases, for a checkpoint; keys are valid for one run only."""
        if self.noise is None:
            return {}
        return {"sums": self._number, "released": self.releases.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint; releases after it are unknown."""
        if self.noise is not None:
            # Seeded noise is keyed by the sum's number.
            self._number = int(state["sums"])
            self.releases.load_state_dict(state["released"])

    def _failed(self, at: int) -> bool:
        # One loss may be of the network: the next attempt asks the member again.
        return self._missing[at] > 1 or self.federation.members.fails(at)

    def choose(self, server_round: int, groups: Mapping[int, Sequence[Node]]) -> Steps[list[Node]]:
        """Begin a round: return the nodes of each group that can be in its sum; others are counted."""
        self._open, self._group_of, self._left_out = {}, {}, Counter()
        able = {group: [node for node in nodes if self._is_able(node)] for group, nodes in groups.items()}
        if self._round == server_round:
            # A repeated round: one member that fails, or is silent, must not fail it again.
            for group, nodes in able.items():
                sound = [node for node in nodes if not self._failed(node.partition_id)]
                if len(sound) >= self.least_of(group):
                    self._left_out[FAILED] += len(nodes) - len(sound)
                    able[group] = sound
        else:
            self._missing.clear()
        self._round = server_round
        self._group_of = {node.partition_id: group for group, nodes in able.items() for node in nodes}
        yield from self._ask_keys(server_round, [node for nodes in able.values() for node in nodes])
        chosen: list[Node] = []
        self._group_of = {}
        for group, nodes in able.items():
            known = [node for node in nodes if node.partition_id in self._keys]
            if len(known) < (least := self.least_of(group)) or len(known) > MAX_MEMBERS:
                self._left_out[TOO_LARGE if len(known) > MAX_MEMBERS else TOO_SMALL] += len(known)
                log(
                    WARNING,
                    "%s has no sum: it has %d nodes, and a sum must have %d to %d.",
                    self.called(group),
                    len(known),
                    least,
                    MAX_MEMBERS,
                )
                continue
            self._group_of |= {node.partition_id: group for node in known}
            chosen += known
        return sorted(chosen, key=lambda node: node.partition_id)

    def least_of(self, group: int) -> int:
        """Return the smallest number of members of a group's sum."""
        return self.settings.min_nodes

    def _is_able(self, node: Node) -> bool:
        if node.partition_id in self._excluded:
            self._left_out[BAD_SHARES] += 1
        elif node.partition_id not in self.federation.limits.claims.sizes:
            self._left_out[NO_SIZE] += 1
            if not self._told_of_sizes:
                self._told_of_sizes = True
                log(WARNING, "Left out of sums: nodes that report no num-examples. %s", NEEDS_CLIENT)
        else:
            return True
        return False

    def _ask_keys(self, server_round: int, nodes: Sequence[Node]) -> Steps[None]:
        """Get the keys of nodes that are new, reconnected, or failed in an earlier sum."""
        new = [node for node in nodes if self._keys.get(node.partition_id, (None,))[0] != node.node_id]
        if not new:
            return
        content = RecordDict({"config": ConfigRecord({"seed": self.federation.settings.seed})})
        for node in new:
            self._keys.pop(node.partition_id, None)
        probe = NodeIdentity(SealingKey.drawn(), SealingKey.drawn())

        def check(node: Node, answer: RecordDict) -> tuple[bytes, int]:
            config = only_record(answer, ConfigRecord, NO_KEYS)
            key, number = config.get("introduction"), config.get("number")
            if not isinstance(key, bytes) or not isinstance(number, int) or not 0 <= number < 2**62:
                raise PayloadError(NO_KEYS, "no introduction")
            probe.secret_with(
                key
            )  # PayloadError for an invalid key, with which members would refuse the sum.
            if self._trusted.setdefault(node.partition_id, key[:KEY_BYTES]) != key[:KEY_BYTES]:
                raise PayloadError(CHANGED_KEY, "another long-lived key than before")
            if any(key == other for _, other in self._keys.values()):
                raise PayloadError(CHANGED_KEY, "another node's keys")
            self._keys[node.partition_id] = node.node_id, key
            return key, number

        asked = {node: content for node in new}
        for reply in (yield self._question(server_round, SUM_KEYS, "sum keys", asked, check)):
            self._number = max(self._number, reply.value[1])
        self._left_out[NO_KEYS] += sum(node.partition_id not in self._keys for node in new)

    def plan_for(self, group: int, content: RecordDict, start: ArrayRecord) -> ConfigRecord:
        """Return the plan of a group's sum, which each of its instructions holds as ``MASKED_SUM``.

        ``content`` is the instruction of every member, without the plan. ``start`` are the arrays that they
        reply with changes of: keys, shapes and dtypes, in their order.
        """
        members = sorted(at for at, of in self._group_of.items() if of == group)
        n = len(members)
        self._number += 1
        plan = SumPlan(
            number=self._number,
            members=tuple(members),
            introductions=tuple(self._keys[at][1] for at in members),
            threshold=survivors_needed(n, self.settings.threshold),
            neighbours=default_neighbours(n),
            clip=float(self.settings.clip),
            max_weight=max(self.weight_of(at) for at in members) if self.weighted_by else 1.0,
            weighted_by=self.weighted_by,
            metrics=() if self.noise else self.settings.metrics,
            **({} if self.noise is None else self.noise.of_plan()),
        )
        arrays = {k: view(a) for k, a in start.items()}
        self._open[group] = _Open(plan, plan.about(told_content(content)), clips_of(arrays, plan))
        if plan.noisy_grid is not None:
            if counters := sorted(key for key, array in arrays.items() if array.dtype.kind != "f"):
                raise ValueError(
                    f"secure_sum must have no noise for a model with counters, got {counters[0]!r}: "
                    f"{NO_COUNTERS}"
                )
            # Whether it is answered or not: a malicious server may have the sum.
            self.releases.count(members, plan.noisy_grid.rho(self._open[group].clips.size))
        return ConfigRecord({**plan.record(), "seed": self.federation.settings.seed})

    # Replies.

    def checked(self, node: Node, content: RecordDict) -> _Masked:
        """Return the masked words and shares of a valid reply; raise PayloadError for other replies."""
        announced = self._open[self._group_of[node.partition_id]]
        arrays = only_record(content, ArrayRecord, "bad arrays")
        if set(arrays) != {MASKED}:
            raise PayloadError("missing key", f"no array {MASKED!r} alone")
        words = view(arrays[MASKED])
        if words.dtype != np.uint32:
            raise PayloadError("wrong dtype", f"{words.dtype}, expected uint32")
        if words.shape != announced.clips.shape:
            raise PayloadError("wrong shape", f"{words.shape}, expected {announced.clips.shape}")
        shares, plan = only_record(content, ConfigRecord, BAD_SHARES), announced.plan
        sealed, commitments = shares.get("sealed"), shares.get("commitments")
        sizes = (len(plan.members) - 1) * plan.share_bytes, SEED_BYTES * (1 + plan.neighbours)
        if not isinstance(sealed, bytes) or not isinstance(commitments, bytes):
            raise PayloadError(BAD_SHARES, "no bytes")
        if (len(sealed), len(commitments)) != sizes:
            raise PayloadError(BAD_SHARES, f"{len(sealed)} and {len(commitments)} bytes, expected {sizes}")
        return _Masked(words, sealed, commitments)

    def solve(
        self, server_round: int, replies: Iterable[tuple[Node, "_Masked"]]
    ) -> Steps[dict[int, SummedUpdate]]:
        """Return the update of each group with an unmasked sum; one question serves all groups."""
        arrived: dict[int, dict[int, tuple[Node, _Masked]]] = {group: {} for group in self._open}
        for node, masked in replies:
            arrived[self._group_of[node.partition_id]][node.partition_id] = node, masked
        for at, group in self._group_of.items():
            if at not in arrived[group]:  # It may have restarted, with a new key.
                del self._keys[at]
                self._missing[at] += 1
        sums: dict[int, Unmasking] = {}
        for group, one in self._open.items():
            alive = connected_survivors(one.plan, one.plan.graph(one.about), arrived[group])
            if len(alive) < one.plan.threshold:
                self._lose(TOO_FEW, len(arrived[group]))
                continue
            self._lose(DISCONNECTED, len(arrived[group]) - len(alive))
            words = {at: arrived[group][at][1].words for at in alive}
            commitments = {at: arrived[group][at][1].commitments for at in alive}
            sums[group] = Unmasking(one.plan, one.about, words, commitments)
        yield from self._ask_shares(server_round, sums, arrived)
        return {group: found for group, sum_ in sums.items() if (found := self._update(group, sum_))}

    def _ask_shares(
        self,
        server_round: int,
        sums: Mapping[int, Unmasking],
        arrived: Mapping[int, Mapping[int, tuple[Node, "_Masked"]]],
    ) -> Steps[None]:
        contents: dict[Node, RecordDict] = {}
        for group, one in sums.items():
            size, members = one.plan.share_bytes, one.plan.members
            for at in one.survivors:
                parts = []
                for other in one.survivors:
                    if other != at:
                        # A member's sealed shares are in the order of the other members.
                        place = members.index(at) - (members.index(at) > members.index(other))
                        parts.append(arrived[group][other][1].sealed[size * place : size * (place + 1)])
                config: dict[str, Any] = {
                    "number": one.plan.number,
                    "survivors": list(one.survivors),
                    "sealed": b"".join(parts),
                    "seed": self.federation.settings.seed,
                }
                contents[arrived[group][at][0]] = RecordDict({"config": ConfigRecord(config)})

        def check(node: Node, answer: RecordDict) -> list[tuple[int, bytes]]:
            shares = only_record(answer, ConfigRecord, BAD_SHARES).get("shares")
            if not isinstance(shares, bytes):
                raise PayloadError(BAD_SHARES, "no shares")
            return sums[self._group_of[node.partition_id]].check(node.partition_id, shares)

        for reply in (yield self._question(server_round, SUM_SHARES, "sum shares", contents, check)):
            sums[self._group_of[reply.node.partition_id]].take(reply.node.partition_id, reply.value)

    def _update(self, group: int, one: Unmasking) -> SummedUpdate | None:
        total, bad = one.total()
        if total is None:
            self._lose(UNSOLVED, len(one.survivors))
            if one.answered >= one.plan.threshold:
                log(WARNING, "Left out of sums from now on, for shares that give no seed back: %s", bad)
                self._excluded |= set(bad)
            return None
        if (noisy := one.plan.noisy_grid) is not None:
            count = len(one.survivors)
            metrics = MetricRecord({self.federation.settings.weighted_by_key: float(count)})
            mean = noisy.decode(total) / count
            return SummedUpdate(mean, float(count), RecordDict({"metrics": metrics}), one.survivors)
        values = one.plan.grid.decode(total, self._open[group].clips)
        size = values.size - one.plan.extras
        shares = values[size]
        if not shares > 0:
            self._lose(UNSOLVED, len(one.survivors))
            return None
        weight = float(shares * one.plan.max_weight)
        metrics = MetricRecord(
            {self.federation.settings.weighted_by_key: weight, "clipped": float(values[size + 1] / shares)}
        )
        for i, name in enumerate(one.plan.metrics):
            value, there = values[size + 2 + 2 * i : size + 4 + 2 * i]
            if there > 0.5 / one.plan.grid.largest:
                metrics[name] = float(value / there)
        return SummedUpdate(values[:size] / shares, weight, RecordDict({"metrics": metrics}), one.survivors)

    def enough(self) -> bool:
        """Return whether a round got its minimum; there is none if no group had enough nodes."""
        able = not any(count for reason, count in self._left_out.items() if reason != TOO_SMALL)
        return self.federation.enough() and (self.report.accepted > 0 or able)

    def _lose(self, reason: str, count: int) -> None:
        if count:
            self.report.accepted -= count
            self.report.rejected[reason] += count

    def _question(
        self, server_round: int, kind: str, what: str, contents: Mapping[Node, RecordDict], check: Any
    ) -> Question:
        return Question(kind, f"{server_round}-{what}-{self._number}", contents, check, self.book)

    # As an aggregator.

    def counted(self, run: Any, pool: int, update: SummedUpdate) -> None:
        """Record an accepted sum."""
        run.absorbed += update.survivors
        run.contents.append(update.metrics)

    def means(self, exchange: Exchange, run: Any) -> Steps[Mapping[int, Mean]]:
        """Return the means of the pools with a sum; RoundFailedError if sums have too few replies."""
        nodes, offline = self.federation.members.select_online(list(exchange.asked))
        groups: dict[int, list[Node]] = {}
        for node in nodes:
            groups.setdefault(exchange.asked[node.partition_id].pool, []).append(node)
        chosen = {node.partition_id for node in (yield from self.choose(run.round, groups))}
        asks, layout = [], exchange.layout(self.federation)
        for ask in exchange.asks:
            if members := [i for i in ask.nodes if i in chosen]:
                sent = exchange.sent(ask.pool)
                content = _same_for_all(run, exchange, replace(ask, nodes=members))
                plan = self.plan_for(ask.pool, content, exchange.coding.summed(sent, layout))
                asks.append(replace(ask, nodes=members, records={**ask.records, MASKED_SUM: plan}))
        masked = replace(exchange, asks=asks, reads=self.checked, offline=offline)
        arrived: list[tuple[Node, Any]] = []
        replies = yield masked
        self.report.rejected += self._left_out
        for columns in replies:
            for reply, row in zip(columns.replies, columns.rows, strict=True):
                shares = only_record(reply.content, ConfigRecord, BAD_SHARES)
                self.book(run.round, reply.node.partition_id, payload_bytes(shares), down=False)
                arrived.append((reply.node, row))
        means: dict[int, Mean] = {}
        for pool, update in sorted((yield from self.solve(run.round, arrived)).items()):
            start = exchange.sent(pool)
            change = exchange.coding.change(update.mean, layout)
            try:
                check_update(exchange.bounds(self.federation), start + change - start, start)
            except PayloadError as error:
                self._lose(error.reason, len(update.survivors))
                continue
            means[pool] = _SumMean(update.survivors, update.weight, start, change)
            self.counted(run, pool, update)
        run.metrics.update(self.metrics())
        if not self.enough():
            raise RoundFailedError
        return means


def _same_for_all(run: Any, exchange: Exchange, ask: Ask) -> RecordDict:
    """Return the instruction of all members of a sum; ValueError if a value is one member's own."""
    first = ask.nodes[0]
    for key, own in ask.own.items():
        # Records are compared as objects: nodes that are sent the same one share it.
        if any(own.get(i) is not own.get(first) and own.get(i) != own.get(first) for i in ask.nodes):
            raise ValueError(f"{key} must be the same in all instructions of a secure sum")
    content = instruction(run, replace(exchange, asks=[ask]), first)
    # A node that lacks the frozen arrays is sent them beside the instruction, which has their checksum.
    return RecordDict({key: record for key, record in content.items() if key != FROZEN})


@dataclass(frozen=True, eq=False)
class _SumMean:
    nodes: Sequence[int]
    weight: float
    start: NDArray[Any]
    change: NDArray[np.float64]

    def model(self, stayed: float = 0.0) -> NDArray[np.float64]:
        share = self.weight / (self.weight + stayed)
        moved: NDArray[np.float64] = self.start + self.change * share
        return moved
