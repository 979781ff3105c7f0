"""A node of HSGD with local data: a file with its half of its people's features, and its messages.

Ids leave the node only as keyed hashes. Labels leave a hospital sealed for the person's device, or as counts
of classes and of scores. Against a malicious server that asks for sums over few people, every sum covers at
least ``min-people``, and a device reports one sum of each kind over the same records, in all runs. No refusal
depends on the label of a person in a message.

Its messages before training and between rounds:

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
query.setup      all       the fields of ``Terms``                config ``ready``: encoding
evaluate.encode  edge      t, ids; device                         arrays: zeta2
                 device    t; device                              the same
evaluate.score   hospital  ids, bins; head, hospital, zeta2       arrays: scores, calibration; metrics
===============  ========  =====================================  ==========================================

On sealed links each config has ``sealed``; a node whose owner requires it refuses others. zeta2 is then sent
as in training (``node.py``), under its own name.
"""

import csv
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from logging import INFO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, MetricRecord, RecordDict
from flwr.common import log
from numpy.typing import NDArray
from torch.func import functional_call

from hedgerow.clients.handlers import each
from hedgerow.clients.hsgd.match_key import MatchKey
from hedgerow.clients.hsgd.messages import Channel, NotOpenedError, Release, batch_of, config_of, received
from hedgerow.clients.hsgd.step import Party, block_size, encodings, unflatten
from hedgerow.clients.instructions import flag, strings, whole
from hedgerow.clients.links import check_sealed
from hedgerow.clients.mods.guard import Reveals, check_pooled, reveals
from hedgerow.clients.own_share import data_not_valid
from hedgerow.clients.stored_settings import store_settings, stored_settings
from hedgerow.tasks.files import FileColumns, FileData, Reading, read_constants, read_file
from hedgerow.tasks.imports import is_import_path
from hedgerow.tasks.modes import evaluating
from hedgerow.tasks.own_data import in_training, listed, moments
from hedgerow.tasks.split_models import SplitModel, split_loss, split_model, weighted_loss
from hedgerow.wire.calls import BatchHandler, Call
from hedgerow.wire.fixed_point import fixed_point, fixed_point_square
from hedgerow.wire.limits import MAX_FEATURES
from hedgerow.wire.message_types import ENCODE, POOL, SCORE, SETUP, UNMASK
from hedgerow.wire.parties import CALIBRATION_BINS, EVALUATED, ROLES
from hedgerow.wire.records import config_in, to_record

# Keys of a node config about own data.
OWN_KEYS = (
    "role", "group", "data", "match-key-file", "id", "label", "features", "constants", "min-people",
    "predictions", "allow-imports",
)  # fmt: skip
_TERMS = "hsgd-terms"
# Terms that differ between the parties of a sum.
_PARTY_S_OWN = ("people", "labels")
_LEAST_PEOPLE = 5


@dataclass(frozen=True, eq=False)
class OwnParty:
    """The content of a node's own files."""

    # {"hospital", "device", "edge"}: an edge is a gateway with all devices of a group.
    role: str
    group: int  # m, >= 0.
    half: FileData  # Its people's ids, features and, if any, labels.
    key: MatchKey  # Shared with the other parties of its group.
    reading: Reading  # What was read, for the owner's log.

    @cached_property
    def rows(self) -> dict[str, int]:
        """The row of each person's hash, sorted by hash, so that the file's order stays private."""
        hashes = {self.key.person(name): row for row, name in enumerate(self.half.ids)}
        return dict(sorted(hashes.items()))

    @property
    def classes(self) -> list[str]:
        """The class names of its people; empty without labels."""
        return sorted(self.half.labels.first) if self.half.labels else []

    def class_numbers(self, classes: Sequence[str]) -> NDArray[np.int64]:
        """Return the index of each row's class; empty without labels.

        ValueError unless ``classes`` has all classes of the party, whatever people a message names.
        """
        if missing := set(self.classes) - set(classes):
            raise ValueError(f"classes lacks {len(missing)} of this party's classes in the message's config")
        if self.half.labels is None:
            return np.empty(0, np.int64)
        number = {name: index for index, name in enumerate(classes)}
        return self.half.labels.numbers([number[name] for name in self.half.labels.first])

    def people(self, ids: Sequence[str]) -> list[int]:
        """Return the rows of these people; ValueError if one is unknown."""
        if strangers := sum(person not in self.rows for person in ids):
            raise ValueError(
                f"ids must be hashes of this {self.role}'s {len(self.rows)} people, got {strangers} others "
                "in the message's config"
            )
        return [self.rows[person] for person in ids]

    def features(self, names: Sequence[str]) -> Any:
        """Return the features (n, ...) with the columns in this order."""
        own = self.half.features
        if sorted(own) != sorted(names):
            raise ValueError("features must be this party's columns, got others in the message's config")
        place = {name: column for column, name in enumerate(own)}
        return self.half.x[:, [place[name] for name in names]] if names else self.half.x


@dataclass(frozen=True)
class Terms:
    """The agreement of a run on own data: all that a model needs beside a party's own data."""

    model: str  # As in ``split_model``.
    seed: int  # The run's.
    # Shapes of one person's halves.
    hospital_shape: tuple[int, ...]
    device_shape: tuple[int, ...]
    classes: tuple[str, ...]  # Class names, by index.
    # This side's columns, in the order of the model's inputs; empty if they have no names.
    features: tuple[str, ...] = ()
    # Standardisation of this side's features along the last axis; empty for none.
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()  # Class weights in the loss; empty for 1 each.
    people: tuple[str, ...] = ()  # The party's matched people, by hash.
    labels: tuple[bytes, ...] = ()  # Their sealed classes, if the party has no labels.

    @classmethod
    def of(cls, config: ConfigRecord) -> "Terms":
        """Read and check the config of ``query.setup``."""
        kinds: dict[str, tuple[type, ...]] = {
            "hospital-shape": (int,), "device-shape": (int,), "classes": (str,), "features": (str,),
            "mean": (float, int), "deviation": (float, int), "weights": (float, int), "people": (str,),
            "labels": (bytes,),
        }  # fmt: skip
        read: dict[str, Any] = {}
        for key, kind in kinds.items():
            value = config.get(key, [])
            if not isinstance(value, list) or not all(isinstance(one, kind) for one in value):
                raise ValueError(f"{key} must be a list, got {value!r} in the message's config")
            read[key.replace("-", "_")] = tuple(value)
        model, seed = config.get("model"), config.get("seed")
        if not isinstance(model, str) or not isinstance(seed, int):
            raise ValueError(
                "model or seed is missing in the message's config: they must be a name and a number"
            )
        terms = cls(model, seed, **read)
        if not terms.people or (terms.labels and len(terms.labels) != len(terms.people)):
            raise ValueError(
                f"people must not be empty, and labels must be as many or none, got {len(terms.people)} and "
                f"{len(terms.labels)} in the message's config"
            )
        for shape in (terms.hospital_shape, terms.device_shape):
            if not shape or min(shape) < 1 or math.prod(shape) > MAX_FEATURES:
                raise ValueError(
                    f"a shape must have 1 to {MAX_FEATURES} features, got {shape} in the message's config"
                )
        numbers = np.array([*terms.mean, *terms.deviation, *terms.weights])
        if not np.isfinite(numbers).all() or min((*terms.deviation, *terms.weights), default=1) <= 0:
            raise ValueError(
                "mean, deviation and weights must be finite, the latter two > 0, in the message's config"
            )
        return terms


def kept_terms(context: Context) -> Terms:
    """Return the agreement of this run; ValueError if there is none yet."""
    if (kept := stored_settings(context, _TERMS)) is None:
        raise ValueError("this node has no agreement: it must get 'query.setup' before any training")
    return Terms.of(kept)


def own_party(context: Context) -> OwnParty:
    """Return the content of the files in the node config, read again if a file changed."""
    config = context.node_config
    role, group = config.get("role"), config.get("group")
    if role not in ROLES:
        raise ValueError(f"role must be one of {', '.join(ROLES)}, got {role!r} in the node config")
    if isinstance(group, str) and group.isdigit():
        group = int(group)
    if not isinstance(group, int) or isinstance(group, bool) or group < 0:
        raise ValueError(f"group must be an integer >= 0, got {group!r} in the node config")
    paths = []
    for key in ("data", "match-key-file"):
        value = config.get(key)
        if not isinstance(value, str) or not value:
            raise ValueError(f"{key} must be the path of a file, got {value!r} in the node config")
        paths.append(value)
    columns = FileColumns(
        str(config.get("label", "label")),
        listed(str(config.get("features", ""))),
        str(config.get("id", "id")),
        labelled=role == "hospital",
    )
    data, key_file = paths
    stamps = _stamp("data", data), _stamp("match-key-file", key_file)
    return _own(str(role), group, data, key_file, stamps, columns)


def _stamp(key: str, path: str) -> tuple[int, int]:
    try:
        about = os.stat(Path(path).expanduser())
    except OSError as error:
        raise ValueError(
            f"{key} must be the path of a readable file, got {Path(path).name!r} in the node config "
            f"({error.strerror})"
        ) from error
    return about.st_mtime_ns, about.st_size


@lru_cache(maxsize=1024)
def _own(role: str, group: int, data: str, key_file: str, stamps: object, columns: FileColumns) -> OwnParty:
    try:
        half = read_file(Path(data).expanduser(), columns)
        if half.x.dtype.kind in "iu":
            raise ValueError(
                f"{data}: x must be floating-point, got integers, which would be ids such as tokens: save "
                "measurements as float32"
            )
    except ValueError as error:
        raise data_not_valid(error) from None
    if role == "device" and len(half.ids) != 1:
        raise ValueError(f"data: a device must have one person, got {len(half.ids)} (an edge may have many)")
    return OwnParty(role, group, half, MatchKey.read(key_file, group), half.reading(data))


def party_of(context: Context) -> Party:
    """Return the training party: the agreement's people, with standardised features and labels."""
    own, terms = own_party(context), kept_terms(context)
    model, allowed = terms.model, str(context.node_config.get("allow-imports", ""))
    if is_import_path(model) and model not in {one.strip() for one in allowed.split(",")}:
        raise ValueError(
            f"model must be one of Hedgerow, or in the node config's allow-imports, got {model!r}: it is "
            "code, which this node's owner has not allowed"
        )
    return _party(own, terms, str(context.node_config.get("constants", "")))


@lru_cache(maxsize=1024)
def _party(own: OwnParty, terms: Terms, constants: str) -> Party:
    rows = own.people(terms.people)
    x = own.features(terms.features)[rows]
    if x.shape[1:] != (shape := terms.hospital_shape if own.role == "hospital" else terms.device_shape):
        raise ValueError(f"the shape must be this data's {x.shape[1:]}, got {shape} in the message's config")
    mean, deviation = terms.mean, terms.deviation
    if constants:
        read = read_constants(Path(constants).expanduser(), terms.features)
        mean, deviation = tuple(read[0]), tuple(read[1])
    if mean:
        if len(mean) != x.shape[-1] or len(deviation) != x.shape[-1]:
            raise ValueError(f"mean must have {x.shape[-1]} entries, got {len(mean)} in the message's config")
        x = ((x.astype(np.float64) - np.array(mean)) / np.array(deviation)).astype(np.float32)
    else:
        x = in_training(x, terms.features)
    model = _model(terms.model, terms.hospital_shape, terms.device_shape, len(terms.classes), terms.seed)
    y = torch.tensor(_labels(own, terms, rows), dtype=torch.int64)
    return Party(
        own.role, own.group, terms.people, torch.from_numpy(x), y, model, weighted_loss(terms.weights)
    )


def _labels(own: OwnParty, terms: Terms, rows: Sequence[int]) -> list[int]:
    if own.half.labels is None:
        if len(terms.labels) != len(rows):
            raise ValueError("one of the sides must have labels: this party has none and received none")
        sealed = zip(terms.labels, terms.people, strict=True)
        return [own.key.unseal(one, person, terms.classes) for one, person in sealed]
    found: list[int] = own.class_numbers(terms.classes)[rows].tolist()
    return found


@lru_cache(maxsize=8)
def _model(
    name: str, hospital_shape: tuple[int, ...], device_shape: tuple[int, ...], classes: int, seed: int
) -> SplitModel:
    """Return the architecture, one object for all parties of a process, so that they can share a stack."""
    return split_model(name, hospital_shape, device_shape, classes, seed)


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
        check_sealed(call, flag(config_of(call), "sealed", default=False))
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
    least = call.context.node_config.get("min-people", _LEAST_PEOPLE)
    if not isinstance(least, int) or isinstance(least, bool) or least < 1:
        raise ValueError(f"min-people must be an integer >= 1, got {least!r} in the node config")
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
        x = own.features(strings(config, "features"))[rows].astype(np.float64)
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
        classes = strings(config, "classes")
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
    before, config = call.context.state.copy(), config_of(call)
    # Labels stay sealed there.
    own = {key: value for key, value in config.items() if key in _PARTY_S_OWN}
    store_settings(call.context, _TERMS, {k: v for k, v in config.items() if k not in own}, own)
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
    ids = batch_of(config, party)
    x, _ = party.rows(ids)
    sent = received(call, {"device": (block_size(party.model.device),)}, party.dtype)
    theta = torch.tensor(sent["device"])
    members = theta.expand(len(x), len(theta))
    with evaluating(party.model):
        zeta = encodings(party.model.device, members, x[:, None], alone=True)[:, 0].numpy()
    t = whole(config, "t", 0)
    release, channel = Release.of(config), Channel.of(call, config, t)
    released = zeta if release is None else release(zeta, t, call)
    if channel is not None:
        return channel.sealed(ids, EVALUATED, rows=released)
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
    ids = batch_of(config, party)
    t = whole(config, "t", 0) if "t" in config else 0  # Only seals are bound to it.
    model, channel, zeta2 = party.model, Channel.of(call, config, t), None
    if channel is not None:
        try:
            there, zeta2 = channel.opened(ids, EVALUATED, model.device_encoding, party.dtype)
        except NotOpenedError as refused:
            return refused.reply
        ids = tuple(ids[row] for row in there)
    _enough(call, ids, "scores")
    x, y = party.rows(ids)
    blocks = {name: getattr(model, name) for name in ("head", "hospital")}
    shapes = {name: (block_size(block),) for name, block in blocks.items()}
    theta = {name: torch.tensor(one) for name, one in received(call, shapes, party.dtype).items()}
    if zeta2 is None:
        zeta2 = received(call, {"zeta2": (len(ids), model.device_encoding)}, party.dtype)["zeta2"]
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
