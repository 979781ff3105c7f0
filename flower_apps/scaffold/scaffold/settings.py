"""The app's settings: what each key may be."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from hedgerow.clients import TASK_TEXTS
from hedgerow.sim.runs.common_settings import TrainingSettings
from hedgerow.sim.runs.kinds import Positive, Rounds, Samples, Steps
from hedgerow.sim.runs.settings import Role, Rules, Setting, setting
from hedgerow.strategies import Scaffold
from hedgerow.strategies.aggregate.sum_settings import training_options
from hedgerow.strategies.parts.server_optimisers import SERVER_STEP_TEXTS
from hedgerow.strategies.registry import REGISTRY_TEXTS


class Settings(TrainingSettings):
    """The app's settings."""

    TEXTS: ClassVar = {**TASK_TEXTS, **REGISTRY_TEXTS, **SERVER_STEP_TEXTS}

    num_clients: int = setting(10)
    num_rounds: Rounds = setting(30, "number of rounds", first=True, role=Role.RESUME)
    global_rate: Positive = setting(1.0, "the server's step size eta_g")
    learning_rate: Positive = setting(0.05, "the nodes' step size eta_l", "training", first=True)
    local_steps: Steps = setting(5, "steps K of a node in a round", "training", first=True)
    batch_size: Samples = setting(10, "samples per step", "training")
    option: Literal["I", "II"] = setting(
        "II", "a node's new control variate: its gradient at x (`I`), or the mean of its steps (`II`)"
    )
    partition: str = setting("dirichlet(0.5)")
    model: str = setting("logistic")

    def sum_sizes(self) -> tuple[int, int]:
        """Return the nodes of a round."""
        return self.num_clients, self.num_clients

    def rules(self) -> Rules:
        """Yield the conditions between values that are each valid."""
        yield from super().rules()
        yield not self.secure_sum, "secure-sum", "False (each node keeps a control variate of its own)"


def build_strategy(values: Settings, **task: Any) -> Scaffold:
    """Return the strategy; ``task`` has the options of ``TrainedTask``."""
    options = training_options(values.run_config)
    options.pop("secure_sum")
    own = {
        key: getattr(values, key)
        for key in ("learning_rate", "global_rate", "local_steps", "batch_size", "option")
    }
    return Scaffold(**own, **options, **task)


SETTINGS: Mapping[str, Setting] = Settings.table()
read = Settings.read
