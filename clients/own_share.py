"""A node's own data in a run: read once per process, split, described and standardised.

Errors in the data go to the node's log in full. The server gets no file names, column names or cell values.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from logging import ERROR, INFO
from math import isfinite
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, MetricRecord, RecordDict
from flwr.common import log
from numpy.typing import NDArray
from torch import Tensor

from hedgerow.clients.handlers import each
from hedgerow.clients.mods.guard import Reveals, check_pooled, is_guarded, reveals
from hedgerow.clients.stored_settings import store_settings, stored_settings
from hedgerow.tasks import (
    OWN,
    OwnData,
    OwnSource,
    Standardisation,
    check_takes,
    in_training,
    moments,
    num_features,
    parse_classes,
    parse_standardise,
    read_own,
)
from hedgerow.wire.calls import BatchHandler, Call, LocalDataError
from hedgerow.wire.message_types import STANDARDISE, STATISTICS
from hedgerow.wire.process import is_simulated
from hedgerow.wire.records import config_in
from hedgerow.wire.seeds import Purpose, generator

_RECORD = "standardise"  # in the message and in the node's state
_MOST_HELD_OUT = 0.9
_LEAST_SAMPLES = 5


@dataclass(frozen=True, eq=False)
class OwnShare:
    """A node's own data, ready for training. The arrays are shared: never change them."""

    source: OwnSource
    # All samples, float32 or int64 (N, ...) and int64 (N,), standardised as the run requires.
    x: NDArray[Any]
    y: NDArray[np.int64]
    num_classes: int
    # Disjoint ascending indices of the training and evaluation samples; ``held_out`` may be empty.
    part: NDArray[np.int64]
    held_out: NDArray[np.int64]
    _resident: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return x and y on a device; they are copied there once."""
        if device not in self._resident:
            self._resident[device] = (
                torch.from_numpy(self.x).to(device),
                torch.from_numpy(self.y).to(device),
            )
        return self._resident[device]


@dataclass
class _Held:
    """A node's data, and the standardisation applied to them; the unstandardised ones are not kept."""

    data: OwnData
    part: NDArray[np.int64]
    held_out: NDArray[np.int64]
    applied: Standardisation | None = None
    share: OwnShare | None = None  # the same object until the data change, since callers cache by identity
    logged: bool = False


_Key = tuple[OwnSource, str, float, int, str]


def has_own(context: Context) -> bool:
    """Return whether the run's nodes use their own data."""
    return bool(context.run_config.get("partition") == OWN)


def other_data(context: Context) -> ValueError:
    """Return the error of a node with its own data that is asked to train on other data.

    The run config of such a run names files and modules; this node opens only those in its node config.
    """
    return ValueError(
        "partition must be 'own' for this node, whose node config names data of its own, got "
        f"{context.run_config.get('partition')!r} in the run config"
    )


def own_share(context: Context) -> OwnShare:
    """Return a node's training and evaluation samples.

    The run config gives ``classes`` and ``standardise``; the node config gives the keys of ``OwnSource.of``
    and ``name``, which keys the held-out split. The split's size (``holdout``) and seed (``holdout-seed``)
    come from the node config; in a simulation the run config's ``holdout`` and ``seed`` are the fallback.

    Raises
    ------
    ValueError
        If the data are invalid (see the node's log), or the run is standardised by federated statistics that
        this node has not received.
    """
    key = _key(context)
    held = _held(key)
    wanted = None if held.data.is_integer else _standardisation(context)
    if held.applied not in (None, wanted):
        held.data, held.applied, held.share = _read(key), None, None
    if wanted is not None and held.applied is None:
        held.applied, held.share = wanted, None
        try:
            held.data = replace(held.data, x=wanted.apply(held.data.x))
        except ValueError:
            held.data, held.applied = _read(key), None
            raise
    if held.share is None:
        data = held.data
        x = in_training(data.x, data.features)
        held.share = OwnShare(key[0], x, data.y, data.num_classes, held.part, held.held_out)
    return held.share


def own_introduction(context: Context) -> Mapping[str, Any]:
    """Return the description of its own data for a node's introduction; empty in other runs.

    The node's log gets one line about what was read. A model that cannot take such samples is an error.
    """
    if not has_own(context):
        return {}
    held = _held(_key(context))
    data = held.data
    try:
        check_takes(str(context.run_config.get("model", "")), data.dtype)
    except ValueError as error:
        raise data_not_valid(error) from None
    if not held.logged:
        held.logged = True
        log(INFO, "%s", data.reading)
    return {"input-shape": list(data.input_shape), "num-classes": data.num_classes, "dtype": data.dtype}


def own_handlers() -> dict[str, BatchHandler]:
    """Return the handlers of ``query.statistics`` and ``query.standardise``."""
    return {
        STATISTICS: each(_tell_statistics),
        STANDARDISE: reveals(Reveals.NOTHING, each(_keep_standardisation)),
    }


def own_part(context: Context) -> int:
    """Return the number of a node's training samples."""
    return len(_held(_key(context)).part)


def check_enough(context: Context, samples: int) -> None:
    """Raise ValueError if a statistic or metric covers fewer samples than the owner's ``min-samples`` (5).

    Simulated nodes are not checked.
    """
    if not is_guarded() or not has_own(context):
        return
    least = context.node_config.get("min-samples", _LEAST_SAMPLES)
    if not isinstance(least, int) or isinstance(least, bool) or least < 1:
        raise ValueError(f"min-samples must be an integer >= 1 in the node config, got {least!r}")
    if samples < least:
        raise ValueError(f"{samples} samples are measured or pooled; min-samples is {least}")


def _key(context: Context) -> _Key:
    run, node = context.run_config, context.node_config
    # The owner fixes the split: a server that could vary it would learn single samples from differences.
    ours = is_guarded()
    holdout = node.get("holdout", 0.2 if ours else run.get("holdout", 0.2))
    seed = node.get("holdout-seed", 0 if ours else run.get("seed", 0))
    if (
        isinstance(holdout, bool)
        or not isinstance(holdout, int | float)
        or not 0 <= holdout <= _MOST_HELD_OUT
    ):
        raise ValueError(f"holdout must be a number from 0 to {_MOST_HELD_OUT}, got {holdout!r}")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"the seed of the held-out share must be an integer >= 0, got {seed!r}")
    name = str(node.get("name") or f"partition-{node.get('partition-id')}")
    try:
        source = OwnSource.of(node)
    except ValueError as error:
        raise data_not_valid(error) from None
    return source, str(run.get("classes", "")), float(holdout), seed, name


@lru_cache(maxsize=4096)
def _held(key: _Key) -> _Held:
    _, _, holdout, seed, name = key
    data = _read(key)
    # Keyed by name, not by partition id, so that the split does not depend on the order of arrival.
    digest = sha256(name.encode()).digest()
    stream = generator(seed, partition_id=int.from_bytes(digest[:8]), purpose=Purpose.HOLDOUT)
    samples = len(data.y)
    count = min(samples - 1, max(1, round(holdout * samples))) if holdout else 0
    order = stream.permutation(samples)
    return _Held(data, np.sort(order[count:]), np.sort(order[:count]))


def _read(key: _Key) -> OwnData:
    source, classes, *_ = key
    try:
        return read_own(source, parse_classes(classes))
    except Exception as error:  # the owner's own loading function may raise anything
        raise data_not_valid(error) from None


def data_not_valid(error: Exception) -> LocalDataError:
    """Return the error for the server: complete in a simulation, else the details go to the node's log."""
    if is_simulated():
        return LocalDataError(f"local data are not valid: {error}")
    log(ERROR, "This node's own data are not used: %s", error)
    return LocalDataError("this node's own data are not valid; its log says why")


def _standardisation(context: Context) -> Standardisation | None:
    setting = str(context.run_config.get("standardise", "none"))
    if setting != "federated":
        return parse_standardise(setting)
    if (kept := stored_settings(context, _RECORD)) is None:
        raise ValueError(f"this node has no standardisation for this run: {STANDARDISE!r} must come first")
    return Standardisation(tuple(_numbers(kept, "mean")), tuple(_numbers(kept, "std")))


def _tell_statistics(call: Call) -> RecordDict:
    """Answer ``query.statistics``: count, and each feature's mean and squared deviations over ``part``.

    PermissionError if the node config has ``share-statistics = false``.
    """
    if not call.context.node_config.get("share-statistics", True):
        raise PermissionError(
            "share-statistics is false in this node's config: its features' means stay here"
        )
    key = _key(call.context)
    held = _held(key)
    check_enough(call.context, len(held.part))
    if held.data.is_integer:
        raise ValueError("samples of integers, such as token ids, have no mean")
    x = held.data.x if held.applied is None else _read(key).x
    found = moments(x if not held.held_out.size else x[held.part])
    sums = (np.array([found.count]), found.mean, found.squares)
    check_pooled("moments", f"{key[0].data} {key[-1]}", *(part.tobytes() for part in sums))
    metrics: dict[str, Any] = {
        "count": found.count,
        "mean": found.mean.tolist(),
        "squares": found.squares.tolist(),
    }
    return RecordDict({"statistics": MetricRecord(metrics)})


def _keep_standardisation(call: Call) -> RecordDict:
    """Answer ``query.standardise``: store each feature's ``mean`` and ``std`` for this run."""
    sent = config_in(call.content, _RECORD)
    mean, std = _numbers(sent, "mean"), _numbers(sent, "std")
    features = num_features(_held(_key(call.context)).data.input_shape)
    if not len(mean) == len(std) == features or not all(value > 0 for value in std):
        raise ValueError(
            f"mean and std must be {features} numbers each, deviations > 0, got {len(mean)} and {len(std)} "
            "in the message"
        )
    store_settings(call.context, _RECORD, {"mean": mean, "std": std})
    return RecordDict({"metrics": MetricRecord({"num-examples": own_part(call.context)})})


def _numbers(sent: ConfigRecord, key: str) -> list[float]:
    values = sent.get(key)
    if not isinstance(values, list) or not all(
        isinstance(value, int | float) and isfinite(value) for value in values
    ):
        raise ValueError(f"{key} must be a list of finite numbers, one per feature, in the message")
    return [float(value) for value in values]
