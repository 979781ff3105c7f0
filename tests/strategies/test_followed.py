"""A ClientApp that ignores what a method asks of it is named in the first round."""

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from hedgerow.sim import InProcessGrid, flower_identity
from hedgerow.strategies import FedMUD, Fixed, RoundEnd, SimilarityFree, TooFewRepliesError

NODES = 4


def app(**metrics: Any) -> ClientApp:
    """Return nodes that train as they always do; each metric is a value, or one by partition id."""
    plain = ClientApp()

    @plain.train()
    def train(message: Message, context: Context) -> Message:
        at = int(context.node_config["partition-id"])
        moved = {key: Array(array.numpy() + at) for key, array in message.content["arrays"].items()}
        own = {key: value[at] if isinstance(value, list) else value for key, value in metrics.items()}
        told = {key.replace("_", "-"): value for key, value in own.items() if value is not None}
        told["num-examples"] = 5
        records = {"arrays": ArrayRecord(moved), "metrics": MetricRecord(told)}
        return Message(RecordDict(records), reply_to=message)

    return plain


def similarity_free(**options: Any) -> SimilarityFree:
    return SimilarityFree(
        schedule=Fixed(c=1e-9, num_rounds=1), min_available_nodes=NODES, fraction_evaluate=0.0, **options
    )


def fedmud() -> Any:
    return FedMUD(
        variant="dense", layers=[], num_parameters=3, min_available_nodes=NODES, fraction_evaluate=0.0
    )


def ends(strategy: Any, client: ClientApp, rounds: int = 1) -> list[RoundEnd]:
    found: list[RoundEnd] = []
    strategy.on_round_end = [found.append]
    with InProcessGrid(client, NODES) as grid, flower_identity(1):
        strategy.start(grid, ArrayRecord({"w": Array(np.zeros(3, np.float32))}), rounds)
    return [end for end in found if end.round]


@pytest.mark.parametrize(
    ("strategy", "ignored", "use"),
    [
        (similarity_free, "operator, local-step, local-iters", "similarity_free_client()"),
        (fedmud, "method, learning-rate, local-epochs", "fedmud_client()"),
    ],
)
def test_an_app_of_another_method_ends_the_run_in_its_first_round(
    strategy: Any, ignored: str, use: str
) -> None:
    with pytest.raises(TooFewRepliesError) as error:
        ends(strategy(), app(), rounds=3)
    told = str(error.value)
    assert told.startswith("Round 1: 0 valid replies of 4")
    assert f"4 x the ClientApp ignores {ignored}" in told
    assert use in told


@pytest.mark.parametrize("metrics", [{"local_step": 1e-9}, {"drift_norm": 0.5}])
def test_an_app_of_ones_own_says_that_it_followed(metrics: dict[str, Any]) -> None:
    (end,) = ends(similarity_free(), app(**metrics))
    assert (end.accepted, end.rejected) == (NODES, {})


def test_a_node_that_ignores_the_method_among_others_costs_its_own_reply() -> None:
    (end,) = ends(similarity_free(), app(local_step=[1e-9, 1e-9, None, 1e-9]))
    assert end.accepted == NODES - 1
    (reason,) = end.rejected
    assert reason.startswith("the ClientApp ignores operator")


def test_another_step_than_was_asked_for_is_refused() -> None:
    (end,) = ends(similarity_free(), app(local_step=[1e-9, 1e-9, 0.1, 1e-9]))
    assert (end.accepted, end.rejected) == (NODES - 1, {"local-step is not what was asked": 1})
