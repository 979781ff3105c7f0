"""The only file that touches Flower's private names.

Everything here was read and tested in Flower 1.41. Another version is refused at import, because a
moved private name would otherwise fail in the middle of a run, or silently change what a run means.
"""

from __future__ import annotations

import copy
import sys
import tomllib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict, UserConfig

_TESTED = (1, 41)
_FOUND = version("flwr")
if tuple(int(part) for part in _FOUND.split(".")[:2]) != _TESTED:
    raise ImportError(
        f"hedgerow.sim is tested with flwr>=1.41,<1.42 and found flwr {_FOUND}: "
        "pip install 'flwr[simulation]>=1.41,<1.42'"
    )

try:
    from flwr.app.message.message import make_message
    from flwr.clientapp.client_app import _empty_lifespan
    from flwr.common import log
    from flwr.common.config import flatten_dict, get_project_config
    from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
    from flwr.proto.node_pb2 import NodeInfo
    from flwr.supercore.inflatable.inflatable_object import InflatableObject, get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity
except ImportError as error:
    raise ImportError(
        f"flwr {_FOUND} lacks a name that hedgerow.sim uses ({error}); reinstall flwr>=1.41,<1.42"
    ) from error

Record = ArrayRecord | MetricRecord | ConfigRecord

__all__ = [
    "SUPERLINK_NODE_ID",
    "ErrorCode",
    "NodeInfo",
    "Record",
    "Run",
    "app_pyproject",
    "copy_records",
    "delivered",
    "empty_run",
    "flatten_dict",
    "flower_identity",
    "give_identity_back",
    "has_wrappers",
    "is_simulation",
    "lend_identity",
    "log",
    "read_toml",
    "set_message_id",
    "set_sender",
    "through_the_wire",
]

# What a TaskIdentity keeps.
_IDENTITY = ("_run_id", "_node_id", "_task_id")
# The grids that an identity was lent to, the last one to ask at the end.
_borrowers: dict[int, tuple[weakref.ref[object], int]] = {}


class _LentRunId(int):
    """The run id of a lent identity: one that a Flower process set is a plain integer."""


def lend_identity(borrower: object, run_id: int) -> None:
    """Let this process build messages as the ServerApp of a run, until the borrower is gone.

    ``flwr.app.Message(...)`` reads a process-wide identity that only Flower's own processes set. Where one of
    them did, or ``flower_identity`` did, it stays. Of several borrowers the last one to ask has its run's.
    """
    if TaskIdentity._run_id is not None and not isinstance(TaskIdentity._run_id, _LentRunId):
        return
    key = id(borrower)
    known = _borrowers.pop(key, None)
    reference = known[0] if known else weakref.ref(borrower, lambda _: _give_back(key))
    _borrowers[key] = reference, run_id
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = _LentRunId(run_id), SUPERLINK_NODE_ID, 1


def give_identity_back(borrower: object) -> None:
    """End a loan; the borrower before has its own again, and after the last one there is no identity."""
    _give_back(id(borrower))


def _give_back(key: int) -> None:
    if _borrowers.pop(key, None) is None or not isinstance(TaskIdentity._run_id, _LentRunId):
        return
    if _borrowers:
        _, run_id = next(reversed(_borrowers.values()))
        TaskIdentity.run_id = _LentRunId(run_id)
        return
    for name in _IDENTITY:
        setattr(TaskIdentity, name, None)


@contextmanager
def flower_identity(run_id: int) -> Iterator[None]:
    """Let this process build messages as the ServerApp of a run; the former identity comes back after."""
    before = {name: getattr(TaskIdentity, name) for name in _IDENTITY}
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, SUPERLINK_NODE_ID, 1
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(TaskIdentity, name, value)


def is_simulation(grid: object) -> bool:
    """Tell whether a grid is that of Flower's simulation, whose nodes are on this machine."""
    # A grid of the class has imported its module, which brings a data base and a web server with it.
    module = sys.modules.get("flwr.superlink.grid.inmemory_grid")
    return module is not None and isinstance(grid, module.InMemoryGrid)


def empty_run(run_id: int) -> Run:
    """Return the description of a run that no SuperLink knows."""
    return Run.create_empty(run_id)


def set_message_id(message: Message, message_id: str) -> None:
    """Give a message its id, which Flower leaves to the SuperLink."""
    message.metadata.__dict__["_message_id"] = message_id


def set_sender(message: Message, run_id: int) -> None:
    """Make a message the SuperLink's, of a run, whatever identity it was built under."""
    message.metadata.__dict__.update(_run_id=run_id, _src_node_id=SUPERLINK_NODE_ID)


def delivered(message: Message, content: RecordDict) -> Message:
    """Return the message as its node gets it: own metadata, the given content."""
    return make_message(metadata=copy.copy(message.metadata), content=content)


def copy_records(records: RecordDict, memo: dict[int, Record] | None = None) -> RecordDict:
    """Copy a RecordDict, its records and their lists, sharing the arrays.

    What Flower's classes let a handler change in passing (keys, values, lists) changes in the copy only.
    Writing into an array's own memory is seen through every copy. Records that are in ``memo`` (by id)
    are taken from there, and new copies are put there.
    """
    out = records.copy()
    data = out.__dict__["_data"]
    for name, record in data.items():
        twin = None if memo is None else memo.get(id(record))
        if twin is None:
            twin = _copy_record(record)
            if memo is not None:
                memo[id(record)] = twin
        data[name] = twin
    return out


def _copy_record(record: Record) -> Record:
    twin = record.copy()
    if not isinstance(record, ArrayRecord):
        values = twin.__dict__["_data"]
        for key, value in values.items():
            if isinstance(value, list):
                values[key] = value.copy()
    return twin


def has_wrappers(app: object, message_type: str) -> bool:
    """Tell whether mods or a lifespan stand around an app's handler of a message type."""
    if getattr(app, "_mods", None) or getattr(app, "_lifespan", _empty_lifespan) is not _empty_lifespan:
        return True
    name = message_type if "." in message_type else f"{message_type}.default"
    handler = getattr(app, "_registered_funcs", {}).get(name)
    # Flower wraps a handler in a closure of make_ffn only when it has mods.
    return getattr(handler, "__qualname__", "").startswith("make_ffn.")


def through_the_wire(records: RecordDict, what: str) -> RecordDict:
    """Serialise and read back records as a deployment does.

    Raises
    ------
    ValueError
        If something would not survive; the text starts with ``what`` and names the record and its key.
    """
    out = RecordDict()
    for name, record in records.items():
        try:
            out[name] = _round_trip(record)
        except Exception as error:
            culprit = _culprit(record)
            raise ValueError(
                f"{what}: record {name!r}{culprit} does not survive Flower's serialisation: "
                f"{type(error).__name__}: {error}"
            ) from error
    return out


def _round_trip(thing: Any) -> Any:
    contents = {object_id: part.deflate() for object_id, part in get_all_nested_objects(thing).items()}
    return inflate_object_from_contents(thing.object_id, contents)


def _culprit(record: Any) -> str:
    for key, value in record.items():
        try:
            if isinstance(value, InflatableObject):
                _round_trip(value)
            else:
                _round_trip(type(record)({key: value}))
        except Exception:
            return f", key {key!r}"
    return ""


def app_pyproject(folder: Path) -> tuple[dict[str, Any], UserConfig]:
    """Return a Flower App's pyproject.toml and its run config, flattened as Flower flattens it.

    Raises
    ------
    FileNotFoundError, ValueError
        If the file is missing, is not TOML, or lacks what Flower requires of an app.
    """
    try:
        pyproject = get_project_config(folder)
    except ValueError as error:
        raise ValueError(f"{folder / 'pyproject.toml'} is not a Flower App's: {error}") from error
    return pyproject, flatten_dict(pyproject["tool"]["flwr"]["app"].get("config", {}))


def read_toml(path: Path) -> UserConfig:
    """Return a TOML file of run-config values, flattened as Flower flattens it."""
    with path.open("rb") as file:
        return flatten_dict(tomllib.load(file))
