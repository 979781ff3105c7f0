"""The only file that uses Flower's private names.

They are checked at import, because a private name that has moved or changed would fail in the middle of a
run, or silently change its meaning. Public names are those in ``__all__`` of Flower's packages;
tests/test_flower_names.py finds other names that are imported or read elsewhere.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import subprocess
import sys
import time
import tomllib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import flwr
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp


def _check(lacks: str) -> None:
    if lacks:
        raise ImportError(
            f"flwr {version('flwr')} lacks private names that hedgerow.sim uses: {lacks}. "
            f"Tested versions are 1.41 and 1.42: pip install 'flwr[simulation]>=1.41,<1.43'"
        )


try:
    from flwr.app.message.message import make_message
    from flwr.clientapp.client_app import _empty_lifespan
    from flwr.common.config import flatten_dict, get_project_config, parse_config_args
    from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
    from flwr.proto.node_pb2 import NodeInfo
    from flwr.supercore.inflatable.inflatable_object import InflatableObject, get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity
except ImportError as _error:
    _check(str(_error))

# Modules that are not imported here. The simulation's grid imports a database and a web server.
_SIMULATION = "flwr.superlink.grid.inmemory_grid"
# How a SuperExec starts programs; used by the warm executor only, without which a deployment is slower.
_EXECUTOR = "flwr.supercore.superexec.executor.subprocess_executor"

# Where a SuperNode asks for messages, and its SuperExec for tasks; without their pace a deployment is slower.
_SUPERNODE = "flwr.supernode.start_client_internal"
_SUPEREXEC = "flwr.supercore.superexec.run_superexec"

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
    "has_handler",
    "has_wrappers",
    "is_simulation",
    "launch_by",
    "lend_identity",
    "main_function",
    "pace_superexec",
    "pace_supernode",
    "parse_config_args",
    "read_toml",
    "set_message_ids",
    "set_sender",
    "through_the_wire",
]

# The fields of a TaskIdentity.
_IDENTITY = ("_run_id", "_node_id", "_task_id")
# The grids that have an identity, the most recent one last.
_borrowers: dict[int, tuple[weakref.ref[object], int]] = {}


class _LentRunId(int):
    """The run id of a lent identity; a Flower process sets a plain integer."""


def lend_identity(borrower: object, run_id: int) -> None:
    """Let this process build messages as the ServerApp of a run, while the borrower exists.

    ``flwr.app.Message(...)`` reads a process-wide identity that only Flower's own processes set. An identity
    that they or ``flower_identity`` set is kept. With several borrowers, the most recent one's run is used.
    """
    if TaskIdentity._run_id is not None and not isinstance(TaskIdentity._run_id, _LentRunId):
        return
    key = id(borrower)
    known = _borrowers.pop(key, None)
    reference = known[0] if known else weakref.ref(borrower, lambda _: _give_back(key))
    _borrowers[key] = reference, run_id
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = _LentRunId(run_id), SUPERLINK_NODE_ID, 1


def give_identity_back(borrower: object) -> None:
    """End a loan; the previous borrower's identity returns, and after the last one there is none."""
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
    """Let this process build messages as the ServerApp of a run; restore the former identity afterwards."""
    before = {name: getattr(TaskIdentity, name) for name in _IDENTITY}
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, SUPERLINK_NODE_ID, 1
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(TaskIdentity, name, value)


def is_simulation(grid: object) -> bool:
    """Return whether a grid is that of Flower's simulation, whose nodes are on this machine."""
    # If a grid of the class exists, its module is imported.
    module = sys.modules.get(_SIMULATION)
    return module is not None and isinstance(grid, module.InMemoryGrid)


def empty_run(run_id: int) -> Run:
    """Return a run that is unknown to any SuperLink."""
    return Run.create_empty(run_id)


def set_message_ids(messages: Sequence[Message], message_ids: Sequence[str]) -> None:
    """Set messages' ids, which Flower leaves to the SuperLink."""
    for message, message_id in zip(messages, message_ids, strict=True):
        message.metadata.__dict__["_message_id"] = message_id


def set_sender(messages: Sequence[Message], run_id: int) -> None:
    """Set messages' sender to the SuperLink and its run, whatever identity they were built with."""
    for message in messages:
        message.metadata.__dict__.update(_run_id=run_id, _src_node_id=SUPERLINK_NODE_ID)


def delivered(message: Message, content: RecordDict) -> Message:
    """Return a message with the given content and a copy of the metadata, as its node receives it."""
    return make_message(metadata=copy.copy(message.metadata), content=content)


def copy_records(records: RecordDict, memo: dict[int, Record] | None = None) -> RecordDict:
    """Copy a RecordDict, its records and their lists, sharing the arrays.

    Changes of keys, values and lists affect only the copy; writing into an array's memory affects all copies.
    Records in ``memo`` (by id) are taken from there, and new copies are added to it.
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
    """Return whether an app's handler of a message type has mods or a lifespan."""
    if getattr(app, "_mods", None) or getattr(app, "_lifespan", _empty_lifespan) is not _empty_lifespan:
        return True
    name = message_type if "." in message_type else f"{message_type}.default"
    handler = getattr(app, "_registered_funcs", {}).get(name)
    # Flower wraps a handler in a closure of make_ffn only when it has mods.
    return getattr(handler, "__qualname__", "").startswith("make_ffn.")


def has_handler(app: object, message_type: str) -> bool:
    """Return whether an app handles a message type; True if that is unknown."""
    name = message_type if "." in message_type else f"{message_type}.default"
    return name in getattr(app, "_registered_funcs", (name,))


def main_function(app: ServerApp) -> Callable[..., Any] | None:
    """Return an app's registered main function; None if there is none."""
    main: Callable[..., Any] | None = getattr(app, "_main", None)
    return main


def launch_by(start: Callable[..., None]) -> None:
    """Make this process's SuperExec start programs by a function in place of ``subprocess.Popen``.

    ImportError if this version of Flower starts them in another way.
    """
    try:
        executor: Any = importlib.import_module(_EXECUTOR)
        known = executor.subprocess is subprocess
    except (ImportError, AttributeError):
        known = False
    _check("" if known else f"{_EXECUTOR}.subprocess")
    executor.subprocess = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)


class Paced(Protocol):
    """When to ask again, see ``sim/deploy/pace.py``."""

    def active(self) -> None:
        """Note that there was a message."""

    def sleep(self, seconds: float) -> None:
        """Wait, in place of a fixed time."""


def pace_supernode(idle: Paced, reply: Paced) -> None:
    """Make this process's SuperNode ask for messages, and look for its ClientApp's replies, at other paces.

    ImportError if this version of Flower waits in another way.
    """
    supernode = _with_sleeps(_SUPERNODE, "time.sleep(3)", "time.sleep(0.5)", "time.sleep(0.5)")
    push = supernode._push_messages

    def pushed(*arguments: Any, **options: Any) -> None:
        reply.active()
        try:
            push(*arguments, **options)
        finally:
            idle.active()

    supernode._push_messages = pushed
    supernode.time = SimpleNamespace(sleep=lambda seconds: (idle if seconds == 3 else reply).sleep(seconds))


def pace_superexec(paced: Paced) -> None:
    """Make this process's SuperExec ask for tasks at another pace.

    ImportError if this version of Flower waits in another way.
    """
    superexec = _with_sleeps(_SUPEREXEC, "time.sleep(task_poll_interval)")
    superexec.time = SimpleNamespace(sleep=paced.sleep)


def _with_sleeps(name: str, *known: str) -> Any:
    """Return a module of Flower's, whose uses of ``time`` are these calls."""
    try:
        module: Any = importlib.import_module(name)
        calls = [
            ast.unparse(node)
            for node in ast.walk(ast.parse(inspect.getsource(module)))
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("time.")
        ]
        fits = module.time is time and sorted(calls) == sorted(known)
    except (ImportError, AttributeError, OSError):
        fits = False
    _check("" if fits else f"the waits of {name}")
    return module


def through_the_wire(records: RecordDict, what: str) -> RecordDict:
    """Serialize and deserialize records, as a deployment does.

    ValueError if that fails; the text starts with ``what`` and names the record and its key.
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
        raise ValueError(f"{folder / 'pyproject.toml'} is not valid for a Flower App: {error}") from error
    return pyproject, flatten_dict(pyproject["tool"]["flwr"]["app"].get("config", {}))


def read_toml(path: Path) -> UserConfig:
    """Return a TOML file of run-config values, flattened as Flower flattens it."""
    with path.open("rb") as file:
        return flatten_dict(tomllib.load(file))


# Checks of the private names at import


def _tries() -> dict[str, Callable[[], bool]]:
    """Return a check of each required private name, by its description."""
    records = RecordDict({"config": ConfigRecord({"list": [1]}), "arrays": ArrayRecord([])})
    with flower_identity(7):
        message = Message(records, 2, "query")
    set_sender([message], 8)
    set_message_ids([message], ["9"])
    twin = copy_records(records)
    values: Any = twin.config_records["config"]["list"]
    values.append(2)
    metadata = message.metadata
    plain, wrapped, app = ClientApp(), ClientApp(), ServerApp()
    plain.train()(_answer)
    wrapped.train(mods=[_pass_on])(_answer)
    app.main()(_nothing)

    def own_metadata() -> bool:
        copied = delivered(message, twin)
        return copied.content is twin and copied.metadata is not metadata

    codes = ("CLIENT_APP_CRASHED", "CLIENT_APP_RAISED_EXCEPTION", "MESSAGE_UNAVAILABLE", "NODE_UNAVAILABLE")
    grid = Path(flwr.__file__).parent.parent / f"{_SIMULATION.replace('.', '/')}.py"
    return {
        "an identity for Message(...)": message.has_content,
        "ErrorCode": lambda: all(hasattr(ErrorCode, code) for code in codes),
        "Run.create_empty": lambda: empty_run(7).run_id == 7,
        _SIMULATION: grid.is_file,
        "Metadata._run_id": lambda: metadata.run_id == 8,
        "Metadata._src_node_id": lambda: metadata.src_node_id == SUPERLINK_NODE_ID,
        "Metadata._message_id": lambda: metadata.message_id == "9",
        "make_message with own metadata": own_metadata,
        "RecordDict._data": lambda: records.config_records["config"]["list"] == [1],
        "deflate and inflate of records": lambda: through_the_wire(records, "probe") == records,
        "ClientApp._registered_funcs": lambda: (
            has_handler(plain, "train") and not has_handler(plain, "query")
        ),
        "make_ffn": lambda: not has_wrappers(plain, "train") and has_wrappers(wrapped, "train"),
        "ClientApp._mods": lambda: has_wrappers(ClientApp(mods=[_pass_on]), "train"),
        "ClientApp._lifespan": lambda: has_wrappers(_with_lifespan(), "train"),
        "ServerApp._main": lambda: main_function(app) is _nothing,
    }


def _pass_on(message: Message, context: Any, call_next: Callable[..., Message]) -> Message:
    return call_next(message, context)


def _answer(message: Message, _: Any) -> Message:
    return message


def _nothing(_: Any, __: Any) -> None:
    pass


def _with_lifespan() -> ClientApp:
    app = ClientApp()

    @app.lifespan()
    def lifespan(_: Any) -> Iterator[None]:
        yield

    return app


def _tries_failed() -> list[str]:
    try:
        return [what for what, holds in _tries().items() if not _without_error(holds)]
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def _without_error(holds: Callable[[], bool]) -> bool:
    try:
        return holds()
    except Exception:
        return False


_check(", ".join(_tries_failed()))
