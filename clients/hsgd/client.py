"""The nodes of HSGD: hospitals, devices, and edge nodes that host all devices of a group.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", Algorithm 1, lines 13 to 26, and its baselines JFL
and TDCD, which are other groupings of the same steps. Differs: all Q steps of a local interval are one
message; encodings can be clipped and made noisy before they leave a node. ``step.py`` has the
arithmetic, ``work.py`` what becomes of a message, ``messages.py`` the records.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from flwr.app import ConfigRecord, Context, RecordDict

from hedgerow.clients.app import BatchClientApp, Sizes, whoami
from hedgerow.clients.handlers import Answer, each, outcome, together
from hedgerow.clients.hsgd.messages import ExchangeRequest, UpdateRequest, config_of
from hedgerow.clients.hsgd.own import own_party, party_of
from hedgerow.clients.hsgd.own_work import own_handlers, own_pair
from hedgerow.clients.hsgd.party import Party
from hedgerow.clients.hsgd.sealing import NotOpenedError, introduction_of
from hedgerow.clients.hsgd.work import ExchangeJob, encode_all, step_all, update_of, uploaded
from hedgerow.clients.mods.guard import Reveals, reveals
from hedgerow.clients.mods.mask import masked_sum_handlers
from hedgerow.clients.mods.update import Mod
from hedgerow.wire.calls import BatchHandler, Call
from hedgerow.wire.message_types import EXCHANGE, PAIR, UPDATE, UPLOAD, WHOAMI
from hedgerow.wire.records import config_in, records_of

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
    query.whoami     all                                                            as ``whoami`` says
    query.pair       all                                                            config ``pair``: role,
                                                                                    group, ids, encoding
    train.exchange   hospital  t, ids, grouping, compress; head, hospital *         head, zeta1
                     device    t, compress; device                                  zeta2 (1, e2)
                     edge      t, ids, grouping, compress; device *                 zeta2 (a, e2)
    train.update     hospital  t, steps, eta0, eta-period, mu, ids, upload; zeta2   head, hospital +; loss
                     device    t, steps, eta0, eta-period, mu; head, zeta1          device
                     edge      t, steps, eta0, eta-period, mu, ids, upload; head,   device +
                               zeta1
    train.upload     all       t; head, hospital or device; ``masked-sum``          within a sum, head and
                                                                                    hospital, or device
    ===============  ========  ===================================================  =======================

    - ``*`` where a round starts, and there alone: the node takes the model as that of iteration t. Without
      it the node goes on from its state, and refuses if that is not of iteration t, or of ``since`` before
      it, where the group missed what lies between: steps that the server did not hear of are taken back.
    - ``+`` with ``upload``, which ends the node's part in the round: it forgets its state.
    - ``ids`` is the batch, in the order of the rows of zeta1 and zeta2; those of an update are a part of the
      exchange's. The records are ``config``, ``arrays``, and ``metrics`` in replies to updates, with
      ``num-examples``.
    - eta_t = ``eta0`` / 2^floor(t / ``eta-period``), constant if that is 0 or absent; ``mu`` may be absent.
    - ``grouping`` is ``group`` (absent) or ``pairs``, where head (a, n0) and hospital (a, n1) have a row a
      pair. An edge's reply is the mean of its devices, summed one by one in the order of ids in float64.
    - ``compress``: head and encodings are in the ConfigRecord ``payload`` instead: ``head`` as bytes, the
      encodings as lists of bytes, one a row (``hedgerow.wire.sparse_rows``). What comes back so is recognised
      by itself.
    - ``sealed``, with ``seed``, ``peers`` and the record ``introductions``: hospital and devices read each
      other's heads and encodings, the server does not (``sealing.py``). ``query.pair`` then tells ``name``,
      ``introduction`` and ``pinned`` too.
    - ``upload-clip`` bounds the L2 norm of the change of what is uploaded, ``upload-noise-multiplier`` times
      it is the deviation of the noise on it; then no loss is told.
    - ``summed``: the answer to an update has no model and no loss; the node keeps them for ``train.upload``,
      whose arrays are the model that the interval, or of hospitals and edges the round, started from. Both
      are asked for within a secure sum (``hedgerow.wire.masked_sums``); weights are the people of a party.
    - ``clip`` bounds each encoding's L2 norm before it leaves the node, and ``noise-multiplier`` times it is
      the deviation of the Gaussian noise that is added then; ``noise-source`` is ``seed`` (absent), where
      the noise comes from (``seed`` of this config or of the run's, t, partition), for simulations, or
      ``entropy``, the operating system's; the node's own config can demand ``entropy``.

    Only models, encodings and a hospital's mean loss leave a node; features and labels never do. What a node
    keeps between messages is theta and the ids of its batch; a device keeps theta_2 from the exchange to the
    update.

    Parameters
    ----------
    load : Callable[[Context], Party]
        Finds a node's party. It is asked in each call: keep what is dear to make.
    own : Callable[[Context], bool] (default: never)
        Whether a node learns from the files that its node config names; ``load`` is not asked then, and
        ``own_work.py`` has the messages that come before training.
    sizes : Callable[[UserConfig], Sequence[int] or None] (default: not known)
        Returns how many people each party has, by partition id, see ``whoami``.
    mods : Sequence[Mod] (default: none)
        Flower's, see ``BatchClientApp``. Encodings and uploads are clipped and made noisy by the strategy's
        own settings: a mod of updates does not know which of a message's arrays are one.
    """

    def party(context: Context) -> Party:
        return party_of(context) if own(context) else load(context)

    def pair(call: Call) -> RecordDict:
        told = own_pair(own_party(call.context)) if own(call.context) else _pair(load(call.context))
        config = config_in(call.content, "config")
        about = records_of(told, ConfigRecord)["pair"]
        return RecordDict({"pair": ConfigRecord({**about, **introduction_of(call, config)})})

    def people(context: Context) -> int:
        if not own(context):
            return len(load(context).ids)
        try:
            return len(own_party(context).half.ids)
        except ValueError:  # Told in the answer to ``query.pair``, which costs this node its part.
            return 0

    steps = Reveals.NOISED | Reveals.KEPT
    return BatchClientApp(
        {
            WHOAMI: whoami(people, sizes=sizes),
            PAIR: reveals(Reveals.NOTHING, each(pair)),
            EXCHANGE: reveals(steps, _handler(party, ExchangeRequest.of, ExchangeJob.of, encode_all)),
            UPDATE: reveals(steps, _handler(party, UpdateRequest.of, update_of, step_all)),
            **own_handlers(),
            **masked_sum_handlers(each(lambda call: uploaded(call, party(call.context))), UPLOAD),
        },
        mods,
    )


def _pair(party: Party) -> RecordDict:
    about = ConfigRecord({"role": party.role, "group": party.group, "ids": list(party.places)})
    about["encoding"] = party.encoding
    return RecordDict({"pair": about})


def _handler(
    load: LoadParty,
    read: Callable[[ConfigRecord], Request],
    prepare: Callable[[Call, Party, Request], Job],
    work: Callable[[list[Job]], None],
) -> BatchHandler:
    """Return a handler that prepares call by call, works on all at once, and answers call by call."""

    def handle(calls: Sequence[Call]) -> list[Answer]:
        requests: dict[int, Request] = {}  # nodes that were told the same were sent the same object

        def job_of(call: Call) -> Job | RecordDict:
            config = config_of(call)
            if id(config) not in requests:
                requests[id(config)] = read(config)
            try:
                return prepare(call, load(call.context), requests[id(config)])
            except NotOpenedError as refused:
                return refused.told

        def worked(calls: Sequence[Call], jobs: Mapping[int, Job]) -> dict[int, Answer]:
            failed: dict[int, Exception] = {}
            if outcome(work, [*jobs.values()]) is not None:
                # A job whose state fits no model: the others are worked on without it.
                alone = {at: outcome(work, [job]) for at, job in jobs.items()}
                failed = {at: error for at, error in alone.items() if error is not None}
            return {at: failed[at] if at in failed else outcome(job.answer) for at, job in jobs.items()}

        return together(job_of, worked)(calls)

    return handle
