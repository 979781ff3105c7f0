"""Export runs: every measured value as a row of a CSV file, or one TensorBoard log per run."""

from contextlib import closing
from pathlib import Path

from hedgerow.sim.runs.durable import write_file
from hedgerow.sim.runs.results import Results
from hedgerow.sim.runs.trackers import TensorBoardLog, check_trackers, scalars_of
from hedgerow.wire.printable import cell, file_name

__all__ = ["write_csv", "write_tensorboard"]


def write_csv(results: Results, path: str | Path) -> int:
    """Write ``Results.frame`` as CSV; return the number of rows."""
    path, frame = Path(path), results.frame()
    path.parent.mkdir(parents=True, exist_ok=True)
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
