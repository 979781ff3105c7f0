"""Hooks for Hedgerow's commands: the planner and the row in ``hedgerow check``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hedgerow.sim import CheckedNodes, Hooks, Verdict
from similarity_free.plan import plan

_FEW, _MORE = 1, 4


def check(nodes: CheckedNodes) -> Iterator[Verdict]:
    """Request few local iterations and then more, two step sizes, then compressed updates."""
    yield _verdict(nodes)


def _verdict(nodes: CheckedNodes) -> Verdict:
    from hedgerow.strategies import SimilarityFree
    from hedgerow.strategies.schedules import Fixed

    name = "SimilarityFree"
    mend = (
        "app = similarity_free_client()  # from hedgerow.clients; "
        "dataset and model in the run config are your own"
    )

    def strategy(iters: int, step: float = 0.01, **more: Any) -> SimilarityFree:
        return SimilarityFree(
            schedule=Fixed(c=step, num_rounds=1), local_iters=iters, batch_size=8, max_repeats=0, **more,
            **nodes.options,
        )  # fmt: skip

    honours, few, more = nodes.honours(strategy, _FEW, _MORE)
    if not (few.served and more.served):
        return Verdict(name, "no", (more if few.served else few).reason, mend)
    if honours is False:
        return Verdict(name, "no", "nodes ignore config['local-iters']", mend)
    steps, *_ = nodes.honours(lambda step: strategy(_FEW, step), 0.01, 0.02)
    if steps is False:
        return Verdict(name, "no", "nodes ignore config['local-step'], the step size", mend)
    compressing = nodes.run(strategy(_FEW, compressor="topk(0.5)"), rounds=2)
    if not compressing.served:
        return Verdict(name, "partly", f"without a compressor only: {compressing.reason}", mend)
    if honours is None or steps is None:
        return Verdict(
            name, "unknown", "equal instructions give different models, or training changes nothing", mend
        )
    return Verdict(name, "yes")


HOOKS = Hooks(plan=plan, check=check)
