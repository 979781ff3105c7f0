"""Injected faults of nodes and links.

A message's fate depends only on the run's seed, the round, the node, the message's type and how many of that
type the node was sent in that round: the same seed fails the same nodes in the same rounds, whatever was sent
in between, and in a resumed run too. All times are virtual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isnan
from types import MappingProxyType
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict, UserConfig

from hedgerow.wire.checks import in_range
from hedgerow.wire.printable import quoted
from hedgerow.wire.seeds import Purpose, generator

# The parameters of each distribution of delays, in seconds.
DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "constant": ("seconds",),
        "uniform": ("low", "high"),
        "exponential": ("mean",),
        "lognormal": ("median", "sigma"),
    }
)
CORRUPTIONS = ("nan", "shape", "keys")
# Upper bound of virtual seconds and of factors on them, a few decades.
_MOST = 1e9
# Upper bound of the logarithm's deviation; e^20 is half a billion.
_MOST_SIGMA = 20.0


@dataclass(frozen=True, slots=True)
class Delay:
    """A distribution of delays.

    Parameters
    ----------
    name : str (default: "constant")
        ``"constant"`` (seconds), ``"uniform"`` (low, high), ``"exponential"`` (mean) or
        ``"lognormal"`` (median, standard deviation of the logarithm).
    values : tuple of float (default: (0.0,))
        The distribution's parameters in that order, each from 0 to 1e9; a lognormal's deviation to 20.
    """

    name: str = "constant"
    values: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        if self.name not in DISTRIBUTIONS:
            raise ValueError(f"delay must be one of {', '.join(DISTRIBUTIONS)}, got {quoted(self.name)}")
        names = DISTRIBUTIONS[self.name]
        if len(self.values) != len(names) or not all(0 <= v <= _MOST for v in self.values):
            raise ValueError(
                f"delay = {self.name} must have {', '.join(names)}, each in [0, {_MOST:g}], "
                f"got {quoted(self.values)}"
            )
        if self.name == "lognormal" and self.values[1] > _MOST_SIGMA:
            raise ValueError(f"delay: lognormal takes sigma up to {_MOST_SIGMA:g}, not {self.values[1]!r}")
        if self.name == "uniform" and self.values[0] > self.values[1]:
            raise ValueError(f"delay: uniform needs low <= high, not {self.values}")

    @classmethod
    def parse(cls, text: str | float) -> Delay:
        """Read ``3.0``, ``"uniform:1,5"`` or the like."""
        if isinstance(text, str) and ":" in text:
            name, _, numbers = text.partition(":")
            return cls(name.strip(), tuple(_number(number) for number in numbers.split(",")))
        return cls("constant", (_number(text),))

    def draw(self, rng: np.random.Generator) -> float:
        """Return one delay in seconds."""
        first, last = self.values[0], self.values[-1]
        match self.name:
            case "uniform":
                return float(rng.uniform(first, last))
            case "exponential":
                return float(rng.exponential(first))
            case "lognormal":
                return float(first * np.exp(last * rng.standard_normal()))
            case _:
                return first


@dataclass(frozen=True, slots=True)
class Fate:
    """What happens to one message at one node."""

    dropped: bool = False
    crashed: bool = False
    delay: float = 0.0
    slowdown: float = 1.0
    corrupt: str | None = None


@dataclass(frozen=True, slots=True)
class FaultModel:
    """Faults of nodes and their links.

    Parameters
    ----------
    dropout : float (default: 0.0)
        Probability that a node misses a message: it does nothing, and the message's TTL ends without a reply.
    delay : Delay (default: none)
        Virtual seconds from delivery to reply.
    stragglers : frozenset of int (default: empty)
        Partition ids of slow nodes.
    slowdown : float (default: 1.0)
        Factor on a straggler's delay, and on its real seconds if the grid counts those; from 1 to 1e9.
    crash_at : mapping of int to int (default: empty)
        Partition id to the number (from 1) of the message at which the node dies permanently.
    corrupt : str or None (default: None)
        The defect of a corrupted reply: ``"nan"`` (values), ``"shape"`` (one array too long) or ``"keys"``
        (one unknown key).
    corrupt_rate : float (default: 1.0)
        Probability that a reply is corrupted.
    """

    dropout: float = 0.0
    delay: Delay = Delay()
    stragglers: frozenset[int] = frozenset()
    slowdown: float = 1.0
    crash_at: Mapping[int, int] = field(default_factory=dict)
    corrupt: str | None = None
    corrupt_rate: float = 1.0

    def __post_init__(self) -> None:
        for name in ("dropout", "corrupt_rate"):
            in_range(name, getattr(self, name), 0.0, 1.0)
        in_range("slowdown", self.slowdown, 1.0, _MOST)
        if self.corrupt is not None and self.corrupt not in CORRUPTIONS:
            raise ValueError(f"corrupt must be one of {', '.join(CORRUPTIONS)}, got {quoted(self.corrupt)}")
        for partition_id, number in self.crash_at.items():
            if partition_id < 0 or number < 1:
                raise ValueError(
                    "crash_at must be a partition id >= 0 and a message number >= 1, got "
                    f"{partition_id}:{number}"
                )

    @classmethod
    def from_run_config(cls, run_config: UserConfig) -> FaultModel | None:
        """Read the ``fault-*`` keys; None if there are none.

        ``fault-dropout = 0.1``, ``fault-delay = "uniform:1,5"`` (or seconds), ``fault-stragglers = "0,3"``,
        ``fault-slowdown = 10.0``, ``fault-crash = "3:5"`` (partition 3 dies at its fifth message),
        ``fault-corrupt = "nan"`` and ``fault-corrupt-rate = 0.2``. An empty text means none.

        Raises
        ------
        ValueError
            With one line for every bad key.
        """
        given = {key: value for key, value in run_config.items() if key.startswith("fault-")}
        if not given:
            return None
        arguments: dict[str, Any] = {}
        errors = []
        for key, value in given.items():
            if key not in _READERS:
                errors.append(f"{key}={quoted(value)}: no such key; valid keys: {', '.join(_READERS)}")
                continue
            name, read = _READERS[key]
            try:
                arguments[name] = read(value)
                cls(**{name: arguments[name]})
            except (TypeError, ValueError, OverflowError) as error:
                errors.append(f"{key}={quoted(value)}: {error}")
        if errors:
            raise ValueError("\n".join(errors))
        return cls(**arguments)

    def absent(self, num_nodes: int) -> list[str]:
        """Return an error for each key that names a partition beyond ``num_nodes``."""
        return [
            f"{key}: {quoted(wrong)} of {num_nodes} nodes; valid are partition ids from 0 to {num_nodes - 1}"
            for key, ids in (("fault-stragglers", self.stragglers), ("fault-crash", self.crash_at))
            if (wrong := sorted(i for i in ids if not 0 <= i < num_nodes))
        ]

    def draw(self, key: int, partition_id: int, number: int) -> Fate:
        """Return the fate of a message, its ``number``-th (from 1), at a node.

        ``key`` is that of ``grid.message_key``; ``number`` counts for ``crash_at`` only.
        """
        if number >= self.crash_at.get(partition_id, number + 1):
            return Fate(crashed=True)
        # Always the same three draws in the same order, so that one fault's rate does not affect another.
        rng = generator(key, partition_id=partition_id, purpose=Purpose.FAULT)
        dropped = rng.random() < self.dropout
        corrupt = self.corrupt if rng.random() < self.corrupt_rate else None
        slowdown = self.slowdown if partition_id in self.stragglers else 1.0
        delay = self.delay.draw(rng) * slowdown
        return Fate(dropped=bool(dropped), delay=delay, slowdown=slowdown, corrupt=corrupt)


def corrupted(content: RecordDict, kind: str) -> RecordDict:
    """Return a corrupted copy of a reply's content."""
    out = content.copy()
    for name, record in content.items():
        if isinstance(record, ArrayRecord) and len(record):
            out[name] = _corrupted_arrays(record, kind)
            return out
    for name, record in content.items():
        if isinstance(record, MetricRecord) and len(record):
            key = next(iter(record))
            twin = record.copy()
            if kind == "keys":
                twin[f"unknown-{key}"] = twin.pop(key)
            else:
                twin[key] = float("nan") if kind == "nan" else [0.0, 0.0]
            out[name] = twin
            return out
    return out


def _corrupted_arrays(record: ArrayRecord, kind: str) -> ArrayRecord:
    key = next(iter(record))
    twin = record.copy()
    if kind == "keys":
        twin[f"unknown-{key}"] = twin.pop(key)
        return twin
    values = twin[key].numpy()
    if kind == "shape":
        twin[key] = Array(np.append(values.ravel(), values.ravel()[:1]))
    else:
        # Integers have no NaN, so they become floats.
        dtype = values.dtype if values.dtype.kind == "f" else np.dtype(np.float32)
        twin[key] = Array(np.full(values.shape, np.nan, dtype))
    return twin


def _items(value: object) -> list[str]:
    return [part.strip() for part in str(value).split(",") if part.strip()]


def _pair(text: str) -> tuple[int, int]:
    partition_id, colon, number = text.partition(":")
    if not colon:
        raise ValueError(f"it must be PARTITION:MESSAGE, like 3:5, got {quoted(text)}")
    return _whole(partition_id), _whole(number)


def _whole(text: str) -> int:
    # Longer numbers are never valid, and Python refuses to read 4,300 digits.
    if not text.strip().isdecimal() or len(text) > 18:
        raise ValueError(f"it must be an integer >= 0 of at most 18 digits, got {quoted(text)}")
    return int(text)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"it must be a number, got {quoted(value)}")
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise ValueError(f"it must be a number, got {quoted(value)}") from None


def _corruption(value: object) -> str | None:
    if isinstance(value, float) and isnan(value):  # As TOML reads an unquoted nan.
        return "nan"
    if not isinstance(value, str):
        raise ValueError(f"it must be one of {', '.join(CORRUPTIONS)}")
    return value or None


# Each run-config key: the field it sets, and how its value is read.
_READERS: Mapping[str, tuple[str, Callable[[Any], Any]]] = MappingProxyType(
    {
        "fault-dropout": ("dropout", _number),
        "fault-delay": ("delay", lambda value: Delay() if value == "" else Delay.parse(value)),
        "fault-stragglers": ("stragglers", lambda value: frozenset(_whole(item) for item in _items(value))),
        "fault-slowdown": ("slowdown", _number),
        "fault-crash": ("crash_at", lambda value: dict(_pair(item) for item in _items(value))),
        "fault-corrupt": ("corrupt", _corruption),
        "fault-corrupt-rate": ("corrupt_rate", _number),
    }
)
