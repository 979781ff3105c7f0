"""A node of HSGD with its own file, which has its half of its people's features.

Ids leave the node only as keyed hashes. Labels leave a hospital sealed for the person's device, or as counts
of classes and of scores. Against a malicious server that asks for sums over few people, every sum covers at
least ``min-people``, and a device reports one sum of each kind over the same records, in all runs. No refusal
depends on the label of a person in a message.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context
from numpy.typing import NDArray

from hedgerow.clients.hsgd.match_key import MatchKey
from hedgerow.clients.hsgd.party import Party
from hedgerow.clients.own_share import data_not_valid
from hedgerow.clients.stored_settings import store_settings, stored_settings
from hedgerow.tasks.files import FileColumns, FileData, Reading, read_constants, read_file
from hedgerow.tasks.imports import is_import_path
from hedgerow.tasks.own_data import in_training, listed
from hedgerow.tasks.split_models import SplitModel, split_model, weighted_loss
from hedgerow.wire.limits import MAX_FEATURES
from hedgerow.wire.parties import ROLES

__all__ = [
    "OWN_KEYS",
    "OwnParty",
    "Terms",
    "keep_terms",
    "kept_terms",
    "least_people",
    "own_party",
    "party_of",
]

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


def keep_terms(context: Context, config: ConfigRecord) -> None:
    """Store the agreement in ``context.state``; labels stay sealed there."""
    own = {key: value for key, value in config.items() if key in _PARTY_S_OWN}
    store_settings(context, _TERMS, {key: value for key, value in config.items() if key not in own}, own)


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
    columns = (
        str(config.get("id", "id")),
        str(config.get("label", "label")),
        listed(str(config.get("features", ""))),
    )
    data, key_file = paths
    stamped = (data, _stamp("data", data)), (key_file, _stamp("match-key-file", key_file))
    return _own(str(role), group, *stamped, *columns)


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
def _own(
    role: str,
    group: int,
    data: tuple[str, object],
    key: tuple[str, object],
    id_column: str,
    label_column: str,
    features: tuple[str, ...],
) -> OwnParty:
    columns = FileColumns(label_column, features, id_column, labelled=role == "hospital")
    try:
        half = read_file(Path(data[0]).expanduser(), columns)
        if half.x.dtype.kind in "iu":
            raise ValueError(
                f"{data[0]}: x must be floating-point, got integers, which would be ids such as tokens: save "
                "measurements as float32"
            )
    except ValueError as error:
        raise data_not_valid(error) from None
    if role == "device" and len(half.ids) != 1:
        raise ValueError(f"data: a device must have one person, got {len(half.ids)} (an edge may have many)")
    return OwnParty(role, group, half, MatchKey.read(key[0], group), half.reading(data[0]))


def least_people(context: Context) -> int:
    """Return the smallest number of people that a reported sum may cover."""
    least = context.node_config.get("min-people", _LEAST_PEOPLE)
    if not isinstance(least, int) or isinstance(least, bool) or least < 1:
        raise ValueError(f"min-people must be an integer >= 1, got {least!r} in the node config")
    return least


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
