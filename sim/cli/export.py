"""``hedgerow export``: runs for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hedgerow.sim.cli.options import Paths, bad_options, load_results

__all__ = ["export"]


def export(
    paths: Paths,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="One row for every measured value.")
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="All runs in one file that `plot` and `table` read."),
    ] = None,
    tensorboard: Annotated[
        Path | None,
        typer.Option("--tensorboard", metavar="FOLDER", help="A TensorBoard log per run (an extra)."),
    ] = None,
    onnx: Annotated[
        Path | None,
        typer.Option("--onnx", metavar="FILE", help="One run's trained model as ONNX (an extra)."),
    ] = None,
    torchscript: Annotated[
        Path | None,
        typer.Option("--torchscript", metavar="FILE", help="One run's trained model as TorchScript."),
    ] = None,
    app: Annotated[
        str | None,
        typer.Option(metavar="APP", help="The app of the model. Default: the suite's app of the run."),
    ] = None,
    input_shape: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Shape of one sample. Default: that of the run's data."),
    ] = None,
) -> None:
    """Write runs for other tools: a CSV file, one JSON file, TensorBoard logs, or a trained model.

    Beside a model's file, FILE.json says what its input and output are, and how the nodes scaled their data.
    """
    from hedgerow.sim.runs.collected import write_collected
    from hedgerow.sim.runs.export import write_csv, write_tensorboard

    with bad_options():
        if not any((csv, json, tensorboard, onnx, torchscript)):
            raise ValueError(
                "nothing to write: give --csv FILE, --json FILE, --tensorboard FOLDER, --onnx FILE or "
                "--torchscript FILE"
            )
        if onnx is not None or torchscript is not None:
            _export_model(paths, onnx, torchscript, app, input_shape)
        if not any((csv, json, tensorboard)):
            return
        results = load_results(paths)
        if csv is not None:
            typer.echo(f"{csv}: {write_csv(results, csv)} rows")
        if json is not None:
            typer.echo(f"{json}: {write_collected(results, json)} runs")
        if tensorboard is not None:
            typer.echo(f"{tensorboard}: {write_tensorboard(results, tensorboard)} logs")


def _export_model(
    paths: list[Path], onnx: Path | None, torchscript: Path | None, app: str | None, shape: str | None
) -> None:
    from hedgerow.sim.runs.folder import CONFIG

    if len(paths) != 1 or not (paths[0] / CONFIG).is_file():
        raise ValueError("--onnx and --torchscript must be used with the folder of one run")
    if shape is not None and not all(part.strip().isdigit() and int(part) for part in shape.split(",")):
        raise ValueError(f"--input-shape must be integers >= 1 with commas between them, got {shape!r}")

    from hedgerow.sim.cli.shipping import shipped, write_onnx, write_torchscript

    model = shipped(paths[0], app, None if shape is None else [int(part) for part in shape.split(",")])
    if onnx is not None:
        typer.echo(f"{onnx}: the model; {write_onnx(model, onnx)}: its preprocessing")
    if torchscript is not None:
        typer.echo(f"{torchscript}: the model; {write_torchscript(model, torchscript)}: its preprocessing")
