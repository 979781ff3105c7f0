"""The command line: ``hedgerow run <app>``, and the instruments for many runs.

Each command imports what it needs when it runs, so that ``hedgerow --help`` answers at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from hedgerow.sim.runs.results import Results
    from hedgerow.sim.runs.sweep import Job, Outcome
    from hedgerow.strategies.hsgd.costs import Sizes
    from hedgerow.strategies.hsgd.estimates import Estimates as HSGDEstimates
    from hedgerow.strategies.hsgd.theory import Plan as HSGDPlan
    from hedgerow.strategies.similarity_free.planner import Estimates, Plan

__all__ = ["Engine", "app"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Engine(StrEnum):
    """Who carries the messages."""

    INPROCESS = "inprocess"
    FLOWER = "flower"


@app.callback()
def main() -> None:
    """Federated-learning methods as Flower apps."""
    # A Typer app with one command would swallow the command's name.


@app.command()
def run(
    app_path: Annotated[
        str, typer.Argument(metavar="APP", help="Folder of a Flower App, or a module inside one.")
    ],
    run_config: Annotated[
        list[str] | None,
        typer.Option("--run-config", "-c", help="'key=value key=value', or a .toml file. Repeatable."),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Number of nodes. Default: what the app says, else 2."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:N or auto: the app's run-config key 'device'.")
    ] = None,
    engine: Annotated[
        Engine, typer.Option(help="inprocess: here, without Ray. flower: through 'flwr run'.")
    ] = Engine.INPROCESS,
    resume: Annotated[
        str | None,
        typer.Option(help="Folder of a run that was stopped: its settings, from its last checkpoint on."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no log below warnings.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Serialise every message, as a deployment does (inprocess).")
    ] = False,
    client_cpus: Annotated[
        int, typer.Option(min=1, help="CPUs that Ray reserves for a client (flower).")
    ] = 1,
    client_gpus: Annotated[
        float, typer.Option(min=0.0, help="Share of a GPU that Ray reserves for a client (flower).")
    ] = 0.0,
) -> None:
    """Run an app on this machine. Exits with 0 if the run completed, 1 if it failed, 2 on bad options."""
    from hedgerow.sim.runs.checkpoint import CheckpointError  # noqa: PLC0415
    from hedgerow.sim.runs.launch import (  # noqa: PLC0415
        find_app,
        flower_run,
        load_app,
        plan_run,
        resumed_config,
        run_app,
    )
    from hedgerow.sim.runs.recorder import RunFolderError  # noqa: PLC0415
    from hedgerow.sim.runs.settings import SettingsError  # noqa: PLC0415
    from hedgerow.strategies import RosterError, TooFewRepliesError  # noqa: PLC0415

    try:
        if strict and engine is Engine.FLOWER:
            raise ValueError("--strict: Flower's engine has no strict mode; use --engine inprocess")
        spec = find_app(app_path)
        overrides = [*(resumed_config(spec, resume) if resume else []), *(run_config or [])]
        plan = plan_run(
            spec, [*overrides, *(["quiet=true"] if quiet else [])], num_nodes=nodes, device=device
        )
        if plan.faults is not None and engine is Engine.FLOWER:
            raise ValueError("fault-*: Flower's engine plays no faults; use --engine inprocess")
    except (OSError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error

    if engine is Engine.FLOWER:
        raise typer.Exit(flower_run(spec, plan, client_cpus=client_cpus, client_gpus=client_gpus))
    if quiet:
        logging.getLogger("flwr").setLevel(logging.WARNING)
    try:
        run_app(load_app(spec.folder), plan, strict=strict)
    except (SettingsError, RunFolderError, CheckpointError, FileNotFoundError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    except (RosterError, TooFewRepliesError) as error:
        typer.echo(f"Run failed: {error}", err=True)
        raise typer.Exit(1) from error


deploy = typer.Typer(no_args_is_help=True, help="Run an app on SuperNodes instead of simulating them.")
app.add_typer(deploy, name="deploy")


@deploy.command("local")
def deploy_local(
    app_path: Annotated[
        str, typer.Argument(metavar="APP", help="Folder of a Flower App, or a module inside one.")
    ],
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Number of SuperNodes. Default: what the app says, else 2.")
    ] = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="Encrypt, and let in only SuperNodes whose key is registered.")
    ] = False,
    run_config: Annotated[
        list[str] | None,
        typer.Option("--run-config", "-c", help="'key=value key=value', or a .toml file. Repeatable."),
    ] = None,
    node_config: Annotated[
        list[str] | None,
        typer.Option(help="'key=value ...' for every node, '0-3: key=value' for some. Repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the run folder goes: the key 'output-dir'.")
    ] = None,
    keep_logs: Annotated[
        bool, typer.Option("--keep-logs", help="Leave the programs' logs beside the run folder.")
    ] = False,
) -> None:
    """Run an app on a SuperLink and SuperNodes started here for it, and stop them.

    Exits with 0 if the run completed, 1 if it failed or a program did not start, 2 on bad options, 130 if
    interrupted, 143 if terminated.
    """
    from hedgerow.sim.deploy.launcher import deploy_local as start  # noqa: PLC0415
    from hedgerow.sim.deploy.launcher import node_configs  # noqa: PLC0415
    from hedgerow.sim.deploy.processes import StartError  # noqa: PLC0415
    from hedgerow.sim.runs.launch import find_app, plan_run, toml_value  # noqa: PLC0415

    with _bad_options():
        spec = find_app(app_path)
        overrides = [*(run_config or []), *([f"output-dir={toml_value(str(out))}"] if out else [])]
        plan = plan_run(spec, overrides, num_nodes=nodes)
        if plan.faults is not None:
            raise ValueError("fault-*: a deployment plays no faults; use 'run' with --engine inprocess")
        configs = node_configs(node_config or [], plan.num_nodes)
    try:
        code = start(spec, plan, tls=tls, node_config=configs, keep_logs=keep_logs)
    except StartError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    except (KeyboardInterrupt, SystemExit) as stop:
        typer.echo("Interrupted; all that was started is stopped", err=True)
        raise typer.Exit(130 if isinstance(stop, KeyboardInterrupt) else 143) from None
    raise typer.Exit(code)


@deploy.command("keys")
def deploy_keys(
    folder: Annotated[Path, typer.Argument(help="Where they are written.")],
    nodes: Annotated[int, typer.Option(min=0, help="Number of SuperNodes.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Address or name of the SuperLink. Repeatable. Default: loopback only."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="How long the certificates are valid.")] = 365,
) -> None:
    """Make a CA, the SuperLink's certificate and a key pair for each SuperNode, for machines you own."""
    from hedgerow.sim.deploy.certificates import LOOPBACK, make_credentials  # noqa: PLC0415

    with _bad_options():
        made = make_credentials(folder, nodes, hosts=[*LOOPBACK, *(host or [])], days=days)
    typer.echo(f"SuperLink: {made.ca} {made.server_certificate} {made.server_key}")
    for key in made.nodes:
        typer.echo(f"SuperNode: {made.ca} {key.private}; register {key.public}")


@app.command()
def data(
    data_dir: Annotated[
        str | None, typer.Option(help="Folder to look in. Default: the variable HEDGEROW_DATA_DIR.")
    ] = None,
) -> None:
    """List the known data sets: where each was found, or how to get it."""
    from hedgerow.tasks import catalogue  # noqa: PLC0415

    for entry in catalogue(data_dir):
        typer.echo(f"{entry.name}: {entry.description} ({entry.size})")
        where = f"found in {entry.found_at}" if entry.found_at else f"not here: {entry.how_to_get}"
        typer.echo(f"    {where}")


@contextmanager
def _bad_options() -> Iterator[None]:
    """Turn what the library says of bad input into a message and exit code 2."""
    try:
        yield
    except (OSError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error


@app.command()
def sweep(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.toml", help="What to run: see hedgerow.sim.runs.sweep_file.")
    ],
    run_config: Annotated[
        list[str] | None,
        typer.Option("--run-config", "-c", help="Changes for every run, as in 'run'. Repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The sweep's folder. Default: runs/<name of FILE>.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at once. Default: one for each core.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and list the runs; start none.")] = False,
) -> None:
    """Run variants x seeds of a sweep file, each in its own folder; finished ones are kept.

    Exits with 0 if all runs are there, 1 if one failed, 2 on bad options, 130 if interrupted, 143 if
    terminated.
    """
    from hedgerow.sim.deploy.processes import cores  # noqa: PLC0415
    from hedgerow.sim.runs.sweep import plan_sweep, run_sweep  # noqa: PLC0415
    from hedgerow.sim.runs.sweep_file import read_sweep  # noqa: PLC0415

    with _bad_options():
        asked = read_sweep(file)
        folder = (out or Path("runs") / file.stem).expanduser().resolve()
        plan = plan_sweep(asked, folder, run_config or [])
    if dry_run:
        for job in plan:
            typer.echo(f"{'kept' if job.kept else 'run '}  {job.name}  ->  {job.folder}")
        return
    at_once = jobs or cores()
    progress = _SweepProgress(plan, at_once)
    try:
        outcomes = run_sweep(asked, plan, folder, jobs=at_once, on_end=progress)
    except (KeyboardInterrupt, SystemExit) as stop:
        typer.echo(f"Interrupted; start it again to go on in {folder}", err=True)
        raise typer.Exit(130 if isinstance(stop, KeyboardInterrupt) else 143) from None
    typer.echo(f"Sweep folder: {folder}")
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    for outcome in failed:
        typer.echo(f"Failed: {outcome.job.name}: {outcome.error}", err=True)
    if failed:
        raise typer.Exit(1)


class _SweepProgress:
    """A line for each run that ended, with the time that the others will take at the same pace."""

    def __init__(self, plan: list[Job], at_once: int) -> None:
        self.total = len(plan)
        self.at_once = at_once
        self.ended = 0
        self.seconds: list[float] = []

    def __call__(self, outcome: Outcome) -> None:
        self.ended += 1
        line = f"[{self.ended}/{self.total}] {outcome.job.name}: {outcome.status}"
        if outcome.status != "kept":
            self.seconds.append(outcome.seconds)
            pace = sum(self.seconds) / len(self.seconds) / self.at_once
            line += f" after {outcome.seconds:.0f} s; about {pace * (self.total - self.ended):.0f} s left"
        typer.echo(line)


Paths = Annotated[list[Path], typer.Argument(metavar="RUN...|SWEEP", help="Folders of runs or sweeps.")]
Costs = Annotated[
    list[str] | None,
    typer.Option(
        "--x",
        help="rounds, iterations, sim-seconds, bits, payload-bytes or wall-seconds. Repeatable. "
        "Default: what the sweep says, else rounds.",
    ),
]
Metrics = Annotated[
    list[str] | None,
    typer.Option(
        "--y",
        help="A recorded metric: loss, accuracy, test-loss, consensus-error, ... Repeatable. "
        "Default: what the sweep says, else loss.",
    ),
]


@app.command()
def plot(
    paths: Paths,
    x: Costs = None,
    y: Metrics = None,
    out: Annotated[
        Path | None, typer.Option(help="FILE.png and FILE.svg are written. Default: in the sweep's folder.")
    ] = None,
    log_y: Annotated[bool, typer.Option("--log-y", help="Draw y on a logarithmic scale.")] = False,
    by: Annotated[
        str | None, typer.Option(metavar="KEY", help="A column of panels for each value of this setting.")
    ] = None,
) -> None:
    """Draw each variant's mean and band over its seeds: a panel for each pair of x and y."""
    from hedgerow.sim.runs.plot import default_path, draw, save  # noqa: PLC0415

    with _bad_options():
        results = _load(paths)
        xs, ys = x or results.xs, y or results.ys
        figure = draw(results, xs, ys, log_y=log_y, by=results.by if by is None else by)
        written = save(figure, out or default_path(results, xs, ys))
    for path in written:
        typer.echo(path)


@app.command()
def table(
    paths: Paths,
    x: Costs = None,
    y: Metrics = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="X=VALUE", help="Compare at this cost. Default: the largest that all runs spent."
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="Y=VALUE", help="Compare what it cost to reach this."),
    ] = None,
) -> None:
    """Compare variants in markdown: values at a budget, cost to a target, paired differences over seeds."""
    from hedgerow.sim.runs.compare import NOTE, budget_table, common_budget, target_table  # noqa: PLC0415

    with _bad_options():
        results = _load(paths)
        budgets = dict([_pair("--budget", budget)]) if budget else {}
        xs = x or list(budgets) or results.xs
        parts = [
            budget_table(results, a, b, budgets[a] if a in budgets else common_budget(results, a))
            for a in xs
            for b in y or results.ys
        ]
        if target:
            metric, value = _pair("--target", target)
            parts += [target_table(results, a, metric, value) for a in xs]
    typer.echo(
        "\n\n".join([f"## {results.title}", *parts, NOTE, f"Realism: {results.realism or 'not stated'}."])
    )


@app.command()
def export(
    paths: Paths,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Every measured value as a row.")
    ] = None,
    tensorboard: Annotated[
        Path | None,
        typer.Option("--tensorboard", metavar="FOLDER", help="A TensorBoard log a run (an optional extra)."),
    ] = None,
) -> None:
    """Write runs for other tools: a CSV file, or TensorBoard logs."""
    from hedgerow.sim.runs.results import write_csv  # noqa: PLC0415
    from hedgerow.sim.runs.tensorboard import write_tensorboard  # noqa: PLC0415

    with _bad_options():
        if csv is None and tensorboard is None:
            raise ValueError("nothing to write; valid is --csv FILE, --tensorboard FOLDER or both")
        results = _load(paths)
        if csv is not None:
            typer.echo(f"{csv}: {write_csv(results, csv)} rows")
        if tensorboard is not None:
            typer.echo(f"{tensorboard}: {write_tensorboard(results, tensorboard)} logs")


def _load(paths: list[Path]) -> Results:
    from hedgerow.sim.runs.results import load  # noqa: PLC0415

    results = load(paths)
    for warning in results.warnings:
        typer.echo(f"Warning: {warning}", err=True)
    return results


def _pair(option: str, text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name.strip(), float(value)
    except ValueError:
        raise ValueError(f"{option} {text!r}; valid is name=number") from None


plans = typer.Typer(no_args_is_help=True, help="Plan a run by a paper's formulas, before it starts.")
app.add_typer(plans, name="plan")


@plans.command("sd-feel")
def plan_sd_feel(
    target: Annotated[float, typer.Option(help="Mean squared gradient norm to reach.")] = 0.1,
    learning_rate: Annotated[float, typer.Option(help="Step size eta.")] = 0.005,
    smoothness: Annotated[float, typer.Option(help="L of Assumption 1.")] = 1.0,
    sigma2: Annotated[float, typer.Option(help="Variance bound of a mini-batch gradient.")] = 1.0,
    kappa2: Annotated[float, typer.Option(help="Squared bound on gradient dissimilarity.")] = 0.25,
    delta: Annotated[float, typer.Option(help="F(w_0) - F*.")] = 1.0,
    num_clients: Annotated[int, typer.Option(min=1, help="Clients, taken as equal.")] = 50,
    num_servers: Annotated[int, typer.Option(min=1, help="Edge servers, taken as equal.")] = 10,
    topology: Annotated[str, typer.Option(help="The servers' graph.")] = "ring",
    num_params: Annotated[int, typer.Option(min=1, help="Parameters of the model.")] = 21_840,
    rows: Annotated[int, typer.Option(min=1, help="How many schedules to show.")] = 10,
) -> None:
    """Rank SD-FEEL's schedules (tau1, tau2, alpha) by the simulated seconds to a target of bound (15).

    The bound sees tau1 and tau2 only by their product, so it always prefers tau2 = 1: a property of the
    formulas, not evidence about training. Latencies use the paper's rates and compute.
    """
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from hedgerow.strategies.sd_feel import theory  # noqa: PLC0415
    from hedgerow.strategies.topology import as_graph, mixing  # noqa: PLC0415

    try:
        zeta = mixing(as_graph(topology, num_servers), [1.0] * num_servers).zeta
        problem = theory.Problem(delta, smoothness, sigma2, kappa2, 1 / num_clients)
        system = theory.System(num_params, theory.preset("paper-text").compute)
        found = theory.plans(target, problem, system, eta=learning_rate, zeta=zeta)
    except ValueError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    title = f"{topology} of {num_servers}: zeta = {zeta:.6f}; {len(found)} schedules reach {target:g}"
    table = Table("tau1", "tau2", "alpha", "iterations K", "simulated s", title=title)
    for plan in found[:rows]:
        table.add_row(str(plan.tau1), str(plan.tau2), str(plan.alpha), str(plan.K), f"{plan.seconds:.3f}")
    Console().print(table)


@plans.command("similarity-free")
def plan_similarity_free(
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
            metavar="RUN", help='Folder of a run with -c "probe-rounds=5": measures what is not given.'
        ),
    ] = None,
    local_iters: Annotated[int, typer.Option(help="Local iterations T of the FedAvg family.")] = 1,
    num_rounds: Annotated[int, typer.Option(help="Rounds K that the bounds are for.")] = 400,
    epsilon: Annotated[float, typer.Option(help="Squared gradient norm to reach.")] = 0.1,
    nu: Annotated[float, typer.Option(help="Exponent of the diminishing schedule.")] = 0.75,
    compressor_contraction: Annotated[
        float | None, typer.Option(help="Contraction of the compressor, in (0, 1]. Default: 1, none.")
    ] = None,
    topk: Annotated[
        float | None,
        typer.Option(help="Fraction that top-k keeps, in (0, 1]: contraction and bits; needs --num-params."),
    ] = None,
    num_params: Annotated[
        int | None, typer.Option(min=1, help="Trainable parameters: gives uplink bits.")
    ] = None,
    num_nodes: Annotated[int, typer.Option(help="Nodes; all take part in every round.")] = 10,
    printed: Annotated[
        bool,
        typer.Option("--printed", help="The paper's constants and Theorem 3 as printed, errors and all."),
    ] = False,
) -> None:
    """Say what is guaranteed for FedAvg and FedProx, with error feedback or without, for each schedule.

    Nothing asks how similar the nodes' data are: no step size depends on it. Steps are those of a round;
    a local step of the FedAvg family is T times smaller.
    """
    from rich.console import Console  # noqa: PLC0415

    from hedgerow.sim.runs.recorder import read_rounds  # noqa: PLC0415
    from hedgerow.strategies.similarity_free import planner  # noqa: PLC0415
    from hedgerow.strategies.similarity_free.theory import Mode  # noqa: PLC0415

    with _bad_options():
        contraction, message_bits = _compression(compressor_contraction, topk, num_params)
        if from_run is not None:
            if initial_loss is not None:
                raise ValueError("--initial-loss with --from-run; valid is one of them: the run has losses")
            known = planner.estimates_from_rounds(
                read_rounds(from_run),
                L=smoothness,
                sigma2=variance,
                delta_inf=delta_inf,
                V0=initial_gap,
                R=max_gap,
            )
        elif smoothness is None or variance is None:
            raise ValueError("--smoothness and --variance are needed, or --from-run, which measures them")
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
    console = Console()
    console.print(_input_table(known, guessed_loss=from_run is None and initial_loss is None))
    console.print(_constants_table(rows, f"Constants, {whose}; contraction {contraction:g}"))
    console.print(_guarantees_table(rows, num_rounds, epsilon))


# The MIMIC-III networks of the paper's experiments: |theta_0|, |theta_1|, |theta_2|, e_1, e_2, |A|.
_HSGD_SIZES = (33, 3_584, 3_584, 16, 16, 29)


@plans.command("hsgd")
def plan_hsgd(
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
            metavar="RUN", help='Folder of a run with -c "adaptive=observe": gives what is not given.'
        ),
    ] = None,
    app_path: Annotated[
        str | None, typer.Option("--app", help="Folder of the app: sizes, T and eta of its settings.")
    ] = None,
    run_config: Annotated[
        list[str] | None,
        typer.Option("--run-config", "-c", help="Changes of the app's settings. Repeatable."),
    ] = None,
    head: Annotated[int, typer.Option(help="Scalars of the head.")] = _HSGD_SIZES[0],
    hospital: Annotated[int, typer.Option(help="Scalars of the hospital's encoder.")] = _HSGD_SIZES[1],
    device: Annotated[int, typer.Option(help="Scalars of the device's encoder.")] = _HSGD_SIZES[2],
    hospital_encoding: Annotated[int, typer.Option(help="e_1.")] = _HSGD_SIZES[3],
    device_encoding: Annotated[int, typer.Option(help="e_2.")] = _HSGD_SIZES[4],
    batch: Annotated[int, typer.Option(help="Devices of a group in a local interval.")] = _HSGD_SIZES[5],
    num_groups: Annotated[int, typer.Option(min=1, help="Groups M, taken as equal.")] = 10,
    iterations: Annotated[int | None, typer.Option(help="T. Default: the app's, else 4000.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="eta. Default: the app's, else 0.01.")] = None,
    target: Annotated[float, typer.Option(help="Mean squared gradient norm to reach.")] = 0.5,
    eta_power: Annotated[
        int, typer.Option(help="Q* with eta^3, the root of (20), or with eta^2, as printed.")
    ] = 3,
    compute_seconds: Annotated[float, typer.Option(help="t_c of one iteration.")] = 0.0,
    rows: Annotated[int, typer.Option(min=1, help="How many pairs (P, Q) to show.")] = 10,
) -> None:
    """Choose HSGD's intervals P and Q and its learning rate by the bound (17) and the cost (19).

    The bound is for groups that are alike, and its proof has gaps: take it for a guide. Without sizes or an
    app, the sizes are those of the paper's MIMIC-III networks.
    """
    from rich.console import Console  # noqa: PLC0415

    from hedgerow.sim.runs.recorder import read_rounds  # noqa: PLC0415
    from hedgerow.strategies.hsgd import costs, theory  # noqa: PLC0415
    from hedgerow.strategies.hsgd.estimates import Estimates  # noqa: PLC0415

    with _bad_options():
        groups = [costs.Sizes(head, hospital, device, hospital_encoding, device_encoding, batch)] * num_groups
        settings: dict[str, Any] = {"iterations": 4_000, "learning-rate": 0.01}
        if app_path is not None:
            groups, settings = _app_of_hsgd(app_path, run_config or [])
        T = settings["iterations"] if iterations is None else iterations
        eta = settings["learning-rate"] if learning_rate is None else learning_rate
        told = {} if from_run is None else _told_constants(from_run, read_rounds(from_run))
        given = {"rho": rho, "delta": delta, "loss-gap": loss_gap, "gradient2": gradient2}
        inputs = {key: told.get(key) if value is None else value for key, value in given.items()}
        lacking = [f"--{key}" for key in ("rho", "delta", "loss-gap") if inputs[key] is None]
        if lacking:
            raise ValueError(f"{', '.join(lacking)} needed, or --from-run, which measures them")
        known = Estimates(
            float(inputs["loss-gap"] or 0.0), float(inputs["rho"] or 0.0), float(inputs["delta"] or 0.0)
        )
        if eta_power not in (2, 3):
            raise ValueError(f"--eta-power {eta_power}; valid is 3 or 2")
        console = Console()
        sources = {key: "given" if given[key] is not None else "measured" for key in given}
        console.print(_hsgd_inputs(inputs, sources, T, eta, target))
        console.print(_hsgd_intervals(known, T, eta, target))
        found = theory.plans(target, known, groups, eta=eta, T=T, compute_seconds=compute_seconds)
        console.print(
            _hsgd_strategies(
                known, groups, T, eta, 3 if eta_power == 3 else 2, inputs["gradient2"], compute_seconds
            )
        )
        if found:
            console.print(_hsgd_pairs(found[:rows], groups, T, target))
        else:
            console.print(
                f"Infeasible: no P and Q with eta = {eta:g} <= 1 / (8 P rho) reach {target:g} in {T} "
                "iterations. Take a larger target, a larger T or another eta."
            )


def _app_of_hsgd(path: str, run_config: list[str]) -> tuple[list[Sizes], dict[str, Any]]:
    """Return each group's sizes, which the app knows, and its settings."""
    import importlib  # noqa: PLC0415

    from hedgerow.sim.runs.launch import load_app, plan_run  # noqa: PLC0415

    loaded = load_app(path)
    package = loaded.spec.components["serverapp"].partition(".")[0]
    settings = importlib.import_module(f"{package}.settings")
    if not hasattr(settings, "group_sizes"):
        raise ValueError(f"--app {path}: {loaded.name} has no groups; valid is the app hsgd")
    values = settings.read(plan_run(loaded.spec, run_config).run_config)
    return settings.group_sizes(values), values


def _told_constants(folder: Path, rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Return the constants of a run's first estimate."""
    for record in rounds:
        if "rho" in record["train"]:
            train = record["train"]
            return {
                "rho": train["rho"],
                "delta": train["delta-g"],
                "loss-gap": train["F0"],
                "gradient2": train["gradient2"],
            }
    raise ValueError(f'{folder} has no estimates; a run with -c "adaptive=observe" makes them')


def _hsgd_inputs(
    inputs: dict[str, float | None], sources: dict[str, str], T: int, eta: float, target: float
) -> Table:
    from rich.table import Table  # noqa: PLC0415

    table = Table("input", "value", "source", title="What the plan rests on", title_justify="left")
    for key, value in inputs.items():
        if value is not None:
            table.add_row(key, f"{value:.6g}", sources[key])
    for key, value in (("T", T), ("eta", eta), ("target", target)):
        table.add_row(key, f"{value:g}", "set")
    return table


def _hsgd_intervals(known: HSGDEstimates, T: int, eta: float, target: float) -> Table:
    """Say of some P what eta may be, and which Q reaches the target (Strategy 1)."""
    from rich.table import Table  # noqa: PLC0415

    from hedgerow.strategies.hsgd import theory  # noqa: PLC0415

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


def _hsgd_strategies(
    known: HSGDEstimates,
    groups: list[Sizes],
    T: int,
    eta: float,
    eta_power: Literal[2, 3],
    gradient2: float | None,
    compute_seconds: float,
) -> Table:
    """Say what P = Q Strategy 2 chooses, what that costs, and the eta of Strategy 3 there."""
    from rich.table import Table  # noqa: PLC0415

    from hedgerow.strategies.hsgd import theory  # noqa: PLC0415

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
    paper, wire, seconds = _hsgd_cost(groups, P, P, T, compute_seconds)
    table.add_row("cost (19), MB", f"{paper / 1e6:.6g}")
    table.add_row("sent on all links, MB", f"{wire / 1e6:.6g}")
    table.add_row("seconds a round", f"{seconds:.6g}")
    return table


def _hsgd_pairs(found: list[HSGDPlan], groups: list[Sizes], T: int, target: float) -> Table:
    from rich.table import Table  # noqa: PLC0415

    columns = ("P", "Q", "bound (17)", "cost (19), MB", "all links, MB", "simulated s", "iterations")
    title = f"Pairs that reach {target:g}, the cheapest by (19) first"
    table = Table(*columns, title=title, title_justify="left")
    for one in found:
        _, wire, _ = _hsgd_cost(groups, one.P, one.Q, T, 0.0)
        numbers = (one.bound, one.bytes / 1e6, wire / 1e6, one.seconds)
        table.add_row(str(one.P), str(one.Q), *(f"{number:.6g}" for number in numbers), str(one.iterations))
    return table


def _hsgd_cost(
    groups: list[Sizes], P: int, Q: int, T: int, compute_seconds: float
) -> tuple[float, int, float]:
    """Return bytes by (19) and on all links, over all groups, and the slowest group's seconds a round."""
    from hedgerow.strategies.hsgd import costs  # noqa: PLC0415
    from hedgerow.strategies.hsgd.theory import iterations  # noqa: PLC0415

    paper = sum(costs.paper_bytes(sizes, P=P, Q=Q, T=T) for sizes in groups)
    wire = sum(sum(costs.traffic(sizes, P=P, Q=Q, T=iterations(T, P)).values()) for sizes in groups)
    seconds = max(
        costs.round_seconds(costs.round_parts(sizes), P=P, Q=Q, compute_seconds=compute_seconds)
        for sizes in groups
    )
    return paper, wire, seconds


def _compression(
    contraction: float | None, topk: float | None, num_params: int | None
) -> tuple[float, int | None]:
    """Return the contraction and the bits of a compressed message, None where they are not known."""
    if topk is None:
        if contraction is None or contraction == 1:
            return 1.0, None if num_params is None else 32 * num_params
        return contraction, None
    if contraction is not None:
        raise ValueError("--topk with --compressor-contraction; valid is one of them")
    if num_params is None:
        raise ValueError(f"--topk {topk:g} without --num-params; valid is both")
    from hedgerow.wire.compress import TopK  # noqa: PLC0415

    compressor = TopK(fraction=topk)
    return compressor.contraction(num_params), compressor.bits(num_params)


def _input_table(known: Estimates, *, guessed_loss: bool) -> Table:
    from rich.table import Table  # noqa: PLC0415

    table = Table("input", "value", "source", "how", title="What the plan rests on", title_justify="left")
    for field in fields(known):
        one = getattr(known, field.name)
        table.add_row(field.name, f"{one.value:.6g}", str(one.source), one.rule)
    if guessed_loss and {"delta_inf", "V0"} & known.assumed().keys():
        table.add_row(
            "f(x^0)", f"{math.log(10):.6g}", "assumed", "cross-entropy of a guess among ten classes"
        )
    return table


def _constants_table(rows: list[Plan], title: str) -> Table:
    from rich.table import Table  # noqa: PLC0415

    table = Table(
        "algorithm", "max step", "max local step", "b1", "b2", "b3", title=title, title_justify="left"
    )
    for row in {row.algorithm: row for row in rows}.values():
        c = row.constants
        numbers = (row.max_step, row.max_local_step, c.b1, c.b2, c.b3)
        table.add_row(str(row.algorithm), *(f"{number:.6g}" for number in numbers))
    return table


def _guarantees_table(rows: list[Plan], num_rounds: int, epsilon: float) -> Table:
    from rich.table import Column, Table  # noqa: PLC0415

    names = (Column(name, no_wrap=True) for name in ("algorithm", "schedule"))
    columns = ("first step", "bound", "theorem", "rounds", "uplink")
    title = f"Squared gradient norm: bounds at K = {num_rounds}; rounds and uplink bits to {epsilon:g}"
    table = Table(*names, *columns, title=title, title_justify="left")
    for row in rows:
        numbers = (row.schedule(0), row.bound, row.theorem, row.rounds)
        bits = "" if row.uplink_bits is None else f"{row.uplink_bits:.3g}"
        table.add_row(str(row.algorithm), row.schedule.name, *(f"{number:.3g}" for number in numbers), bits)
    return table


if __name__ == "__main__":
    app()
