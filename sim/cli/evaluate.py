"""``hedgerow evaluate``: evaluates the mean model of several edge servers."""

from __future__ import annotations

import typer

from hedgerow.sim.cli.options import Paths, bad_options

__all__ = ["evaluate"]


def evaluate(paths: Paths) -> None:
    """Evaluate u, the mean model of edge servers with direct links, after their runs.

    RUN is each server's run folder, or one folder that contains them. `report`, `table` and `plot` then
    show u.
    """
    from hedgerow.sim.runs.joined import parts_beneath, parts_of_runs
    from hedgerow.sim.runs.together import evaluate_together

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
