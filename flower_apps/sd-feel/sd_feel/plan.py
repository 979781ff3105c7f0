"""``hedgerow plan sd-feel``: schedules ranked by the paper's bound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

if TYPE_CHECKING:
    from hedgerow.strategies.sd_feel.theory import SchedulePlan

# The values if neither an option nor a run gives them.
_DEFAULTS = {
    "learning-rate": 0.005,
    "smoothness": 1.0,
    "sigma2": 1.0,
    "kappa2": 0.25,
    "delta": 1.0,
}
# Their names in a probed round of a run.
_MEASURED = {"smoothness": "curvature", "sigma2": "gradient-variance", "kappa2": "gradient-dissimilarity"}


def plan(
    target: Annotated[float, typer.Option(help="Mean squared gradient norm to reach.")] = 0.1,
    learning_rate: Annotated[
        float | None, typer.Option(help="Step size eta. Default: the run's, else 0.005.")
    ] = None,
    smoothness: Annotated[
        float | None, typer.Option(help="L of Assumption 1. Default: the run's, else 1.")
    ] = None,
    sigma2: Annotated[
        float | None,
        typer.Option(help="Variance bound of a mini-batch gradient. Default: the run's, else 1."),
    ] = None,
    kappa2: Annotated[
        float | None,
        typer.Option(help="Squared bound on gradient dissimilarity. Default: the run's, else 0.25."),
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="F(w_0) - F*. Default: the run's first loss, else 1.")
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help='Folder of a run with -c "probe-rounds=5", whose measurements, clients, graph, model and '
            "seconds replace missing values.",
        ),
    ] = None,
    num_clients: Annotated[
        int | None,
        typer.Option(min=1, max=2**53, help="Number of equal clients. Default: the run's, else 50."),
    ] = None,
    num_servers: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Number of equal edge servers. Default: the run's, else 10."),
    ] = None,
    topology: Annotated[
        str | None, typer.Option(help="The servers' graph. Default: the run's, else ring.")
    ] = None,
    num_params: Annotated[
        int | None,
        typer.Option(min=1, max=2**53, help="Parameters of the model. Default: the run's, else 21840."),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Number of schedules to show.")] = 10,
) -> Iterator[Table | str]:
    """Rank SD-FEEL's schedules (tau1, tau2, alpha) by the simulated seconds to a target of bound (15).

    The bound depends on tau1 and tau2 only by their product, so it always prefers tau2 = 1: a property of the
    formulas, not evidence about training. Latencies use the paper's rates, and its compute or the run's.
    A run's measurements hold only along its path, so they are lower bounds of the constants.
    """
    from hedgerow.sim.runs.folder import read_config, read_rounds
    from hedgerow.strategies.sd_feel import theory
    from hedgerow.strategies.topology import as_graph, mixing
    from hedgerow.wire.clock import Compute

    given = {
        "learning-rate": learning_rate,
        "smoothness": smoothness,
        "sigma2": sigma2,
        "kappa2": kappa2,
        "delta": delta,
    }
    run: Mapping[str, Any] = {} if from_run is None else read_config(from_run)["run"]
    probes, told = ([{}], {}) if from_run is None else _told(from_run, read_rounds(from_run), run)
    probed = probes[-1]
    known = {
        key: (value, "given", "") if value is not None else told.get(key, (_DEFAULTS[key], "assumed", ""))
        for key, value in given.items()
    }
    if {num_servers, topology} == {None} and "zeta" in probed:
        zeta, graph = float(probed["zeta"]), f"{run.get('topology')} of {run.get('num-servers')}"
    else:
        servers = num_servers or int(run.get("num-servers", 10))
        name = topology or str(run.get("topology", "ring"))
        zeta, graph = mixing(as_graph(name, servers), [1.0] * servers).zeta, f"{name} of {servers}"
    sum_m2 = 1 / (num_clients or 50)
    if num_clients is None and "sum-m2" in probed:
        sum_m2 = float(probed["sum-m2"])
    compute = theory.preset("paper-text").compute
    if "iteration-seconds" in probed:
        compute = Compute(float(probed["iteration-seconds"]), 1.0)
    parameters = num_params or int(probed.get("parameters", 21_840))
    eta, L, variance, dissimilarity, gap = (float(known[key][0]) for key in given)
    problem = theory.ProblemConstants(gap, L, variance, dissimilarity, sum_m2)
    system = theory.System(parameters, compute)
    found = theory.plans(target, problem, system, eta=eta, zeta=zeta)
    if from_run is not None:
        inputs = Table("input", "value", "source", "how", title="Inputs of the plan", title_justify="left")
        for key, (value, source, how) in known.items():
            inputs.add_row(key, f"{value:.6g}", source, how)
        for key, value in (
            ("sum of m_i^2", sum_m2),
            ("seconds of an iteration", compute.seconds()),
            ("parameters", parameters),
        ):
            inputs.add_row(key, f"{value:.6g}", "the run's", "")
        if "gradient2" in probed:
            inputs.add_row("||grad F(u)||^2", f"{probed['gradient2']:.6g}", "measured", "in the last probe")
        yield inputs
    title = f"{graph}: zeta = {zeta:.6f}; {len(found)} schedules reach {target:g}"
    table = Table("tau1", "tau2", "alpha", "iterations K", "simulated s", title=title)
    for one in found[:rows]:
        table.add_row(str(one.tau1), str(one.tau2), str(one.alpha), str(one.K), f"{one.seconds:.3f}")
    yield table
    if from_run is not None:
        yield _command(found, problem, eta)


def _told(
    folder: Path, rounds: Sequence[Mapping[str, Any]], run: Mapping[str, Any]
) -> tuple[list[Mapping[str, Any]], dict[str, tuple[float, str, str]]]:
    """Return a run's probes, and its measured and set values by option: value, source and how."""
    probes = [record["train"] for record in rounds if "gradient-dissimilarity" in record.get("train", {})]
    first = [
        record["central"]["loss"]
        for record in rounds
        if record["round"] == 0 and "loss" in record.get("central", {})
    ]
    if not probes or not first:
        lacks = "probes" if not probes else "central 'loss' of round 0"
        raise ValueError(
            f'--from-run must be a run of sd-feel with -c "probe-rounds=5", and {folder} has no {lacks}'
        )
    how = f"largest of {len(probes)} probed rounds, a lower bound"
    told = {
        key: (max(float(one[name]) for one in probes), "measured", how) for key, name in _MEASURED.items()
    }
    told["delta"] = (float(first[0]), "assumed", "at most the loss of round 0, if no loss is negative")
    if "learning-rate" in run:
        told["learning-rate"] = (float(run["learning-rate"]), "the run's", "")
    return probes, told


def _command(found: Sequence[SchedulePlan], problem: Any, eta: float) -> str:
    """Return the command for the cheapest schedule, or why there is none."""
    from hedgerow.sim.runs.kinds import MAX_ROUNDS
    from hedgerow.strategies.sd_feel.theory import eta_max

    if not found:
        least = eta * problem.smoothness * problem.sigma2 * problem.sum_m2
        return (
            f"# No schedule: with eta = {eta:g} bound (15) stays above {least:.3g} whatever the schedule, "
            f"and (14) admits eta up to {eta_max(problem.smoothness, 0.0):.3g}. Use a larger --target, or a "
            "smaller --learning-rate, which needs more iterations."
        )
    best = found[0]
    said = f"tau1={best.tau1} tau2={best.tau2} alpha={best.alpha} learning-rate={eta:g} iterations={best.K}"
    more = f"# {best.K} iterations: the app runs up to {MAX_ROUNDS}.\n" if best.K > MAX_ROUNDS else ""
    return f"{more}hedgerow run sd-feel -c '{said}'"
