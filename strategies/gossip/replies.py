"""What a node's replies say: its introduction, its next communication, and the model that it shows."""

import math

import numpy as np
from flwr.app import MetricRecord, RecordDict

from hedgerow.strategies.federation import only_arrays
from hedgerow.strategies.gossip.monitor import Sight
from hedgerow.strategies.gossip.state import Appointment
from hedgerow.strategies.inbox import Node
from hedgerow.wire.records import PayloadError, config_in, records_of, view

__all__ = ["introduced", "next_communication", "seen"]


def introduced(node: Node, content: RecordDict) -> Appointment:
    """Return a node's answer to a hello.

    Raises
    ------
    PayloadError
        With reason ``bad hello`` or ``bad next``.
    """
    kappa = config_in(content, "hello").get("kappa")
    if not isinstance(kappa, int) or kappa < 1:
        raise PayloadError("bad hello", f"kappa={kappa!r}, expected an integer >= 1")
    return Appointment(node.node_id, kappa, *next_communication(content, "hello", after=-1))


def next_communication(content: RecordDict, key: str, after: int) -> tuple[int, list[int]]:
    """Return the iteration and the neighbours of a node's next communication.

    Raises
    ------
    PayloadError
        With reason ``bad next``, unless the iteration comes after ``after``.
    """
    record = config_in(content, key)
    k, want = record.get("next"), record.get("want", [])
    if not isinstance(k, int) or k <= after:
        raise PayloadError("bad next", f"next={k!r}, expected an iteration after {after}")
    if not isinstance(want, list):
        raise PayloadError("bad next", f"want={want!r}, expected a list of partition ids")
    return k, [j for j in want if isinstance(j, int)]


def seen(node: Node, content: RecordDict, n: int) -> Sight:
    """Return a node's model (n,) and what it tells of it; what is not finite is for the monitor to say.

    Raises
    ------
    PayloadError
        With reason ``bad arrays`` or ``wrong shape``.
    """
    arrays = only_arrays(content)
    if len(arrays) != 1:
        raise PayloadError("bad arrays", f"{len(arrays)} arrays, expected the model alone")
    model = view(next(iter(arrays.values())))
    if model.shape != (n,):
        raise PayloadError("wrong shape", f"the model has {model.shape}, expected ({n},)")
    told = next(iter(records_of(content, MetricRecord).values()), MetricRecord())
    objective, at_mean = (told.get(key) for key in ("objective", "mean-objective"))
    return Sight(
        model.astype(np.float64),
        float(objective) if isinstance(objective, int | float) else math.nan,
        float(at_mean) if isinstance(at_mean, int | float) else math.nan,
    )
