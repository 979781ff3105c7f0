"""The context of a node that has no settings but its partition."""

from flwr.app import Context, RecordDict


def context(partition_id: int = 1) -> Context:
    return Context(
        run_id=1,
        node_id=100 + partition_id,
        node_config={"partition-id": partition_id},
        state=RecordDict(),
        run_config={},
    )
