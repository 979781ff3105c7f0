"""The trained models of recorded runs of the suite's apps and of their copies: as modules, and evaluated."""

from __future__ import annotations

import json
import os
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
from hedgerow.sim.runs.checkpoint import MODELS, NODES, load_arrays, read_model
from hedgerow.sim.runs.durable import write_file
from hedgerow.sim.runs.folder import read_config
from hedgerow.sim.runs.joined import TOGETHER, OrchestratorFolder, joined_config
from hedgerow.sim.runs.plan import plan_run, recorded_config
from hedgerow.sim.runs.serverapp import Experiment, LearntExperiment, experiment_of
from hedgerow.wire.records import Layout, to_record, to_state_dict

# Mean and deviation: one of each, or one per feature.
Scale = tuple[Sequence[float], Sequence[float]]


def load_model(run: str | Path, app: str | Path | None = None, *, node: int | None = None) -> nn.Module:
    """Return the trained model of a run as a torch module, in evaluation mode on the CPU.

    A model of nodes' own data standardizes its inputs as the nodes did.

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
    model, scale = _built(run, app)
    place = run if node is None else run / NODES / f"partition-{node}"
    model.load_state_dict(_tensors(read_model(place)))
    return model, scale


def initial_model(run: Path, app: str | Path | None = None) -> nn.Module:
    """Return the model with which a run began, as its app builds it again; errors as in ``load_model``."""
    return _built(run, app)[0]


def _built(run: Path, app: str | Path | None) -> tuple[nn.Module, Scale | None]:
    """Return a run's model before its first round, and mean and deviation of its inputs."""
    if app is None:
        app = str(read_config(run)["app"])
    made, scale = _experiment(run, app)[0], None
    if isinstance(made, LearntExperiment):
        data = read_config(run)["own-data"]
        scale = _standardisation(data, str(made.values.of("standardise")))
        made = made.make(_Recorded(tuple(data["input-shape"]), data["num-classes"]))
    if made.module is None:
        raise ValueError(f"run must be of a model that is a module, got {run}; its arrays: read_model")
    return made.module.cpu(), scale


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
    """Standardises inputs (N, ...) by constants of each channel or of the last axis, in float64."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float64))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the standardised inputs, as float32."""
        shape = (-1, 1, 1) if x.ndim == 4 else (-1,)
        out: torch.Tensor = (x.double() - self.mean.view(shape)) / self.std.view(shape)
        return out.float()


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
    plan = plan_run(spec, [*recorded_config(spec, str(run), "output-dir"), *overrides])
    loaded = load_app(spec.folder)
    made = experiment_of(loaded.server_app, plan.run_config)
    return made, plan.run_config, loaded.client_app, plan.num_nodes


def _tensors(arrays: Mapping[str, NDArray[np.generic]]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


# The global model of several edge servers, evaluated after the run from the models that they kept: without a
# cloud each server knows only its own, and keeps it in the rounds in which it is evaluated
# (``models/<round>.npz`` in the run folder). Here the models of all servers are combined by the app's
# ``Experiment.together`` and evaluated as in a run with one server.


def evaluate_together(parts: Sequence[OrchestratorFolder]) -> list[dict[str, Any]]:
    """Evaluate the global model of a run's servers; return one record per round, and write them to a file.

    A record has ``round``, the ``central`` metrics, and the app's metrics of the models in ``train``. The
    file is in the first server's folder, where ``report``, ``table`` and ``plot`` find it.

    Raises
    ------
    ValueError
        If no server kept a model, or the app does not combine models.
    """
    config = joined_config(parts)
    spec = find_app(str(config["app"]))
    settings = {**spec.config, **config["run"], "peers": parts[0].config["run"].get("peers", "")}
    made = experiment_of(load_app(spec.folder).server_app, settings)
    if not isinstance(made, Experiment) or made.together is None:
        raise ValueError(f"app {spec.name!r} does not combine the models of several servers")
    layout = Layout.of(made.initial_arrays)
    kept = {int(file.stem) for part in parts for file in (part.folder / MODELS).glob("[0-9]*.npz")}
    if not kept:
        raise ValueError(f"{parts[0].folder} and the others must have {MODELS}")
    records = []
    for number in sorted(kept):
        name = f"{number:06d}.npz"
        there = [part for part in parts if os.path.lexists(part.folder / MODELS / name)]
        arrays = [to_record(load_arrays(part.folder / MODELS / name)) for part in there]
        models = np.stack([layout.flatten(one, layout.float_type) for one in arrays])
        u, metrics = made.together(models, [_size(part, number) for part in there])
        # A run with one server has no metrics of training before the first round.
        trained = metrics if number else {}
        record = {
            "round": number,
            "train": {**trained, "servers": [part.number for part in there]},
            "central": dict(made.measure(to_state_dict(layout.unflatten(u)))),
        }
        records.append(record)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    write_file(parts[0].folder / TOGETHER, lambda file: file.write(lines.encode()))
    return records


def _size(part: OrchestratorFolder, number: int) -> float:
    """Return the number of samples in a server's cluster in a round; 1 before the first round."""
    sizes = [one["train"]["cluster-size"] for one in part.rounds if one["round"] == number and number]
    return float(sizes[-1]) if sizes else 1.0
