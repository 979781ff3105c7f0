"""The only file that touches Flower's private names.

What is needed of them is looked for and tried at import, because a private name that moved, or does something
else, would fail in the middle of a run, or silently change what a run means.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
import tomllib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict, UserConfig
from flwr.clientapp import ClientApp

# The private names by module, each with the parameters by which it is called or what is read off it.
_NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "flwr.app.message.message": {"make_message": ("metadata=", "content=")},
    "flwr.clientapp.client_app": {"_empty_lifespan": ()},
    "flwr.common": {"log": ()},
    "flwr.common.config": {"flatten_dict": (), "get_project_config": (), "parse_config_args": ()},
    "flwr.common.constant": {
        "ErrorCode": (
            "CLIENT_APP_CRASHED",
            "CLIENT_APP_RAISED_EXCEPTION",
            "MESSAGE_UNAVAILABLE",
            "NODE_UNAVAILABLE",
        ),
        "SUPERLINK_NODE_ID": (),
    },
    "flwr.proto.node_pb2": {"NodeInfo": ()},
    "flwr.supercore.inflatable.inflatable_object": {"InflatableObject": (), "get_all_nested_objects": ()},
    "flwr.supercore.inflatable.inflatable_utils": {"inflate_object_from_contents": ()},
    "flwr.supercore.run": {"Run": ("create_empty",)},
    "flwr.supercore.task_identity": {"TaskIdentity": ("_run_id", "_node_id", "_task_id")},
}


def _names_missing() -> list[str]:
    found: list[str] = []
    for module_name, names in _NEEDED.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            found.append(module_name)
            continue
        for name, parts in names.items():
            thing = getattr(module, name, None)
            if thing is None:
                found.append(f"{module_name}.{name}")
                continue
            for part in parts:
                has = (
                    part[:-1] in inspect.signature(thing).parameters
                    if part.endswith("=")
                    else hasattr(thing, part)
                )
                if not has:
                    found.append(f"{module_name}.{name}({part})" if part.endswith("=") else f"{name}.{part}")
    return found


def _check(missing: list[str]) -> None:
    if missing:
        raise ImportError(
            f"flwr {version('flwr')} lacks what hedgerow.sim needs of its private parts: "
            f"{', '.join(missing)}. Tested is flwr 1.41: pip install 'flwr[simulation]==1.41.*'"
        )


_check(_names_missing())

from flwr.app.message.message import make_message  # noqa: E402
from flwr.clientapp.client_app import _empty_lifespan  # noqa: E402
from flwr.common import log  # noqa: E402
from flwr.common.config import flatten_dict, get_project_config, parse_config_args  # noqa: E402
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode  # noqa: E402
from flwr.proto.node_pb2 import NodeInfo  # noqa: E402
from flwr.supercore.inflatable.inflatable_object import (  # noqa: E402
    InflatableObject,
    get_all_nested_objects,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents  # noqa: E402
from flwr.supercore.run import Run  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

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
    "parse_config_args",
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


# What the private parts do, tried once.


def _tries() -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yield what is needed of them, in words, and whether it is so."""
    records = RecordDict({"config": ConfigRecord({"list": [1]}), "arrays": ArrayRecord([])})
    with flower_identity(7):
        message = Message(records, 2, "query")
    set_sender(message, 8)
    set_message_id(message, "9")
    twin = copy_records(records)
    values: Any = twin.config_records["config"]["list"]
    values.append(2)
    metadata = message.metadata
    plain, wrapped = _app(), _app(_pass_on)

    yield "an identity for Message(...)", message.has_content
    yield (
        "Metadata._run_id, ._src_node_id",
        lambda: (
            (metadata.run_id, metadata.src_node_id)
            == (
                8,
                SUPERLINK_NODE_ID,
            )
        ),
    )
    yield "Metadata._message_id", lambda: metadata.message_id == "9"
    yield (
        "make_message with own metadata",
        lambda: (
            delivered(message, twin).content is twin and delivered(message, twin).metadata is not metadata
        ),
    )
    yield "RecordDict._data", lambda: records.config_records["config"]["list"] == [1]
    yield (
        "deflate and inflate of records",
        lambda: dict(through_the_wire(records, "probe").config_records["config"]) == {"list": [1]},
    )
    yield (
        "ClientApp._registered_funcs and make_ffn",
        lambda: has_wrappers(wrapped, "train") and not has_wrappers(plain, "train"),
    )
    yield "ClientApp._mods", lambda: has_wrappers(ClientApp(mods=[_pass_on]), "train")
    yield "ClientApp._lifespan", lambda: has_wrappers(_with_lifespan(), "train")


def _pass_on(message: Message, context: Any, call_next: Callable[..., Message]) -> Message:
    return call_next(message, context)


def _app(*mods: Any) -> ClientApp:
    app = ClientApp()
    app.train(mods=list(mods))(lambda message, _: message)
    return app


def _with_lifespan() -> ClientApp:
    app = ClientApp()

    @app.lifespan()
    def lifespan(_: Any) -> Iterator[None]:
        yield

    return app


def _tries_failed() -> list[str]:
    failed = []
    try:
        for what, holds in _tries():
            if not _without_error(holds):
                failed.append(what)
    except Exception as error:
        failed.append(f"{type(error).__name__}: {error}")
    return failed


def _without_error(holds: Callable[[], bool]) -> bool:
    try:
        return holds()
    except Exception:
        return False


_check(_tries_failed())
