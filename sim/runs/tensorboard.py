"""Runs as TensorBoard logs: one log a run, each metric over the rounds."""

from pathlib import Path

from hedgerow.sim.runs.results import SOURCES, Results

__all__ = ["write_tensorboard"]


def write_tensorboard(results: Results, folder: str | Path) -> int:
    """Write the runs' logs under ``folder``, ``<label>/seed-<seed>`` each; return how many.

    A scalar's tag is ``<source>/<metric>`` (``central/loss``), its step the round, its time the run's
    real seconds. Beside the metrics stand the costs, ``cost/bits`` and so on.

    Raises
    ------
    ValueError
        If TensorBoard is not installed, or a log is already there.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
    except ImportError as error:
        raise ValueError(
            f"--tensorboard needs TensorBoard ({error}); install it with: pip install 'hedgerow[tensorboard]'"
        ) from error
    for run in results.runs:
        log = Path(folder) / run.label / f"seed-{run.seed}"
        if log.exists():
            raise ValueError(f"--tensorboard: {log} is already there; valid is a folder without it")
        walls = run.costs("wall-seconds")
        with SummaryWriter(str(log)) as writer:
            for record, wall in zip(run.rounds, walls, strict=True):
                for name in ("bits", "payload_bytes", "sim_seconds"):
                    writer.add_scalar(f"cost/{name}", record[name], record["round"], walltime=wall)
                for source in SOURCES:
                    for metric, value in record.get(source, {}).items():
                        writer.add_scalar(f"{source}/{metric}", value, record["round"], walltime=wall)
    return len(results.runs)
