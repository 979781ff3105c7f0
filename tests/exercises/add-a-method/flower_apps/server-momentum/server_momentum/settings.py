"""The app's settings: what each key may be."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from hedgerow.clients import TASK_TEXTS
from hedgerow.sim.runs.common_settings import ImageSettings, RunSettings
from hedgerow.sim.runs.kinds import Rounds, in_range
from hedgerow.sim.runs.settings import Rules, Setting, setting
from hedgerow.strategies.registry import REGISTRY_TEXTS

__all__ = ["SETTINGS", "Settings", "read"]


class Settings(ImageSettings, RunSettings):
    """The app's settings."""

    TEXTS: ClassVar = {**TASK_TEXTS, **REGISTRY_TEXTS}

    beta: Annotated[float, in_range(0.0, 1.0, open_above=True)] = setting(
        0.8, "share of the momentum that is kept (0: FedAvg)"
    )
    num_rounds: Rounds = setting(30, "rounds")
    num_clients: int = setting(10, "nodes")

    def rules(self) -> Rules:
        """Yield the conditions between values that are each valid."""
        yield self.at_most("min-replies", "num-clients")


SETTINGS: Mapping[str, Setting] = Settings.table()
read = Settings.read
