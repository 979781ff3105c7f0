"""``hedgerow plan hsgd``: intervals and learning rate by the paper's bound and cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

if TYPE_CHECKING:
    from hedgerow.strategies.hsgd.theory import Estimates, IntervalPlan, Sizes

# The MIMIC-III networks of the paper's experiments: |theta_0|, |theta_1|, |theta_2|, e_1, e_2, |A|.
_SIZES = (33, 3_584, 3_584, 16, 16, 29)


def plan(
    rho: Annotated[
        float | None, typer.Option(help="Lipschitz constant of the gradients. Needed without --from-run.")
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(help="Root of a stochastic gradient's variance bound. Needed without --from-run."),
    ] = None,
    loss_gap: Annotated[
        float | None,
        typer.Option(
            help="F(theta^0) - E[F(theta^T)], the paper's second term 0. Needed without --from-run."
        ),
    ] = None,
    gradient2: Annotated[
        float | None, typer.Option(help="||grad F||^2 at the start, for Strategy 3's learning rate.")
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help='Folder of a run with -c "adaptive=observe", whose measurements replace missing values.',
        ),
    ] = None,
    app_path: Annotated[
        str | None, typer.Option("--app", help="Folder of the app: sizes, T and eta of its settings.")
    ] = None,
    run_config: Annotated[
        list[str] | None,
        typer.Option("--run-config", "-c", help="Changes of the app's settings. Repeatable."),
    ] = None,
    head: Annotated[int, typer.Option(max=2**53, help="Scalars of the head.")] = _SIZES[0],
    hospital: Annotated[int, typer.Option(max=2**53, help="Scalars of the hospital's encoder.")] = _SIZES[1],
    device: Annotated[int, typer.Option(max=2**53, help="Scalars of the device's encoder.")] = _SIZES[2],
    hospital_encoding: Annotated[int, typer.Option(max=2**53, help="e_1.")] = _SIZES[3],
    device_encoding: Annotated[int, typer.Option(max=2**53, help="e_2.")] = _SIZES[4],
    batch: Annotated[int, typer.Option(max=2**53, help="Devices of a group in a local interval.")] = _SIZES[
        5
    ],
    num_groups: Annotated[int, typer.Option(min=1, max=2**20, help="Number M of equal groups.")] = 10,
    iterations: Annotated[
        int | None, typer.Option(max=2**53, help="T. Default: the app's, else 4000.")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="eta. Default: the app's, else 0.01.")] = None,
    target: Annotated[float, typer.Option(help="Mean squared gradient norm to reach.")] = 0.5,
    eta_power: Annotated[
        int, typer.Option(help="Q* with eta^3, the root of (20), or with eta^2, as printed.")
    ] = 3,
    compute_seconds: Annotated[float, typer.Option(help="t_c of one iteration.")] = 0.0,
    rows: Annotated[int, typer.Option(min=1, help="Number of pairs (P, Q) to show.")] = 10,
) -> Iterator[Table | str]:
    """Choose HSGD's intervals P and Q and its learning rate by the bound (17) and the cost (19).

    The bound is for equal groups, and its proof has gaps: use it as a guide. The default sizes are those of
    the paper's MIMIC-III networks.
    """
    from hedgerow.sim.runs.folder import read_rounds
    from hedgerow.strategies.hsgd import theory
    from hedgerow.strategies.hsgd.theory import Estimates

    groups = [theory.Sizes(head, hospital, device, hospital_encoding, device_encoding, batch)] * num_groups
    settings: dict[str, Any] = {"iterations": 4_000, "learning-rate": 0.01}
    if app_path is not None:
        groups, settings = _of_app(app_path, run_config or [])
    T = settings["iterations"] if iterations is None else iterations
    eta = settings["learning-rate"] if learning_rate is None else learning_rate
    measured = {} if from_run is None else _measured_constants(from_run, read_rounds(from_run))
    given = {"rho": rho, "delta": delta, "loss-gap": loss_gap, "gradient2": gradient2}
    inputs = {key: measured.get(key) if value is None else value for key, value in given.items()}
    lacking = [f"--{key}" for key in ("rho", "delta", "loss-gap") if inputs[key] is None]
    if lacking:
        raise ValueError(f"{', '.join(lacking)} or --from-run, which measures them, must be given")
    known = Estimates(
        float(inputs["loss-gap"] or 0.0), float(inputs["rho"] or 0.0), float(inputs["delta"] or 0.0)
    )
    if eta_power not in (2, 3):
        raise ValueError(f"--eta-power must be 3 or 2, got {eta_power}")
    power: Literal[2, 3] = 3 if eta_power == 3 else 2
    sources = {key: "given" if given[key] is not None else "measured" for key in given}
    yield _inputs(inputs, sources, T, eta, target)
    yield _intervals(known, T, eta, target)
    yield _strategies(known, groups, T, eta, power, inputs["gradient2"], compute_seconds)
    if found := theory.plans(target, known, groups, eta=eta, T=T, compute_seconds=compute_seconds):
        yield _pairs(found[:rows], groups, T, target)
    else:
        yield (
            f"Infeasible: no P and Q with eta = {eta:g} <= 1 / (8 P rho) reach {target:g} in {T} iterations. "
            "Use a larger target, a larger T or another eta."
        )


def _of_app(path: str, run_config: list[str]) -> tuple[list[Sizes], dict[str, Any]]:
    """Return each group's sizes, which the app knows, and its settings."""
    from hedgerow.sim.runs.app import find_app, settings_module
    from hedgerow.sim.runs.plan import plan_run

    spec = find_app(path)
    settings = settings_module(spec)
    if not hasattr(settings, "group_sizes"):
        raise ValueError(f"--app must be hsgd, got {path}: {spec.name} has no groups")
    values = settings.read(plan_run(spec, run_config).run_config)
    return settings.group_sizes(values), values.run_config


def _measured_constants(folder: Path, rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Return the constants of a run's first estimate."""
    names = {"rho": "rho", "delta": "delta-g", "loss-gap": "F0", "gradient2": "gradient2"}
    for record in rounds:
        if "rho" in record["train"]:
            return {key: record["train"][name] for key, name in names.items()}
    raise ValueError(f'{folder} has no estimates; a run with -c "adaptive=observe" makes them')


def _inputs(
    inputs: dict[str, float | None], sources: dict[str, str], T: int, eta: float, target: float
) -> Table:
    table = Table("input", "value", "source", title="Inputs of the plan", title_justify="left")
    for key, value in inputs.items():
        if value is not None:
            table.add_row(key, f"{value:.6g}", sources[key])
    for key, value in (("T", T), ("eta", eta), ("target", target)):
        table.add_row(key, f"{value:g}", "set")
    return table


def _intervals(known: Estimates, T: int, eta: float, target: float) -> Table:
    """List the largest eta and the largest Q that reaches the target for some P (Strategy 1)."""
    from hedgerow.strategies.hsgd import theory

    table = Table("P", "largest eta", "Lambda_min", "largest Q", title="Strategy 1", title_justify="left")
    for P in (1, 2, 4, 8, 16, 32):
        least = theory.lambda_min(known, P=P, eta=eta, T=T, target=target)
        Q = theory.choose_local_interval(known, P=P, eta=eta, T=T, target=target)
        cap = theory.eta_max(known.rho, P)
        over = "" if theory.interval_max(known.rho, eta) >= P else ", eta too large"
        reached = "infeasible" if Q is None else str(Q)
        table.add_row(
            str(P), f"{cap:.6g}", "infeasible" if math.isinf(least) else f"{least:.6g}", reached + over
        )
    return table


def _strategies(
    known: Estimates,
    groups: list[Sizes],
    T: int,
    eta: float,
    eta_power: Literal[2, 3],
    gradient2: float | None,
    compute_seconds: float,
) -> Table:
    """List P = Q of Strategy 2, its cost, and eta of Strategy 3."""
    from hedgerow.strategies.hsgd import theory

    table = Table("Strategy 2 and 3", "value", title_justify="left")
    star = theory.q_star(known, eta=eta, T=T, eta_power=eta_power)
    table.add_row(f"Q* with eta^{eta_power}", f"{star:.6g}")
    largest = theory.interval_max(known.rho, eta)
    table.add_row("largest P that eta admits", str(largest))
    if largest < 1:
        table.add_row("P = Q", f"infeasible: eta is above {theory.eta_max(known.rho, 1):.6g}")
        return table
    P = theory.choose_same_interval(known, eta=eta, T=T, eta_power=eta_power)
    table.add_row("P = Q", str(P))
    table.add_row("bound (17)", f"{theory.bound(known, P=P, Q=P, eta=eta, T=T):.6g}")
    if gradient2 is not None:
        table.add_row("eta* at P = Q", f"{theory.choose_eta(known, P=P, Q=P, gradient2=gradient2):.6g}")
    paper, wire, seconds = _cost(groups, P, P, T, compute_seconds)
    table.add_row("cost (19), MB", f"{paper / 1e6:.6g}")
    table.add_row("sent on all links, MB", f"{wire / 1e6:.6g}")
    table.add_row("seconds a round", f"{seconds:.6g}")
    return table


def _pairs(found: list[IntervalPlan], groups: list[Sizes], T: int, target: float) -> Table:
    columns = ("P", "Q", "bound (17)", "cost (19), MB", "all links, MB", "simulated s", "iterations")
    title = f"Pairs that reach {target:g}, the cheapest by (19) first"
    table = Table(*columns, title=title, title_justify="left")
    for one in found:
        _, wire, _ = _cost(groups, one.P, one.Q, T, 0.0)
        numbers = (one.bound, one.bytes / 1e6, wire / 1e6, one.seconds)
        table.add_row(str(one.P), str(one.Q), *(f"{number:.6g}" for number in numbers), str(one.iterations))
    return table


def _cost(groups: list[Sizes], P: int, Q: int, T: int, compute_seconds: float) -> tuple[float, int, float]:
    """Return all groups' bytes by (19) and on all links, and the slowest group's seconds per round."""
    from hedgerow.strategies.hsgd import theory
    from hedgerow.strategies.hsgd.theory import iterations

    paper = sum(theory.paper_bytes(sizes, P=P, Q=Q, T=T) for sizes in groups)
    wire = sum(sum(theory.traffic(sizes, P=P, Q=Q, T=iterations(T, P)).values()) for sizes in groups)
    seconds = max(
        theory.round_seconds(theory.round_parts(sizes), P=P, Q=Q, compute_seconds=compute_seconds)
        for sizes in groups
    )
    return paper, wire, seconds
