"""Evaluate the global model of several edge servers after the run, from the models that they kept.

Without a cloud each server knows only its own model, and keeps it in the rounds in which it is evaluated
(``models/<round>.npz`` in the run folder). Here the models of all servers are combined by the app's
``Experiment.together`` and evaluated as in a run with one server.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from hedgerow.sim.runs.app import find_app, load_app
from hedgerow.sim.runs.durable import write_file
from hedgerow.sim.runs.joined import TOGETHER, OrchestratorFolder, joined_config
from hedgerow.sim.runs.model_files import MODELS, load_arrays
from hedgerow.sim.runs.serverapp import Experiment, experiment_of
from hedgerow.wire.records import Layout, to_record, to_state_dict


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
