"""Who a party of HSGD says that it is: its answer to ``query.pair``, read and checked."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from hedgerow.wire.limits import MAX_FEATURES, MAX_SAMPLES
from hedgerow.wire.records import PayloadError, records_of
from hedgerow.wire.sealed import INTRODUCTION_BYTES

__all__ = ["Introduction", "LinkIntroduction", "introduction", "own_introduction"]

ROLES = ("hospital", "device", "edge")
_LONGEST_NAME = 64
_HASH = 32
# Of texts that a node may tell: a class, a feature.
_MOST_TEXT = 200


@dataclass(frozen=True)
class LinkIntroduction:
    """What a party tells its peers where links are sealed: its name, its keys, if it pins theirs."""

    name: str
    introduction: bytes
    pinned: bool


@dataclass(frozen=True)
class Introduction:
    """What a party tells of itself: no data and no labels.

    Parameters
    ----------
    role : {"hospital", "device", "edge"}
        What it is.
    group : int
        m, from 0.
    ids : tuple[str, ...]
        Its people, in the order of its rows; on own data keyed hashes of them.
    shape : tuple[int, ...]
        Of one person's half; on dealt data the length of one person's encoding.
    features : tuple[str, ...]
        Names of its columns; empty where they have none.
    labelled : bool
        Whether it has labels of its own.
    classes : tuple[str, ...]
        Which, at a hospital.
    link : LinkIntroduction or None
        How its peers are told of it, where links are sealed.
    """

    role: str
    group: int
    ids: tuple[str, ...]
    shape: tuple[int, ...]
    features: tuple[str, ...] = ()
    labelled: bool = True
    classes: tuple[str, ...] = ()
    link: LinkIntroduction | None = None

    @property
    def form(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """What the parties of a side must have in common, the order of columns aside."""
        return self.shape, tuple(sorted(self.features))


def introduction(content: RecordDict) -> Introduction:
    """Return the answer to ``query.pair`` of a party with dealt data; PayloadError if it is none."""
    told = records_of(content, ConfigRecord).get("pair", ConfigRecord())
    role, group, encoding = _role(told), _integer(told, "group", 0), _integer(told, "encoding", 1)
    ids = told.get("ids")
    if not isinstance(ids, list) or not ids or not all(isinstance(one, str) for one in ids):
        raise PayloadError("bad pair", "ids are no list of texts, or an empty one")
    if len(ids) > MAX_SAMPLES or len({*ids}) < len(ids):
        raise PayloadError("bad pair", "ids are too many, or one is there twice")
    if records_of(content, ArrayRecord) or len(content) != 1:
        raise PayloadError("unknown record", f"{sorted(content)}, expected pair alone")
    return Introduction(role, group, tuple(cast(list[str], ids)), (encoding,), link=_link(told))


def own_introduction(content: RecordDict) -> Introduction:
    """Return the same of a party with a file of its own, which tells of its people no more than hashes."""
    told = content.config_records.get("pair", ConfigRecord())
    role, group = _role(told), _integer(told, "group", 0)
    if content.array_records or len(content) != 1:
        raise PayloadError("unknown record", f"{sorted(content)}, expected pair alone")
    ids, shape, features, classes = (told.get(key, []) for key in ("ids", "shape", "features", "classes"))
    if not _texts(ids, _HASH) or not ids or len(set(cast(list[str], ids))) < len(cast(list[str], ids)):
        raise PayloadError("bad pair", "ids are no list of hashes, or one is there twice")
    if not _hexadecimal(cast(list[str], ids)) or len(cast(list[str], ids)) > MAX_SAMPLES:
        raise PayloadError("bad pair", "ids are no hashes of 32 hexadecimal digits, or too many")
    if (
        not isinstance(shape, list)
        or not shape
        or not all(isinstance(n, int) and 0 < n < 2**31 for n in shape)
    ):
        raise PayloadError("bad pair", "shape is no list of integers > 0")
    if math.prod(cast(list[int], shape)) > MAX_FEATURES:
        raise PayloadError("bad pair", f"shape is of more than {MAX_FEATURES} features")
    if not _texts(features, _MOST_TEXT) or len(cast(list[str], features)) not in (0, shape[-1]):
        raise PayloadError("bad pair", "features are no list of names, one a column")
    if not _texts(classes, _MOST_TEXT):
        raise PayloadError("bad pair", "classes are no list of names")
    return Introduction(
        role, group, tuple(cast(list[str], ids)), tuple(cast(list[int], shape)),
        tuple(cast(list[str], features)), told.get("labelled") is True, tuple(cast(list[str], classes)),
        _link(told),
    )  # fmt: skip


def _texts(value: Any, most: int) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) and len(one) <= most for one in value)


def _hexadecimal(ids: Sequence[str]) -> bool:
    return all(len(one) == _HASH and not set(one) - set("0123456789abcdef") for one in ids)


def _link(told: ConfigRecord) -> LinkIntroduction | None:
    """Return how a party is introduced to its peers; None where it tells nothing of that."""
    if "introduction" not in told:
        return None
    name, one = told.get("name"), told.get("introduction")
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
        raise PayloadError("bad pair", "name is no short text")
    if not isinstance(one, bytes) or len(one) != INTRODUCTION_BYTES:
        raise PayloadError("bad pair", f"introduction is not of {INTRODUCTION_BYTES} bytes")
    return LinkIntroduction(name, one, told.get("pinned") is True)


def _role(told: ConfigRecord) -> str:
    """Return the role that an introduction tells; PayloadError with reason ``bad pair`` if it is none."""
    role = told.get("role")
    if role not in ROLES:
        raise PayloadError("bad pair", f"role={role!r}, expected one of {', '.join(ROLES)}")
    return str(role)


def _integer(told: ConfigRecord, key: str, least: int) -> int:
    """Return an integer that an introduction tells, at least ``least``; PayloadError as above."""
    number = told.get(key)
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise PayloadError("bad pair", f"{key}={number!r}, expected an integer >= {least}")
    return number
