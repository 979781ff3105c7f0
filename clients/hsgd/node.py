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
from typing import Any, TypeVar

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
    NotOpenedError,
    PartyMemory,
    ProtectedUpload,
    Release,
    batch_of,
    config_of,
    introduction_of,
    received,
    reply,
    seed_of,
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
from hedgerow.clients.instructions import choice, flag, local_steps, nonnegative, whole
from hedgerow.clients.mods.guard import Reveals, check_privacy, reveals, reveals_nothing
from hedgerow.clients.mods.update import Mod
from hedgerow.clients.training.draws import NodeDraws
from hedgerow.wire.calls import BatchHandler, Call
from hedgerow.wire.message_types import EXCHANGE, PAIR, UPDATE, WHOAMI
from hedgerow.wire.records import config_in

Vector = NDArray[Any]
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
        if files:
            about = own_pair(own_party(call.context))
        else:
            party = load(call.context)
            about = {"role": party.role, "group": party.group, "ids": list(party.places)}
            about["encoding"] = party.encoding
        link = introduction_of(call, config_in(call.content, "config"))
        return RecordDict({"pair": ConfigRecord({**about, **link})})

    def people(context: Context) -> int:
        if not own(context.run_config):
            return len(load(context).ids)
        try:
            return len(own_party(context).half.ids)
        except ValueError:  # The reply to ``query.pair`` reports it, and the server excludes this node.
            return 0

    return BatchClientApp(
        {
            WHOAMI: whoami(people, sizes=sizes),
            PAIR: reveals(Reveals.NOTHING, each(pair)),
            EXCHANGE: reveals(Reveals.NOISED, _handler(party, ExchangeJob.of, encode_all)),
            UPDATE: reveals(Reveals.NOISED, _handler(party, UpdateJob.of, step_all)),
            **own_handlers(),
        },
        mods,
    )


# Lines 13 to 18: encodings of the batch by the model of iteration t.


@dataclass
class ExchangeJob:
    """One node's part in an exchange; each model is a member of the stack."""

    call: Call
    party: Party
    t: int
    compress: bool  # Whether open links carry top-k rows.
    release: Release | None
    memory: PartyMemory
    theta: Tensor  # (members, n)
    x: Tensor  # (members, batch, ...)
    channel: Channel | None
    zeta: Tensor = field(default_factory=lambda: torch.empty(0))  # (members, batch, e)

    @classmethod
    def of(cls, call: Call, party: Party) -> "ExchangeJob":
        """Prepare one call."""
        config, hospital = config_of(call), party.role == "hospital"
        t, since = whole(config, "t", 0), whole(config, "since", 0) if "since" in config else None
        if since is not None and since >= t:
            raise ValueError(f"since must be below t = {t}, got {since} in the message's config")
        pairs = "grouping" in config and choice(config, "grouping", ("group", "pairs")) == "pairs"
        compress = flag(config, "compress", default=False)
        if compress and pairs:
            raise ValueError("compress must be false with grouping 'pairs' in the message's config")
        ids, release, protected = batch_of(config, party), Release.of(config), ProtectedUpload.of(config)
        channel, has_model = Channel.of(call, config, t), isinstance(call.content.get("arrays"), ArrayRecord)
        if hospital and not has_model:
            check_privacy("none")  # The head was trained since the round began, and is sent without noise.
        x, _ = party.rows(ids)
        if party.role == "device" or has_model:
            model = received(call, party.shapes, party.dtype)
            known = PartyMemory(t, model, start={} if protected is None else model)
        else:
            # A group that missed intervals resumes from its last model that counts.
            known = PartyMemory.of(call.context, t, since)
            if known.pairs != pairs:
                raise ValueError("grouping must be the same in all messages of a round")
        arrays = known.of_pairs(ids) if pairs else known.arrays
        memory = PartyMemory(t, arrays, ids, pairs, known.start, made_at=since)
        theta = _tensor(arrays["hospital" if hospital else "device"], party)
        if hospital and not pairs:
            theta, x = theta[None], x[None]
        else:
            # Each device is a member, also on an edge node, so its results are the same anywhere.
            theta, x = theta.expand(len(ids), theta.shape[-1]), x[:, None]
        return cls(call, party, t, compress, release, memory, theta, x, channel)

    def terms(self) -> Hashable:
        """Return the key of calls that can share a stack."""
        return id(self.party.model), self.party.role == "hospital", self.x.shape[1:]

    def answer(self) -> RecordDict:
        """Keep the model of iteration t, and return the encodings, with the head from a hospital."""
        zeta = self.zeta.flatten(0, 1).cpu().numpy()  # (batch, e)
        released = zeta if self.release is None else self.release(zeta, self.t, self.call)
        hospital = self.party.role == "hospital"
        kind = "zeta1" if hospital else "zeta2"
        head = {"head": self.memory.arrays["head"]} if hospital else {}
        if self.channel is None:
            content = reply({**head, kind: released}, compress=self.compress)
        else:
            content = self.channel.sealed(self.memory.ids, kind, rows=released, **head)
        self.memory.keep(self.call.context)
        return content


def encode_all(jobs: Sequence[ExchangeJob]) -> None:
    """Encode the batches of all jobs."""
    for stack, alone, plain in _stacks(jobs):
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
class UpdateJob:
    """One call of an update, with its members before and after their steps."""

    call: Call
    party: Party
    t: int
    rates: tuple[float, ...]  # eta of each step.
    mu: float
    upload: bool
    protected: ProtectedUpload | None
    ids: tuple[str, ...]
    pairs: bool
    start: Mapping[str, Vector]
    stack: HospitalStack | DeviceStack
    channel: Channel | None
    after: Sequence[Tensor] = ()

    @classmethod
    def of(cls, call: Call, party: Party) -> "UpdateJob":
        """Prepare one call."""
        config = config_of(call)
        t, steps, eta0 = whole(config, "t", 0), local_steps(config, "steps"), nonnegative(config, "eta0")
        period = whole(config, "eta-period", 0) if "eta-period" in config else 0
        mu = nonnegative(config, "mu") if "mu" in config else 0.0
        upload, own_heads = flag(config, "upload", default=False), flag(config, "pairs", default=False)
        rates = tuple(eta0 * 0.5 ** (k // period) if period else eta0 for k in range(t, t + steps))
        protected = ProtectedUpload.of(config)
        ids, memory = batch_of(config, party), PartyMemory.of(call.context, t)
        memory.places(ids)  # The batch is part of the exchange's.
        channel, start = Channel.of(call, config, t), memory.start
        stack: HospitalStack | DeviceStack
        if party.role == "hospital":
            ids, stack = _hospital_stack(call, party, ids, memory, channel)
        else:
            # A device does not know whether its head is its own, so on sealed links the config says it.
            if channel is None:
                own_heads = memory.pairs and party.role == "edge"
            stack = _device_stack(call, party, ids, memory, channel, own_heads)
            start = memory.arrays if party.role == "device" else start
        return cls(
            call, party, t, rates, mu, upload, protected, ids, memory.pairs, start, stack, channel
        )  # fmt: skip

    def terms(self) -> Hashable:
        """Return the key of calls that can share a stack."""
        shapes, hospital = tuple(value.shape[1:] for value in self.stack), self.party.role == "hospital"
        return hospital, id(self.party.model), self.party.loss, shapes, self.rates, self.mu

    def answer(self) -> RecordDict:
        """Keep the model of iteration t + Q; or, at the end of the round and from a device, return it."""
        values = [value.cpu().numpy() for value in self.after]
        sent = MetricRecord({"num-examples": len(self.ids)})
        if self.party.role == "hospital":
            head, hospital, losses = values
            arrays = {"head": head, "hospital": hospital}
            if not self.pairs:
                arrays = {key: block[0] for key, block in arrays.items()}
            # The loss has no noise, so it is not sent with protected uploads.
            if self.protected is None:
                sent["loss"] = float(losses.mean(dtype=np.float64))
        elif self.party.role == "device":
            arrays = {"device": values[0][0]}
        else:
            (theta,) = values  # (a, n2)
            arrays = {"device": theta if self.pairs and not self.upload else _mean_of_rows(theta)}
        content = RecordDict()
        if self.upload or self.party.role == "device":
            PartyMemory.forget(self.call.context)
            if self.protected is not None:
                arrays = self.protected(arrays, self.start, self.t, self.call)
            content = reply(arrays)
        else:
            start = {} if self.protected is None else self.start
            memory = PartyMemory(self.t + len(self.rates), arrays, self.ids, self.pairs, start)
            memory.keep(self.call.context, stepped=True)
            if "loss" not in sent:
                reveals_nothing()
        content["metrics"] = sent
        return content if self.channel is None else self.channel.kept(content)


def _hospital_stack(
    call: Call, party: Party, ids: tuple[str, ...], memory: PartyMemory, channel: Channel | None
) -> tuple[tuple[str, ...], HospitalStack]:
    """Return a hospital before its steps (5) and (6), and the people with a zeta_2.

    In JFL each pair is a member with one sample.
    """
    e2 = party.model.device_encoding
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
    return ids, HospitalStack(head, hospital, x1, z2, y)


def _device_stack(
    call: Call,
    party: Party,
    ids: tuple[str, ...],
    memory: PartyMemory,
    channel: Channel | None,
    own_heads: bool,
) -> DeviceStack:
    """Return one device, or all on an edge node, before their steps (7), each a member.

    ``own_heads`` if each row of encodings comes with its pair's head.
    """
    x2, y = party.rows(ids)
    a, n0, e1 = len(ids), block_size(party.model.head), party.model.hospital_encoding
    if channel is None:
        shapes = {"head": (a, n0) if own_heads else (n0,), "zeta1": (a, e1)}
        heads, zeta1 = received(call, shapes, party.dtype).values()
    else:
        heads, zeta1 = channel.opened_with_head(ids, "zeta1", (n0, e1), party.dtype, own_heads)
    head, z1 = _tensor(heads, party), _tensor(zeta1, party)
    theta = _tensor(memory.of_pairs(ids)["device"], party)
    return DeviceStack(theta, head.expand(a, n0), z1[:, None], x2[:, None], y[:, None])


def step_all(jobs: Sequence[UpdateJob]) -> None:
    """Make the steps of all jobs."""
    for alike, alone, plain in _stacks(jobs):
        first = alike[0]
        model, loss = first.party.model, first.party.loss
        parts = [torch.cat(values) for values in zip(*(job.stack for job in alike), strict=True)]
        how = first.rates, first.mu, alone, plain
        after: Sequence[Tensor]
        with _draws(first) if plain else nullcontext():
            if first.party.role == "hospital":
                after = hospital_steps(model, loss, HospitalStack(*parts), *how)
            else:
                after = [device_steps(model, loss, DeviceStack(*parts), *how)]
        sizes = [len(job.stack.y) for job in alike]
        for job, *own in zip(alike, *(torch.split(value, sizes) for value in after), strict=True):
            job.after = own


# Both.


Job = TypeVar("Job", ExchangeJob, UpdateJob)


def _handler(
    load: LoadParty, prepare: Callable[[Call, Party], Job], work: Callable[[list[Job]], None]
) -> BatchHandler:
    """Return a handler that prepares each call, works on all together, and answers each call."""

    def job_of(call: Call) -> Job | RecordDict:
        try:
            return prepare(call, load(call.context))
        except NotOpenedError as refused:
            return refused.reply

    def worked(calls: Sequence[Call], jobs: Mapping[int, Job]) -> dict[int, Answer]:
        answers = dict[int, Answer]()
        # If a job fails, for example because its state fits no model, work on each alone.
        all_failed = isinstance(outcome(work, [*jobs.values()]), Exception)
        for at, job in jobs.items():
            error = outcome(work, [job]) if all_failed else None
            answers[at] = outcome(job.answer) if error is None else error
        return answers

    return together(job_of, worked)


def _draws(job: ExchangeJob | UpdateJob) -> AbstractContextManager[Any]:
    """Return a context in which a job that is computed by itself draws by seed, iteration and node."""
    return NodeDraws.of(job.party.model, (seed_of(job.call), job.t, job.call.partition_id))


def _tensor(array: Vector, party: Party) -> Tensor:
    """Copy an array of a message or state, which is read-only, to the party's device."""
    return torch.tensor(array, device=party.x.device)


def _stacks(jobs: Sequence[Job]) -> Iterator[tuple[list[Job], bool, bool]]:
    """Yield the jobs that can share a stack, and ``alone`` and ``plain``.

    ``alone`` is whether the run config asks for results that do not depend on other members of a stack;
    ``plain`` whether the model cannot be computed in a stack: the job is then by itself.
    """
    stacks: dict[tuple[Hashable, bool], list[Job]] = {}
    for job in jobs:
        alone = job.call.context.run_config.get("training-mode") == "loop"
        stacks.setdefault((job.terms(), alone), []).append(job)
    for (_, alone), stack in stacks.items():
        party = stack[0].party
        if can_vmap(party.model, party.role == "hospital", party.loss, party.x, party.y):
            yield stack, alone, False
        else:
            yield from (([job], alone, True) for job in stack)


def _mean_of_rows(rows: Vector) -> Vector:
    """Return the mean (1), summed in the order of ids, as the server does for device nodes."""
    total = np.zeros(rows.shape[1:])
    for own in rows:
        total += own
    mean: Vector = (total / len(rows)).astype(rows.dtype)
    return mean
