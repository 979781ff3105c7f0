"""``hedgerow plan sd-feel``: schedules ranked by the paper's bound."""

from __future__ import annotations

from typing import Annotated

import typer

from hedgerow.sim.cli.options import bad_options, check_ordinary

__all__ = ["plan_sd_feel"]


def plan_sd_feel(
    target: Annotated[float, typer.Option(help="Mean squared gradient norm to reach.")] = 0.1,
    learning_rate: Annotated[float, typer.Option(help="Step size eta.")] = 0.005,
    smoothness: Annotated[float, typer.Option(help="L of Assumption 1.")] = 1.0,
    sigma2: Annotated[float, typer.Option(help="Variance bound of a mini-batch gradient.")] = 1.0,
    kappa2: Annotated[float, typer.Option(help="Squared bound on gradient dissimilarity.")] = 0.25,
    delta: Annotated[float, typer.Option(help="F(w_0) - F*.")] = 1.0,
    num_clients: Annotated[int, typer.Option(min=1, max=2**53, help="Clients, taken as equal.")] = 50,
    num_servers: Annotated[int, typer.Option(min=1, max=1024, help="Edge servers, taken as equal.")] = 10,
    topology: Annotated[str, typer.Option(help="The servers' graph.")] = "ring",
    num_params: Annotated[int, typer.Option(min=1, max=2**53, help="Parameters of the model.")] = 21_840,
    rows: Annotated[int, typer.Option(min=1, help="How many schedules to show.")] = 10,
) -> None:
    """Rank SD-FEEL's schedules (tau1, tau2, alpha) by the simulated seconds to a target of bound (15).

    The bound sees tau1 and tau2 only by their product, so it always prefers tau2 = 1: a property of the
    formulas, not evidence about training. Latencies use the paper's rates and compute.
    """
    from rich.console import Console
    from rich.table import Table

    from hedgerow.strategies.sd_feel import theory
    from hedgerow.strategies.topology import as_graph, mixing

    with bad_options():
        check_ordinary(
            target=target,
            learning_rate=learning_rate,
            smoothness=smoothness,
            sigma2=sigma2,
            kappa2=kappa2,
            delta=delta,
        )
        zeta = mixing(as_graph(topology, num_servers), [1.0] * num_servers).zeta
        problem = theory.Problem(delta, smoothness, sigma2, kappa2, 1 / num_clients)
        system = theory.System(num_params, theory.preset("paper-text").compute)
        found = theory.plans(target, problem, system, eta=learning_rate, zeta=zeta)
    title = f"{topology} of {num_servers}: zeta = {zeta:.6f}; {len(found)} schedules reach {target:g}"
    table = Table("tau1", "tau2", "alpha", "iterations K", "simulated s", title=title)
    for plan in found[:rows]:
        table.add_row(str(plan.tau1), str(plan.tau2), str(plan.alpha), str(plan.K), f"{plan.seconds:.3f}")
    Console().print(table)
