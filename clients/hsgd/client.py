"""The nodes of HSGD: hospitals, devices, and edge nodes that host all devices of a group.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", Algorithm 1, lines 13 to 26, and its baselines JFL
and TDCD, which group the same steps differently. Differs: one message covers all Q steps of a local interval;
encodings can be clipped and noised before they leave a node. ``step.py`` has the arithmetic, ``work.py`` the
handling of messages, ``messages.py`` the records.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from flwr.app import ConfigRecord, Context, RecordDict

from hedgerow.clients.app import BatchClientApp, Sizes, whoami
from hedgerow.clients.handlers import Answer, each, outcome, together
from hedgerow.clients.hsgd.messages import ExchangeRequest, UpdateRequest, config_of
from hedgerow.clients.hsgd.own import own_party, party_of
from hedgerow.clients.hsgd.own_work import own_handlers, own_pair
from hedgerow.clients.hsgd.party import Party
from hedgerow.clients.hsgd.sealing import NotOpenedError, introduction_of
from hedgerow.clients.hsgd.work import ExchangeJob, encode_all, step_all, update_of
from hedgerow.clients.mods.guard import Reveals, reveals
from hedgerow.clients.mods.update import Mod
from hedgerow.wire.calls import BatchHandler, Call
from hedgerow.wire.message_types import EXCHANGE, PAIR, UPDATE, WHOAMI
from hedgerow.wire.records import config_in

__all__ = ["hsgd_client"]

Request = TypeVar("Request")


class _Job(Protocol):
    def answer(self) -> RecordDict: ...


Job = TypeVar("Job", bound=_Job)
LoadParty = Callable[[Context], Party]


def hsgd_client(
    load: LoadParty,
    own: Callable[[Context], bool] = lambda context: False,
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
      heads and encodings for each other (``sealing.py``). The reply to ``query.pair`` then also has ``name``,
      ``introduction`` and ``pinned``.
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
    own : Callable[[Context], bool] (default: never)
        Whether a node learns from the files in its node config, without ``load``; ``own_work.py`` documents
        the messages before training.
    sizes : Callable[[UserConfig], Sequence[int] or None] (default: not known)
        Returns the number of people of each party, by partition id, see ``whoami``.
    mods : Sequence[Mod] (default: none)
        Flower's mods, see ``BatchClientApp``. Use the strategy's settings to clip and noise encodings and
        uploads: a mod of updates cannot know which arrays of a message are an update.
    """

    def party(context: Context) -> Party:
        return party_of(context) if own(context) else load(context)

    def pair(call: Call) -> RecordDict:
        about = own_pair(own_party(call.context)) if own(call.context) else _pair(load(call.context))
        link = introduction_of(call, config_in(call.content, "config"))
        return RecordDict({"pair": ConfigRecord({**about, **link})})

    def people(context: Context) -> int:
        if not own(context):
            return len(load(context).ids)
        try:
            return len(own_party(context).half.ids)
        except ValueError:  # The reply to ``query.pair`` reports it, and the server excludes this node.
            return 0

    steps = Reveals.NOISED
    return BatchClientApp(
        {
            WHOAMI: whoami(people, sizes=sizes),
            PAIR: reveals(Reveals.NOTHING, each(pair)),
            EXCHANGE: reveals(steps, _handler(party, ExchangeRequest.of, ExchangeJob.of, encode_all)),
            UPDATE: reveals(steps, _handler(party, UpdateRequest.of, update_of, step_all)),
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
            return {at: failed[at] if at in failed else outcome(job.answer) for at, job in jobs.items()}

        return together(job_of, worked)(calls)

    return handle
