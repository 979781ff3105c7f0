"""What an engine may rely on when it looks for batched handlers."""

from collections.abc import Sequence
from dataclasses import FrozenInstanceError

import pytest
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp

from hedgerow.wire import Batched, BatchHandler, Call


def call(**node_config: int | str) -> Call:
    context = Context(run_id=1, node_id=9, node_config=node_config, state=RecordDict(), run_config={})
    return Call(RecordDict(), context, "train")


class Batching:
    def batch_handler(self, message_type: str) -> BatchHandler | None:
        def answer(calls: Sequence[Call]) -> list[RecordDict]:
            return [call.content for call in calls]

        return answer


def test_whatever_has_a_batch_handler_is_batched_and_flowers_own_client_app_is_not() -> None:
    assert isinstance(Batching(), Batched)
    assert not isinstance(ClientApp(), Batched)


@pytest.mark.parametrize("given", [3, "3"])
def test_the_partition_id_is_a_number_however_the_node_config_writes_it(given: int | str) -> None:
    assert call(**{"partition-id": given}).partition_id == 3


def test_a_call_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        call().message_type = "evaluate"  # type: ignore[misc]
