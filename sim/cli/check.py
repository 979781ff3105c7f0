"""``hedgerow check``: which strategies an app's ClientApp can serve, found by sending it their messages.

Each app of the suite has the rows of its own method (``Hooks.check``), and so may the checked app.
"""

from __future__ import annotations

import contextlib
import io
import logging
import traceback
from collections.abc import Iterable, Iterator
from typing import Annotated

import typer

from hedgerow.sim.cli.checked import NODES, CheckedNodes, errors_in, one_line
from hedgerow.sim.cli.options import AppPath, RunConfig, bad_options
from hedgerow.sim.runs.hooks import Verdict


def check(
    app_path: AppPath,
    run_config: RunConfig = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=NODES, help="Number of nodes. Default: the app's own, else 2."),
    ] = None,
    node_config: Annotated[
        list[str] | None,
        typer.Option(
            help="'key=value key=value' of each node's config, next to partition-id and num-partitions."
        ),
    ] = None,
) -> None:
    """Report which of the suite's strategies an app's ClientApp can serve, and what it lacks for the others.

    The app's server runs until its first train message, which has the model. Then two nodes, or more if the
    method needs them, get the messages of each strategy's first rounds, and their replies are checked.

    Exits with 0 if the app ran, 1 if it failed, 2 on bad options.
    """
    from hedgerow.sim.runs.app import find_app, load_app
    from hedgerow.sim.runs.first_train import NoTrainError, first_train
    from hedgerow.sim.runs.hooks import all_hooks
    from hedgerow.sim.runs.plan import parse_overrides, plan_run

    with bad_options():
        spec = find_app(app_path)
        plan = plan_run(spec, run_config or [], num_nodes=nodes)
        config = parse_overrides(node_config or [], {})
        checks = [hooks.check for hooks in all_hooks(spec.folder) if hooks.check is not None]
        if plan.num_nodes < NODES:
            raise ValueError(f"--nodes must be at least {NODES} for a check, got {plan.num_nodes}")
    with _silence():
        try:
            app = load_app(spec.folder)
            first = first_train(app, plan, config)
        except NoTrainError as error:
            _fail(str(error), error)
        except Exception as error:
            _fail(f"the app {spec.name} raised {type(error).__name__}: {error} ({_place(error)})", error)
        if reasons := errors_in(first.replies, all_of_them=True):
            _fail(
                f"every node that its own server sent {first.message.metadata.message_type!r} failed: "
                f"{reasons[0]}"
            )
        checked = CheckedNodes(app, plan, config, first)
        verdicts = [_introductions(checked), *(verdict for check in checks for verdict in check(checked))]
    size = sum(array.numpy().size for array in first.arrays.values())
    typer.echo(
        f"{spec.name}: {plan.num_nodes} nodes, a model of {len(first.arrays)} arrays and {size:,} values, as "
        "its own server sends it\n"
    )
    # A copy of one of the suite's apps has the same rows.
    typer.echo(_table({verdict.strategy: verdict for verdict in verdicts}.values()))


def _fail(text: str, error: Exception | None = None) -> None:
    typer.echo(f"Check failed: {text}", err=True)
    raise typer.Exit(1) from error


def _place(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}, line {last.lineno}"


def _table(verdicts: Iterable[Verdict]) -> str:
    rows = [
        ("Strategy", "Serves", "What it lacks", ""),
        *((v.strategy, v.serves, v.lacks, v.mend) for v in verdicts),
    ]
    first, second = (max(len(row[column]) for row in rows) + 2 for column in (0, 1))
    lines = []
    for strategy, serves, lacks, mend in rows:
        lines.append(f"{strategy:{first}}{serves:{second}}{lacks}".rstrip())
        if mend:
            lines.append(f"{'':{first + second}}-> {mend}")
    return "\n".join(lines)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppress the app's output and Flower's logs, because errors are results here."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def _introductions(nodes: CheckedNodes) -> Verdict:
    from hedgerow.strategies import Roster

    name = "(introductions)"
    with nodes.grid() as (grid, _):
        try:
            roster = Roster.gather(grid, NODES, 60.0)
        except Exception as error:
            return Verdict(
                name, "no", one_line(str(error)), "hedgerow run --nodes N, or partition-id in --node-config"
            )
    if roster.introduced:
        return Verdict(name, "yes")
    return Verdict(
        name,
        "no",
        "partition ids are ranks of random node ids, different in every run; clusters= is refused",
        "app = ClientApp(mods=[introduce])  # from hedgerow.clients import introduce",
    )
