"""The node's side of a masked sum: what it would have told in plain goes into a sum, or nowhere.

``wire/masked_sums.py`` has the protocol, docs/privacy.md what it is for. What the server orders is held
against what a sum must be (members, threshold, neighbours) before anything is trained; a node takes part in a
sum once, and helps to take its masks off once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from hedgerow.clients.app import Answer, each
from hedgerow.clients.guard import WEAK, Refusal, check_sum
from hedgerow.clients.links import NodeLinks
from hedgerow.wire.calls import RUN_KEY, SECRET_RECORD, BatchHandler, Call
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
from hedgerow.wire.records import PayloadError, finite_views, lazy_array, only_record
from hedgerow.wire.sealed import Link

__all__ = ["masked_sum_handlers"]

NO_SUM = "this node takes no part in such a sum"
# Of the node config: the node trains for nothing but sums; of so many members at least.
_ONLY, _LEAST = "secure-sum", "min-sum-nodes"
# What is told beside a sum: that a node took the steps it was asked for.
_PLAIN = "num-steps"
_OWN_STATE = "masked-sum"


def masked_sum_handlers(train: BatchHandler, message_type: str = "train") -> dict[str, BatchHandler]:
    """Return the handlers of a node that can tell what it learnt within a sum.

    An instruction with the record ``masked-sum`` is answered with the node's masked update, times its
    weight, in place of arrays and metrics; any other as ``train`` answers it, unless the node config says
    ``secure-sum = true``.

    Parameters
    ----------
    train : Callable[[Sequence[Call]], Sequence[RecordDict or Exception]]
        Answers with one ArrayRecord, keys and shapes as in the instruction, and one MetricRecord.
    message_type : str (default: "train")
        What it answers.
    """

    def handle(calls: Sequence[Call]) -> Sequence[Answer]:
        if not any(MASKED_SUM in call.content or _ONLY in call.context.node_config for call in calls):
            return train(calls)
        # Nodes that were sent one content share what is read from it.
        sent: dict[int, _Sent] = {}
        found = [_attempt(_begin, call, sent) for call in calls]
        going = [at for at, one in enumerate(found) if not isinstance(one, Exception)]
        inner = [found[at].call for at in going]
        answers: dict[int, Answer] = dict(zip(going, train(inner) if inner else [], strict=True))
        told: list[Answer] = []
        for at, one in enumerate(found):
            if isinstance(one, Exception):
                told.append(one)
            elif one.sum is None or isinstance(answers[at], Exception):
                told.append(answers[at])
            else:
                told.append(_attempt(_masked_answer, one, answers[at]))
        return told

    return {message_type: handle, SUM_KEYS: each(_introduce), SUM_SHARES: each(_reveal)}


@dataclass(frozen=True)
class _Sent:
    """What is read once of an instruction: its plan, what it is about, and the instruction without it."""

    plan: SumPlan
    about: bytes
    content: RecordDict
    arrays: dict[str, NDArray[Any]]
    packed: bytes

    @classmethod
    def of(cls, content: RecordDict) -> "_Sent":
        plain = RecordDict({key: record for key, record in content.items() if key != MASKED_SUM})
        record = content[MASKED_SUM]
        if not isinstance(record, ConfigRecord):
            raise ValueError("masked sum: its record is no ConfigRecord")
        plan = SumPlan.of(record)
        arrays = finite_views(only_record(plain, ArrayRecord, "bad arrays"))
        return cls(plan, plan.about(told_content(plain)), plain, arrays, plan.packed())


@dataclass(frozen=True)
class _Own:
    """One node's part in a sum."""

    sent: _Sent
    member: int
    # Its end of the link with each other member.
    ends: Mapping[int, Link]


@dataclass(frozen=True)
class _Job:
    call: Call
    sum: _Own | None


def _attempt(work: Any, *arguments: Any) -> Any:
    try:
        return work(*arguments)
    except Exception as error:  # Whatever is wrong with one node is that node's answer.
        return error


def _begin(call: Call, sent: dict[int, _Sent]) -> _Job:
    """Read and check a call before anything is trained; the node's part begins here, and is written down."""
    config = call.context.node_config
    if MASKED_SUM not in call.content:
        if config.get(_ONLY):
            raise Refusal(WEAK, "secure-sum")
        return _Job(call, None)
    key = id(call.content)
    try:
        if key not in sent:
            sent[key] = _Sent.of(call.content)
        one = sent[key]
        own = _joined(call, one)
    except ValueError as error:
        raise Refusal(NO_SUM, "secure-sum") from error
    return _Job(Call(one.content, call.context, call.message_type), own)


def _joined(call: Call, sent: _Sent) -> _Own:
    """Return the node's part in a sum that it may take part in; ValueError for any other."""
    plan = sent.plan
    n, least = len(plan.members), max(LEAST_MEMBERS, int(call.context.node_config.get(_LEAST, 0)))
    if n < least:
        raise ValueError(f"a sum of {n} members; valid is {least} or more")
    if plan.threshold < survivors_needed(n):
        raise ValueError(f"a threshold of {plan.threshold}; valid is {survivors_needed(n)} or more of {n}")
    if plan.neighbours < default_neighbours(n):
        raise ValueError(f"{plan.neighbours} neighbours; valid is {default_neighbours(n)} or more of {n}")
    links = NodeLinks(call, _seed(call.content[MASKED_SUM]))
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
            links.meet(str(other), key)
            ends[other] = Link(links.identity.secret_with(key), links.run, str(member), str(other))
    links.keep(call.context)
    _keep(call, links.run, {"number": plan.number, "about": sent.about, "plan": sent.packed, "told": False})
    return _Own(sent, member, ends)


def _masked_answer(job: _Job, answer: RecordDict) -> RecordDict:
    assert job.sum is not None
    sent, own, ends = job.sum.sent, job.sum.member, job.sum.ends
    plan, about = sent.plan, sent.about
    arrays = finite_views(only_record(answer, ArrayRecord, "bad arrays"))
    if {k: a.shape for k, a in arrays.items()} != {k: a.shape for k, a in sent.arrays.items()}:
        raise PayloadError("wrong shape", "what was learnt has other arrays than what was sent")
    metrics = only_record(answer, MetricRecord, "bad metrics")
    clips = clips_of(sent.arrays, plan)
    update = np.concatenate(
        [np.subtract(arrays[key], was, dtype=np.float64).ravel() for key, was in sent.arrays.items()]
    )
    clipped = float(np.mean(np.abs(update) > clips[: update.size])) if update.size else 0.0
    values = np.concatenate([update, [1.0, clipped], *(_metric(metrics, name) for name in plan.metrics)])
    weight = metrics.get(plan.weighted_by)
    if not isinstance(weight, int | float) or not weight > 0:
        raise PayloadError("bad weight", f"{plan.weighted_by} is {weight!r}; valid is > 0")
    share = min(float(weight) / plan.max_weight, 1.0)
    seeds = {other: pair_seed(ends[other].secret, about) for other in plan.graph(about)[own]}
    made = masked(plan, own, about, plan.grid.encode(values, clips, share), seeds)
    purpose = _purpose(about)
    sealed = b"".join(ends[other].seal(share, plan.number, purpose) for other, share in made.shares.items())
    told = {_PLAIN: metrics[_PLAIN]} if _PLAIN in metrics else {}
    return RecordDict(
        {
            MASKED: ArrayRecord({MASKED: lazy_array(made.words)}),
            SHARES: ConfigRecord({"sealed": sealed, "commitments": made.commitments}),
            "metrics": MetricRecord(told),
        }
    )


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
    about, kept = state.get("about"), state.get("plan")
    if not isinstance(about, bytes) or not isinstance(kept, bytes) or config.get("number") != state["number"]:
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
    if (
        len(alive) != len(survivors)
        or not set(others) <= set(plan.members)
        or len(sealed) != size * len(others)
    ):
        raise ValueError("shares of others than the survivors")
    opened = {}
    for at, other in enumerate(others):
        try:
            end = _link(links, own, other)
            opened[other] = end.open(sealed[size * at : size * (at + 1)], plan.number, _purpose(about))
        except PayloadError:
            continue  # The server is told that there is none.
    told = revealed(plan, own, plan.graph(about), alive, opened)
    # A device's context is written when its answer leaves: two questions at once would find it as it was.
    check_sum(plan.number)
    _keep(call, links.run, {**_plain(state), "told": True})
    return told


def _link(links: NodeLinks, own: int, other: int) -> Link:
    """Return this node's end of the link with a member; their names are those of the sum."""
    return Link(links.link(str(other)).secret, links.run, str(own), str(other))


def _purpose(about: bytes) -> str:
    return f"shares of a sum {about.hex()}"


def _seed(record: Mapping[str, Any]) -> int:
    seed = record.get("seed", 0)
    return seed if type(seed) is int else 0


# What a node keeps of the last sum is its own alone: no server is told it, or sets it back.


def _state(call: Call, run: str) -> dict[str, Any]:
    secret = call.context.state.get(SECRET_RECORD)
    kept = {} if not isinstance(secret, ConfigRecord) else dict(secret)
    state = {key.removeprefix(f"{_OWN_STATE}/"): v for key, v in kept.items() if key.startswith(_OWN_STATE)}
    return state if state.get(RUN_KEY) == run else {"number": 0}


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != RUN_KEY}


def _keep(call: Call, run: str, values: Mapping[str, Any]) -> None:
    secret = call.context.state.get(SECRET_RECORD)
    kept = {} if not isinstance(secret, ConfigRecord) else dict(secret)
    own = {f"{_OWN_STATE}/{key}": value for key, value in {RUN_KEY: run, **values}.items()}
    call.context.state[SECRET_RECORD] = ConfigRecord({**kept, **own})


def _whole(state: Mapping[str, Any], key: str) -> int:
    value = state.get(key, 0)
    return value if type(value) is int else 0
