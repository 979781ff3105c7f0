"""``hedgerow predict``: evaluates a trained model on the nodes' own data, by messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hedgerow.sim.cli.options import (
    AppPath,
    NodeConfig,
    RunConfig,
    bad_options,
    interruptible,
    read_node_configs,
)

__all__ = ["predict"]


def predict(
    app_path: AppPath,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run that trained the model.")],
    node_config: NodeConfig = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Number of nodes. Default: as many as trained.")
    ] = None,
    run_config: RunConfig = None,
) -> None:
    """Evaluate a trained model by messages alone, with nodes in this process: apps with the key 'predict'.

    Prints the metrics over all nodes. A node with labels writes its predictions to the file ``predictions``
    of its node config, if any. On devices, use the app's key ``predict`` with ``flwr run``.
    """
    from hedgerow.sim.runs.app import find_app, load_app
    from hedgerow.sim.runs.launch import run_app
    from hedgerow.sim.runs.plan import plan_run, resumed_config, toml_value
    from hedgerow.sim.runs.recorder import RunFolderError, read_rounds
    from hedgerow.sim.runs.settings import SettingsError
    from hedgerow.strategies import RosterError

    with bad_options():
        spec = find_app(app_path)
        if "predict" not in spec.config:
            raise ValueError(f"APP must have the run-config key 'predict', got {spec.name!r} without it")
        before = resumed_config(spec, str(run))
        folder = toml_value(str(run.expanduser().resolve()))
        asked = [*(run_config or []), *([f"num-clients={nodes}"] if nodes else [])]
        plan = plan_run(spec, [*before, *asked, "resume=''", f"predict={folder}"])
        configs = read_node_configs(spec, node_config, plan.num_nodes)
    output = Path(str(plan.run_config["output-dir"])).expanduser()
    there = set(output.glob("*/config.json"))
    try:
        with (
            bad_options(SettingsError, RunFolderError, FileNotFoundError),
            interruptible(lambda: "Interrupted"),
        ):
            run_app(load_app(spec.folder), plan, node_configs=configs)
    except (RosterError, ValueError) as error:
        typer.echo(f"Prediction failed: {error}", err=True)
        raise typer.Exit(1) from error
    for made in sorted(set(output.glob("*/config.json")) - there):
        metrics: dict[str, Any] = read_rounds(made.parent)[-1]["central"]
        typer.echo(json.dumps(metrics, indent=2))
