"""``hedgerow predict`` and ``evaluate``: evaluate a trained model, or edge servers' mean model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hedgerow.sim.cli.options import (
    AppPath,
    NodeConfig,
    Paths,
    RunConfig,
    bad_options,
    interruptible,
    read_node_configs,
)

if TYPE_CHECKING:
    from flwr.app import UserConfig

    from hedgerow.sim.runs.app import AppSpec


def predict(
    app_path: AppPath,
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="Folder of the run that trained the model.")
    ] = None,
    node_config: NodeConfig = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Number of nodes. Default: as many as trained.")
    ] = None,
    run_config: RunConfig = None,
) -> None:
    """Evaluate the trained model of a run of one of the suite's apps, or of a copy made by 'new'.

    Prints its metrics as JSON: on the test data of the run's data set, or over the nodes with their own data
    of --node-config. A RUN alone names its app. Where nodes have models of their own, those of each. In apps
    with the key 'predict', a node with labels writes its predictions to the file ``predictions`` of its node
    config, if any; on devices, use that key with ``flwr run``.
    """
    from hedgerow.sim.runs.app import find_app, own_settings
    from hedgerow.sim.runs.folder import read_config
    from hedgerow.sim.runs.plan import plan_run, recorded_config
    from hedgerow.sim.runs.trained import evaluate_model
    from hedgerow.strategies import RosterError

    with bad_options():
        if run is None:
            run = Path(app_path).expanduser()
            app_path = str(read_config(run)["app"])
        spec = find_app(app_path)
        if own_settings(spec) is None:
            raise ValueError(f"APP must be one of the suite's or a copy of one, got {spec.name!r}")
        more = [*(run_config or []), *([f"num-clients={nodes}"] if nodes else [])]
        plan = plan_run(spec, [*recorded_config(spec, str(run)), *more])
        is_own = plan.run_config.get("partition") == "own"
        configs = read_node_configs(spec, node_config, plan.num_nodes) if node_config else None
        if is_own and configs is None:
            raise ValueError(
                "--node-config must name each node's data: the run's nodes had data of their own"
            )
    if is_own and "predict" in spec.config:
        _by_messages(spec, run, plan.run_config, configs)
        return
    try:
        with bad_options():
            metrics = evaluate_model(run.expanduser(), app_path, more, configs)
    except RosterError as error:
        typer.echo(f"Prediction failed: {error}", err=True)
        raise typer.Exit(1) from error
    if not metrics:
        typer.echo("Prediction failed: no node sent valid metrics; the log has the reasons", err=True)
        raise typer.Exit(1)
    typer.echo(json.dumps(metrics, indent=2))


def _by_messages(spec: AppSpec, run: Path, run_config: UserConfig, configs: list[UserConfig] | None) -> None:
    from hedgerow.sim.runs.app import load_app
    from hedgerow.sim.runs.folder import RunFolderError, read_rounds
    from hedgerow.sim.runs.launch import run_app
    from hedgerow.sim.runs.plan import plan_run, toml_value
    from hedgerow.sim.runs.settings import SettingsError
    from hedgerow.strategies import RosterError

    with bad_options():
        folder = toml_value(str(run.expanduser().resolve()))
        before = [f"{key}={toml_value(value)}" for key, value in run_config.items()]
        plan = plan_run(spec, [*before, f"predict={folder}"])
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


def evaluate(paths: Paths) -> None:
    """Evaluate u, the mean model of edge servers with direct links, after their runs.

    RUN is each server's run folder, or one folder that contains them. `report`, `table` and `plot` then
    show u.
    """
    from hedgerow.sim.runs.joined import parts_beneath, parts_of_runs
    from hedgerow.sim.runs.trained import evaluate_together

    with bad_options():
        given = [one for path in paths for one in parts_beneath(path) or [path]]
        runs, _ = parts_of_runs(given)
        if not runs:
            names = ", ".join(map(str, paths))
            raise ValueError(f"RUN must be the run folders of edge servers that ran together, got {names}")
        for parts in runs:
            records = evaluate_together(parts)
            metrics = " ".join(
                f"{key}={value:.4f}"
                for key, value in records[-1]["central"].items()
                if isinstance(value, float)
            )
            typer.echo(f"{len(parts)} edge servers, round {records[-1]['round']}: {metrics}")
