"""What a server tells a node to keep is bound to the masks of its sums, whoever writes a handler."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, RecordDict
from tests.clients.contexts import context
from tests.clients.sums import APP, Nodes, devices

import hedgerow.clients
from hedgerow.clients import BatchClientApp, each
from hedgerow.clients.hsgd.messages import note_terms
from hedgerow.clients.stored_settings import settings_digest, store_settings, stored_settings
from hedgerow.wire import UPDATE, Call, to_record
from hedgerow.wire.message_types import EXCHANGE

__all__ = ["devices"]


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


def test_what_is_a_nodes_own_is_not_bound() -> None:
    total, _ = summed(lambda context, i: store_settings(context, "terms", {"mean": [0.5]}, {"people": i}))
    assert total is not None


def test_message_type_app_and_run_are_bound() -> None:
    found: list[bytes] = []

    def noting(call: Call) -> RecordDict:
        found.append(settings_digest(call))
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
    before = settings_digest(Call(RecordDict(), own, "train"))
    own.run_id += 1
    assert stored_settings(own, "standardise") is None
    assert settings_digest(Call(RecordDict(), own, "train")) == settings_digest(
        Call(RecordDict(), context(), "train")
    )
    assert settings_digest(Call(RecordDict(), own, "train")) != before


# HSGD: what is uploaded was made in earlier messages.


def party(
    model: float = 0.0, eta0: float = 0.1, ids: tuple[str, ...] = ("a",), exchanges: tuple[int, ...] = (0, 2)
) -> bytes:
    """Return what binds the upload of a hospital after its intervals of two steps."""
    own = context()
    for t in exchanges:
        config = ConfigRecord(
            {"t": t, "ids": list(ids), "peers": list(ids), "sealed": True, "compress": False}
        )
        arrays = {"arrays": to_record({"head": np.full(3, model)})} if t == exchanges[0] else {}
        note_terms(Call(RecordDict({"config": config, **arrays}), own, EXCHANGE))
        config = ConfigRecord({"t": t, "steps": 2, "eta0": eta0, "ids": list(ids), "peers": list(ids)})
        note_terms(Call(RecordDict({"config": config}), own, UPDATE))
    return settings_digest(Call(RecordDict(), own, "train.upload"))


def test_hsgds_uploads_are_bound_to_the_model_and_the_rates_of_their_steps() -> None:
    honest = party()
    # Another group has other people, and may have missed an interval.
    assert party(ids=("b", "c")) == party(exchanges=(2,)) == honest
    assert len({honest, party(model=1.0), party(eta0=0.0)}) == 3


# Modules that write ``context.state`` directly, and why no sum depends on it.
DIRECT = {
    "stored_settings.py": "the function itself",
    "node_state.py": "the node's own state from before",
    "links.py": "keys, which are checked against the plan of a sum",
    "mods/mask.py": "the node's own part in its last sum",
    "mods/compress.py": "the residuals of the node's own updates",
    "gossip/stored_node.py": "no sums in gossip",
    "sd_feel/edge_server.py": "edge servers are not in sums",
    "fedmud/frozen_base.py": "the base, which is in the sum's own part (SumPart)",
    "fedmud/fedbat.py": "the state of a model, not of a node",
    "training/draws.py": "the state of a generator, not of a node",
    "mods/guard.py": "restores the state after a refused message",
    "hsgd/own_work.py": "restores the state after refused terms",
    "hsgd/messages.py": "the node's own steps, whose terms are stored (note_terms)",
}


def writes_a_state(tree: ast.AST) -> bool:
    """Whether code assigns to a context's ``state``, or to something in it, or calls what changes it."""

    def is_state(node: ast.expr) -> bool:
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        return name == "state" and not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))

    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and is_state(node.value):
            return True
        if isinstance(node, ast.Attribute) and node.attr == "state" and isinstance(node.ctx, ast.Store):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changes = node.func.attr in ("update", "clear", "pop", "setdefault")
            if changes and is_state(node.func.value):
                return True
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "keep":
            return True
    return False


def test_handlers_store_what_a_server_sent_only_here() -> None:
    room = Path(hedgerow.clients.__file__).parent
    writing = {
        str(file.relative_to(room))
        for file in sorted(room.rglob("*.py"))
        if writes_a_state(ast.parse(file.read_text()))
    }
    assert writing == DIRECT.keys()
    storing = [file for file in room.rglob("*.py") if "store_settings(" in file.read_text()]
    assert {str(file.relative_to(room)) for file in storing} == {
        "stored_settings.py", "own_share.py", "hsgd/own.py", "hsgd/messages.py",
    }  # fmt: skip
