"""The node side of a secure sum: the node's update leaves it only masked.

``wire/masked_sums.py`` has the protocol and docs/privacy/secure-sums.md its purpose. Before training, the
node checks the server's plan (members, threshold, neighbours). It takes part in each sum and reveals its
shares once.
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
from hedgerow.clients.stored_settings import state_digest
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
from hedgerow.wire.printable import traced
from hedgerow.wire.process import is_simulated
from hedgerow.wire.records import PayloadError, change_of, config_in, finite_views, lazy_array, only_record
from hedgerow.wire.sealed import Link
from hedgerow.wire.seeds import Purpose, generator

NO_SUM = "this node takes no part in such a sum"
# Node config key: the smallest number of a sum's members.
_LEAST = "min-sum-nodes"
_OWN_STATE = "masked-sum"


# Returns the arrays that the members' answers must match, in the order of the sum's entries, after training
# from the instruction without its plan. They depend on the instruction and the node's state alone.
StartOf = Callable[[Call], Mapping[str, NDArray[Any]]]
# Returns the metrics sent in plain next to a sum; they depend on the instruction alone.
PlainMetrics = Callable[[Call], Mapping[str, int]]


def whole_model(call: Call) -> Mapping[str, NDArray[Any]]:
    """Return the instruction's one ArrayRecord."""
    return finite_views(only_record(call.content, ArrayRecord, "bad arrays"))


def masked_sum_handlers(
    train: BatchHandler,
    message_type: str = "train",
    start_of: StartOf = whole_model,
    plain_metrics: PlainMetrics = lambda _: {},
) -> dict[str, BatchHandler]:
    """Return the handlers of a node that can take part in secure sums.

    An instruction with the record ``masked-sum`` is answered with the node's weighted, masked update in place
    of arrays and metrics; any other is answered by ``train``, unless the node's policy requires sums.

    Parameters
    ----------
    train : Callable[[Sequence[Call]], Sequence[RecordDict or Exception]]
        Answers with one ArrayRecord, keys and shapes as in ``start_of(call)``, and one MetricRecord. An
        empty ArrayRecord, from a node that did not train, is sent in plain.
    message_type : str (default: "train")
        The message type that ``train`` answers.
    start_of : Callable[[Call], Mapping[str, NDArray]] (default: the instruction's one ArrayRecord)
        Returns the arrays that training starts from, by key.
    plain_metrics : Callable[[Call], Mapping[str, int]] (default: nothing)
        Returns the metrics sent in plain next to the sum.

    Notes
    -----
    On a guarded node, training that fails or gives non-finite values adds nothing to the sum, and the answer
    looks like any other: otherwise a server that chose the model could learn about the records from failures.
    """

    def handle(calls: Sequence[Call]) -> Sequence[Answer]:
        if not any(MASKED_SUM in call.content for call in calls):
            return train(calls)
        sent: dict[int, _Sent] = {}  # by content, which many nodes share
        found = [outcome(_begin, call, sent, start_of) for call in calls]
        valid = [one.call for one in found if not isinstance(one, Exception)]
        trained = iter(train(valid) if valid else [])
        answers: list[Answer] = []
        for one in found:
            if isinstance(one, Exception):
                answers.append(one)
                continue
            answer = next(trained)
            answers.append(
                answer if one.sum is None else outcome(_masked_answer, one, answer, start_of, plain_metrics)
            )
        return answers

    return {
        message_type: reveals(Reveals.SUMMED, handle),
        SUM_KEYS: reveals(Reveals.NOTHING, each(_introduce)),
        SUM_SHARES: reveals(Reveals.NOTHING, each(_reveal)),
    }


@dataclass(frozen=True)
class _Sent:
    """An instruction's plan, and the instruction without it; read once for all nodes."""

    plan: SumPlan
    content: RecordDict
    packed: bytes
    about: bytes  # ``SumPlan.about`` of the content

    @classmethod
    def of(cls, content: RecordDict) -> "_Sent":
        plain = RecordDict({key: record for key, record in content.items() if key != MASKED_SUM})
        record = content[MASKED_SUM]
        if not isinstance(record, ConfigRecord):
            raise ValueError("masked sum: its record is no ConfigRecord")
        plan = SumPlan.of(record)
        return cls(plan, plain, plan.packed(), plan.about(told_content(plain)))


@dataclass(frozen=True)
class _Own:
    """One node's membership in a sum."""

    sent: _Sent
    member: int
    run: str
    seed: int
    ends: Mapping[int, Link]  # its end of the link to each other member
    state: bytes  # ``state_digest`` before training


@dataclass(frozen=True)
class _Job:
    call: Call
    sum: _Own | None


def _begin(call: Call, sent: dict[int, _Sent], start_of: StartOf) -> _Job:
    """Check a call before training, and store the node's membership in the sum."""
    if MASKED_SUM not in call.content:
        return _Job(call, None)
    key = id(call.content)
    try:
        if key not in sent:
            sent[key] = _Sent.of(call.content)
        one = sent[key]
        job = Call(one.content, call.context, call.message_type)
        if start_of is whole_model:
            start_of(job)  # a bad instruction is found before training
        return _Job(job, _joined(call, one))
    except ValueError as error:
        raise Refusal(NO_SUM, "secure-sum") from error


def _joined(call: Call, sent: _Sent) -> _Own:
    """Return the node's membership in a sum; ValueError if the plan is not acceptable."""
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
    # Until the node has masked an update, it has no shares to reveal.
    unmade = {"about": b"", "key": b"", "told": True}
    _keep(call, links.run, {"number": plan.number, "plan": sent.packed, **unmade})
    return _Own(sent, member, links.run, seed, ends, state_digest(call))


def _masked_answer(job: _Job, answer: Answer, start_of: StartOf, plain_metrics: PlainMetrics) -> RecordDict:
    assert job.sum is not None
    plan, own, ends = job.sum.sent.plan, job.sum.member, job.sum.ends
    if isinstance(answer, RecordDict) and not only_record(answer, ArrayRecord, "bad arrays"):
        metrics = only_record(answer, MetricRecord, "bad metrics")
        return RecordDict({"metrics": MetricRecord({key: metrics[key] for key in plain_metrics(job.call)})})
    about, start = job.sum.sent.about, start_of(job.call)
    try:
        numbers = _numbers(job, *_learnt(answer, start), start)
    except Refusal:
        raise
    except Exception as error:
        if not is_guarded():
            raise
        log(ERROR, "This node adds nothing to sum %d\n%s", plan.number, traced(error))
        numbers = _numbers(job, np.zeros(sum(was.size for was in start.values())), None, start)
    # The server cannot and need not derive this key, which includes the node's state.
    key = sha256(about + job.sum.state).digest()
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
            "metrics": MetricRecord({**plain_metrics(job.call)}),
        }
    )


def _learnt(answer: Answer, start: Mapping[str, NDArray[Any]]) -> tuple[NDArray[np.float64], MetricRecord]:
    """Return the update (M,) and the metrics of an answer; raise the error that it is or has."""
    if isinstance(answer, Exception):
        raise answer
    metrics = only_record(answer, MetricRecord, "bad metrics")
    arrays = finite_views(only_record(answer, ArrayRecord, "bad arrays"))
    if {k: a.shape for k, a in arrays.items()} != {k: a.shape for k, a in start.items()}:
        raise PayloadError("wrong shape", "the trained arrays differ from those sent in keys or shapes")
    changes = (change_of(arrays[key], was).ravel() for key, was in start.items())
    return np.concatenate([np.zeros(0), *changes]), metrics


def _numbers(
    job: _Job, update: NDArray[np.float64], metrics: MetricRecord | None, start: Mapping[str, NDArray[Any]]
) -> NDArray[np.uint32]:
    """Return a node's unmasked contribution: its update times its weight, or with noise.

    Without metrics, from a node whose training failed, the weight is 0.
    """
    assert job.sum is not None
    plan = job.sum.sent.plan
    if (noisy := plan.noisy_grid) is not None:
        if any(was.dtype.kind != "f" for was in start.values()):
            raise PayloadError("wrong dtype", "counters have no norm to clip to")
        # The ledger assumes the worst case, a server that lies about the survivors.
        check_release(secrets.randbits(128), plan.number, plan.least_multiplier / 2)
        return noisy.encode(update, CoinFlips(_noise_key(job)))
    clips = clips_of(start, plan)
    if metrics is None:
        return plan.grid.encode(np.zeros(clips.size), clips, 0.0, _draws(job, clips.size))
    clipped = float(np.mean(np.abs(update) > clips[: update.size])) if update.size else 0.0
    values = np.concatenate([update, [1.0, clipped], *(_metric(metrics, name) for name in plan.metrics)])
    weight = metrics.get(plan.weighted_by) if plan.weighted_by else 1.0
    if not isinstance(weight, int | float) or not weight > 0:
        raise PayloadError("bad weight", f"{plan.weighted_by} must be > 0, got {weight!r}")
    share = min(float(weight) / plan.max_weight, 1.0)
    try:
        plan.check_share(share)
    except ValueError as error:
        raise Refusal(NO_SUM, "secure-sum") from error
    return plan.grid.encode(values, clips, share, _draws(job, clips.size))


def _draws(job: _Job, count: int) -> NDArray[np.float64]:
    """Return the draws by which a node's numbers are rounded; of a device nobody else knows them."""
    assert job.sum is not None
    if not is_simulated():
        return np.random.default_rng(secrets.randbits(128)).random(count)
    node, number = job.call.partition_id, job.sum.sent.plan.number
    return generator(job.sum.seed, round=number, partition_id=node, purpose=Purpose.ROUNDING).random(count)


def _noise_key(job: _Job) -> bytes | None:
    """Return the key of a node's noise; None for the operating system's randomness.

    Noise from the run's seed, which anyone who knows the seed can remove, is for simulations: a node with
    ``entropy`` in its own config, or with a policy that does not allow ``seed``, never uses it.
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
    """Return a clipped metric and 1.0; two zeros if it is missing or not finite."""
    value = metrics.get(name)
    if not isinstance(value, int | float) or not np.isfinite(value):
        return [0.0, 0.0]
    return [float(np.clip(value, -METRIC_CLIP, METRIC_CLIP)), 1.0]


def _introduce(call: Call) -> RecordDict:
    """Answer ``query.sum_keys``: the node's public keys, and the number of its last sum in the run."""
    config = only_record(call.content, ConfigRecord, "bad config")
    links = NodeLinks(call, _seed(config), begin=True)
    links.keep(call.context)
    number = _whole(_state(call, links.run), "number")
    return RecordDict(
        {MASKED_SUM: ConfigRecord({"introduction": links.identity.introduction, "number": number})}
    )


def _reveal(call: Call) -> RecordDict:
    """Answer ``query.sum_shares``, once per sum: the shares that remove the masks for these survivors."""
    config = only_record(call.content, ConfigRecord, "bad config")
    try:
        shares = _shares(call, config)
    except ValueError as error:
        raise Refusal(NO_SUM, "secure-sum") from error
    return RecordDict({SHARES: ConfigRecord({"shares": shares})})


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
        raise ValueError("this node has already revealed its shares for this sum")
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
            # The link's ends are named as in the plan.
            secret = links.link(str(other), in_sum=True).secret
            end, share = Link(secret, links.run, str(own), str(other)), sealed[size * at : size * (at + 1)]
            opened[other] = end.open(share, plan.number, _purpose(key))
        except PayloadError:
            continue  # the reply marks this share as missing
    shares = revealed(plan, own, plan.graph(about), alive, opened)
    # Recorded in the ledger too: a device's context is written only with its answer, and two concurrent
    # messages would both find it unchanged.
    check_sum(plan.number)
    _keep(call, links.run, {**state, "told": True})
    return shares


def _purpose(key: bytes) -> str:
    return f"shares of a sum {key.hex()}"


def _seed(record: Mapping[str, Any]) -> int:
    seed = record.get("seed", 0)
    return seed if type(seed) is int else 0


# The node's state of the last sum: it never leaves the node, and a server cannot restore it.


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
