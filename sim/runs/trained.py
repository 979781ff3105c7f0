"""The trained models of recorded runs of the suite's apps and of their copies: as modules, and evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import UserConfig
from numpy.typing import NDArray
from torch import nn

from hedgerow.sim.engine.grid import InProcessGrid
from hedgerow.sim.runs.app import find_app, load_app
from hedgerow.sim.runs.folder import read_config
from hedgerow.sim.runs.model_files import NODES, read_model
from hedgerow.sim.runs.plan import plan_run, resumed_config
from hedgerow.sim.runs.serverapp import Experiment, LearntExperiment, experiment_of

# Mean and deviation: one of each, or one per feature.
Scale = tuple[Sequence[float], Sequence[float]]


def load_model(run: str | Path, app: str | Path | None = None, *, node: int | None = None) -> nn.Module:
    """Return the trained model of a run as a torch module, in evaluation mode on the CPU.

    A model of nodes' own data standardises its inputs as the nodes did.

    Parameters
    ----------
    run : str or Path
        The run folder.
    app : str, Path or None (default: None)
        The app: a folder, a module or a name; None for the suite's app that made the run.
    node : int or None (default: None)
        The partition id, where each node has its own model.

    Raises
    ------
    ValueError
        If the app is not found or no module describes its model; the arrays are in ``read_model``.
    RunFolderError
        If there is no such model.

    Examples
    --------
    ::

        model = load_model("runs/my-app-…", "my-app")
        with torch.no_grad():
            classes = model(x).argmax(1)
    """
    model, scale = trained_model(Path(run).expanduser(), app, node=node)
    return (model if scale is None else nn.Sequential(_Standardise(*scale), model)).eval()


def trained_model(
    run: Path, app: str | Path | None = None, *, node: int | None = None
) -> tuple[nn.Module, Scale | None]:
    """Return the model of ``load_model`` without standardisation, and mean and deviation of its inputs.

    These are None where nodes do not standardise.
    """
    if app is None:
        app = str(read_config(run)["app"])
    made, scale = _experiment(run, app)[0], None
    if isinstance(made, LearntExperiment):
        data = read_config(run)["own-data"]
        scale = _standardisation(data, str(made.values.of("standardise")))
        made = made.make(_Recorded(tuple(data["input-shape"]), data["num-classes"]))
    if made.module is None:
        raise ValueError(f"run must be of a model that is a module, got {run}; its arrays: read_model")
    place = run if node is None else run / NODES / f"partition-{node}"
    model = made.module.cpu()
    model.load_state_dict(_tensors(read_model(place)))
    return model, scale


def evaluate_model(
    run: Path,
    app: str | Path,
    overrides: Sequence[str] = (),
    node_configs: Sequence[UserConfig] | None = None,
) -> Mapping[str, Any]:
    """Return the metrics of a run's model: on the data of its settings, or on nodes' own data.

    The metrics of nodes with models of their own are named by the node.
    """
    made, config, client_app, num_nodes = _experiment(run, app, overrides)
    with ExitStack() as stack:
        if isinstance(made, LearntExperiment):
            grid = InProcessGrid(client_app, num_nodes, run_config=config, node_configs=node_configs)
            made = made.learn(stack.enter_context(grid), read_config(run))
        if made.predict is None:
            return dict(made.measure(_tensors(read_model(run))))
        places = (run / NODES).glob("partition-*")
        of_nodes = sorted(places, key=lambda place: int(place.name.partition("-")[2]))
        if not of_nodes:
            return dict(made.predict(read_model(run)))
        return {place.name: dict(made.predict(read_model(place))) for place in of_nodes}


@dataclass(frozen=True)
class _Recorded:
    """The nodes of a recorded run, as far as a model depends on them."""

    input_shape: tuple[int, ...]
    num_classes: int
    sizes: Sequence[int] = (1,)
    roster: None = None
    measure: None = None


class _Standardise(nn.Module):
    """Standardises inputs (N, ...) by constants of each channel, or of the last axis."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the standardised inputs."""
        shape = (-1, 1, 1) if x.ndim == 4 else (-1,)
        out: torch.Tensor = (x - self.mean.view(shape)) / self.std.view(shape)
        return out


def _standardisation(data: Mapping[str, Any], text: str) -> Scale | None:
    """Return the mean and deviation of a run's record, or of its setting; None if there are none."""
    if "mean" in data:
        return data["mean"], data["std"]
    if text in ("federated", "none"):
        return None
    mean, std = map(float, text.split(","))
    return [mean], [std]


def _experiment(
    run: Path, app: str | Path, overrides: Sequence[str] = ()
) -> tuple[Experiment | LearntExperiment, UserConfig, Any, int]:
    spec = find_app(app)
    plan = plan_run(spec, [*resumed_config(spec, str(run)), "resume=''", *overrides])
    loaded = load_app(spec.folder)
    made = experiment_of(loaded.server_app, plan.run_config)
    return made, plan.run_config, loaded.client_app, plan.num_nodes


def _tensors(arrays: Mapping[str, NDArray[np.generic]]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
