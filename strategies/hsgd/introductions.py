"""Introductions of HSGD's parties: replies to ``query.pair``, read and checked."""

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
# Longest name of a class or feature.
_MOST_TEXT = 200


@dataclass(frozen=True)
class LinkIntroduction:
    """A party's introduction to its peers on sealed links: its name, keys, and whether it pins theirs."""

    name: str
    introduction: bytes
    pinned: bool


@dataclass(frozen=True)
class Introduction:
    """A party's introduction, without data and labels."""

    role: str  # {"hospital", "device", "edge"}
    group: int  # m, from 0.
    ids: tuple[str, ...]  # Its people, in the order of its rows; with own data, keyed hashes.
    shape: tuple[int, ...]  # Of one person's half; with dealt data, the length of an encoding.
    features: tuple[str, ...] = ()  # Names of its columns; empty if they have none.
    labelled: bool = True  # Whether it has labels.
    classes: tuple[str, ...] = ()  # Names of a hospital's classes.
    link: LinkIntroduction | None = None  # Set if links are sealed.

    @property
    def form(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Shape and sorted columns, which must be equal for all parties of a side."""
        return self.shape, tuple(sorted(self.features))


def introduction(content: RecordDict) -> Introduction:
    """Return the introduction of a party with dealt data; PayloadError if invalid."""
    pair = config_in(content, "pair")
    role, group, encoding = _role(pair), _integer(pair, "group", 0), _integer(pair, "encoding", 1)
    ids = _ids(pair)
    _check_alone(content)
    return Introduction(role, group, ids, (encoding,), link=_link(pair))


def own_introduction(content: RecordDict) -> Introduction:
    """Return the introduction of a party with its own file and hashed ids; PayloadError if invalid."""
    pair = config_in(content, "pair")
    role, group = _role(pair), _integer(pair, "group", 0)
    _check_alone(content)
    ids, shape = _ids(pair), pair.get("shape")
    if not all(len(one) == _HASH and set(one) <= set("0123456789abcdef") for one in ids):
        raise PayloadError("bad pair", f"ids must be hashes of {_HASH} hexadecimal digits")
    whole = isinstance(shape, list) and all(isinstance(n, int) and 0 < n < 2**31 for n in shape)
    if not whole or not shape:
        raise PayloadError("bad pair", "shape must be a list of integers > 0")
    sides = tuple(cast(list[int], shape))
    if math.prod(sides) > MAX_FEATURES:
        raise PayloadError("bad pair", f"shape must have at most {MAX_FEATURES} features")
    features, classes = _texts(pair, "features", _MOST_TEXT), _texts(pair, "classes", _MOST_TEXT)
    if len(features) not in (0, sides[-1]):
        raise PayloadError("bad pair", "features must be a list with a name for each column")
    labelled = pair.get("labelled") is True
    return Introduction(role, group, ids, sides, features, labelled, classes, _link(pair))


def _check_alone(content: RecordDict) -> None:
    if list(content) != ["pair"]:
        raise PayloadError("unknown record", f"{sorted(content)}, expected only pair")


def _ids(pair: ConfigRecord) -> tuple[str, ...]:
    ids = _texts(pair, "ids")
    if not 0 < len(ids) <= MAX_SAMPLES or len(set(ids)) < len(ids):
        raise PayloadError("bad pair", f"ids must be 1 to {MAX_SAMPLES} different ids")
    return ids


def _texts(pair: ConfigRecord, key: str, most: float = math.inf) -> tuple[str, ...]:
    value = pair.get(key, [])
    if not isinstance(value, list) or not all(isinstance(one, str) and len(one) <= most for one in value):
        raise PayloadError("bad pair", f"{key} must be a list of short texts")
    return tuple(map(str, value))


def _link(pair: ConfigRecord) -> LinkIntroduction | None:
    if "introduction" not in pair:
        return None
    name, one = pair.get("name"), pair.get("introduction")
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
        raise PayloadError("bad pair", "name must be a short text")
    if not isinstance(one, bytes) or len(one) != INTRODUCTION_BYTES:
        raise PayloadError("bad pair", f"introduction must have {INTRODUCTION_BYTES} bytes")
    return LinkIntroduction(name, one, pair.get("pinned") is True)


def _role(pair: ConfigRecord) -> str:
    role = pair.get("role")
    if role not in ROLES:
        raise PayloadError("bad pair", f"role={role!r}, expected one of {', '.join(ROLES)}")
    return str(role)


def _integer(pair: ConfigRecord, key: str, least: int) -> int:
    number = pair.get(key)
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise PayloadError("bad pair", f"{key}={number!r}, expected an integer >= {least}")
    return number
