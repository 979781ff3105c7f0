"""Nodes of a secure sum, and what a server that is at hand asks them."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from tests.clients.contexts import answered, context
from tests.strategies.summing import app

from hedgerow.clients import BatchClientApp
from hedgerow.wire import (
    MASKED,
    MASKED_SUM,
    SUM_KEYS,
    SUM_SHARES,
    default_neighbours,
    survivors_needed,
    to_record,
    view,
)
from hedgerow.wire.masked_sums import SumPlan, Unmasking, told_content

__all__ = ["APP", "N", "Nodes", "instruction"]

N = 5
APP = app()


class Nodes:
    """The devices of a federation."""

    def __init__(self, n: int = N, client: BatchClientApp = APP, **config: Any) -> None:
        self.client = client
        self.contexts = [context(i, 7, **config) for i in range(n)]
        told = [self.ask(i, SUM_KEYS, RecordDict({"config": ConfigRecord({"seed": 0})})) for i in range(n)]
        self.keys = [one[MASKED_SUM]["introduction"] for one in told]

    def ask(self, node: int, kind: str, content: RecordDict) -> RecordDict:
        return answered(self.client, kind, self.contexts[node], content)

    def plan(self, members: list[int] | None = None, **parts: Any) -> SumPlan:
        members = list(range(len(self.contexts))) if members is None else members
        n = len(members)
        plan = SumPlan(
            number=1,
            members=tuple(members),
            introductions=tuple(self.keys[i] for i in members),
            threshold=survivors_needed(n),
            neighbours=default_neighbours(n),
            clip=8.0,
            max_weight=1000.0,
            weighted_by="num-examples",
        )
        return replace(plan, **parts)

    def train(self, node: int, plan: SumPlan) -> RecordDict:
        return self.ask(node, "train", instruction(plan))

    def told(self, plan: SumPlan) -> dict[int, RecordDict]:
        """Return what each node replies to its instruction."""
        return {i: self.train(i, plan) for i in range(len(self.contexts))}

    def total(
        self, plan: SumPlan, told: Mapping[int, RecordDict], survivors: Iterable[int] | None = None
    ) -> tuple[Any, list[int]]:
        """Return the sum of the survivors, and whose seeds it lacks."""
        alive = sorted(told if survivors is None else survivors)
        content = instruction(plan)
        about = plan.about(told_content(RecordDict({key: content[key] for key in ("arrays", "config")})))
        words = {i: view(told[i][MASKED][MASKED]) for i in alive}
        solving = Unmasking(plan, about, words, {i: told[i]["shares"]["commitments"] for i in alive})
        for i in alive:
            solving.take(i, solving.check(i, self.shares(i, plan, alive, told)))
        return solving.total()

    def shares(self, node: int, plan: SumPlan, survivors: list[int], told: Mapping[int, RecordDict]) -> bytes:
        parts = []
        for other in survivors:
            if other != node:
                at, size = plan.members.index(node), plan.share_bytes
                place = at - (at > plan.members.index(other))
                parts.append(told[other]["shares"]["sealed"][size * place : size * (place + 1)])
        config = ConfigRecord(
            {"number": plan.number, "survivors": survivors, "sealed": b"".join(parts), "seed": 0}
        )
        answer = self.ask(node, SUM_SHARES, RecordDict({"config": config}))
        shares = answer["shares"]["shares"]
        assert isinstance(shares, bytes)
        return shares


def instruction(plan: SumPlan, steps: int = 1) -> RecordDict:
    return RecordDict(
        {
            "arrays": to_record({"w": np.zeros(40)}),
            "config": ConfigRecord({"server-round": 1, "local-steps": steps}),
            MASKED_SUM: ConfigRecord({**plan.record(), "seed": 0}),
        }
    )
