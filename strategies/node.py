"""A node of the federation, as it introduces itself."""

import re
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

from flwr.app import ConfigRecord, Message

from hedgerow.wire.limits import MAX_EXAMPLES, MAX_WORD
from hedgerow.wire.message_types import MESSAGE_FORMAT
from hedgerow.wire.printable import quoted, shown
from hedgerow.wire.records import PayloadError

# The node id of a vacant place; Flower's are positive.
VACANT = 0
# The partition id of a node that reported only a name.
UNKNOWN = -1
# Bounds on the reported data shapes, from which a server builds its model.
_MOST_AXES, _MOST_ENTRIES, _MOST_CLASSES = 8, 2**27, 2**20
# Bounds on the keys of a model.
_MOST_KEYS, _MOST_LENGTH = 2**16, 500
_DEFAULT_NAME = re.compile(r"partition-\d+")


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes of a node's data; None for what it did not report.

    Parameters
    ----------
    input_shape : tuple[int, ...] or None
        Shape of one sample.
    num_classes : int or None
        Number of label classes, >= 1.
    dtype : str or None
        The samples' dtype, for example ``"float32"``.
    """

    input_shape: tuple[int, ...] | None = None
    num_classes: int | None = None
    dtype: str | None = None

    def disagreement(self, other: "Shapes") -> str | None:
        """Return why the other data are incompatible; None if they are compatible or not known."""
        for one in fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            if None not in (mine, theirs) and mine != theirs:
                return f"another {one.name.replace('_', ' ').replace('num ', 'number of ')}"
        return None

    def joined(self, other: "Shapes") -> "Shapes":
        """Return these shapes, with the unknown ones taken from ``other``."""
        mine = {one.name: getattr(self, one.name) for one in fields(self)}
        return replace(other, **{key: value for key, value in mine.items() if value is not None})


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the federation.

    Parameters
    ----------
    partition_id : int
        Its place in the federation, 0 to N-1; it keys data, random streams, state, records and order. A node
        that reports only a name is assigned one, and keeps it.
    node_id : int
        Flower's id, random per run (and new after a restart without node authentication).
    num_examples : int or None
        Local training examples; None if not reported.
    role, group : str
        From the node's config; empty if not set.
    name : str or None
        Its stable name: the one registered with its key, else the one in its node config, else
        ``partition-<partition_id>``. None if nodes do not introduce themselves.
    input_shape, num_classes, dtype
        As in ``Shapes``.
    knows_its_place : bool
        Whether the node reported its partition id; a node that reported only a name does not know it.
    max_examples : int or None
        Upper bound on its weight in examples, from a registry.
    frozen : tuple[str, ...]
        Keys of its model that no training changes.
    """

    partition_id: int
    node_id: int
    num_examples: int | None = None
    role: str = ""
    group: str = ""
    name: str | None = None
    input_shape: tuple[int, ...] | None = None
    num_classes: int | None = None
    dtype: str | None = None
    knows_its_place: bool = True
    max_examples: int | None = None
    frozen: tuple[str, ...] = ()

    @property
    def shapes(self) -> Shapes:
        """The shapes of its data."""
        return Shapes(self.input_shape, self.num_classes, self.dtype)

    @property
    def vacant(self) -> bool:
        """Whether no node has this place yet."""
        return self.node_id == VACANT


def placed(node: Node) -> str | None:
    """Return why a node is excluded that must know its partition id, for common random draws or a graph."""
    return None if node.knows_its_place else "no partition id"


def introduced(message: Message) -> Node:
    """Return the node that an introduction describes; its partition id is -1 if it has only a name.

    Raises PayloadError with reason ``malformed introduction``, or ``another message format`` if the node's
    version of hedgerow uses another one.
    """
    try:
        me = message.content.config_records["whoami"]
        # Introductions by other code than ours do not report it.
        spoken = _integer(me, "message-format", 1) if "message-format" in me else MESSAGE_FORMAT
        if spoken == MESSAGE_FORMAT:
            return _node(me, message.metadata.src_node_id)
    except (KeyError, TypeError, ValueError) as error:
        raise PayloadError("malformed introduction", shown(error)) from None
    raise PayloadError(
        "another message format",
        f"message-format must be {MESSAGE_FORMAT}, as this server speaks, got {spoken}: install the same "
        "version of hedgerow on both",
    )


def _node(me: ConfigRecord, node_id: int) -> Node:
    name = _text(me, "name") or None
    at = _integer(me, "partition-id") if "partition-id" in me or name is None else UNKNOWN
    if name is not None and _DEFAULT_NAME.fullmatch(name) and name != f"partition-{at}":
        raise ValueError(f"name is {name!r}, which is reserved for the node with this partition-id")
    return Node(
        partition_id=at,
        node_id=node_id,
        num_examples=_integer(me, "num-examples") if "num-examples" in me else None,
        role=_text(me, "role"),
        group=_text(me, "group"),
        name=name,
        input_shape=_shape(me["input-shape"]) if "input-shape" in me else None,
        num_classes=_integer(me, "num-classes", 1, _MOST_CLASSES) if "num-classes" in me else None,
        dtype=_text(me, "dtype") or None,
        knows_its_place=at != UNKNOWN,
        frozen=_keys(me["frozen"]) if "frozen" in me else (),
    )


def _keys(value: Any) -> tuple[str, ...]:
    keys = value if isinstance(value, list) else [value]
    if len(keys) > _MOST_KEYS or not all(isinstance(k, str) and len(k) <= _MOST_LENGTH for k in keys):
        raise ValueError(
            f"frozen must be at most {_MOST_KEYS} keys of up to {_MOST_LENGTH} characters, got "
            f"{quoted(value)}"
        )
    return tuple(keys)


def _integer(me: ConfigRecord, key: str, least: int = 0, most: int = MAX_EXAMPLES) -> int:
    value: Any = me[key]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{key} must be an integer from {least} to {most}, got {quoted(value)}")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    axes = value if isinstance(value, list) else [value]
    whole = all(isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= _MOST_ENTRIES for n in axes)
    if len(axes) > _MOST_AXES or not whole or prod(axes) > _MOST_ENTRIES:
        raise ValueError(
            f"input-shape must be up to {_MOST_AXES} integers >= 1 with a product of at most "
            f"{_MOST_ENTRIES}, got {quoted(value)}"
        )
    return tuple(axes)


def _text(me: ConfigRecord, key: str) -> str:
    value = str(me.get(key, ""))
    if value != shown(value, MAX_WORD):  # Logs and errors quote it verbatim.
        raise ValueError(
            f"{key} must be a text of up to {MAX_WORD} printable characters, got {quoted(value)}"
        )
    return value
