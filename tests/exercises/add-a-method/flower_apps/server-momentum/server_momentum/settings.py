"""The app's settings: what each key may be."""

from collections.abc import Mapping
from typing import Any

from hedgerow.clients import TASK_TEXTS
from hedgerow.sim.runs.common_settings import HOLDOUT, RUN_SETTINGS, SEED, task_settings
from hedgerow.sim.runs.kinds import MAX_NODES, MAX_ROUNDS, in_range, whole
from hedgerow.sim.runs.settings import Setting, at_most, reader

__all__ = ["SETTINGS", "read"]

SETTINGS: Mapping[str, Setting] = {
    "beta": Setting(
        0.8, in_range(0.0, 1.0, open_above=True), "share of the momentum that is kept (0: FedAvg)"
    ),
    "num-rounds": Setting(30, whole(1, MAX_ROUNDS), "rounds"),
    "num-clients": Setting(10, whole(1, MAX_NODES), "nodes"),
    **task_settings(TASK_TEXTS),
    "holdout": HOLDOUT,
    "seed": SEED,
    **RUN_SETTINGS,
}


def _problems(values: Mapping[str, Any]) -> list[str]:
    return at_most(values, ("min-replies", "num-clients"))


read = reader(SETTINGS, _problems)
