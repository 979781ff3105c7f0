"""What a node stores is bound to the masks of its sums."""

from collections.abc import Callable
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from tests.clients.contexts import context
from tests.clients.sums import APP, Nodes

from hedgerow.clients import BatchClientApp, each
from hedgerow.clients.stored_settings import state_digest, store_settings, stored_settings
from hedgerow.wire import Call

pytestmark = pytest.mark.usefixtures("devices")


def summed(before: Callable[[Context, int], None]) -> tuple[Any, list[int]]:
    """Return a sum of all nodes, each of which ``before`` was done to, and whose seeds it lacks."""
    nodes = Nodes()
    plan = nodes.plan()
    for i, own in enumerate(nodes.contexts):
        before(own, i)
    return nodes.total(plan, nodes.told(plan))


TOLD: dict[str, Callable[[Context, Any], None]] = {
    "a record to keep": lambda context, what: store_settings(context, "standardise", {"std": [what]}),
    "the run config": lambda context, what: context.run_config.update({"holdout": what}),
}


@pytest.mark.parametrize("name", TOLD)
def test_a_member_that_was_sent_other_settings_is_not_in_the_sum(name: str) -> None:
    # The others do not open its shares: its own mask stays on.
    total, bad = summed(lambda context, i: TOLD[name](context, 1.0 if i == 2 else 1e30))
    assert (total, bad) == (None, [2])
    total, bad = summed(lambda context, i: TOLD[name](context, 1.0))
    assert total is not None
    assert bad == []


def test_message_type_app_and_run_are_bound() -> None:
    found: list[bytes] = []

    def noting(call: Call) -> RecordDict:
        found.append(state_digest(call))
        return RecordDict()

    handlers = {"train": each(noting), "train.upload": each(noting)}
    for one, kind in ((handlers, "train"), (handlers, "train.upload"), ({"train": each(noting)}, "train")):
        handler = BatchClientApp(one).batch_handler(kind)
        assert handler is not None
        handler([Call(RecordDict(), context(), kind)])
    assert len(set(found)) == 3
    assert APP.batch_handler("train") is not None


def test_settings_of_another_run_are_not_returned() -> None:
    own = context()
    store_settings(own, "standardise", {"std": [1.0]}, {"people": ["a"]})
    assert dict(stored_settings(own, "standardise") or {}) == {"std": [1.0], "people": ["a"]}
    own.run_id += 1
    assert stored_settings(own, "standardise") is None
