"""The nodes of HSGD: hospitals, devices, and edge nodes that host all devices of a group.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", Algorithm 1, lines 13 to 26, and its baselines JFL
and TDCD, which group the same steps differently. Differs: one message covers all Q steps of a local interval;
encodings can be clipped and noised before they leave a node. ``step.py`` has the arithmetic,
``messages.py`` the records.
"""

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict, UserConfig
from flwr.common import log
from numpy.typing import NDArray
from torch import Tensor

from hedgerow.clients.app import BatchClientApp, Sizes, whoami
from hedgerow.clients.handlers import Answer, each, outcome, together
from hedgerow.clients.hsgd.messages import (
    Channel,
    ExchangeRequest,
    NotOpenedError,
    PartyMemory,
    UpdateRequest,
    config_of,
    introduction_of,
    received,
    reply,
)
from hedgerow.clients.hsgd.own_data import own_handlers, own_pair, own_party, party_of
from hedgerow.clients.hsgd.step import (
    DeviceStack,
    HospitalStack,
    Party,
    block_size,
    can_vmap,
    device_steps,
    encodings,
    hospital_steps,
)
from hedgerow.clients.instructions import whole
from hedgerow.clients.mods.guard import Reveals, check_privacy, reveals, reveals_nothing
from hedgerow.clients.mods.update import Mod
from hedgerow.clients.training.draws import NodeDraws
from hedgerow.wire.calls import BatchHandler, Call
from hedgerow.wire.message_types import EXCHANGE, PAIR, UPDATE, WHOAMI
from hedgerow.wire.records import config_in

Request = TypeVar("Request")


class _Job(Protocol):
    call: Call
    party: Party

    def answer(self) -> RecordDict: ...


Job = TypeVar("Job", bound=_Job)
LoadParty = Callable[[Context], Party]


def hsgd_client(
    load: LoadParty,
    own: Callable[[UserConfig], bool] = lambda run_config: False,
    sizes: Sizes = lambda _: None,
    mods: Sequence[Mod] = (),
) -> BatchClientApp:
    """Return the ClientApp of HSGD, C-HSGD, JFL, TDCD and C-TDCD, for every role.

    ===============  ========  ===================================================  =======================
    type             to        config; arrays                                       reply
    ===============  ========  ===================================================  =======================
    query.whoami     all                                                            see ``whoami``
    query.pair       all                                                            config ``pair``: role,
                                                                                    group, ids, encoding
    train.exchange   hospital  t, ids, grouping, compress; head, hospital *         head, zeta1
                     device    t, compress; device                                  zeta2 (1, e2)
                     edge      t, ids, grouping, compress; device *                 zeta2 (a, e2)
    train.update     hospital  t, steps, eta0, eta-period, mu, ids, upload; zeta2   head, hospital +; loss
                     device    t, steps, eta0, eta-period, mu; head, zeta1          device
                     edge      t, steps, eta0, eta-period, mu, ids, upload; head,   device +
                               zeta1
    ===============  ========  ===================================================  =======================

    - ``*`` only at the start of a round: the model of iteration t. Without it, the node resumes from its
      state, which must be of iteration t, or of ``since`` before it if the group missed the intervals in
      between: the node then undoes steps that the server did not receive.
    - ``+`` with ``upload``, which ends the node's part in the round: the node deletes its state.
    - ``ids`` is the batch, in the order of the rows of zeta1 and zeta2; an update's batch is part of the
      exchange's. The records are ``config``, ``arrays``, and in replies to updates ``metrics`` with
      ``num-examples``.
    - eta_t = ``eta0`` / 2^floor(t / ``eta-period``), constant if that is 0 or absent; ``mu`` may be absent.
    - ``grouping`` is ``group`` (default) or ``pairs``: head (a, n0) and hospital (a, n1) then have a row per
      pair. An edge replies with the mean of its devices, summed in float64 in the order of ids.
    - ``compress``: head and encodings are in the ConfigRecord ``payload`` instead: ``head`` as bytes, the
      encodings as lists of bytes, one per row (``hedgerow.wire.sparse_rows``). Requests may use either form.
    - ``sealed``, with ``seed``, ``peers`` and the record ``introductions``: hospital and devices encrypt
      heads and encodings for each other (``messages.py``). The reply to ``query.pair`` then also has
      ``name``, ``introduction`` and ``pinned``.
    - ``upload-clip`` bounds the L2 norm of the uploaded change; ``upload-noise-multiplier`` times it is the
      standard deviation of its noise. Hospitals then report no loss.
    - ``clip`` bounds each encoding's L2 norm, and ``noise-multiplier`` times it is the standard deviation of
      its Gaussian noise. ``noise-source`` is ``seed`` (default), for simulations, with noise derived from
      ``seed`` (of this config or the run's), t and partition; or ``entropy``, the operating system's. A node
      config can require ``entropy``.

    Only models, encodings and a hospital's mean loss leave a node; features and labels never do. Between
    messages a node keeps theta and the ids of its batch; a device keeps theta_2 from the exchange to the
    update.

    Parameters
    ----------
    load : Callable[[Context], Party]
        Returns a node's party. Called for each message, so cache expensive work.
    own : Callable[[UserConfig], bool] (default: never)
        Whether the nodes of a run config learn from the files in their node configs, without ``load``;
        ``own_data.py`` documents the messages before training.
    sizes : Callable[[UserConfig], Sequence[int] or None] (default: not known)
        Returns the number of people of each party, by partition id, see ``whoami``.
    mods : Sequence[Mod] (default: none)
        Flower's mods, see ``BatchClientApp``. Use the strategy's settings to clip and noise encodings and
        uploads: a mod of updates cannot know which arrays of a message are an update.
    """

    def party(context: Context) -> Party:
        return party_of(context) if own(context.run_config) else load(context)

    def pair(call: Call) -> RecordDict:
        files = own(call.context.run_config)
        about = own_pair(own_party(call.context)) if files else _pair(load(call.context))
        link = introduction_of(call, config_in(call.content, "config"))
        return RecordDict({"pair": ConfigRecord({**about, **link})})

    def people(context: Context) -> int:
        if not own(context.run_config):
            return len(load(context).ids)
        try:
            return len(own_party(context).half.ids)
        except ValueError:  # The reply to ``query.pair`` reports it, and the server excludes this node.
            return 0

    def update(call: Call, party: Party, request: UpdateRequest) -> Update:
        return (HospitalUpdate if party.role == "hospital" else DeviceUpdate).of(call, party, request)

    steps = Reveals.NOISED
    return BatchClientApp(
        {
            WHOAMI: whoami(people, sizes=sizes),
            PAIR: reveals(Reveals.NOTHING, each(pair)),
            EXCHANGE: reveals(steps, _handler(party, ExchangeRequest.of, ExchangeJob.of, encode_all)),
            UPDATE: reveals(steps, _handler(party, UpdateRequest.of, update, step_all)),
            **own_handlers(),
        },
        mods,
    )


def _pair(party: Party) -> dict[str, Any]:
    return {
        "role": party.role, "group": party.group, "ids": list(party.places), "encoding": party.encoding,
    }  # fmt: skip


def _handler(
    load: LoadParty,
    read: Callable[[ConfigRecord], Request],
    prepare: Callable[[Call, Party, Request], Job],
    work: Callable[[list[Job]], None],
) -> BatchHandler:
    """Return a handler that prepares each call, works on all together, and answers each call."""

    def handle(calls: Sequence[Call]) -> list[Answer]:
        requests: dict[int, Request] = {}  # Nodes with equal configs receive the same object.

        def job_of(call: Call) -> Job | RecordDict:
            config = config_of(call)
            if id(config) not in requests:
                requests[id(config)] = read(config)
            try:
                return prepare(call, load(call.context), requests[id(config)])
            except NotOpenedError as refused:
                return refused.reply

        def worked(calls: Sequence[Call], jobs: Mapping[int, Job]) -> dict[int, Answer]:
            failed: dict[int, Exception] = {}
            if outcome(work, [*jobs.values()]) is not None:
                # A job failed, for example because its state fits no model: work on each job alone.
                alone = {at: outcome(work, [job]) for at, job in jobs.items()}
                failed = {at: error for at, error in alone.items() if error is not None}
            answers = dict[int, Answer](failed)
            for at, job in jobs.items():
                if at not in failed:
                    try:
                        answers[at] = job.answer()
                    except Exception as error:  # It must not fail the other nodes.
                        answers[at] = error
            return answers

        return together(job_of, worked)(calls)

    return handle


Vector = NDArray[Any]
Stack = TypeVar("Stack", HospitalStack, DeviceStack)

# Lines 13 to 18: encodings of the batch by the model of iteration t.


@dataclass
class ExchangeJob:
    """One node's part in an exchange; each model is a member of the stack."""

    call: Call
    party: Party
    request: ExchangeRequest
    memory: PartyMemory
    theta: Tensor  # (members, n)
    x: Tensor  # (members, batch, ...)
    channel: Channel | None
    zeta: Tensor = field(default_factory=lambda: torch.empty(0))  # (members, batch, e)

    @classmethod
    def of(cls, call: Call, party: Party, request: ExchangeRequest) -> "ExchangeJob":
        """Prepare one call."""
        ids, channel = _ids_of(party, request.ids), Channel.of(call, request.sealing, request.t)
        has_model = isinstance(call.content.get("arrays"), ArrayRecord)
        if party.role == "hospital" and not has_model:
            check_privacy("none")  # The head was trained since the round began, and is sent without noise.
        x, _ = party.rows(ids)
        if party.role == "device" or has_model:
            model = received(call, party.shapes, party.dtype)
            known = PartyMemory(request.t, model, start=model if request.keeps_start else {})
        else:
            # A group that missed intervals resumes from its last model that counts.
            if request.since is None:
                known = PartyMemory.at(call.context, request.t)
            else:
                known = PartyMemory.made(call.context, request.since)
            if known.pairs != request.pairs:
                raise ValueError("grouping must be the same in all messages of a round")
        arrays = known.of_pairs(ids) if request.pairs else known.arrays
        memory = PartyMemory(request.t, arrays, ids, request.pairs, known.start, made_at=request.since)
        theta = _tensor(memory.arrays["hospital" if party.role == "hospital" else "device"], party)
        if party.role == "hospital" and not request.pairs:
            return cls(call, party, request, memory, theta[None], x[None], channel)
        # Each device is a member, also on an edge node, so its results are the same anywhere.
        members = theta.expand(len(ids), theta.shape[-1])
        return cls(call, party, request, memory, members, x[:, None], channel)

    def terms(self) -> Hashable:
        """Return the key of calls that can share a stack."""
        return id(self.party.model), self.party.role == "hospital", self.x.shape[1:]

    def answer(self) -> RecordDict:
        """Keep the model of iteration t, and return the encodings, with the head from a hospital."""
        zeta = self.zeta.flatten(0, 1).cpu().numpy()  # (batch, e)
        release = self.request.release
        released = zeta if release is None else release(zeta, self.request.t, self.call)
        hospital = self.party.role == "hospital"
        kind = "zeta1" if hospital else "zeta2"
        head = {"head": self.memory.arrays["head"]} if hospital else {}
        if self.channel is None:
            content = reply({**head, kind: released}, compress=self.request.compress)
        else:
            content = self.channel.sealed(self.memory.ids, kind, rows=released, **head)
        self.memory.keep(self.call.context)
        return content


def encode_all(jobs: Sequence[ExchangeJob]) -> None:
    """Encode the batches of all jobs."""
    for stack, alone, plain in _stacks(jobs, ExchangeJob.terms):
        party = stack[0].party
        encoder = party.model.hospital if party.role == "hospital" else party.model.device
        theta, x = (torch.cat(parts) for parts in zip(*((job.theta, job.x) for job in stack), strict=True))
        if party.role != "hospital":
            _warn_of_revealing(party.encoding, x[0, 0].numel())
        with _draws(stack[0]) if plain else nullcontext():
            zeta = encodings(encoder, theta, x, alone, plain)  # (members, batch, e)
        if zeta.shape[2:] != (party.encoding,):
            raise ValueError(
                f"the encoder must give the shape ({party.encoding},), got {tuple(zeta.shape[2:])}"
            )
        for job, rows in zip(stack, torch.split(zeta, [len(job.theta) for job in stack]), strict=True):
            job.zeta = rows


@lru_cache(maxsize=64)
def _warn_of_revealing(encoding: int, features: int) -> None:
    if encoding >= features:
        log(
            logging.WARNING,
            "a device's encoding has %d numbers and its features %d: if the encoder can be inverted, the "
            "encoding reveals them; a shorter encoding, or clip and noise-multiplier, hides more",
            encoding,
            features,
        )


# Lines 22 to 26: Q steps with the exchanged encodings.


@dataclass
class _Update(Generic[Stack]):
    """One call of an update, with its members before and after their steps."""

    call: Call
    party: Party
    request: UpdateRequest
    ids: tuple[str, ...]
    pairs: bool
    stack: Stack
    start: Mapping[str, Vector]
    channel: Channel | None
    after: Sequence[Tensor] = ()


class HospitalUpdate(_Update[HospitalStack]):
    """One hospital's steps (5) and (6); in JFL each pair is a member with one sample."""

    @classmethod
    def of(cls, call: Call, party: Party, request: UpdateRequest) -> "HospitalUpdate":
        """Prepare one call."""
        ids, memory = _batch_of(call, party, request)
        channel, e2 = Channel.of(call, request.sealing, request.t), party.model.device_encoding
        if channel is None:
            zeta2 = received(call, {"zeta2": (len(ids), e2)}, party.dtype)["zeta2"]
        else:
            there, zeta2 = channel.opened(ids, "zeta2", e2, party.dtype)
            ids = tuple(ids[row] for row in there)
        x1, y = party.rows(ids)
        z2 = _tensor(zeta2, party)
        arrays = memory.of_pairs(ids) if memory.pairs else {k: v[None] for k, v in memory.arrays.items()}
        head, hospital = _tensor(arrays["head"], party), _tensor(arrays["hospital"], party)
        # A pair's batch is its one sample, a group's batch is all samples.
        x1, z2, y = (part[:, None] if memory.pairs else part[None] for part in (x1, z2, y))
        stack = HospitalStack(head, hospital, x1, z2, y)
        return cls(call, party, request, ids, memory.pairs, stack, memory.start, channel)

    def answer(self) -> RecordDict:
        """Keep the model of iteration t + Q, or return it if the round ends."""
        head, hospital, losses = (value.cpu().numpy() for value in self.after)
        arrays = {"head": head, "hospital": hospital}
        if not self.pairs:
            arrays = {key: block[0] for key, block in arrays.items()}
        # The loss has no noise, so it is not sent with protected uploads.
        loss = {"loss": float(losses.mean(dtype=np.float64))} if self.request.protected is None else {}
        return _answered(self, arrays, loss)


class DeviceUpdate(_Update[DeviceStack]):
    """The steps (7) of one device, or of all devices on an edge node, each a member."""

    @classmethod
    def of(cls, call: Call, party: Party, request: UpdateRequest) -> "DeviceUpdate":
        """Prepare one call."""
        ids, memory = _batch_of(call, party, request)
        x2, y = party.rows(ids)
        a, n0, e1 = len(ids), block_size(party.model.head), party.model.hospital_encoding
        own_heads = memory.pairs and party.role == "edge"
        channel = Channel.of(call, request.sealing, request.t)
        if channel is None:
            shapes = {"head": (a, n0) if own_heads else (n0,), "zeta1": (a, e1)}
            heads, zeta1 = received(call, shapes, party.dtype).values()
        else:
            # A device does not know whether its head is its own, so the config says it.
            lengths, own_heads = (n0, e1), request.own_heads
            heads, zeta1 = channel.opened_with_head(ids, "zeta1", lengths, party.dtype, own_heads)
        head, z1 = _tensor(heads, party), _tensor(zeta1, party)
        theta = _tensor(memory.of_pairs(ids)["device"], party)
        stack = DeviceStack(theta, head.expand(a, n0), z1[:, None], x2[:, None], y[:, None])
        start = memory.arrays if party.role == "device" else memory.start
        return cls(call, party, request, ids, memory.pairs, stack, start, channel)

    def answer(self) -> RecordDict:
        """Return a device's model; keep an edge's, or return its mean if the round ends."""
        theta = self.after[0].cpu().numpy()  # (a, n2)
        if self.party.role == "device":
            return _answered(self, {"device": theta[0]}, {})
        keeps_all = self.pairs and not self.request.upload
        return _answered(self, {"device": theta if keeps_all else _mean_of_rows(theta)}, {})


Update = HospitalUpdate | DeviceUpdate


def step_all(jobs: Sequence[Update]) -> None:
    """Make the steps of all jobs."""
    for alike, alone, plain in _stacks(jobs, _terms):
        first = alike[0]
        model, loss, request = first.party.model, first.party.loss, first.request
        parts = [torch.cat(values) for values in zip(*(job.stack for job in alike), strict=True)]
        how = request.rates, request.mu, alone, plain
        after: Sequence[Tensor]
        with _draws(first) if plain else nullcontext():
            if isinstance(first, HospitalUpdate):
                after = hospital_steps(model, loss, HospitalStack(*parts), *how)
            else:
                after = [device_steps(model, loss, DeviceStack(*parts), *how)]
        sizes = [len(job.stack.y) for job in alike]
        for job, *own in zip(alike, *(torch.split(value, sizes) for value in after), strict=True):
            job.after = own


def _terms(job: Update) -> Hashable:
    """Return the key of calls that can share a stack."""
    shapes, party, request = tuple(value.shape[1:] for value in job.stack), job.party, job.request
    return type(job), id(party.model), party.loss, shapes, request.rates, request.mu


def _draws(job: ExchangeJob | Update) -> AbstractContextManager[Any]:
    """Return a context in which a job that is computed by itself draws by seed, iteration and node."""
    config = config_of(job.call)
    seed = whole(config if "seed" in config else ConfigRecord({**job.call.context.run_config}), "seed", 0)
    return NodeDraws.of(job.party.model, (seed, job.request.t, job.call.partition_id))


def _batch_of(call: Call, party: Party, request: UpdateRequest) -> tuple[tuple[str, ...], PartyMemory]:
    """Return the batch, part of the exchange's batch, and the node's memory."""
    ids, memory = _ids_of(party, request.ids), PartyMemory.at(call.context, request.t)
    memory.places(ids)
    return ids, memory


def _answered(job: Update, arrays: dict[str, Vector], metrics: dict[str, float]) -> RecordDict:
    """Keep the model of iteration t + Q, or send it and forget it; reply with the metrics."""
    context, request, protected = job.call.context, job.request, job.request.protected
    sent = MetricRecord({"num-examples": len(job.ids), **metrics})
    if request.upload or job.party.role == "device":
        PartyMemory.forget(context)
        if protected is not None:
            arrays = protected(arrays, job.start, request.t, job.call)
        content = RecordDict({**reply(arrays), "metrics": sent})
    else:
        start = {} if protected is None else job.start
        memory = PartyMemory(request.t + len(request.rates), arrays, job.ids, job.pairs, start)
        memory.keep(context, stepped=True)
        if "loss" not in sent:
            reveals_nothing()
        content = RecordDict({"metrics": sent})
    return content if job.channel is None else job.channel.kept(content)


def _ids_of(party: Party, ids: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the batch; a device's is its one person."""
    if party.role == "device":
        return (str(party.ids[0]),)
    if ids is None:
        raise ValueError(
            f"ids is missing in the message's config: it must be a list of ids for a {party.role}"
        )
    return ids


def _tensor(array: Vector, party: Party) -> Tensor:
    """Copy an array of a message or state, which is read-only, to the party's device."""
    return torch.tensor(array, device=party.x.device)


def _stacks(jobs: Sequence[Job], terms: Callable[[Job], Hashable]) -> Iterator[tuple[list[Job], bool, bool]]:
    """Yield the jobs that can share a stack, in order of arrival, and ``alone`` and ``plain``.

    ``alone`` is whether the run config asks for results that do not depend on other members of a stack;
    ``plain`` whether the model cannot be computed in a stack: the job is then by itself.
    """
    stacks: dict[tuple[Hashable, bool, int | None], list[Job]] = {}
    stackable: dict[Hashable, bool] = {}
    for at, job in enumerate(jobs):
        party = job.party
        what = party.model, party.role == "hospital", party.loss
        if (kind := (*what, party.x.shape[1:])) not in stackable:
            stackable[kind] = can_vmap(*what, party.x, party.y)
        alone = job.call.context.run_config.get("training-mode") == "loop"
        stacks.setdefault((terms(job), alone, None if stackable[kind] else at), []).append(job)
    for (_, alone, by_itself), stack in stacks.items():
        yield stack, alone, by_itself is not None


def _mean_of_rows(rows: Vector) -> Vector:
    """Return the mean (1), summed in the order of ids, as the server does for device nodes."""
    total = np.zeros(rows.shape[1:])
    for own in rows:
        total += own
    mean: Vector = (total / len(rows)).astype(rows.dtype)
    return mean
