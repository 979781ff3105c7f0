"""The trained models of recorded runs of the suite's apps and of their copies: as modules, and evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

__all__ = ["evaluate_model", "load_model"]


def load_model(run: str | Path, app: str | Path | None = None, *, node: int | None = None) -> nn.Module:
    """Return the trained model of a run as a torch module, in evaluation mode on the CPU.

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
    run = Path(run).expanduser()
    if app is None:
        app = str(read_config(run)["app"])
    made = _experiment(run, app)[0]
    if isinstance(made, LearntExperiment) or made.module is None:
        raise ValueError(
            f"run must be of a model that its app builds from its settings, got {run}; its arrays: read_model"
        )
    place = run if node is None else run / NODES / f"partition-{node}"
    model = made.module.cpu()
    model.load_state_dict(_tensors(read_model(place)))
    return model.eval()


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
    if isinstance(made, LearntExperiment):
        with InProcessGrid(client_app, num_nodes, run_config=config, node_configs=node_configs) as grid:
            learnt = made.learn(grid, read_config(run))
            return dict(learnt.measure(_tensors(read_model(run))))
    if made.predict is None:
        return dict(made.measure(_tensors(read_model(run))))
    of_nodes = sorted((run / NODES).glob("partition-*"), key=lambda place: int(place.name.partition("-")[2]))
    if not of_nodes:
        return dict(made.predict(read_model(run)))
    return {place.name: dict(made.predict(read_model(place))) for place in of_nodes}


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
