"""``hedgerow plan similarity-free``: the paper's guarantees for each algorithm and schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

if TYPE_CHECKING:
    from hedgerow.strategies.similarity_free.planner import Guarantee, ProblemEstimates


def plan(
    smoothness: Annotated[
        float | None, typer.Option(help="L of every node's loss. Needed without --from-run.")
    ] = None,
    variance: Annotated[
        float | None,
        typer.Option(help="Variance bound of a mini-batch gradient. Needed without --from-run."),
    ] = None,
    delta_inf: Annotated[
        float | None, typer.Option(help="Mean of f^inf - f_i^inf. Default: bounded by a loss.")
    ] = None,
    initial_gap: Annotated[
        float | None, typer.Option(help="f(x^0) - f^inf. Default: bounded by the first loss.")
    ] = None,
    max_gap: Annotated[
        float | None,
        typer.Option(help="Bound on every V_k, for step-decay. Default: the largest loss, else V_0."),
    ] = None,
    initial_loss: Annotated[
        float | None,
        typer.Option(help="f(x^0), if no loss is negative. Default: ln 10, a guess among ten classes."),
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help='Folder of a run with -c "probe-rounds=5", whose measurements, nodes, local iterations, '
            "compressor and model replace missing values.",
        ),
    ] = None,
    local_iters: Annotated[
        int | None,
        typer.Option(max=2**20, help="Local iterations T of the FedAvg family. Default: the run's, else 1."),
    ] = None,
    num_rounds: Annotated[int, typer.Option(max=10**7, help="Number of rounds K for the bounds.")] = 400,
    epsilon: Annotated[float, typer.Option(help="Squared gradient norm to reach.")] = 0.1,
    nu: Annotated[float, typer.Option(help="Exponent of the diminishing schedule.")] = 0.75,
    compressor_contraction: Annotated[
        float | None,
        typer.Option(help="Contraction of the compressor, in (0, 1]. Default: the run's, else 1."),
    ] = None,
    topk: Annotated[
        float | None,
        typer.Option(help="Fraction that top-k keeps, in (0, 1]: contraction and bits; needs --num-params."),
    ] = None,
    num_params: Annotated[
        int | None, typer.Option(min=1, max=2**53, help="Trainable parameters: gives uplink bits.")
    ] = None,
    num_nodes: Annotated[
        int | None,
        typer.Option(max=2**53, help="Nodes, all active in every round. Default: the run's, else 10."),
    ] = None,
    printed: Annotated[
        bool,
        typer.Option("--printed", help="Use the paper's constants and Theorem 3 as printed, with errors."),
    ] = False,
) -> Iterator[Table | str]:
    """List the guarantees of FedAvg and FedProx, with and without error feedback, for each schedule.

    No step size depends on the similarity of the nodes' data. Steps are those of a round; a local step of the
    FedAvg family is T times smaller.
    """
    from hedgerow.sim.runs.folder import read_config, read_rounds
    from hedgerow.strategies.similarity_free import planner
    from hedgerow.strategies.similarity_free.theory import Mode

    if from_run is not None and initial_loss is not None:
        raise ValueError("--initial-loss must not be used with --from-run, which has losses")
    run = {} if from_run is None else read_config(from_run)["run"]
    if from_run is not None and num_params is None:
        num_params = _parameters(from_run)
    local_iters = run.get("local-iters", 1) if local_iters is None else local_iters
    num_nodes = run.get("num-clients", 10) if num_nodes is None else num_nodes
    own = None if compressor_contraction or topk else run.get("compressor")
    contraction, message_bits = _compression(compressor_contraction, topk, num_params, own)
    if from_run is not None:
        known = planner.estimates_from_rounds(
            read_rounds(from_run),
            L=smoothness,
            sigma2=variance,
            delta_inf=delta_inf,
            V0=initial_gap,
            R=max_gap,
        )
    elif smoothness is None or variance is None:
        raise ValueError("--smoothness and --variance, or --from-run, which measures them, must be given")
    else:
        known = planner.estimates(
            smoothness,
            variance,
            initial_loss=math.log(10) if initial_loss is None else initial_loss,
            delta_inf=delta_inf,
            V0=initial_gap,
            R=max_gap,
        )
    rows = planner.plan(
        known,
        num_rounds=num_rounds,
        epsilon=epsilon,
        local_iters=local_iters,
        contraction=contraction,
        nu=nu,
        num_nodes=num_nodes,
        num_params=num_params,
        message_bits=message_bits,
        mode=Mode.PRINTED if printed else Mode.CORRECTED,
    )
    whose = "printed" if printed else "corrected"
    yield _input_table(known, guessed_loss=from_run is None and initial_loss is None)
    yield _constants_table(rows, f"Constants, {whose}; contraction {contraction:g}")
    yield _guarantees_table(rows, num_rounds, epsilon)
    yield from _commands(rows, local_iters, str(own or (f"topk({topk})" if topk else "")))


def _parameters(run: Path) -> int | None:
    """Return the number of parameters of a run's final model; None if there is none."""
    from hedgerow.sim.runs.checkpoint import NPZ, read_model

    if not (run / NPZ).is_file():
        return None
    return sum(array.size for array in read_model(run).values() if array.dtype.kind == "f")


def _commands(rows: list[Guarantee], local_iters: int, compressor: str) -> list[str]:
    """Return, for each algorithm, the command for the schedule with the fewest rounds to epsilon."""
    from hedgerow.sim.runs.kinds import MAX_ROUNDS
    from hedgerow.strategies.schedules import Diminishing, Fixed, StepDecay, theory_stage_len

    out = []
    for algorithm in dict.fromkeys(row.algorithm for row in rows):
        row = min((row for row in rows if row.algorithm is algorithm), key=lambda row: row.rounds)
        if row.rounds > MAX_ROUNDS:
            out.append(
                f"# {algorithm}: at least {row.rounds:.3g} rounds, and the app runs up to {MAX_ROUNDS}; a "
                "larger --epsilon or less variance, by larger batches, needs fewer"
            )
            continue
        rounds, first = int(row.rounds), row.first_step
        match row.schedule:
            case Fixed():
                step = f"fixed-c={first * math.sqrt(rounds):.6g}"
            case Diminishing(nu=nu):
                step = f"diminishing-c={first:.6g} diminishing-nu={nu}"
            case StepDecay(decay_factor=factor):
                stage = theory_stage_len(max(rounds, 2), factor)
                step = f"decay-start={first:.6g} decay-factor={factor} decay-stage={stage}"
        name = row.schedule.name
        said = f"algorithm={algorithm} schedule={name} schedule-drives=round {step} num-rounds={rounds}"
        if not algorithm.proximal:
            said += f" local-iters={local_iters}"
        if algorithm.error_feedback and compressor:
            said += f" compressor={compressor}"
        out.append(f"hedgerow run similarity-free -c '{said}'")
    return out


def _compression(
    contraction: float | None, topk: float | None, num_params: int | None, own: str | None
) -> tuple[float, int | None]:
    """Return the contraction, and the bits of a compressed message or None if they are unknown.

    ``own`` is the compressor of the run with the measurements.
    """
    if own is not None:
        from hedgerow.wire.compress import parse_compressor

        if num_params is None:
            raise ValueError(
                f"--from-run needs --num-params too: the run has compressor = {own!r} and no model.npz from "
                "which to count the parameters"
            )
        its = parse_compressor(own)
        return its.contraction(num_params), its.bits(num_params)
    if topk is None:
        if contraction is None or contraction == 1:
            return 1.0, None if num_params is None else 32 * num_params
        return contraction, None
    if contraction is not None:
        raise ValueError("--topk must not be used with --compressor-contraction")
    if num_params is None:
        raise ValueError(f"--topk needs --num-params too, got {topk:g} alone")
    from hedgerow.wire.compress import TopK

    compressor = TopK(fraction=topk)
    return compressor.contraction(num_params), compressor.bits(num_params)


def _input_table(known: ProblemEstimates, *, guessed_loss: bool) -> Table:
    table = Table("input", "value", "source", "how", title="Inputs of the plan", title_justify="left")
    for field in fields(known):
        one = getattr(known, field.name)
        table.add_row(field.name, f"{one.value:.6g}", str(one.source), one.rule)
    if guessed_loss and {"delta_inf", "V0"} & known.assumed().keys():
        table.add_row(
            "f(x^0)", f"{math.log(10):.6g}", "assumed", "cross-entropy of a guess among ten classes"
        )
    return table


def _constants_table(rows: list[Guarantee], title: str) -> Table:
    table = Table(
        "algorithm", "max step", "max local step", "b1", "b2", "b3", title=title, title_justify="left"
    )
    for row in {row.algorithm: row for row in rows}.values():
        c = row.constants
        numbers = (row.max_step, row.max_local_step, c.b1, c.b2, c.b3)
        table.add_row(str(row.algorithm), *(f"{number:.6g}" for number in numbers))
    return table


def _guarantees_table(rows: list[Guarantee], num_rounds: int, epsilon: float) -> Table:
    names = (Column(name, no_wrap=True) for name in ("algorithm", "schedule"))
    columns = ("first step", "bound", "theorem", "rounds", "uplink")
    title = f"Squared gradient norm: bounds at K = {num_rounds}; rounds and uplink bits to {epsilon:g}"
    table = Table(*names, *columns, title=title, title_justify="left")
    for row in rows:
        numbers = (row.schedule(0), row.bound, row.theorem, row.rounds)
        bits = "" if row.uplink_bits is None else f"{row.uplink_bits:.3g}"
        table.add_row(str(row.algorithm), row.schedule.name, *(f"{number:.3g}" for number in numbers), bits)
    return table
