"""Contexts of nodes, and what their handlers answer."""

from collections.abc import Mapping
from typing import Any

from flwr.app import Context, RecordDict

from hedgerow.clients import BatchClientApp
from hedgerow.wire import Call


def context(
    partition_id: int = 1,
    run_id: int = 1,
    *,
    state: RecordDict | None = None,
    run_config: Mapping[str, Any] | None = None,
    **node_config: Any,
) -> Context:
    """Return a node's context; its node config has its partition and what else is given."""
    own = {"partition-id": partition_id, **{key.replace("_", "-"): v for key, v in node_config.items()}}
    return Context(
        run_id, 100 + partition_id, own, RecordDict() if state is None else state, dict(run_config or {})
    )


def answer(app: BatchClientApp, kind: str, own: Context, content: RecordDict) -> RecordDict | Exception:
    """Return what an app's handler answers one call of a node with."""
    handler = app.batch_handler(kind)
    assert handler is not None
    (only,) = handler([Call(content, own, kind)])
    return only


def answered(app: BatchClientApp, kind: str, own: Context, content: RecordDict) -> RecordDict:
    """Return the same where it is no error, and raise the error else."""
    only = answer(app, kind, own, content)
    if isinstance(only, Exception):
        raise only
    return only
