"""``hedgerow export``: runs for other tools."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hedgerow.sim.cli.options import Paths, bad_options, load_results

if TYPE_CHECKING:
    from hedgerow.sim.runs.results import Results


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
    adapter: Annotated[
        Path | None,
        typer.Option("--adapter", metavar="FOLDER", help="One run's change as a PEFT adapter."),
    ] = None,
    max_rank: Annotated[
        int, typer.Option(min=1, max=2**20, help="The largest rank that an adapter may have.")
    ] = 256,
    app: Annotated[
        str | None,
        typer.Option(metavar="APP", help="The app of the model. Default: the suite's app of the run."),
    ] = None,
    input_shape: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Shape of one sample. Default: that of the run's data."),
    ] = None,
) -> None:
    """Write runs for other tools: a CSV file, one JSON file, TensorBoard logs, a trained model or adapter.

    Next to a model's file, FILE.json describes its input and output, and how the nodes scaled their data.
    """
    from hedgerow.sim.runs.results import write_collected

    with bad_options():
        if not any((csv, json, tensorboard, onnx, torchscript, adapter)):
            raise ValueError(
                "nothing to write: give --csv FILE, --json FILE, --tensorboard FOLDER, --onnx FILE, "
                "--torchscript FILE or --adapter FOLDER"
            )
        _check_folders({"--csv": csv, "--json": json, "--onnx": onnx, "--torchscript": torchscript})
        if onnx is not None or torchscript is not None:
            _export_model(_only(paths, "--onnx and --torchscript"), onnx, torchscript, app, input_shape)
        if adapter is not None:
            _export_adapter(_only(paths, "--adapter"), adapter, app, max_rank)
        if not any((csv, json, tensorboard)):
            return
        results = load_results(paths)
        if csv is not None:
            typer.echo(f"{csv}: {write_csv(results, csv)} rows")
        if json is not None:
            typer.echo(f"{json}: {write_collected(results, json)} runs")
        if tensorboard is not None:
            typer.echo(f"{tensorboard}: {write_tensorboard(results, tensorboard)} logs")


def _check_folders(files: Mapping[str, Path | None]) -> None:
    """Raise ValueError for a file in a folder that does not exist, before anything is written."""
    for option, file in files.items():
        if file is not None and not file.expanduser().parent.is_dir():
            raise ValueError(f"{option} must be a file in a folder that exists, got {str(file)!r}")


def _only(paths: list[Path], options: str) -> Path:
    from hedgerow.sim.runs.folder import CONFIG

    if len(paths) != 1 or not (paths[0] / CONFIG).is_file():
        raise ValueError(f"{options} must be used with the folder of one run")
    return paths[0]


def _export_adapter(run: Path, folder: Path, app: str | None, max_rank: int) -> None:
    from hedgerow.sim.cli.adapters import write_adapter

    made = write_adapter(run, folder, app, max_rank)
    ranks = [len(a) for a, _ in made.factors.values()]
    whole = f", and {', '.join(sorted(made.whole))} in full" if made.whole else ""
    typer.echo(f"{folder}: {len(ranks)} layers of rank {min(ranks)} to {max(ranks)}{whole}")


def _export_model(
    run: Path, onnx: Path | None, torchscript: Path | None, app: str | None, shape: str | None
) -> None:
    if shape is not None and not all(part.strip().isdigit() and int(part) for part in shape.split(",")):
        raise ValueError(f"--input-shape must be integers >= 1 with commas between them, got {shape!r}")

    from hedgerow.sim.cli.shipping import shipped, write_onnx, write_torchscript

    model = shipped(run, app, None if shape is None else [int(part) for part in shape.split(",")])
    if onnx is not None:
        typer.echo(f"{onnx}: the model; {write_onnx(model, onnx)}: its preprocessing")
    if torchscript is not None:
        typer.echo(f"{torchscript}: the model; {write_torchscript(model, torchscript)}: its preprocessing")


def write_csv(results: Results, path: str | Path) -> int:
    """Write ``Results.frame`` as CSV; return the number of rows."""
    from hedgerow.sim.runs.durable import write_file
    from hedgerow.wire.printable import cell

    path, frame = Path(path), results.frame()
    # Labels and names come from files and nodes.
    frame = frame.map(lambda value: cell(value) if isinstance(value, str) else value)
    write_file(path, lambda file: file.write(frame.to_csv(index=False).encode()))
    return len(frame)


def write_tensorboard(results: Results, folder: str | Path) -> int:
    """Write the runs' logs to ``<folder>/<label>/seed-<seed>``; return their number.

    The logs are those of ``--track tensorboard`` (see ``trackers.scalars_of``), with the run's real seconds
    as time.

    Raises
    ------
    ValueError
        If TensorBoard is not installed, or a log already exists.
    """
    from hedgerow.sim.runs.trackers import TensorBoardLog, check_trackers, scalars_of
    from hedgerow.wire.printable import file_name

    check_trackers(["tensorboard"], "--tensorboard:")
    for run in results.runs:
        place = Path(folder) / file_name(run.label) / f"seed-{run.seed}"
        if place.exists():
            raise ValueError(f"--tensorboard must be a folder without {place}, which already exists")
        walls = run.costs("wall-seconds")
        with closing(TensorBoardLog(place)) as log:
            for record, wall in zip(run.rounds, walls, strict=True):
                log.on_round_end(record["round"], scalars_of(record), wall)
    return len(results.runs)
