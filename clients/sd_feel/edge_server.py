"""An edge server that is a node: the mean of its clients' models, eq. (3), and gossip steps, eq. (5).

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data", Algorithm 1. Differs: Flower's nodes exchange messages with the server only,
which relays the models of clients and neighbours. Between two messages the edge server keeps its model in
``context.state``. A Byzantine-robust rule may replace both sums.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from numpy.typing import NDArray

from hedgerow.clients.handlers import each
from hedgerow.clients.instructions import choice, only_config, string, whole
from hedgerow.clients.mods.guard import Reveals, reveals
from hedgerow.wire.calls import RUN_KEY, BatchHandler, Call
from hedgerow.wire.edge_servers import (
    CLIENT,
    EDGE,
    LACKS,
    MODEL,
    MODELS,
    OWN,
    RULE,
    WEIGHTS,
    cluster_means,
    robust_mean,
    robust_step,
    weighted_sum,
)
from hedgerow.wire.message_types import GOSSIP, INTRA
from hedgerow.wire.records import finite_views, lazy_array
from hedgerow.wire.robust_means import Aggregation, neighbourhood_rule

# In ``context.state``: the model, and its run and the token of the instruction that produced it.
_STATE_MODEL, _STATE_NOTE = "edge-model", "edge"
_DTYPES = ("float32", "float64")

Vector = NDArray[np.floating]


def node_role(context: Context) -> str:
    """Return whether a node is a ``"client"`` or an ``"edge"`` server.

    That is the node config's ``role``; a ValueError if it is another one. Without it, partitions 0 to
    ``num-clients`` - 1 of the run config are clients and those above are edge servers.
    """
    role = context.node_config.get("role")
    if role is None:
        clients = context.run_config.get("num-clients")
        # A node without a partition id of its own is a client.
        partition = int(context.node_config.get("partition-id", 0))
        return EDGE if clients is not None and partition >= int(clients) else CLIENT
    if role not in (CLIENT, EDGE):
        raise ValueError(f"role must be {CLIENT!r} or {EDGE!r}, got {role!r} in the node config")
    return str(role)


def edge_server_handlers() -> dict[str, BatchHandler]:
    """Return the handlers of an edge server, by message type.

    ==============  ======================================  =============================================
    type            config                                  records
    ==============  ======================================  =============================================
    train.intra     token                                   ``models`` of clients, ``weights`` |S_i|
    train.gossip    token, builds-on, server, dtype,        ``models`` of neighbours, ``weights`` p_{j,d}
                    columns                                 with its own; ``own`` where it is sent anew
    ==============  ======================================  =============================================

    - Models are vectors (M,) of float32 or float64, under the sender's number.
    - The reply is the new model (M,), as ``model`` of the one ArrayRecord; it is stored under ``token``.
    - A gossip step starts from the model produced by the instruction ``builds-on``. An edge server without it
      replies with ``lacks`` in a ConfigRecord, and receives ``own`` with the retry.
    - ``aggregation`` in the config (absent: the mean) is the rule for its clients' updates, and for its model
      and its neighbours': ``median``, ``trimmed-mean(b)`` or ``clipped(tau)``. Then ``train.intra`` also has
      ``builds-on`` or ``own``, the model that its clients were sent, and the weights |S_i| are ignored.
    - ``columns`` are the mixed ranges, [start, end, start, end, …]; the rest (running statistics) stays.
      ``dtype`` is that of the result: float64 between two steps.
    """
    # An edge server has no data: its answers are computed from its messages alone.
    return {INTRA: reveals(Reveals.NOTHING, each(_intra)), GOSSIP: reveals(Reveals.NOTHING, each(_gossip))}


def _intra(call: Call) -> RecordDict:
    models, weights = _inputs(call)
    if models.keys() != weights.keys() or min(weights.values(), default=0.0) <= 0:
        raise ValueError(f"weights must be a number > 0 for each of {sorted(models)}, got {weights}")
    rule = _rule(call)
    if not rule.is_mean:
        own = _own(call)
        if own is None:
            return _lacks(call)
        _check_sizes({**models, -1: own})
        return _keep(call, robust_mean(own, list(models.values()), rule))
    first = next(iter(models.values()))
    replies = ((0, weights[sender], model) for sender, model in models.items())
    return _keep(call, cluster_means(replies, first[None])[0])  # (3)


def _gossip(call: Call) -> RecordDict:
    config = only_config(call)
    models, weights = _inputs(call)
    server, dtype = whole(config, "server", 0), choice(config, "dtype", _DTYPES)
    own = _own(call)
    if own is None:
        return _lacks(call)
    models[server] = own
    if models.keys() != weights.keys():
        raise ValueError(f"models must be one for each of {sorted(weights)}, got {sorted(models)}")
    _check_sizes(models)
    slices, rule = _slices(config, len(own)), _rule(call)
    if not rule.is_mean:
        return _keep(call, _robustly_mixed(server, models, weights, slices, rule).astype(dtype))
    mixed = own.astype(np.float64)
    for here in slices:
        out = mixed[here]
        terms = ((weight, models[sender][here]) for sender, weight in weights.items())
        weighted_sum(terms, out, np.empty_like(out))  # (5)
    return _keep(call, mixed.astype(dtype))


def _robustly_mixed(
    server: int,
    models: Mapping[int, Vector],
    weights: Mapping[int, float],
    slices: Sequence[slice],
    rule: Aggregation,
) -> NDArray[np.float64]:
    """Return the server's model after a robust step on the mixed entries; norms are over all of these."""
    result = models[server].astype(np.float64)
    parts = {
        sender: np.concatenate([np.zeros(0), *(models[sender][here].astype(np.float64) for here in slices)])
        for sender in weights
    }
    mixed, start = robust_step(server, parts, weights, rule), 0
    for here in slices:
        size = here.stop - here.start
        result[here] = mixed[start : start + size]
        start += size
    return result


def _lacks(call: Call) -> RecordDict:
    return RecordDict({"edge": ConfigRecord({LACKS: whole(only_config(call), "builds-on", 0)})})


def _rule(call: Call) -> Aggregation:
    config = only_config(call)
    return neighbourhood_rule(string(config, RULE) if RULE in config else "mean")


def _check_sizes(models: Mapping[int, Vector]) -> None:
    if len({len(model) for model in models.values()}) != 1:
        sizes = {sender: len(model) for sender, model in models.items()}
        raise ValueError(f"models must have one size, got {sizes}")


def _inputs(call: Call) -> tuple[dict[int, Vector], dict[int, float]]:
    """Return the models and weights of a message by sender, ascending: the order of every sum."""
    if node_role(call.context) != EDGE:
        raise ValueError(
            f"partition {call.partition_id} must be an edge for {call.message_type}, got a client"
        )
    records = call.content.array_records
    models = _vectors(records[MODELS]) if MODELS in records else {}
    weights = call.content.metric_records.get(WEIGHTS, MetricRecord())
    numbers = {int(sender): weight for sender, weight in weights.items()}
    bad = [w for w in numbers.values() if not isinstance(w, int | float) or not math.isfinite(w)]
    if bad:
        raise ValueError(f"weights must be finite numbers, got {bad[0]!r}")
    return (
        {sender: models[str(sender)] for sender in sorted(map(int, models))},
        {sender: float(numbers[sender]) for sender in sorted(numbers)},  # type: ignore[arg-type]
    )


def _vectors(record: ArrayRecord) -> dict[str, Vector]:
    vectors = finite_views(record)
    for key, values in vectors.items():
        if values.ndim != 1 or str(values.dtype) not in _DTYPES:
            raise ValueError(
                f"model {key} must be a vector of {' or '.join(_DTYPES)}, got {values.dtype} of shape "
                f"{values.shape}"
            )
    return vectors


def _own(call: Call) -> Vector | None:
    """Return the model to start from: the message's, or the stored one if it is that of ``builds-on``."""
    records, state = call.content.array_records, call.context.state
    if OWN in records:
        return _vectors(records[OWN])[MODEL]
    note = state.config_records.get(_STATE_NOTE, ConfigRecord())
    kept = (note.get(RUN_KEY), note.get("token"))
    if kept != (str(call.context.run_id), whole(only_config(call), "builds-on", 0)):
        return None
    return _vectors(state.array_records[_STATE_MODEL])[MODEL]


def _keep(call: Call, model: Vector) -> RecordDict:
    """Store a new model under the message's token, and return the reply with it."""
    if not np.isfinite(model).all():
        raise ValueError("the new model has NaN or infinity: models and weights must have a finite sum")
    record = ArrayRecord()
    record[MODEL] = lazy_array(model)
    note = ConfigRecord({"token": whole(only_config(call), "token", 1)})
    note[RUN_KEY] = str(call.context.run_id)
    call.context.state[_STATE_MODEL] = record
    call.context.state[_STATE_NOTE] = note
    return RecordDict({"arrays": record})


def _slices(config: ConfigRecord, size: int) -> list[slice]:
    value = config.get("columns")
    bounds = [bound for bound in value if isinstance(bound, int)] if isinstance(value, list) else [-1]
    if bounds != value or len(bounds) % 2 or [0, *bounds, size] != sorted([0, *bounds, size]):
        raise ValueError(
            f"columns must be ascending pairs from 0 to {size}, got {value!r} in the message's config"
        )
    return [slice(start, end) for start, end in zip(bounds[::2], bounds[1::2], strict=True)]
