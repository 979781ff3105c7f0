"""The node's side of a masked sum: what it would have told in plain goes into a sum, or nowhere.

``wire/masked_sums.py`` has the protocol, docs/privacy.md what it is for. What the server orders is held
against what a sum must be (members, threshold, neighbours) before anything is trained; a node takes part in a
sum once, and helps to take its masks off once.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from logging import ERROR
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common import log
from numpy.typing import NDArray

from hedgerow.clients.handlers import Answer, each, outcome
from hedgerow.clients.links import NodeLinks
from hedgerow.clients.mods.guard import (
    Refusal,
    Reveals,
    check_privacy,
    check_release,
    check_sum,
    is_guarded,
    needs_entropy,
    reveals,
)
from hedgerow.clients.told import told_digest
from hedgerow.wire.calls import RUN_KEY, SECRET_RECORD, BatchHandler, Call
from hedgerow.wire.discrete_gaussian import KEY_BYTES, CoinFlips
from hedgerow.wire.masked_sums import (
    LEAST_MEMBERS,
    MASKED,
    MASKED_SUM,
    METRIC_CLIP,
    SHARES,
    SumPlan,
    clips_of,
    default_neighbours,
    masked,
    pair_seed,
    revealed,
    survivors_needed,
    told_content,
)
from hedgerow.wire.message_types import SUM_KEYS, SUM_SHARES
from hedgerow.wire.records import PayloadError, config_in, finite_views, lazy_array, only_record
from hedgerow.wire.sealed import Link
from hedgerow.wire.seeds import Purpose, generator

__all__ = ["Beside", "PartOf", "SumPart", "masked_sum_handlers", "whole_instruction"]

NO_SUM = "this node takes no part in such a sum"
# Of the node config: the least number of a sum's members.
_LEAST = "min-sum-nodes"
_OWN_STATE = "masked-sum"


@dataclass(frozen=True)
class SumPart:
    """What the members of a sum have in common, and what their answers are held against.

    Parameters
    ----------
    common : RecordDict
        All of the instruction that a member's answer depends on, which is part of the masks' keys: whoever
        was sent another model than the others has masks that do not cancel. The server must find the same.
        What else the node was told is part of the keys by ``told_digest``.
    start : Mapping[str, NDArray]
        From what each array of an answer is a change, by key; their order is that of the sum's numbers.
    """

    common: RecordDict
    start: Mapping[str, NDArray[Any]]


# Finds it, after training, from the instruction without its plan.
PartOf = Callable[[Call], SumPart]
# Returns the metrics that are told beside a sum, from the instruction alone: nothing of what was learnt.
Beside = Callable[[Call], Mapping[str, int]]


def whole_instruction(call: Call) -> SumPart:
    """Return that a node's part is of all that it was sent."""
    arrays = finite_views(only_record(call.content, ArrayRecord, "bad arrays"))
    return SumPart(call.content, arrays)


def masked_sum_handlers(
    train: BatchHandler,
    message_type: str = "train",
    part_of: PartOf = whole_instruction,
    beside: Beside = lambda _: {},
) -> dict[str, BatchHandler]:
    """Return the handlers of a node that can tell what it learnt within a sum.

    An instruction with the record ``masked-sum`` is answered with the node's masked update, times its
    weight, in place of arrays and metrics; any other as ``train`` answers it, which a node whose policy
    demands sums does not let happen.

    Parameters
    ----------
    train : Callable[[Sequence[Call]], Sequence[RecordDict or Exception]]
        Answers with one ArrayRecord, keys and shapes as in ``part_of(call).start``, and one MetricRecord. An
        empty ArrayRecord says that the node has learnt nothing, and is told as it is.
    message_type : str (default: "train")
        What it answers.
    part_of : Callable[[Call], SumPart] (default: the whole instruction, and its one ArrayRecord)
        What a node's part is of, asked after it was trained.
    beside : Callable[[Call], Mapping[str, int]] (default: nothing)
        The metrics that are told beside the sum.

    Notes
    -----
    On a guarded node training that fails, or ends at numbers that are not finite, adds nothing to the sum and
    looks like any other answer: a server that chose the model would read from a failure what the records are.
    """

    def handle(calls: Sequence[Call]) -> Sequence[Answer]:
        if not any(MASKED_SUM in call.content for call in calls):
            return train(calls)
        # Nodes that were sent one content share what is read from it.
        sent: dict[int, _Sent] = {}
        parts: dict[int, tuple[SumPart, bytes]] = {}

        def part(call: Call) -> tuple[SumPart, bytes]:
            if part_of is not whole_instruction:
                own = part_of(call)
                return own, told_content(own.common)
            if id(call.content) not in parts:
                whole = part_of(call)
                parts[id(call.content)] = whole, told_content(whole.common)
            return parts[id(call.content)]

        # What can be known before training is found out then.
        early = part if part_of is whole_instruction else None
        found = [outcome(_begin, call, sent, early) for call in calls]
        going = [one.call for one in found if not isinstance(one, Exception)]
        trained = iter(train(going) if going else [])
        told: list[Answer] = []
        for one in found:
            if isinstance(one, Exception):
                told.append(one)
                continue
            answer = next(trained)
            told.append(answer if one.sum is None else outcome(_masked_answer, one, answer, part, beside))
        return told

    return {
        message_type: reveals(Reveals.SUMMED, handle),
        SUM_KEYS: reveals(Reveals.NOTHING, each(_introduce)),
        SUM_SHARES: reveals(Reveals.NOTHING, each(_reveal)),
    }


@dataclass(frozen=True)
class _Sent:
    """What is read once of an instruction: its plan, and the instruction without it."""

    plan: SumPlan
    content: RecordDict
    packed: bytes

    @classmethod
    def of(cls, content: RecordDict) -> "_Sent":
        plain = RecordDict({key: record for key, record in content.items() if key != MASKED_SUM})
        record = content[MASKED_SUM]
        if not isinstance(record, ConfigRecord):
            raise ValueError("masked sum: its record is no ConfigRecord")
        plan = SumPlan.of(record)
        return cls(plan, plain, plan.packed())


@dataclass(frozen=True)
class _Own:
    """One node's part in a sum."""

    sent: _Sent
    member: int
    run: str
    seed: int
    # Its end of the link with each other member.
    ends: Mapping[int, Link]
    # Of what it was told beside the instruction, before it trains.
    told: bytes


@dataclass(frozen=True)
class _Job:
    call: Call
    sum: _Own | None


def _begin(call: Call, sent: dict[int, _Sent], early: Callable[[Call], object] | None) -> _Job:
    """Read and check a call before anything is trained; the node's part begins here, and is written down."""
    if MASKED_SUM not in call.content:
        return _Job(call, None)
    key = id(call.content)
    try:
        if key not in sent:
            sent[key] = _Sent.of(call.content)
        one = sent[key]
        job = Call(one.content, call.context, call.message_type)
        if early is not None:
            early(job)
        return _Job(job, _joined(call, one))
    except ValueError as error:
        raise Refusal(NO_SUM, "secure-sum") from error


def _joined(call: Call, sent: _Sent) -> _Own:
    """Return the node's part in a sum that it may take part in; ValueError for any other."""
    plan = sent.plan
    n, least = len(plan.members), max(LEAST_MEMBERS, int(call.context.node_config.get(_LEAST, 0)))
    if n < least:
        raise ValueError(f"a sum must have at least {least} members, got {n}")
    if plan.threshold < survivors_needed(n):
        raise ValueError(f"threshold must be at least {survivors_needed(n)} of {n}, got {plan.threshold}")
    if plan.neighbours < default_neighbours(n):
        raise ValueError(f"neighbours must be at least {default_neighbours(n)} of {n}, got {plan.neighbours}")
    seed = _seed(call.content[MASKED_SUM])
    if plan.norm:
        check_privacy("sound", plan.least_multiplier / 2, plan.norm)
    links = NodeLinks(call, seed)
    introduction = links.identity.introduction
    if introduction not in plan.introductions:
        raise ValueError("this node's own key is not among the members'")
    member = plan.members[plan.introductions.index(introduction)]
    state = _state(call, links.run)
    if plan.number <= _whole(state, "number"):
        raise ValueError(f"sum {plan.number} after {_whole(state, 'number')}")
    ends = {}
    for other, key in zip(plan.members, plan.introductions, strict=True):
        if other != member:
            links.meet(str(other), key, in_sum=True)
            ends[other] = Link(links.identity.secret_with(key), links.run, str(member), str(other))
    links.keep(call.context)
    # Of a sum in which the node does not get so far as to mask anything there is nothing to tell.
    unmade = {"about": b"", "key": b"", "told": True}
    _keep(call, links.run, {"number": plan.number, "plan": sent.packed, **unmade})
    return _Own(sent, member, links.run, seed, ends, told_digest(call))


def _masked_answer(
    job: _Job, answer: Answer, part_of: Callable[[Call], tuple[SumPart, bytes]], beside: Beside
) -> RecordDict:
    assert job.sum is not None
    plan, own, ends = job.sum.sent.plan, job.sum.member, job.sum.ends
    if isinstance(answer, RecordDict) and not only_record(answer, ArrayRecord, "bad arrays"):
        metrics = only_record(answer, MetricRecord, "bad metrics")
        return RecordDict({"metrics": MetricRecord({key: metrics[key] for key in beside(job.call)})})
    part, content = part_of(job.call)
    about, start = plan.about(content), part.start
    try:
        numbers = _numbers(job, *_learnt(answer, start), start)
    except Refusal:
        raise
    except Exception as error:
        if not is_guarded():
            raise
        log(ERROR, "This node adds nothing to sum %d", plan.number, exc_info=error)
        numbers = _numbers(job, np.zeros(sum(was.size for was in start.values())), None, start)
    # The server need not know what members were told beside the instruction: it has no use for this key.
    key = sha256(about + job.sum.told).digest()
    state = _state(job.call, job.sum.run)
    _keep(job.call, job.sum.run, {**state, "about": about, "key": key, "told": False})
    seeds = {other: pair_seed(ends[other].secret, key) for other in plan.graph(about)[own]}
    made = masked(plan, own, numbers, seeds)
    purpose = _purpose(key)
    sealed = b"".join(ends[other].seal(share, plan.number, purpose) for other, share in made.shares.items())
    return RecordDict(
        {
            MASKED: ArrayRecord({MASKED: lazy_array(made.words)}),
            SHARES: ConfigRecord({"sealed": sealed, "commitments": made.commitments}),
            "metrics": MetricRecord({**beside(job.call)}),
        }
    )


def _learnt(answer: Answer, start: Mapping[str, NDArray[Any]]) -> tuple[NDArray[np.float64], MetricRecord]:
    """Return the update (M,) and the metrics of an answer; raises what it is, or what is wrong with it."""
    if isinstance(answer, Exception):
        raise answer
    metrics = only_record(answer, MetricRecord, "bad metrics")
    arrays = finite_views(only_record(answer, ArrayRecord, "bad arrays"))
    if {k: a.shape for k, a in arrays.items()} != {k: a.shape for k, a in start.items()}:
        raise PayloadError("wrong shape", "what was learnt has other arrays than what was sent")
    changes = (np.subtract(arrays[key], was, dtype=np.float64).ravel() for key, was in start.items())
    return np.concatenate(list(changes)), metrics


def _numbers(
    job: _Job, update: NDArray[np.float64], metrics: MetricRecord | None, start: Mapping[str, NDArray[Any]]
) -> NDArray[np.uint32]:
    """Return what a node adds to its sum, before masks: its update times its weight, or with noise.

    Without metrics, of a node that learnt nothing, it weighs nothing.
    """
    assert job.sum is not None
    plan = job.sum.sent.plan
    if (noisy := plan.noisy_grid) is not None:
        if any(was.dtype.kind != "f" for was in start.values()):
            raise PayloadError("wrong dtype", "counters have no norm to clip to")
        # The ledger counts what the sum would cost if the server lied about who survived.
        check_release(secrets.randbits(128), plan.number, plan.least_multiplier / 2)
        return noisy.encode(update, CoinFlips(_noise_key(job)))
    clips = clips_of(start, plan)
    if metrics is None:
        return plan.grid.encode(np.zeros(clips.size), clips, 0.0)
    clipped = float(np.mean(np.abs(update) > clips[: update.size])) if update.size else 0.0
    values = np.concatenate([update, [1.0, clipped], *(_metric(metrics, name) for name in plan.metrics)])
    weight = metrics.get(plan.weighted_by) if plan.weighted_by else 1.0
    if not isinstance(weight, int | float) or not weight > 0:
        raise PayloadError("bad weight", f"{plan.weighted_by} must be > 0, got {weight!r}")
    return plan.grid.encode(values, clips, min(float(weight) / plan.max_weight, 1.0))


def _noise_key(job: _Job) -> bytes | None:
    """Return what a node's noise is drawn from; None for the operating system's.

    The run's seed, which whoever knows it takes the noise off with, is for simulations: a node whose own
    config says ``entropy``, or that has a policy which does not say ``seed``, never uses it.
    """
    assert job.sum is not None
    plan = job.sum.sent.plan
    own = needs_entropy() or job.call.context.node_config.get("noise-source") == "entropy"
    if own or plan.noise_source == "entropy":
        return None
    stream = generator(
        job.sum.seed, round=plan.number, partition_id=job.call.partition_id, purpose=Purpose.NOISE
    )
    return stream.bytes(KEY_BYTES)


def _metric(metrics: MetricRecord, name: str) -> list[float]:
    """Return a metric and that it is there; two zeros where it is none."""
    value = metrics.get(name)
    if not isinstance(value, int | float) or not np.isfinite(value):
        return [0.0, 0.0]
    return [float(np.clip(value, -METRIC_CLIP, METRIC_CLIP)), 1.0]


def _introduce(call: Call) -> RecordDict:
    """Answer ``query.sum_keys``: the node's public keys, and the last sum of the run that it took part in."""
    config = only_record(call.content, ConfigRecord, "bad config")
    links = NodeLinks(call, _seed(config), begin=True)
    links.keep(call.context)
    number = _whole(_state(call, links.run), "number")
    told = ConfigRecord({"introduction": links.identity.introduction, "number": number})
    return RecordDict({MASKED_SUM: told})


def _reveal(call: Call) -> RecordDict:
    """Answer ``query.sum_shares``, once for each sum: what takes the masks off for these survivors."""
    config = only_record(call.content, ConfigRecord, "bad config")
    try:
        told = _shares(call, config)
    except ValueError as error:
        raise Refusal(NO_SUM, "secure-sum") from error
    return RecordDict({SHARES: ConfigRecord({"shares": told})})


def _shares(call: Call, config: ConfigRecord) -> bytes:
    links = NodeLinks(call, _seed(config))
    state = _state(call, links.run)
    about, key, kept = (state.get(name) for name in ("about", "key", "plan"))
    if (
        not (isinstance(about, bytes) and isinstance(key, bytes) and isinstance(kept, bytes))
        or config.get("number") != state["number"]
    ):
        raise ValueError(f"this node took no part in sum {config.get('number')!r}, or in a later one")
    if state.get("told") is not False:
        raise ValueError("this node has told its shares for this sum")
    plan = SumPlan.unpacked(kept)
    own = plan.members[plan.introductions.index(links.identity.introduction)]
    survivors, sealed = config.get("survivors"), config.get("sealed")
    if not isinstance(survivors, list) or not isinstance(sealed, bytes):
        raise ValueError("no survivors, or none of their shares")
    alive = [one for one in survivors if isinstance(one, int)]
    others = [one for one in alive if one != own]
    size = plan.share_bytes
    known = len(alive) == len(survivors) and set(others) <= set(plan.members)
    if not known or len(sealed) != size * len(others):
        raise ValueError("shares of others than the survivors")
    opened = {}
    for at, other in enumerate(others):
        try:
            # The names of the ends are those of the sum.
            secret = links.link(str(other), in_sum=True).secret
            end, share = Link(secret, links.run, str(own), str(other)), sealed[size * at : size * (at + 1)]
            opened[other] = end.open(share, plan.number, _purpose(key))
        except PayloadError:
            continue  # The server is told that there is none.
    told = revealed(plan, own, plan.graph(about), alive, opened)
    # A device's context is written when its answer leaves: two questions at once would find it as it was.
    check_sum(plan.number)
    _keep(call, links.run, {**state, "told": True})
    return told


def _purpose(key: bytes) -> str:
    return f"shares of a sum {key.hex()}"


def _seed(record: Mapping[str, Any]) -> int:
    seed = record.get("seed", 0)
    return seed if type(seed) is int else 0


# What a node keeps of the last sum is its own alone: no server is told it, or sets it back.


def _state(call: Call, run: str) -> dict[str, Any]:
    kept = config_in(call.context.state, SECRET_RECORD)
    prefix = f"{_OWN_STATE}/"
    state: dict[str, Any] = {k.removeprefix(prefix): v for k, v in kept.items() if k.startswith(prefix)}
    return state if state.get(RUN_KEY) == run else {"number": 0}


def _keep(call: Call, run: str, values: Mapping[str, Any]) -> None:
    own = {f"{_OWN_STATE}/{key}": value for key, value in {RUN_KEY: run, **values}.items()}
    kept = config_in(call.context.state, SECRET_RECORD)
    call.context.state[SECRET_RECORD] = ConfigRecord({**kept, **own})


def _whole(state: Mapping[str, Any], key: str) -> int:
    value = state.get(key, 0)
    return value if type(value) is int else 0
