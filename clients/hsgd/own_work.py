"""Messages of an HSGD node with its own file, before training and between rounds.

===============  ========  =====================================  ==========================================
type             to        config; arrays                         reply
===============  ========  =====================================  ==========================================
query.pair       all                                              config ``pair``: role, group, ids (hashes),
                                                                  shape, features, labelled; classes
query.pool       hospital  ids, classes, sums, counts, labels-of  arrays: sum, deviations; counts. config
                                                                  ``sealed``: labels
                 edge      ids, sums                              arrays: sum, deviations
                 device    sums                                   config ``masked``: sums, seed
query.unmask     hospital  ids, seeds, numbers                    config ``masks``: sum
query.setup      all       the fields of ``own.Terms``            config ``ready``: encoding
evaluate.encode  edge      t, ids; device                         arrays: zeta2
                 device    t; device                              the same
evaluate.score   hospital  ids, bins; head, hospital, zeta2       arrays: scores, calibration; metrics
===============  ========  =====================================  ==========================================

On sealed links each config has ``sealed``; a node whose owner requires it refuses others. zeta2 is then sent
as in training (``client.py``), under its own name.
"""

import csv
import os
from collections.abc import Callable, Sequence
from logging import INFO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from flwr.common import log
from numpy.typing import NDArray
from torch.func import functional_call

from hedgerow.clients.handlers import each
from hedgerow.clients.hsgd.messages import Release, config_of, received
from hedgerow.clients.hsgd.own import OwnParty, keep_terms, kept_terms, least_people, own_party, party_of
from hedgerow.clients.hsgd.party import Party
from hedgerow.clients.hsgd.sealing import Channel, NotOpenedError, is_sealed
from hedgerow.clients.hsgd.step import block_size, encodings, unflatten
from hedgerow.clients.instructions import flag, whole
from hedgerow.clients.mods.guard import Reveals, check_pooled, reveals
from hedgerow.tasks.modes import evaluating
from hedgerow.tasks.own_data import moments
from hedgerow.tasks.split_models import split_loss
from hedgerow.wire.calls import BatchHandler, Call
from hedgerow.wire.fixed_point import fixed_point, fixed_point_square
from hedgerow.wire.message_types import ENCODE, POOL, SCORE, SETUP, UNMASK
from hedgerow.wire.parties import CALIBRATION_BINS, EVALUATED
from hedgerow.wire.records import config_in, to_record

__all__ = ["own_handlers", "own_pair"]

_MOST_BINS = 100_000


def own_handlers() -> dict[str, BatchHandler]:
    """Return the additional handlers of a node with its own file."""
    return {
        POOL: reveals(_pool_reveals, each(_checked(_pool))),
        UNMASK: each(_checked(_unmask)),
        SETUP: reveals(Reveals.NOTHING, each(_checked(_setup))),
        ENCODE: reveals(Reveals.NOISED, each(_checked(_encode))),
        SCORE: each(_checked(_score)),
    }


def _checked(work: Callable[[Call], RecordDict]) -> Callable[[Call], RecordDict]:
    def handle(call: Call) -> RecordDict:
        is_sealed(call, config_of(call))
        return work(call)

    return handle


def own_pair(own: OwnParty) -> dict[str, Any]:
    """Return a party's introduction, with hashed ids; its log gets one line about what was read."""
    log(INFO, "%s", own.reading)
    half = own.half
    pair: dict[str, Any] = {
        "role": own.role, "group": own.group, "ids": list(own.rows), "shape": list(half.x.shape[1:]),
        "features": list(half.features), "labelled": half.labels is not None,
    }  # fmt: skip
    return {**pair, "classes": own.classes} if own.role == "hospital" else pair


def _pool_reveals(content: RecordDict) -> Reveals:
    """Return what a reply reveals: sealed labels nothing, sums and counts the records."""
    config = config_in(content, "config")
    pools = any(config.get(key, False) is not False for key in ("sums", "counts"))
    return Reveals.RECORDS if pools else Reveals.NOTHING


def _people(call: Call, own: OwnParty) -> tuple[list[str], list[int]]:
    """Return the message's people and their rows; a device has one person."""
    if own.role == "device":
        return list(own.rows), [0]
    ids = config_of(call).get("ids")
    if not isinstance(ids, list) or len(set(ids)) < len(ids) or not ids:
        raise ValueError("ids must be a list of people, each once, in the message's config")
    return [str(person) for person in ids], own.people([str(person) for person in ids])


def _enough(call: Call, people: Sequence[str], what: str) -> None:
    least = least_people(call.context)
    if len(people) < least:
        raise ValueError(
            f"ids must have at least {least} people (node config min-people), got {len(people)} in the "
            f"message's config: {what} over so few would reveal each person"
        )


def _pooled_once(call: Call, kind: str, *parts: bytes) -> None:
    """Record a sum over this party's people: two sums that differ by one person would reveal that person."""
    check_pooled(kind, str(call.context.node_config.get("data")), *parts)


def _pool(call: Call) -> RecordDict:
    own, config = own_party(call.context), config_of(call)
    ids, rows = _people(call, own)
    reply = RecordDict()
    arrays: dict[str, NDArray[Any]] = {}
    if flag(config, "sums", default=False):
        x = own.features([str(name) for name in _texts(config, "features")])[rows].astype(np.float64)
        x = x.reshape(-1, x.shape[-1])  # Each step or pixel counts as a value.
        if own.role == "device":
            columns = [[*map(fixed_point, column)] for column in x.T.tolist()]
            exact = [*map(sum, columns), *(sum(map(fixed_point_square, column)) for column in columns)]
            _pooled_once(call, "sums of features", *(number.to_bytes(64, signed=True) for number in exact))
            masked, seed = own.key.mask(exact, ids[0])
            return RecordDict({"masked": ConfigRecord({"sums": masked, "seed": seed, "rows": len(x)})})
        _enough(call, ids, "sums")
        found = moments(x)
        arrays |= {
            "sum": found.mean * found.count,
            "deviations": found.squares,
            "rows": np.array([len(x)], np.float64),
        }
        _pooled_once(call, "sums of features", *(part.tobytes() for part in arrays.values()))
    if own.role == "hospital":
        classes = _texts(config, "classes")
        numbers = own.class_numbers(classes)
        if flag(config, "counts", default=False):
            _enough(call, ids, "counts of classes")
            arrays["counts"] = np.bincount(numbers[rows], minlength=len(classes)).astype(np.float64)
            _pooled_once(call, "counts of classes", arrays["counts"].tobytes())
        sealed = [str(one) for one in config.get("labels-of", [])]  # type: ignore[union-attr]
        if sealed:
            labels_of = [
                own.key.seal(int(numbers[row]), person, classes)
                for row, person in zip(own.people(sealed), sealed, strict=True)
            ]
            reply["sealed"] = ConfigRecord({"labels": labels_of})
    if arrays:
        reply["arrays"] = to_record(arrays)
    return reply


def _unmask(call: Call) -> RecordDict:
    own, config = own_party(call.context), config_of(call)
    if own.role != "hospital":
        raise ValueError(f"role must be hospital for masks, got {own.role}")
    ids, _ = _people(call, own)
    seeds, count = config.get("seeds"), whole(config, "numbers", 1)
    if not isinstance(seeds, list) or len(seeds) != len(ids) or not all(isinstance(s, bytes) for s in seeds):
        raise ValueError("seeds must be one for each of ids in the message's config")
    _enough(call, ids, "sums")
    _pooled_once(call, "masks of devices", *(person.encode() for person in sorted(ids)))
    return RecordDict({"masks": ConfigRecord({"sum": own.key.masks(seeds, ids, count)})})  # type: ignore[arg-type]


def _setup(call: Call) -> RecordDict:
    before = call.context.state.copy()
    keep_terms(call.context, config_of(call))
    try:
        party = party_of(call.context)
    except ValueError:
        call.context.state = before
        raise
    return RecordDict({"ready": ConfigRecord({"encoding": party.encoding})})


def _encode(call: Call) -> RecordDict:
    """Answer with encodings as in an exchange, but keep nothing."""
    party, config = party_of(call.context), config_of(call)
    if party.role == "hospital":
        raise ValueError("role must be device or edge for encodings of devices, got hospital")
    x, _ = party.rows(_batch(party, config))
    theta = torch.tensor(received(call, "device", (block_size(party.model.device),), party.dtype))
    members = theta.expand(len(x), len(theta))
    with evaluating(party.model):
        zeta = encodings(party.model.device, members, x[:, None], alone=True)[:, 0].numpy()
    released = Release.of(config)(zeta, whole(config, "t", 0), call)
    channel = Channel.of(call, config)
    if channel is not None:
        return channel.sealed(_batch(party, config), EVALUATED, rows=released)
    return RecordDict({"arrays": to_record({"zeta2": released})})


def _score(call: Call) -> RecordDict:
    """Answer with metrics, and histograms of scores over all people.

    ``scores`` (classes, 2, bins) counts people by the probability of a class, those of other classes and
    those of the class; of two classes only the second. ``calibration`` (3, 15) has, by the probability of the
    predicted class, the numbers of all and of correct people, and the sum of the probabilities.
    """
    party, config = party_of(call.context), config_of(call)
    if party.role != "hospital":
        raise ValueError(f"role must be hospital for scores, got {party.role}")
    ids = _batch(party, config)
    model, channel, zeta2 = party.model, Channel.of(call, config), None
    if channel is not None:
        try:
            there, zeta2 = channel.opened(ids, EVALUATED, model.device_encoding, party.dtype)
        except NotOpenedError as refused:
            return refused.reply
        ids = [ids[row] for row in there]
    _enough(call, ids, "scores")
    x, y = party.rows(ids)
    blocks = {name: getattr(model, name) for name in ("head", "hospital")}
    theta = {
        name: torch.tensor(received(call, name, (block_size(block),), party.dtype))
        for name, block in blocks.items()
    }
    if zeta2 is None:
        zeta2 = received(call, "zeta2", (len(ids), model.device_encoding), party.dtype)
    z2 = torch.tensor(zeta2)
    with evaluating(model):
        head, hospital = (
            {key: value[0] for key, value in unflatten(block, theta[name][None]).items()}
            for name, block in blocks.items()
        )
        z1 = functional_call(model.hospital, hospital, (x,))
        logits = functional_call(model.head, head, (z1, z2)).double()
    losses = split_loss(logits, y).numpy()
    if logits.shape[1] == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], 1)
    p, labels = torch.softmax(logits, 1).numpy(), y.numpy()
    if not np.isfinite(p).all():
        raise ValueError("the sent model must give finite probabilities")
    bins = whole(config, "bins", 1)
    if bins > _MOST_BINS:
        raise ValueError(f"bins must be at most {_MOST_BINS}, got {bins} in the message's config")
    shown = [1] if p.shape[1] == 2 else range(p.shape[1])
    scores = np.stack([_histogram(p[:, c], labels == c, bins) for c in shown])
    right, sure = p.argmax(axis=1) == labels, p.max(axis=1)
    places = np.minimum((sure * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    calibration = np.stack(
        [np.bincount(places, w, CALIBRATION_BINS) for w in (np.ones(len(sure)), right.astype(float), sure)]
    )
    _write_predictions(call, ids, p)
    loss, accuracy = float(losses.mean()), float(right.mean())
    metrics = MetricRecord({"num-examples": len(ids), "loss": loss, "accuracy": accuracy})
    arrays = to_record({"scores": scores, "calibration": calibration})
    answer = RecordDict({"arrays": arrays, "metrics": metrics})
    return answer if channel is None else channel.kept(answer)


def _histogram(p: NDArray[Any], mine: NDArray[np.bool_], bins: int) -> NDArray[np.float64]:
    places = np.minimum((p * bins).astype(int), bins - 1)
    return np.stack([np.bincount(places[mine == own], minlength=bins) for own in (False, True)]).astype(float)


def _batch(party: Party, config: ConfigRecord) -> list[str]:
    if party.role == "device":
        return [str(party.ids[0])]
    return [str(person) for person in _texts(config, "ids")]


def _texts(config: ConfigRecord, key: str) -> list[str]:
    value = config.get(key)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{key} must be a list of texts in the message's config")
    return [str(one) for one in value]


def _write_predictions(call: Call, ids: Sequence[str], p: NDArray[Any]) -> None:
    """Write the hospital's predictions, with plain ids, to the file in its node config; they stay there."""
    path = call.context.node_config.get("predictions")
    if not path:
        return
    own, classes = own_party(call.context), kept_terms(call.context).classes
    file = Path(str(path)).expanduser()
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    with aside.open("w", newline="", encoding="utf-8") as lines:
        rows = csv.writer(lines)
        rows.writerow(["id", "predicted", *(f"p({name})" for name in classes)])
        for person, own_p in zip(ids, p, strict=True):
            name = own.half.ids[own.rows[person]]
            rows.writerow([name, classes[int(own_p.argmax())], *(f"{value:.6g}" for value in own_p)])
    aside.replace(file)
