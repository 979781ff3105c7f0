"""Contexts of nodes."""

from collections.abc import Mapping
from typing import Any

from flwr.app import Context, RecordDict


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
