"""Who a party of HSGD says that it is: its answer to ``query.pair``, read and checked."""

import math
from dataclasses import dataclass
from typing import cast

from flwr.app import ConfigRecord, RecordDict

from hedgerow.wire.limits import MAX_FEATURES, MAX_SAMPLES
from hedgerow.wire.parties import ROLES
from hedgerow.wire.records import PayloadError, config_in
from hedgerow.wire.sealed import INTRODUCTION_BYTES

__all__ = ["Introduction", "LinkIntroduction", "introduction", "own_introduction"]

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
    """What a party tells of itself: no data and no labels."""

    role: str  # {"hospital", "device", "edge"}: What it is.
    group: int  # m, from 0.
    ids: tuple[str, ...]  # Its people, in the order of its rows; on own data keyed hashes of them.
    shape: tuple[int, ...]  # Of one person's half; on dealt data the length of one person's encoding.
    features: tuple[str, ...] = ()  # Names of its columns; empty where they have none.
    labelled: bool = True  # Whether it has labels of its own.
    classes: tuple[str, ...] = ()  # Which, at a hospital.
    link: LinkIntroduction | None = None  # How its peers are told of it, where links are sealed.

    @property
    def form(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """What the parties of a side must have in common, the order of columns aside."""
        return self.shape, tuple(sorted(self.features))


def introduction(content: RecordDict) -> Introduction:
    """Return the answer to ``query.pair`` of a party with dealt data; PayloadError if it is none."""
    told = config_in(content, "pair")
    role, group, encoding = _role(told), _integer(told, "group", 0), _integer(told, "encoding", 1)
    ids = _texts(told, "ids")
    if not 0 < len(ids) <= MAX_SAMPLES or len(set(ids)) < len(ids):
        raise PayloadError("bad pair", "ids are none or too many, or one is there twice")
    _check_alone(content)
    return Introduction(role, group, ids, (encoding,), link=_link(told))


def own_introduction(content: RecordDict) -> Introduction:
    """Return the same of a party with a file of its own, which tells of its people no more than hashes."""
    told = config_in(content, "pair")
    role, group = _role(told), _integer(told, "group", 0)
    _check_alone(content)
    ids, shape = _texts(told, "ids"), told.get("shape")
    if not 0 < len(ids) <= MAX_SAMPLES or len(set(ids)) < len(ids):
        raise PayloadError("bad pair", "ids are none or too many, or one is there twice")
    if not all(len(one) == _HASH and set(one) <= set("0123456789abcdef") for one in ids):
        raise PayloadError("bad pair", f"ids are no hashes of {_HASH} hexadecimal digits")
    whole = isinstance(shape, list) and all(isinstance(n, int) and 0 < n < 2**31 for n in shape)
    if not whole or not shape:
        raise PayloadError("bad pair", "shape is no list of integers > 0")
    sides = tuple(cast(list[int], shape))
    if math.prod(sides) > MAX_FEATURES:
        raise PayloadError("bad pair", f"shape is of more than {MAX_FEATURES} features")
    features, classes = _texts(told, "features", _MOST_TEXT), _texts(told, "classes", _MOST_TEXT)
    if len(features) not in (0, sides[-1]):
        raise PayloadError("bad pair", "features are no list of names, one a column")
    labelled = told.get("labelled") is True
    return Introduction(role, group, ids, sides, features, labelled, classes, _link(told))


def _check_alone(content: RecordDict) -> None:
    if list(content) != ["pair"]:
        raise PayloadError("unknown record", f"{sorted(content)}, expected pair alone")


def _texts(told: ConfigRecord, key: str, most: float = math.inf) -> tuple[str, ...]:
    """Return a list of texts of at most so many characters; PayloadError as below."""
    value = told.get(key, [])
    if not isinstance(value, list) or not all(isinstance(one, str) and len(one) <= most for one in value):
        raise PayloadError("bad pair", f"{key} is no list of short texts")
    return tuple(map(str, value))


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
